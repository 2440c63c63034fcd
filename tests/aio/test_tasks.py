"""Tasks on one handle: how many threads they need, and time-outs, closing, Ctrl-C, forks and dead loops."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start
from support.internals import log_of, notifier_of
from support.places import HANG_S, Place
from support.third_party import ThirdPartyStore

from fscoord import (
    FileStore,
    HashStore,
    LockLostError,
    PrefixStore,
    StoreClosedError,
    StoreTimeoutError,
    UsedBeforeError,
    aio,
    recipes,
)
from fscoord._waiting.wait import NOT_YET, NotYet, next_look
from fscoord.aio import AsyncStore, _executor
from fscoord.aio._driver import CALL_THREADS_MAX, WAIT_THREADS_MAX
from fscoord.store import Store
from fscoord.stores.file.waits import Condition, FileWait

TASKS = 200


@pytest.fixture(params=["hash", "file", "polled file", "nested file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    make: dict[str, Callable[[], Store]] = {
        "hash": HashStore,
        "file": lambda: FileStore(tmp_path / "store"),
        "polled file": lambda: FileStore(tmp_path / "store", watch="poll"),
        "nested file": lambda: PrefixStore("job", FileStore(tmp_path / "store")),
    }
    store = make[request.param]()
    store.set_timeout(HANG_S)
    yield store
    (store.underlying_store if isinstance(store, PrefixStore) else store).close()


class Threads:
    """The most threads that there were, beside those that were there before."""

    def __init__(self) -> None:
        self._before = set(threading.enumerate())
        self.most = 0

    def count(self) -> None:
        self.most = max(self.most, len(set(threading.enumerate()) - self._before))


@pytest.fixture
def threads_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let threads without work stay until the end of the test. One that is about to end would be counted beside the
    one that has begun in its place.
    """
    monkeypatch.setattr(_executor, "IDLE_S", float(HANG_S))
    before = set(_executor._all)
    yield
    for executor in set(_executor._all) - before:
        executor.dismiss()


async def until(condition: Callable[[], Any]) -> None:
    """Give way until `condition` holds; the time limit only bounds a hang."""
    end = asyncio.get_running_loop().time() + HANG_S
    while not condition():
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.001)


def is_asleep(asynchronous: AsyncStore, count: int) -> bool:
    """Return whether so many waits sleep, as far as the store can tell."""
    listener = asynchronous._driver._notifier
    return not hasattr(listener, "_waiters") or len(listener._waiters) == count


def test_tasks_by_the_hundred_wait_on_one_handle_with_a_few_threads(store: Store, threads_stay: None) -> None:
    threads = Threads()

    async def main() -> None:
        asynchronous = AsyncStore(store)
        tasks = [asyncio.ensure_future(asynchronous.get(f"k{number}")) for number in range(TASKS)]
        await asyncio.sleep(0)
        await until(lambda: is_asleep(asynchronous, TASKS))
        threads.count()
        await asynchronous.multi_set([f"k{number}" for number in range(TASKS)], map(str, range(TASKS)))
        assert await asyncio.gather(*tasks) == [b"%d" % number for number in range(TASKS)]
        threads.count()

    asyncio.run(main())
    assert threads.most <= CALL_THREADS_MAX


def test_tasks_by_the_hundred_hold_a_lock_one_after_the_other(store: Store, threads_stay: None) -> None:
    threads = Threads()
    tokens: list[int] = []

    async def hold(asynchronous: AsyncStore) -> None:
        lock = aio.Lock(asynchronous, "l")
        async with lock:
            tokens.append(lock.token)
            threads.count()
            assert len(tokens) == lock.token

    async def main() -> None:
        asynchronous = AsyncStore(store)
        async with aio.Lock(asynchronous, "l"):
            tokens.append(1)
            tasks = [asyncio.ensure_future(hold(asynchronous)) for _ in range(TASKS // 4)]
            lock = aio.Lock(asynchronous, "l")
            while len(await lock.waiters()) < len(tasks):
                await asyncio.sleep(0.001)
        await asyncio.gather(*tasks)
        assert not await lock.holders()

    asyncio.run(main())
    assert threads.most <= CALL_THREADS_MAX
    assert tokens == list(range(1, TASKS // 4 + 2))


def test_hold_that_is_broken_goes_to_the_next_task_in_line(store: Store) -> None:
    async def main() -> None:
        asynchronous = AsyncStore(store)
        first, second = aio.Lock(asynchronous, "l"), aio.Lock(asynchronous, "l")
        await first.acquire()
        task = asyncio.ensure_future(second.acquire())
        while not await first.waiters():
            await asyncio.sleep(0.001)
        assert await aio.force_release(asynchronous, "l", first.token)
        assert await task
        assert second.token == 2
        with pytest.raises(LockLostError):
            await first.release()
        assert not await aio.force_release(asynchronous, "l", 1)
        await second.release()

    asyncio.run(main())


def test_values_are_not_asked_for_before_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another store's client each look in vain is a time-out, which may be slow, and be logged."""
    asked: list[bool] = []
    multi_get = ThirdPartyStore.multi_get

    def counted(self: ThirdPartyStore, keys: Any, **given: Any) -> list[bytes]:
        names = list(keys)
        asked.append(self.check(names))
        return multi_get(self, names, **given)

    monkeypatch.setattr(ThirdPartyStore, "multi_get", counted)
    store = ThirdPartyStore()

    async def main() -> None:
        async with AsyncStore(store) as asynchronous:
            asynchronous.set_timeout(HANG_S)
            value = asyncio.ensure_future(asynchronous.get("k"))
            await until(lambda: "wait" in store.asked)
            await asynchronous.set("k", "v")
            assert await value == b"v"

    asyncio.run(main())
    assert asked
    assert all(asked)


def test_tasks_beyond_the_threads_wait_on_a_store_that_waits_in_its_calls(threads_stay: None) -> None:
    threads = Threads()

    async def main() -> None:
        async with AsyncStore(ThirdPartyStore()) as asynchronous:
            asynchronous.set_timeout(math.inf)
            count = 2 * WAIT_THREADS_MAX
            tasks = [asyncio.ensure_future(asynchronous.get(f"k{number}")) for number in range(count)]
            await asyncio.sleep(0)
            for number in reversed(range(count)):
                await asynchronous.set(f"k{number}", str(number))
            threads.count()
            assert await asyncio.gather(*tasks) == [b"%d" % number for number in range(count)]

    asyncio.run(main())
    assert threads.most <= CALL_THREADS_MAX + WAIT_THREADS_MAX


def test_tasks_threads_and_handles_wake_each_other(tmp_path: Path) -> None:
    path = tmp_path / "store"

    async def main() -> None:
        async with aio.open_store(path, timeout=HANG_S) as asynchronous:
            waits = asyncio.ensure_future(asynchronous.get("from a thread"))
            with FileStore(path, timeout=HANG_S) as other:
                thread = asyncio.get_running_loop().run_in_executor(None, other.get, "from a task")
                same = asyncio.get_running_loop().run_in_executor(None, asynchronous.store.get, "from a task")
                await until(lambda: is_asleep(asynchronous, 1))
                await asynchronous.set("from a task", "1")
                assert await thread == await same == b"1"
                other.set("from a thread", "2")
                assert await waits == b"2"

    asyncio.run(main())


def test_deadline_is_met_and_the_error_names_the_missing_key_or_the_holder(store: Store) -> None:
    async def main() -> None:
        asynchronous = AsyncStore(store)
        await asynchronous.set("there", "1")
        with pytest.raises(StoreTimeoutError, match=r"'(job/)?missing'") as caught:
            await asynchronous.wait(["there", "missing"], 0.05)
        assert caught.value.waited >= 0.05
        async with aio.Lock(asynchronous, "l"):
            assert not await aio.Lock(asynchronous, "l").acquire(timeout=0.02)
            with pytest.raises(StoreTimeoutError, match=f"held by .*:{os.getpid()},"):
                await aio.Lock(asynchronous, "l", timeout=0.02).__aenter__()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(aio.Lock(asynchronous, "l").acquire(), 0.02)
            assert not await aio.Lock(asynchronous, "l").waiters()

    asyncio.run(main())


def test_first_look_that_comes_late_has_only_the_time_that_is_left(tmp_path: Path) -> None:
    """All threads of the handle were busy since the wait was made."""
    looks: list[float] = []

    class Recorded(Condition[None]):
        missing = (b"k",)

        def __init__(self, store: FileStore) -> None:
            self._log = log_of(store)

        def look(self, timeout: float, *, reads: bool) -> NotYet:
            looks.append(timeout)
            return NOT_YET

    with FileStore(tmp_path / "store") as store:
        wait: FileWait[None] = FileWait(notifier_of(store), Recorded(store), HANG_S)
        wait._started -= 2 * HANG_S
        wait._deadline -= 2 * HANG_S
        with pytest.raises(StoreTimeoutError):
            next_look(wait)
    assert looks == [0.0]


def test_store_that_is_closed_ends_the_waits_of_its_tasks(store: Store) -> None:
    if isinstance(store, PrefixStore):
        store = store.underlying_store

    async def main() -> None:
        async with AsyncStore(store) as asynchronous:
            tasks = [asyncio.ensure_future(asynchronous.get("k")) for _ in range(3)]
            await asyncio.sleep(0)
            await until(lambda: is_asleep(asynchronous, 3))
        for task in tasks:
            with pytest.raises(StoreClosedError):
                await task

    asyncio.run(main())


def test_handle_is_used_in_one_loop_after_the_other(store: Store) -> None:
    asynchronous = AsyncStore(store)

    async def main(key: str) -> None:
        never = asyncio.ensure_future(asynchronous.get("never"))
        task = asyncio.ensure_future(asynchronous.get(key))
        await asyncio.sleep(0)
        await until(lambda: is_asleep(asynchronous, 2))
        await asynchronous.set(key, key)
        assert await task == key.encode()
        assert not never.done()  # the loop cancels it

    for number in range(3):
        asyncio.run(main(f"k{number}"))


def test_loop_that_is_closed_under_a_wait_leaves_no_waiter_in_line(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    lock = recipes.Lock(store, "l")
    loop = asyncio.new_event_loop()
    with lock:
        task: Any = loop.create_task(aio.Lock(AsyncStore(store), "l").acquire())

        async def wait_for_it() -> None:
            await until(lock.waiters)

        loop.run_until_complete(wait_for_it())
        loop.close()
        del task
        end = time.monotonic() + HANG_S
        while lock.waiters():  # a thread may be about to forget the call that it made for the task
            assert time.monotonic() < end
            gc.collect()
    assert "Task was destroyed but it is pending" in caplog.text
    assert not lock.holders()


def test_loop_goes_on_while_another_process_holds_the_log_lock(tmp_path: Path) -> None:
    path = tmp_path / "store"

    async def main() -> None:
        async with aio.open_store(path, timeout=HANG_S) as asynchronous:
            with FileStore(path) as other:
                other.set("k", "1")
                lock = log_of(other).handle.lock
                lock.try_lock()
                try:
                    writes = [asyncio.ensure_future(asynchronous.set(f"k{number}", "2")) for number in range(9)]
                    for _ in range(100):
                        await asyncio.sleep(0)
                    assert not any(task.done() for task in writes)
                finally:
                    lock.unlock()
                await asyncio.gather(*writes)
                assert other.num_keys() == 10

    asyncio.run(main())


def test_loop_learns_of_the_death_of_a_watched_process(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_store(tmp_path / "store") as asynchronous:
            task = asyncio.ensure_future(asynchronous.get("k"))
            await asyncio.sleep(0)
            await until(lambda: is_asleep(asynchronous, 1))
            with subprocess.Popen(["sleep", "1000"]) as child:
                try:
                    watch = asynchronous._driver._notifier._watcher
                    assert watch.watch_process(child.pid)
                    assert watch.deaths == 0
                finally:
                    child.kill()
            await until(lambda: watch.deaths == 1)
            await asynchronous.set("k", "1")
            assert await task == b"1"

    asyncio.run(main())


def test_loop_stops_listening_to_a_bell_that_has_failed(tmp_path: Path) -> None:
    async def main() -> None:
        async with aio.open_store(tmp_path / "store") as asynchronous:
            task = asyncio.ensure_future(asynchronous.get("k"))
            await asyncio.sleep(0)
            await until(lambda: is_asleep(asynchronous, 1))
            watch = asynchronous._driver._notifier._watcher
            events = watch._events
            assert events.descriptors()
            watch.fall_back_to_polling(OSError("as it were"))
            os.utime(tmp_path / "store.bell")  # an event that nobody takes
            await until(lambda: not events.descriptors())
            assert not task.done()
        with pytest.raises(StoreClosedError):
            await task

    asyncio.run(main())


def test_lock_of_a_killed_process_goes_to_a_waiting_task(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    asynchronous = AsyncStore(place.open())

    async def main(workers: Workers) -> None:
        lock = aio.Lock(asynchronous, "l")
        while not await lock.holders():
            await asyncio.sleep(0.001)
        task = asyncio.ensure_future(lock.acquire())
        while not await lock.waiters():
            await asyncio.sleep(0.001)
        workers.processes[0].kill()
        workers.processes[0].wait(HANG_S)
        assert await task
        assert lock.token == 2
        await lock.release()

    with Workers(place.spec(), "hold", [["l"]]) as workers:
        start(asynchronous.store, 1)
        asyncio.run(main(workers))
    place.close()


def test_forked_child_uses_the_handle_in_its_own_loop_beside_its_parents(store: Store) -> None:
    is_shared = not isinstance(store, HashStore)

    async def in_the_child(asynchronous: AsyncStore) -> None:
        async with aio.Lock(asynchronous, "l"):
            await asynchronous.set("from the child", "1")
        assert await asynchronous.get("from the child") == b"1"

    async def main() -> None:
        asynchronous = AsyncStore(store)
        task = asyncio.ensure_future(asynchronous.get("k"))
        await asyncio.sleep(0)
        await until(lambda: is_asleep(asynchronous, 1))
        child = os.fork()
        if not child:
            try:
                asyncio.run(in_the_child(asynchronous))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == 0
        if is_shared:
            assert await asynchronous.get("from the child") == b"1"
        await asynchronous.set("k", "2")
        assert await task == b"2"

    asyncio.run(main())


INTERRUPTED = """
import asyncio, sys
from fscoord import aio

async def main():
    async with aio.open_store(sys.argv[1]) as store:
        async with aio.Lock(store, "l"):
            pass

asyncio.run(main())
"""


def test_ctrl_c_leaves_no_waiter_in_line(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    with FileStore(path) as store, recipes.Lock(store, "l") as lock:
        child = subprocess.Popen([sys.executable, "-c", INTERRUPTED, path], stderr=subprocess.PIPE)
        try:

            async def wait_for_it() -> None:
                await until(lock.waiters)

            asyncio.run(wait_for_it())
            child.send_signal(signal.SIGINT)
            _, words = child.communicate(timeout=3 * HANG_S)
        finally:
            child.kill()
            child.wait()
        assert b"KeyboardInterrupt" in words
        assert not lock.waiters()


def test_wait_that_is_cancelled_in_its_sleep_can_be_begun_again(store: Store) -> None:
    async def main() -> None:
        asynchronous = AsyncStore(store)
        for _ in range(3):
            task = asyncio.ensure_future(asynchronous.queue_pop("q"))
            await asyncio.sleep(0)
            await until(lambda: is_asleep(asynchronous, 1))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await asynchronous.queue_push("q", "1")
        assert await asynchronous.queue_pop("q") == b"1"

    asyncio.run(main())


def test_item_check_raises_when_the_item_has_gone_to_another() -> None:
    async def work() -> None:
        async with AsyncStore(HashStore()) as store:
            queue = aio.Queue(store, "q")
            await queue.put("a")
            item = await queue.take()
            await item.check()
            await store.set((await store.list_keys("q/claim/"))[0], "7 host:1 of-another")
            with pytest.raises(LockLostError):
                await item.check()

    asyncio.run(work())


def test_batch_of_items_and_their_results_pass_between_tasks() -> None:
    async def work() -> None:
        async with AsyncStore(HashStore()) as store:
            queue = aio.Queue(store, "q")
            ids = await queue.put_all(["a", "b", "c"], wants_result=True)
            waiter = asyncio.ensure_future(queue.result(ids[0], timeout=HANG_S))
            first, *others = await queue.take_all(3)
            assert [item.data for item in [first, *others]] == [b"a", b"b", b"c"]
            await first.ack("done")
            await queue.ack_all(others)
            assert (await waiter, await queue.result(ids[2])) == (b"done", b"")
            await queue.join(timeout=0)

    asyncio.run(work())


@pytest.mark.parametrize(
    "call",
    [
        lambda store, *timeout: aio.barrier(store, 9, "b", *timeout),
        lambda store, *timeout: aio.barrier(store, 2, "b", *(timeout or [None]), 0),
        lambda store, *timeout: aio.synchronize(store, b"1", 0, 2, "s", *timeout),
        lambda store, *timeout: aio.broadcast(store, None, 1, 2, "c", *timeout),
        lambda store, *timeout: aio.gather(store, b"1", 0, 2, "g", *timeout),
        lambda store, *timeout: aio.tree_barrier(store, store, 0, 2, 2, "t", *timeout),
    ],
    ids=["unranked barrier", "barrier", "synchronize", "broadcast", "gather", "tree barrier"],
)
def test_timeout_of_the_store_holds_for_a_task_that_gives_none(store: Store, call: Callable[..., Any]) -> None:
    async def run() -> None:
        handle = AsyncStore(store)
        handle.set_timeout(0.03)
        for arguments in ([], [None]):
            with pytest.raises(StoreTimeoutError, match=r"timeout=0\.03\)"):
                await asyncio.wait_for(call(handle, *arguments), HANG_S)
        with pytest.raises(StoreTimeoutError, match=r"timeout=0\.01\)"):
            await call(handle, 0.01)

    asyncio.run(run())


def test_tasks_of_three_groups_meet_in_a_tree(store: Store) -> None:
    begun: set[int] = set()

    async def come(rank: int, handle: AsyncStore, root: AsyncStore) -> int:
        begun.add(rank)
        await aio.tree_barrier(handle, root, rank, 5, 2, "t", HANG_S)
        return len(begun)

    async def run() -> None:
        handle, root = AsyncStore(store), AsyncStore(store.clone())
        assert await asyncio.gather(*(come(rank, handle, root) for rank in range(5))) == [5] * 5
        with pytest.raises(UsedBeforeError):
            await aio.tree_barrier(handle, root, 1, 5, 2, "t", HANG_S)
        with pytest.raises(StoreTimeoutError) as caught:
            await aio.tree_barrier(handle, root, 3, 5, 2, "late", 0, trace_timeout=0)
        assert caught.value.missing_ranks == ("2", "0 to 1, or some of them", "4")

    asyncio.run(run())


def test_watches_of_quiet_tasks_outlast_the_stores_timeout(store: Store) -> None:
    """Of a group as of an election; and with a timeout they end."""

    async def run() -> None:
        handle, other = AsyncStore(store), AsyncStore(store.clone())
        handle.set_timeout(1)
        watches = [aio.Membership(handle, "m").watch(), aio.Election(handle, "e").watch()]
        tasks = [asyncio.ensure_future(anext(each)) for each in watches]
        done, _ = await asyncio.wait(tasks, timeout=1.5)
        assert not done
        await aio.Membership(other, "m", "here").join()
        await aio.Election(other, "e", "there").campaign()
        group, leader = await asyncio.wait_for(asyncio.gather(*tasks), HANG_S)
        assert ([each.data for each in group], leader.data) == ([b"here"], b"there")
        handle.set_timeout(0.05)
        for timeout in (0.05, None):
            for quiet in (aio.Membership(handle, "m2").watch(timeout), aio.Election(handle, "e2").watch(timeout)):
                with pytest.raises(StoreTimeoutError, match=r"within 0\.05 s"):
                    await anext(quiet)
        await other.close()

    asyncio.run(run())
