"""`dump`: what a store's file holds, record by record, for people and for post-mortems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fscoord._log import path as paths
from fscoord._log.dump import Entry, dump_log

__all__ = ["Entry", "dump"]


def dump(path: Any) -> Iterator[Entry]:
    """Yield what the log at `path` holds, record by record, without locking or writing.

    Raises:
        StoreUnavailableError: it can't be opened.
        CorruptLogError: it is damaged; what comes before the damage was yielded.
    """
    return dump_log(paths.resolve(path))
