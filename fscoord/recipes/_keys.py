"""Functions for the keys of recipes: retries of compare-and-sets, counters, and errors for values of other programs."""

from __future__ import annotations

import math
from collections.abc import Callable

from fscoord._arguments import (
    CounterRangeError,
    MalformedText,
    NotACounterError,
    key_text,
    parse_uint63,
    to_seconds,
)
from fscoord._runtime import system
from fscoord._waiting.timing import Backoff
from fscoord.errors import FscoordError, StoreTimeoutError
from fscoord.store import Store


class RefusedError(StoreTimeoutError):
    """No try of a compare-and-set succeeded within the time limit of the operation. Nothing was written."""


class Refusals:
    """Counts the failed compare-and-sets of one operation on `key`, and limits how long the operation retries.

    The limit is the store's timeout, or the time `end` of the monotonic clock if that is earlier.
    """

    def __init__(self, store: Store, key: bytes, end: float = math.inf) -> None:
        self._store = store
        self._key = key
        self._end = end
        self._backoff: Backoff | None = None  # most operations succeed at the first try

    def add(self) -> None:
        """Count a failed compare-and-set, and pause before the next try.

        Raises:
            RefusedError: the time limit has passed.
        """
        if self._backoff is None:
            left = max(0.0, self._end - system.time.monotonic())
            self._backoff = Backoff(min(to_seconds(self._store.timeout), left))
        if not self._backoff.pause():
            waited = self._backoff.waited()
            raise RefusedError(
                f"other processes changed key {key_text(self._key)!r} before each of this process's"
                f" {self._backoff.tries} tries in {waited:.3g} s; nothing was written. Find the processes that write"
                " the key so often",
                keys=[key_text(self._key)],
                waited=waited,
            )


def change(store: Store, key: bytes, step: Callable[[bytes], bytes | None]) -> bool:
    """Replace the value of `key` by the result of `step`, by compare-and-set. Repeat if another process was faster.

    `step` gets the value, or ``b""`` if there is none. If `step` returns None, write nothing and return False.

    Raises:
        RefusedError: no try has succeeded within the store's timeout.
    """
    text, refusals = store.get(key, default=b""), Refusals(store, key)
    while True:
        new = step(text)
        if new is None:
            return False
        found = store.compare_set(key, text, new)
        if found == new:
            return True
        refusals.add()
        text = found if found != text else b""  # the expected text, but nothing was set: the key was deleted


def foreign_value_error(key: bytes, text: bytes, what: str) -> FscoordError:
    """Return the error that says that `text`, the value of `key`, is not a valid `what`. Example of `what`: "count"."""
    return FscoordError(
        f"key {key_text(key)!r} holds {text[:40]!r}, which is not a valid {what}: another program wrote it; delete the"
        " key, or use another name"
    )


def parse_count(key: bytes, text: bytes) -> int:
    """Parse `text`, the value of the counter `key`.

    Raises:
        FscoordError: `text` is not a count.
    """
    try:
        return parse_uint63(text)
    except MalformedText as error:
        raise foreign_value_error(key, text, "count") from error


def add_checked(store: Store, key: bytes, amount: int = 1) -> int:
    """Add `amount` to the counter `key` and return the sum.

    Raises:
        FscoordError: the value of `key` is not a counter, or the sum is out of its range.
    """
    try:
        return store.add(key, amount)
    except (NotACounterError, CounterRangeError) as error:
        raise counter_error(error) from error


def counter_error(error: NotACounterError | CounterRangeError) -> FscoordError:
    """Return the error of a recipe that can't add to one of its counters because of `error`."""
    return FscoordError(f"{error}; delete the key, or use another name")
