"""Description of missing ranks in error messages: which are known dead, which only late, and on which hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fscoord._runtime import system
from fscoord._runtime.escaping import escape_word
from fscoord.errors import FscoordError
from fscoord.store import Member, Store

__all__ = ["MissingRanks", "describe_missing", "location_of"]

SHOWN_MAX = 16
"""The most ranks that a message describes, as in torch."""


class MissingRanks(NamedTuple):
    """The missing ranks of a barrier or an exchange.

    Attributes:
        dead: those that are known dead, as text.
        words: the description for the message, beginning with ``"; "``; empty if nothing is known.
    """

    dead: tuple[str, ...]
    words: str


def describe_missing(store: Store, missing: Sequence[int]) -> MissingRanks:
    """Describe the ranks `missing`; without anything if `store` can't tell which sessions are dead, or fails."""
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
            shown = [f"rank {rank} ({location_of(known.get(rank, []))})" for rank in ranks[:SHOWN_MAX]]
            more = f" and {len(ranks) - SHOWN_MAX} more" if len(ranks) > SHOWN_MAX else ""
            words += f"; {name}: {', '.join(shown)}{more}"
    return MissingRanks(tuple(map(str, dead)), words)


def location_of(members: Sequence[Member]) -> str:
    """Return ``host:pid`` and state of the last session of a rank that may be alive, or of the last one if none is."""
    if not members:
        return "not seen here"
    last = max(members, key=lambda member: (member.alive != "no", member.number))
    place = f"{escape_word(last.host)}:{last.pid}"
    if last.alive == "no":
        return f"{place}, {_clock('found dead at', last.found_dead)}{_clock(', there since', last.since)}"
    return f"{place}, {'alive' if last.alive == 'yes' else 'not known whether alive'}"


def _clock(what: str, when: float | None) -> str:
    return f"{what} {system.time.strftime('%H:%M:%S', system.time.gmtime(when))} UTC" if when else "dead"
