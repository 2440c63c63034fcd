"""The recipes for tasks. Tasks, threads and processes may use the same names, and wait in the same lines.

The class of a recipe has a line for each method of the blocking recipe. `for_tasks` makes the coroutine.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import AsyncContextDecorator
from functools import wraps
from typing import Any, overload

from fscoord import recipes
from fscoord._arguments import Key, Timeout, Value
from fscoord.aio._driver import for_tasks, overriding
from fscoord.aio._methods import ForTasks, Named, function_for_tasks, itself, made_of
from fscoord.aio.store import AsyncStore, driver_of
from fscoord.recipes._hold import Exclusive
from fscoord.recipes.once import OnceLock, failure, result_key, success, value_of

Work = Callable[[], Awaitable[Value]]
Done = Callable[[], Coroutine[Any, Any, bytes]]


class Hold(Named, AsyncContextDecorator):
    """A lock that a limited number of tasks or processes hold. The other contenders wait in the order of their arrival.

    The object is an asynchronous context manager, and a decorator of coroutine functions. When the cancellation of a
    task that acquires the lock is raised, the task does not hold the lock and does not wait in line. A cancelled
    release is completed before the cancellation is raised. With a ``ttl``, a thread renews the lease of each hold, also
    while the loop is busy.
    """

    _core: Exclusive

    @property
    def token(self) -> int:
        """The fencing token of the last acquisition; see `fscoord.recipes.Lock.token`."""
        return self._core.token

    acquire = for_tasks(Exclusive.acquire)
    release = for_tasks(Exclusive.release)
    check = for_tasks(Exclusive.check)
    holders = for_tasks(Exclusive.holders)
    waiters = for_tasks(Exclusive.waiters)
    __aenter__ = for_tasks(Exclusive.__enter__, itself)
    __aexit__ = for_tasks(Exclusive.__exit__)


class Lock(Hold):
    """A lock that at most one task, thread or process holds. See `fscoord.recipes.Lock` for the arguments.

    Tasks that share the object wait in the same line as all other contenders.
    """

    @made_of(recipes.Lock)
    def __init__(self) -> None: ...

    locked = for_tasks(recipes.Lock.locked)


class RLock(Lock):
    """A `Lock` that its holder may acquire again. The task must release it as often as it has acquired it."""

    @made_of(recipes.RLock)
    def __init__(self) -> None: ...


class Semaphore(Hold):
    """A semaphore that at most `value` contenders hold. See `fscoord.recipes.Semaphore` for the arguments."""

    @made_of(recipes.Semaphore)
    def __init__(self) -> None: ...

    @overriding(recipes.Semaphore.release)
    def release(self) -> None:
        """Release the latest `n` acquisitions; see `fscoord.recipes.Semaphore.release`."""


class ReadWriteLock(ForTasks):
    """A lock that many readers or one writer hold. See `fscoord.recipes.ReadWriteLock` for the arguments.

    Attributes:
        reader: the lock for readers: ``async with lock.reader:``, or ``acquire`` and ``release``.
        writer: the lock for writers, used in the same way.
    """

    @made_of(recipes.ReadWriteLock)
    def __init__(self) -> None:
        self.reader: Hold = Hold(self._driver, self._core.reader)
        self.writer: Hold = Hold(self._driver, self._core.writer)

    held_side = for_tasks(recipes.ReadWriteLock.held_side)
    holders = for_tasks(recipes.ReadWriteLock.holders)
    waiters = for_tasks(recipes.ReadWriteLock.waiters)


class Election(Hold):
    """An election of one leader among candidates. See `fscoord.recipes.Election` for the arguments."""

    _core: recipes.Election

    @made_of(recipes.Election)
    def __init__(self) -> None: ...

    @property
    def term(self) -> int:
        """The number of the term in which this candidate leads. It is the fencing token; see `token`."""
        return self._core.term

    campaign = for_tasks(recipes.Election.campaign)
    resign = for_tasks(recipes.Election.resign)
    leader = for_tasks(recipes.Election.leader)
    observe = for_tasks(recipes.Election.observe)

    async def watch(self, timeout: Timeout | None = math.inf) -> AsyncGenerator[recipes.Leader, None]:
        """Yield each leader, without end.

        Args:
            timeout: how long to wait for each leader, in seconds or as a `timedelta`; by default without limit. None
                means the store's timeout.

        Raises:
            StoreTimeoutError: the next leader did not come in time.
        """
        term = 0
        while True:
            leader = await self.observe(term, timeout)
            term = leader.term
            yield leader


class Latch(ForTasks):
    """A latch, which opens after `count` calls of `count_down`; see `fscoord.recipes.Latch`."""

    @made_of(recipes.Latch)
    def __init__(self) -> None: ...

    count_down = for_tasks(recipes.Latch.count_down)
    missing = for_tasks(recipes.Latch.missing)
    wait = for_tasks(recipes.Latch.wait)


class DoubleBarrier(ForTasks):
    """Two barriers around one piece of work. See `fscoord.recipes.DoubleBarrier`, which has the same arguments.

    A rank whose task is cancelled while it waits counts as arrived, and may call again. The same holds after a
    time-out.
    """

    @made_of(recipes.DoubleBarrier)
    def __init__(self) -> None: ...

    enter = for_tasks(recipes.DoubleBarrier.enter)
    leave = for_tasks(recipes.DoubleBarrier.leave)
    __aenter__ = for_tasks(recipes.DoubleBarrier.__enter__, itself)
    __aexit__ = for_tasks(recipes.DoubleBarrier.__exit__)


class Membership(Named):
    """A group that tasks and processes join and leave. See `fscoord.recipes.Membership` for the arguments.

    A task that is cancelled while it joins has not joined. A cancelled `leave` is completed.
    """

    @made_of(recipes.Membership)
    def __init__(self) -> None: ...

    join = for_tasks(recipes.Membership.join)
    update = for_tasks(recipes.Membership.update)
    leave = for_tasks(recipes.Membership.leave)
    evict = for_tasks(recipes.Membership.evict)
    members = for_tasks(recipes.Membership.members)
    observe = for_tasks(recipes.Membership.observe)

    async def watch(self, timeout: Timeout | None = math.inf) -> AsyncGenerator[list[recipes.Participant], None]:
        """Yield the participants at once, if there are any, and again after each change, without end.

        `timeout` is how long to wait for each change. See `fscoord.recipes.Membership.watch` for its units and errors.
        """
        known: list[recipes.Participant] = []
        while True:
            known = await self.observe(known, timeout)
            yield known

    __aenter__ = for_tasks(recipes.Membership.__enter__, itself)
    __aexit__ = for_tasks(recipes.Membership.__exit__)


class Item(ForTasks):
    """An item that was taken from a queue and is neither acknowledged nor released yet; see `fscoord.recipes.Item`.

    The object is an asynchronous context manager. The end of the ``async with`` acknowledges the item. If the body
    raises or is cancelled, the item is released.

    Attributes:
        data: the value that was put into the queue.
        deliveries: how often the item has been handed out; see `fscoord.recipes.Item`.
    """

    def __init__(self, queue: Queue, core: recipes.Item) -> None:
        super().__init__(queue._driver, core)
        self.data: bytes = core.data
        self.deliveries: int = core.deliveries

    ack = for_tasks(recipes.Item.ack)
    release = for_tasks(recipes.Item.release)
    check = for_tasks(recipes.Item.check)

    async def __aenter__(self) -> Item:
        return self

    __aexit__ = for_tasks(recipes.Item.__exit__)


class Queue(Named):
    """Items that are taken in the order in which they were put, at least once; see `fscoord.recipes.Queue`.

    A task that is cancelled while it takes an item has taken no item.
    """

    @made_of(recipes.Queue)
    def __init__(self) -> None: ...

    put = for_tasks(recipes.Queue.put)
    put_all = for_tasks(recipes.Queue.put_all)
    take = for_tasks(recipes.Queue.take, Item)
    taken = for_tasks(recipes.Queue.taken)
    size = for_tasks(recipes.Queue.size)


class PriorityQueue(Queue):
    """A `Queue` whose item with the lowest `priority` is taken first; see `fscoord.recipes.PriorityQueue`."""

    @made_of(recipes.PriorityQueue)
    def __init__(self) -> None: ...

    @overriding(recipes.PriorityQueue.put)
    def put(self) -> None:
        """Add an item; see `fscoord.recipes.PriorityQueue.put`."""

    @overriding(recipes.PriorityQueue.put_all)
    def put_all(self) -> None:
        """Add items; see `fscoord.recipes.PriorityQueue.put_all`."""


class Fenced(ForTasks):
    """A value that is written under a fencing token. See `fscoord.recipes.Fenced` for the arguments and errors."""

    @made_of(recipes.Fenced)
    def __init__(self) -> None: ...

    set = for_tasks(recipes.Fenced.set)
    get = for_tasks(recipes.Fenced.get)
    token = for_tasks(recipes.Fenced.token)


force_release = function_for_tasks(recipes.force_release)


@overload
async def once(store: AsyncStore, name: Key, work: Work, *, timeout: Timeout | None = None) -> bytes: ...


@overload
def once(store: AsyncStore, name: Key, *, timeout: Timeout | None = None) -> Callable[[Work], Done]: ...


def once(
    store: AsyncStore, name: Key, work: Work | None = None, *, timeout: Timeout | None = None
) -> Coroutine[Any, Any, bytes] | Callable[[Work], Done]:
    """Await `work` in one of the callers, and return its value in all of them.

    Callers are tasks, threads and processes. The same `name` may be used with `fscoord.recipes.once`, whose
    documentation also holds for this function. If the task that does the work is cancelled, the next caller does it.
    """
    driver_of(store)
    if work is None:

        def decorate(function: Work) -> Done:
            @wraps(function)
            async def call() -> bytes:
                return await _await_once(store, name, function, timeout)

            return call

        return decorate
    return _await_once(store, name, work, timeout)


async def _await_once(store: AsyncStore, name: Key, work: Work, timeout: Timeout | None) -> bytes:
    key = result_key(name)
    text = await store.get(key, default=None)
    if text is None:
        async with Hold(driver_of(store), OnceLock(store.store, name, timeout)):
            if not await store.check([key]):
                await _do(store, key, work)
        text = await store.get(key)
    return value_of(name, text)


async def _do(store: AsyncStore, key: bytes, work: Work) -> None:
    """Do the work and set `key` to its outcome, unless the outcome of another caller is there already."""
    try:
        text = success(await work())
    except Exception as error:
        await store.compare_set(key, b"", failure(error))
        raise
    await store.compare_set(key, b"", text)
