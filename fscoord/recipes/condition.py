"""`Condition`: the holder of a lock waits until another holder of the lock notifies it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import takewhile
from typing import Final, TypeVar

from fscoord._arguments import Key, Timeout, check_positive, key_bytes, refuse_copies, to_seconds
from fscoord._runtime import system
from fscoord._waiting.awaited import CONDITION
from fscoord._waiting.wait import WaitSteps
from fscoord.errors import FscoordError
from fscoord.recipes._cleanup import Undoable, undone_by
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import HeldEntry
from fscoord.recipes._line import Line, caller_of
from fscoord.recipes.lock import Lock, RLock
from fscoord.store import Store, needed_store, shown

C = TypeVar("C", bound="Condition")
Round = tuple[str, list[HeldEntry | str], list[str]]
"""One wait, to be undone: the id of its entry, its release of the lock, and the ids of its acquisition of the lock."""

WAITS: Final = "c"
NOTIFIED: Final = "n"
"""The modes of the entries. No lock has these modes, so `holdings` can tell the line of a condition from others."""


class _Waiters(Line):
    """The line of the processes that wait for a notification. An entry is served once it is `NOTIFIED`."""

    def _held_up(self, entry: Entry) -> str:  # noqa: ARG002 - no process holds up another one
        return f"a notification of the condition {self.name!r}"

    def notify(self, n: float) -> None:
        """Serve the first `n` waiters that are not known dead, and remove the entries of dead processes."""
        dead = self._dead(self.entries())

        def notified(entries: list[Entry]) -> list[Entry]:
            left, found = n, []
            for entry in entries:
                if entry.session in dead:
                    continue
                is_next = entry.mode == WAITS and left > 0
                left -= is_next
                found.append(entry._replace(mode=NOTIFIED) if is_next else entry)
            return found

        self._change(notified)


def _notified(entries: list[Entry]) -> int:
    return sum(1 for _ in takewhile(lambda entry: entry.mode == NOTIFIED, entries))


_acquiring: Final = undone_by(lambda condition, got, _: condition._lock._undo(got))
_releasing: Final = undone_by(lambda condition, gone, here: condition._lock._finish(gone, here), FscoordError)
_waiting: Final = undone_by(lambda condition, rounds, here: condition._undo(rounds, here))
_notifying: Final = undone_by(lambda *_: None)  # a notification is one operation: only `here` is needed


class Condition(Undoable):
    """A condition variable on a lock that processes share, like `threading.Condition`.

    A process that holds the lock tests shared data, and calls `wait` if it must wait for a change. A process that has
    changed the data calls `notify` while it holds the lock. A notification goes to the process that has waited longest
    and is not known dead. A process that dies after its notification has used it up.

    A ``with`` statement acquires and releases the lock. If `wait` raises an error, the lock is no longer held. The end
    of a ``with condition:`` then releases nothing, but the end of a ``with lock:`` would raise `RuntimeError`.

    Args:
        store: the store that all processes share.
        name: the condition's name in the store. Keys that begin with the name and a slash belong to the condition.
        lock: the lock, which has the same name in all processes. None means an `RLock` with the name ``{name}/lock``.

    Raises:
        TypeError: `lock` is not a lock of ``fscoord.recipes``.
    """

    __reduce__ = refuse_copies

    def __init__(self, store: Store, name: Key, lock: Lock | None = None) -> None:
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._line = _Waiters(store, name, _notified)
        self._lock = RLock(store, self._name + b"/lock") if lock is None else lock
        if not isinstance(self._lock, Lock):
            raise TypeError(f"a Condition needs a Lock or an RLock of fscoord.recipes, got {type(lock).__name__}")
        self._here = self._lock._here

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, f"on {self._lock!r}")

    @_acquiring
    def acquire(
        self, got: list[str], here: object, blocking: bool = True, timeout: Timeout | None = -1
    ) -> bool | WaitSteps[bool]:
        """Acquire the lock. The arguments and errors are those of `Lock.acquire`."""
        return self._lock._acquire(got, here, blocking, timeout)

    @_releasing
    def release(self, gone: list[HeldEntry | str], here: object) -> None:
        """Release the lock. The errors are those of `Lock.release`."""
        self._lock._release_one(gone, here)

    @_waiting
    def wait(self, _rounds: list[Round], _here: object, timeout: Timeout | None = None) -> WaitSteps[bool]:
        """Release the lock, wait for a notification, and acquire the lock again. Return False after the timeout.

        Args:
            timeout: how long to wait for the notification, in seconds or as a `timedelta`; None means without limit, as
                in `threading`. The acquisition of the lock has no limit.

        Raises:
            RuntimeError: the lock is not held.
            LockLostError: the lock was lost, or another process took this process for dead.
        """
        return self._wait(_rounds, _here, math.inf if timeout is None else to_seconds(timeout))

    @_waiting
    def wait_for(
        self, _rounds: list[Round], _here: object, predicate: Callable[[], object], timeout: Timeout | None = None
    ) -> WaitSteps[bool]:
        """Call `wait` until ``predicate()`` is true. Return False if it is false after the timeout.

        Args:
            predicate: tests the data. It is called while the lock is held; with ``fscoord.aio``, in another thread.
            timeout: the limit for all waits together, as for `wait`. The errors are also those of `wait`.
        """
        end = math.inf if timeout is None else system.time.monotonic() + to_seconds(timeout)
        while True:
            self._check_held(_here)
            is_true, left = bool(predicate()), end - system.time.monotonic()
            if is_true or left <= 0:
                return is_true
            yield from self._wait(_rounds, _here, left)
            _rounds.clear()

    @_notifying
    def notify(self, _: list[object], here: object, n: int = 1) -> None:
        """Wake the `n` processes that have waited longest and are not known dead, or all if there are fewer.

        Raises:
            RuntimeError: the lock is not held.
            ValueError: `n` is below 1.
        """
        self._check_held(here)
        self._line.notify(check_positive("n", n))

    @_notifying
    def notify_all(self, _: list[object], here: object) -> None:
        """Wake all waiting processes. The errors are those of `notify`."""
        self._check_held(here)
        self._line.notify(math.inf)

    @_acquiring
    def __enter__(self: C, got: list[str], here: object) -> WaitSteps[C]:  # noqa: PLE0302 - they are not given
        limit = self._lock._patience()
        yield from self._lock._entering(self._lock._acquire(got, here, True, limit), limit)
        return self

    @_releasing
    def __exit__(self, gone: list[HeldEntry | str], here: object, *error: object) -> None:  # noqa: PYI036 - as above
        if error[:1] == (None,) or self._is_own(here):
            self._lock._release_one(gone, here)

    def _is_own(self, here: object) -> bool:
        """Return whether the calling thread or task has made the acquisition that this object holds.

        After an error in `wait`, another thread with the same `Lock` may hold the lock.
        """
        entry = self._lock._current()
        if entry is None or isinstance(self._lock, RLock):
            return self._is_held(here)
        return caller_of(entry) is (system.threading.current_thread() if type(here) is dict else here)

    def _is_held(self, here: object) -> bool:
        lock = self._lock
        return lock._owned_by(here) is not None if isinstance(lock, RLock) else lock._current() is not None

    def _check_held(self, here: object) -> None:
        if not self._is_held(here):
            raise self._lock._not_held()

    def _wait(self, rounds: list[Round], here: object, limit: float) -> WaitSteps[bool]:
        self._check_held(here)
        lock, line, name = self._lock, self._line, self._line.new_id()
        undo: Round = name, [], []
        rounds.append(undo)
        entry = line.join(name, WAITS)  # before the release, so that no later notification is missed
        assert entry is not None
        lock._release_one(undo[1], here)
        while isinstance(lock, RLock) and lock._release(undo[1], here):  # as often as this thread has acquired it
            pass  # but a `Lock` only once: the next hold may be that of another thread with the same object
        served = yield from line.await_turn(entry, limit, CONDITION)
        if served is not None:
            line.leave(name)
        for _ in undo[1]:
            found = lock._acquire(undo[2], here, True, -1)
            if not isinstance(found, bool):
                yield from found
        return served is not None

    def _undo(self, rounds: list[Round], here: object) -> None:
        """Stop waiting and release the lock. This method may be called twice, and the first call may be interrupted."""
        lock = self._lock
        for name, gone, got in rounds:
            self._line.leave_quietly(name)
            for level in reversed(got):
                lock._undo([level])
            lock._finish(gone, here)
            while isinstance(lock, RLock) and self._is_held(here):  # some levels were not released yet
                lock._finish([], here)
