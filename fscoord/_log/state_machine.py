"""`StateMachine`: the protocol between a log and the object that applies its data records. A log interprets no key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fscoord._log.files.spill import Fetch, SpilledRecord, Spot


class StateMachine(Protocol):
    """An object that applies the data records of a log in order. The log calls every method under the process mutex."""

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records. The value of a record that sets, appends or pushes a single value may be spilled."""

    def mark_spilled(self, keys: set[bytes]) -> None:
        """Prepare for the next call of `apply`: the values of `keys` in its records are spilled."""

    def relocate_spilled(self, spots: Iterable[Spot]) -> bool:
        """Replace the offsets of all spilled values by the offsets in `spots`, which are in the next snapshot.

        Return False if the value of a key is missing from `spots`. The log then applies all records again.
        """

    def reset(self) -> None:
        """Discard the state. All records will be applied again, from the first."""

    def snapshot(self, fetch: Fetch) -> Iterable[tuple[int, bytes, bytes]]:
        """Yield kind, key and value of records that lead to the same state as all records applied so far.

        `fetch` reads the bytes of a spilled value.
        """

    def live_size(self) -> int:
        """Return approximately how many bytes the records of `snapshot` take in a log."""
