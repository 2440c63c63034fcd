"""Work that is done once, latches and elections, on every kind of store."""

from __future__ import annotations

import asyncio
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start
from support.internals import line_of, look_module
from support.places import ETCD, HANG_S, Place, start_thread, until
from support.recipes import RECIPES, RESULTS
from support.third_party import place_of

from fscoord import aio, recipes
from fscoord._runtime import system
from fscoord.errors import BarrierError, BrokenBarrierError, LockLostError, StoreTimeoutError, WorkFailedError
from fscoord.recipes import DoubleBarrier, Election, Latch, Lock, Partitioner, RankZeroFirst, latch, once
from fscoord.store import Store
from fscoord.stores.file import FileStore
from fscoord.stores.memory import HashStore
from fscoord.stores.prefix import PrefixStore


@pytest.fixture(params=["hash", "nested-hash", "third-party", "file-ofd", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = place_of(request.param, str(tmp_path))
    yield place
    place.close()


class Failed(Exception):
    """What the work raises."""


# once


def test_registry_has_each_recipe() -> None:
    classes = {name for name in recipes.__all__ if isinstance(getattr(recipes, name), type)}
    assert set(RECIPES) == classes - RESULTS


def test_once_runs_the_work_in_one_caller_and_all_get_its_value(place: Place, store: Store) -> None:
    done: list[int] = []

    def run(rank: int) -> bytes:
        return once(place.open(how="clone"), "w", lambda: done.append(rank) or f"by {rank}")

    results = [thread.join() for thread in [start_thread(run, rank) for rank in range(5)]]
    assert len(done) == 1
    assert results == [f"by {done[0]}".encode()] * 5
    assert once(store, "w", lambda: pytest.fail("it is done")) == results[0]


def test_caller_that_waited_for_the_work_does_not_do_it_again(place: Place, store: Store) -> None:
    def work() -> bytes:
        threads.append(start_thread(once, place.open(how="clone"), "w", lambda: pytest.fail("it is done")))
        until(Lock(place.open(how="clone"), "w").waiters)
        return b"done"

    threads: list[Any] = []
    assert once(store, "w", work) == threads[0].join() == b"done"


def test_empty_value_is_a_value(store: Store) -> None:
    assert once(store, "w", lambda: b"") == b""
    assert once(store, "w", lambda: b"other") == b""


def test_exception_of_the_work_is_raised_here_and_reported_to_the_others(store: Store) -> None:
    def fail() -> bytes:
        raise Failed("no space")

    with pytest.raises(Failed):
        once(store, "w", fail)
    with pytest.raises(
        WorkFailedError, match=rf"'w' failed: .*:{os.getpid()} raised Failed: no space; delete the key 'w/r"
    ):
        once(store, "w", fail)
    store.delete_key("w/result")
    assert once(store, "w", lambda: "now") == b"now"


def test_work_that_is_interrupted_is_done_by_the_next_caller(place: Place, store: Store) -> None:
    def interrupted() -> bytes:
        thread.append(start_thread(once, place.open(how="clone"), "w", lambda: "by the next"))
        until(Lock(place.open(how="clone"), "w").waiters)
        raise KeyboardInterrupt

    thread: list[Any] = []
    with pytest.raises(KeyboardInterrupt):
        once(store, "w", interrupted)
    assert thread[0].join() == b"by the next"


def test_worker_that_was_taken_for_dead_gets_the_value_of_the_other(place: Place, store: Store) -> None:
    def slow() -> bytes:
        lock = Lock(place.open(how="clone"), "w")
        line_of(lock).leave(line_of(lock).entries()[0].id)
        assert once(place.open(how="clone"), "w", lambda: "first") == b"first"
        return b"second"

    assert once(store, "w", slow) == b"first"


def test_timeout_names_the_process_that_does_the_work(place: Place, store: Store) -> None:
    def slow() -> bytes:
        with pytest.raises(StoreTimeoutError, match=rf"'w' not acquired within .*; held by .*:{os.getpid()},"):
            once(place.open(how="clone"), "w", lambda: b"", timeout=0.01)
        return b"slow"

    assert once(store, "w", slow) == b"slow"


def test_once_decorates_a_function(store: Store) -> None:
    calls: list[int] = []

    @once(store, "w", timeout=1)
    def work() -> str:
        """Say something."""
        calls.append(1)
        return "value"

    assert work() == work() == b"value"
    assert calls == [1]
    assert work.__doc__ == "Say something."


@pytest.mark.parametrize("fact", [("hostname", "elsewhere"), ("boot_id", b"\1" * 16)], ids=["name", "boot"])
def test_once_for_each_host_runs_the_work_on_each_host(
    store: Store, monkeypatch: pytest.MonkeyPatch, fact: tuple[str, Any]
) -> None:
    assert once(store, "w", lambda: "here", scope="host") == b"here"
    assert once(store, "w", lambda: pytest.fail("this host has the result"), scope="host") == b"here"
    monkeypatch.setattr(system, fact[0], lambda: fact[1])
    assert once(store, "w", lambda: "there", scope="host") == b"there"
    assert once(store, "w", lambda: "for all") == b"for all"
    assert all(key.startswith("w/") for key in store.list_keys())
    monkeypatch.undo()
    decorated = once(store, "w", scope="host")(lambda: pytest.fail("this host has the result"))
    assert decorated() == b"here"
    assert asyncio.run(once_in_a_task(store)) == b"here"


async def once_in_a_task(store: Store) -> bytes:
    async def work() -> bytes:
        return pytest.fail("this host has the result")

    return await aio.once(aio.AsyncStore(store), "w", work, scope="host")


def test_once_refuses_a_scope_that_does_not_exist(store: Store) -> None:
    with pytest.raises(ValueError, match="scope must be one of 'store', 'host', not 'node'"):
        once(store, "w", lambda: b"", scope="node")  # type: ignore[call-overload]


def test_exception_of_the_work_is_reported_to_the_same_host_only(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bytes:
        raise Failed("no space")

    with pytest.raises(Failed):
        once(store, "w", fail, scope="host")
    with pytest.raises(WorkFailedError, match="no space; delete the key 'w/host/") as caught:
        once(store, "w", fail, scope="host")
    monkeypatch.setattr(system, "hostname", lambda: "elsewhere")
    assert once(store, "w", lambda: "now", scope="host") == b"now"
    (key,) = re.findall("delete the key '(.*?)'", str(caught.value))
    assert store.delete_key(key)


def test_work_of_a_killed_process_is_done_by_another(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "work_for_ever", [["w"]]) as workers:
        start(store, 1)
        store.wait(["working"])
        thread = start_thread(once, place.open(how="clone"), "w", lambda: "done")
        until(Lock(store, "w").waiters)
        workers.processes[0].kill()
        workers.processes[0].wait(HANG_S)
        assert thread.join() == b"done"
    place.close()


# Rank 0 first


def test_ranks_run_the_block_after_rank_0(place: Place, store: Store) -> None:
    def run(rank: int) -> str:
        with RankZeroFirst(place.open(how="clone"), "b", rank, HANG_S):
            seen.append(rank)
        return "gone on"

    seen: list[int] = []
    with RankZeroFirst(store, "b", 0):
        threads = [start_thread(run, rank) for rank in (1, 2)]
        with pytest.raises(StoreTimeoutError, match="rank 0 did not finish the block 'b' within"):
            RankZeroFirst(place.open(how="clone"), "b", 3, 0.01).__enter__()
        assert seen == []
        seen.append(0)
    assert [thread.join() for thread in threads] == ["gone on"] * 2
    assert (seen[0], sorted(seen)) == (0, [0, 1, 2])


@pytest.mark.parametrize("error", [Failed("no space"), KeyboardInterrupt("no space")], ids=["error", "ctrl-c"])
def test_block_that_fails_on_rank_0_does_not_begin_on_the_others(
    place: Place, store: Store, error: BaseException
) -> None:
    waiter = start_thread(RankZeroFirst(place.open(how="clone"), "b", 1, HANG_S).__enter__)
    with pytest.raises(type(error)), RankZeroFirst(store, "b", 0):
        raise error
    with pytest.raises(WorkFailedError, match=rf"'b' failed: rank 0, .*:{os.getpid()} raised {type(error).__name__}"):
        waiter.join()
    with RankZeroFirst(store, "b", 0):  # rank 0 has been started again
        pass
    with RankZeroFirst(store, "b", 1, 0):
        pass


def test_block_whose_rank_0_died_is_an_error_that_names_its_process(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "block_for_ever", [["b"]]) as workers:
        start(store, 1)
        store.wait(["working"])
        waiter = start_thread(RankZeroFirst(store, "b", 1, HANG_S).__enter__)
        pid = workers.processes[0].pid
        workers.processes[0].kill()
        workers.processes[0].wait(HANG_S)
        with pytest.raises(WorkFailedError, match=rf"rank 0 ended before .* 'b'; dead: rank 0 \(.*:{pid}, found dead"):
            waiter.join()
    with RankZeroFirst(place.open(how="clone"), "b", 0):
        pass
    with RankZeroFirst(store, "b", 1, 0):
        pass
    place.close()


def test_task_of_rank_0_that_is_cancelled_in_the_block_has_failed() -> None:
    async def run() -> None:
        async with aio.RankZeroFirst(tasks, "b", 0):
            entered.set()
            await asyncio.Event().wait()

    async def act() -> None:
        first = asyncio.create_task(run())
        await entered.wait()
        second = asyncio.create_task(aio.RankZeroFirst(tasks, "b", 1, HANG_S).__aenter__())
        first.cancel()
        with pytest.raises(WorkFailedError, match=r"rank 0, .* raised CancelledError"):
            await second
        with pytest.raises(asyncio.CancelledError):
            await first

    entered = asyncio.Event()
    with HashStore() as store:
        tasks = aio.AsyncStore(store)
        asyncio.run(act())


def test_rank_below_0_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="rank must be at least 0, not -1"):
        RankZeroFirst(store, "b", -1)


# Latches


def test_latch_opens_with_the_last_call_and_stays_open(place: Place, store: Store) -> None:
    door = Latch(store, "l", 3)
    assert door.missing() == 3
    threads = [start_thread(Latch(place.open(how="clone"), "l", 3).wait) for _ in range(3)]
    assert [Latch(place.open(how="clone"), "l", 3).count_down() for _ in range(2)] == [2, 1]
    with pytest.raises(StoreTimeoutError, match=r"'l' did not open within 0\.01 s: 1 of 3"):
        door.wait(0.01)
    assert door.count_down() == 0
    for thread in threads:
        thread.join()
    door.wait(0)
    assert door.count_down() == door.missing() == 0


def test_latch_opens_though_the_last_caller_died_before_opening_it(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latch, "LOOK_S", 0.01)

    class DyingError(Exception):
        pass

    class Dying(PrefixStore):
        def set(self, key: Any, value: Any) -> None:
            raise DyingError

    waiter = start_thread(Latch(PrefixStore("x", place.open(how="clone")), "l", 1).wait)
    with pytest.raises(DyingError):
        Latch(Dying("x", store), "l", 1).count_down()
    waiter.join()
    Latch(PrefixStore("x", store), "l", 1).wait(0)


def test_latch_waits_for_the_timeout_of_the_store_unless_one_is_given(store: Store) -> None:
    store.set_timeout(0.01)
    with pytest.raises(StoreTimeoutError, match=r"0\.01 s"):
        Latch(store, "l", 1).wait()
    for count in (0, "1"):
        with pytest.raises((ValueError, TypeError)):
            Latch(store, "l", count)


# Double barriers


def test_double_barrier_begins_when_all_have_come_and_ends_when_all_have_ended(place: Place, store: Store) -> None:
    seen: list[str] = []

    def run(rank: int) -> None:
        with DoubleBarrier(place.open(how="clone"), "d", 3, rank, HANG_S):
            seen.append("begun")
        seen.append("gone")

    threads = [start_thread(run, rank) for rank in (0, 1)]
    until(lambda: store.check(["d/enter/arrivals"]))
    assert seen == []
    last = DoubleBarrier(store, "d", 3, 2, HANG_S)
    last.enter()
    until(lambda: seen == ["begun"] * 2)
    last.leave()
    for thread in threads:
        thread.join()
    assert seen == ["begun"] * 2 + ["gone"] * 2


def test_double_barrier_has_a_deadline_at_both_ends_and_names_the_missing(place: Place, store: Store) -> None:
    first, second = DoubleBarrier(store, "d", 2, 0, 0.01), DoubleBarrier(place.open(how="clone"), "d", 2, 1, HANG_S)
    with pytest.raises(StoreTimeoutError, match=r"missing_ranks=\[1\], timeout=0.01") as caught:
        first.enter()
    assert caught.value.missing_ranks == ("1",)
    second.enter()
    first.enter()
    with pytest.raises(StoreTimeoutError, match=r"d/leave .*missing_ranks=\[0\], timeout=0\)"):
        second.leave(0)
    first.leave()
    second.leave()
    with pytest.raises(BarrierError, match="used before"):
        first.enter()


def test_double_barrier_whose_body_raises_does_not_wait_for_the_others(place: Place, store: Store) -> None:
    with pytest.raises(Failed), DoubleBarrier(store, "d", 1, 0):
        raise Failed
    assert not store.check(["d/leave/arrivals"])


def test_double_barrier_ends_when_a_rank_dies(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        with FileStore(tmp_path / "store", rank=1) as other, start_thread(DoubleBarrier(store, "d", 2, 0).enter):
            DoubleBarrier(other, "d", 2, 1, HANG_S).enter()
        with pytest.raises(BrokenBarrierError):
            DoubleBarrier(store, "d", 2, 0, fail_fast=True).leave()


# Elections


def test_candidate_that_is_first_leads_until_it_resigns_and_then_the_next(place: Place, store: Store) -> None:
    first, second = Election(store, "e", "address 1"), Election(place.open(how="clone"), "e", b"address 2")
    assert first.leader() is None
    assert first.campaign(0)
    assert not second.campaign(0)
    with start_thread(second.campaign):
        until(first.waiters)
        leader = second.leader()
        assert leader == (1, first.holders()[0].owner, b"address 1")
        assert first.term == leader.term
        first.resign()
    assert first.leader() == (2, leader.owner, b"address 2")
    with pytest.raises(RuntimeError, match="the leadership of 'e' is not held"):
        first.resign()
    second.resign()
    assert first.leader() is None
    assert store.list_keys("e/") == ["e/line", "e/term/2"]


def test_observers_see_each_new_leader(place: Place, store: Store) -> None:
    look = Election(place.open(how="clone"), "e")
    for term in range(1, 5):
        with start_thread(look.observe, term - 1) as observer, Election(store, "e", str(term)):
            leader = observer.join()
            assert (leader.term, leader.data) == (term, str(term).encode())
            assert look.observe(0, 0) == leader
            with pytest.raises(
                StoreTimeoutError,
                match=f"'e' has no leader in a later term than {term}, and none was elected within 0.01 s",
            ):
                look.observe(term, 0.01)
    with pytest.raises(StoreTimeoutError, match=r"^timeout: 'e' has no leader(;|$)"):
        look.observe(timeout=0)


def test_observer_waits_for_the_next_term_whichever_it_knows(place: Place, store: Store) -> None:
    for _ in range(3):
        with Election(store, "e"):
            pass
    waits: list[Any] = []

    class Seen(PrefixStore):
        def wait(self, keys: Any, timeout: Any = None) -> None:
            waits.append(keys)
            holder.append(Election(store, "x/e"))
            assert holder[0].campaign(0)
            super().wait(keys, timeout)

    holder: list[Election] = []
    for _ in range(2):
        with Election(store, "x/e"):
            pass
    assert Election(Seen("x", store), "e").observe().term == 3
    assert waits == [[b"e/term/3"]]


def test_leader_that_died_before_its_announcement_is_passed_over(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_module, "LOOK_S", 0.01)
    silent = Lock(store, "e")
    assert silent.acquire()
    look = Election(place.open(how="clone"), "e")
    with start_thread(look.observe) as observer, start_thread(Election(place.open(how="clone"), "e").campaign):
        until(silent.waiters)
        assert look.leader() is None
        silent.release()
        assert observer.join().term == 2


def test_leader_that_cannot_announce_itself_does_not_lead(store: Store) -> None:
    class Mute(PrefixStore):
        def set(self, key: Any, value: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Election(Mute("x", store), "e").campaign()
    assert Election(PrefixStore("x", store), "e").campaign(0)


def test_leader_learns_that_another_leads(store: Store) -> None:
    first = Election(store, "e")
    assert first.campaign()
    line_of(first).leave(line_of(first).entries()[0].id)
    with Election(store, "e") as second:
        assert second.leader().term == 2
        with pytest.raises(LockLostError):
            first.check()
        with pytest.raises(LockLostError):
            first.resign()


# How recipes look


def test_recipe_shows_its_store_its_name_and_its_state_without_a_request(tmp_path: Path) -> None:
    place = str(tmp_path / "s")
    store = FileStore(place)
    where = f"{FileStore.__name__}({place!r})"
    lock, reentrant, both = recipes.Lock(store, "l"), recipes.RLock(store, "r"), recipes.ReadWriteLock(store, "b")
    semaphore, election = recipes.Semaphore(store, "s", 3), recipes.Election(store, "e")
    queue, group = recipes.Queue(store, "q"), recipes.Membership(store, "g")
    assert repr(lock) == f"<Lock 'l' of {where}, not held>"
    assert repr(both) == f"<ReadWriteLock 'b' of {where}, not held>"
    assert repr(group) == f"<Membership 'g' of {where}, not joined>"
    queue.put(b"v")
    item = queue.take()
    assert repr(item) == f"<Item 'q' of {where}, taken>"
    item.ack()
    group.join()
    with lock, reentrant, both.reader, semaphore, semaphore, election:
        shown = [repr(each) for each in (lock, reentrant, both, both.reader, both.writer, semaphore, election, group)]
        with both.reader:
            several = repr(both.reader)
    assert repr(recipes.Fenced(PrefixStore("p", store), "f")) == f"<Fenced 'f' of PrefixStore('p', {where})>"
    store.close()
    assert [line.removeprefix("<").replace(f" of {where}", "").removesuffix(">") for line in shown] == [
        "Lock 'l', held with token 1",
        "RLock 'r', held with token 1",
        "ReadWriteLock 'b', held for reading",
        "Side 'b', held with token 1",
        "Side 'b', not held",
        "Semaphore 's', held with tokens 1, 2",
        "Election 'e', held with token 1",
        "Membership 'g', joined",
    ]
    assert several == f"<Side 'b' of {where}, held with token 1>", "it is re-entrant"
    assert repr(lock) == f"<Lock 'l' of <closed {where}>, not held>"
    assert repr(item) == f"<Item 'q' of <closed {where}>, finished>"
    assert repr(queue) == f"<Queue 'q' of <closed {where}>>"
    assert repr(recipes.Latch(store, "h", 2)) == f"<Latch 'h' of <closed {where}>, opens after 2 calls>"
    assert repr(recipes.DoubleBarrier(store, "d", 2, 1)) == f"<DoubleBarrier 'd' of <closed {where}>, rank 1 of 2>"


def test_recipe_for_tasks_shows_what_the_blocking_recipe_shows() -> None:
    with HashStore() as store:
        tasks = aio.AsyncStore(store)
        assert repr(tasks) == f"AsyncStore({store!r})"
        for kind in ("Lock", "RLock", "ReadWriteLock", "Semaphore", "Election", "Queue", "Membership", "Fenced"):
            shown = repr(getattr(recipes, kind)(store, "x"))
            assert repr(getattr(aio, kind)(tasks, "x")) == f"<aio.{shown[1:]}"
        assert repr(aio.Latch(tasks, "x", 2)) == f"<aio.Latch 'x' of {store!r}, opens after 2 calls>"
        assert repr(aio.DoubleBarrier(tasks, "x", 2, 1)) == f"<aio.DoubleBarrier 'x' of {store!r}, rank 1 of 2>"


# Partitions


def held_once(*groups: Partitioner) -> list[int]:
    """Return how many partitions each of `groups` holds, after a check that no partition is held twice."""
    held = [number for group in groups for number in group.partitions]
    assert len(held) == len(set(held)), held
    return [len(group.partitions) for group in groups]


def test_partitions_are_shared_out_evenly_and_move_when_given_up(store: Store) -> None:
    first, second, third = (Partitioner(store, "p", 7) for _ in range(3))
    first.join()
    assert held_once(first) == [7]
    second.join()
    assert held_once(first, second) == [7, 0]
    before = first.partitions
    assert first.rebalance()
    assert first.partitions.items() <= before.items(), "what it keeps, it keeps with its token"
    assert second.rebalance()
    assert held_once(first, second) == [4, 3]
    assert min(second.partitions.values()) > max(before.values())
    assert not first.rebalance()
    assert not second.rebalance()
    third.join()
    first.rebalance()
    second.rebalance()
    third.rebalance()
    assert held_once(first, second, third) == [3, 2, 2]
    assert first.leave()
    assert first.partitions == {}
    for group in (second, third):
        group.rebalance()
    assert held_once(first, second, third) == [0, 4, 3]
    assert not first.leave()
    with pytest.raises(RuntimeError, match="has not joined"):
        first.rebalance()
    with pytest.raises(RuntimeError, match="already joined"):
        second.join()


def test_partitions_of_members_that_come_and_go_at_random_are_never_held_twice(
    store: Store, rng: random.Random
) -> None:
    groups = [Partitioner(store, "p", 5) for _ in range(4)]
    highest = 0
    for _ in range(100):
        group = rng.choice(groups)
        if not group.partitions and repr(group).endswith("not joined>"):
            group.join()
        elif rng.random() < 0.3:
            group.leave()
        else:
            group.rebalance()
        held_once(*groups)
        highest = max([highest, *(token for each in groups for token in each.partitions.values())])
    present = [group for group in groups if not repr(group).endswith("not joined>")]
    for group in present * 2:
        group.rebalance()
    counts = held_once(*present)
    assert not counts or (sum(counts) == 5 and max(counts) - min(counts) <= 1)


def test_member_that_waits_for_partitions_is_woken_when_their_holder_gives_them_up(place: Place, store: Store) -> None:
    first, second = Partitioner(store, "p", 2), Partitioner(place.open(), "p", 2)
    first.join()
    second.join()
    with pytest.raises(StoreTimeoutError, match=r"partitions of 'p' .* did not change within 0 s \(0 of 2, 2 members"):
        second.wait_changed(0)
    with start_thread(second.wait_changed, HANG_S) as waiter:
        assert first.wait_changed(HANG_S).keys() == {0}
    assert waiter.result.keys() == {1}


def test_partitions_of_a_closed_member_are_taken_over(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    dying = place.open()
    first, second = Partitioner(dying, "p", 3), Partitioner(place.open(), "p", 3)
    first.join()
    second.join()
    with start_thread(second.wait_changed, HANG_S) as waiter:
        dying.close()
    assert sorted(waiter.result) == [0, 1, 2]
    assert min(waiter.result.values()) > max(first.partitions.values())
    place.close()


def test_partitions_of_a_killed_member_go_to_the_living_and_have_one_holder_each(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()

    def is_shared_out_among(count: int) -> bool:
        rows = [row.split(b" ") for row in store.get("p/shares", default=b"").split(b"\n")[1:]]
        return len(rows) == count and sorted(len(row[3].split(b",")) for row in rows if row[3]) == [6 // count] * count

    with Workers(place.spec(), "share_out", [["p", 6]] * 3) as workers:
        start(store, 3)
        until(lambda: is_shared_out_among(3))
        killed, *living = workers.processes
        killed.kill()
        until(lambda: is_shared_out_among(2))
        store.set("stop", "1")
        for process in living:
            complaint = process.communicate(timeout=HANG_S)[1]
            assert process.returncode == 0, complaint
    place.close()


def test_member_that_was_taken_for_dead_is_told(store: Store) -> None:
    first = Partitioner(store, "p", 3)
    first.join()
    store.set("p/shares", store.get("p/shares").partition(b"\n")[0])
    with pytest.raises(LockLostError, match="was taken for dead"):
        first.rebalance()
    assert first.partitions == {}
    first.join()
    assert sorted(first.partitions) == [0, 1, 2]


def test_members_that_give_other_numbers_of_partitions_are_refused(store: Store) -> None:
    with Partitioner(store, "p", 3):
        other = Partitioner(store, "p", 4)
        with pytest.raises(ValueError, match="the 1 members of 'p' share 3 partitions, not 4"):
            other.join()
        assert "not joined" in repr(other)
    with other:
        assert sorted(other.partitions) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="partitions"):
        Partitioner(store, "p", 0)
