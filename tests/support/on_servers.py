"""Tasks that use a store together whose calls wait: one test for each such store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from aio.through_a_loop import Loop, ThroughALoop
from support.places import HANG_S

from fscoord import aio
from fscoord.aio import AsyncStore
from fscoord.aio._driver import CALL_THREADS_MAX, WAIT_THREADS_MAX
from fscoord.store import Store
from fscoord.testing.contract.place import Place

TASKS = 40


async def _wait(store: AsyncStore, number: int) -> bytes:
    return await store.get(f"key {number}")


async def many_wait(store: Store) -> None:
    """More tasks wait than threads; each gets what it waits for, and those that are cancelled take nothing."""
    before = threading.active_count()
    async with AsyncStore(store) as shared:
        shared.set_timeout(HANG_S)
        tasks = [asyncio.create_task(_wait(shared, number)) for number in range(TASKS)]
        pops = [asyncio.create_task(shared.queue_pop("queue")) for _ in range(3)]
        await shared.set("begun", "1")
        assert threading.active_count() <= before + CALL_THREADS_MAX + WAIT_THREADS_MAX
        for task in (*tasks[1::2], *pops):
            task.cancel()
        assert all(
            isinstance(error, asyncio.CancelledError)
            for error in await asyncio.gather(*tasks[1::2], *pops, return_exceptions=True)
        )
        for number in range(TASKS):
            await shared.set(f"key {number}", str(number))
        assert await asyncio.gather(*tasks[::2]) == [str(number).encode() for number in range(0, TASKS, 2)]
        await shared.queue_push("queue", "item")
        assert await shared.queue_pop("queue") == b"item"


async def one_at_a_time(store: Store) -> None:
    """Tasks take turns at a lock, in the order in which they came; one that is cancelled stands in no line."""
    async with AsyncStore(store) as shared:
        shared.set_timeout(HANG_S)
        first, tokens = aio.Lock(shared, "lock"), []

        async def work() -> None:
            async with aio.Lock(shared, "lock") as lock:
                tokens.append(lock.token)

        async def waiting(count: int) -> None:
            while len(await first.waiters()) != count:
                await asyncio.sleep(0)

        assert await first.acquire()
        tasks = []
        for count in range(1, 5):
            tasks.append(asyncio.create_task(work()))
            await waiting(count)
        tasks.pop(1).cancel()
        await waiting(3)
        await first.release()
        await asyncio.gather(*tasks)
        assert tokens == sorted(tokens)
        assert len(tokens) == 3
        assert not await first.holders()


def in_a_loop(work: Callable[[Store], Coroutine[Any, Any, None]], store: Store) -> None:
    """Run one of these."""
    asyncio.run(asyncio.wait_for(work(store), 3 * HANG_S))


@contextmanager
def place_in_a_loop(store: Store) -> Iterator[Place]:
    """Give what the contract asks for, on `store` as a loop's tasks use it."""
    loop = Loop()
    first = ThroughALoop(store, loop)
    first.set_timeout(HANG_S)
    place = Place(first)
    yield place
    place.close()
    loop.stop()
