"""What agents do for the tests of shared mounts, beside what `contract.worker` has."""

from __future__ import annotations

import random
from typing import Any

from fscoord.store import Store


def value(size: int, seed: int) -> bytes:
    """Return `size` bytes that look like no others."""
    return random.Random(seed).randbytes(size)


def set_value(store: Store, key: str, size: int, seed: int) -> None:
    store.set(key, value(size, seed))


def has_value(store: Store, key: str, size: int, seed: int) -> bool:
    return store.get(key) == value(size, seed)


def fingerprint(store: Store) -> dict[str, Any]:
    """Return every key and value."""
    keys = store.list_keys()
    return dict(zip(keys, store.multi_get(keys), strict=True))
