"""`StateMachine`: the protocol by which a log passes on its data records. The log itself knows no keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fscoord._log.io.spill import Fetch, SpilledRecord, Spot

__all__ = ["StateMachine"]


class StateMachine(Protocol):
    """Applies the data records of a log, in order. The log calls it under the process mutex."""

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Apply the next records. One that sets, appends or pushes a single value may have it spilled."""

    def mark_spilled(self, keys: set[bytes]) -> None:
        """The next records have spilled values of these keys."""

    def relocate_spilled(self, spots: Iterable[Spot]) -> bool:
        """The log continues in a new generation, whose snapshot has the spilled values at `spots`.

        Return False if one is missing.
        """

    def reset(self) -> None:
        """Forget all records: they will be applied again from the first."""

    def snapshot(self, fetch: Fetch) -> Iterable[tuple[int, bytes, bytes]]:
        """Yield kind, key and value of records that lead to the same state as all those applied."""

    def live_size(self) -> int:
        """Return about how many bytes the records of `snapshot` take in a log."""
