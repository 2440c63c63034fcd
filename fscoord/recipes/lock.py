"""`Lock` and `RLock`: one at a time, first come first served."""

from __future__ import annotations

from typing import Final

from fscoord._arguments import Key, Timeout
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord.recipes._cleanup import HERE
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import Exclusive, _Held
from fscoord.store import Store

__all__ = ["Lock", "RLock"]

_POP: Final = list[str].pop


class Lock(Exclusive):
    """A lock that at most one process, or thread, holds, in the order of the store.

    Its methods are those of `threading.Lock`, so that it takes its place; as a context manager it waits no longer than
    `timeout`. It is fair: whoever comes first is served first. Who waits is woken alone.

    On a `~fscoord.FileStore` the lock of a process that died, in whatever way, or closed its store instead of releasing
    is free within 100 ms on one machine. A process that is stopped keeps it, and so do the dead on stores that can't
    tell them (`~fscoord.Store.has_liveness`), unless there is a `ttl`. From one who was taken for dead and lives, what
    the lock protects is protected by the fencing `token` alone: see `Fenced`.

    Args:
        store: where all who share the lock meet.
        name: the lock's name there; keys that begin with it and a slash belong to the lock.
        timeout: how long ``with`` waits, in seconds or as a `timedelta`; None means the store's.
        ttl: after how many seconds without a sign of life, by the clock of whoever waits, somebody else may have it;
            for a holder that is stopped, or on a store that can't tell the dead. A thread gives those signs as long as
            it is held. None: never.
    """

    _what = "the lock"

    def __init__(self, store: Store, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None) -> None:
        super().__init__(store, name, _one, timeout, ttl)

    def locked(self) -> bool:
        """Return whether anybody holds it."""
        return bool(self.holders())


class RLock(Lock):
    """A `Lock` that the thread which holds it may acquire again, and then releases as often, as `threading.RLock`.

    Others still count as others, also in the same thread, if they are other objects.
    """

    _whose = "thread"

    def __init__(self, store: Store, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None) -> None:
        super().__init__(store, name, timeout, ttl)
        self._levels: list[str] = []  # the hold, and each time that it was acquired again
        self._owner: tuple[int, object] | None = None

    def _acquire(self, mode: str, blocking: bool, timeout: Timeout | None, got: list[str]) -> bool:
        if not self._is_owned_by(HERE.__dict__):
            return super()._acquire(mode, blocking, timeout, got)
        name = self._line.new_id()
        got.append(name)
        self._levels.append(name)
        return True

    def _is_owned_by(self, here: object) -> bool:
        owner = self._owner
        return owner is not None and owner[1] is here and owner[0] == system.process_epoch()

    def _begin(self, served: Entry) -> None:
        self._levels = [served.id]
        self._owner = system.process_epoch(), HERE.__dict__

    def _end(self, served: Entry) -> None:
        if self._levels[:1] == [served.id]:
            self._owner = None

    def _undo(self, got: list[str]) -> None:
        if got and got[0] in self._levels[1:]:
            try:
                self._levels.remove(got[0])
            except ValueError as error:
                raise_unless_absent(error)
        else:
            super()._undo(got)

    def _release(self, gone: list[_Held | str], here: object) -> bool:
        if not self._is_owned_by(here):
            return False
        if len(self._levels) == 1:
            return super()._release(gone, here)
        gone.extend(map(_POP, (self._levels,)))
        return True


def _one(entries: list[Entry]) -> int:
    return min(1, len(entries))
