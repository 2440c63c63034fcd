"""`ChangedKeys`: the buckets of all changed keys, collected for the process that rings the bell for its whole host."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fscoord._log.files.spill import SpilledRecord
from fscoord._log.format import record
from fscoord._log.state_machine import StateMachine
from fscoord._log.wakeup.doorbell import SIZE, bucket


class ChangedKeys:
    """Passes every call on to `state_machine`, and collects the buckets of all changed keys.

    Attributes:
        covers_all: whether any key may have changed, so that `take` returns all buckets.
    """

    def __init__(self, state_machine: StateMachine) -> None:
        self._state_machine = state_machine
        self.mark_spilled, self.relocate_spilled = state_machine.mark_spilled, state_machine.relocate_spilled
        self.snapshot, self.live_size = state_machine.snapshot, state_machine.live_size
        self._buckets: set[int] = set()
        self.covers_all = False

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records."""
        self._state_machine.apply(records)
        for kind, key, value, _, _ in records:
            if kind == record.MULTI_SET and isinstance(value, bytes):
                self._buckets.update(bucket(name) for name, _ in record.decode_pairs(value))
            else:
                self._buckets.add(bucket(key))

    def reset(self) -> None:
        """Discard the state. All records are applied again, from the first."""
        self._state_machine.reset()
        self.covers_all = True

    def mark_all(self) -> None:
        """Make the next `take` return all buckets, because a record, such as a death record, concerns every waiter."""
        self.covers_all = True

    def take(self) -> Collection[int]:
        """Return the buckets of the keys that have changed since the last call."""
        buckets: Collection[int] = range(SIZE) if self.covers_all else self._buckets
        self._buckets, self.covers_all = set(), False
        return buckets
