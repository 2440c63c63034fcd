"""`AsyncStore` makes coroutines of the operations of any `~fscoord.Store`. `open_store` opens an `AsyncStore`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from datetime import timedelta
from functools import partial
from types import EllipsisType
from typing import Any, TypeVar, cast

from fscoord._arguments import Key, Timeout, check_int64, key_bytes, keys_bytes, to_seconds
from fscoord._runtime import system
from fscoord._waiting.changes import Change, Position, Watch
from fscoord._waiting.wait import ITEM, KEYS, VALUES, WaitRequest
from fscoord.aio._docstrings import explained_by
from fscoord.aio._driver import StoreDriver, for_tasks
from fscoord.aio._executor import CallExecutor
from fscoord.store import Capabilities, Store, barrier_steps
from fscoord.stores.url import open_store as open_sync_store

A = TypeVar("A", bound="AsyncStore")
D = TypeVar("D")


class AsyncWatch(AsyncIterator[Change]):
    """An asynchronous iterator over the changes of a store's keys; see `~fscoord.Store.watch`.

    The watch begins with its first step, or at the beginning of an ``async with`` statement. Only one task at a time
    may use it. A cancelled task loses no change: the next step returns it. `aclose`, or the end of the ``async with``,
    ends the watch.
    """

    def __init__(self, driver: StoreDriver, begin: Callable[[], Watch]) -> None:
        self._driver = driver
        self._begin = begin
        self._watch: Watch | None = None
        self._is_closed = False

    @property
    def position(self) -> Position | None:
        """The position up to which all changes were returned; None before the watch has begun."""
        return None if self._watch is None else self._watch.position

    async def __anext__(self) -> Change:
        if self._is_closed:
            raise StopAsyncIteration
        watch = await self._begun()
        request = watch._request()
        if request is not None:
            await self._driver.wait(request)
        for change in watch:
            return change
        raise StopAsyncIteration

    async def aclose(self, *_: object) -> None:
        """End the watch. Closing it again does nothing."""
        self._is_closed = True
        if self._watch is not None:
            await self._driver.run(self._watch.close)

    async def __aenter__(self) -> AsyncWatch:
        await self._begun()
        return self

    __aexit__ = aclose

    async def _begun(self) -> Watch:
        if self._watch is None:
            self._watch = await self._driver.run(self._begin, Watch.close)
        return self._watch


class AsyncStore:
    """A store whose operations are coroutines, with the names, arguments and errors of `~fscoord.Store`.

    Any number of tasks may use one handle. On a `~fscoord.FileStore`, a `~fscoord.HashStore`, or a
    `~fscoord.PrefixStore` of either, a waiting task occupies no thread. On any other store a wait is a blocking call,
    and the waits of all tasks take turns in up to 16 threads.

    All other operations run in up to 4 threads, because a call may block on the log's lock or on a server. Calls of a
    `~fscoord.HashStore` run in the loop, because such a store only uses memory.

    If a task is cancelled during a call, the cancellation is raised after the call is over. So a cancelled write may
    have taken effect. If a cancelled `queue_pop` has taken a value, the value is appended to the queue again.

    Use the object in one event loop at a time. A forked child may use it in a loop of its own. ``async with`` closes
    the store at its end.

    Args:
        store: the underlying store. Other code may use it at the same time.
    """

    def __init__(self, store: Store) -> None:
        self._driver = StoreDriver(store)
        self._store = self._core = store

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    @property
    def store(self) -> Store:
        """The underlying store."""
        return self._store

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the underlying store."""
        return self._store.capabilities

    @property
    def timeout(self) -> timedelta:
        """How long operations wait by default; ``timedelta.max`` means no limit."""
        return self._store.timeout

    @explained_by(Store.set_timeout)
    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """Return whether the underlying store has `append`, `multi_get` and `multi_set`."""
        return self._store.has_extended_api()

    @property
    def has_liveness(self) -> bool:
        """Whether the underlying store can detect dead sessions."""
        return self._store.has_liveness

    # -- operations that do not wait for other processes -----------------------------------------------------------

    set = for_tasks(Store.set)
    add = for_tasks(Store.add)
    compare_set = for_tasks(Store.compare_set)
    check = for_tasks(Store.check)
    delete_key = for_tasks(Store.delete_key)
    create = for_tasks(Store.create)
    pop = for_tasks(Store.pop)
    num_keys = for_tasks(Store.num_keys)
    list_keys = for_tasks(Store.list_keys)
    append = for_tasks(Store.append)
    multi_set = for_tasks(Store.multi_set)
    transact = for_tasks(Store.transact)
    queue_push = for_tasks(Store.queue_push)
    queue_len = for_tasks(Store.queue_len)
    register = for_tasks(Store.register)
    members = for_tasks(Store.members)
    announce_rank = for_tasks(Store.announce_rank)
    dead_ranks = for_tasks(Store.dead_ranks)
    dead_sessions = for_tasks(Store.dead_sessions)

    # -- operations that may wait ----------------------------------------------------------------------------------

    @explained_by(Store.get)
    async def get(self, key: Key, *, default: D | EllipsisType = ..., timeout: Timeout | None = None) -> bytes | D:
        if not isinstance(default, EllipsisType):
            return await self._driver.run(partial(self._store.get, key, default=default, timeout=timeout))
        return (await self.multi_get([key], timeout=timeout))[0]

    @explained_by(Store.multi_get)
    async def multi_get(self, keys: Iterable[Key], *, timeout: Timeout | None = None) -> list[bytes]:
        return cast(list[bytes], await self._driver.wait(WaitRequest(VALUES, keys_bytes(keys), self._limit(timeout))))

    @explained_by(Store.wait)
    async def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        await self._driver.wait(WaitRequest(KEYS, keys_bytes(keys), self._limit(timeout)))

    @explained_by(Store.wait_alive)
    async def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        needed = [check_int64("rank", rank) for rank in ranks]
        request = WaitRequest(KEYS, keys_bytes(keys), self._limit(timeout), ranks=needed)
        return cast(list[int], await self._driver.wait(request))

    @explained_by(Store.wait_sessions)
    async def wait_sessions(
        self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None
    ) -> list[int]:
        needed = [check_int64("session", number) for number in numbers]
        request = WaitRequest(KEYS, keys_bytes(keys), self._limit(timeout), sessions=needed)
        return cast(list[int], await self._driver.wait(request))

    @explained_by(Store.queue_pop)
    async def queue_pop(self, key: Key, block: bool = True, *, timeout: Timeout | None = None) -> bytes:
        name, limit = key_bytes(key), self._limit(timeout)
        if block:
            return cast(bytes, await self._driver.wait(WaitRequest(ITEM, [name], limit)))
        give_back = partial(self._store.queue_push, name)
        return await self._driver.run(partial(self._store.queue_pop, name, block=False), give_back)

    @explained_by(Store.watch)
    def watch(
        self, prefix: Key = "", *, after: Position | str | None = None, timeout: Timeout | None = math.inf
    ) -> AsyncWatch:
        """Return an asynchronous iterator over the changes of the values of all keys that begin with `prefix`."""
        return AsyncWatch(self._driver, partial(self._store.watch, prefix, after=after, timeout=timeout))

    @explained_by(Store.barrier)
    async def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers have called this method with `key`. A cancelled caller counts as arrived."""
        await self._driver.drive(barrier_steps(self._store, key, world_size, self._limit(timeout)))

    # -- the handle ------------------------------------------------------------------------------------------------

    @explained_by(Store.clone)
    async def clone(self) -> AsyncStore:
        """Return a new, independent handle on the same store. Tasks need none, because they can share one handle."""
        return AsyncStore(await self._driver.run(self._store.clone))

    async def close(self) -> None:
        """Close the store. In tasks that wait on the store, `~fscoord.StoreClosedError` is raised."""
        await self._driver.close()

    async def __aenter__(self: A) -> A:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _limit(self, timeout: Timeout | None) -> float:
        return to_seconds(self._store.timeout if timeout is None else timeout)


def driver_of(store: object) -> StoreDriver:
    """Return the driver of `store`, which runs the calls and waits of recipes.

    Raises:
        TypeError: `store` is not an `AsyncStore`. The message says what to pass instead.
    """
    if isinstance(store, AsyncStore):
        return store._driver
    instead = "AsyncStore(store)" if isinstance(store, Store) else f"aio.open_store({store!r})"
    raise TypeError(f"store must be an AsyncStore, got {type(store).__name__}: pass {instead}")


class Opening(Coroutine[Any, Any, AsyncStore]):
    """An awaitable that opens a store. As an asynchronous context manager, it also closes the store at the end."""

    def __init__(self, opening: Coroutine[Any, Any, AsyncStore]) -> None:
        self._opening = opening

    def __await__(self) -> Generator[Any, Any, AsyncStore]:
        return self._opening.__await__()

    def send(self, value: Any) -> Any:
        return self._opening.send(value)

    def throw(self, *error: Any) -> Any:
        return self._opening.throw(*error)

    def close(self) -> None:
        self._opening.close()

    async def __aenter__(self) -> AsyncStore:
        self._opened = await self._opening
        return self._opened

    async def __aexit__(self, *_: object) -> None:
        await self._opened.close()


def open_store(url: str | system.os.PathLike[str] | None = None, **options: Any) -> Opening:
    """Open the store at `url` as an `AsyncStore`, with the arguments and errors of `fscoord.open_store`.

    ``async with open_store(url) as store:`` closes the store at the end of the block. After ``store = await
    open_store(url)``, the caller must close it.
    """
    return Opening(_open(url, options))


async def _open(url: str | system.os.PathLike[str] | None, options: dict[str, Any]) -> AsyncStore:
    return AsyncStore(await CallExecutor(1, 0.0).run(partial(open_sync_store, url, **options), Store.close))
