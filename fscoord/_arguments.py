"""Checks and converts the arguments of store methods, and parses texts that were read from a store."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from operator import index
from typing import NamedTuple, NoReturn, TypeVar

from fscoord.errors import BarrierError, LimitExceededError, StoreTimeoutError


class MalformedText(Exception):
    """A text from a store does not have the expected form.

    The class is not a `ValueError`. A signal handler may raise a `ValueError` during the parsing, and the caller of the
    parser must not mistake that error for a malformed text.
    """


class NotACounterError(ValueError):
    """`Store.add` was called on a value that is not an integer.

    The class is separate, so that a caller can tell this error from a `ValueError` that a signal handler raises.
    """


class CounterRangeError(OverflowError):
    """The sum of `Store.add` does not fit in 64 bits.

    The class is separate, so that a caller can tell this error from an `OverflowError` that a signal handler raises.
    """


Key = str | bytes
Value = str | bytes | bytearray | memoryview
Timeout = float | int | timedelta

# The key type of a `Mapping` is invariant, so a dict of ``str`` keys is not a ``Mapping[Key, ...]``.
ComparedKey = TypeVar("ComparedKey", bound=Key)
SetKey = TypeVar("SetKey", bound=Key)
AddedKey = TypeVar("AddedKey", bound=Key)

DEFAULT_TIMEOUT = 300.0
KEY_MAX = 1024
"""The longest key, in bytes."""
VALUE_MAX = 64 * 1024 * 1024
"""The longest value, in bytes. The keys and values of one `Store.multi_set` together have at most this length, too."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


def _with_escaped_bytes(text: str, what: str) -> bytes:
    """Return `text`, which has surrogates, in UTF-8. The surrogates stand for bytes, as in the names of files."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{what} can't be encoded: it has a surrogate outside U+DC80-U+DCFF; pass bytes instead"
        ) from error


def key_bytes(key: Key) -> bytes:
    """Return `key` as bytes.

    Raises:
        TypeError: `key` is neither `str` nor `bytes`.
        ValueError: `key` can't be encoded.
        LimitExceededError: `key` is longer than `KEY_MAX`.
    """
    if isinstance(key, str):
        try:
            name = key.encode()
        except UnicodeEncodeError:
            name = _with_escaped_bytes(key, f"key {key!r}")
    elif isinstance(key, bytes):
        name = key
    else:
        raise TypeError(f"a key must be str or bytes, not {type(key).__name__}")
    if len(name) > KEY_MAX:
        raise LimitExceededError(f"a key of {len(name)} bytes is over the limit of {KEY_MAX}")
    return name


def key_given(given: Key | None, other_name: str, other: Key | None, name: str = "key") -> Key:
    """Return the value of an argument with two names: `given` for `name`, or `other` for torch's `other_name`.

    Raises:
        TypeError: both `given` and `other` are given, or neither is given.
    """
    found = other if given is None else given
    if found is None:
        raise TypeError(f"{name} is missing: give {name}, or {other_name} as in torch")
    if given is not None and other is not None:
        raise TypeError(f"{name} and {other_name} are two names of one argument: give one of them")
    return found


def timeout_given(timeout: Timeout | None, other_name: str, other: Timeout | None) -> Timeout | None:
    """Return the timeout: `timeout`, or `other`, which is torch's argument `other_name`. None if both are None.

    Raises:
        TypeError: both `timeout` and `other` are given.
    """
    if timeout is not None and other is not None:
        raise TypeError(f"timeout and {other_name} are two names of one argument: give one of them")
    return other if timeout is None else timeout


def keys_bytes(keys: Iterable[Key]) -> list[bytes]:
    """Return each of `keys` as bytes, and raise the errors of `key_bytes`.

    Raises:
        TypeError: `keys` is a single key, not a sequence of keys.
    """
    if isinstance(keys, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"expected a sequence of keys, not a single {type(keys).__name__}")
    return [key_bytes(key) for key in keys]


def key_text(key: bytes) -> str:
    """Return `key` as a ``str``, the inverse of `key_bytes`."""
    return key.decode("utf-8", "surrogateescape")


def value_bytes(value: Value) -> bytes:
    """Return `value` as bytes.

    Raises:
        TypeError: `value` is neither `str` nor bytes-like.
        ValueError: `value` can't be encoded.
        LimitExceededError: `value` is longer than `VALUE_MAX`.
    """
    if value.__class__ is bytes:
        data = value
    elif isinstance(value, str):
        try:
            data = value.encode()
        except UnicodeEncodeError:
            data = _with_escaped_bytes(value, "the value")
    else:
        try:
            data = memoryview(value).tobytes()
        except TypeError:
            raise TypeError(f"a value must be str or bytes-like, not {type(value).__name__}") from None
    if len(data) > VALUE_MAX:
        raise LimitExceededError(f"a value of {len(data)} bytes is over the limit of {VALUE_MAX}")
    return data


def pairs_bytes(keys: Iterable[Key], values: Iterable[Value]) -> list[tuple[bytes, bytes]]:
    """Return the pairs of `keys` and `values` as bytes, and raise the errors of `Store.multi_set`."""
    if isinstance(values, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"expected a sequence of values, not a single {type(values).__name__}")
    names = keys_bytes(keys)
    contents = [value_bytes(value) for value in values]
    if len(names) != len(contents):
        raise ValueError(f"{len(names)} keys but {len(contents)} values; nothing was written")
    if sum(map(len, names)) + sum(map(len, contents)) > VALUE_MAX:
        raise LimitExceededError(
            f"the keys and values of one multi_set are limited to {VALUE_MAX} bytes; nothing was written"
        )
    return list(zip(names, contents, strict=True))


class Transaction(NamedTuple):
    """The arguments of `Store.transact`, as bytes. No key occurs twice in `set`, `add` and `delete` together."""

    compare: dict[bytes, bytes | None]
    set: dict[bytes, bytes]
    add: dict[bytes, int]
    delete: list[bytes]


def transaction_of(
    compare: Mapping[ComparedKey, Value | None],
    set: Mapping[SetKey, Value],  # noqa: A002 - as in `Store.transact`
    add: Mapping[AddedKey, int],
    delete: Iterable[Key],
) -> Transaction:
    """Return the arguments of `Store.transact` as bytes, and raise its errors."""
    compared = {key_bytes(key): None if value is None else value_bytes(value) for key, value in compare.items()}
    present = {key_bytes(key): value_bytes(value) for key, value in set.items()}
    added = {key_bytes(key): check_int64("amount", amount) for key, amount in add.items()}
    deleted = keys_bytes(delete)
    if len(compared) != len(compare):
        _refuse_twice("compares", compare)
    if len({*present, *added, *deleted}) != len(set) + len(add) + len(deleted):
        _refuse_twice("changes", [*deleted, *set, *add])
    size = sum(map(len, compared)) + sum(map(len, present)) + sum(map(len, present.values()))
    if size + sum(map(len, filter(None, compared.values()))) > VALUE_MAX:
        raise LimitExceededError(
            f"the keys and values of one transaction are limited to {VALUE_MAX} bytes; nothing was written"
        )
    return Transaction(compared, present, added, deleted)


def _refuse_twice(what: str, keys: Iterable[Key]) -> NoReturn:
    """Raise the error of `transaction_of` for `keys`, of which two are the same key."""
    (twice, _), *_ = Counter(map(key_bytes, keys)).most_common(1)
    raise ValueError(f"the transaction {what} key {key_text(twice)!r} twice; nothing was written")


def counter_sum(current: bytes | None, amount: int, key: bytes) -> int:
    """Return the sum of `amount` and the integer in `current`, and raise the errors of `Store.add`.

    Args:
        current: the value of `key`; None counts as 0.
        amount: the integer to add.
        key: the key, for messages.
    """
    if current is None:
        total = amount
    else:
        if not (current.isdigit() or (current[:1] == b"-" and current[1:].isdigit())) or len(current) > 20:
            shown = bytes(current[:40])
            raise NotACounterError(f"key {key_text(key)!r} holds {shown!r}, which is not an integer; it is unchanged")
        total = int(current) + amount
    if not INT64_MIN <= total <= INT64_MAX:
        raise CounterRangeError(
            f"key {key_text(key)!r}: the sum {total} does not fit in 64 bits; the value is unchanged"
        )
    return total


def parse_uint63(text: str | bytes) -> int:
    """Return the integer whose decimal digits are `text`, from 0 to 2**63 - 1.

    Raises:
        MalformedText: `text` has other characters, or the integer is too large.
    """
    number = int(text) if len(text) < 20 and text.isascii() and text.isdigit() else -1
    if not 0 <= number <= INT64_MAX:
        raise MalformedText(f"{text[:40]!r} is not an integer from 0 to 2**63 - 1")
    return number


def words_in(text: bytes, separator: str, count: int) -> list[str]:
    """Decode `text` as UTF-8, split it at `separator`, and return its `count` fields.

    Raises:
        MalformedText: `text` has more or fewer fields, or is not UTF-8.
    """
    found = utf8(text).split(separator)
    if len(found) != count:
        raise MalformedText(f"{text[:40]!r} has {len(found)} fields, not {count}")
    return found


def utf8(text: bytes) -> str:
    """Decode `text` as UTF-8.

    Raises:
        MalformedText: `text` is not UTF-8.
    """
    found = text.decode("utf-8", "replace")
    if "\ufffd" in found and found.encode() != text:
        raise MalformedText(f"{text[:40]!r} is not UTF-8")
    return found


def check_int64(name: str, value: object) -> int:
    """Return the 64-bit integer `value` as an `int`. Integers of numpy are accepted. `name` is used in errors.

    Raises:
        TypeError: `value` is not an integer: it has no ``__index__``, or it is a `bool`.
        OverflowError: `value` does not fit in 64 bits.
    """
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        value = index(value)
    if not INT64_MIN <= value <= INT64_MAX:
        raise OverflowError(f"{name} {value} does not fit in 64 bits")
    return value


def not_copied(thing: object, instead: str) -> TypeError:
    """Return the error to raise when `thing` is pickled or copied. `instead` tells the user what to do instead."""
    return TypeError(f"{type(thing).__name__} can't be pickled or copied, because it belongs to one process; {instead}")


def refuse_copies(thing: object) -> NoReturn:
    """Raise `TypeError`: a recipe can't be pickled or copied, because a copy could release the original's lock."""
    raise not_copied(thing, "pass the store and the name, and make another one there")


def check_choice(name: str, value: str, known: Iterable[str]) -> str:
    """Return `value` if it is one of `known`. `name` is the argument's name in errors.

    Raises:
        ValueError: `value` is not one of `known`.
    """
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, known))}, not {value!r}")
    return value


def check_positive(name: str, value: object) -> int:
    """Return `value` if it is a 64-bit integer of at least 1. `name` is the argument's name in errors.

    Raises:
        TypeError: `value` is not an integer.
        ValueError: `value` is below 1.
        OverflowError: `value` does not fit in 64 bits.
    """
    number = check_int64(name, value)
    if number < 1:
        raise ValueError(f"{name} must be at least 1, not {number}")
    return number


def check_rank(rank: int, world_size: int) -> tuple[int, int]:
    """Return `rank` and `world_size` as `int`. Raise `BarrierError` unless `rank` is between 0 and `world_size` - 1."""
    if rank.__class__ is int and world_size.__class__ is int and 0 <= rank < world_size <= INT64_MAX:
        return rank, world_size  # the usual case, without a call
    world_size = check_positive("world_size", world_size)
    rank = check_int64("rank", rank)
    if not 0 <= rank < world_size:
        raise BarrierError(f"rank {rank} is not one of {world_size}: ranks go from 0 to world_size - 1")
    return rank, world_size


def to_seconds(timeout: object, name: str = "timeout") -> float:
    """Convert `timeout`, a number of seconds or a `timedelta`, to seconds. ``timedelta.max`` becomes ``math.inf``.

    `name` is the name of the argument, for the error.

    Raises:
        TypeError: `timeout` is neither a number nor a `timedelta`.
        ValueError: `timeout` is negative or NaN.
    """
    if isinstance(timeout, timedelta):
        value = math.inf if timeout == timedelta.max else timeout.total_seconds()
    elif isinstance(timeout, (int, float)) and not isinstance(timeout, bool):
        try:
            value = float(timeout)
        except OverflowError:
            value = math.inf if timeout > 0 else -math.inf
    else:
        raise TypeError(f"{name} must be seconds or a timedelta, not {type(timeout).__name__}")
    if not value >= 0:
        advice = " (0 = do not wait, math.inf = no limit)" if name == "timeout" else ""
        raise ValueError(f"{name} must be >= 0, got {value}{advice}")
    return value


@lru_cache(maxsize=64)
def to_timedelta(value: float) -> timedelta:
    """Return `value` seconds as a `timedelta`, at most ``timedelta.max``."""
    try:
        return timedelta(seconds=value)
    except OverflowError:
        return timedelta.max


def missing_error(place: object, what: str, keys: Sequence[bytes], waited: float, doubt: str = "") -> StoreTimeoutError:
    """Return the error for a wait that timed out.

    The message consists of `place` (if not empty), the result of `missing_message`, and `doubt`. The text `doubt` says
    why the list of missing keys may be wrong.
    """
    message = missing_message(what, keys, waited) + doubt
    names = [key_text(key) for key in keys]
    return StoreTimeoutError(f"{place}: {message}" if place else message, keys=names, waited=waited)


def missing_message(what: str, keys: Sequence[bytes], waited: float) -> str:
    """Return a message that names the missing `keys` and the seconds `waited`. `what` is a noun such as "key"."""
    absent = "are not there" if len(keys) > 1 else "is not there"
    after = f"did not come within {waited:.3g} s" if waited >= 0.001 else absent
    return f"{called(what, keys)} {after}"


def called(what: str, keys: Sequence[bytes]) -> str:
    """Return the noun `what` and the names of `keys`. The noun is in the plural if there are several keys."""
    return f"{what}{'s' if len(keys) > 1 else ''} {key_names(keys)}"


def key_names(keys: Sequence[bytes]) -> str:
    """Return a list of `keys` for a message: the first 16 keys, and the number of the other keys."""
    more = f" and {len(keys) - 16} more" if len(keys) > 16 else ""
    return ", ".join(repr(key_text(key)) for key in keys[:16]) + more
