"""`State`: a line as it is in the store, with an `Entry` for each in it, and the text that it is there. Pure."""

from __future__ import annotations

import math
import re
from typing import Final, NamedTuple

from fscoord._arguments import MalformedText, parse_uint63, utf8, words_in

__all__ = ["ID_MAX", "NO_LEASE", "Entry", "State", "WakeUp", "format_line", "parse_line", "with_new_sign"]

NO_LEASE = "-"

_SECONDS: Final = re.compile(r"[0-9]{1,300}(\.[0-9]{1,300})?(e[-+]?[0-9]{1,5})?")
"""The texts that `repr` makes of a float, and that `float` takes."""

ID_MAX: Final = 30
"""How long the id of an entry may become: 56 random bits, and how many were drawn before it, hexadecimal."""


class Entry(NamedTuple):
    """One in a line.

    Attributes:
        id: a random name.
        mode: what it asks for, one word that its policy knows.
        token: the number that it was served with; 0 while it waits.
        session: the number of its handle among the members of the store; 0 where the store keeps none.
        owner: ``host:pid``, for people.
        lease: ``seconds:count``, for how long it holds without a sign of life, and how many it gave; or `NO_LEASE`.
    """

    id: str
    mode: str
    token: int
    session: int
    owner: str
    lease: str

    @property
    def lease_s(self) -> float:
        """For how many seconds it holds without a sign of life; 0 is for ever."""
        return 0.0 if self.lease == NO_LEASE else float(self.lease.partition(":")[0])


def with_new_sign(entry: Entry) -> Entry:
    """Return `entry`, which has a lease, with one more sign of life."""
    seconds, _, count = entry.lease.partition(":")
    return entry._replace(lease=f"{seconds}:{int(count) + 1}")


class WakeUp(NamedTuple):
    """Somebody is about to set the wake key of an entry, or has: until that key is gone for good the line names it.

    Attributes:
        id: of the entry.
        session: of who sets the key; 0 where the store keeps none.
        by: a random name of who sets the key.
    """

    id: str
    session: int
    by: str


class State(NamedTuple):
    """A line.

    Attributes:
        last: the last token that was given.
        wake_ups: whose wake keys may be in the store, or come there.
        entries: who is in line, first come first.
    """

    last: int
    wake_ups: list[WakeUp]
    entries: list[Entry]


def parse_line(text: bytes) -> State:
    """Return what `text` says; of an empty text, a line that nobody was ever in.

    Raises:
        MalformedText: `text` is no line.
    """
    if not text:
        return State(0, [], [])
    head, *lines = utf8(text).split("\n")
    entries = []
    for line in lines:
        parts = line.split(" ")
        if len(parts) != len(Entry._fields):
            raise MalformedText(f"{line[:40]!r} is no entry")
        name, mode, token, session, owner, lease = parts
        if lease != NO_LEASE:
            _check_lease(lease)
        if not (mode.isascii() and len(mode) < 20):
            raise MalformedText(f"{mode!r} is no mode")
        entries.append(Entry(name, mode, parse_uint63(token), parse_uint63(session), owner, lease))
    last, _, *words = head.split(" ") if " " in head else (head, "")
    return State(parse_uint63(last), [_parse_wake_up(word) for word in words], entries)


def _check_lease(lease: str) -> None:
    """Raise `MalformedText` unless `lease` is one."""
    seconds, _, count = lease.partition(":")
    if not _SECONDS.fullmatch(seconds) or not 0 < float(seconds) < math.inf:
        raise MalformedText(f"{lease[:40]!r} is no lease")
    parse_uint63(count)


def _parse_wake_up(word: str) -> WakeUp:
    name, session, by = words_in(word.encode(), ":", 3)
    if not (name.isalnum() and name.isascii() and len(name) <= ID_MAX):
        raise MalformedText(f"{name[:40]!r} is no id")
    return WakeUp(name, parse_uint63(session), by)


def format_line(state: State, stamp: str) -> bytes:
    """Return the text: the last token, `stamp` and the wake-ups in one line, then a line for each entry."""
    head = " ".join([str(state.last), stamp, *("{}:{}:{}".format(*each) for each in state.wake_ups)])
    return "\n".join([head, *("{} {} {} {} {} {}".format(*entry) for entry in state.entries)]).encode()
