"""`State`, the value of a line; `Entry`, one contender in it; and their text in the store. This module does no I/O."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from fscoord._arguments import MalformedText, parse_uint63, utf8, words_in

NO_LEASE = "-"

IN_STEP: Final = "-"
"""The author of a `WakeUp` whose key was set in the step that wrote the record; see `fscoord.store.exchange`."""

_SECONDS: Final = re.compile(r"[0-9]{1,300}(\.[0-9]{1,300})?(e[-+]?[0-9]{1,5})?")
"""The texts of a float that is not negative, as `repr` writes them and `float` reads them."""

ID_MAX: Final = 30
"""The greatest length of an entry's id: 56 random bits and a counter, both hexadecimal."""


class Entry(NamedTuple):
    """One contender in a line.

    Attributes:
        id: a random name.
        mode: the kind of acquisition, as one word that the line's policy interprets.
        token: the fencing token with which the entry was served; 0 while it waits.
        session: the session number of the contender's handle; 0 on a store without sessions.
        owner: the contender's process, ``host:pid``, for messages.
        lease: ``seconds:count``, the length of the lease and how often it was renewed; or `NO_LEASE`.
    """

    id: str
    mode: str
    token: int
    session: int
    owner: str
    lease: str

    @property
    def lease_s(self) -> float:
        """The length of the lease, in seconds; 0 means that the entry has no lease."""
        return 0.0 if self.lease == NO_LEASE else float(self.lease.partition(":")[0])


def with_new_sign(entry: Entry) -> Entry:
    """Return `entry`, which has a lease, with the lease renewed once more."""
    seconds, _, count = entry.lease.partition(":")
    return entry._replace(lease=f"{seconds}:{int(count) + 1}")


class WakeUp(NamedTuple):
    """The record that a process is about to set the wake key of an entry, or has set it.

    The line contains it until the key is deleted and can't be set again.

    Attributes:
        id: the entry's id.
        session: the session number of the process that sets the key; 0 on a store without sessions.
        by: a random name of the `Line` object that sets the key, or `IN_STEP`; then `session` is 0.
    """

    id: str
    session: int
    by: str


class State(NamedTuple):
    """A line.

    Attributes:
        last: the last token that was assigned.
        wake_ups: the wake-ups whose keys may exist in the store, or may still be set.
        entries: the entries in the order of their arrival.
    """

    last: int
    wake_ups: list[WakeUp]
    entries: list[Entry]


def parse_line(text: bytes) -> State:
    """Return the line in `text`. An empty text is a line that had no entry yet.

    Raises:
        MalformedText: `text` is not a line.
    """
    if not text:
        return State(0, [], [])
    head, *lines = utf8(text).split("\n")
    entries = []
    for line in lines:
        parts = line.split(" ")
        if len(parts) != len(Entry._fields):
            raise MalformedText(f"{line[:40]!r} is not an entry")
        name, mode, token, session, owner, lease = parts
        if lease != NO_LEASE:
            _check_lease(lease)
        if not (mode.isascii() and len(mode) < 20):
            raise MalformedText(f"{mode!r} is not a mode")
        entries.append(Entry(name, mode, parse_uint63(token), parse_uint63(session), owner, lease))
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
    """Return the text of `state`: one row with the last token, `stamp` and the wake-ups, then a row for each entry."""
    head = " ".join([str(state.last), stamp, *("{}:{}:{}".format(*each) for each in state.wake_ups)])
    return "\n".join([head, *("{} {} {} {} {} {}".format(*entry) for entry in state.entries)]).encode()
