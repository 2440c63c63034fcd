"""`Queue` and `PriorityQueue`: work queues that deliver each item at least once, even if consumers die.

An item is a value of the store until its consumer acknowledges it. A consumer takes an item by writing a *claim* to a
second key, by compare-and-set. The claim is valid while the consumer's session lives. So no item is lost if its
consumer dies. `~fscoord.Store.queue_pop` can lose a value: if the process dies, the value that it popped is gone.
kazoo's ``LockingQueue`` also keeps an item, under a lock of its consumer, until the item was processed.

A consumer keeps a list of free items. When the list is used up, it looks for the items that were put since then, by
their numbers. It lists all keys again only after `LOOK_S`, or when an item was released or has become due. Where the
store changes several keys in one step, each call of this module but `put` is one such step, made by `Items.change`.
Where the store also reads keys in this step (`Store._transact_by`), a `put` and a `take` are one step each. So no
consumer tries to claim an item that another consumer has claimed.

A consumer that finds no item deletes the wake-up key, lists the items once more unless the same step has shown that
there is none, and sleeps until the key exists. A put after this creates the key again, and so wakes the consumer. In
the same way, a process that waits for the removal of items deletes the key ``removed``, which the removal of an item
creates again.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Final, NamedTuple, TypeVar

from fscoord._arguments import (
    KEY_MAX,
    VALUE_MAX,
    Key,
    Timeout,
    Transaction,
    Value,
    check_int64,
    check_positive,
    key_bytes,
    key_text,
    pairs_bytes,
    to_seconds,
    value_bytes,
)
from fscoord._runtime import system, tracing
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord._runtime.logging import logger
from fscoord._waiting.awaited import QUEUE, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, VALUES, WaitRequest, WaitSteps
from fscoord.errors import QueueEmptyError, StoreTimeoutError, WorkFailedError
from fscoord.recipes._cleanup import Undoable, as_one_wait, in_steps, undone_by
from fscoord.recipes._hold import Contender
from fscoord.recipes._item import (
    NEVER_TAKEN,
    Claim,
    Content,
    Item,
    Items,
    QueuedItem,
    Taken,
    claim_until,
    new_claims,
    parse_content,
)
from fscoord.recipes._keys import Refusals, add_checked, foreign_value_error, parse_count
from fscoord.store import Store, begin_span, needed_store, shown

T = TypeVar("T")
Get = Callable[[bytes], "bytes | None"]

LOOK_S: Final = 1.0
"""A consumer lists the items again after this many seconds, to find items that are due or whose consumers have died."""

LOOK_SHARE: Final = 0.05
"""The largest part of its time for which a process lists all keys to repeat an earlier list."""

SPAN: Final = 512
"""For how many numbers a consumer looks for new items in one read."""

SPANS_MAX: Final = 8
"""A consumer lists all keys instead if more than this many times `SPAN` items were put since its last look."""

FAR_S: Final = 1e11
"""No delay is so long, in seconds. An item that would expire after so long a time never expires."""

MIDDLE: Final = 1 << 31
"""The sum of a priority and this number is not negative. So the hexadecimal text of the sum sorts like the priority."""


class _Takeable(NamedTuple):
    """A free item and its last claim. The claim of an item that no consumer has taken yet is `NEVER_TAKEN`."""

    order_key: bytes
    claim: Claim


class _Terms(NamedTuple):
    """The conditions of a put: the priority, and the arguments `delay`, `expires` and `wants_result` of `Queue.put`."""

    priority: int = 0
    delay: Timeout = 0
    expires: Timeout | None = None
    wants_result: bool = False

    def checked(self) -> _Terms:
        """Return the terms with times in seconds.

        Raises:
            ValueError: the delay is not finite, or is at least `FAR_S`.
        """
        if self.delay.__class__ is int and not self.delay and self.expires is None:
            return self  # the usual case
        delay = to_seconds(self.delay, "delay")
        expires = math.inf if self.expires is None else to_seconds(self.expires, "expires")
        if delay >= FAR_S:
            raise ValueError(f"delay must be a finite time, less than {FAR_S:g} s")
        return self._replace(delay=delay, expires=math.inf if expires >= FAR_S else expires)


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
        self._until = -1.0  # when the list of free items is out of date, by the monotonic clock
        self._chosen: list[_Takeable] = []  # the items that this process has tried to claim last
        self._fresh_until = -1.0  # when to list the living consumers again before a sleep
        self._looked: tuple[bytes, bytes | bool] = (b"", b"")
        self._consumers: list[int] = []  # the sessions of living consumers when the items were listed
        self._seen = 0  # items with lower numbers were looked for; one after the last item found may be being written
        self._listed = 0  # how many items had been put when the items were listed last
        self._gone = 0  # numbers without an item, of producers that died
        self._counted_until = -1.0
        key_bytes(self._items.claim_key(_order_key(0, 0)))  # refuses a name that is too long

    def __repr__(self) -> str:
        return shown(self, self._store, self._items.name)

    @property
    def name(self) -> str:
        """The queue's name in the store."""
        return key_text(self._items.name)

    @in_steps
    def put(
        self,
        value: Value,
        *,
        delay: Timeout = 0,
        expires: Timeout | None = None,
        wants_result: bool = False,
        timeout: Timeout | None = None,
    ) -> WaitSteps[str]:
        """Append `value` to the queue as an item, and return the item's id. With `maxsize`, wait for room.

        Args:
            value: the item.
            delay: the item is not taken before this many seconds have passed, or this `timedelta`. Then it is taken
                before the items that were put after it.
            expires: the item is not taken after this many seconds, or this `timedelta`; None means never. `take` moves
                an expired item to the queue `dead_letter`, or drops it if there is no such queue.
            wants_result: whether to keep the result of the item until `result` takes it.
            timeout: how long to wait for room, in seconds or as a `timedelta`; None means this object's `timeout`.

        Both `delay` and `expires` compare the wall clocks of producer and consumer. If these differ, the item comes or
        expires that much too early or too late.

        Raises:
            LimitExceededError: `value` is longer than the store permits. Nothing was put.
            StoreTimeoutError: the queue was full for the whole timeout. Nothing was put.
        """
        return (yield from self._put_in_room([value], _Terms(0, delay, expires, wants_result), timeout))[0]

    @in_steps
    def put_all(
        self,
        values: Iterable[Value],
        *,
        delay: Timeout = 0,
        expires: Timeout | None = None,
        wants_result: bool = False,
        timeout: Timeout | None = None,
    ) -> WaitSteps[list[str]]:
        """Append all `values` as items, or none of them, and return their ids. With `maxsize`, wait for room for all.

        Items of other producers don't come between them. The other arguments are those of `put`.

        Raises:
            LimitExceededError: a value is longer than the store permits, or the values together are too long for one
                `~fscoord.Store.multi_set`. Nothing was put.
            StoreTimeoutError: there was no room within the timeout. Nothing was put.
            ValueError: there are more values than `maxsize`. Nothing was put.
        """
        return self._put_in_room(list(values), _Terms(0, delay, expires, wants_result), timeout)

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
        return self._take_steps(_got, block, timeout, 1, lambda items: items[0])

    @undone_by(lambda queue, got, _: queue._items.put_back(got))
    def take_all(
        self, _got: list[Taken], _: object, n: int, block: bool = True, timeout: Timeout | None = None
    ) -> WaitSteps[list[Item]]:
        """Take up to `n` items at once, the first that no living consumer has. Wait if there is no such item.

        The call does not wait for more items than one. `block` and `timeout` are those of `take`.

        Raises:
            QueueEmptyError: `block` is false and there is no free item.
            StoreTimeoutError: there was no free item within the timeout.
        """
        return self._take_steps(_got, block, timeout, check_positive("n", n), lambda items: items)

    @undone_by(lambda queue, got, _: queue._items.put_back(got))
    def ack_all(self, got: list[Taken], _: object, items: Iterable[Item]) -> None:
        """Acknowledge all `items`, which this object has taken, at once.

        Raises:
            RuntimeError: an item was acknowledged or released already. Nothing was acknowledged.
            LockLostError: another process took this process for dead, and another consumer has taken an item. The other
                items are acknowledged.
        """
        items = list(items)
        for item in items:
            if item._is_over:
                item._refuse()
        got.extend(item._taken for item in items)
        for item in items:
            item._is_over = True
        lost = None
        if not (items and self._store.capabilities.transacts and self._remove_all(items)):
            for item in items:
                if not self._remove_all([item]):
                    lost = item
        if lost is not None:
            raise lost._loss()

    def _remove_all(self, items: list[Item]) -> bool:
        results = {order_key: text for item in items for order_key, text in item._results(b"").items()}
        return self._items.remove([item._taken for item in items], results)

    @undone_by(lambda queue, got, _: [queue._store.set(key, text) for key, text in got])
    def result(
        self,
        _got: list[tuple[bytes, bytes]],
        _: object,
        id: str,  # noqa: A002 - the name in `QueuedItem`
        timeout: Timeout | None = None,
    ) -> WaitSteps[bytes]:
        """Wait for the result of an item that was put with ``wants_result=True``, and return and delete the result.

        Args:
            id: the item's id, which `put` has returned.
            timeout: how long to wait, in seconds or as a `timedelta`; None means this object's `timeout`.

        Returns:
            The value that the consumer passed to `Item.ack`; empty if it passed none.

        Raises:
            WorkFailedError: the item was handed out too often, expired, or was removed by `cancel` or `purge`.
            StoreTimeoutError: there was no result within the timeout.
        """
        key, limit = self._items.result_key(key_bytes(id)), self._limit(timeout)
        what = f"the result of the item {id!r} of the queue {self.name!r}"

        def steps(slow_logger: SlowWaitLogger) -> WaitSteps[bytes]:
            try:
                text = (yield WaitRequest(VALUES, [key], limit, slow_logger=slow_logger))[0]
            except StoreTimeoutError as error:
                raise StoreTimeoutError(
                    f"{what} did not come within {limit:g} s. An item has a result only if it was put with"
                    f" wants_result=True, and only once{self._store._closer_look()}",
                    keys=[key_text(key)],
                    waited=limit,
                ) from error
            _got.append((key, text))
            self._store.delete_key(key)
            _got.clear()
            if text[:1] == b"!":
                why = text[1:].decode(errors="replace")
                raise WorkFailedError(f"there is no result of the item {id!r} of the queue {self.name!r}: {why}")
            if text[:1] != b"=":
                raise foreign_value_error(key, text, "result of an item")
            return bytes(text[1:])

        return as_one_wait(Awaited(QUEUE, self.name), lambda: what, steps)

    def _limit(self, timeout: Timeout | None) -> float:
        given = self._timeout if timeout is None else timeout
        return to_seconds(self._store.timeout if given is None else given)

    def _take_steps(
        self,
        got: list[Taken],
        block: bool,
        timeout: Timeout | None,
        limit: int,
        of: Callable[[list[Item]], T],
    ) -> WaitSteps[T]:
        """Return the steps that take up to `limit` items. Their result is ``of(items)``."""
        steps = self._take_or_await(got, block, timeout, limit, of)
        if tracing.recorder is None:
            return steps
        span = begin_span("take", self._store, self._items.name)
        return tracing.record_steps(span, steps, lambda _: ("item", key_text(got[0][0])))

    def _take_or_await(
        self, got: list[Taken], block: bool, timeout: Timeout | None, most: int, of: Callable[[list[Item]], T]
    ) -> WaitSteps[T]:
        """Take up to `most` items. With `block`, wait until there is a free item.

        The claims of the items are put into `got` before the claims are written. If these steps raise an error, the
        caller must pass `got` to `Items.put_back`, which releases the items.
        """
        limit = self._limit(timeout)
        end = system.time.monotonic() + limit
        items = self._take_now(got, end if block else math.inf, most)
        if not items:
            if not block:
                raise QueueEmptyError(f"the queue {self.name!r} has no item that can be taken")
            items = yield from as_one_wait(
                Awaited(QUEUE, self.name),
                lambda: f"an item of the queue {self.name!r}",
                partial(self._await_items, end, limit, got, most),
            )
        return of(items)

    def _await_items(
        self, end: float, limit: float, got: list[Taken], most: int, slow_logger: SlowWaitLogger
    ) -> WaitSteps[list[Item]]:
        """Wait until there is a free item, and take up to `most` items."""
        clears = not self._store._decides  # otherwise the step that finds no item deletes the wake-up key
        is_cleared = is_last = looks = False
        while True:
            left = end - system.time.monotonic()
            if not clears:  # list the living consumers once more, so that the death of each ends the sleep
                looks = left > 0 and not looks and system.time.monotonic() >= self._fresh_until
            elif looks := self._store.check([self._items.wakeup]):
                self._store.delete_key(self._items.wakeup)
                is_cleared = True
            if looks:
                self._until = -1.0
            if looks and not is_last:  # list the items once more after the deadline: the key may have announced one
                is_last = left <= 0
            else:
                if left <= 0:
                    raise StoreTimeoutError(
                        f"no item came into the queue {self.name!r} within {limit:g} s{self._store._closer_look()}",
                        keys=[key_text(self._items.wakeup)],
                        waited=limit,
                    )
                dead: list[int] = []
                with suppress(StoreTimeoutError):
                    # If a consumer died after the items were listed, its recorded death ends this wait at once.
                    longest = max(0.0, min(LOOK_S, left, self._until - system.time.monotonic()))
                    dead = yield WaitRequest(
                        KEYS, [self._items.wakeup], longest, sessions=self._consumers, slow_logger=slow_logger
                    )
                if dead or clears:
                    self._until = -1.0
            items = self._take_now(got, end, most)
            if items:
                if is_cleared and self._takeable:  # this call deleted the key that would wake consumers for the rest
                    self._store.set(self._items.wakeup, b"1")
                return items

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
            text = self._store.get(self._items.item_key(order_key), default=None)
            if text is not None:  # the item was not removed meanwhile
                deliveries = claims.get(order_key, NEVER_TAKEN).deliveries
                consumer = living.get(order_key, NEVER_TAKEN).owner
                found.append(QueuedItem(key_text(order_key), self._content(order_key, text).data, deliveries, consumer))
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
        return self._remove(self._list_free(math.inf)[0], got)

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
        return source._remove(
            source._list_free(math.inf)[0], got, lambda order_key, data: self._put([data], _Terms(_priority(order_key)))
        )

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
        """Return how many items may be taken: items without a consumer, and items of consumers that are known dead.

        Items whose delay has not passed do not count.
        """
        items, claimed = self._items.order_keys()
        return len(items.difference(self._blocked(self._items.claims(claimed), system.time.time())))

    def _claims(self) -> dict[bytes, Claim]:
        return self._items.claims(self._items.order_keys()[1])

    def _living(self, claims: dict[bytes, Claim]) -> dict[bytes, Claim]:
        """Return the valid `claims`. A claim is valid until its item is released or its consumer is known dead."""
        dead = set(self._store.dead_sessions({claim.session for claim in claims.values()} - {0}))
        return {order_key: claim for order_key, claim in claims.items() if claim.owner and claim.session not in dead}

    def _blocked(self, claims: dict[bytes, Claim], now: float) -> set[bytes]:
        """Return the items that may not be taken: those of living consumers, and those that are not due at `now`."""
        return self._living(claims).keys() | {order_key for order_key, claim in claims.items() if claim.due > now}

    def _put_in_room(self, values: list[Value], terms: _Terms, timeout: Timeout | None) -> WaitSteps[list[str]]:
        packed, terms = [value_bytes(value) for value in values], terms.checked()
        if timeout is not None:
            timeout = to_seconds(timeout)  # a wrong timeout is an error even if there is room
        if len(packed) > self._maxsize:
            raise ValueError(
                f"{len(packed)} items don't fit into the queue {self.name!r}, whose maxsize is {self._maxsize}"
            )
        most = self._maxsize - len(packed)
        if packed and (self._store._decides or most == math.inf or self._count_roughly() <= most):
            ids = self._put(packed, terms, most)
            if ids is not None:
                return ids
        if packed:
            yield from self._await_removals(most, timeout, f"room in the queue {self.name!r}")
        return self._put(packed, terms) or []

    def _count_roughly(self) -> float:
        """Return a number that is not less than the number of items, without listing the items.

        A store that can't change several keys in one step does not count all removals: the result is infinite.
        """
        if not self._store.capabilities.transacts:
            return math.inf
        return self._count_of(self._items.numbers) - self._count_of(self._items.ends) - self._gone

    def _count_exactly(self) -> int:
        """Count the items, and find out how many numbers belong to no item because their producers have died."""
        begin = system.time.monotonic()
        # In this order an item that is put or removed meanwhile makes the number of lost numbers too small.
        put = self._count_of(self._items.numbers)
        count = len(self._items.order_keys()[0])
        self._gone = max(0, put - self._count_of(self._items.ends) - count)
        now = system.time.monotonic()
        self._counted_until = now + max(LOOK_S, (now - begin) / LOOK_SHARE)
        return count

    def _await_removals(self, most: float, timeout: Timeout | None, what: str) -> WaitSteps[None]:
        """Wait until the queue has at most `most` items, those of consumers included."""
        limit = self._limit(timeout)
        end = system.time.monotonic() + limit

        def steps(slow_logger: SlowWaitLogger) -> WaitSteps[None]:
            is_cleared = False
            while True:
                count = self._count_roughly()
                left = end - system.time.monotonic()
                if most and count <= most:
                    return
                # Only a list of all items shows that none is left.
                is_old = system.time.monotonic() >= self._counted_until
                if is_old or left <= 0 or count == math.inf or (not most and count <= 0):
                    count = self._count_exactly()
                    if count <= most:
                        return
                if not is_cleared:  # then look once more: the key may have announced a removal
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

    def _put(self, values: list[bytes], terms: _Terms, most: float = math.inf) -> list[str] | None:
        """Append items. If the store counts them in the same step, return None if there are more than `most`."""
        if not values:
            return []
        span = begin_span("put", self._store, self._items.name, None, "items", len(values))
        now = system.time.time()
        expires = math.inf if terms.expires is None else now + to_seconds(terms.expires)
        texts = [Content(value, expires, terms.wants_result).text() for value in values]
        order_keys: list[bytes] = []

        def pairs(first: int) -> dict[bytes, bytes]:
            order_keys[:] = [_order_key(terms.priority, number) for number in range(first, first + len(values))]
            found = dict(zip(map(self._items.item_key, order_keys), texts, strict=True))
            if terms.delay:
                found |= dict.fromkeys(
                    map(self._items.claim_key, order_keys), claim_until(now + to_seconds(terms.delay))
                )
            return found

        def choose(get: Get) -> Transaction | None:
            put = parse_count(self._items.numbers, get(self._items.numbers) or b"0")
            if most < put and put - parse_count(self._items.ends, get(self._items.ends) or b"0") - self._gone > most:
                return None
            sets = pairs(put)
            if get(self._items.wakeup) is None:
                sets[self._items.wakeup] = b"1"
            adds = {self._items.numbers: len(values)}
            if terms.priority:  # a consumer that is a `Queue` does not find the item by its number, so it must list
                adds[self._items.returns] = 1
            return Transaction({}, sets, adds, [])

        if self._store._decides:
            if len(texts) * 4 * KEY_MAX + sum(map(len, texts)) > VALUE_MAX:  # an item has at most four keys in a step
                pairs_bytes((changes := pairs(0)).keys(), changes.values())  # refuses what is too long
            if not self._items.transact_by(choose):
                if span is not None:
                    tracing.end(span, "full")
                return None
        else:
            first = add_checked(self._store, self._items.numbers, len(values)) - len(values)
            changes = pairs(first) | {self._items.wakeup: b"1"}
            self._store.multi_set(changes.keys(), changes.values())
        if span is not None:
            tracing.end(span, "done", "item", key_text(order_keys[0]))
        return list(map(key_text, order_keys))

    def _take_now(self, got: list[Taken], end: float, most: int) -> list[Item]:
        """Take up to `most` items without waiting. The result is empty if there is no free item.

        Raises:
            StoreTimeoutError: other consumers took every listed item first, until the time `end` or the store's timeout
                was reached.
        """
        if self._store._decides:
            return self._take_in_one_step(got, end, most)
        is_new = self._look()
        refusals = Refusals(self._store, self._items.name, end)
        while True:
            candidates: list[_Takeable] = []
            try:
                while len(candidates) < most:
                    candidates.append(self._takeable.popleft())
            except IndexError as error:
                raise_unless_absent(error)
            if not candidates:
                if is_new:
                    return []
                # Other consumers took all listed items. Only a new list can show that the queue is empty.
                refusals.add()
                is_new = self._look()
                continue
            items = self._claim_all(candidates, got)
            if items:
                return items
            is_new = False

    def _take_in_one_step(self, got: list[Taken], end: float, most: int) -> list[Item]:
        """Take up to `most` items, on a store that finds and claims them in one step.

        A step that finds no free item deletes the wake-up key, which a later put creates again.
        """
        names, session, is_strict = self._items, self._store.register(), True
        chosen: dict[bytes, tuple[Taken, Content]] = {}

        def choose(get: Get) -> Transaction | None:
            takeable = self._takeable  # another thread may replace the list meanwhile
            takeable.extendleft(reversed(self._chosen))  # those that were not claimed: a write may have failed
            self._chosen.clear()
            chosen.clear()
            got.clear()
            numbers = get(names.numbers) or b"0"
            is_current = (get(names.returns) or b"0", self._is_sorted_by_time or numbers) == self._looked
            if is_strict and not is_current:
                return None
            put = parse_count(names.numbers, numbers) if self._is_sorted_by_time else 0
            while len(chosen) < most and (takeable or self._seen < put):
                if not takeable:
                    takeable.append(_Takeable(_order_key(0, self._seen), NEVER_TAKEN))
                    self._seen += 1
                order_key, before = each = takeable[0]
                text = get(key := names.item_key(order_key))
                is_new = order_key not in chosen  # one that was put while the items were listed also has a later number
                if is_new and text is not None and (get(names.claim_key(order_key)) or b"") == before.text:
                    (claim,) = new_claims(session, [before.deliveries + 1])
                    chosen[order_key] = (order_key, claim), parse_content(key, text)
                    self._chosen.append(each)  # before the next line: a signal handler may raise between the two
                takeable.popleft()
            got.extend(taken for taken, _ in chosen.values())
            if chosen:
                return Transaction({}, {names.claim_key(order_key): claim.text for order_key, claim in got}, {}, [])
            gone = [] if get(names.wakeup) is None else [names.wakeup]
            return Transaction({}, {}, {}, gone) if is_current else None

        refusals = Refusals(self._store, self._items.name, end)
        while True:
            self._list_if_old()
            if not self._items.transact_by(choose):  # an item was released, or was put into a priority queue
                self._until, is_strict = -1.0, False
                refusals.add()
                continue
            items = self._usable(chosen.values())
            if items or not chosen:
                return items

    def _claim_all(self, candidates: list[_Takeable], got: list[Taken]) -> list[Item]:
        """Claim those of `candidates` that are still free, all at once if the store can, and return the items."""
        got.clear()
        found: list[tuple[Taken, Content]] = []
        if len(candidates) == 1 or not self._store.capabilities.transacts:
            for candidate in candidates:
                found += self._claim([candidate], got)
        else:
            # Other consumers may have taken some since they were listed.
            keys = [self._items.claim_key(each.order_key) for each in candidates]
            claims = self._store._peek_all(keys)
            free = [each for key, each in zip(keys, candidates, strict=True) if claims.get(key, b"") == each.claim.text]
            if free:
                found = self._claim(free, got)
        return self._usable(found)

    def _usable(self, found: Iterable[tuple[Taken, Content]]) -> list[Item]:
        """Return the items that this process has claimed, without those that it discards."""
        now, items = system.time.time(), []
        for taken, content in found:
            if self._dead_letter is not None and taken[1].deliveries > self._max_deliveries:
                self._discard(taken, content, f"was handed out {self._max_deliveries} times and never acknowledged")
            elif content.expires <= now:
                self._discard(taken, content, "has expired")
            else:
                items.append(Item(self._items, taken, content))
        return items

    def _claim(self, candidates: list[_Takeable], got: list[Taken]) -> list[tuple[Taken, Content]]:
        """Claim `candidates` in one step, and return them with their contents. Return [] if another consumer was first.

        The claims are put into `got` before they are written, because an interrupted write may still take effect.
        """
        order_keys = [each.order_key for each in candidates]
        new = new_claims(self._store.register(), [each.claim.deliveries + 1 for each in candidates])
        taken = list(zip(order_keys, new, strict=True))
        keys = list(map(self._items.claim_key, order_keys))
        got += taken
        before = {key: each.claim.text for key, each in zip(keys, candidates, strict=True)}
        if not self._items.change(before, {key: claim.text for key, claim in zip(keys, new, strict=True)}):
            del got[-len(taken) :]
            return []
        items = list(map(self._items.item_key, order_keys))
        texts = self._store._peek_all(items)
        for key, item in zip(keys, items, strict=True):
            if item not in texts:  # another consumer acknowledged the item after it was listed
                self._store.delete_key(key)
        return [
            (each, parse_content(item, texts[item])) for each, item in zip(taken, items, strict=True) if item in texts
        ]

    def _content(self, order_key: bytes, text: bytes) -> Content:
        return parse_content(self._items.item_key(order_key), text)

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
            got.clear()
            for taken, content in self._claim([candidate], got):
                if keep is not None:
                    keep(candidate.order_key, content.data)
                self._items.remove([taken], _failure(taken, content, "was removed"))
                removed += 1
        return removed

    def _discard(self, taken: Taken, content: Content, why: str) -> None:
        """Move an item that this process has claimed to the queue `dead_letter`, or drop it if there is no such queue.

        If this process dies between the two steps, the item is in both queues.
        """
        where = "was dropped"
        if self._dead_letter is not None:
            where = f"is in the queue {self._dead_letter.name!r} now"
            self._dead_letter._put([content.data], _Terms(_priority(taken[0])))
        self._items.remove([taken], _failure(taken, content, f"{why}; it {where}"))
        logger(__name__).warning("an item of the queue %r %s: it %s", self.name, why, where)

    def _look(self) -> bool:
        """Find the items that may be taken, unless some are listed. Return whether all items were listed.

        A list becomes invalid after some time, and when an item is released, because this item may precede the listed
        items. In a priority queue, the list also becomes invalid when an item is put.
        """
        now = system.time.monotonic()
        returns = self._count(self._items.returns)
        numbers = self._is_sorted_by_time or self._count(self._items.numbers)
        is_valid = now < self._until and (returns, numbers) == self._looked
        if is_valid and (self._takeable or (self._is_sorted_by_time and self._find_new())):
            return False
        self._until = -1.0
        self._list_if_old()
        return True

    def _list_if_old(self) -> None:
        """List the items that may be taken, if the list is out of date."""
        now = system.time.monotonic()
        if now < self._until:
            return
        returns, numbers = self._count(self._items.returns), self._count(self._items.numbers)
        put = parse_count(self._items.numbers, numbers)
        time = system.time.time()
        free, due, self._consumers = self._list_free(time)
        last = _number(free[-1].order_key) + 1 if free else 0
        # Later numbers are of removed items, or of an item that its producer is writing, which is the next to be taken.
        seen = put if self._store._decides else max(min(last, put), self._listed)
        self._takeable, self._seen, self._listed = deque(free), seen, put
        self._chosen.clear()  # the list has those that were not claimed, at their places
        self._looked = returns, self._is_sorted_by_time or numbers
        done = system.time.monotonic()
        self._fresh_until = done + (done - now) / LOOK_SHARE
        self._until = min(now + max(0.0, due - time), max(done + LOOK_S, self._fresh_until))

    def _find_new(self) -> bool:
        """Add the free ones of the items that were put since the last look. Return whether there is one."""
        put = self._count_of(self._items.numbers)
        if put - self._seen > SPAN * SPANS_MAX:
            return False
        start = self._seen
        while start < put and not self._takeable:
            order_keys = [_order_key(0, number) for number in range(start, min(put, start + SPAN))]
            items, claims = list(map(self._items.item_key, order_keys)), list(map(self._items.claim_key, order_keys))
            there, claimed = self._store._peek_all(items), self._store._peek_all(claims)
            for number, order_key, item, claim in zip(count(start), order_keys, items, claims, strict=False):
                is_free = item in there and claim not in claimed
                if is_free:
                    self._takeable.append(_Takeable(order_key, NEVER_TAKEN))
                if is_free or claim in claimed:
                    self._seen = number + 1
            start += len(order_keys)
        self._seen = max(self._seen, min(start, put - SPAN))
        return bool(self._takeable)

    def _list_free(self, now: float) -> tuple[list[_Takeable], float, list[int]]:
        """List the items that may be taken. Delete claims that dead consumers have left without items.

        Args:
            now: the time in seconds since the epoch; items that are due later are left out. An infinite time leaves
                none out.

        Returns:
            The items in order, when the next item is due, in seconds since the epoch, and the sessions of consumers.
        """
        items, claimed = self._items.order_keys()
        claims = self._items.claims(claimed)
        blocked = self._blocked(claims, now)
        for order_key in claims.keys() - blocked - items:  # a consumer died within `Items.remove`
            self._store.delete_key(self._items.claim_key(order_key))
        due = min((claims[each].due for each in blocked if claims[each].due), default=math.inf)
        free = sorted(items.difference(blocked))
        sessions = [claims[each].session for each in blocked if claims[each].session]
        return [_Takeable(order_key, claims.get(order_key, NEVER_TAKEN)) for order_key in free], due, sessions

    def _count(self, key: bytes) -> bytes:
        return self._store.get(key, default=b"0")

    def _count_of(self, key: bytes) -> int:
        return parse_count(key, self._count(key))


class PriorityQueue(Queue):
    """A `Queue` that hands out the item with the lowest `priority` first. Items of equal priority are FIFO.

    `take` lists all items if an item was put since the last `take`, so `take` is slower than in a `Queue`.
    """

    _is_sorted_by_time = False

    @in_steps
    def put(
        self,
        value: Value,
        priority: int = 0,
        *,
        delay: Timeout = 0,
        expires: Timeout | None = None,
        wants_result: bool = False,
        timeout: Timeout | None = None,
    ) -> WaitSteps[str]:
        """Add an item, and return its id.

        Args:
            value: the item.
            priority: a signed 32-bit integer; the item with the lowest priority is taken first.
            delay: as for `Queue.put`.
            expires: as for `Queue.put`.
            wants_result: as for `Queue.put`.
            timeout: as for `Queue.put`.

        Raises:
            ValueError: `priority` does not fit in 32 bits. Nothing was put.
        """
        terms = _Terms(_check_priority(priority), delay, expires, wants_result)
        return (yield from self._put_in_room([value], terms, timeout))[0]

    @in_steps
    def put_all(
        self,
        values: Iterable[Value],
        priority: int = 0,
        *,
        delay: Timeout = 0,
        expires: Timeout | None = None,
        wants_result: bool = False,
        timeout: Timeout | None = None,
    ) -> WaitSteps[list[str]]:
        """Add all `values` as items of the same `priority`, or none of them, and return their ids.

        The other arguments are those of `put`.

        Raises:
            ValueError: `priority` does not fit in 32 bits, or there are more values than `maxsize`. Nothing was put.
            LimitExceededError: a value is longer than the store permits, or the values together are too long for one
                `~fscoord.Store.multi_set`. Nothing was put.
            StoreTimeoutError: there was no room within the timeout. Nothing was put.
        """
        terms = _Terms(_check_priority(priority), delay, expires, wants_result)
        return self._put_in_room(list(values), terms, timeout)


def _failure(taken: Taken, content: Content, why: str) -> dict[bytes, bytes]:
    """Return the result, for `Items.remove`, of an item that ended without a consumer's result."""
    return {taken[0]: b"!the item " + why.encode()} if content.wants_result else {}


def _check_priority(priority: int) -> int:
    if not -MIDDLE <= check_int64("priority", priority) < MIDDLE:
        raise ValueError(f"priority {priority} does not fit in 32 bits")
    return priority


def _priority(order_key: bytes) -> int:
    return int(order_key[:8], 16) - MIDDLE


def _number(order_key: bytes) -> int:
    """Return the number of an item; -1 if another program has made its key."""
    return int(order_key[9:], 16) if re.fullmatch(rb"[0-9a-f]{8}-[0-9a-f]{16}", order_key) else -1


def _order_key(priority: int, number: int) -> bytes:
    """Return a text that sorts by priority, then by number."""
    return b"%08x-%016x" % (priority + MIDDLE, number)
