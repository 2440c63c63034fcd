"""The locks: `Lock`, `RLock`, `Semaphore` and `ReadWriteLock`. Each is acquired in the order of the requests."""

from __future__ import annotations

from itertools import takewhile
from typing import Final

from fscoord._arguments import Key, Timeout, check_positive
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord.recipes._cleanup import HERE
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import Contender, Exclusive, _Held
from fscoord.store import Store

__all__ = ["Lock", "RLock", "ReadWriteLock", "Semaphore"]

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


class Semaphore(Exclusive):
    """What at most `value` hold at a time: processes, threads, or one of them several times over.

    It is bounded: nobody releases what it did not acquire, and `release` gives back what this object acquired last. It
    is fair, it is freed by death, and it has tokens, as `fscoord.recipes.Lock` has.

    Args:
        store: where all who share the semaphore meet.
        name: its name there; keys that begin with it and a slash belong to it.
        value: how many may hold it; the same for all.
        timeout: how long ``with`` waits, in seconds or as a `timedelta`; None means the store's.
        ttl: as for `fscoord.recipes.Lock`.

    Raises:
        ValueError: `value` is below 1; or, from `acquire`, those who have it or wait for it give another value.
    """

    _what = "the semaphore"

    def __init__(
        self, store: Store, name: Key, value: int = 1, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        self._value = check_positive("value", value)
        self._mode = str(self._value)
        super().__init__(store, name, self._admits, timeout, ttl)

    def _admits(self, entries: list[Entry]) -> int:
        for other in [entry for entry in entries if entry.mode != self._mode]:
            raise ValueError(
                f"the semaphore {self.name!r} has value={self._value} here and {other.mode} for {other.owner}: all must"
                " give the same"
            )
        return min(self._value, len(entries))


class Side(Exclusive):
    """One side of a `ReadWriteLock`: a lock like `fscoord.recipes.Lock`, which the other side excludes."""

    def __init__(
        self, store: Store, name: Key, timeout: Timeout | None, ttl: Timeout | None, mode: str, what: str
    ) -> None:
        self._mode = mode
        self._what = what
        super().__init__(store, name, _admits, timeout, ttl)


class ReadWriteLock:
    """A lock that many hold for reading or one for writing.

    Nobody starves: a reader that comes behind a waiting writer waits, too, until that one has had its turn. Readers
    that wait behind one another get it together. A reader does not become a writer; it releases first. It is freed by
    death, and both sides have tokens, as `fscoord.recipes.Lock` has.

    Args:
        store: where all who share the lock meet.
        name: its name there; keys that begin with it and a slash belong to it.
        timeout: how long ``with`` waits, in seconds or as a `timedelta`; None means the store's.
        ttl: as for `fscoord.recipes.Lock`.

    Attributes:
        reader: the side for reading: ``with lock.reader:``, or ``acquire`` and ``release``.
        writer: the side for writing.
    """

    def __init__(self, store: Store, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None) -> None:
        self.reader = Side(store, name, timeout, ttl, "r", "the lock for reading")
        self.writer = Side(store, name, timeout, ttl, "w", "the lock for writing")

    def holders(self) -> list[Contender]:
        """Return who holds it, the readers or the writer, in the order of their tokens."""
        return self.reader.holders()

    def waiters(self) -> list[Contender]:
        """Return who waits for it, first come first."""
        return self.reader.waiters()


def _admits(entries: list[Entry]) -> int:
    readers = sum(1 for _ in takewhile(lambda entry: entry.mode == "r", entries))
    return readers or min(1, len(entries))
