"""The arguments of a store's methods: what they may be, and what they become."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import timedelta

from fscoord.errors import LimitExceededError

__all__ = [
    "DEFAULT_TIMEOUT",
    "INT64_MAX",
    "INT64_MIN",
    "KEY_MAX",
    "VALUE_MAX",
    "CounterRangeError",
    "Key",
    "MalformedText",
    "NotACounterError",
    "Timeout",
    "Value",
    "counter_sum",
    "duration",
    "integer",
    "key_bytes",
    "key_given",
    "key_names",
    "key_text",
    "keys_bytes",
    "missing_message",
    "natural",
    "one_of",
    "pairs_bytes",
    "positive",
    "seconds",
    "timeout_given",
    "utf8",
    "value_bytes",
    "words_in",
]


class MalformedText(Exception):
    """A text from a store is not what it should be there.

    It is not a `ValueError`, because a signal handler may raise one while a text is read, and that says nothing of it.
    """


class NotACounterError(ValueError):
    """`Store.add` found no integer; of this class, so that the `ValueError` of a signal handler is not taken for it."""


class CounterRangeError(OverflowError):
    """The sum of `Store.add` does not fit in 64 bits; see `NotACounterError`."""


Key = str | bytes
Value = str | bytes | bytearray | memoryview
Timeout = float | int | timedelta

DEFAULT_TIMEOUT = 300.0
KEY_MAX = 1024
"""The longest key, in bytes."""
VALUE_MAX = 64 * 1024 * 1024
"""The longest value, and the most that one `Store.multi_set` may carry, in bytes."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


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


def key_given(key: Key | None, other_name: str, other: Key | None) -> Key:
    """Return the key that a caller gave as ``key=``, or by the name `other_name` that torch has for it.

    Raises:
        TypeError: both are given, or none.
    """
    found = other if key is None else key
    if found is None:
        raise TypeError(f"key is missing: give key, or {other_name} as in torch")
    if key is not None and other is not None:
        raise TypeError(f"key and {other_name} are two names of one argument: give one of them")
    return found


def timeout_given(timeout: Timeout | None, other_name: str, other: Timeout | None) -> Timeout | None:
    """Return the timeout that a caller gave as ``timeout=``, or by the name `other_name` that torch has for it.

    Raises:
        TypeError: both are given.
    """
    if timeout is not None and other is not None:
        raise TypeError(f"timeout and {other_name} are two names of one argument: give one of them")
    return other if timeout is None else timeout


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
            raise NotACounterError(f"key {key_text(key)!r} holds {shown!r}, not an integer; it is left as it is")
        total = int(current) + amount
    if not INT64_MIN <= total <= INT64_MAX:
        raise CounterRangeError(
            f"key {key_text(key)!r}: the sum {total} does not fit in 64 bits; the value is left as it is"
        )
    return total


def natural(text: str | bytes) -> int:
    """Return the number that `text` says in decimal digits.

    Raises:
        MalformedText: it says none, or one that is below 0 or does not fit in 64 bits.
    """
    number = int(text) if len(text) < 20 and text.isascii() and text.isdigit() else -1
    if not 0 <= number <= INT64_MAX:
        raise MalformedText(f"{text[:40]!r} is no number from 0 that fits in 64 bits")
    return number


def words_in(text: bytes, separator: str, count: int) -> list[str]:
    """Return the `count` parts of `text`, which is UTF-8, between the signs `separator`.

    Raises:
        MalformedText: there are more or fewer, or it is no UTF-8.
    """
    found = utf8(text).split(separator)
    if len(found) != count:
        raise MalformedText(f"{text[:40]!r} has {len(found)} parts, not {count}")
    return found


def utf8(text: bytes) -> str:
    """Return what `text` says.

    Raises:
        MalformedText: it is no UTF-8.
    """
    found = text.decode("utf-8", "replace")
    if "\ufffd" in found and found.encode() != text:
        raise MalformedText(f"{text[:40]!r} is no UTF-8")
    return found


def integer(name: str, value: object) -> int:
    """Return `value` if it is an integer of 64 bits, and raise otherwise."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is an int, not {type(value).__name__}")
    if not INT64_MIN <= value <= INT64_MAX:
        raise OverflowError(f"{name} {value} does not fit in 64 bits")
    return value


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`, and raise otherwise."""
    if value not in known:
        raise ValueError(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}")
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
    after = f"did not come within {waited:.3g} s" if waited >= 0.001 else "is not there"
    return f"{what} {key_names(keys)} {after}"


def key_names(keys: Sequence[bytes]) -> str:
    """Return the words that name `keys`, 16 at most."""
    more = f" and {len(keys) - 16} more" if len(keys) > 16 else ""
    return ", ".join(repr(key_text(key)) for key in keys[:16]) + more
