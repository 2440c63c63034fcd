"""`Lock` and `RLock`: one at a time, first come first served."""

from __future__ import annotations

from fscoord import _system as system
from fscoord.arguments import Key, Timeout
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import Exclusive, _Held
from fscoord.store import Store

__all__ = ["Lock", "RLock"]


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
        return bool(self.owners())


class RLock(Lock):
    """A `Lock` that the thread which holds it may acquire again, and then releases as often, as `threading.RLock`.

    Others still count as others, also in the same thread, if they are other objects.
    """

    def __init__(self, store: Store, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None) -> None:
        super().__init__(store, name, timeout, ttl)
        self._depth = 0
        self._thread: tuple[int, int] | None = None

    def _acquire(self, mode: str, blocking: bool, timeout: Timeout, got: list[str]) -> bool:
        if self._thread != (system.life(), system.threading.get_ident()):
            return super()._acquire(mode, blocking, timeout, got)
        self._depth += 1
        got.append("")
        return True

    def _begin(self, served: Entry) -> None:  # noqa: ARG002 - its token is not asked for
        self._depth = 1
        self._thread = system.life(), system.threading.get_ident()

    def _end(self) -> None:
        self._thread = None

    def _undo(self, name: str, got: list[str]) -> None:
        if self._thread == (system.life(), system.threading.get_ident()):
            self._thread = None
        super()._undo(name, got)

    def _release(self, gone: list[_Held | None]) -> None:
        if self._thread != (system.life(), system.threading.get_ident()):
            raise RuntimeError(f"the lock {self.name!r} is not held by this object, in this thread")
        if self._depth > 1:
            self._depth -= 1
            gone.append(None)
        else:
            super()._release(gone)


def _one(entries: list[Entry]) -> int:
    return min(1, len(entries))
