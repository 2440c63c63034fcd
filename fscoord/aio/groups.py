"""Where tasks meet, and what one does for all: latch, double barrier, membership, fenced value and `once`."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial, wraps
from typing import TypeVar, overload

from fscoord import recipes
from fscoord._arguments import Key, Timeout, Value, key_bytes
from fscoord.aio._executor import CALL_WAS_MADE
from fscoord.aio.holds import Hold
from fscoord.aio.store import AsyncStore, driver_of
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes.once import OnceLock, failure, result_key, success, value_of

__all__ = ["DoubleBarrier", "Fenced", "Latch", "Membership", "once"]

M = TypeVar("M", bound="Membership")
D = TypeVar("D", bound="DoubleBarrier")
Work = Callable[[], Awaitable[Value]]


class Latch:
    """A door that opens when `count` times `count_down` was called; see `fscoord.recipes.Latch`."""

    def __init__(self, store: AsyncStore, name: Key, count: int) -> None:
        self._driver = driver_of(store)
        self._core = recipes.Latch(store.store, name, count)

    async def count_down(self) -> int:
        """Count one, and return how many are still missing."""
        return await self._driver.run(self._core.count_down)

    async def missing(self) -> int:
        """Return how many calls are still missing; 0: it is open."""
        return await self._driver.run(self._core.missing)

    async def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the latch is open; for argument and errors see `fscoord.recipes.Latch.wait`."""
        await self._driver.drive(self._core._waiting(timeout))


class DoubleBarrier:
    """Two barriers around one piece of work; see `fscoord.recipes.DoubleBarrier`, also for the arguments.

    A rank that is cancelled while it waits counts as one that came, as after a time-out, and may come again.
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

    async def enter(self, timeout: Timeout | None = None) -> None:
        """Wait until all have come; for errors see `fscoord.recipes.DoubleBarrier.enter`."""
        await self._driver.drive(self._core._meeting(b"/enter", timeout))

    async def leave(self, timeout: Timeout | None = None) -> None:
        """Wait until all have come to this end, too; it raises what `enter` does."""
        await self._driver.drive(self._core._meeting(b"/leave", timeout))

    async def __aenter__(self: D) -> D:
        await self.enter()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self.leave()


class Membership:
    """A group that tasks and processes join and leave; see `fscoord.recipes.Membership`, also for the arguments."""

    def __init__(self, store: AsyncStore, name: Key, data: Value = b"") -> None:
        self._driver = driver_of(store)
        self._core = recipes.Membership(store.store, name, data)

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return self._core.name

    async def join(self) -> None:
        """Take part from now on. A task that is cancelled meanwhile does not take part.

        Raises:
            RuntimeError: this object takes part already.
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
            RuntimeError: this object does not take part.
        """
        await self._driver.run(lambda: self._core.update(data))

    async def leave(self) -> bool:
        """Take part no longer, and return whether this object did until now."""
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
        """Take `member` out of the group, and return whether it was in it; see `fscoord.recipes.Membership.evict`."""
        return await self._driver.run(partial(self._core.evict, member))

    async def members(self) -> list[recipes.Participant]:
        """Return the participants, in the order of joining. Participants that are found dead are removed."""
        return await self._driver.run(self._core.members)

    async def observe(
        self, known: Sequence[recipes.Participant] = (), timeout: Timeout | None = None
    ) -> list[recipes.Participant]:
        """Wait until the participants are not `known` any more; see `fscoord.recipes.Membership.observe`."""
        return await self._driver.drive(self._core._observing(known, timeout))

    async def watch(self, timeout: Timeout | None = math.inf) -> AsyncIterator[list[recipes.Participant]]:
        """Yield the participants: at once, if there are any, and after each change, without end.

        For `timeout`, how long to wait for each change, and the error, see `fscoord.recipes.Membership.watch`.
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
    """A value that is written under a fencing token; see `fscoord.recipes.Fenced`, also for arguments and errors."""

    def __init__(self, store: AsyncStore, key: Key) -> None:
        self._store = store
        self._driver = driver_of(store)
        self._key = key_bytes(key)
        self._core = recipes.Fenced(store.store, key)

    async def set(self, value: Value, token: int) -> None:
        """Set the value, on behalf of the holder, present or past, whose lock has `token`."""
        await self._driver.run(lambda: self._core.set(value, token))

    async def get(self) -> bytes:
        """Return the value, waiting up to the store's timeout for the first."""
        return self._core._split(await self._store.get(self._key))[1]

    async def token(self) -> int:
        """Return the highest token that it has seen; 0 before the first value."""
        return await self._driver.run(self._core.token)


@overload
async def once(store: AsyncStore, name: Key, work: Work, *, timeout: Timeout | None = None) -> bytes: ...


@overload
def once(
    store: AsyncStore, name: Key, *, timeout: Timeout | None = None
) -> Callable[[Work], Callable[[], Awaitable[bytes]]]: ...


def once(
    store: AsyncStore, name: Key, work: Work | None = None, *, timeout: Timeout | None = None
) -> Awaitable[bytes] | Callable[[Work], Callable[[], Awaitable[bytes]]]:
    """Await `work` in one of the tasks, threads and processes that call this, and return its value in all of them.

    It shares its names with `fscoord.recipes.once`, and all that is said there holds. A task that
    is cancelled while it does the work leaves it to the next one.
    """
    if work is None:

        def decorate(function: Work) -> Callable[[], Awaitable[bytes]]:
            @wraps(function)
            async def call() -> bytes:
                return await _await_once(store, name, function, timeout)

            return call

        return decorate
    return _await_once(store, name, work, timeout)


async def _await_once(store: AsyncStore, name: Key, work: Work, timeout: Timeout | None) -> bytes:
    key = result_key(name)
    if not await store.check([key]):
        async with Hold(store, OnceLock(store.store, name, timeout)):
            if not await store.check([key]):
                await _do(store, key, work)
    return value_of(name, await store.get(key))


async def _do(store: AsyncStore, key: bytes, work: Work) -> None:
    """Do the work and set what came of it, unless it is there already."""
    try:
        text = success(await work())
    except Exception as error:
        await store.compare_set(key, b"", failure(error))
        raise
    await store.compare_set(key, b"", text)
