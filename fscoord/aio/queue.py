"""`Queue` and `PriorityQueue` for tasks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from fscoord import recipes
from fscoord._arguments import Key, Timeout, Value
from fscoord.aio._executor import CALL_WAS_MADE
from fscoord.aio.store import AsyncStore, driver_of
from fscoord.errors import FscoordError
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes._item import Taken

__all__ = ["Item", "PriorityQueue", "Queue"]


class Item:
    """What was taken from a queue, until it is acknowledged or released; see `fscoord.recipes.Item`.

    As an asynchronous context manager it is acknowledged at the end of the ``async with``, and released if that raises
    or is cancelled.

    Attributes:
        data: what was put.
    """

    def __init__(self, store: AsyncStore, core: recipes.Item) -> None:
        self._driver = driver_of(store)
        self._core = core
        self.data = core.data

    async def ack(self) -> None:
        """Remove it for good; for errors see `fscoord.recipes.Item.ack`."""
        await self._driver.run(self._core.ack)

    async def release(self) -> None:
        """Let somebody else take it, at the place in the order that it had."""
        await self._driver.run(self._core.release)

    async def check(self) -> None:
        """Raise an error if this process has it no longer; see `fscoord.recipes.Item.ack`."""
        await self._driver.run(self._core.check)

    async def __aenter__(self) -> Item:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        over: list[object] = []
        try:
            if self._core._is_over:
                return
            if kind is None:
                await self.ack()
            else:
                with suppress(FscoordError):  # what was raised matters more
                    await self.release()
        except CALL_WAS_MADE:
            raise
        except BaseException:  # see `fscoord.recipes._cleanup`
            try:
                self._core._put_back()
            except BaseException:
                go_on_in_thread((over, self._core._put_back))
                await_end(over)
                raise
            raise


class Queue:
    """Items that are taken in the order in which they were put, at least once; see `fscoord.recipes.Queue`."""

    def __init__(self, store: AsyncStore, name: Key, timeout: Timeout | None = None) -> None:
        self._store = store
        self._driver = driver_of(store)
        self._core = recipes.Queue(store.store, name, timeout)

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return self._core.name

    async def put(self, value: Value) -> None:
        """Append an item."""
        await self._driver.run(partial(self._core.put, value))

    async def put_all(self, values: Iterable[Value]) -> None:
        """Append items, all or none, which nobody else's come between."""
        await self._driver.run(partial(self._core.put_all, list(values)))

    async def take(self, block: bool = True, timeout: Timeout | None = None) -> Item:
        """Take the first item that is free, and wait for one. A task that is cancelled meanwhile has taken none.

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
            turns = self._core._taking(block, timeout, got)
            return Item(self._store, await self._driver.drive(turns))
        except BaseException as error:
            try:
                await self._driver.run_cleanup(error, partial(self._core._items.put_back, got))
            except CALL_WAS_MADE:
                raise
            except BaseException:
                go_on_in_thread((over, self._core._items.put_back, got))
                await_end(over)
                raise
            raise

    async def taken(self) -> list[recipes.Contender]:
        """Return the consumers that have items, in the order of the items."""
        return await self._driver.run(self._core.taken)

    async def size(self) -> int:
        """Return how many items may be taken; see `fscoord.recipes.Queue.size`."""
        return await self._driver.run(self._core.size)


class PriorityQueue(Queue):
    """A `Queue` that hands out the item of the lowest priority first; see `fscoord.recipes.PriorityQueue`."""

    def __init__(self, store: AsyncStore, name: Key, timeout: Timeout | None = None) -> None:
        super().__init__(store, name, timeout)
        self._core: recipes.PriorityQueue = recipes.PriorityQueue(store.store, name, timeout)

    async def put(self, value: Value, priority: int = 0) -> None:
        """Add an item; lower priorities go first."""
        await self._driver.run(partial(self._core.put, value, priority))

    async def put_all(self, values: Iterable[Value], priority: int = 0) -> None:
        """Add items of one priority, all or none."""
        await self._driver.run(partial(self._core.put_all, list(values), priority))
