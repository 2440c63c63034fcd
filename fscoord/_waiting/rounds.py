"""The tokens by which ranks arrive at a barrier: the rounds that they make, and which arrival is the last. Pure.

The key ``{prefix}/arrivals`` has three kinds of tokens, each with a space after it:

- ``RANK/WORLD_SIZE`` is an arrival. Each rank appends one, or a rank that has found it in a slot does.
- ``-RANK/WORLD_SIZE`` is a time-out token. A rank appends it when its call times out. The arrival of the rank still
  counts, and the rank may call again, even after all ranks have passed.
- ``!N:R,R`` is a verdict: the ranks R are dead. A verdict counts only if N rounds were broken before it, and one of the
  ranks R had not arrived. If it counts, the round is broken for all ranks that had arrived, and a new round begins
  after the token.

The rank that completes the round sets ``{prefix}/complete``, so each waiting rank waits for one key only.

A barrier without ranks counts its callers in ``{prefix}/num_members``, and the last caller sets
``{prefix}/last_member``.
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
    """The reason why a round is broken: the ranks that had arrived, and the other ranks that are dead."""

    came: frozenset[int]
    dead: list[int]


class Rounds(NamedTuple):
    """The contents of ``{prefix}/arrivals``.

    Attributes:
        events: the tokens of the present round, in order: each arrival as (rank, True), each time-out as (rank, False).
        verdicts: the verdict on each broken round before the present one, in order.
        world_sizes: the world sizes in the tokens of the present round, each with the first rank that gave it.
    """

    events: list[tuple[int, bool]]
    verdicts: list[Verdict]
    world_sizes: dict[int, int]

    def came(self, end: int | None = None) -> frozenset[int]:
        """Return the ranks that have arrived in the present round, by its first `end` events; None: by all of them."""
        return frozenset(rank for rank, came in self.events[:end] if came)


def parse(text: bytes) -> Rounds:
    """Parse `text`, the value of ``{prefix}/arrivals``.

    Raises:
        MalformedText: a token has another form. The argument of the error is this token.
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
    """Return whether the arrival that made the value `text` is the last of `world_size`.

    Return None if the caller must decide: by `parse`, or because there are too many arrivals.

    Args:
        text: the new value of the key of the arrivals.
        own: the token of the arrival, with its space; empty if `text` is a counter.
        world_size: how many must arrive.
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
    """Return the tokens that add the arrivals of `ranks` and `own` to `text`, and whether all ranks have then arrived.

    Return None if `text` has tokens other than arrivals and time-outs in this world size. With `is_first`, the token of
    `own` is added even if `text` has one, and the result is None if `text` has the arrivals of all ranks.
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
    """The present round of a barrier that is not complete.

    Attributes:
        name: the name of the barrier.
        done_key: the key for which the ranks wait.
        world_size: how many ranks must arrive; 0 if the keys do not show the number.
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
    """Return the rounds that have begun and are not complete, in the order of their names.

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
