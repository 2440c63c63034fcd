"""`open_rounds`: read from the keys of a store which ranks have arrived at each barrier that is not complete. Pure.

Tools that show a store use this module. It reads the tokens that `fscoord.collectives.arrivals` writes. Such a tool has
no rank, so the module accepts every world size, and skips keys that are not a barrier's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from fscoord._arguments import MalformedText, key_text, parse_uint63

__all__ = ["RoundState", "is_of_barrier", "open_rounds"]

ARRIVALS: Final = b"/arrivals"
COMPLETE: Final = b"/complete"
COUNT: Final = b"/num_members"
LAST: Final = b"/last_member"


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
    """Return the state of a barrier with ranks. `text` has the tokens of `fscoord.collectives.arrivals`."""
    came: set[int] = set()
    world_size = verdicts = 0
    for token in text.split():
        if token.startswith(b"!"):
            number, _, ranks = token[1:].partition(b":")
            dead = {parse_uint63(rank) for rank in ranks.split(b",")}
            if number == b"%d" % verdicts and dead - came:
                verdicts += 1
                came = set()
            continue
        rank, _, size = token.partition(b"/")
        world_size = parse_uint63(size)
        if rank.startswith(b"-"):  # the rank has timed out. It came, but waits no longer
            parse_uint63(rank[1:])
        else:
            came.add(parse_uint63(rank))
    missing = tuple(rank for rank in range(min(world_size, 1 << 16)) if rank not in came)
    return RoundState(key_text(name), done, world_size, len(came), missing)
