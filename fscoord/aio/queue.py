"""`Queue` and `PriorityQueue` for tasks."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from fscoord import recipes
from fscoord._arguments import Key, Timeout, Value, refuse_copies
from fscoord.aio._executor import CALL_WAS_MADE
from fscoord.aio.store import AsyncStore, core_repr, driver_of
from fscoord.errors import FscoordError
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes._item import Taken

__all__ = ["Item", "PriorityQueue", "Queue"]


class Item:
    """An item that was taken from a queue and is neither acknowledged nor released yet; see `fscoord.recipes.Item`.

    The object is an asynchronous context manager. The end of the ``async with`` acknowledges the item. If the body
    raises or is cancelled, the item is released.

    Attributes:
        data: the value that was put into the queue.
        deliveries: how often the item has been handed out; see `fscoord.recipes.Item`.
    """

    __reduce__ = refuse_copies

    def __init__(self, store: AsyncStore, core: recipes.Item) -> None:
        self._driver = driver_of(store)
        self._core = core
        self.data: bytes = core.data
        self.deliveries: int = core.deliveries

    __repr__ = core_repr

    async def ack(self) -> None:
        """Acknowledge the item, which removes it from the queue; see `fscoord.recipes.Item.ack` for the errors."""
        await self._driver.run(self._core.ack)

    async def release(self) -> None:
        """Release the item, so that another consumer can take it. It keeps its place in the order."""
        await self._driver.run(self._core.release)

    async def check(self) -> None:
        """Raise an error if this process has lost the item; see `fscoord.recipes.Item.ack`."""
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
                with suppress(FscoordError):  # the exception of the body matters more
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

    _recipe: type[recipes.Queue] = recipes.Queue

    def __init__(
        self,
        store: AsyncStore,
        name: Key,
        timeout: Timeout | None = None,
        *,
        max_deliveries: int | None = None,
        dead_letter: Key | None = None,
    ) -> None:
        self._store = store
        self._driver = driver_of(store)
        self._core = self._recipe(store.store, name, timeout, max_deliveries=max_deliveries, dead_letter=dead_letter)

    __repr__ = core_repr

    @property
    def name(self) -> str:
        """The name of the queue in the store."""
        return self._core.name

    async def put(self, value: Value) -> None:
        """Append an item."""
        await self._driver.run(partial(self._core.put, value))

    async def put_all(self, values: Iterable[Value]) -> None:
        """Append one item for each of `values`, all or none, with no items of other producers between them."""
        await self._driver.run(partial(self._core.put_all, list(values)))

    async def take(self, block: bool = True, timeout: Timeout | None = None) -> Item:
        """Take the first free item, or wait for one. A task that is cancelled meanwhile has taken no item.

        Args:
            block: whether to wait for an item.
            timeout: how long to wait, in seconds or as a `timedelta`; None means the timeout that was given to the
                constructor.

        Raises:
            QueueEmptyError: with ``block=False``, there is no free item.
            StoreTimeoutError: no item was free before the deadline.
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
        """Return the number of free items; see `fscoord.recipes.Queue.size`."""
        return await self._driver.run(self._core.size)


class PriorityQueue(Queue):
    """A `Queue` whose item with the lowest `priority` is taken first; see `fscoord.recipes.PriorityQueue`."""

    _recipe = recipes.PriorityQueue
    _core: recipes.PriorityQueue

    async def put(self, value: Value, priority: int = 0) -> None:
        """Add an item. Items with a lower `priority` are taken first."""
        await self._driver.run(partial(self._core.put, value, priority))

    async def put_all(self, values: Iterable[Value], priority: int = 0) -> None:
        """Add one item for each of `values`, all with the same `priority`; all or none."""
        await self._driver.run(partial(self._core.put_all, list(values), priority))
