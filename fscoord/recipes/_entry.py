"""Parses and formats the value of a line: its `State`, which has an `Entry` for each contender. Does no I/O.

A line is the wait queue of a lock, a semaphore or an election; see `fscoord.recipes._line`.
"""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from fscoord._arguments import MalformedText, parse_uint63, utf8, words_in

NO_LEASE = "-"

IN_STEP: Final = "-"
"""The value of `WakeUp.by` if one transaction writes the record and sets the wake key; see `Store.transact`."""

_SECONDS: Final = re.compile(r"[0-9]{1,300}(\.[0-9]{1,300})?(e[-+]?[0-9]{1,5})?")
"""Matches the `repr` of a float that is not negative."""

ID_MAX: Final = 30
"""The greatest length of an entry's id: 56 random bits and a counter, both hexadecimal."""


class Entry(NamedTuple):
    """One contender in a line.

    Attributes:
        id: a random name.
        mode: the kind of acquisition: ``r`` for a reader, ``x`` for an exclusive holder, or a semaphore's value.
        token: the fencing token that the entry got when it acquired the resource; 0 while the entry waits.
        session: the session number of the contender's handle; 0 on a store without sessions.
        owner: the contender's process, ``host:pid``, for messages.
        lease: ``seconds:count``, the length of the lease and how often it was renewed; or `NO_LEASE`.
        label: the contender's label, as a word (`escape_word`); ``""`` if it has none. The row then has one word less.
    """

    id: str
    mode: str
    token: int
    session: int
    owner: str
    lease: str
    label: str = ""

    @property
    def lease_s(self) -> float:
        """The length of the lease, in seconds; 0 means that the entry has no lease."""
        return 0.0 if self.lease == NO_LEASE else float(self.lease.partition(":")[0])


def with_new_sign(entry: Entry) -> Entry:
    """Return a copy of `entry` with its lease renewed once more. `entry` must have a lease."""
    seconds, _, count = entry.lease.partition(":")
    return entry._replace(lease=f"{seconds}:{int(count) + 1}")


class WakeUp(NamedTuple):
    """Records that a process is about to set, or has set, the key that wakes the contender of an entry.

    The line keeps the record until the key is deleted and can't be set again.

    Attributes:
        id: the entry's id.
        session: the session number of the process that sets the key; 0 on a store without sessions, and with `IN_STEP`.
        by: a random name of the `Line` object that sets the key, or `IN_STEP`.
    """

    id: str
    session: int
    by: str


class State(NamedTuple):
    """The parsed value of a line.

    Attributes:
        last: the last fencing token that was assigned.
        wake_ups: the wake-ups whose keys may exist in the store, or may still be set.
        entries: the entries in the order of their arrival.
    """

    last: int
    wake_ups: list[WakeUp]
    entries: list[Entry]


def parse_line(text: bytes) -> State:
    """Parse the value of a line. An empty `text` is a line that has never had an entry.

    Raises:
        MalformedText: `text` is not a line.
    """
    if not text:
        return State(0, [], [])
    head, *lines = utf8(text).split("\n")
    entries = []
    for line in lines:
        parts = line.split(" ")
        if len(parts) not in {len(Entry._fields) - 1, len(Entry._fields)}:
            raise MalformedText(f"{line[:40]!r} is not an entry")
        name, mode, token, session, owner, lease, *label = parts
        if lease != NO_LEASE:
            _check_lease(lease)
        if not (mode.isascii() and len(mode) < 20):
            raise MalformedText(f"{mode!r} is not a mode")
        entries.append(Entry(name, mode, parse_uint63(token), parse_uint63(session), owner, lease, *label))
    last, _, *words = head.split(" ") if " " in head else (head, "")
    return State(parse_uint63(last), [_parse_wake_up(word) for word in words], entries)


def _check_lease(lease: str) -> None:
    """Raise `MalformedText` unless `lease` is the text of a lease."""
    seconds, _, count = lease.partition(":")
    if not _SECONDS.fullmatch(seconds) or not 0 < float(seconds) < math.inf:
        raise MalformedText(f"{lease[:40]!r} is not a lease")
    parse_uint63(count)


def _parse_wake_up(word: str) -> WakeUp:
    name, session, by = words_in(word.encode(), ":", 3)
    if not (name.isalnum() and name.isascii() and len(name) <= ID_MAX):
        raise MalformedText(f"{name[:40]!r} is not an id")
    return WakeUp(name, parse_uint63(session), by)


def format_line(state: State, stamp: str) -> bytes:
    """Return `state` as text: a row with the last token, `stamp` and the wake-ups, then a row for each entry.

    The stamp differs in each write, so that a writer recognises its own write.
    """
    head = " ".join([str(state.last), stamp, *("{}:{}:{}".format(*each) for each in state.wake_ups)])
    return "\n".join([head, *("{} {} {} {} {} {} {}".format(*entry).rstrip() for entry in state.entries)]).encode()
