"""Which keys a log has told of, for who rings for others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fscoord._log.format import record
from fscoord._log.io.spill import Fetch, SpilledRecord, Spot
from fscoord._log.state_machine import Consumer
from fscoord._log.wakeup.doorbell import SIZE, bucket

__all__ = ["News"]


class News:
    """A consumer that hands on what it is given, and remembers which keys were written to."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self._buckets: set[int] = set()
        self.is_of_all = False

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Take in the next records."""
        self._consumer.apply(records)
        for kind, key, value, _, _ in records:
            if kind == record.MULTI_SET and isinstance(value, bytes):
                self._buckets.update(bucket(name) for name, _ in record.decode_pairs(value))
            else:
                self._buckets.add(bucket(key))

    def reset(self) -> None:
        """Forget every record: they come again from the first."""
        self._consumer.reset()
        self.is_of_all = True

    def expect_long(self, keys: set[bytes]) -> None:
        """Say so to the consumer."""
        self._consumer.expect_long(keys)

    def rehome(self, spots: Iterable[Spot]) -> bool:
        """Say so to the consumer."""
        return self._consumer.rehome(spots)

    def snapshot(self, fetch: Fetch) -> Iterable[tuple[int, bytes, bytes]]:
        """Return what the consumer amounts to."""
        return self._consumer.snapshot(fetch)

    def live_size(self) -> int:
        """Return about how many bytes of a log that takes."""
        return self._consumer.live_size()

    def take(self) -> Collection[int]:
        """Return the buckets that were written to since the last call."""
        buckets: Collection[int] = range(SIZE) if self.is_of_all else self._buckets
        self._buckets, self.is_of_all = set(), False
        return buckets
