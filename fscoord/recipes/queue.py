"""`Queue` and `PriorityQueue`: work that is handed out at least once, and comes back when who took it dies.

An item is a value of the store until it is done. Who takes it writes a *claim* beside it, by compare-and-set; the claim
holds as long as the session of its writer lives. So nothing is lost between taking and doing, which is what the store's
own queues can't promise: what `~fscoord.Store.queue_pop` returned to a process that dies is gone. The idea, an item
that stays until it was processed, under a lock of its consumer, is that of kazoo's ``LockingQueue``.

Who finds nothing sleeps until the key *bell* is there, and removes it before the look after which it sleeps: what comes
behind that look rings again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple

from fscoord import _system as system
from fscoord._sought import KEYS, Sought, Turns, take_turns
from fscoord.arguments import Key, Timeout, Value, integer, key_bytes, key_text, seconds, value_bytes
from fscoord.errors import FscoordError, HoldLostError, QueueEmptyError, StoreTimeoutError
from fscoord.recipes._claim import Claim, new_claim, read_claim
from fscoord.recipes._hold import Waiter
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


class Item:
    """What was taken from a queue, until it is done or given back.

    As a context manager it is done at the end of the ``with``, and given back if that raises. If neither happens it
    comes back to the queue when this process dies, or its store is closed, where the store can tell.

    Attributes:
        data: what was put.
    """

    def __init__(self, queue: Queue, order: bytes, claim: Claim, data: bytes) -> None:
        self.data = data
        self._queue = queue
        self._order = order
        self._claim = claim
        self._is_over = False

    def done(self) -> None:
        """Remove it for good.

        Raises:
            RuntimeError: it was done or given back already.
            HoldLostError: this process was taken for dead, and another one has it, or has done it.
        """
        self._end(self._queue._remove)

    def give_back(self) -> None:
        """Let somebody else take it, at the place in the order that it had; see `done` for errors."""
        self._end(self._queue._return)

    def check(self) -> None:
        """Raise an error if this process has it no longer; see `done`."""
        self._refuse_if_over()
        if not self._queue._is_mine(self._order, self._claim):
            raise self._loss()

    def _end(self, step: Callable[[bytes], None]) -> None:
        self._refuse_if_over()
        self._is_over = True
        try:
            if self._queue._is_mine(self._order, self._claim):
                return step(self._order)
        except BaseException:  # nobody knows how far that came
            self._queue._return_quietly(self._order, self._claim)
            raise
        raise self._loss()

    def _refuse_if_over(self) -> None:
        if self._is_over:
            raise RuntimeError(f"this item of the queue {self._queue.name!r} was done or given back already")

    def _loss(self) -> HoldLostError:
        return HoldLostError(
            f"an item of the queue {self._queue.name!r} is no longer held by {self._claim.owner}: it was taken for"
            " dead, and its item handed out again"
        )

    def __enter__(self) -> Item:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_over:
            return
        if kind is None:
            self.done()
        else:
            with suppress(FscoordError):  # what was raised matters more
                self.give_back()


class Queue:
    """Items that are taken in the order in which they were put, each by one consumer at a time.

    *At least once*: an item whose consumer dies before it says `Item.done` is handed out again, at its place in the
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
        self._name = key_bytes(name)
        self._timeout = None if timeout is None else seconds(timeout)
        self._numbers, self._returns, self._bell = (self._name + each for each in (b"/number", b"/returns", b"/bell"))
        self._ready: deque[_Ready] = deque()
        self._looked = (-1.0, b"", b"")
        key_bytes(self._claim_key(_place(0, 0)))  # a name that is too long fails here

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return key_text(self._name)

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
        return take_turns(self._store, self._taking(block, timeout))

    def _taking(self, block: bool, timeout: Timeout | None) -> Turns[Item]:
        limit = seconds(timeout) if timeout is not None else self._limit()
        end = system.time.monotonic() + limit
        is_cleared = is_last = False
        while True:
            item = self._take_now()
            if item is not None:
                if is_cleared and self._ready:  # others sleep, and did not hear of these
                    self._store.set(self._bell, b"1")
                return item
            if not block:
                raise QueueEmptyError(f"the queue {self.name!r} has no item that nobody has taken")
            if self._store.check([self._bell]):
                self._store.delete_key(self._bell)
                self._looked = (-1.0, b"", b"")
                is_cleared = True
                if not is_last:  # after the deadline it is looked at once more, for what has just been put there
                    is_last = system.time.monotonic() >= end
                    continue
            left = end - system.time.monotonic()
            if left <= 0:
                raise StoreTimeoutError(
                    f"no item came into the queue {self.name!r} within {limit:g} s",
                    keys=[key_text(self._bell)],
                    waited=limit,
                )
            with suppress(StoreTimeoutError):
                consumers = [waiter.session for waiter in self.taken() if waiter.session]
                yield Sought(KEYS, [self._bell], min(LOOK_S, left), sessions=consumers)
            self._looked = (-1.0, b"", b"")

    def taken(self) -> list[Waiter]:
        """Return who has items, in the order of these; `Waiter.token` is 0 and says nothing here."""
        return [Waiter(claim.owner, claim.session, 0) for claim in self._claims().values()]

    def __len__(self) -> int:
        """How many items nobody has taken."""
        items, claims = self._list()
        return len(items.difference(claims))

    def _limit(self) -> float:
        return seconds(self._store.timeout) if self._timeout is None else self._timeout

    def _put(self, values: list[Value], priority: int) -> None:
        packed = [b"=" + value_bytes(value) for value in values]
        if packed:
            first = counted(self._store, self._numbers, len(packed)) - len(packed)
            keys = [self._item_key(_place(priority, first + number)) for number in range(len(packed))]
            self._store.multi_set([*keys, self._bell], [*packed, b"1"])

    def _take_now(self) -> Item | None:
        """Take an item that is to be had without waiting; None if there is none."""
        is_new = self._look()
        refusals = Refusals(self._store, self._name)
        while True:
            try:
                ready = self._ready.popleft()
            except IndexError:
                if is_new:
                    return None
                # Others took what was seen before, and other items may have come since: "empty" needs a new look.
                refusals.add()
                is_new = self._look()
                continue
            item = self._try(ready)
            if item is not None:
                return item
            is_new = False

    def _try(self, ready: _Ready) -> Item | None:
        claim = new_claim(self._store.session)
        key = self._claim_key(ready.order)
        try:
            if self._store.compare_set(key, ready.claim, claim.text) != claim.text:
                return None
            data = read_now(self._store, self._item_key(ready.order))
            if data is not None and data[:1] != b"=":
                raise foreign(self._item_key(ready.order), data, "item of a queue")
            if data is not None:
                return Item(self, ready.order, claim, data[1:])
            self._store.delete_key(key)  # it was done between the look and the claim
        except BaseException:
            self._return_quietly(ready.order, claim)
            raise
        return None

    def _look(self) -> bool:
        """List what may be taken, if nothing is left or an item may have come before it; return whether it did so."""
        now = system.time.monotonic()
        returns = self._count(self._returns)
        news = b"" if self._is_sorted_by_time else self._count(self._numbers)
        if self._ready and now < self._looked[0] + LOOK_S and (returns, news) == self._looked[1:]:
            return False
        items, claims = self._list()
        taken = self._claims(claims)
        dead = set(self._store.dead_sessions({claim.session for claim in taken.values()} - {0}))
        fallen = {order: claim.text for order, claim in taken.items() if claim.session in dead}
        for order in fallen.keys() - items:  # its consumer died between the two steps of `done`
            self._store.delete_key(self._claim_key(order))
        free = items.difference(taken).union(fallen.keys() & items)
        self._ready = deque(_Ready(order, fallen.get(order, b"")) for order in sorted(free))
        self._looked = (now, returns, news)
        return True

    def _list(self) -> tuple[set[bytes], list[bytes]]:
        """Return the places of all items, and the places of those that somebody has, in their order."""
        keys = [key_bytes(key)[len(self._name) :] for key in self._store.list_keys(self._name + b"/")]
        items = {key[len(b"/item/") :] for key in keys if key.startswith(b"/item/")}
        return items, [key[len(b"/claim/") :] for key in keys if key.startswith(b"/claim/")]

    def _claims(self, places: list[bytes] | None = None) -> dict[bytes, Claim]:
        claims = {}
        for place in self._list()[1] if places is None else places:
            text = read_now(self._store, self._claim_key(place))
            if text is not None:
                claims[place] = read_claim(self._claim_key(place), text)
        return claims

    def _count(self, key: bytes) -> bytes:
        return self._store.get(key) if self._store.check([key]) else b""

    def _is_mine(self, order: bytes, claim: Claim) -> bool:
        return read_now(self._store, self._claim_key(order)) == claim.text

    def _remove(self, order: bytes) -> None:
        self._store.delete_key(self._item_key(order))  # in this order: an item without a claim is handed out
        self._store.delete_key(self._claim_key(order))

    def _return(self, order: bytes) -> None:
        self._store.delete_key(self._claim_key(order))
        counted(self._store, self._returns)
        self._store.set(self._bell, b"1")

    def _return_quietly(self, order: bytes, claim: Claim) -> None:
        """Return an item, if it is held by this claim, on the way out with another error."""
        with suppress(FscoordError):
            if self._is_mine(order, claim):
                self._return(order)

    def _item_key(self, order: bytes) -> bytes:
        return self._name + b"/item/" + order

    def _claim_key(self, order: bytes) -> bytes:
        return self._name + b"/claim/" + order


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
