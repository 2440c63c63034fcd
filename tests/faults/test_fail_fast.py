"""Waits and barriers that end when a needed rank dies, and time-outs that distinguish dead ranks from late ones."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from faults.test_fork import until
from support.internals import log_of, watcher_of
from support.places import start_thread
from support.processes import stop

from fscoord import (
    BrokenBarrierError,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    StoreTimeoutError,
    barrier,
    gather,
    synchronize,
)
from fscoord._log.liveness.liveness_file import LivenessFile, ProcessIdentity
from fscoord._log.wakeup import watcher as log_ticket
from fscoord._runtime import system
from fscoord.inspect import dump
from fscoord.stores.file import death_watch
from fscoord.testing import FaultyStore

HANG_S = 60
CONTEXT = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


class Rank:
    """A process that opens a store as `rank`, and calls `function(store, rank, *arguments)` when it is told to."""

    def __init__(self, path: str, rank: int, **options: Any) -> None:
        self.rank = rank
        self._pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=serve, args=(theirs, path, rank, options))
        self.process.start()
        theirs.close()
        assert self.result() is None

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._pipe.send((function, arguments))

    def result(self) -> Any:
        """Return what came of the last call: its result, or its exception."""
        assert self._pipe.poll(2 * HANG_S), f"rank {self.rank} hangs"
        return self._pipe.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join(HANG_S)


def serve(pipe: Connection, path: str, rank: int, options: dict[str, Any]) -> None:
    with FileStore(path, rank=rank, timeout=HANG_S, **options) as store:
        pipe.send(None)
        while True:
            try:
                function, arguments = pipe.recv()
            except EOFError:
                return
            try:
                pipe.send(function(store, rank, *arguments))
            except Exception as error:
                pipe.send(error)


@contextmanager
def ranks(path: str, count: int, **options: Any) -> Iterator[list[Rank]]:
    started: list[Rank] = []
    try:
        for rank in range(count):
            started.append(Rank(path, rank, **options))
        yield started
    finally:
        for rank in started:
            rank._pipe.close()
            rank.process.kill()
            rank.process.join(HANG_S)
            rank.process.close()


def meet(store: FileStore, rank: int, world_size: int, key: str = "b", timeout: float = HANG_S) -> float:
    """Come to a barrier; return when it was passed."""
    barrier(store, world_size, key, timeout, rank, fail_fast=True)
    return time.monotonic()


def all_wait(path: str, count: int) -> None:
    """Return when `count` ranks have arrived and found that others are missing."""
    with FileStore(path, read_only=True, timeout=HANG_S) as store:
        until(lambda: store.check(["b/arrivals"]) and store.get("b/arrivals").count(b" ") == count)


# A wait that watches


def test_wait_alive_ends_when_its_key_comes(path: str) -> None:
    with FileStore(path, rank=0, timeout=HANG_S) as store, FileStore(path, rank=1) as other:
        with start_thread(store.wait_alive, ["k"], [1, 2]) as waiter:
            other.set("k", "v")
        assert waiter.result == []
        assert store.wait_alive(["k"], [1], 0) == []


def test_wait_alive_ends_with_the_death_of_a_rank(path: str) -> None:
    with FileStore(path, rank=0, timeout=HANG_S) as store, ranks(path, 4) as others:
        others[3].kill()
        with start_thread(store.wait_alive, ["k"], [1, 2, 7]) as waiter:
            until(lambda: watched(store) == {others[1].process.pid, others[2].process.pid})
            others[2].kill()
        assert waiter.result == [2]
        assert store.wait_alive(["k"], [3]) == [3]


@pytest.mark.parametrize("awaits", ["ranks", "sessions"])
def test_key_that_the_dead_set_last_ends_the_wait_and_not_their_death(
    awaits: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key may come after the look for it, and the death before the look for deaths."""
    monkeypatch.setattr(death_watch, "BEGIN_S", 0.0)
    with FileStore(path, rank=0, timeout=HANG_S) as store, FileStore(path, rank=1) as other:
        session, find_dead = other.register(), death_watch.DeathWatch.find_dead
        found: list[Any] = []

        def find_after_the_end(watch: death_watch.DeathWatch, timeout: float) -> Any:
            if not found:
                other.set("k", "v")
                other.close()
            found.append(find_dead(watch, timeout))
            return found[-1]

        monkeypatch.setattr(death_watch.DeathWatch, "find_dead", find_after_the_end)
        answer = store.wait_alive(["k"], [1]) if awaits == "ranks" else store.wait_sessions(["k"], [session])
        assert answer == []
        assert found == [[1] if awaits == "ranks" else [session]]


def test_key_that_the_dead_set_last_ends_the_wait_of_every_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with Undead(timeout=HANG_S) as store:
        asked: list[object] = []

        def dead_ranks(ranks: Iterable[int]) -> list[int]:
            asked.append(ranks)
            store.set("k", "v")
            return list(ranks)

        monkeypatch.setattr(store, "dead_ranks", dead_ranks)
        assert store.wait_alive(["k"], [1]) == []
        assert len(asked) == 1
        assert store.wait_alive(["other"], [1]) == [1]


def watched(store: FileStore) -> set[int]:
    """The processes whose death the kernel will tell of."""
    watch = watcher_of(store)
    return set(watch._events.processes) if watch is not None and watch._events is not None else set()


def test_death_is_reported_by_the_kernel_between_looks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(death_watch, "BEGIN_S", 0.0)
    monkeypatch.setattr(log_ticket, "DEATH_WATCH_FIRST_S", 10 * HANG_S)  # the next look of its own never comes
    with (
        FileStore(path, rank=0, timeout=HANG_S) as store,
        ranks(path, 2) as others,
        start_thread(store.wait_alive, ["k"], [1], math.inf) as waiter,
    ):
        until(lambda: watched(store))
        others[1].kill()
        assert waiter.join() == [1]


def test_waiter_that_hears_of_all_deaths_from_the_kernel_looks_rarely(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    sleep = log_ticket.Waiter.max_sleep

    def spied(waiter: log_ticket.Waiter, deadline: float) -> Any:
        pauses.append(waiter._pause)
        return sleep(waiter, deadline)

    monkeypatch.setattr(log_ticket.Waiter, "max_sleep", spied)
    with FileStore(path, rank=0, timeout=HANG_S) as store, ranks(path, 2) as others:
        number = store.members([1])[0].number
        with start_thread(store.wait_sessions, ["k"], [number], math.inf) as waiter:
            until(lambda: max(pauses, default=0) == death_watch.PROBE_S)
            others[1].kill()
        assert waiter.result == [number]


def test_wait_alive_without_events_finds_deaths_by_itself(path: str) -> None:
    with FileStore(path, rank=0, timeout=HANG_S, watch="poll") as store, ranks(path, 2) as others:
        with start_thread(store.wait_alive, ["k"], [1]) as waiter:
            until(lambda: watcher_of(store) is not None)
            others[1].kill()
        assert waiter.result == [1]


def test_wait_alive_finds_a_handle_that_is_closed_while_its_process_lives(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(death_watch, "PROBE_S", 0.05)
    with FileStore(path, rank=0, timeout=HANG_S) as store, FileStore(path, rank=1) as other:
        with start_thread(store.wait_alive, ["k"], [1]) as waiter:
            until(lambda: watched(store) == {os.getpid()})
            other.close()
        assert waiter.result == [1]


def test_wait_alive_times_out_when_no_rank_dies(path: str) -> None:
    with (
        FileStore(path, rank=0, timeout=HANG_S) as store,
        ranks(path, 2),
        pytest.raises(StoreTimeoutError, match="'k'"),
    ):
        store.wait_alive(["k"], [1, 2], 0.05)


def test_process_that_is_stopped_is_waited_for(path: str) -> None:
    with FileStore(path, rank=0, timeout=HANG_S) as store, ranks(path, 2) as others:
        pid = others[1].process.pid
        assert pid
        stop(pid)
        with pytest.raises(StoreTimeoutError, match="'k'"):
            store.wait_alive(["k"], [1], 0.05)
        assert store.dead_ranks([1]) == []


def test_watched_processes_cost_no_descriptors_when_the_waits_are_over(path: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        FileStore(path, rank=0, timeout=HANG_S) as store,
        ranks(path, 3) as others,
        start_thread(store.wait_alive, ["k"], [1, 2]),
    ):
        until(lambda: len(watched(store)) == 2)
        others[1].kill()
    assert len(os.listdir("/proc/self/fd")) == before


# Barriers


def test_barrier_with_fail_fast_is_passed_when_all_have_come(path: str) -> None:
    with ranks(path, 3) as crew:
        for key in ("b", "c"):
            for rank in crew:
                rank.call(meet, 3, key)
            assert all(isinstance(rank.result(), float) for rank in crew)


def test_barrier_is_broken_for_all_alike_by_the_death_of_a_missing_rank(path: str) -> None:
    with ranks(path, 5) as crew:
        for rank in crew[:3]:
            rank.call(meet, 5)
        all_wait(path, 3)
        crew[4].kill()
        errors = [rank.result() for rank in crew[:3]]
        for rank, error in enumerate(errors):
            assert isinstance(error, BrokenBarrierError), error
            assert (error.missing, error.dead) == (("3", "4"), ("4",))
            assert f"on rank {rank}, for key prefix: b (world_size=5, missing_ranks=[3, 4], dead_ranks=[4])" in str(
                error
            )
            assert re.search(rf"dead: rank 4 \(\S+:{crew[4].process.pid}, found dead at [0-9:]+ UTC", str(error))
            assert re.search(rf"late: rank 3 \(\S+:{crew[3].process.pid}, alive\)", str(error))
        assert sum(entry.kind == "death" for entry in dump(path)) == 1
        crew[3].call(meet, 5)
        late = crew[3].result()
        assert isinstance(late, BrokenBarrierError)
        assert late.dead == ("4",)


def test_rank_that_dies_after_its_arrival_breaks_nothing(path: str) -> None:
    with ranks(path, 3) as crew:
        for rank in crew[:2]:
            rank.call(meet, 3)
        all_wait(path, 2)
        crew[1].kill()
        crew[2].call(meet, 3)
        assert isinstance(crew[0].result(), float)
        assert isinstance(crew[2].result(), float)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The name of the thread and the session of each probe; all sessions count as those of other hosts."""
    probes: list[tuple[str, int]] = []
    is_held = LivenessFile.is_held

    def spied(file: LivenessFile, number: int) -> bool:
        probes.append((system.threading.current_thread().name, number))
        return is_held(file, number)

    monkeypatch.setattr(LivenessFile, "is_held", spied)
    monkeypatch.setattr(ProcessIdentity, "shares_processes_with", lambda self, session: False)
    monkeypatch.setattr(death_watch, "BEGIN_S", 0.0)
    return probes


def test_ranks_that_have_arrived_are_not_probed_any_more(path: str, probed: list[tuple[str, int]]) -> None:
    with ExitStack() as stack:
        stores = [stack.enter_context(FileStore(path, rank=rank, timeout=HANG_S)) for rank in range(4)]
        missing = stores[3].register()
        waiters = []
        for rank in range(3):
            waiters.append(start_thread(meet, stores[rank], rank, 4))
            until(lambda name=waiters[-1]._thread.name, last=rank + 2: (name, last) in probed)
        names = {waiter._thread.name for waiter in waiters}
        for _ in range(2):  # a look that began before the last arrival may have ended only after it
            probed.clear()
            until(lambda: min(sum(number == missing for who, number in probed if who == name) for name in names) > 1)
        assert {number for who, number in probed if who in names} == {missing}
        stores[3].close()
        for waiter in waiters:
            with pytest.raises(BrokenBarrierError):
                waiter.join()


@pytest.mark.parametrize("view", ["store", "view", "faulty"])
def test_rank_that_dies_after_its_arrival_is_not_declared_dead(
    view: str, path: str, probed: list[tuple[str, int]]
) -> None:
    """Not even by a waiter that began to wait before that arrival."""
    with FileStore(path, rank=0, timeout=HANG_S) as store, FileStore(path, rank=2, timeout=HANG_S) as last:
        seen: Any = {"store": store, "view": PrefixStore("p", store), "faulty": FaultyStore(store)}[view]
        prefix = "p/" if view == "view" else ""
        other = FileStore(path, rank=1, timeout=HANG_S)
        gone = other.register()
        with start_thread(meet, seen, 0, 3) as waiter:
            until(lambda: (waiter._thread.name, gone) in probed)
            other.append(f"{prefix}b/arrivals", "1/3 ")
            other.close()
            probed.clear()
            until(lambda: probed.count((waiter._thread.name, last.register())) > 2)
            assert not [entry for entry in dump(path) if entry.kind == "death"]
            barrier(last if view != "view" else PrefixStore("p", last), 3, "b", HANG_S, 2)
        assert isinstance(waiter.result, float)


def test_death_of_a_session_that_is_needed_no_more_is_not_recorded(path: str) -> None:
    """An arrival may come between the probe of a waiter and the lock that it needs to record the death."""
    with FileStore(path, timeout=HANG_S) as store:
        other = FileStore(path, rank=1)
        number = other.register()
        other.close()
        assert not log_of(store).record_death(number, HANG_S, lambda: False)
        assert not [entry for entry in dump(path) if entry.kind == "death"]
        assert log_of(store).record_death(number, HANG_S, lambda: True)


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_barrier_is_passed_when_the_last_rank_died_before_it_set_the_key(kind: str, path: str) -> None:
    store: Any = FileStore(path, rank=0, timeout=HANG_S) if kind == "file" else Undead(timeout=HANG_S)
    with store, store.clone() as last, start_thread(meet, store, 0, 2) as waiter:
        until(lambda: store.check(["b/arrivals"]))
        last.append("b/arrivals", "1/2 ")
        assert isinstance(waiter.join(), float)
        assert not store.check(["b/complete"]), "otherwise it was the deadline that ended the wait"


class Undead(HashStore):
    """A store that detects deaths, and waits by the methods of every store."""

    has_liveness = True  # type: ignore[assignment]

    def _wait(self, request: Any) -> Any:
        if request.ranks is None:
            return super()._wait(request)
        return Store._wait(self, request)


def test_barrier_that_is_broken_begins_anew_for_a_rank_started_again(path: str) -> None:
    with ranks(path, 3) as crew:
        for rank in crew[:2]:
            rank.call(meet, 3)
        all_wait(path, 2)
        crew[2].kill()
        assert [type(rank.result()) for rank in crew[:2]] == [BrokenBarrierError] * 2
        with FileStore(path, rank=2, timeout=HANG_S) as again:
            for rank in crew[:2]:
                rank.call(meet, 3)
            meet(again, 2, 3)
            assert all(isinstance(rank.result(), float) for rank in crew[:2])


def test_rank_of_two_processes_is_dead_when_both_are(path: str) -> None:
    with FileStore(path, rank=0, timeout=HANG_S) as store, ranks(path, 2) as crew, FileStore(path, rank=1) as twin:
        crew[1].kill()
        with pytest.raises(StoreTimeoutError):
            meet(store, 0, 2, timeout=0.05)
        twin.close()
        with pytest.raises(BrokenBarrierError):
            meet(store, 0, 2)


def clone_in_a_child(store: FileStore, rank: int) -> None:
    """Fork a child that opens a clone of `store`, writes, and sleeps. Return when it has written."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            signal.alarm(2 * HANG_S)
            with store.clone() as clone:
                clone.set("child", str(os.getpid()))
                os.write(writer, b"1")
                signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    assert os.read(reader, 1) == b"1", "the child has failed"
    os.close(reader)


def test_rank_is_dead_while_its_forked_child_uses_a_clone(path: str) -> None:
    with ranks(path, 2) as (first, second), FileStore(path, timeout=HANG_S) as store:
        second.call(clone_in_a_child)
        assert second.result() is None
        try:
            assert [member.rank for member in store.members() if member.pid == int(store.get("child"))] == [None]
            first.call(meet, 2)
            second.process.kill()  # not `kill`: the child keeps the pipe open that `join` waits for
            assert isinstance(first.result(), BrokenBarrierError)
        finally:
            os.kill(int(store.get("child")), signal.SIGKILL)


def test_rank_that_was_never_seen_is_late_and_not_dead(path: str) -> None:
    words = r"late: rank 1 \(not seen in this store\), rank 2 \(not seen in this store\)"
    with FileStore(path, rank=0, timeout=HANG_S) as store, pytest.raises(StoreTimeoutError, match=words):
        meet(store, 0, 3, timeout=0.05)


def test_barrier_through_a_view_fails_fast_too(path: str) -> None:
    with FileStore(path, rank=0, timeout=HANG_S) as store, ranks(path, 2) as crew:
        view = PrefixStore("job", store)
        crew[1].kill()
        with pytest.raises(BrokenBarrierError):
            barrier(view, 2, "b", HANG_S, 0, fail_fast=True)


def test_store_without_liveness_waits_until_the_timeout(path: str) -> None:
    with FileStore(path, lock="soft", rank=0, timeout=HANG_S) as store:
        with FileStore(path, lock="soft", rank=1):
            pass
        with pytest.raises(StoreTimeoutError) as caught:
            meet(store, 0, 2, timeout=0.05)
        assert caught.value.dead_ranks == ()


def test_barrier_with_fail_fast_needs_the_rank_of_its_caller(path: str) -> None:
    with FileStore(path) as store, pytest.raises(ValueError, match="fail_fast needs rank"):
        barrier(store, 2, "b", 1, fail_fast=True)


# Time-outs


@pytest.mark.parametrize("what", ["barrier", "synchronize", "gather"])
def test_timeout_distinguishes_the_dead_ranks_from_the_late(what: str, path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store, ranks(path, 3) as crew:
        crew[1].kill()
        call: dict[str, Callable[[], object]] = {
            "barrier": lambda: barrier(store, 4, "b", 0.05, 0),
            "synchronize": lambda: synchronize(store, "mine", 0, 4, "b", 0.05),
            "gather": lambda: gather(store, "mine", 0, 4, "b", 0.05),
        }
        with pytest.raises(StoreTimeoutError) as caught:
            call[what]()
        text = str(caught.value)
        assert caught.value.missing_ranks == ("1", "2", "3")
        assert caught.value.dead_ranks == ("1",)
        assert re.search(
            rf"dead: rank 1 \(\S+:{crew[1].process.pid}, found dead at \S+ UTC, registered at \S+ UTC\)", text
        )
        assert re.search(rf"late: rank 2 \(\S+:{crew[2].process.pid}, alive\), rank 3 \(not seen in this store\)", text)


def test_timeout_does_not_wait_for_a_lock_to_find_the_dead_ranks(path: str) -> None:
    with FileStore(path, rank=0, timeout=HANG_S) as store, FileStore(path, rank=1) as other:
        other.close()
        store.append("b/arrivals", "0/2 ")
        with FileStore(path, timeout=HANG_S) as stuck:
            stuck.set("k", "v")
            log_of(stuck).handle.lock.try_lock()
            started = time.monotonic()
            assert [member.alive for member in store.members([1])] == ["no"]
            assert time.monotonic() - started < HANG_S / 2
            log_of(stuck).handle.lock.unlock()
        assert store.dead_ranks([1]) == [1]


def test_verdict_on_a_barrier_that_was_broken_before_breaks_no_later_one() -> None:
    store = HashStore(timeout=HANG_S)
    store.set("b/arrivals", "0/2 !0:1 0/2 !0:1 ")  # the second who found the death was slow to say so
    barrier(store, 2, "b", HANG_S, 1, fail_fast=True)


def test_verdict_on_a_rank_that_had_come_breaks_nothing() -> None:
    store = HashStore(timeout=HANG_S)
    store.set("b/arrivals", "0/2 !0:0 ")
    barrier(store, 2, "b", HANG_S, 1, fail_fast=True)
