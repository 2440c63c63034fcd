"""How handles on a log are opened, here and in other processes, which had better not import pytest: that takes long."""

from __future__ import annotations

from typing import Any

from support.internals import COMPACT_BYTES, SPILL_BYTES, Timeout

from fscoord.store import Store
from fscoord.stores.file import FileStore
from fscoord.stores.prefix import PrefixStore


def open_file(path: str, lock: str, timeout: Timeout, *, is_short: bool = False) -> FileStore:
    compact, spill = (1, 1) if is_short else (COMPACT_BYTES, SPILL_BYTES)
    return FileStore(path, lock=lock, timeout=timeout, compact_bytes=compact, spill_bytes=spill)


def open_spec(spec: dict[str, Any], timeout: Timeout) -> Store:
    """Open what `Place.spec` describes."""
    store: Store = open_file(spec["path"], spec["lock"], timeout, is_short=spec["is_short"])
    for prefix in spec["prefixes"]:
        store = PrefixStore(prefix, store)
    return store
