"""`Consumer`: who makes sense of the data records of a log, which itself knows no keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from fscoord._log.record import Record

__all__ = ["Consumer"]


class Consumer(Protocol):
    """Who makes sense of the data records."""

    def apply(self, records: Sequence[Record]) -> None:
        """Take in the next records."""

    def reset(self) -> None:
        """Forget every record: they come again from the first."""

    def snapshot(self) -> Iterable[tuple[int, bytes, bytes]]:
        """Return kind, key and value of records that amount to all those that were taken in."""

    def live_size(self) -> int:
        """Return about how many bytes of a log those records take."""
