"""Models of a key's value, a queue, a lock and a fenced value, each for one process."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

EMPTY = "empty"
"""The result of a pop from an empty queue."""
DONE = "done"
HELD = "held"
"""The result of an acquisition that was not to be had."""


def value(state: bytes | None, operation: tuple[Any, ...]) -> tuple[Hashable, Any]:
    """A value, or None: set, add, compare_set, delete_key, create, take, delete_if, append, has, and read (None where
    there is no value).
    """
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
    if name == "create":
        return (given[0], True) if state is None else (state, False)
    if name == "take":
        return None, state
    if name == "delete_if":
        return (None, True) if state == given[0] else (state, False)
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
    the token), release and die, by name. The death of a process that does not hold it changes nothing.
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


def counting_lock(state: tuple[int, str], operation: tuple[Any, ...]) -> tuple[Hashable, Any]:
    """A lock whose tokens count its holds, as the last token and its holder: acquire (the token) and release (whether
    it was held) by somebody.
    """
    name, who = operation
    last, holder = state
    if name == "acquire":
        return (state, HELD) if holder else ((last + 1, who), last + 1)
    assert name == "release"
    return ((last, ""), True) if holder == who else (state, False)


def item(holder: str, operation: tuple[Any, ...]) -> tuple[Hashable, Any]:
    """One item of a queue that hands out at least once: "" if it is free, the name of its consumer, or `DONE`.

    It is taken, done and given back by somebody, or falls back when that one dies. Who takes it when it is not free,
    and who ends what it does not have, gets False.
    """
    name, who = operation
    if name == "take":
        return (holder, False) if holder else (who, True)
    if holder != who:
        return holder, False
    return (DONE if name == "done" else "", True)


def fenced(state: int, operation: tuple[Any, ...]) -> tuple[Hashable, Any]:
    """The highest token that a fenced value has seen: a write, and whether it was taken."""
    _, token = operation
    return (token, True) if token >= state else (state, False)
