"""`Contender`: a reader that can wait for the lock of its log, and say who has it when it does not come."""

from __future__ import annotations

from typing import Final

from fscoord._log.io import safe_files
from fscoord._log.io.cursor import APPLYING, DIRTY, LOOK_S, LogReader, Suspect, Vanished
from fscoord._log.locking.log_lock import SOFT, LogLock
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign
from fscoord.errors import FscoordError, StoreTimeoutError

__all__ = ["Contender", "said_first"]

SHARED_LOOK_S: Final = 1.0
"""As `reader.LOOK_S`, while the lock is waited for, where a look is a request to a server."""


class Contender(LogReader):
    """The part of `~fscoord._log.log.LogFile` that gets the lock from others."""

    _lock: LogLock
    _is_shared = False
    """Whether other hosts write to the log, and are not seen without being asked for."""
    _write_flags: int = system.os.O_RDWR | system.os.O_APPEND

    def _explain(self, error: OSError, *, maybe_applied: bool) -> None:
        """Return if `error` means that somebody else has the lock; raise it as one of our own otherwise.

        What was to be done is done, or may be, if it is `maybe_applied`: then the lock could not be given back.
        """
        if self._trouble or maybe_applied:
            applied = maybe_applied or bool(self._trouble & APPLYING)
            raise safe_files.unavailable(error, self.path, "using the log", maybe_applied=applied) from error
        if not self._lock.is_taken(error):
            raise self._lock.refuse(error) or safe_files.unavailable(error, self.path, "locking the log") from error

    def _wait_for_lock(self, attempt: int, started: float, limit: float) -> None:
        """Return when it is worth trying again."""
        waited = system.time.monotonic() - started
        if waited >= limit:
            raise self._lock_timeout(waited)
        oldest = SHARED_LOOK_S if self._is_shared else LOOK_S
        if not self._lock.can_block and system.time.monotonic() - self._looked > oldest:
            self._read_unlocked()  # the next attempt says so if the log has gone meanwhile
        self._lock.wait(attempt, waited, limit - waited, self._reopen_for_lock, patient=not self._is_shared)

    def _reopen_for_lock(self) -> int:
        """Return another descriptor of the file in use, for the thread that is to wait for its lock in the kernel.

        Others use this handle meanwhile, and may go on in another file. So nothing is concluded here, nor changed: that
        thread compares the file with the one that its waiters wait for.
        """
        return safe_files.open_descriptor(self.file, self._write_flags)

    def _lock_timeout(self, waited: float) -> StoreTimeoutError:
        number = self._lock.holder()
        if isinstance(number, int) and number not in self.sessions:
            self._read_unlocked()
        holder = str(self.sessions.get(number, f"session {number}")) if isinstance(number, int) else number
        if number == 0:
            holder = "a process that has not written yet"
        remedy = ""
        if self._lock.kind == SOFT:
            remedy = f"; once no process of that name lives on that host: rm {self._lock.marker}"
        return StoreTimeoutError(
            f"{self.path}: the log's lock did not come within {waited:.3g} s; {holder or 'an unknown process'} holds it"
            f" and is stopped, or stuck in a call{remedy}",
            holder=holder,
            waited=waited,
        )

    def _read_unlocked(self) -> None:
        """Read on without the lock, which does not come: who has it may be told there, or the log may have gone."""
        with self.mutex:
            if self._shared.is_inside:
                return
            try:
                self._shared.is_inside = True
                self._sort_out()
                self._trouble = DIRTY
                self._read()
                self._trouble = 0
            except (OSError, FscoordError, Suspect) as error:  # the next operation meets it, too
                raise_if_foreign(error)
            finally:
                self._shared.is_inside = False


def said_first(error: OSError) -> OSError | None:
    """Return what tells what happened: `error`, or what made us give the lock back, if `error` came of that.

    None: that was no error, the log just goes on elsewhere. NFS 3 does not unlock a file that another host has removed.

    Raises:
        BaseException: it was an error of ours, or an interruption.
    """
    first = error.__context__
    if first is None or first.__traceback__ is None or error.__traceback__ is None:
        return error
    if first.__traceback__.tb_frame is not error.__traceback__.tb_frame:  # it is what our caller is about to handle
        return error
    if isinstance(first, Vanished):
        return None
    if isinstance(first, OSError) and not isinstance(first, FscoordError) and first.errno is not None:
        return first
    raise first from first.__cause__
