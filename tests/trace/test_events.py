"""Events: what a subscriber is told, in which thread, and what its errors, its own calls and a fork change."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.internals import tracing
from support.places import until

from fscoord import FileStore, HashStore, PrefixStore, Store, StoreTimeoutError, aio, barrier, get_all, synchronize
from fscoord.errors import LockLostError, QueueEmptyError
from fscoord.events import HoldLost, RoundCompleted, SessionDied, TelemetryEvent, WaitEnded, subscribe
from fscoord.recipes import Election, Latch, Lock, Membership, Queue, RankZeroFirst, force_release
from fscoord.rendezvous import RendezvousParameters, create_handler

LIMIT_S = 200


@pytest.fixture
def unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process records nothing before the test, and nothing after it."""
    monkeypatch.setattr(tracing, "recorder", None)


@pytest.fixture
def seen(unrecorded: None) -> Iterator[list[TelemetryEvent]]:
    """The events of this process since the beginning of the test."""
    events: list[TelemetryEvent] = []
    with subscribe(events.append):
        yield events


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "store", timeout=LIMIT_S, rank=3) as store:
        yield store


def short(event: TelemetryEvent) -> tuple[Any, ...]:
    assert isinstance(event, WaitEnded)
    return event.kind, event.name, event.outcome


def is_waiting() -> bool:
    assert tracing.recorder is not None
    return any(span[tracing.KIND] in tracing.PARTS for span in list(tracing.recorder._open.values()))


def in_thread(call: Callable[[], Any], then: Callable[[], Any]) -> Any:
    """Return the result of `call`, which waits in another thread until `then` has run in this one."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(call)
        until(is_waiting)
        then()
        return found.result(LIMIT_S)


# Waits


def test_wait_that_slept_is_an_event_with_its_key_its_length_and_its_cause(
    seen: list[TelemetryEvent], store: FileStore
) -> None:
    with FileStore(store.path, rank=0) as other:
        in_thread(lambda: PrefixStore("job", store).get("key-17"), lambda: other.set("job/key-17", "v"))
    (event,) = seen
    assert isinstance(event, WaitEnded)
    assert (event.kind, event.name, event.pattern, event.outcome) == ("wait", "job/key-17", "job/key-*", "passed")
    assert event.ended_by.endswith(f":{os.getpid()}")
    assert 0 < event.seconds < LIMIT_S
    assert event.store


def test_operation_that_does_not_wait_is_no_event(seen: list[TelemetryEvent], store: FileStore) -> None:
    store.set("k", "v")
    store.wait(["k"])
    store.add("n", 1)
    assert Lock(store, "l").acquire()
    seen.clear()
    assert not Lock(store, "l").acquire(blocking=False)
    with pytest.raises(QueueEmptyError):
        Queue(store, "q").take(block=False)
    assert seen == []


def test_timeout_is_an_outcome_and_reported_once(seen: list[TelemetryEvent], store: FileStore) -> None:
    with pytest.raises(StoreTimeoutError):
        store.get("never", timeout=0.01)
    with pytest.raises(StoreTimeoutError):
        barrier(store, 2, "half", 0.01, rank=0)
    with pytest.raises(StoreTimeoutError):
        Latch(store, "shut", 1).wait(0.01)
    with Lock(store, "l"):
        assert not Lock(store, "l").acquire(timeout=0.01)
    assert [short(event) for event in seen if getattr(event, "outcome", "") != "passed"] == [
        ("wait", "never", "time-out"),
        ("barrier", "half", "time-out"),
        ("latch", "shut", "time-out"),
        ("lock", "l", "time-out"),
    ]


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_wait_of_a_barrier_or_a_recipe_is_one_event(kind: str, seen: list[TelemetryEvent], tmp_path: Path) -> None:
    first: Store = FileStore(tmp_path / "s", timeout=LIMIT_S) if kind == "file" else HashStore()
    second = first.clone()

    def meet(rank: int, store: Store) -> None:
        barrier(store, 2, "b", LIMIT_S, rank)
        synchronize(store, b"", rank, 2, "s")
        with RankZeroFirst(store, "f", rank):
            pass

    with first, second, ThreadPoolExecutor(2) as pool:
        list(pool.map(meet, (0, 1), (first, second)))
    assert sorted((*short(event), event.rank) for event in seen if isinstance(event, WaitEnded)) == [
        ("barrier", "b", "passed", 0),
        ("barrier", "b", "passed", 1),
        ("exchange", "s", "passed", 0),
        ("exchange", "s", "passed", 1),
        ("work", "f", "passed", 1),
    ]


def test_wait_for_ranks_that_read_later_is_a_part_of_the_exchange(seen: list[TelemetryEvent], store: FileStore) -> None:
    store.multi_set(["s0", "s1"], ["", ""])
    with FileStore(store.path) as other:
        in_thread(lambda: get_all(store, 0, "s", 2), lambda: get_all(other, 1, "s", 2))
    assert [short(event) for event in seen] == [("exchange", "s", "passed")] * 2


def test_wait_for_a_lock_is_an_event_at_the_acquisition(seen: list[TelemetryEvent], store: FileStore) -> None:
    lock = Lock(store, "l")
    lock.acquire()
    other = Lock(store, "l")
    in_thread(other.acquire, lock.release)
    assert [short(event) for event in seen] == [("lock", "l", "passed")] * 2
    other.release()
    assert len(seen) == 2


def test_wait_while_a_lock_is_held_is_an_event(seen: list[TelemetryEvent], store: FileStore) -> None:
    with Lock(store, "l"):
        seen.clear()
        with pytest.raises(StoreTimeoutError):
            store.get("long", timeout=0.01)
    assert [short(event) for event in seen] == [("wait", "long", "time-out")]


def test_observers_of_groups_and_elections_are_events(seen: list[TelemetryEvent], store: FileStore) -> None:
    with Election(store, "office"), Membership(store, "group"):
        seen.clear()
        Election(store, "office").observe()
        Membership(store, "group").observe()
    assert [short(event) for event in seen] == [("observe", "office", "passed"), ("members", "group", "passed")]


def test_waits_of_tasks_are_events_and_those_of_a_barrier_are_one(seen: list[TelemetryEvent], store: FileStore) -> None:
    async def come(rank: int) -> None:
        async with aio.open_store(store.path, timeout=LIMIT_S) as own:
            await aio.barrier(own, 2, key="b", rank=rank)
            if rank == 1:
                await own.set("k", "v")
            else:
                await own.wait(["k"])

    async def both() -> None:
        await asyncio.gather(come(0), come(1))

    asyncio.run(both())
    found = [short(event) for event in seen]
    assert found.count(("barrier", "b", "passed")) == 2
    assert set(found) <= {("barrier", "b", "passed"), ("wait", "k", "passed")}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("epoch-12/rank7", "epoch-*/rank*"),
        ("torchelastic/3f2b9c1d-aaaa-4bcd-8e00-0123456789ab/x", "torchelastic/*-aaaa-*bcd-*e*-*/x"),
        ("deadbeef", "deadbeef"),
        ("run_0badc0de", "run_*badc*de"),
        ("", ""),
    ],
)
def test_pattern_of_a_name_has_a_star_for_each_number_or_long_id(name: str, pattern: str) -> None:
    assert WaitEnded("wait", name, 0.0, "passed", None, "", "").pattern == pattern


# Deaths, holds, rounds


def test_death_is_reported_by_the_process_that_records_it(seen: list[TelemetryEvent], store: FileStore) -> None:
    with FileStore(store.path, rank=5) as other:
        number = other.register()
        in_thread(lambda: store.wait_sessions(["k"], [number]), other.close)
    died, waited = seen
    assert isinstance(died, SessionDied)
    assert (died.session, died.rank, died.process.rpartition(":")[2]) == (number, 5, str(os.getpid()))
    assert short(waited) == ("wait", "k", "death")


def test_death_that_a_compaction_finds_is_reported_without_the_lock_of_the_log(
    unrecorded: None, store: FileStore
) -> None:
    with FileStore(store.path, rank=5) as other:
        number = other.register()
    found: list[TelemetryEvent] = []

    def use(event: TelemetryEvent) -> None:
        store.set("seen", "1")  # would fail or wait for ever under the lock or the mutex of the log
        found.append(event)

    with subscribe(use):
        store.compact()
        until(lambda: found)
    (event,) = found
    assert isinstance(event, SessionDied)
    assert event.session == number
    assert store.get("seen") == b"1"


@pytest.mark.parametrize("how", ["check", "release"])
def test_lost_lock_is_reported_once_when_the_holder_finds_out(
    seen: list[TelemetryEvent], store: FileStore, how: str
) -> None:
    lock = Lock(PrefixStore("p", store), "l")
    lock.acquire()
    assert force_release(PrefixStore("p", store), "l", lock.token)
    seen.clear()
    for call in (getattr(lock, how), lock.check) if how == "check" else (lock.release,):
        with pytest.raises(LockLostError):
            call()
    (event,) = seen
    assert isinstance(event, HoldLost)
    assert (event.kind, event.name, event.token) == ("lock", "p/l", 1)
    assert event.seconds >= 0


def test_lost_lease_is_reported_by_the_thread_that_renews_it(seen: list[TelemetryEvent], store: FileStore) -> None:
    lock = Lock(store, "l", ttl=0.2)
    lock.acquire()
    seen.clear()
    assert force_release(store, "l", lock.token)
    until(lambda: seen)
    with pytest.raises(LockLostError):
        lock.release()
    (event,) = seen
    assert isinstance(event, HoldLost)


def test_round_of_a_rendezvous_is_an_event_of_each_node(seen: list[TelemetryEvent], tmp_path: Path) -> None:
    handler = create_handler(
        RendezvousParameters("c10d", f"file:{tmp_path / 'store'}", "run", 1, 1, last_call_timeout=0)
    )
    handler.next_rendezvous()
    handler.shutdown()
    waited, done = seen
    assert short(waited) == ("rendezvous", "run", "passed")
    assert done == RoundCompleted("run", 0, 0, 1)


# Subscribers


def test_callback_runs_in_the_thread_of_the_event_and_may_use_the_store(unrecorded: None, store: FileStore) -> None:
    threads: list[int] = []

    def use(event: TelemetryEvent) -> None:
        threads.append(threading.get_ident())
        with pytest.raises(StoreTimeoutError):
            store.get("never", timeout=0.01)  # its own waits are not reported

    with subscribe(use), pytest.raises(StoreTimeoutError):
        store.get("k", timeout=0.01)
    assert threads == [threading.get_ident()]


def test_exception_of_a_callback_is_logged_and_the_others_are_called(
    seen: list[TelemetryEvent], store: FileStore, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(event: TelemetryEvent) -> None:
        raise RuntimeError("broken")

    after: list[TelemetryEvent] = []
    with caplog.at_level(logging.ERROR), subscribe(fail), subscribe(after.append):
        barrier(store, 1, "b", rank=0)
    assert (len(seen), len(after)) == (1, 1)
    (record,) = caplog.records
    assert (record.name, record.exc_info is not None) == ("fscoord.events", True)


def test_interrupt_in_a_callback_ends_the_operation_and_the_next_event_is_reported(
    seen: list[TelemetryEvent], store: FileStore
) -> None:
    with subscribe(lambda _: os.kill(os.getpid(), signal.SIGINT)), pytest.raises(KeyboardInterrupt):
        barrier(store, 1, "b", rank=0)
    barrier(store, 1, "c", rank=0)
    assert short(seen[-1]) == ("barrier", "c", "passed")


def test_closed_subscription_is_not_called_and_may_be_closed_twice(unrecorded: None, store: FileStore) -> None:
    events: list[TelemetryEvent] = []
    subscription = subscribe(events.append)
    barrier(store, 1, "b", rank=0)
    subscription.close()
    subscription.close()
    barrier(store, 1, "c", rank=0)
    assert [event.name for event in events if isinstance(event, WaitEnded)] == ["b"]


def test_forked_child_keeps_the_subscription(seen: list[TelemetryEvent], store: FileStore) -> None:
    pid = os.fork()
    if pid == 0:
        barrier(store, 1, "b", rank=0)
        os._exit(len(seen))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert seen == []


def test_trace_that_begins_after_a_subscription_has_all_spans_from_then_on(
    begins_later: None, traces: Path, tmp_path: Path
) -> None:
    events: list[TelemetryEvent] = []
    with subscribe(events.append), FileStore(tmp_path / "s") as store:
        barrier(store, 1, "early", rank=0)
        assert not traces.exists()
        with FileStore(tmp_path / "s", trace=traces) as other:
            barrier(other, 1, "late", rank=0)
    assert tracing.recorder is not None
    tracing.recorder.flush()
    text = "".join(path.read_text() for path in traces.iterdir())
    assert ("early" in text, "late" in text) == (False, True)
    assert [event.name for event in events if isinstance(event, WaitEnded)] == ["early", "late"]


def test_program_without_a_subscription_loads_no_module_of_events() -> None:
    code = "import sys, fscoord; print('fscoord.events' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.strip() == "False"
