"""`Contender`: a reader that can wait for the lock of its log, and say who has it when it does not come."""

from __future__ import annotations

from fscoord import _system as system
from fscoord._log import path as paths
from fscoord._log.lock import LogLock
from fscoord._log.reader import DIRTY, LogReader, Suspect, Vanished
from fscoord.errors import FscoordError, StoreTimeoutError

__all__ = ["Contender"]


class Contender(LogReader):
    """The part of `~fscoord._log.file.LogFile` that gets the lock from others."""

    _lock: LogLock
    _is_shared = False
    """Whether other hosts write to the log, and are not seen without being asked for."""
    _write_flags: int = system.os.O_RDWR | system.os.O_APPEND

    def _explain(self, error: OSError) -> None:
        """Return if `error` means that somebody else has the lock; raise it as one of our own otherwise."""
        if self._trouble:
            raise paths.unavailable(error, self.path, "using the log") from error
        if not self._lock.is_taken(error):
            raise self._lock.refuse(error) or paths.unavailable(error, self.path, "locking the log") from error

    def _wait_for_lock(self, attempt: int, started: float, limit: float) -> None:
        """Return when it is worth trying again."""
        waited = system.time.monotonic() - started
        if waited >= limit:
            raise self._lock_timeout(waited)
        self._lock.wait(attempt, waited, limit - waited, self._reopen_for_lock, patient=not self._is_shared)

    def _reopen_for_lock(self) -> int:
        try:
            return self._reopen(self._write_flags, set())  # this thread is never interrupted
        except Vanished:
            raise OSError(system.errno.ESTALE, "the log goes on in another file") from None

    def _lock_timeout(self, waited: float) -> StoreTimeoutError:
        number = self._lock.holder()
        if isinstance(number, int) and number not in self.sessions:
            self._read_introductions()
        holder = str(self.sessions.get(number, f"session {number}")) if isinstance(number, int) else number
        if number == 0:
            holder = "a process that has not written yet"
        return StoreTimeoutError(
            f"{self.path}: the log's lock did not come within {waited:.3g} s; {holder or 'an unknown process'} holds it"
            " and is stopped, or stuck in a call",
            holder=holder,
            waited=waited,
        )

    def _read_introductions(self) -> None:
        """Read on without the lock, which does not come."""
        with self.mutex:
            if self._shared.busy:
                return
            try:
                self._shared.busy = True
                self._sort_out()
                self._trouble = DIRTY
                self._read()
                self._trouble = 0
            except (OSError, FscoordError, Suspect):  # the next operation meets it, too
                pass
            finally:
                self._shared.busy = False
