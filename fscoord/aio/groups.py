"""Recipes for groups of tasks: latch, double barrier, membership, fenced value, and `once`."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import Any, TypeVar, overload

from fscoord import recipes
from fscoord._arguments import Key, Timeout, Value, key_bytes, refuse_copies
from fscoord.aio._executor import CALL_WAS_MADE
from fscoord.aio.holds import Hold
from fscoord.aio.store import AsyncStore, core_repr, driver_of
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes.once import OnceLock, failure, result_key, success, value_of

__all__ = ["DoubleBarrier", "Fenced", "Latch", "Membership", "once"]

M = TypeVar("M", bound="Membership")
D = TypeVar("D", bound="DoubleBarrier")
Work = Callable[[], Awaitable[Value]]
Done = Callable[[], Coroutine[Any, Any, bytes]]


class Latch:
    """A latch, which opens after `count` calls of `count_down`; see `fscoord.recipes.Latch`."""

    def __init__(self, store: AsyncStore, name: Key, count: int) -> None:
        self._driver = driver_of(store)
        self._core = recipes.Latch(store.store, name, count)

    __repr__ = core_repr

    async def count_down(self) -> int:
        """Count one call, and return how many calls are still missing."""
        return await self._driver.run(self._core.count_down)

    async def missing(self) -> int:
        """Return how many calls of `count_down` are still missing; 0 means that the latch is open."""
        return await self._driver.run(self._core.missing)

    async def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the latch is open; see `fscoord.recipes.Latch.wait` for the argument and the errors."""
        await self._driver.drive(self._core._waiting(timeout))


class DoubleBarrier:
    """Two barriers around one piece of work. See `fscoord.recipes.DoubleBarrier`, which has the same arguments.

    A rank whose task is cancelled while it waits counts as arrived, and may call again. The same holds after a
    time-out.
    """

    def __init__(
        self,
        store: AsyncStore,
        name: Key,
        world_size: int,
        rank: int,
        timeout: Timeout | None = None,
        *,
        fail_fast: bool = False,
    ) -> None:
        self._driver = driver_of(store)
        self._core = recipes.DoubleBarrier(store.store, name, world_size, rank, timeout, fail_fast=fail_fast)

    __repr__ = core_repr

    async def enter(self, timeout: Timeout | None = None) -> None:
        """Wait until all ranks have arrived; see `fscoord.recipes.DoubleBarrier.enter` for the errors."""
        await self._driver.drive(self._core._meeting(b"/enter", timeout))

    async def leave(self, timeout: Timeout | None = None) -> None:
        """Wait until all ranks have arrived at the second barrier. The errors are those of `enter`."""
        await self._driver.drive(self._core._meeting(b"/leave", timeout))

    async def __aenter__(self: D) -> D:
        await self.enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.leave()


class Membership:
    """A group that tasks and processes join and leave. See `fscoord.recipes.Membership` for the arguments."""

    __reduce__ = refuse_copies

    def __init__(self, store: AsyncStore, name: Key, data: Value = b"") -> None:
        self._driver = driver_of(store)
        self._core = recipes.Membership(store.store, name, data)

    __repr__ = core_repr

    @property
    def name(self) -> str:
        """The name of the group in the store."""
        return self._core.name

    async def join(self) -> None:
        """Join the group. A task that is cancelled meanwhile has not joined.

        Raises:
            RuntimeError: this object has joined already.
        """
        made: list[bytes] = []
        over: list[object] = []
        try:
            await self._driver.run(partial(self._core._join, made))
        except BaseException as error:  # see `fscoord.recipes._cleanup`
            try:
                await self._driver.run_cleanup(error, partial(self._core._unjoin, made))
            except CALL_WAS_MADE:
                raise
            except BaseException:
                go_on_in_thread((over, self._core._unjoin, made))
                await_end(over)
                raise
            raise

    async def update(self, data: Value) -> None:
        """Change this participant's data, and wake the tasks and threads that watch the group.

        Raises:
            RuntimeError: this object has not joined the group.
        """
        await self._driver.run(lambda: self._core.update(data))

    async def leave(self) -> bool:
        """Leave the group, and return whether this object was in the group."""
        over: list[object] = []
        try:
            return await self._driver.run(self._core.leave)
        except CALL_WAS_MADE:
            raise
        except BaseException:
            try:
                self._core._leave_quietly()
            except BaseException:
                go_on_in_thread((over, self._core._leave_quietly))
                await_end(over)
                raise
            raise

    async def evict(self, member: recipes.Participant) -> bool:
        """Remove `member` from the group, and return whether it was there; see `fscoord.recipes.Membership.evict`."""
        return await self._driver.run(partial(self._core.evict, member))

    async def members(self) -> list[recipes.Participant]:
        """Return the participants, in the order in which they joined, after the removal of dead participants."""
        return await self._driver.run(self._core.members)

    async def observe(
        self, known: Sequence[recipes.Participant] = (), timeout: Timeout | None = None
    ) -> list[recipes.Participant]:
        """Wait until the participants or their data differ from `known`; see `fscoord.recipes.Membership.observe`."""
        return await self._driver.drive(self._core._observing(known, timeout))

    async def watch(self, timeout: Timeout | None = math.inf) -> AsyncGenerator[list[recipes.Participant], None]:
        """Yield the participants at once, if there are any, and again after each change, without end.

        `timeout` is how long to wait for each change. See `fscoord.recipes.Membership.watch` for its units and errors.
        """
        known: list[recipes.Participant] = []
        while True:
            known = await self.observe(known, timeout)
            yield known

    async def __aenter__(self: M) -> M:
        await self.join()
        return self

    async def __aexit__(self, *_: object) -> None:
        over: list[object] = []
        try:
            await self._driver.run(self._core.leave)
        except CALL_WAS_MADE:
            raise
        except BaseException:
            try:
                self._core._leave_quietly()
            except BaseException:
                go_on_in_thread((over, self._core._leave_quietly))
                await_end(over)
                raise
            raise


class Fenced:
    """A value that is written under a fencing token. See `fscoord.recipes.Fenced` for the arguments and errors."""

    def __init__(self, store: AsyncStore, key: Key) -> None:
        self._store = store
        self._driver = driver_of(store)
        self._key = key_bytes(key)
        self._core = recipes.Fenced(store.store, key)

    __repr__ = core_repr

    async def set(self, value: Value, token: int) -> None:
        """Set the value under `token`, the fencing token of a present or past hold of the lock."""
        await self._driver.run(lambda: self._core.set(value, token))

    async def get(self) -> bytes:
        """Return the value. Wait up to the store's timeout for the first value."""
        return self._core._split(await self._store.get(self._key))[1]

    async def token(self) -> int:
        """Return the highest token under which the value was set, or 0 before the first value."""
        return await self._driver.run(self._core.token)


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
        async with Hold(store, OnceLock(store.store, name, timeout)):
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
