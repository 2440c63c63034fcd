"""`FsFileLock`: filelock's `FileLock`, with a fair lock in a store before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import filelock

from fscoord._runtime import system
from fscoord.errors import FscoordError
from fscoord.integrations.filelock._store import Turn, forgetting, limit_of, place_of
from fscoord.store import Store, needed_store

EXIT_PAUSES_S: Final = (0.001, 0.004, 0.016, 0.064)
"""The pauses, in seconds, between the first tries to take filelock's lock. Later pauses last ``poll_interval``."""


class TurnHolder(filelock.UnixFileLock):
    """The common part of `FsFileLock` and `AsyncFsFileLock`.

    For each hold, the object keeps a `Turn`: an acquisition of the lock in the store.

    The lock in the store is the first lock. filelock's own lock on the lock file is the second lock. filelock calls
    `_acquire` again and again until the second lock is acquired, and calls `_release` to release the second lock. Both
    calls may come from any thread.
    """

    _place: tuple[Store, str] | None = None  # keeps the store open from one acquisition to the next

    def __init__(
        self,
        lock_file: str | system.os.PathLike[str],
        timeout: float = -1,
        *positional: Any,
        store: Store | None = None,
        **options: Any,
    ) -> None:
        self._store = None if store is None else needed_store(store)
        self._granted: Turn | None = None  # of this object's acquisition that is under way: a turn has one holder
        self._turns: dict[int, Turn] = {}  # by the descriptor of filelock's lock
        self._epoch = system.process_epoch()
        super().__init__(lock_file, timeout, *positional, **options)

    def _turn(self, timeout: float | None, blocking: bool | None) -> tuple[Turn, float]:
        """Return a new `Turn` (an acquisition of the store's lock), and how many seconds to wait for it."""
        timeout = self.timeout if timeout is None else timeout
        blocking = self.blocking if blocking is None else blocking
        limit = limit_of(timeout, blocking=blocking)
        mode = self.mode if self.has_explicit_mode else None
        self._place = place_of(self.lock_file, self._store, mode)
        return Turn(*self._place, limit), limit

    @property
    def _is_foreign(self) -> bool:
        """Whether this object was made before a fork, so that filelock refuses to use it."""
        return self._epoch != system.process_epoch()

    def _acquire(self) -> None:
        turn = self._granted
        if turn is not None:
            self._acquire_second(turn)
            return
        # The caller has called the `acquire` of a base class, which calls this method again after each poll interval.
        turn, _ = self._turn(None, False)
        try:
            with forgetting(self.lock_file):
                is_granted = turn.acquire(False)
            if is_granted:
                self._acquire_second(turn)
        finally:
            self._withdraw(turn)

    def _acquire_second(self, turn: Turn) -> None:
        """Try to acquire filelock's own lock. The caller holds the first lock under `turn`."""
        super()._acquire()
        # After the end of a holder, its first lock may be free a moment before the kernel has released the second one.
        for pause in EXIT_PAUSES_S if turn.limit > sum(EXIT_PAUSES_S) else ():
            if self._context.lock_file_fd is not None:
                break
            system.time.sleep(pause)
            super()._acquire()
        fd = self._context.lock_file_fd
        if fd is not None:
            self._turns[fd], self._granted = turn, None

    def _release(self) -> None:
        fd = self._context.lock_file_fd
        turn = None if fd is None else self._turns.get(fd)
        try:
            super()._release()
            self._leave(fd, turn)
        except FscoordError:
            raise
        except BaseException:  # if Ctrl-C has come after the release of the second lock, still release the first one
            if turn is not None and turn._current() is not None:
                self._leave(fd, turn)
            raise

    def _leave(self, fd: int | None, turn: Turn | None) -> None:
        """Release the first lock if the second lock, on the descriptor `fd`, was released."""
        if fd is None or turn is None or self._context.lock_file_fd is not None:
            return
        self._turns.pop(fd, None)  # before the release, because the next holder may get the same descriptor
        with forgetting(self.lock_file):
            turn.release()

    def _withdraw(self, turn: Turn) -> None:
        """Release or cancel `turn`. Do nothing if this object has also acquired the second lock under `turn`."""
        if self._granted is turn:
            self._granted = None
        if turn not in self._turns.values() and turn._current() is not None:
            with suppress(FscoordError):  # another error is propagating
                turn.release()

    @property
    def token(self) -> int:
        """The fencing token: a number that rises with each acquisition by any process, but not with a nested one.

        See `fscoord.recipes.Fenced` for its use.

        Raises:
            RuntimeError: this object does not hold the lock. A thread-local object may hold the lock in another thread.
        """
        fd = self._context.lock_file_fd
        turn = None if fd is None else self._turns.get(fd)
        if turn is None:
            raise RuntimeError(f"{self.lock_file} is not locked by this object, so there is no token; acquire it first")
        return turn.token


class FsFileLock(TurnHolder):
    """A `filelock.FileLock` that is fair, names its holder, and is free at once after its holder's death.

    The arguments, methods and errors are those of `filelock.FileLock`. In addition, an acquisition raises the errors of
    a `fscoord.FileStore`: for example `~fscoord.UnsupportedFilesystemError` on a mount whose locks exclude no process
    of another host. On such a mount a lock of filelock alone has no effect between hosts.

    Args:
        lock_file: the path of the lock file. The store is beside it, with ``.fscoord`` at the end of its name.
        timeout: how long to wait by default, in seconds; below zero: without limit.
        store: a store to use instead of the store beside the lock file, for example a store that was opened with
            ``lock="soft"``. All processes must then give the lock file the same absolute path.
        positional, options: the further arguments of `filelock.FileLock`. ``poll_interval`` matters only while a
            program that uses filelock alone holds the lock, and with ``cancel_check``.

    Raises:
        filelock.Timeout: from `acquire`, the lock was not free in time. The cause names the holders.
        LockLostError: from `release`, the lock was lost before, so another process may have held it, too.
        RuntimeError: from `acquire`, this thread would wait for itself; or the object was made before a fork.
    """

    def acquire(
        self,
        timeout: float | None = None,
        poll_interval: float | None = None,
        *,
        blocking: bool | None = None,
        cancel_check: Callable[[], bool] | None = None,
        **deprecated: Any,
    ) -> filelock.AcquireReturnProxy[Any]:
        """Acquire as `filelock.BaseFileLock.acquire` does, in the order of the requests.

        With `cancel_check`, the caller asks for the lock again after each `poll_interval`, and comes after all other
        contenders each time.
        """
        rest: dict[str, Any] = {"poll_interval": poll_interval, "cancel_check": cancel_check, **deprecated}
        if self._is_foreign or self.is_locked:  # filelock refuses it, or only counts it
            return super().acquire(timeout, blocking=blocking, **rest)
        begun = system.time.monotonic()
        turn, limit = self._turn(timeout, blocking)
        try:
            with forgetting(self.lock_file):
                is_granted = self._wait(turn, limit, poll_interval, cancel_check)
            if not is_granted:
                raise turn.timeout_error(self.lock_file)
            self._granted = turn
            left = timeout if limit in (0.0, math.inf) else max(0.0, begun + limit - system.time.monotonic())
            return super().acquire(left, blocking=blocking, **rest)
        finally:
            self._withdraw(turn)

    def _wait(
        self, turn: Turn, limit: float, poll_interval: float | None, cancel_check: Callable[[], bool] | None
    ) -> bool:
        if cancel_check is None or not limit:
            return turn.acquire(limit > 0, -1 if limit in (0.0, math.inf) else limit)
        pause, end = self.poll_interval if poll_interval is None else poll_interval, system.time.monotonic() + limit
        while not turn.acquire(timeout=max(0.0, min(pause, end - system.time.monotonic()))):
            if cancel_check() or system.time.monotonic() >= end:
                return False
        return True
