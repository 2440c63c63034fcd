"""How a log that several hosts share is followed and written: each mount in the way in which it is coherent.

Measured on a kernel NFS server with two clients: while anybody on a host has the log open for writing, a read through
that host's cache may give the right length and zeros for data, for ever; open(2), fstat(2) and the mount options
``noac`` and ``actimeo=0`` don't help. A direct read (O_DIRECT) is one request to the server, and brings what is new; so
does a read under a lock, which empties the cache, in four requests.

Every append goes to the server before the lock does, for only fsync(2) tells that it did not arrive: "ENOSPC and EDQUOT
come late" (write(2)), and EIO is what a lock that was lost leaves behind (fcntl(2), "Lost locks").
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from fscoord._log.access.hang_watchdog import KernelCall
from fscoord._log.access.mount import DIRECT, LOCKED, Mount
from fscoord._log.consumer import Consumer
from fscoord._log.format.control_records import Session
from fscoord._log.format.header import Header
from fscoord._log.format.record import MalformedRecord, Record
from fscoord._log.io import safe_files
from fscoord._log.io.cursor import APPLYING, CHUNK, STALE, Suspect
from fscoord._log.io.opening import LogOptions, read_header
from fscoord._log.locking.log_lock import BASE, OFD, SOFT
from fscoord._log.log import Decide, LogFile
from fscoord._log.wakeup.changed_keys import ChangedKeys
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign
from fscoord.errors import CorruptLogError, StoreUnavailableError

__all__ = ["SharedLogFile"]

LOOK_S: Final = 1.0
"""How old the last look at what the file's name leads to may be: it is a request to the server."""

SETTLE_S: Final = 1.2
"""How long caches that nothing empties may lie: FUSE's time-outs, and GlusterFS's, are one second by default."""

TRIES: Final = 4
PAUSE_S: Final = 0.01
OPEN_TRIES: Final = 60
OPEN_PAUSE_S: Final = 0.1
"""How often to open a log anew that is said to be gone, and the longest pause between: five seconds in all."""
PIECE: Final = 1 << 18
"""How much one WRITE carries when the mount does not say."""

FAR: Final = BASE - 1
"""The byte that nobody locks exclusively: a shared lock on it empties the cache and waits for nobody."""

_SERVER_FORGOT: Final = frozenset((system.errno.ESTALE, system.errno.EIO))


class SharedLogFile(LogFile):
    """A `LogFile` that other hosts write to.

    ``coherence`` is ``"direct"`` or ``"locked"``; the former becomes the latter where direct reads are refused.
    """

    _is_shared = True
    _may_lie = True

    def __init__(
        self,
        path: str,
        consumer: Consumer,
        wanted: LogOptions,
        introduce: Callable[[], Session],
        participants: int,
        mount: Mount,
        coherence: str,
    ) -> None:
        wsize = mount.option("wsize") or ""
        self._piece = int(wsize) if wsize.isdecimal() and int(wsize) else PIECE
        self._news = ChangedKeys(consumer)
        self._stale_in_a_row = self._stale_generation = 0
        self._has_written = False  # with the lock that is held, or was held last
        self._choose(coherence)
        self._call = KernelCall(path)
        try:
            super().__init__(path, self._news, wanted, introduce, participants, mount)
        except BaseException:
            self._call.close()
            raise

    def _choose(self, coherence: str) -> None:
        self.coherence = coherence
        is_direct = coherence == DIRECT
        self._short_is_end = is_direct
        self._read_flags = system.os.O_RDONLY | (system.O_DIRECT if is_direct else 0)
        # Open for reading, too, the kernel fetches the page that an append begins in: one request more.
        self._write_flags = system.os.O_APPEND | (system.os.O_WRONLY if is_direct else system.os.O_RDWR)

    def refresh(self, limit: float) -> None:
        """As for a local log; a call that is stuck is told of."""
        self._call.begin()
        try:
            super().refresh(limit)
        finally:
            self._call.end()

    def update(self, kind: int, key: bytes, value: bytes, decide: Decide | None, limit: float) -> Any:
        """As for a local log; a call that is stuck is told of."""
        self._call.begin()
        try:
            return super().update(kind, key, value, decide, limit)
        finally:
            self._call.end()

    def close(self) -> None:
        """As for a local log."""
        super().close()
        self._call.close()

    def take_news(self) -> Collection[int]:
        """Return the buckets (see `bell`) of all keys that records were read of, or written, since the last call."""
        return self._news.take()

    def _note(self, others: Sequence[Record]) -> None:
        super()._note(others)
        self._news.covers_all = True  # who joins, leaves or dies concerns everybody

    # -- opening ---------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """As for a local log; but NFS may remember of a name a log that is gone: to look at what was opened tells."""
        for attempt in range(1, OPEN_TRIES + 1):
            try:
                super()._open()
                return
            except OSError as error:
                raise_if_foreign(error)
                if not self._refuses_direct(error) and (error.errno != system.errno.ESTALE or attempt == OPEN_TRIES):
                    raise
            for fd in list(self._descriptors):
                self._drop(fd)
            system.time.sleep(min(PAUSE_S * (attempt - 1), OPEN_PAUSE_S))

    def _refuses_direct(self, error: OSError) -> bool:
        """Return whether `error` says that there are no direct reads here; from then on reads take a lock."""
        if self.coherence != DIRECT or error.errno != system.errno.EINVAL:
            return False
        self._choose(LOCKED)
        return True

    # -- reading without the log's lock ----------------------------------------------------------------------------

    def _read(self) -> None:
        now = system.time.monotonic()
        if now - self._looked > LOOK_S:
            self._look(now)
        if self.coherence == DIRECT:
            self._read_on(locked=False)
        elif self._lock.kind == OFD:
            self._read_under_far_lock()
        elif self._lock.kind == SOFT:
            self._freshen()
            self._read_on(locked=False)
        else:
            raise Suspect

    def _read_on(self, *, locked: bool) -> None:
        data = system.os.read(self._rfd, CHUNK)
        if data:
            self._advance(data, locked=locked)

    def _read_under_far_lock(self) -> None:
        fcntl, lock, fd = system.fcntl, self._lock, self._lock.fd
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, system.FLOCK_STRUCT.pack(fcntl.F_RDLCK, 0, FAR, 1, 0))
            self._read_on(locked=False)
        finally:
            if lock is self._lock:  # else the log goes on in another file, and this one is closed
                try:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, system.FLOCK_STRUCT.pack(fcntl.F_UNLCK, 0, FAR, 1, 0))
                except OSError as error:  # nobody waits for this byte; the next call meets the same
                    raise_if_foreign(error)

    def _freshen(self) -> None:
        """Read on from a new descriptor, and not from this host's cache."""
        self._move(self._offset, self._chain)
        if self.coherence != DIRECT:
            system.os.posix_fadvise(self._rfd, 0, 0, system.os.POSIX_FADV_DONTNEED)

    def _look(self, now: float) -> None:
        """Make sure that the name still leads to the file. open(2) asks the server; fstat(2) and stat(2) may not."""
        self._freshen()
        found = system.os.fstat(self._rfd)
        if found.st_nlink == 0:
            raise self._unnamed()
        if found.st_size < self._offset:
            raise Suspect
        if self.header.generation:
            self._drop(self._open_root())
        self._looked = now
        self._look_after_byte(now)

    def _has(self, missing: int) -> bool:
        fd = self._reopen(self._read_flags, self._descriptors)
        try:
            return system.os.fstat(fd).st_size >= self._offset + len(self._pending) + missing
        finally:
            self._drop(fd)

    def _misread(self, error: OSError) -> None:
        if not self._refuses_direct(error) and error.errno not in _SERVER_FORGOT:
            super()._misread(error)
        self._trouble |= STALE

    # -- with the lock ---------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """With the lock: read to the end of the file, and make sure that it is the end: what is written next follows.

        What an unlocked look has seen of a record that was still on its way may have holes, so it is read again. What
        looks damaged, torn or cut short through a cache is looked at again, past the cache, until it can't be the
        cache any more.
        """
        self._has_written = False
        if self._lock.kind == SOFT:
            self._reopen_writer()
        now = system.time.monotonic()
        if self._pending or now - self._looked > LOOK_S:
            self._freshen()
            self._looked = now
            self._look_after_byte(now)
        deadline = 0.0
        while not self._is_caught_up(final=bool(deadline) and system.time.monotonic() >= deadline):
            if not deadline:
                settle = PAUSE_S if self.coherence == DIRECT else SETTLE_S
                deadline = system.time.monotonic() + settle
            system.time.sleep(PAUSE_S)
            self._freshen()
        self._stale_in_a_row = 0

    def _is_caught_up(self, *, final: bool) -> bool:
        """Read on; return whether all that the file has was taken in. When it is `final`, say what is wrong."""
        found = system.os.fstat(self._rfd)
        if found.st_nlink == 0:
            raise self._unnamed()
        if found.st_size < self._offset:
            if final:
                self._check_identity()
                raise self._gone(f"was truncated to {found.st_size} bytes, and {self._offset} were read")
            return False
        if found.st_size > self._offset or self._lock.kind == SOFT:
            lock = self._lock
            try:
                self._read_on(locked=True)
                if lock is not self._lock:
                    return True  # the log goes on in another file
            except CorruptLogError:
                if final or self._trouble & APPLYING:
                    self._check_identity()
                    raise
                return False
        if self._torn or self._pending:
            return final or self.coherence == DIRECT
        if found.st_size <= self._offset:
            return True
        if final:
            raise StoreUnavailableError(
                f"{self.path}: the file system says that there are {found.st_size} bytes, and gives {self._offset}; its"
                " caches are not valid even with the lock, so this directory can't be used",
                path=self.path,
            )
        return False

    def _check_identity(self) -> None:
        """Raise `StoreGoneError` if there is another log by now, whose inode has the old number."""
        fd = self._reopen(self._read_flags, self._descriptors)
        try:
            log_id = Header.decode(read_header(fd))[0].log_id
        except MalformedRecord:
            return
        finally:
            self._drop(fd)
        if log_id != self.header.log_id:
            raise self._gone("was replaced by another log")

    def _reopen_writer(self) -> None:
        """Where no lock does it, open(2) has the kernel ask for the size, at which it is about to append."""
        if self.read_only:
            return
        fd, old = self._reopen(self._write_flags, self._descriptors), self._lock.fd
        self._lock.bind(fd, self._lock.session)
        self._drop(old)

    def _write(self, data: bytes) -> None:
        """As for a local log, but piece by piece, each at the server before the next.

        Of several requests under way a later one might arrive and an earlier one not, and leave a hole in the record.
        """
        try:
            for start in range(0, len(data), self._piece):
                super()._write(data[start : start + self._piece])
                if not self._durable:
                    self._flush()
        except StoreUnavailableError:
            self._trouble |= STALE
            raise
        self._has_written = True

    def _flush(self) -> None:
        try:
            system.os.fdatasync(self._lock.fd)
        except OSError as error:
            raise_if_foreign(error)
            raise safe_files.unavailable(error, self.path, "appending to the log", maybe_applied=True) from error

    # -- trouble ---------------------------------------------------------------------------------------------------

    def _explain(self, error: OSError, *, maybe_applied: bool) -> None:
        """As for a local log; but what the server has forgotten is opened again, a few times, and then raised."""
        if self._trouble and self._refuses_direct(error):
            self._trouble |= STALE
        elif error.errno in _SERVER_FORGOT:
            self._trouble |= STALE
            if self._stale_generation != self.header.generation:  # others compact faster than this handle follows
                self._stale_generation, self._stale_in_a_row = self.header.generation, 0
            self._stale_in_a_row += 1
            # Without trouble it was refused the lock, and what it wrote was with the one before.
            has_written = self._has_written and bool(self._trouble & ~STALE or maybe_applied)
            if has_written or self._stale_in_a_row >= TRIES:
                doing = "using the log, or its lock,"
                raise safe_files.unavailable(error, self.path, doing, maybe_applied=has_written) from error
        else:
            super()._explain(error, maybe_applied=maybe_applied)

    def _sort_out(self) -> None:
        """As for a local log; but a file that goes meanwhile, on another host, is one that the server has forgotten."""
        try:
            super()._sort_out()
        except StoreUnavailableError as error:
            if error.errno != system.errno.ESTALE or not isinstance(error.__cause__, OSError):
                raise
            self._trouble |= STALE
            self._has_written = False  # that was with a lock that was given back
            raise error.__cause__ from None

    def _wait_for_lock(self, attempt: int, started: float, limit: float) -> None:
        if self._trouble & STALE:  # nobody has the lock of a file that is gone
            waited = system.time.monotonic() - started
            if waited >= limit:
                raise self._lock_timeout(waited)
            return
        self._call.end()  # this wait has a deadline
        super()._wait_for_lock(attempt, started, limit)
        self._call.begin()

    def _open_again(self) -> None:
        super()._open_again()
        self._looked = 0.0
