"""A task that is cancelled at any await holds nothing, is in no line, and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from aio.tasks import at_each_await, outcome, seen
from support.internals import system

from fscoord import BrokenBarrierError, HashStore, aio
from fscoord.aio import AsyncStore
from fscoord.recipes import Lock, Partitioner, Queue
from fscoord.store import Store

Make = Callable[[Store], AsyncStore]

KINDS: dict[str, Callable[[AsyncStore], Any]] = {
    "Lock": lambda store: aio.Lock(store, "l"),
    "Lock with ttl": lambda store: aio.Lock(store, "l", ttl=100),
    "RLock": lambda store: aio.RLock(store, "l"),
    "Semaphore": lambda store: aio.Semaphore(store, "l"),
    "reader": lambda store: aio.ReadWriteLock(store, "l").reader,
    "writer": lambda store: aio.ReadWriteLock(store, "l").writer,
    "Election": lambda store: aio.Election(store, "l"),
}
OTHERS = {"reader": "writer"}
"""Who is in the way of whom; otherwise each is in the way of its like."""

persistence = pytest.mark.parametrize("persists", [False, True], ids=["once", "again and again"])


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def nobody_is_in_line(store: Store, hold: Any) -> bool:
    keys = [key for key in store.list_keys() if "/wake/" in key]
    return not keys and not hold._core.holders() and not hold._core.waiters() and not hold._core._held


@persistence
def test_hold_whose_acquisition_is_cancelled_is_free(kind: str, persists: bool, every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            hold = KINDS[kind](every_call_is_an_await(store))

            async def take() -> None:
                assert await cancelled(hold.acquire(), persists=persists)
                await hold.release()

            await outcome(take())
            assert nobody_is_in_line(store, hold)

    assert asyncio.run(at_each_await(act)) >= 1


@persistence
@pytest.mark.parametrize("way", ["acquire", "async with"])
def test_waiter_in_line_that_is_cancelled_leaves_the_line(
    kind: str, way: str, persists: bool, every_call_is_an_await: Make
) -> None:
    """This holds also if the hold comes at the same time: its holder releases it while the task waits."""
    inside = 0

    async def act(cancelled: Any) -> None:
        nonlocal inside
        with HashStore() as store:
            asynchronous = every_call_is_an_await(store)
            first, hold = KINDS[OTHERS.get(kind, kind)](asynchronous), KINDS[kind](asynchronous)
            assert await first.acquire()

            async def take() -> None:
                nonlocal inside
                if way == "acquire":
                    assert await hold.acquire()
                    await hold.release()
                else:
                    async with hold:
                        inside += 1

            task = asyncio.ensure_future(outcome(cancelled(take(), persists=persists)))
            await seen(first._core.waiters, task.done)
            await first.release()
            await task
            assert nobody_is_in_line(store, hold)
            assert await hold.acquire(blocking=False)
            await hold.release()

    assert asyncio.run(at_each_await(act)) > 3
    assert inside or way == "acquire"


@persistence
def test_release_that_is_cancelled_is_done(kind: str, persists: bool, every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            hold = KINDS[kind](every_call_is_an_await(store))

            async def give_back() -> None:
                assert await hold.acquire()
                await cancelled(hold.release(), persists=persists)

            await outcome(give_back())
            assert nobody_is_in_line(store, hold)

    assert asyncio.run(at_each_await(act)) >= 1


def test_body_of_a_with_that_is_cancelled_releases_the_hold(kind: str, every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            hold = KINDS[kind](every_call_is_an_await(store))

            async def body() -> None:
                async with hold:
                    await asyncio.sleep(0)

            await outcome(cancelled(body()))
            assert nobody_is_in_line(store, hold)

    assert asyncio.run(at_each_await(act)) >= 3


@persistence
def test_batch_of_items_taken_by_a_cancelled_task_comes_back(persists: bool, every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            queue, plain = aio.Queue(every_call_is_an_await(store), "q"), Queue(store, "q")
            plain.put_all("abc")
            found = await outcome(cancelled(queue.take_all(3), persists=persists))
            taken = [] if found is asyncio.CancelledError else [item.data for item in found]
            assert len(plain.taken()) == len(taken)
            assert taken or [item.data for item in plain.take_all(3, block=False)] == [b"a", b"b", b"c"]

    assert asyncio.run(at_each_await(act)) >= 1


@persistence
@pytest.mark.parametrize("block", [False, True], ids=["there", "to come"])
def test_queue_item_taken_by_a_cancelled_task_comes_back(
    block: bool, persists: bool, every_call_is_an_await: Make
) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            queue, plain = aio.Queue(every_call_is_an_await(store), "q"), Queue(store, "q")
            if not block:
                plain.put("item")
            task = asyncio.ensure_future(outcome(cancelled(queue.take(), persists=persists)))
            if block:
                await seen(lambda: store._shared.readers, task.done)
                plain.put("item")
            item = await task
            if item is asyncio.CancelledError:
                assert plain.take(block=False).data == b"item"
            else:
                assert item.data == b"item"

    assert asyncio.run(at_each_await(act)) >= 1


@persistence
@pytest.mark.parametrize("block", [False, True], ids=["there", "to come"])
def test_queue_value_popped_by_a_cancelled_task_comes_back(
    block: bool, persists: bool, every_call_is_an_await: Make
) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            asynchronous = every_call_is_an_await(store)
            if not block:
                store.queue_push("q", "value")
            task = asyncio.ensure_future(outcome(cancelled(asynchronous.queue_pop("q", block), persists=persists)))
            if block:
                await seen(lambda: store._shared.poppers, task.done)
                store.queue_push("q", "value")
            value = await task
            assert value in (b"value", asyncio.CancelledError)
            assert store.queue_len("q") == (value is asyncio.CancelledError)

    assert asyncio.run(at_each_await(act)) >= 1


def test_item_whose_end_is_cancelled_is_done_or_given_back(every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            queue = aio.Queue(every_call_is_an_await(store), "q")
            Queue(store, "q").put("item")
            item = await queue.take()
            is_begun = []

            async def work() -> None:
                async with item:
                    await asyncio.sleep(0)
                    is_begun.append(True)

            await outcome(cancelled(work()))
            assert not Queue(store, "q").taken()
            assert len(Queue(store, "q")) == (not is_begun)

    assert asyncio.run(at_each_await(act)) >= 2


@persistence
def test_member_that_is_cancelled_while_it_joins_does_not_take_part(
    persists: bool, every_call_is_an_await: Make
) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            group = aio.Membership(every_call_is_an_await(store), "g")
            joined = await outcome(cancelled(group.join(), persists=persists))
            assert len(group._core.members()) == (joined is not asyncio.CancelledError)

    assert asyncio.run(at_each_await(act)) >= 1


@persistence
def test_wait_for_a_condition_that_is_cancelled_leaves_the_lock_free(
    persists: bool, every_call_is_an_await: Make
) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            condition = aio.Condition(every_call_is_an_await(store), "c")

            async def work() -> None:
                async with condition, condition:
                    await condition.wait(0)

            await outcome(cancelled(work(), persists=persists))
            assert nobody_is_in_line(store, aio.Hold(condition._driver, condition._core._lock))
            assert not condition._core._line.entries()

    assert asyncio.run(at_each_await(act)) >= 5


@persistence
def test_task_that_is_cancelled_at_a_cyclic_barrier_breaks_it(persists: bool, every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            barrier = aio.CyclicBarrier(every_call_is_an_await(store), "b", 2)
            with suppress(BrokenBarrierError):
                await outcome(cancelled(barrier.wait(0), persists=persists))
            assert await barrier.n_waiting() == 0
            await barrier.reset()
            assert not barrier._core._line.entries()

    assert asyncio.run(at_each_await(act)) >= 2


@persistence
def test_wait_for_a_token_that_is_cancelled_leaves_the_line(
    persists: bool, every_call_is_an_await: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock stands still, so the second token comes by the wait alone, however slow the machine is."""
    monkeypatch.setattr(system, "wall_time_ns", lambda: 10**18)

    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            limiter = aio.RateLimiter(every_call_is_an_await(store), "r", 20)
            await limiter.acquire()
            await outcome(cancelled(limiter.acquire(), persists=persists))
            assert nobody_is_in_line(store, aio.Hold(limiter._driver, limiter._core._turn))

    assert asyncio.run(at_each_await(act)) >= 2


@persistence
def test_once_that_is_cancelled_leaves_the_work_to_the_next(persists: bool, every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            asynchronous = every_call_is_an_await(store)

            async def work() -> bytes:
                await asyncio.sleep(0)
                return b"done"

            await outcome(cancelled(aio.once(asynchronous, "w", work), persists=persists))
            assert not Lock(store, "w").holders()
            assert await aio.once(asynchronous, "w", work) == b"done"

    assert asyncio.run(at_each_await(act)) > 3


def test_waits_that_are_cancelled_leave_no_readers_behind(every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            asynchronous = every_call_is_an_await(store)
            task = asyncio.ensure_future(outcome(cancelled(asynchronous.multi_get(["a", "b"]))))
            await seen(lambda: store._shared.readers, task.done)
            store.multi_set(["a", "b"], ["1", "2"])
            assert await task in ([b"1", b"2"], asyncio.CancelledError)
            assert not store._shared.readers

    assert asyncio.run(at_each_await(act)) > 1


def test_cancellation_is_raised_although_the_call_failed(every_call_is_an_await: Make) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            store.set("k", "text")
            work = cancelled(every_call_is_an_await(store).add("k", 1))
            try:
                found = await outcome(work)
            except ValueError:
                found = ValueError
            assert found is (asyncio.CancelledError if work.reached else ValueError)

    assert asyncio.run(at_each_await(act)) == 1


@pytest.mark.parametrize("named", [False, True])
def test_values_that_another_task_changes_during_the_call_are_written_as_given(
    named: bool, every_call_is_an_await: Make
) -> None:
    async def run() -> None:
        store = every_call_is_an_await(HashStore())
        values = ["a"]
        call = store.multi_set(keys=iter(["k"]), values=values) if named else store.multi_set(iter(["k"]), values)
        writing = asyncio.ensure_future(call)
        await asyncio.sleep(0)  # until the call is one of another thread
        values.append("b")
        await writing
        assert await store.get("k") == b"a"
        store.store.close()

    asyncio.run(run())


@persistence
def test_member_that_is_cancelled_while_it_joins_holds_no_partition(
    persists: bool, every_call_is_an_await: Make
) -> None:
    async def act(cancelled: Any) -> None:
        with HashStore() as store:
            group = aio.Partitioner(every_call_is_an_await(store), "p", 2)
            joined = await outcome(cancelled(group.join(), persists=persists))
            assert bool(group.partitions) == (joined is not asyncio.CancelledError)
            with Partitioner(store, "p", 2) as other:
                assert bool(other.partitions) == (joined is asyncio.CancelledError)

    assert asyncio.run(at_each_await(act)) >= 1
