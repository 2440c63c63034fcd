"""`Queue` and `PriorityQueue`: work queues that deliver each item at least once, even if consumers die.

An item is a value of the store until its consumer acknowledges it. A consumer takes an item by writing a *claim* to a
second key, by compare-and-set. The claim is valid while the consumer's session lives. So no item is lost if its
consumer dies. `~fscoord.Store.queue_pop` can lose a value: if the process dies, the value that it popped is gone.
kazoo's ``LockingQueue`` also keeps an item, under a lock of its consumer, until the item was processed.

A consumer that finds no item deletes the wake-up key, lists the items once more, and sleeps until the key exists. A put
after this listing creates the key again, and so wakes the consumer. In the same way, a process that waits for the
removal of items deletes the key ``removed``, which the removal of an item creates again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

from fscoord._arguments import (
    Key,
    Timeout,
    Value,
    check_int64,
    check_positive,
    key_bytes,
    key_text,
    to_seconds,
    value_bytes,
)
from fscoord._runtime import system, tracing
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord._runtime.logging import logger
from fscoord._waiting.awaited import QUEUE, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.recipes._cleanup import Undoable, as_one_wait, in_steps, undone_by
from fscoord.recipes._hold import Contender
from fscoord.recipes._item import NEVER_TAKEN, Claim, Item, Items, QueuedItem, Taken, new_claim
from fscoord.recipes._keys import Refusals, add_checked, foreign_value_error
from fscoord.store import Store, begin_span, needed_store, shown

LOOK_S: Final = 1.0
"""A consumer lists the items again after this many seconds, to find items whose consumers have died."""

MIDDLE: Final = 1 << 31
"""The sum of a priority and this number is not negative. So the hexadecimal text of the sum sorts like the priority."""


class _Takeable(NamedTuple):
    """A free item and its last claim. The claim of an item that no consumer has taken yet is `NEVER_TAKEN`."""

    order_key: bytes
    claim: Claim


class Queue(Undoable):
    """A FIFO queue that delivers each item at least once. An item has one consumer at a time.

    If a consumer dies before it calls `Item.ack`, the item is handed out again, at its old position. So an earlier
    consumer may have done a part of the work. If `put` raises an error whose ``maybe_applied`` is true, the item may be
    in the queue. Two items that are put at the same time may be taken in either order.

    An item may kill every consumer, for example by using up the memory. Without `max_deliveries` such an item is handed
    out again and again. With `max_deliveries`, `take` moves an item that was handed out that many times to the queue
    `dead_letter`. If `dead_letter` is a `PriorityQueue`, the item keeps its priority there.

    With `maxsize`, `put` waits while the queue is full. An item counts until it is acknowledged. Producers that put at
    the same moment may together exceed `maxsize`, by one call each.

    Threads may share an object. Each `put` wakes all waiting consumers. kazoo's ``LockingQueue`` is a similar recipe.

    Args:
        store: the store that producers and consumers share.
        name: the queue's name in the store. Keys that begin with the name and a slash belong to the queue.
        timeout: how long `take`, `put` and `join` wait, in seconds or as a `timedelta`; None means the store's timeout.
        maxsize: how many items the queue holds before `put` waits, at least 1; None means without a limit.
        max_deliveries: how often `take` hands out one item, at least 1; None means without a limit.
        dead_letter: the name of the queue in the same store for items that were handed out `max_deliveries` times.

    Raises:
        ValueError: only one of `max_deliveries` and `dead_letter` is given, or `dead_letter` is this queue.
    """

    _is_sorted_by_time = True

    def __init__(
        self,
        store: Store,
        name: Key,
        timeout: Timeout | None = None,
        *,
        maxsize: int | None = None,
        max_deliveries: int | None = None,
        dead_letter: Key | None = None,
    ) -> None:
        if (max_deliveries is None) != (dead_letter is None):
            raise ValueError("give both max_deliveries and dead_letter, the queue for items handed out that many times")
        self._store = needed_store(store)
        self._items = Items(store, key_bytes(name))
        self._maxsize = math.inf if maxsize is None else check_positive("maxsize", maxsize)
        self._max_deliveries = 0 if max_deliveries is None else check_positive("max_deliveries", max_deliveries)
        self._dead_letter = None if dead_letter is None else Queue(store, dead_letter)
        if self._dead_letter is not None and self._dead_letter.name == self.name:
            raise ValueError(f"dead_letter must be another queue than {self.name!r}")
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._takeable: deque[_Takeable] = deque()
        self._looked = (-1.0, b"", b"")
        key_bytes(self._items.claim_key(_order_key(0, 0)))  # refuses a name that is too long

    def __repr__(self) -> str:
        return shown(self, self._store, self._items.name)

    @property
    def name(self) -> str:
        """The queue's name in the store."""
        return key_text(self._items.name)

    @in_steps
    def put(self, value: Value, *, timeout: Timeout | None = None) -> WaitSteps[str]:
        """Append `value` to the queue as an item, and return the item's id. With `maxsize`, wait for room.

        Args:
            value: the item.
            timeout: how long to wait for room, in seconds or as a `timedelta`; None means this object's `timeout`.

        Raises:
            LimitExceededError: `value` is longer than the store permits. Nothing was put.
            StoreTimeoutError: the queue was full for the whole timeout. Nothing was put.
        """
        return (yield from self._put_in_room([value], 0, timeout))[0]

    @in_steps
    def put_all(self, values: Iterable[Value], *, timeout: Timeout | None = None) -> WaitSteps[list[str]]:
        """Append all `values` as items, or none of them, and return their ids. With `maxsize`, wait for room for all.

        Items of other producers don't come between them.

        Raises:
            LimitExceededError: a value is longer than the store permits, or the values together are too long for one
                `~fscoord.Store.multi_set`. Nothing was put.
            StoreTimeoutError: there was no room within the timeout. Nothing was put.
            ValueError: there are more values than `maxsize`. Nothing was put.
        """
        return self._put_in_room(list(values), 0, timeout)

    @undone_by(lambda queue, got, _: queue._items.put_back(got))
    def take(self, _got: list[Taken], _: object, block: bool = True, timeout: Timeout | None = None) -> WaitSteps[Item]:
        """Take the first item that no living consumer has. Wait if there is no such item.

        Args:
            block: whether to wait.
            timeout: how long to wait, in seconds or as a `timedelta`; None means this object's `timeout`.

        Raises:
            QueueEmptyError: `block` is false and there is no free item.
            StoreTimeoutError: there was no free item within the timeout.
        """
        awaited = Awaited(QUEUE, self.name)
        steps = as_one_wait(
            awaited, lambda: f"an item of the queue {self.name!r}", partial(self._await_item, block, timeout, _got)
        )
        if tracing.recorder is None:
            return steps
        span = begin_span("take", self._store, self._items.name)
        return tracing.record_steps(span, steps, lambda _: ("item", key_text(_got[0][0])))

    def _await_item(
        self, block: bool, timeout: Timeout | None, got: list[Taken], slow_logger: SlowWaitLogger
    ) -> WaitSteps[Item]:
        """Take an item. With `block`, wait until there is a free item.

        The claim of the item is put into `got` before the claim is written. If these steps raise an error, the caller
        must pass `got` to `Items.put_back`, which releases the item.
        """
        given = self._timeout if timeout is None else timeout
        limit = to_seconds(self._store.timeout if given is None else given)
        end = system.time.monotonic() + limit
        is_cleared = is_last = False
        while True:
            item = self._take_now(got, end if block else math.inf)
            if item is not None:
                if is_cleared and self._takeable:  # this call deleted the key that would wake consumers for the rest
                    self._store.set(self._items.wakeup, b"1")
                return item
            if not block:
                raise QueueEmptyError(f"the queue {self.name!r} has no item that can be taken")
            if self._store.check([self._items.wakeup]):
                self._store.delete_key(self._items.wakeup)
                self._looked = (-1.0, b"", b"")
                is_cleared = True
                if not is_last:  # list the items once more after the deadline: the key may have announced an item
                    is_last = system.time.monotonic() >= end
                    continue
            left = end - system.time.monotonic()
            if left <= 0:
                raise StoreTimeoutError(
                    f"no item came into the queue {self.name!r} within {limit:g} s{self._store._closer_look()}",
                    keys=[key_text(self._items.wakeup)],
                    waited=limit,
                )
            with suppress(StoreTimeoutError):
                # If a consumer died after the items were listed, its recorded death ends this wait at once.
                consumers = [claim.session for claim in self._claims().values() if claim.session]
                longest = min(LOOK_S, left)
                yield WaitRequest(KEYS, [self._items.wakeup], longest, sessions=consumers, slow_logger=slow_logger)
            self._looked = (-1.0, b"", b"")

    @in_steps
    def join(self, timeout: Timeout | None = None) -> WaitSteps[None]:
        """Wait until the queue is empty: each item that was put has been acknowledged or removed.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means this object's `timeout`.

        Raises:
            StoreTimeoutError: the queue was not empty within the timeout. The message says how many items it has.
        """
        return self._await_removals(0, timeout, f"the end of the queue {self.name!r}")

    def items(self) -> list[QueuedItem]:
        """Return all items in the order of the queue, also those that a consumer has. No item is taken."""
        order_keys, claimed = self._items.order_keys()
        living = self._living(claims := self._items.claims(claimed))
        found = []
        for order_key in sorted(order_keys):
            data = self._store.get(self._items.item_key(order_key), default=None)
            if data is not None:  # the item was not removed meanwhile
                deliveries = claims.get(order_key, NEVER_TAKEN).deliveries
                consumer = living.get(order_key, NEVER_TAKEN).owner
                found.append(QueuedItem(key_text(order_key), self._value(order_key, data), deliveries, consumer))
        return found

    @undone_by(lambda queue, got, _: queue._items.put_back(got))
    def cancel(self, got: list[Taken], _: object, id: str) -> bool:  # noqa: A002 - the name in `QueuedItem`
        """Remove an item that no living consumer has, by the id that `put` has returned. Return whether it was removed.

        An item that a consumer has, or that was removed before, is not removed.
        """
        order_key = key_bytes(id)
        claims = self._items.claims([order_key])
        if self._living(claims):
            return False
        return self._remove([_Takeable(order_key, claims.get(order_key, NEVER_TAKEN))], got) == 1

    @undone_by(lambda queue, got, _: queue._items.put_back(got))
    def purge(self, got: list[Taken], _: object) -> int:
        """Remove all items that no living consumer has, and return their number."""
        return self._remove(self._list_free(), got)

    @undone_by(lambda queue, got, _: queue._dead_letter is None or queue._dead_letter._items.put_back(got))
    def requeue_dead_letters(self, got: list[Taken], _: object) -> int:
        """Move the items of the queue `dead_letter` to the end of this queue, and return their number.

        Their deliveries are counted from 0 again. They keep their priority in a `PriorityQueue`. If this process dies
        in the call, one item may be in both queues.

        Raises:
            ValueError: this object was made without `dead_letter`.
        """
        source = self._dead_letter
        if source is None:
            raise ValueError(f"the queue {self.name!r} was opened without dead_letter: give the queue's name")
        return source._remove(source._list_free(), got, lambda order_key, data: self._put([data], _priority(order_key)))

    def taken(self) -> list[Contender]:
        """Return the consumers of taken items that are not known dead, in the order of the items.

        `Contender.token` is the item's number of deliveries, which rises with each consumer of the item.
        """
        return [
            Contender(claim.owner, claim.session, claim.deliveries) for claim in self._living(self._claims()).values()
        ]

    def __len__(self) -> int:
        """Return `size`."""
        return self.size()

    def size(self) -> int:
        """Return how many items may be taken: items without a consumer, and items of consumers that are known dead."""
        items, claims = self._items.order_keys()
        return len(items.difference(self._living(self._items.claims(claims))))

    def _claims(self) -> dict[bytes, Claim]:
        return self._items.claims(self._items.order_keys()[1])

    def _living(self, claims: dict[bytes, Claim]) -> dict[bytes, Claim]:
        """Return the valid `claims`. A claim is valid until its item is released or its consumer is known dead."""
        dead = set(self._store.dead_sessions({claim.session for claim in claims.values()} - {0}))
        return {order_key: claim for order_key, claim in claims.items() if claim.owner and claim.session not in dead}

    def _put_in_room(self, values: list[Value], priority: int, timeout: Timeout | None) -> WaitSteps[list[str]]:
        packed = [value_bytes(value) for value in values]
        if len(packed) > self._maxsize:
            raise ValueError(
                f"{len(packed)} items don't fit into the queue {self.name!r}, whose maxsize is {self._maxsize}"
            )
        if packed and self._maxsize != math.inf:
            yield from self._await_removals(self._maxsize - len(packed), timeout, f"room in the queue {self.name!r}")
        return self._put(packed, priority)

    def _await_removals(self, most: float, timeout: Timeout | None, what: str) -> WaitSteps[None]:
        """Wait until the queue has at most `most` items, those of consumers included."""
        given = self._timeout if timeout is None else timeout
        limit = to_seconds(self._store.timeout if given is None else given)
        end = system.time.monotonic() + limit

        def steps(slow_logger: SlowWaitLogger) -> WaitSteps[None]:
            is_cleared = False
            while True:
                count = len(self._items.order_keys()[0])
                if count <= most:
                    return
                left = end - system.time.monotonic()
                if not is_cleared:  # then list the items once more: the key may have announced a removal
                    is_cleared = True
                    self._store.delete_key(self._items.removed)
                    continue
                if left <= 0:
                    raise StoreTimeoutError(
                        f"the wait for {what} took {limit:g} s: it still has {count}"
                        f" {'item' if count == 1 else 'items'}{self._store._closer_look()}",
                        keys=[key_text(self._items.removed)],
                        waited=limit,
                    )
                with suppress(StoreTimeoutError):
                    removed = [self._items.removed]
                    yield WaitRequest(KEYS, removed, min(LOOK_S, left), slow_logger=slow_logger)
                is_cleared = False

        return as_one_wait(Awaited(QUEUE, self.name), lambda: what, steps)

    def _put(self, values: list[bytes], priority: int) -> list[str]:
        packed = [b"=" + value for value in values]
        order_keys: list[bytes] = []
        if packed:
            span = begin_span("put", self._store, self._items.name, None, "items", len(packed))
            first = add_checked(self._store, self._items.numbers, len(packed)) - len(packed)
            order_keys = [_order_key(priority, first + number) for number in range(len(packed))]
            keys = list(map(self._items.item_key, order_keys))
            self._store.multi_set([*keys, self._items.wakeup], [*packed, b"1"])
            if span is not None:
                tracing.end(span, "done", "item", key_text(order_keys[0]))
        return list(map(key_text, order_keys))

    def _take_now(self, got: list[Taken], end: float) -> Item | None:
        """Take an item without waiting, or return None if there is no free item.

        Raises:
            StoreTimeoutError: other consumers took every listed item first, until the time `end` or the store's timeout
                was reached.
        """
        is_new = self._look()
        refusals = Refusals(self._store, self._items.name, end)
        while True:
            try:
                candidate = self._takeable.popleft()
            except IndexError as error:
                raise_unless_absent(error)
                if is_new:
                    return None
                # Other consumers took all listed items. Only a new list can show that the queue is empty.
                refusals.add()
                is_new = self._look()
                continue
            item = self._try(candidate, got)
            if item is not None:
                return item
            is_new = False

    def _try(self, candidate: _Takeable, got: list[Taken]) -> Item | None:
        """Claim the item `candidate` and return it, or return None if another consumer was first."""
        data = self._claim(candidate, got)
        if data is None:
            return None
        if self._dead_letter is not None and got[0][1].deliveries > self._max_deliveries:
            self._move(got[0], data, self._dead_letter)
            return None
        return Item(self._items, got[0], data)

    def _claim(self, candidate: _Takeable, got: list[Taken]) -> bytes | None:
        """Claim the item `candidate` and return its data, or return None if another consumer was first.

        The claim is put into `got` before the claim is written, because an interrupted write may still take effect.
        """
        claim = new_claim(self._store.register(), candidate.claim.deliveries + 1)
        key = self._items.claim_key(candidate.order_key)
        got[:] = [(candidate.order_key, claim)]
        if self._store.compare_set(key, candidate.claim.text, claim.text) != claim.text:
            return None
        data = self._store.get(self._items.item_key(candidate.order_key), default=None)
        if data is None:  # another consumer acknowledged the item after it was listed
            self._store.delete_key(key)
            return None
        return self._value(candidate.order_key, data)

    def _value(self, order_key: bytes, data: bytes) -> bytes:
        if data[:1] != b"=":
            raise foreign_value_error(self._items.item_key(order_key), data, "item of a queue")
        return data[1:]

    def _remove(
        self, free: Iterable[_Takeable], got: list[Taken], keep: Callable[[bytes, bytes], object] | None = None
    ) -> int:
        """Remove the items in `free` that no consumer takes meanwhile, and return their number.

        Args:
            free: the items.
            got: gets the claim of each item before the item is removed, for the undo of the caller.
            keep: called with the order key and the data of each item before the item is removed.
        """
        removed = 0
        for candidate in free:
            data = self._claim(candidate, got)
            if data is not None:
                if keep is not None:
                    keep(candidate.order_key, data)
                self._items.remove(got[0])
                removed += 1
        return removed

    def _move(self, taken: Taken, data: bytes, dead_letter: Queue) -> None:
        """Move an item that this process has claimed to `dead_letter`.

        If this process dies between the two steps, the item is in both queues.
        """
        dead_letter._put([data], _priority(taken[0]))
        self._items.remove(taken)
        logger(__name__).warning(
            "an item of the queue %r was handed out %d times and never acknowledged: it is in the queue %r now",
            *(self.name, self._max_deliveries, dead_letter.name),
        )

    def _look(self) -> bool:
        """List the items that may be taken, unless the last list is valid. Return whether a new list was made.

        A list is valid for `LOOK_S` seconds. The list becomes invalid when an item is released, because this item may
        precede the listed items. In a priority queue, the list also becomes invalid when an item is put.
        """
        now = system.time.monotonic()
        returns = self._count(self._items.returns)
        numbers = b"" if self._is_sorted_by_time else self._count(self._items.numbers)
        if self._takeable and now < self._looked[0] + LOOK_S and (returns, numbers) == self._looked[1:]:
            return False
        self._takeable = deque(self._list_free())
        self._looked = (now, returns, numbers)
        return True

    def _list_free(self) -> list[_Takeable]:
        """Return the items that may be taken, in order. Delete claims that dead consumers have left without items."""
        items, claims = self._items.order_keys()
        taken = self._items.claims(claims)
        living = self._living(taken)
        for order_key in taken.keys() - living.keys() - items:  # a consumer died within `Items.remove`
            self._store.delete_key(self._items.claim_key(order_key))
        free = sorted(items.difference(living))
        return [_Takeable(order_key, taken.get(order_key, NEVER_TAKEN)) for order_key in free]

    def _count(self, key: bytes) -> bytes:
        return self._store.get(key, default=b"")


class PriorityQueue(Queue):
    """A `Queue` that hands out the item with the lowest `priority` first. Items of equal priority are FIFO.

    `take` lists all items if an item was put since the last `take`, so `take` is slower than in a `Queue`.
    """

    _is_sorted_by_time = False

    @in_steps
    def put(self, value: Value, priority: int = 0, *, timeout: Timeout | None = None) -> WaitSteps[str]:
        """Add an item, and return its id.

        Args:
            value: the item.
            priority: a signed 32-bit integer; the item with the lowest priority is taken first.
            timeout: as for `Queue.put`.

        Raises:
            ValueError: `priority` does not fit in 32 bits. Nothing was put.
        """
        return (yield from self._put_in_room([value], _check_priority(priority), timeout))[0]

    @in_steps
    def put_all(
        self, values: Iterable[Value], priority: int = 0, *, timeout: Timeout | None = None
    ) -> WaitSteps[list[str]]:
        """Add all `values` as items of the same `priority`, or none of them, and return their ids.

        Raises:
            ValueError: `priority` does not fit in 32 bits, or there are more values than `maxsize`. Nothing was put.
            LimitExceededError: a value is longer than the store permits, or the values together are too long for one
                `~fscoord.Store.multi_set`. Nothing was put.
            StoreTimeoutError: there was no room within the timeout. Nothing was put.
        """
        return self._put_in_room(list(values), _check_priority(priority), timeout)


def _check_priority(priority: int) -> int:
    if not -MIDDLE <= check_int64("priority", priority) < MIDDLE:
        raise ValueError(f"priority {priority} does not fit in 32 bits")
    return priority


def _priority(order_key: bytes) -> int:
    return int(order_key[:8], 16) - MIDDLE


def _order_key(priority: int, number: int) -> bytes:
    """Return a text that sorts by priority, then by number."""
    return b"%08x-%016x" % (priority + MIDDLE, number)
