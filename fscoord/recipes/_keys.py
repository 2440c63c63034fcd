"""Reading a key that another process may delete meanwhile, without waiting for it."""

from __future__ import annotations

from typing import Final

from fscoord.store import Store

__all__ = ["read_now"]

ABSENT: Final = b"?"
"""What no value of a recipe that is read by `read_now` is."""


def read_now(store: Store, key: bytes) -> bytes | None:
    """Return the value of `key` as it is now, or None; it must never be `ABSENT`.

    `get` would wait for a key that was deleted behind a `check`. A compare-and-set whose expectation fails writes
    nothing and returns what it found, or on a missing key the expectation.
    """
    found = store.compare_set(key, ABSENT, ABSENT)
    return None if found == ABSENT else found
