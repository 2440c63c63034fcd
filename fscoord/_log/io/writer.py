"""`Appender`: with the lock and up to date, put one record at the end of the log.

Nothing is ever cut or overwritten: what a dying writer left torn is voided by the next.
"""

from __future__ import annotations

from typing import Final

from fscoord._log.format import record
from fscoord._log.io import safe_files, torn_tail
from fscoord._log.io.cursor import APPLYING, DIRTY
from fscoord._log.liveness.presence import Presence
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreUnavailableError

__all__ = ["Appender"]

_NOT_APPLIED: Final = frozenset(
    getattr(system.errno, name, -1) for name in ("ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EBADF")
)


class Appender(Presence):
    """The part of `~fscoord._log.log.LogFile` that writes."""

    _directory_synced: bool
    _last_time = 0

    def _next_time(self) -> int:
        """Return the time of the next record, in ns by the wall clock: no two of a session have the same."""
        time_ns = system.time.time_ns()
        if time_ns <= self._last_time:
            time_ns = self._last_time + 1
        self._last_time = time_ns
        return time_ns

    def _append(self, kind: int, key: bytes, value: bytes, session: int) -> None:
        """Write a record, sync it if the log is durable, and take it in as if it had been read."""
        time_ns = self._next_time()
        data, chain = record.encode(kind, key, value, session, time_ns, self._chain)
        size = len(data)
        self._write(data)
        self._trouble = APPLYING
        system.os.lseek(self._rfd, size, 1)
        records = ((kind, key, value, session, time_ns),)
        if kind in record.DATA_KINDS:
            self._state_machine.apply(records if size <= self._spill_at else self._leave_long(records, data))
        else:
            self._note(records)
        self._offset += size
        self._chain = chain
        self._trouble = DIRTY

    def _write(self, data: bytes) -> None:
        """Write `data` at the end of the log, and sync it if the log is durable."""
        fd = self._lock.fd
        try:
            written = system.os.write(fd, data)
            if written != len(data):
                safe_files.write_all(fd, data[written:])
        except OSError as error:
            raise_if_foreign(error)
            applied = error.errno not in _NOT_APPLIED
            raise safe_files.unavailable(error, self.path, "appending to the log", maybe_applied=applied) from error
        if self._durable:
            self._sync(fd)

    def _sync(self, fd: int) -> None:
        """Make what was written survive a power loss. What the kernel failed to write it may drop: no retry."""
        try:
            system.os.fdatasync(fd)
            if not self._directory_synced:
                safe_files.sync_directory(self.path, self._descriptors)
                self._directory_synced = True
        except OSError as error:
            raise_if_foreign(error)
            self._finish(StoreUnavailableError, "could not be synced, so nothing is certain; open the store again")
            raise safe_files.unavailable(error, self.path, "syncing the log", maybe_applied=True) from error

    def _void_tail(self) -> None:
        """Void the torn record at the end of the log: its writer is gone, for we hold the lock."""
        verdict = self._examine()
        if isinstance(verdict, torn_tail.Damage):
            raise self._corrupt(verdict)
        if isinstance(verdict, torn_tail.Torn):
            fd = self._lock.fd
            if system.os.fstat(fd).st_size < verdict.place:
                system.os.ftruncate(fd, verdict.place)
            data, chain = record.encode_void(self._offset, self._lock.session, self._next_time(), self._chain)
            self._write(data)
            verdict = torn_tail.Skip(verdict.place + len(data), chain)
        self._move(verdict.offset, verdict.chain)
