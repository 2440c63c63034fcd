"""`ReadWriteLock`: many readers or one writer, first come first served."""

from __future__ import annotations

from itertools import takewhile

from fscoord._arguments import Key, Timeout
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import Contender, Exclusive
from fscoord.store import Store

__all__ = ["ReadWriteLock"]


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
