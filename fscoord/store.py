"""`Store`: the contract that every store keeps, and what all of them do to their arguments.

The names and their meaning follow torch's c10d ``Store``; where c10d's own stores disagree with each other, the
meaning chosen is stated here, once. This module knows no concrete store.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TypeVar

from fscoord.errors import BarrierError, LimitExceededError

__all__ = [
    "DEFAULT_TIMEOUT",
    "KEY_MAX",
    "VALUE_MAX",
    "Key",
    "Store",
    "Timeout",
    "Value",
    "counter_sum",
    "duration",
    "key_bytes",
    "key_text",
    "keys_bytes",
    "positive",
    "seconds",
    "value_bytes",
]

Key = str | bytes
Value = str | bytes | bytearray | memoryview
Timeout = float | int | timedelta

DEFAULT_TIMEOUT = 300.0
KEY_MAX = 1024
"""The longest key, in bytes."""
VALUE_MAX = 64 * 1024 * 1024
"""The longest value, and the most that one `Store.multi_set` may carry, in bytes."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1

S = TypeVar("S", bound="Store")


class Store(ABC):
    """Named values, counters and queues that several processes share.

    Keys are ``str`` or ``bytes``: a ``str`` is its UTF-8 bytes (with ``surrogateescape``), so ``"k"`` and ``b"k"``
    are one key. Values go in as ``str`` or any bytes-like object and come out as ``bytes``. Timeouts are seconds or
    `timedelta`; ``None`` means the store's own, ``0`` look once, ``math.inf`` or ``timedelta.max`` no limit.

    Every operation takes effect once, between its call and its return. Every handle may be used by several threads.
    Bad arguments change nothing: `TypeError` for a wrong type, `ValueError` for a wrong value,
    `~fscoord.LimitExceededError` for a key over 1 KiB or a value over 64 MiB.

    Any operation may raise `~fscoord.StoreTimeoutError` when the store itself can't be had within the store's
    timeout, and `~fscoord.StoreError` or one of its kinds when the store fails. A failed write's ``maybe_applied``
    says whether it may have taken effect.
    """

    _timeout: float = DEFAULT_TIMEOUT

    @abstractmethod
    def set(self, key: Key, value: Value) -> None:
        """Give `key` the value `value`, whatever it had before."""

    @abstractmethod
    def get(self, key: Key) -> bytes:
        """Return the value of `key`, waiting up to the store's timeout for somebody to set it.

        Raises:
            StoreTimeoutError: the key did not appear.
        """

    @abstractmethod
    def add(self, key: Key, amount: int) -> int:
        """Add `amount` to the integer in `key` and return the sum; a missing key counts as 0.

        The sum is kept as decimal text, so `get` returns e.g. ``b"-2"``.

        Raises:
            ValueError: the value is not an integer in decimal text; it is left as it is. (c10d accepts ``"12abc"``.)
            OverflowError: the sum does not fit in 64 bits; the value is left as it is. (c10d wraps.)
        """

    @abstractmethod
    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` if its value is `expected`; return the value it has afterwards.

        On a missing key an empty `expected` creates it; any other `expected` writes nothing and is returned itself,
        as in c10d.
        """

    @abstractmethod
    def check(self, keys: Iterable[Key]) -> bool:
        """Return at once whether every one of `keys` has a value or a non-empty queue."""

    @abstractmethod
    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """Wait until `check` of `keys` is true. One deadline holds for all of them.

        Raises:
            StoreTimeoutError: its ``keys`` names every key that is still missing.
        """

    @abstractmethod
    def delete_key(self, key: Key) -> bool:
        """Remove `key`, its value and its queue; return whether there was anything to remove."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return how many keys have a value. Nothing internal is counted, and queues are not (as in c10d)."""

    @abstractmethod
    def list_keys(self, prefix: Key = "") -> list[str]:
        """Return the keys with a value that begin with `prefix`, as text, in the order of their bytes."""

    @abstractmethod
    def append(self, key: Key, value: Value) -> None:
        """Append `value` to the value of `key`, atomically; a missing key counts as empty."""

    @abstractmethod
    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        """Return the values of `keys`, in their order, waiting for all of them under one deadline.

        Raises:
            StoreTimeoutError: its ``keys`` names every key that is still missing.
        """

    @abstractmethod
    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """Set every key to its value, all at once or not at all.

        Raises:
            ValueError: there are not as many values as keys; nothing is written.
        """

    @abstractmethod
    def queue_push(self, key: Key, value: Value) -> None:
        """Append `value` to the queue `key`. A queue and a value of one name do not touch each other."""

    @abstractmethod
    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the oldest value from the queue `key`; each is given out exactly once.

        Raises:
            QueueEmptyError: with ``block=False``, the queue is empty.
            StoreTimeoutError: with ``block=True``, it stayed empty for the store's timeout.
        """

    @abstractmethod
    def queue_len(self, key: Key) -> int:
        """Return how many values the queue `key` holds."""

    @abstractmethod
    def clone(self: S) -> S:
        """Return an independent handle on the same store, with the same timeout, for use from another thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the handle holds. Closing twice is harmless; any other use afterwards raises
        `~fscoord.StoreClosedError`.
        """

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers have called this with `key`. A key serves once.

        The keys ``{key}/num_members`` and ``{key}/last_member`` are c10d's, so that both can meet at one barrier.

        Raises:
            BarrierError: more than `world_size` callers came.
            StoreTimeoutError: not all came.
        """
        positive("world_size", world_size)
        limit = self._timeout if timeout is None else seconds(timeout)
        name = key_bytes(key)
        arrived = self.add(name + b"/num_members", 1)
        if arrived > world_size:
            raise BarrierError(
                f"barrier {key_text(name)!r} got arrival {arrived} of {world_size}: it was used before, or by too many;"
                " give every barrier a key of its own"
            )
        if arrived == world_size:
            self.set(name + b"/last_member", b"1")
        else:
            self.wait([name + b"/last_member"], limit)

    @property
    def timeout(self) -> timedelta:
        """How long operations wait by default; no limit is ``timedelta.max``."""
        return duration(self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long operations of this handle wait when they are not told otherwise."""
        self._timeout = seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are there. They are, on every store of fscoord."""
        return True

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def key_bytes(key: Key) -> bytes:
    """Return the bytes that `key` stands for, checked."""
    if isinstance(key, str):
        try:
            name = key.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"key {key!r} holds a surrogate outside U+DC80-U+DCFF, which stands for no byte; pass bytes instead"
            ) from error
    elif isinstance(key, bytes):
        name = key
    else:
        raise TypeError(f"a key is str or bytes, not {type(key).__name__}")
    if len(name) > KEY_MAX:
        raise LimitExceededError(f"a key of {len(name)} bytes is over the limit of {KEY_MAX}")
    return name


def keys_bytes(keys: Iterable[Key]) -> list[bytes]:
    """Return the bytes of every one of `keys`, checked; a single key instead of a sequence is a `TypeError`."""
    if isinstance(keys, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"expected a sequence of keys, not a single {type(keys).__name__}")
    return [key_bytes(key) for key in keys]


def key_text(key: bytes) -> str:
    """Return `key` as the ``str`` that stands for it."""
    return key.decode("utf-8", "surrogateescape")


def value_bytes(value: Value) -> bytes:
    """Return the bytes that `value` stands for, checked."""
    if isinstance(value, bytes):
        data = value
    elif isinstance(value, str):
        try:
            data = value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise ValueError(
                "the value holds a surrogate outside U+DC80-U+DCFF, which stands for no byte; pass bytes instead"
            ) from error
    else:
        try:
            data = memoryview(value).tobytes()
        except TypeError:
            raise TypeError(f"a value is str or bytes-like, not {type(value).__name__}") from None
    if len(data) > VALUE_MAX:
        raise LimitExceededError(f"a value of {len(data)} bytes is over the limit of {VALUE_MAX}")
    return data


def pairs_bytes(keys: Iterable[Key], values: Iterable[Value]) -> list[tuple[bytes, bytes]]:
    """Return `keys` and `values` in pairs, checked, as `Store.multi_set` takes them."""
    if isinstance(values, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"expected a sequence of values, not a single {type(values).__name__}")
    names = keys_bytes(keys)
    contents = [value_bytes(value) for value in values]
    if len(names) != len(contents):
        raise ValueError(f"{len(names)} keys but {len(contents)} values; nothing was written")
    if sum(map(len, names)) + sum(map(len, contents)) > VALUE_MAX:
        raise LimitExceededError(f"multi_set may carry {VALUE_MAX} bytes in all; nothing was written")
    return list(zip(names, contents, strict=True))


def counter_sum(current: bytes | None, amount: int, key: bytes) -> int:
    """Return the integer in `current` plus `amount`, by the rules of `Store.add`."""
    if current is None:
        total = amount
    else:
        digits = current[1:] if current[:1] == b"-" else current
        if not digits.isdigit() or len(current) > 20:
            shown = bytes(current[:40])
            raise ValueError(f"key {key_text(key)!r} holds {shown!r}, not an integer; it is left as it is")
        total = int(current) + amount
    if not INT64_MIN <= total <= INT64_MAX:
        raise OverflowError(
            f"key {key_text(key)!r}: the sum {total} does not fit in 64 bits; the value is left as it is"
        )
    return total


def integer(name: str, value: object) -> int:
    """Return `value` if it is an integer of 64 bits, and raise otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is an int, not {type(value).__name__}")
    if not INT64_MIN <= value <= INT64_MAX:
        raise OverflowError(f"{name} {value} does not fit in 64 bits")
    return value


def positive(name: str, value: object) -> int:
    """Return `value` if it is an integer above zero, and raise otherwise."""
    number = integer(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def seconds(timeout: object) -> float:
    """Return `timeout` in seconds; ``timedelta.max`` is ``math.inf``.

    Raises:
        ValueError: it is negative or not a number.
        TypeError: it is no number and no `timedelta`.
    """
    if isinstance(timeout, timedelta):
        value = math.inf if timeout == timedelta.max else timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        try:
            value = float(timeout)
        except OverflowError:
            value = math.inf if timeout > 0 else -math.inf
    else:
        raise TypeError(f"a timeout is seconds or a timedelta, not {type(timeout).__name__}")
    if not value >= 0:
        raise ValueError(f"a timeout can't be {value}; 0 looks once, math.inf has no limit")
    return value


def duration(value: float) -> timedelta:
    """Return `value`, in seconds, as a `timedelta`; what is too long for one is ``timedelta.max``."""
    try:
        return timedelta(seconds=value)
    except OverflowError:
        return timedelta.max


def missing_message(what: str, keys: Sequence[bytes], waited: float) -> str:
    """Return the words of a time-out: what was waited for and how long, 16 keys at most."""
    names = ", ".join(repr(key_text(key)) for key in keys[:16])
    more = f" and {len(keys) - 16} more" if len(keys) > 16 else ""
    after = f"did not come within {waited:.3g} s" if waited >= 0.001 else "is not there"
    return f"{what} {names}{more} {after}"
