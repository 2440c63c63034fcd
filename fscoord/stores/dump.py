"""`dump`: what a store's file holds, record by record, for people and for post-mortems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fscoord._log.inspect.dump import Entry, dump_log
from fscoord._log.io import safe_files

__all__ = ["Entry", "dump"]


def dump(path: Any) -> Iterator[Entry]:
    """Yield what the log at `path` holds, record by record, without locking or writing.

    Raises:
        StoreUnavailableError: it can't be opened.
        CorruptLogError: it is damaged; what comes before the damage was yielded.
    """
    return dump_log(safe_files.resolve(path))
