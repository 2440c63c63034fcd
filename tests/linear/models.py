"""What a key's value and a queue do when nobody else is there, as the contract of `Store` says."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

EMPTY = "empty"
"""The result of a pop from an empty queue."""


def value(state: bytes | None, operation: tuple[Any, ...]) -> tuple[Hashable, Any]:
    """A value, or None: set, add, compare_set, delete_key, append, has, and read (None where there is no value)."""
    name, *given = operation
    if name == "read":
        return state, state
    if name == "has":
        return state, state is not None
    if name == "set":
        return given[0], None
    if name == "add":
        total = int(state or b"0") + given[0]
        return b"%d" % total, total
    if name == "compare_set":
        expected, desired = given
        if state == expected or (state is None and not expected):
            return desired, desired
        return state, expected if state is None else state
    if name == "delete_key":
        return None, state is not None
    assert name == "append"
    return (state or b"") + given[0], None


def queue(state: tuple[bytes, ...], operation: tuple[Any, ...]) -> tuple[Hashable, Any]:
    """A queue: push, pop (without waiting), len."""
    name, *given = operation
    if name == "push":
        return (*state, given[0]), None
    if name == "pop":
        return (state[1:], state[0]) if state else (state, EMPTY)
    assert name == "len"
    return state, len(state)


def lock(state: tuple[bytes | None, int], operation: tuple[Any, ...]) -> tuple[Hashable, Any]:
    """A lock with fencing tokens, held by a name or None, and the last token: acquire (which must find it free and rise
    the token), release and die, by name. Who dies without holding it changes nothing.
    """
    holder, last = state
    name, who, *given = operation
    if name == "acquire":
        (token,) = given
        if holder is not None or token <= last:
            return state, False
        return (who, token), True
    if name == "release":
        return ((None, last), True) if holder == who else (state, False)
    assert name == "die"
    return ((None, last) if holder == who else state), None
