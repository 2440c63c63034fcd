"""What stands under the keys of recipes: read without waiting for it, and refused where it is not of theirs."""

from __future__ import annotations

import math
from typing import Final

from fscoord._arguments import CounterRangeError, MalformedText, NotACounterError, key_text, parse_uint63, to_seconds
from fscoord._runtime import system
from fscoord._waiting.backoff import Backoff
from fscoord.errors import FscoordError, StoreTimeoutError
from fscoord.store import Store

__all__ = ["Refusals", "RefusedError", "count_in", "counted", "foreign", "read_now"]

ABSENT: Final = b"?"
"""What no value of a recipe that is read by `read_now` is."""


def read_now(store: Store, key: bytes, absent: bytes = ABSENT) -> bytes | None:
    """Return the value of `key` as it is now, or None; it must never be `absent`.

    `get` would wait for a key that was deleted behind a `check`. A compare-and-set whose expectation fails writes
    nothing and returns what it found, or on a missing key the expectation.
    """
    found = store.compare_set(key, absent, absent)
    return None if found == absent else found


class RefusedError(StoreTimeoutError):
    """Every try of an operation was refused, until its time was over; so nothing was written."""


class Refusals:
    """The compare-and-sets of one operation on `key` that `store` has refused, because others changed it before.

    They may take the store's timeout; or until the moment `end` of the monotonic clock, if that comes first.
    """

    def __init__(self, store: Store, key: bytes, end: float = math.inf) -> None:
        self._store = store
        self._key = key
        self._end = end
        self._backoff: Backoff | None = None  # most operations need none

    def add(self) -> None:
        """Count one, and pause before the next.

        Raises:
            RefusedError: there were many of them, until the time was over.
        """
        if self._backoff is None:
            left = max(0.0, self._end - system.time.monotonic())
            self._backoff = Backoff(min(to_seconds(self._store.timeout), left))
        if not self._backoff.pause():
            waited = self._backoff.waited()
            raise RefusedError(
                f"others changed key {key_text(self._key)!r} before each of {self._backoff.tries} tries to change it"
                f" within {waited:.3g} s; nothing was written. Find the processes that write it so often",
                keys=[key_text(self._key)],
                waited=waited,
            )


def foreign(key: bytes, text: bytes, what: str) -> FscoordError:
    """Return the error for a `key` that holds `text`, where a recipe writes nothing but `what`."""
    return FscoordError(
        f"key {key_text(key)!r} holds {text[:40]!r}, which is no {what}: something else wrote it; delete the key, or"
        " use another name"
    )


def count_in(key: bytes, text: bytes) -> int:
    """Return the count that `key` holds as `text`.

    Raises:
        FscoordError: it is none.
    """
    try:
        return parse_uint63(text)
    except MalformedText as error:
        raise foreign(key, text, "count") from error


def counted(store: Store, key: bytes, amount: int = 1) -> int:
    """Add `amount` to the counter `key` and return the sum.

    Raises:
        FscoordError: something else stands there, or a number that no recipe gets to.
    """
    try:
        return store.add(key, amount)
    except (NotACounterError, CounterRangeError) as error:
        raise FscoordError(f"{error}; delete the key, or use another name") from error
