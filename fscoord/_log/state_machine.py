"""`StateMachine`: the protocol between a log and the object that applies its data records. A log interprets no key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fscoord._log.files.spill import Fetch, SpilledRecord, Spot


class StateMachine(Protocol):
    """An object that applies the data records of a log in order. The log calls every method under the process mutex."""

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records. The value of a record that sets, appends or pushes a single value may be spilled.

        A spilled value stays in the log's file. Then the record holds the location of the value, and not the value.
        """

    def mark_spilled(self, keys: set[bytes]) -> None:
        """Announce that the next call of `apply` contains spilled values of `keys`."""

    def relocate_spilled(self, spots: Iterable[Spot]) -> bool:
        """Replace the location of each spilled value by its location in the next generation's snapshot, from `spots`.

        Return False if a key is missing from `spots`. The log then applies all records again.
        """

    def reset(self) -> None:
        """Discard the state. All records will be applied again, from the first."""

    def snapshot(self, fetch: Fetch) -> Iterable[tuple[int, bytes, bytes]]:
        """Yield (kind, key, value) of records that rebuild the present state. `fetch` reads a spilled value."""

    def live_size(self) -> int:
        """Return the approximate size in bytes of the records that `snapshot` yields."""
