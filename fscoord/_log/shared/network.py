"""`NetworkAccess`: coherent reads and writes of a log that several hosts share.

On NFS, a read through the cache is not coherent: while a process on this host has the log open for writing, the read
may return zeros instead of data, with the right length. Neither open(2) nor fstat(2) nor the mount options ``noac`` and
``actimeo=0`` prevent that (measured with a kernel NFS server and two clients). A direct read (O_DIRECT) is one request
to the server, and returns new data. A read under a lock also returns new data, because taking the lock empties the
cache. A read under a lock costs four requests.

Every append is sent to the server before the lock is released. Only fsync(2) reports an append that did not arrive:
ENOSPC and EDQUOT may come late (write(2)), and EIO is the error after a lock was lost (fcntl(2), "Lost locks").

A soft lock is a symbolic link, which the kernel does not treat as a lock. So taking a soft lock does not empty the NFS
client's cache. An append through the cache may begin in a page that was cached long ago, and the client sends the whole
page to the server. Such an append can overwrite records of other hosts with zeros. So no byte of a log with a soft lock
goes through the cache (`SymlinkLockAccess`). NFS refuses O_DIRECT together with O_APPEND (fs/nfs/file.c,
``nfs_check_flags``). The writer therefore asks the server for the end of the file, and writes there. The end does not
move meanwhile, because this process holds the soft lock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fscoord._log.access import FileAppender
from fscoord._log.files import safe_files
from fscoord._log.files.opening import read_header
from fscoord._log.format.header import Header
from fscoord._log.format.record import MalformedRecord
from fscoord._log.handle import HandleState, NeedsLock, open_root, reopen
from fscoord._log.liveness.own_session import Liveness
from fscoord._log.locking.log_lock import BASE, OFD, SOFT
from fscoord._log.mount import DIRECT, LOCKED, Mount
from fscoord._log.recovery import APPLYING, SERVER_STATE
from fscoord._log.replay.cursor import CHUNK, Cursor
from fscoord._log.replay.large_values import SERVER_FORGOT, TRIES
from fscoord._log.shared.extent import Extent, FileId, joined
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import CorruptLogError, StoreUnavailableError

PATH_CHECK_S: Final = 1.0
"""How often the path is compared with the file, in seconds. Each comparison is a request to the server."""

SETTLE_S: Final = 1.2
"""How long a cache may be stale, in seconds, on a file system where taking a lock does not empty the cache. The
time-outs of FUSE and GlusterFS are one second by default."""

BLOCKED_S: Final = 5.0
"""A read that took longer than this, in seconds, is repeated under the lock. The server may have evicted a host while
the read was blocked. The client may then have answered the read from the file size before the eviction."""

PAUSE_S: Final = 0.01
OPEN_TRIES: Final = 60
OPEN_PAUSE_S: Final = 0.1
"""`OPEN_TRIES`: how many times to try to open a log that the server reports as stale (ESTALE). `OPEN_PAUSE_S`: the
longest pause between two attempts, in seconds. All attempts together take five seconds."""
PIECE: Final = 1 << 18
"""The size of one WRITE request in bytes if the mount options don't state it."""

REVALIDATE_BYTE: Final = BASE - 1
"""The offset of a byte that no process locks exclusively. A shared lock on this byte is granted at once, and empties
the cache."""


class NetworkAccess:
    """The `Access` to a log to which other hosts also write.

    Attributes:
        coherence: how the log is read: ``"direct"`` (by O_DIRECT) or ``"locked"`` (under a lock). If the mount refuses
            direct reads, ``"direct"`` becomes ``"locked"``.
        piece: how many bytes one request to the server can write.
        recent: the last bytes that this handle has read or written, to share with other processes on this host; None
            if there are none.
    """

    def __init__(self, handle: HandleState, cursor: Cursor, liveness: Liveness, mount: Mount, coherence: str) -> None:
        wsize = mount.option("wsize") or ""
        self.piece = int(wsize) if wsize.isdecimal() and int(wsize) else PIECE
        self._handle = handle
        self._cursor = cursor
        self._liveness = liveness
        self._mount = mount
        self._append = FileAppender(handle).write
        self.recent: Extent | None = None
        self._stale_in_a_row = self._stale_generation = 0
        self._has_written = False  # whether this handle has written since it last took the lock
        self._seen = (0, 0)  # the furthest generation and offset that this handle has read or written
        self._read_at = 0.0  # when the last read(2) returned (monotonic, in seconds)
        handle.is_shared = handle.may_lie = True
        self._set_mode(coherence)

    def _set_mode(self, coherence: str) -> None:
        self.coherence = coherence
        is_direct = coherence == DIRECT
        handle = self._handle
        # On Lustre a read that meets an eviction may return the bytes before it.
        handle.short_read_is_end = is_direct and not self._mount.is_lustre
        handle.read_flags = system.os.O_RDONLY | (system.O_DIRECT if is_direct else 0)
        # With O_RDWR, an append costs one more request, because the kernel reads the page in which the append begins.
        # Reads under a lock need O_RDWR all the same: a shared lock needs a descriptor that is open for reading.
        handle.write_flags = system.os.O_APPEND | (system.os.O_WRONLY if is_direct else system.os.O_RDWR)

    @property
    def _file(self) -> FileId:
        return *self._handle.file_identity, self._handle.header.generation

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self, call: Callable[[], None]) -> None:
        """Open the log by calling `call`. Repeat the call after ESTALE (the NFS client has cached an old name)."""
        handle = self._handle
        for attempt in range(1, OPEN_TRIES + 1):
            try:
                call()
                return
            except OSError as error:
                raise_if_foreign(error)
                if not self._refuses_direct(error) and (error.errno != system.errno.ESTALE or attempt == OPEN_TRIES):
                    raise
            for fd in list(handle.owned_fds):
                handle.close_fd(fd)
            system.time.sleep(min(PAUSE_S * (attempt - 1), OPEN_PAUSE_S))

    def reopened(self) -> None:
        """Make the next read check the path, because the name may belong to another file on the server by now."""
        self._handle.path_checked_at = 0.0

    def _refuses_direct(self, error: OSError) -> bool:
        """Return whether `error` shows that the mount refuses direct reads. If so, change to reads under a lock."""
        if self.coherence != DIRECT or error.errno != system.errno.EINVAL:
            return False
        self._set_mode(LOCKED)
        return True

    # -- reading without the log's lock ----------------------------------------------------------------------------

    def read(self, locked: bool = False) -> bool:
        if locked:
            return self.catch_up()
        now = system.time.monotonic()
        if now - self._handle.path_checked_at > PATH_CHECK_S:
            self._check_descriptors()
            self._check_path(now)
        is_sealed = self._read_unlocked()
        if not is_sealed and self._mount.is_lustre and self._differs_in_size():  # or another host has just appended
            is_sealed = self._read_unlocked()
            if not is_sealed and self._differs_in_size():
                raise NeedsLock
        if not is_sealed and (self._is_behind() or self._read_at - now > BLOCKED_S):
            raise NeedsLock
        return is_sealed

    def _read_unlocked(self) -> bool:
        kind = self._handle.lock.kind
        if self.coherence == DIRECT:
            return self._read_on(locked=False)
        if kind == OFD:
            return self._read_under_revalidation()
        if kind == SOFT:
            self._bypass_cache()
            return self._read_on(locked=False)
        raise NeedsLock

    def _read_on(self, *, locked: bool) -> bool:
        data = system.os.read(self._handle.reader_fd, CHUNK)
        self._read_at = system.time.monotonic()
        return bool(data) and self._advance(data, locked=locked)

    def _differs_in_size(self) -> bool:
        """Return whether the size of the file differs from the offset at which the last read ended."""
        handle = self._handle
        end = handle.offset + len(handle.pending)
        return not handle.is_torn and system.os.fstat(handle.reader_fd).st_size != end

    def _is_behind(self) -> bool:
        """Return whether the handle is before a position that it reached earlier. If not, store its position.

        A recovery reads the log again from the beginning. This read ends too early if the client has cached an old file
        size. The handle would then lack records that were acknowledged, or that an earlier read has returned.
        """
        position = self._handle.header.generation, self._handle.offset
        if position < self._seen:
            return True
        self._seen = position
        return False

    def _advance(self, data: bytes, *, locked: bool) -> bool:
        """Pass `data` to the cursor, and keep the bytes in ``recent`` if they are complete records."""
        handle = self._handle
        start, is_at_record = handle.offset, not (handle.pending or handle.is_torn)
        is_sealed = self._cursor.advance(data, locked=locked)
        if is_at_record and handle.offset == start + len(data):
            self.recent = joined(self.recent, Extent(self._file, start, data))
        else:  # bytes of a record that is not complete may still change
            self.recent = None
        return is_sealed

    def read_extent(self, extent: Extent) -> bool | None:
        """Apply the records in `extent`, without a read from the server. Another process on this host has read them.

        This method does not check the path. If the caller must continue to wait, it calls `read`, which checks the
        path.

        Returns:
            Whether a seal was read; None if `extent` has no bytes after the handle's position.
        """
        handle = self._handle
        if self.coherence != DIRECT or handle.pending or handle.is_torn or extent.file != self._file:
            return None
        if self._is_behind():
            return None
        done = handle.offset - extent.start
        if not 0 <= done < len(extent.data):
            return None
        # A process that only uses barriers makes no other read, and must keep its liveness byte locked all the same.
        self._liveness.check_byte(system.time.monotonic())
        system.os.lseek(handle.reader_fd, extent.end, 0)
        return self._advance(extent.data[done:], locked=False)

    def _read_under_revalidation(self) -> bool:
        """Read under a shared lock on `REVALIDATE_BYTE`.

        When an NFS client acquires a lock, it drops the cached pages of the file, so the next read gets its data from
        the server. The lock does not exclude writers, because writers lock other bytes. This method releases the lock
        after the read, because only a new lock drops the cache again.
        """
        fcntl, fd = system.fcntl, self._handle.lock.fd
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, system.FLOCK_STRUCT.pack(fcntl.F_RDLCK, 0, REVALIDATE_BYTE, 1, 0))
            return self._read_on(locked=False)
        except BlockingIOError as error:  # another program locks all bytes, by lockf(3), or on Lustre by flock(2)
            raise_if_foreign(error)
            raise NeedsLock from None
        finally:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, system.FLOCK_STRUCT.pack(fcntl.F_UNLCK, 0, REVALIDATE_BYTE, 1, 0))
            except OSError as error:  # no process waits for this byte, and the next call raises the same error
                raise_if_foreign(error)

    def _check_descriptors(self) -> None:
        # fstat(2) may be a request to the server, so the position is compared first.
        handle = self._handle
        if system.os.lseek(handle.reader_fd, 0, 1) != handle.offset + len(handle.pending):
            self._cursor.check_descriptors()

    def _bypass_cache(self) -> None:
        """Continue on a new descriptor, and drop the pages that this host has cached, unless reads are direct."""
        handle = self._handle
        self._cursor.move(handle.offset, handle.chain)
        if self.coherence != DIRECT:
            system.drop_cached_pages(handle.reader_fd)

    def _check_path(self, now: float) -> None:
        """Open the path to check that it still leads to the file. Only open(2) always asks the server."""
        self._bypass_cache()
        handle = self._handle
        found = system.os.fstat(handle.reader_fd)
        if found.st_nlink == 0:
            raise handle.unlinked()
        if found.st_size < handle.offset:
            raise NeedsLock
        if handle.header.generation:
            handle.close_fd(open_root(handle))
        handle.path_checked_at = now
        self._liveness.check_byte(now)

    # -- before the lock, and with it ------------------------------------------------------------------------------

    def before_lock(self) -> None:
        """Check the liveness byte if that is due.

        The check sends requests to the server. Under the log's lock, these requests would delay other writers.
        """
        self._liveness.check_byte(system.time.monotonic())

    def catch_up(self) -> bool:
        """Apply every record up to the end of the file, under the lock. Return whether a seal was read.

        The next record is written at the end, so the end must be certain. An earlier read without the lock may have
        returned a record of which only some pages had arrived at the server, so ``pending`` bytes are read again. Bytes
        that look damaged, torn or truncated may come from a stale cache. So they are read again, past the cache, for
        `SETTLE_S` seconds, or `PAUSE_S` if reads are direct. After that time, the cache can't be the reason. A read
        that was blocked for `BLOCKED_S` seconds is repeated once.

        If a comparison of the path is due, this method makes it under the lock. The comparison then costs no further
        request: the reply to open(2) contains the size and the link count, which are needed anyway.
        """
        handle = self._handle
        self._has_written = False
        if handle.lock.kind == SOFT:
            self._reopen_writer()
        now = system.time.monotonic()
        if handle.pending or now - handle.path_checked_at > PATH_CHECK_S:
            self._check_descriptors()
            self._bypass_cache()
            handle.path_checked_at = now
        deadline = 0.0
        was_blocked = False
        while True:
            now = system.time.monotonic()
            final = bool(deadline) and now >= deadline
            if self._is_caught_up(final=final) and (handle.seal is not None or not self._falls_short(final=final)):
                if was_blocked or system.time.monotonic() - now <= BLOCKED_S or handle.seal is not None:
                    break
                was_blocked = True
            if not deadline:
                settle = PAUSE_S if self.coherence == DIRECT and not self._mount.is_lustre else SETTLE_S
                deadline = system.time.monotonic() + settle
            system.time.sleep(PAUSE_S)
            self._bypass_cache()
        self._stale_in_a_row = 0
        return handle.seal is not None

    def _falls_short(self, *, final: bool) -> bool:
        """Return whether the handle is before a position that it has reached earlier, or raise an error if `final`."""
        handle = self._handle
        if not self._is_behind():
            return False
        if final:
            self._check_identity()
            raise handle.gone(f"ends at {handle.offset} bytes, after {self._seen[1]} bytes had been read")
        return True

    def _is_caught_up(self, *, final: bool) -> bool:
        """Read further. Return whether a seal or the end of the file was reached.

        If `final` is true, raise an error instead of returning False.
        """
        handle = self._handle
        found = system.os.fstat(handle.reader_fd)
        if found.st_nlink == 0:
            raise handle.unlinked()
        if found.st_size < handle.offset:
            if final:
                self._check_identity()
                raise handle.gone(f"was truncated to {found.st_size} bytes, after {handle.offset} bytes had been read")
            return False
        if found.st_size > handle.offset or handle.lock.kind == SOFT:
            is_end = self._read_locked(final=final)
            if is_end is not None:
                return is_end
        if handle.is_torn or handle.pending:
            has_more = not handle.is_torn and found.st_size > handle.offset + len(handle.pending)
            return final or (self.coherence == DIRECT and not has_more)
        if found.st_size <= handle.offset:
            return True
        if final:
            raise StoreUnavailableError(
                f"{handle.path}: the file system reports a size of {found.st_size} bytes, but a read ends at byte"
                f" {handle.offset}; the caches of this mount are not valid, even under the log's lock, so use a"
                " directory on another mount",
                path=handle.path,
            )
        return False

    def _read_locked(self, *, final: bool) -> bool | None:
        """Read further. Return True after a seal, False if the bytes look damaged and `final` is false, else None."""
        try:
            return self._read_on(locked=True) or None
        except CorruptLogError:
            if final or self._handle.recovery & APPLYING:
                self._check_identity()
                raise
            return False

    def _check_identity(self) -> None:
        """Raise `StoreGoneError` if the path now leads to another log, whose file has got the same inode number."""
        handle = self._handle
        with safe_files.closing_owned(reopen(handle, handle.read_flags), handle.owned_fds) as fd:
            try:
                log_id = Header.decode(read_header(fd))[0].log_id
            except MalformedRecord:
                return
        if log_id != handle.header.log_id:
            raise handle.gone("was replaced by another log")

    def _reopen_writer(self) -> None:
        """Open a new descriptor for writing. The caller holds a soft lock.

        The kernel appends at the file size that it has cached. Only a kernel lock or open(2) updates this size.
        """
        handle = self._handle
        if handle.read_only:
            return
        fd, old = reopen(handle, handle.write_flags), handle.lock.fd
        handle.lock.bind(fd, handle.lock.session)
        handle.close_fd(old)

    def write(self, data: bytes) -> None:
        """Write `data` in pieces. Send each piece after the previous one has arrived at the server.

        If several pieces were sent at once, an earlier piece could fail and a later one arrive. That would leave a hole
        in the record.
        """
        handle = self._handle
        try:
            for start in range(0, len(data), self.piece):
                self._append(data[start : start + self.piece])
                if not handle.root.header.durable:
                    self._flush()
        except StoreUnavailableError:
            handle.recovery |= SERVER_STATE
            raise
        self._has_written = True
        self._seen = handle.header.generation, handle.offset + len(data)
        if handle.pending or handle.is_torn:  # a void, which does not begin at `offset`
            self.recent = None
        else:
            self.recent = joined(self.recent, Extent(self._file, handle.offset, data))

    def _flush(self) -> None:
        handle = self._handle
        try:
            system.sync_data(handle.lock.fd)
        except OSError as error:
            raise_if_foreign(error)
            raise safe_files.unavailable(error, handle.path, "appending to the log", maybe_applied=True) from error

    # -- errors ----------------------------------------------------------------------------------------------------

    def retries_read(self, error: OSError) -> bool:
        if not self._refuses_direct(error) and error.errno not in SERVER_FORGOT:
            return False
        self._handle.recovery |= SERVER_STATE
        return True

    def retries_transaction(self, error: OSError, *, maybe_applied: bool) -> bool:
        """Return whether to repeat a transaction that failed with `error`, on a new descriptor.

        Raises:
            StoreUnavailableError: the server has forgotten the file `TRIES` times in a row, or after a write.
        """
        handle = self._handle
        if handle.recovery and self._refuses_direct(error):
            handle.recovery |= SERVER_STATE
            return True
        if error.errno not in SERVER_FORGOT:
            return False
        handle.recovery |= SERVER_STATE
        if self._stale_generation != handle.header.generation:  # others compact faster than this handle follows
            self._stale_generation, self._stale_in_a_row = handle.header.generation, 0
        self._stale_in_a_row += 1
        # If no other flag is set, the lock call raised the error, and `_has_written` is about the previous transaction.
        has_written = self._has_written and bool(handle.recovery & ~SERVER_STATE or maybe_applied)
        if has_written or self._stale_in_a_row >= TRIES:
            doing = "using the log, or its lock,"
            raise safe_files.unavailable(error, handle.path, doing, maybe_applied=has_written) from error
        return True

    def retries_recovery(self, error: StoreUnavailableError) -> bool:
        """Return whether to repeat a recovery that failed with `error`.

        A recovery is repeated after ESTALE, because another host may have removed the file during the recovery.
        """
        if error.errno != system.errno.ESTALE or not isinstance(error.__cause__, OSError):
            return False
        self._handle.recovery |= SERVER_STATE
        self._has_written = False  # that write was under a lock that has been released
        return True


class SymlinkLockAccess(NetworkAccess):
    """A `NetworkAccess` for logs with a soft lock. If ``coherence`` is "direct", it reads and writes past the cache."""

    def _set_mode(self, coherence: str) -> None:
        super()._set_mode(coherence)
        if coherence == DIRECT:
            self._handle.write_flags = system.os.O_WRONLY | system.O_DIRECT

    def _refuses_direct(self, error: OSError) -> bool:
        return not self._mount.is_nfs and super()._refuses_direct(error)

    def _reopen_writer(self) -> None:
        if self.coherence != DIRECT:
            super()._reopen_writer()

    def _is_caught_up(self, *, final: bool) -> bool:
        """Do the same as the base method, and move the descriptor for writing to the end of the file.

        The descriptor has no O_APPEND, so the next record is written at the descriptor's position. The file must end at
        ``offset``.
        """
        handle = self._handle
        if self.coherence != DIRECT or handle.read_only:
            return super()._is_caught_up(final=final)
        is_end = self._read_locked(final=final)
        if is_end is not None:
            return is_end
        end = system.os.lseek(handle.lock.fd, 0, system.os.SEEK_END)  # with O_DIRECT the kernel asks the server
        if system.os.fstat(handle.lock.fd).st_nlink == 0:
            raise handle.unlinked()
        if handle.is_torn or handle.pending or end == handle.offset:
            return True
        if not final:
            return False
        self._check_identity()
        if end < handle.offset:
            raise handle.gone(f"was truncated to {end} bytes, after {handle.offset} bytes had been read")
        raise StoreUnavailableError(
            f"{handle.path}: the log grew to {end} bytes while this process held its lock. Another process is still"
            " writing, although the marker file of its lock was removed. End all processes that use the log, then"
            f" remove {handle.path}.lock",
            path=handle.path,
        )

    def write(self, data: bytes) -> None:
        handle = self._handle
        if self.coherence == DIRECT and (handle.is_torn or handle.pending):  # `void_tail` has extended the file
            system.os.lseek(handle.lock.fd, 0, system.os.SEEK_END)
        super().write(data)
