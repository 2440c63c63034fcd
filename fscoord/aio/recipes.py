"""The classes and functions of `fscoord.recipes` for asyncio. Tasks, threads and processes may share a lock or queue.

Each class takes its methods from the blocking class, one per line. `for_tasks` makes the coroutines.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncContextDecorator
from functools import wraps
from typing import Any, overload

from fscoord import recipes
from fscoord._arguments import Key, Timeout, Value
from fscoord.aio._docstrings import explained_by
from fscoord.aio._driver import for_tasks, overriding
from fscoord.aio._methods import ForTasks, Named, function_for_tasks, itself, made_of
from fscoord.aio.store import AsyncStore, driver_of
from fscoord.recipes._hold import Exclusive
from fscoord.recipes.once import OnceLock, Scope, failure, result_key, scoped, success, value_of

Work = Callable[[], Awaitable[Value]]
Done = Callable[[], Coroutine[Any, Any, bytes]]


class Hold(Named, AsyncContextDecorator):
    """The base class of locks, semaphores and elections. Contenders acquire in the order of their requests.

    An object is an asynchronous context manager, and a decorator of coroutine functions. A task that is cancelled
    during an acquisition neither holds the lock nor waits in line afterwards. If a task is cancelled during a release,
    the release is completed first. With a ``ttl``, a thread renews the lease of each hold, even while the loop is busy.
    """

    _core: Exclusive

    @property
    @explained_by(Exclusive.token)
    def token(self) -> int:
        return self._core.token

    @property
    @explained_by(Exclusive.is_acquired)
    def is_acquired(self) -> bool:
        return self._core.is_acquired

    acquire = for_tasks(Exclusive.acquire)
    cancel = for_tasks(Exclusive.cancel)
    release = for_tasks(Exclusive.release)
    check = for_tasks(Exclusive.check)
    renew = for_tasks(Exclusive.renew)
    holders = for_tasks(Exclusive.holders)
    waiters = for_tasks(Exclusive.waiters)
    __aenter__ = for_tasks(Exclusive.__enter__, itself)
    __aexit__ = for_tasks(Exclusive.__exit__)


class Lock(Hold):
    """A lock that at most one task, thread or process holds.

    Tasks that share an object contend with each other and with all other contenders.
    """

    _core: recipes.Lock

    @made_of(recipes.Lock)
    def __init__(self) -> None: ...

    locked = for_tasks(recipes.Lock.locked)


class RLock(Lock):
    """A `Lock` that its holder may acquire again. The holder must release it as often as it has acquired it."""

    @made_of(recipes.RLock)
    def __init__(self) -> None: ...


class Semaphore(Hold):
    """A semaphore that at most `value` contenders hold at once."""

    @made_of(recipes.Semaphore)
    def __init__(self) -> None: ...

    @overriding(recipes.Semaphore.release)
    def release(self) -> None: ...


class ReadWriteLock(ForTasks):
    """A lock that any number of readers or one writer can hold at a time. Tasks use ``async with lock.reader:``."""

    @made_of(recipes.ReadWriteLock)
    def __init__(self) -> None:
        self.reader: Hold = Hold(self._driver, self._core.reader)
        self.writer: Hold = Hold(self._driver, self._core.writer)

    held_side = for_tasks(recipes.ReadWriteLock.held_side)
    own_side = for_tasks(recipes.ReadWriteLock.own_side)
    downgrade = for_tasks(recipes.ReadWriteLock.downgrade)
    holders = for_tasks(recipes.ReadWriteLock.holders)
    waiters = for_tasks(recipes.ReadWriteLock.waiters)


class Election(Hold):
    """An election of one leader among candidates."""

    _core: recipes.Election

    @made_of(recipes.Election)
    def __init__(self) -> None: ...

    @property
    def term(self) -> int:
        """The number of the term in which this candidate leads. This number is also the fencing `token`."""
        return self._core.term

    campaign = for_tasks(recipes.Election.campaign)
    resign = for_tasks(recipes.Election.resign)
    leader = for_tasks(recipes.Election.leader)
    observe = for_tasks(recipes.Election.observe)

    @explained_by(recipes.Election.watch)
    async def watch(self, timeout: Timeout | None = math.inf) -> AsyncGenerator[recipes.Leader, None]:
        term = 0
        while True:
            leader = await self.observe(term, timeout)
            term = leader.term
            yield leader


class Latch(ForTasks):
    """A latch that opens after `count` calls of `count_down`."""

    @made_of(recipes.Latch)
    def __init__(self) -> None: ...

    count_down = for_tasks(recipes.Latch.count_down)
    missing = for_tasks(recipes.Latch.missing)
    wait = for_tasks(recipes.Latch.wait)


class Event(ForTasks):
    """A flag that tasks, threads and processes set, clear and wait for."""

    @made_of(recipes.Event)
    def __init__(self) -> None: ...

    is_set = for_tasks(recipes.Event.is_set)
    set = for_tasks(recipes.Event.set)
    clear = for_tasks(recipes.Event.clear)
    wait = for_tasks(recipes.Event.wait)


@explained_by(recipes.Condition)
class Condition(ForTasks):
    """A condition variable on a lock. If a task is cancelled in `wait`, the task no longer holds the lock."""

    def __init__(self, store: AsyncStore, name: Key, lock: Lock | None = None) -> None:
        driver, core = driver_of(store), None if lock is None else lock._core
        super().__init__(driver, recipes.Condition(driver.store, name, core))

    acquire = for_tasks(recipes.Condition.acquire)
    release = for_tasks(recipes.Condition.release)
    wait = for_tasks(recipes.Condition.wait)
    wait_for = for_tasks(recipes.Condition.wait_for)
    notify = for_tasks(recipes.Condition.notify)
    notify_all = for_tasks(recipes.Condition.notify_all)
    __aenter__ = for_tasks(recipes.Condition.__enter__, itself)
    __aexit__ = for_tasks(recipes.Condition.__exit__)


class CyclicBarrier(ForTasks):
    """A barrier for `parties` tasks or processes. A task that is cancelled in `wait` breaks the barrier."""

    _core: recipes.CyclicBarrier

    @made_of(recipes.CyclicBarrier)
    def __init__(self) -> None: ...

    @property
    @explained_by(recipes.CyclicBarrier.parties)
    def parties(self) -> int:
        return self._core.parties

    n_waiting = for_tasks(recipes.CyclicBarrier.n_waiting)
    is_broken = for_tasks(recipes.CyclicBarrier.is_broken)
    wait = for_tasks(recipes.CyclicBarrier.wait)
    abort = for_tasks(recipes.CyclicBarrier.abort)
    reset = for_tasks(recipes.CyclicBarrier.reset)


class RateLimiter(ForTasks):
    """A token bucket that all tasks and processes share."""

    @made_of(recipes.RateLimiter)
    def __init__(self) -> None: ...

    acquire = for_tasks(recipes.RateLimiter.acquire)
    try_acquire = for_tasks(recipes.RateLimiter.try_acquire)
    __aenter__ = for_tasks(recipes.RateLimiter.__enter__, itself)
    __aexit__ = for_tasks(recipes.RateLimiter.__exit__)


class DoubleBarrier(ForTasks):
    """Two barriers around a block of work.

    If a wait is cancelled or times out, its rank counts as arrived. The rank may call the method again.
    """

    @made_of(recipes.DoubleBarrier)
    def __init__(self) -> None: ...

    enter = for_tasks(recipes.DoubleBarrier.enter)
    leave = for_tasks(recipes.DoubleBarrier.leave)
    __aenter__ = for_tasks(recipes.DoubleBarrier.__enter__, itself)
    __aexit__ = for_tasks(recipes.DoubleBarrier.__exit__)


class RankZeroFirst(ForTasks):
    """Rank 0 runs a block, and then the other ranks run it.

    If the task of rank 0 is cancelled in the block, the block has failed.
    """

    @made_of(recipes.RankZeroFirst)
    def __init__(self) -> None: ...

    __aenter__ = for_tasks(recipes.RankZeroFirst.__enter__, itself)
    __aexit__ = for_tasks(recipes.RankZeroFirst.__exit__)


class Ephemeral(ForTasks):
    """A key that vanishes with the process that has created it.

    A task that is cancelled while it creates the key has not created it. A cancelled `delete` is completed.
    """

    @made_of(recipes.Ephemeral)
    def __init__(self) -> None: ...

    create = for_tasks(recipes.Ephemeral.create)
    get = for_tasks(recipes.Ephemeral.get)
    delete = for_tasks(recipes.Ephemeral.delete)
    __aenter__ = for_tasks(recipes.Ephemeral.__enter__, itself)
    __aexit__ = for_tasks(recipes.Ephemeral.__exit__)


class Membership(Named):
    """A group that tasks and processes join and leave.

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

    @explained_by(recipes.Membership.watch)
    async def watch(self, timeout: Timeout | None = math.inf) -> AsyncGenerator[list[recipes.Participant], None]:
        known: list[recipes.Participant] = []
        while True:
            known = await self.observe(known, timeout)
            yield known

    __aenter__ = for_tasks(recipes.Membership.__enter__, itself)
    __aexit__ = for_tasks(recipes.Membership.__exit__)


class Partitioner(Named):
    """A fixed number of partitions that tasks and processes share out among themselves.

    A task that is cancelled while it joins has not joined. A cancelled `leave` is completed.
    """

    _core: recipes.Partitioner

    @made_of(recipes.Partitioner)
    def __init__(self) -> None: ...

    @property
    @explained_by(recipes.Partitioner.partitions)
    def partitions(self) -> dict[int, int]:
        return self._core.partitions

    join = for_tasks(recipes.Partitioner.join)
    leave = for_tasks(recipes.Partitioner.leave)
    rebalance = for_tasks(recipes.Partitioner.rebalance)
    wait_changed = for_tasks(recipes.Partitioner.wait_changed)
    __aenter__ = for_tasks(recipes.Partitioner.__enter__, itself)
    __aexit__ = for_tasks(recipes.Partitioner.__exit__)


@explained_by(recipes.Item)
class Item(ForTasks):
    """An item that a task has taken from a queue. Call `ack` when it is processed, or `release` to return it.

    An item is an asynchronous context manager: it is acknowledged at the end of the ``async with`` block. If the block
    raises or is cancelled, the item is released.
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


def _items(queue: Queue, cores: list[recipes.Item]) -> list[Item]:
    return [Item(queue, core) for core in cores]


class Queue(Named):
    """A FIFO queue that delivers each item at least once.

    A task that is cancelled while it takes an item has taken no item.
    """

    @made_of(recipes.Queue)
    def __init__(self) -> None: ...

    put = for_tasks(recipes.Queue.put)
    put_all = for_tasks(recipes.Queue.put_all)
    take = for_tasks(recipes.Queue.take, Item)
    take_all = for_tasks(recipes.Queue.take_all, _items)
    result = for_tasks(recipes.Queue.result)
    taken = for_tasks(recipes.Queue.taken)
    size = for_tasks(recipes.Queue.size)
    join = for_tasks(recipes.Queue.join)
    items = for_tasks(recipes.Queue.items)
    cancel = for_tasks(recipes.Queue.cancel)
    purge = for_tasks(recipes.Queue.purge)

    @explained_by(recipes.Queue.ack_all)
    async def ack_all(self, items: Iterable[Item]) -> None:
        await self._ack_all([item._core for item in items])

    _ack_all = for_tasks(recipes.Queue.ack_all)
    requeue_dead_letters = for_tasks(recipes.Queue.requeue_dead_letters)


class PriorityQueue(Queue):
    """A `Queue` that hands out the item with the lowest `priority` first. Items of equal priority are FIFO."""

    @made_of(recipes.PriorityQueue)
    def __init__(self) -> None: ...

    @overriding(recipes.PriorityQueue.put)
    def put(self) -> None: ...

    @overriding(recipes.PriorityQueue.put_all)
    def put_all(self) -> None: ...


class Fenced(ForTasks):
    """A value that refuses writes with an old fencing token."""

    @made_of(recipes.Fenced)
    def __init__(self) -> None: ...

    set = for_tasks(recipes.Fenced.set)
    get = for_tasks(recipes.Fenced.get)
    token = for_tasks(recipes.Fenced.token)


force_release = function_for_tasks(recipes.force_release)


@overload
async def once(
    store: AsyncStore, name: Key, work: Work, *, timeout: Timeout | None = None, scope: Scope = "store"
) -> bytes: ...


@overload
def once(
    store: AsyncStore, name: Key, *, timeout: Timeout | None = None, scope: Scope = "store"
) -> Callable[[Work], Done]: ...


@explained_by(recipes.once)
def once(
    store: AsyncStore, name: Key, work: Work | None = None, *, timeout: Timeout | None = None, scope: Scope = "store"
) -> Coroutine[Any, Any, bytes] | Callable[[Work], Done]:
    """Await `work` in one task, and return its value in every task that calls this function with the same `name`.

    Threads and processes that call `fscoord.recipes.once` with this `name` get the same value. If the task that runs
    `work` is cancelled, the next waiting caller runs it. As a decorator, `once` takes a coroutine function.
    """
    driver_of(store)
    name = scoped(name, scope)
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
    """Do the work, and store its result or its error under `key`, unless `key` exists already."""
    try:
        text = success(await work())
    except Exception as error:
        await store.compare_set(key, b"", failure(error))
        raise
    await store.compare_set(key, b"", text)
