"""`Consumer`: who makes sense of the data records of a log, which itself knows no keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fscoord._log.io.spill import Fetch, SpilledRecord, Spot

__all__ = ["StateMachine"]


class StateMachine(Protocol):
    """Who makes sense of the data records."""

    def apply(self, records: Sequence[SpilledRecord]) -> None:
        """Take in the next records. Only those that set, append or push one value may have left it in the file."""

    def mark_spilled(self, keys: set[bytes]) -> None:
        """Records of these keys come next whose values are left in the file."""

    def relocate_spilled(self, spots: Iterable[Spot]) -> bool:
        """The log goes on in another file, whose snapshot has the long values at `spots`; False if some lack."""

    def reset(self) -> None:
        """Forget every record: they come again from the first."""

    def snapshot(self, fetch: Fetch) -> Iterable[tuple[int, bytes, bytes]]:
        """Return kind, key and value of records that amount to all those that were taken in."""

    def live_size(self) -> int:
        """Return about how many bytes of a log those records take."""
