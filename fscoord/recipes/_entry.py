"""`Entry`: one in a line, and the text that a line is in the store. Pure."""

from __future__ import annotations

import math
from typing import NamedTuple

from fscoord.arguments import natural

__all__ = ["NO_LEASE", "Entry", "format_line", "parse_line", "with_new_sign"]

NO_LEASE = "-"


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


def parse_line(text: bytes) -> tuple[int, list[Entry]]:
    """Return the last token and the entries, first come first; of an empty text 0 and none.

    Raises:
        ValueError: `text` is no line.
    """
    if not text:
        return 0, []
    head, *lines = text.decode().split("\n")
    entries = []
    for line in lines:
        name, mode, token, session, owner, lease = line.split(" ")
        if lease != NO_LEASE:
            seconds, _, count = lease.partition(":")
            if not 0 < float(seconds) < math.inf or int(count) < 0:
                raise ValueError(f"{lease!r} is no lease")
        if not (mode.isascii() and len(mode) < 20):
            raise ValueError(f"{mode!r} is no mode")
        entries.append(Entry(name, mode, natural(token), natural(session), owner, lease))
    return natural(head.partition(" ")[0]), entries


def format_line(last: int, stamp: str, entries: list[Entry]) -> bytes:
    """Return the text: the last token and `stamp`, then a line for each entry."""
    return "\n".join([f"{last} {stamp}", *("{} {} {} {} {} {}".format(*entry) for entry in entries)]).encode()
