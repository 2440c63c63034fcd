"""What became of the ranks that are missing: the words that tell the dead from the late, and the broken barrier."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fscoord._runtime import system
from fscoord._runtime.escaping import escape_word
from fscoord.errors import FscoordError
from fscoord.store import Member, Store

__all__ = ["MissingRanks", "describe_missing", "location_of"]

SHOWN_MAX = 16
"""How many ranks are told of, as in torch."""


class MissingRanks(NamedTuple):
    """Which of the missing ranks are dead, and what a message says of each."""

    dead: tuple[str, ...]
    words: str


def describe_missing(store: Store, missing: Sequence[int]) -> MissingRanks:
    """Return what `store` knows of the ranks `missing`; nothing where it can't tell or fails."""
    if not store.has_liveness:
        return MissingRanks((), "")
    try:
        members = store.members(missing)
    except FscoordError:
        return MissingRanks((), "")
    known: dict[int, list[Member]] = {}
    for member in members:
        if member.rank is not None:
            known.setdefault(member.rank, []).append(member)
    dead = [rank for rank in missing if rank in known and all(member.alive == "no" for member in known[rank])]
    late = [rank for rank in missing if rank not in dead]
    words = ""
    for name, ranks in (("dead", dead), ("late", late)):
        if ranks:
            told = [f"rank {rank} ({location_of(known.get(rank, []))})" for rank in ranks[:SHOWN_MAX]]
            more = f" and {len(ranks) - SHOWN_MAX} more" if len(ranks) > SHOWN_MAX else ""
            words += f"; {name}: {', '.join(told)}{more}"
    return MissingRanks(tuple(map(str, dead)), words)


def location_of(members: Sequence[Member]) -> str:
    """Return where a rank is, or was, that has these sessions: that of the last who lives, or else of the last."""
    if not members:
        return "not seen here"
    last = max(members, key=lambda member: (member.alive != "no", member.number))
    place = f"{escape_word(last.host)}:{last.pid}"
    if last.alive == "no":
        return f"{place}, {_clock('found dead at', last.found_dead)}{_clock(', there since', last.since)}"
    return f"{place}, {'alive' if last.alive == 'yes' else 'nobody knows whether alive'}"


def _clock(what: str, when: float | None) -> str:
    return f"{what} {system.time.strftime('%H:%M:%S', system.time.gmtime(when))} UTC" if when else "dead"
