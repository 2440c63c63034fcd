"""Which keys a log has told of, for who rings for others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from fscoord._log.format import record
from fscoord._log.io.spill import Fetch, SpilledRecord, Spot
from fscoord._log.state_machine import StateMachine
from fscoord._log.wakeup.doorbell import SIZE, bucket

__all__ = ["ChangedKeys"]


class ChangedKeys:
    """A state machine that hands on what it is given, and remembers which keys were written to."""

    def __init__(self, state_machine: StateMachine) -> None:
        self._state_machine = state_machine
        self._buckets: set[int] = set()
        self.covers_all = False

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Take in the next records."""
        self._state_machine.apply(records)
        for kind, key, value, _, _ in records:
            if kind == record.MULTI_SET and isinstance(value, bytes):
                self._buckets.update(bucket(name) for name, _ in record.decode_pairs(value))
            else:
                self._buckets.add(bucket(key))

    def reset(self) -> None:
        """Forget every record: they come again from the first."""
        self._state_machine.reset()
        self.covers_all = True

    def mark_spilled(self, keys: set[bytes]) -> None:
        """Say so to the state machine."""
        self._state_machine.mark_spilled(keys)

    def relocate_spilled(self, spots: Iterable[Spot]) -> bool:
        """Say so to the state machine."""
        return self._state_machine.relocate_spilled(spots)

    def snapshot(self, fetch: Fetch) -> Iterable[tuple[int, bytes, bytes]]:
        """Return what the state machine amounts to."""
        return self._state_machine.snapshot(fetch)

    def live_size(self) -> int:
        """Return about how many bytes of a log that takes."""
        return self._state_machine.live_size()

    def mark_all(self) -> None:
        """A record was read that concerns every waiter: a session, a death, a participant that left."""
        self.covers_all = True

    def take(self) -> Collection[int]:
        """Return the buckets that were written to since the last call."""
        buckets: Collection[int] = range(SIZE) if self.covers_all else self._buckets
        self._buckets, self.covers_all = set(), False
        return buckets
