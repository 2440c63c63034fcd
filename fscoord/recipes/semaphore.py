"""`Semaphore`: so many at a time, first come first served."""

from __future__ import annotations

from fscoord._arguments import Key, Timeout, check_positive
from fscoord.recipes._entry import Entry
from fscoord.recipes._hold import Exclusive
from fscoord.store import Store

__all__ = ["Semaphore"]


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
