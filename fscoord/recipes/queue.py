"""`Queue` and `PriorityQueue`: work that is handed out at least once, and comes back when who took it dies.

An item is a value of the store until it is done. Who takes it writes a *claim* beside it, by compare-and-set; the claim
holds as long as the session of its writer lives. So nothing is lost between taking and doing, which is what the store's
own queues can't promise: what `~fscoord.Store.queue_pop` returned to a process that dies is gone. The idea, an item
that stays until it was processed, under a lock of its consumer, is that of kazoo's ``LockingQueue``.

Who finds nothing sleeps until the key *bell* is there, and removes it before the look after which it sleeps: what comes
behind that look rings again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from fscoord._runtime import system
from fscoord._runtime.foreign import raise_unless_absent
from fscoord._waiting.request import KEYS, Sought, Turns, take_turns
from fscoord._waiting.slow_wait import Patience
from fscoord.arguments import Key, Timeout, Value, integer, key_bytes, key_text, seconds, value_bytes
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.recipes._claim import Claim, new_claim
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes._hold import Contender
from fscoord.recipes._item import Item, Items, Taken
from fscoord.recipes._keys import Refusals, counted, foreign, read_now
from fscoord.store import Store

__all__ = ["Item", "PriorityQueue", "Queue"]

LOOK_S: Final = 1.0
"""How often one who waits, or takes one item after another, looks for those whose consumers have died."""

MIDDLE: Final = 1 << 31
"""What is added to a priority so that its text sorts as the number does."""


class _Ready(NamedTuple):
    """An item that may be taken: its place in the order, and the claim of the dead that stands beside it, if any."""

    order: bytes
    claim: bytes


class Queue:
    """Items that are taken in the order in which they were put, each by one consumer at a time.

    *At least once*: an item whose consumer dies before it calls `Item.ack` is handed out again, at its place in the
    order. So a consumer may find that a part of its work was done before. A `put` that fails with ``maybe_applied`` may
    have put its item. Two that are put at the same time stand in either order.

    An object may be shared by threads. Who waits is woken by each `put`, beside the others who wait.

    Args:
        store: where producers and consumers meet.
        name: the queue's name there; keys that begin with it and a slash belong to it.
        timeout: how long `take` waits, in seconds or as a `timedelta`; None means the store's.
    """

    _is_sorted_by_time = True

    def __init__(self, store: Store, name: Key, timeout: Timeout | None = None) -> None:
        self._store = store
        self._items = Items(store, key_bytes(name))
        self._timeout = None if timeout is None else seconds(timeout)
        self._ready: deque[_Ready] = deque()
        self._looked = (-1.0, b"", b"")
        key_bytes(self._items.claim_key(_place(0, 0)))  # a name that is too long fails here

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return key_text(self._items.name)

    def put(self, value: Value) -> None:
        """Append an item."""
        self._put([value], 0)

    def put_all(self, values: Iterable[Value]) -> None:
        """Append items, all or none, which nobody else's come between."""
        self._put(list(values), 0)

    def take(self, block: bool = True, timeout: Timeout | None = None) -> Item:
        """Take the first item that nobody has, waiting for one.

        Args:
            block: whether to wait.
            timeout: for how long, in seconds or as a `timedelta`; None means what the queue was made with.

        Raises:
            QueueEmptyError: with ``block=False``, there is none.
            StoreTimeoutError: none came.
        """
        got: list[Taken] = []
        over: list[object] = []
        try:
            return take_turns(self._store, self._taking(block, timeout, got))
        except BaseException:
            try:
                self._items.put_back(got)
            except BaseException:
                go_on_in_thread((over, self._items.put_back, got))
                await_end(over)
                raise
            raise

    def _taking(self, block: bool, timeout: Timeout | None, got: list[Taken]) -> Turns[Item]:
        """Take an item, and put into `got` what `_put_back` is to return if that fails."""
        limit = seconds(timeout) if timeout is not None else self._limit()
        end, patience = system.time.monotonic() + limit, Patience()
        is_cleared = is_last = False
        while True:
            item = self._take_now(got, end if block else math.inf)
            if item is not None:
                if is_cleared and self._ready:  # others sleep, and did not hear of these
                    self._store.set(self._items.bell, b"1")
                return item
            if not block:
                raise QueueEmptyError(f"the queue {self.name!r} has no item that nobody has taken")
            if self._store.check([self._items.bell]):
                self._store.delete_key(self._items.bell)
                self._looked = (-1.0, b"", b"")
                is_cleared = True
                if not is_last:  # after the deadline it is looked at once more, for what has just been put there
                    is_last = system.time.monotonic() >= end
                    continue
            left = end - system.time.monotonic()
            if left <= 0:
                raise StoreTimeoutError(
                    f"no item came into the queue {self.name!r} within {limit:g} s",
                    keys=[key_text(self._items.bell)],
                    waited=limit,
                )
            with suppress(StoreTimeoutError):
                # Also those that died since the look: a death that was recorded meanwhile ends the wait at once.
                consumers = [claim.session for claim in self._claims().values() if claim.session]
                yield Sought(KEYS, [self._items.bell], min(LOOK_S, left), sessions=consumers)
            patience.speak(__name__, lambda: f"an item of the queue {self.name!r}")
            self._looked = (-1.0, b"", b"")

    def taken(self) -> list[Contender]:
        """Return the consumers that have items, in the order of these; `Contender.token` is 0 and says nothing here.

        A consumer that is known dead has none.
        """
        return [Contender(claim.owner, claim.session, 0) for claim in self._living(self._claims()).values()]

    def __len__(self) -> int:
        return self.size()

    def size(self) -> int:
        """Return how many items may be taken: those without a consumer, and those whose consumer is known dead."""
        items, claims = self._items.places()
        return len(items.difference(self._living(self._items.claims(claims))))

    def _claims(self) -> dict[bytes, Claim]:
        return self._items.claims(self._items.places()[1])

    def _living(self, claims: dict[bytes, Claim]) -> dict[bytes, Claim]:
        """Return those of `claims` whose consumers are not known dead."""
        dead = set(self._store.dead_sessions({claim.session for claim in claims.values()} - {0}))
        return {place: claim for place, claim in claims.items() if claim.session not in dead}

    def _limit(self) -> float:
        return seconds(self._store.timeout) if self._timeout is None else self._timeout

    def _put(self, values: list[Value], priority: int) -> None:
        packed = [b"=" + value_bytes(value) for value in values]
        if packed:
            first = counted(self._store, self._items.numbers, len(packed)) - len(packed)
            keys = [self._items.item_key(_place(priority, first + number)) for number in range(len(packed))]
            self._store.multi_set([*keys, self._items.bell], [*packed, b"1"])

    def _take_now(self, got: list[Taken], end: float) -> Item | None:
        """Take an item that is to be had without waiting; None if there is none.

        Raises:
            StoreTimeoutError: others took every item first, until the moment `end`, or for the store's timeout.
        """
        is_new = self._look()
        refusals = Refusals(self._store, self._items.name, end)
        while True:
            try:
                ready = self._ready.popleft()
            except IndexError as error:
                raise_unless_absent(error)
                if is_new:
                    return None
                # Others took what was seen before, and other items may have come since: "empty" needs a new look.
                refusals.add()
                is_new = self._look()
                continue
            item = self._try(ready, got)
            if item is not None:
                return item
            is_new = False

    def _try(self, ready: _Ready, got: list[Taken]) -> Item | None:
        claim = new_claim(self._store.register())
        key = self._items.claim_key(ready.order)
        got[:] = [(ready.order, claim)]
        if self._store.compare_set(key, ready.claim, claim.text) != claim.text:
            return None
        data = read_now(self._store, self._items.item_key(ready.order))
        if data is None:  # it was done between the look and the claim
            self._store.delete_key(key)
            return None
        if data[:1] != b"=":
            raise foreign(self._items.item_key(ready.order), data, "item of a queue")
        return Item(self._items, got[0], data[1:])

    def _look(self) -> bool:
        """List what may be taken, if nothing is left or an item may have come before it; return whether it did so."""
        now = system.time.monotonic()
        returns = self._count(self._items.returns)
        news = b"" if self._is_sorted_by_time else self._count(self._items.numbers)
        if self._ready and now < self._looked[0] + LOOK_S and (returns, news) == self._looked[1:]:
            return False
        items, claims = self._items.places()
        taken = self._items.claims(claims)
        dead = set(self._store.dead_sessions({claim.session for claim in taken.values()} - {0}))
        fallen = {order: claim.text for order, claim in taken.items() if claim.session in dead}
        for order in fallen.keys() - items:  # its consumer died between the two steps of `ack`
            self._store.delete_key(self._items.claim_key(order))
        free = items.difference(taken).union(fallen.keys() & items)
        self._ready = deque(_Ready(order, fallen.get(order, b"")) for order in sorted(free))
        self._looked = (now, returns, news)
        return True

    def _count(self, key: bytes) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""


class PriorityQueue(Queue):
    """A `Queue` that hands out the item of the lowest priority first, and those of one priority in their order.

    While items are put, each `take` looks through all that are there.
    """

    _is_sorted_by_time = False

    def put(self, value: Value, priority: int = 0) -> None:
        """Add an item.

        Args:
            value: what it is.
            priority: lower goes first; 32 bits with a sign.
        """
        self._put([value], _checked(priority))

    def put_all(self, values: Iterable[Value], priority: int = 0) -> None:
        """Add items of one priority, all or none; see `put`."""
        self._put(list(values), _checked(priority))


def _checked(priority: int) -> int:
    if not -MIDDLE <= integer("priority", priority) < MIDDLE:
        raise ValueError(f"priority {priority} does not fit in 32 bits")
    return priority


def _place(priority: int, number: int) -> bytes:
    """Return a text that sorts by priority, then by number."""
    return b"%08x-%016x" % (priority + MIDDLE, number)
