"""`lines` and `items` show, from the keys of a store, which processes hold or await locks and have taken queue items.

Tools that show a store use these functions. The functions do no I/O: they take the values of keys instead of a store.
The functions skip keys of other programs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from fscoord._arguments import MalformedText, key_text
from fscoord._waiting.awaited import CONDITION, CYCLIC_BARRIER, ELECTION, LOCK, RATE, SEMAPHORE
from fscoord.errors import FscoordError
from fscoord.recipes._entry import Entry, parse_line
from fscoord.recipes._hold import Contender, contender_of
from fscoord.recipes._item import parse_claim
from fscoord.recipes.condition import NOTIFIED, WAITS
from fscoord.recipes.cyclic_barrier import REASONS
from fscoord.recipes.rate_limiter import TURN

LINE: Final = b"/line"
CLAIM: Final = b"/claim/"
WAKE: Final = b"/wake/"
TERM: Final = b"/term/"


class LineState(NamedTuple):
    """The line of one lock, semaphore, election, rate limiter, condition or cyclic barrier.

    Attributes:
        kind: one of `LOCK`, `SEMAPHORE`, `ELECTION`, `RATE`, `CONDITION` and `CYCLIC_BARRIER`.
        name: the name of the lock, or of the other object, in the store.
        holders: the contenders that have acquired, in the order of their tokens. Of a rate limiter, the process that
            takes the next tokens. Of a condition or a cyclic barrier, none.
        waiters: the contenders that wait, in the order of their requests.
        wake_keys: for each of `waiters`, the key that wakes this waiter.
        needs_all: whether the first waiter acquires only after all holders have released. False for a semaphore, where
            one release is enough.
    """

    kind: str
    name: str
    holders: tuple[Contender, ...]
    waiters: tuple[Contender, ...]
    wake_keys: tuple[bytes, ...] = ()
    needs_all: bool = True


class HeldItem(NamedTuple):
    """An item of a queue that a consumer has taken and neither acknowledged nor released.

    Attributes:
        queue: the name of the queue.
        session: the session number of the consumer; 0 on a store without sessions.
        owner: the process of the consumer, ``host:pid``.
    """

    queue: str
    session: int
    owner: str


def is_of_recipe(key: bytes) -> bool:
    """Return whether `key` may be the key of a line or of a claim, so that `lines` or `items` needs its value."""
    return key.endswith(LINE) or CLAIM in key


def lines(values: Mapping[bytes, bytes], keys: Collection[bytes]) -> list[LineState]:
    """Return the state of each line that has a contender, sorted by name.

    Args:
        values: the values of the keys for which `is_of_recipe` is true.
        keys: all keys of the store.
    """
    elections = {key.rpartition(TERM)[0] for key in keys if TERM in key}
    found = []
    for key, text in sorted(values.items()):
        if not key.endswith(LINE):
            continue
        name = key[: -len(LINE)]
        try:
            entries = parse_line(text).entries
        except MalformedText:  # another program's key
            continue
        if entries:
            found.append(_line_state(name, entries, is_election=name in elections))
    return found


def _line_state(name: bytes, entries: list[Entry], *, is_election: bool) -> LineState:
    mode = entries[0].mode
    kind = _kind_of(mode) or (ELECTION if is_election else LOCK)
    holders = [entry for entry in entries if entry.token] if kind not in (CONDITION, CYCLIC_BARRIER) else []
    waiting = [entry for entry in entries if not entry.token]
    return LineState(
        kind,
        key_text(name),
        tuple(map(contender_of, holders)),
        tuple(map(contender_of, waiting)),
        tuple(name + WAKE + entry.id.encode() for entry in waiting),
        kind != SEMAPHORE,
    )


def _kind_of(mode: str) -> str | None:
    """Return the kind of the line whose first entry has `mode`; None for a lock or an election."""
    if mode.isdigit():
        return SEMAPHORE
    if mode in (WAITS, NOTIFIED):
        return CONDITION
    if "/" in mode or mode in REASONS:
        return CYCLIC_BARRIER
    return RATE if mode == TURN else None


def items(values: Mapping[bytes, bytes]) -> Iterator[HeldItem]:
    """Yield the queue items that consumers have taken, sorted by queue and item. For `values` see `lines`."""
    for key, text in sorted(values.items()):
        queue, mark, _ = key.partition(CLAIM)
        if mark:
            try:
                claim = parse_claim(key, text)
            except FscoordError:  # another program's key
                continue
            if claim.owner:  # the item was not released
                yield HeldItem(key_text(queue), claim.session, claim.owner)
