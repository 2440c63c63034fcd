"""Parses the tokens that ranks append to a key when they arrive at a barrier. The functions are pure.

The value of the key ``{prefix}/arrivals`` is a list of tokens, each followed by a space. There are three kinds:

- ``RANK/WORLD_SIZE`` is an arrival. The rank appends it. If the rank has arrived in an arrival slot of a `FileStore`,
  another rank may append it.
- ``-RANK/WORLD_SIZE`` is a time-out token. A rank appends it when its call times out. The arrival of the rank still
  counts, and the rank may call again, even after all ranks have passed.
- ``!N:R,R`` is a verdict: the ranks R are dead. A verdict is valid only if N rounds were broken before it, and at least
  one of the ranks R had not arrived. A valid verdict breaks the round for all ranks that had arrived, and begins a new
  round.

The last rank to arrive sets ``{prefix}/complete``. The other ranks wait for this key only.

A barrier without ranks counts its callers in ``{prefix}/num_members``. The last caller sets ``{prefix}/last_member``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Final, NamedTuple

from fscoord._arguments import MalformedText, key_text, parse_uint63

__all__ = [
    "ARRIVALS",
    "COMPLETE",
    "RoundState",
    "Rounds",
    "Verdict",
    "add_arrivals",
    "is_last",
    "is_of_barrier",
    "open_rounds",
    "parse",
]

ARRIVALS: Final = b"/arrivals"
COMPLETE: Final = b"/complete"
KEYS_OF_BARRIER: Final = (ARRIVALS, COMPLETE)
COUNT: Final = b"/num_members"
LAST: Final = b"/last_member"


class Verdict(NamedTuple):
    """The end of a broken round. `came`: the ranks that had arrived. `dead`: ranks that died before they arrived."""

    came: frozenset[int]
    dead: list[int]


class Rounds(NamedTuple):
    """The parsed value of ``{prefix}/arrivals``.

    Attributes:
        events: the tokens of the current round, in order: each arrival as (rank, True), each time-out as (rank, False).
        verdicts: the valid verdicts, in order: one for each broken round.
        world_sizes: {world size: the first rank that gave it}, from the tokens of the current round.
    """

    events: list[tuple[int, bool]]
    verdicts: list[Verdict]
    world_sizes: dict[int, int]

    def came(self, end: int | None = None) -> frozenset[int]:
        """Return the ranks that arrive in the first `end` events of the current round. None: in all events."""
        return frozenset(rank for rank, came in self.events[:end] if came)


def parse(text: bytes) -> Rounds:
    """Parse `text`, the value of ``{prefix}/arrivals``.

    Raises:
        MalformedText: a token is malformed. The argument of the error is the token.
    """
    rounds = Rounds([], [], {})
    for token in text.split():
        try:
            if token.startswith(b"!"):
                number, _, names = token[1:].partition(b":")
                came = rounds.came()
                dead = sorted({parse_uint63(name) for name in names.split(b",")} - came)
                if dead and number == b"%d" % len(rounds.verdicts):
                    rounds = Rounds([], [*rounds.verdicts, Verdict(came, dead)], {})
                continue
            name, _, size = token.partition(b"/")
            rank, world_size = parse_uint63(name.removeprefix(b"-")), parse_uint63(size)
        except MalformedText:
            raise MalformedText(token) from None
        if rank >= world_size:
            raise MalformedText(token)
        rounds.events.append((rank, not name.startswith(b"-")))
        rounds.world_sizes.setdefault(world_size, rank)
    return rounds


def is_last(text: bytes, own: bytes, world_size: int) -> bool | None:
    """Return whether the newest arrival in `text` is the last of `world_size` arrivals.

    Return None if this quick test can't tell, or if there are too many arrivals. Then the caller must `parse` the text.

    Args:
        text: the new value of the key of the arrivals.
        own: the token of the newest arrival, with its space; empty if `text` is a counter.
        world_size: how many ranks must arrive.
    """
    if not own:
        arrived = int(text)
        return arrived == world_size if arrived <= world_size else None
    # The usual cases are decided without a loop over all tokens, because the other ranks wait for this call.
    count, end = text.count(b" "), own[own.index(b"/") :]
    if count == text.count(end) and b"-" not in text:
        if count < world_size:
            return False
        if count == world_size and _are_all(text.split(end)[:-1], world_size):
            return True if text.endswith(b" " + own) or text == own else None
    return None


def add_arrivals(
    text: bytes, ranks: Iterable[int], own: int | None, world_size: int, *, is_first: bool = False
) -> tuple[bytes, bool] | None:
    """Return the tokens to append to `text` for the arrivals of `ranks` and `own`, and whether the round is complete.

    Return None if `text` has a verdict, a malformed token or another world size.

    Args:
        text: the value of ``{prefix}/arrivals``.
        ranks: ranks that have arrived in arrival slots. A rank that has an arrival in `text` gets no second token.
        own: the rank of the caller, or None. The token of `own` comes last.
        world_size: how many ranks must arrive.
        is_first: whether `own` gets a token even if `text` has an arrival of `own`. If true, the result is None for a
            `text` that has the arrivals of all ranks.
    """
    size, come = b"/%d" % world_size, set()
    for token in text.split():
        rank, slash, end = token.removeprefix(b"-").partition(b"/")
        if slash + end != size or not rank.isdigit() or len(rank) > 19 or int(rank) >= world_size:
            return None
        if token[0] != 45:  # a minus
            come.add(int(rank))
    if is_first and len(come) == world_size:
        return None
    new = [rank for rank in ranks if rank not in come and rank != own]
    if own is not None and (is_first or own not in come):
        new.append(own)  # last, as if the other ranks had appended their arrivals before
    return b"".join([b"%d%b " % (rank, size) for rank in new]), len(come.union(new)) == world_size


def _are_all(names: list[bytes], world_size: int) -> bool:
    if not all(names) or len(max(names, key=len)) > 19 or not b"".join(names).isdigit():  # not an arrival
        return False
    return set(map(int, names)) == set(range(world_size))


class RoundState(NamedTuple):
    """The current round of a barrier that is not complete.

    Attributes:
        name: the name of the barrier.
        done_key: the key for which the ranks wait.
        world_size: how many ranks must arrive; 0 if the store does not know the number.
        come: how many ranks have arrived.
        missing: the ranks that have not arrived; None if the callers gave no ranks.
    """

    name: str
    done_key: bytes
    world_size: int
    come: int
    missing: tuple[int, ...] | None


def is_of_barrier(key: bytes) -> bool:
    """Return whether `open_rounds` needs the value of `key`."""
    return key.endswith((ARRIVALS, COUNT))


def open_rounds(values: Mapping[bytes, bytes], keys: Collection[bytes]) -> list[RoundState]:
    """Return the barrier rounds that have begun and are not complete, sorted by the barriers' names.

    Args:
        values: the values of the keys for which `is_of_barrier` is true.
        keys: all keys of the store.
    """
    found = []
    for key, text in sorted(values.items()):
        name, _, end = key.rpartition(b"/")
        done = name + (COMPLETE if end == ARRIVALS[1:] else LAST)
        if done in keys or not is_of_barrier(key):
            continue
        try:
            found.append(_counted(name, done, text) if end == COUNT[1:] else _traced(name, done, text))
        except MalformedText:  # another program's key
            continue
    return [state for state in found if state.come]


def _counted(name: bytes, done: bytes, text: bytes) -> RoundState:
    return RoundState(key_text(name), done, 0, parse_uint63(text), None)


def _traced(name: bytes, done: bytes, text: bytes) -> RoundState:
    rounds = parse(text)
    came, world_size = rounds.came(), max(rounds.world_sizes, default=0)
    missing = tuple(rank for rank in range(min(world_size, 1 << 16)) if rank not in came)
    return RoundState(key_text(name), done, world_size, len(came), missing)
