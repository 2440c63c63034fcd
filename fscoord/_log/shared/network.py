"""`NetworkAccess`: coherent reads and writes of a log that several hosts share.

Measured on a kernel NFS server with two clients: while a process of a host has the log open for writing, a read through
that host's cache may return zeros instead of data, with the right length, for ever. Neither open(2) nor fstat(2) nor
the mount options ``noac`` and ``actimeo=0`` help. A direct read (O_DIRECT) is one request to the server, and returns
new data. A read under a lock also returns new data, because taking the lock empties the cache. Such a read costs four
requests.

Every append is sent to the server before the lock is released. Only fsync(2) reports an append that did not arrive:
ENOSPC and EDQUOT may come late (write(2)), and EIO is the error after a lock was lost (fcntl(2), "Lost locks").

To the kernel a marker is not a lock, so a process that holds the marker can't rely on the NFS client's caches. An
append through the cache may begin in a page that the host has read long ago, and the client sends that whole page. In
this way one host wrote zeros over acknowledged records of another, in 4 of 4 runs on Linux 6.1. So no byte of such a
log goes through the cache (`SymlinkLockAccess`). NFS refuses O_DIRECT together with O_APPEND (fs/nfs/file.c,
``nfs_check_flags``). The writer therefore requests the end of the file from the server, and writes there. No other
process moves the end while the marker exists.
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
"""How old the last comparison of the path with the file may be, in seconds. Each comparison is a request to the
server."""

SETTLE_S: Final = 1.2
"""How long a cache that no lock empties may be out of date, in seconds. The time-outs of FUSE and GlusterFS are one
second by default."""

PAUSE_S: Final = 0.01
OPEN_TRIES: Final = 60
OPEN_PAUSE_S: Final = 0.1
"""How many times to try to open a log that the server reports as stale, and the longest pause between two attempts, in
seconds. All attempts together take five seconds."""
PIECE: Final = 1 << 18
"""The size of one WRITE request in bytes if the mount options don't state it."""

REVALIDATE_BYTE: Final = BASE - 1
"""The byte that no process locks exclusively. A shared lock on it never waits, and empties the cache."""


class NetworkAccess:
    """The `Access` to a log to which other hosts also write.

    Attributes:
        coherence: ``"direct"`` or ``"locked"``. If the mount refuses direct reads, ``"direct"`` becomes ``"locked"``.
        piece: the most bytes that one request to the server writes.
        recent: the last bytes that this handle has read or written, for the other processes of the host; None: none.
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
        self._has_written = False  # whether this handle wrote under the lock that it holds, or held last
        handle.is_shared = handle.may_lie = True
        self._set_mode(coherence)

    def _set_mode(self, coherence: str) -> None:
        self.coherence = coherence
        is_direct = coherence == DIRECT
        handle = self._handle
        handle.short_read_is_end = is_direct
        handle.read_flags = system.os.O_RDONLY | (system.O_DIRECT if is_direct else 0)
        # With O_RDWR the kernel fetches the page in which an append begins, which is one more request. A reader under a
        # lock still needs O_RDWR, because a shared lock needs a descriptor that is open for reading.
        handle.write_flags = system.os.O_WRONLY if is_direct else system.os.O_RDWR
        if self._mount.appends:
            handle.write_flags |= system.os.O_APPEND

    @property
    def _file(self) -> FileId:
        return *self._handle.file_identity, self._handle.header.generation

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self, call: Callable[[], None]) -> None:
        """Call `call` again after an error, because the first use of a name that the NFS client has cached may fail."""
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
        """Record that the name may belong to another file of the server by now."""
        self._handle.path_checked_at = 0.0

    def _refuses_direct(self, error: OSError) -> bool:
        """Return whether `error` means that the mount has no direct reads. If so, change to reads under a lock."""
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
        return bool(data) and self._advance(data, locked=locked)

    def _advance(self, data: bytes, *, locked: bool) -> bool:
        """Pass `data` to the cursor, and keep the bytes if they are complete records."""
        handle = self._handle
        start, is_at_record = handle.offset, not (handle.pending or handle.is_torn)
        is_sealed = self._cursor.advance(data, locked=locked)
        if is_at_record and handle.offset == start + len(data):
            self.recent = joined(self.recent, Extent(self._file, start, data))
        else:  # bytes of a record that is not complete may still change
            self.recent = None
        return is_sealed

    def read_extent(self, extent: Extent) -> bool | None:
        """Continue from `extent`, which another process of the host has read. No request is made for the bytes.

        The path is not checked either: a caller that does not find there what it waits for calls `read`.

        Returns:
            What `read` returns; None if `extent` has no bytes after the handle's position.
        """
        handle = self._handle
        if self.coherence != DIRECT or handle.pending or handle.is_torn or extent.file != self._file:
            return None
        done = handle.offset - extent.start
        if not 0 <= done < len(extent.data):
            return None
        # A rank that only meets others at barriers makes no other read, and must keep its byte all the same.
        self._liveness.check_byte(system.time.monotonic())
        system.os.lseek(handle.reader_fd, extent.end, 0)
        return self._advance(extent.data[done:], locked=False)

    def _read_under_revalidation(self) -> bool:
        """Read under a shared lock on `REVALIDATE_BYTE`.

        When the NFS client acquires a lock, it drops the cached pages of the file, so the server answers the read that
        follows. The lock excludes no writer, because writers lock other bytes. It is released after the read, so that
        the next read acquires it again.
        """
        fcntl, fd = system.fcntl, self._handle.lock.fd
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, system.FLOCK_STRUCT.pack(fcntl.F_RDLCK, 0, REVALIDATE_BYTE, 1, 0))
            return self._read_on(locked=False)
        finally:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, system.FLOCK_STRUCT.pack(fcntl.F_UNLCK, 0, REVALIDATE_BYTE, 1, 0))
            except OSError as error:  # no process waits for this byte, and the next call raises the same error
                raise_if_foreign(error)

    def _check_descriptors(self) -> None:
        # fstat(2) may be a request to the server, so the position is compared first.
        handle = self._handle
        if system.os.lseek(handle.reader_fd, 0, 1) != handle.offset + len(handle.pending):
            handle.check_descriptors()

    def _bypass_cache(self) -> None:
        """Continue on a new descriptor, and drop the pages that this host has cached, unless reads are direct."""
        handle = self._handle
        self._cursor.move(handle.offset, handle.chain)
        if self.coherence != DIRECT:
            system.drop_cached_pages(handle.reader_fd)

    def _check_path(self, now: float) -> None:
        """Check that the path still leads to the file. Only open(2) is sure to ask the server."""
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
        """Make the requests that are due, before the lock is acquired: here they delay no other writer."""
        self._liveness.check_byte(system.time.monotonic())

    def catch_up(self) -> bool:
        """Apply every record up to the end of the file, which must be certain: the next record is written there.

        An unlocked read may have seen a record of which only some pages had arrived at the server. So ``pending`` bytes
        are read again. Bytes that look damaged, torn or truncated may come from a stale cache. So they are read again,
        past the cache, for `SETTLE_S`, or for `PAUSE_S` if reads are direct. After that time a cache can't be the
        reason.

        The comparison of the path, if it is due, costs no request of its own: the reply to open(2) contains the size
        and the link count, which would otherwise need a request. Before the lock the comparison would be one more
        request.
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
        while not self._is_caught_up(final=bool(deadline) and system.time.monotonic() >= deadline):
            if not deadline:
                settle = PAUSE_S if self.coherence == DIRECT else SETTLE_S
                deadline = system.time.monotonic() + settle
            system.time.sleep(PAUSE_S)
            self._bypass_cache()
        self._stale_in_a_row = 0
        return handle.seal is not None

    def _is_caught_up(self, *, final: bool) -> bool:
        """Read on. Return whether a seal or the end of the file was reached.

        If this is the `final` attempt, raise an error instead of returning False.
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
            return final or self.coherence == DIRECT
        if found.st_size <= handle.offset:
            return True
        if final:
            raise StoreUnavailableError(
                f"{handle.path}: the file system reports {found.st_size} bytes, and a read returns {handle.offset};"
                " its caches are not valid even with the lock, so use a directory on another mount",
                path=handle.path,
            )
        return False

    def _read_locked(self, *, final: bool) -> bool | None:
        """Read on. Return True after a seal, False if the bytes look damaged and it is not `final`, otherwise None."""
        try:
            return self._read_on(locked=True) or None
        except CorruptLogError:
            if final or self._handle.recovery & APPLYING:
                self._check_identity()
                raise
            return False

    def _check_identity(self) -> None:
        """Raise `StoreGoneError` if the path leads to another log whose file has the same inode number."""
        handle = self._handle
        with safe_files.closing_owned(reopen(handle, handle.read_flags), handle.owned_fds) as fd:
            try:
                log_id = Header.decode(read_header(fd))[0].log_id
            except MalformedRecord:
                return
        if log_id != handle.header.log_id:
            raise handle.gone("was replaced by another log")

    def _reopen_writer(self) -> None:
        """Replace the descriptor for writing by a new descriptor. The caller holds a soft lock.

        The kernel appends at the size that it has cached. Only a lock of the kernel or open(2) updates that size.
        """
        handle = self._handle
        if handle.read_only:
            return
        fd, old = reopen(handle, handle.write_flags), handle.lock.fd
        handle.lock.bind(fd, handle.lock.session)
        handle.close_fd(old)

    def write(self, data: bytes) -> None:
        """Write `data` in pieces. Each piece has arrived at the server before the next is sent.

        If several requests were sent at once, a later one could arrive and an earlier one fail, which would leave a
        hole in the record.
        """
        handle = self._handle
        if not (self._mount.appends or handle.pending or handle.is_torn):  # otherwise `void_tail` has moved there
            system.os.lseek(handle.lock.fd, handle.offset, system.os.SEEK_SET)
        try:
            for start in range(0, len(data), self.piece):
                self._append(data[start : start + self.piece])
                if not handle.root.header.durable:
                    self._flush()
        except StoreUnavailableError:
            handle.recovery |= SERVER_STATE
            raise
        self._has_written = True
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
        """Reopen a file that the server has forgotten, up to `TRIES` times."""
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
        # If no flag was set before, the lock call raised the error, and `_has_written` is about the previous lock.
        has_written = self._has_written and bool(handle.recovery & ~SERVER_STATE or maybe_applied)
        if has_written or self._stale_in_a_row >= TRIES:
            doing = "using the log, or its lock,"
            raise safe_files.unavailable(error, handle.path, doing, maybe_applied=has_written) from error
        return True

    def retries_recovery(self, error: StoreUnavailableError) -> bool:
        """Treat a file that another host removes meanwhile as one that the server has forgotten."""
        if error.errno != system.errno.ESTALE or not isinstance(error.__cause__, OSError):
            return False
        self._handle.recovery |= SERVER_STATE
        self._has_written = False  # that write was under a lock that has been released
        return True


class SymlinkLockAccess(NetworkAccess):
    """A `NetworkAccess` for logs with a soft lock: reads and writes past the cache while ``coherence`` is "direct"."""

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
        """Do what the base method does, and also move the writing descriptor to the end of the file.

        The descriptor has no O_APPEND, so its position decides where the next record is written. The file must end at
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
