"""The spans of stores, collectives, recipes and programs. Without a trace nothing is recorded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.internals import state_of, tracing

import fscoord
from fscoord import (
    BrokenBarrierError,
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    StoreTimeoutError,
    aio,
    barrier,
    broadcast,
    gather,
    synchronize,
)
from fscoord.recipes import Election, Latch, Lock, Queue, RLock
from fscoord.trace.reading import Span, Trace, read
from fscoord.trace.report import make_report

Look = Callable[[], Trace]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def of_kind(trace: Trace, kind: str) -> list[Span]:
    return [span for span in trace.spans if span.kind == kind]


def all_at_once(calls: list[Callable[[], Any]]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def at_barrier(path: Path, rank: int, prefix: str, **options: Any) -> None:
    with FileStore(path, timeout=30, rank=rank) as store:
        barrier(store, 2, prefix, rank=rank, **options)


# Barriers and exchanges


@pytest.mark.parametrize("fail_fast", [False, True])
def test_barrier_is_a_span_of_each_rank(written: Look, path: Path, fail_fast: bool) -> None:
    all_at_once([partial(at_barrier, path, rank, "epoch/1", fail_fast=fail_fast) for rank in (0, 1)])
    spans = of_kind(written(), "barrier")
    assert sorted((span.rank, span.name, span.outcome, span.facts["world_size"]) for span in spans) == [
        (0, "epoch/1", "passed", 2),
        (1, "epoch/1", "passed", 2),
    ]
    (crossing,) = written().crossings
    assert crossing.is_sound
    assert max(span.begin for span in spans) <= min(span.end for span in spans)


def test_barrier_without_ranks_is_a_span(written: Look, path: Path) -> None:
    def come() -> None:
        with FileStore(path, timeout=30) as store:
            barrier(store, 2, "b")

    all_at_once([come, come])
    assert [(span.name, span.rank) for span in of_kind(written(), "barrier")] == [("b", None)] * 2


def test_names_are_whole_keys_and_the_place_is_that_of_the_underlying_store(written: Look, path: Path) -> None:
    with FileStore(path) as store:
        barrier(PrefixStore("job", store), 1, "b", rank=0)
        barrier(store, 1, "c", rank=0)
    first, second = of_kind(written(), "barrier")
    assert (first.name, second.name) == ("job/b", "c")
    assert first.store == second.store != ""


def test_barrier_that_times_out_or_breaks_says_so(written: Look, path: Path) -> None:
    with FileStore(path, timeout=30) as store:
        with pytest.raises(StoreTimeoutError):
            barrier(store, 2, "late", timeout=0, rank=0)
        with FileStore(path, rank=1) as other:
            other.register()
        with pytest.raises(BrokenBarrierError):
            barrier(store, 2, "broken", rank=0, fail_fast=True)
    assert [span.outcome for span in of_kind(written(), "barrier")] == ["time-out", "broken"]
    assert written().crossings == []


def test_arrival_of_a_rank_that_comes_again_after_the_end_bounds_no_clock(written: Look, path: Path) -> None:
    with FileStore(path, timeout=30) as store:
        with pytest.raises(StoreTimeoutError):
            barrier(store, 2, "b", timeout=0, rank=0)
        at_barrier(path, 1, "b")
        barrier(store, 2, "b", rank=0)
    spans = of_kind(written(), "barrier")
    assert [span.facts.get("repeated") for span in spans if span.rank == 0] == [None, 1], spans


@pytest.mark.parametrize(
    ("operation", "call"),
    [
        ("synchronize", lambda store: synchronize(store, b"x", 0, 1, "p")),
        ("broadcast", lambda store: broadcast(store, b"x", 0, 1, "p")),
        ("gather", lambda store: gather(store, b"x", 0, 1, "p")),
        ("get_all", lambda store: (store.set("p0", "x"), fscoord.get_all(store, 0, "p", 1))),
    ],
)
def test_exchange_is_a_span(written: Look, path: Path, operation: str, call: Callable[[Store], Any]) -> None:
    with FileStore(path) as store:
        call(store)
    (span,) = of_kind(written(), "exchange")
    assert (span.facts["operation"], span.name, span.rank, span.outcome) == (operation, "p", 0, "passed")


def test_barrier_on_a_store_in_memory_is_a_span(written: Look) -> None:
    barrier(HashStore(), 1, "b", rank=0)
    (span,) = of_kind(written(), "barrier")
    assert span.name == "b"


def test_wait_of_a_recipe_on_a_store_in_memory_is_a_span_that_a_kill_would_leave(written: Look, traces: Path) -> None:
    store = HashStore()
    with pytest.raises(StoreTimeoutError):
        barrier(PrefixStore("job", store), 2, "b", timeout=2, rank=0)  # it must sleep, on a busy machine, too
    line, *_ = [
        line for path in traces.iterdir() for line in path.read_text().splitlines() if '"job/b/complete"' in line
    ]
    assert ',0,"job/b",' in line, "the barrier was written while it was open"
    (span,) = of_kind(written(), "wait")
    assert (span.name, span.outcome) == ("job/b/complete", "time-out")


# Waits


def test_wait_tells_which_session_ended_it(written: Look, path: Path) -> None:
    with FileStore(path, timeout=30, rank=0) as waiter, FileStore(path, timeout=30, rank=1) as writer:
        thread = threading.Thread(target=waiter.wait, args=(["other", "plan"],))
        thread.start()
        until_waiting(writer)
        writer.set("other", "x")
        writer.set("plan", "x")
        thread.join()
    (span,) = of_kind(written(), "wait")
    assert (span.outcome, span.name, span.facts["key"], span.facts["by_rank"]) == ("passed", "other", "plan", 1)
    assert span.facts["by"].endswith(f":{os.getpid()}")


def until_waiting(store: Store) -> None:
    """Return when some handle waits: its bell was announced, and its waiter is armed."""
    pause = threading.Event()
    while tracing.recorder is None or not any(
        span[tracing.KIND] in {"wait", "queue"} for span in list(tracing.recorder._open.values())
    ):
        pause.wait(0.002)


def test_wait_whose_key_is_there_leaves_no_span(written: Look, path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        store.wait(["k"])
        assert store.get("k") == b"v"
        barrier(store, 1, "b", rank=0)
    assert of_kind(written(), "wait") == []


def test_wait_that_times_out_says_so(written: Look, path: Path) -> None:
    with FileStore(path) as store, pytest.raises(StoreTimeoutError):
        store.wait(["never"], 0.02)
    (span,) = of_kind(written(), "wait")
    assert (span.name, span.outcome) == ("never", "time-out")


def test_wait_that_a_death_ends_names_it(written: Look, path: Path) -> None:
    with FileStore(path, timeout=30) as store, FileStore(path, rank=5) as other:
        number = other.register()
        thread = threading.Thread(target=store.wait_sessions, args=(["k"], [number]))
        thread.start()
        until_waiting(store)
        other.close()
        thread.join()
    trace = written()
    (span,) = of_kind(trace, "wait")
    assert (span.outcome, span.facts["dead"]) == ("death", [number])
    (death,) = of_kind(trace, "death")
    assert (death.facts["session"], death.facts["dead_rank"]) == (number, 5)


def test_wait_that_closing_ends_is_closed_in_the_trace_too(written: Look, path: Path) -> None:
    store = FileStore(path, timeout=30)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            store.wait(["k"])
        except fscoord.StoreClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until_waiting(store)
    store.close()
    thread.join()
    assert errors
    (span,) = of_kind(written(), "wait")
    assert not span.is_open


def test_pop_of_an_empty_queue_is_a_wait_for_the_queue(written: Look, path: Path) -> None:
    with FileStore(path, timeout=30) as store, FileStore(path, rank=4) as other:
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(store.queue_pop("q")))
        thread.start()
        until_waiting(store)
        other.queue_push("q", "item")
        thread.join()
    (span,) = of_kind(written(), "queue")
    assert (span.name, span.facts["by_rank"], found) == ("q", 4, [b"item"])


# Recipes


def test_lock_has_the_time_of_asking_waiting_and_holding(written: Look, path: Path) -> None:
    with FileStore(path, timeout=30) as first, FileStore(path, timeout=30) as second:
        with Lock(first, "dataset"):
            thread = threading.Thread(target=lambda: Lock(second, "dataset").__enter__().__exit__())
            thread.start()
            until_waiting(second)
        thread.join()
    one, two = sorted(of_kind(written(), "lock"), key=lambda span: span.facts["token"])
    assert (one.name, one.outcome, two.outcome) == ("dataset", "released", "released")
    assert two.begin < one.end, "it was asked for while it was held"
    assert 0 < two.facts["waited_ns"] < two.length


def test_lock_that_is_not_acquired_says_so(written: Look, path: Path) -> None:
    with FileStore(path) as store, Lock(store, "l"):
        assert not Lock(store, "l").acquire(blocking=False)
    assert sorted(span.outcome for span in of_kind(written(), "lock")) == ["not acquired", "released"]


def test_lock_or_latch_that_times_out_says_so_once(written: Look, path: Path) -> None:
    with FileStore(path) as store, Lock(store, "l"):
        assert not Lock(store, "l").acquire(timeout=0.01)
        with pytest.raises(StoreTimeoutError):
            Latch(store, "shut", 1).wait(timeout=0.01)
    late = make_report(written())["time_outs"]
    assert [(each["kind"], each["name"]) for each in late] == [("lock", "l"), ("latch", "shut")]


def test_lock_that_is_held_twice_by_one_thread_is_one_span(written: Look, path: Path) -> None:
    with FileStore(path) as store:
        lock = RLock(store, "l")
        with lock, lock:
            pass
    assert len(of_kind(written(), "lock")) == 1


def test_election_is_a_span_and_so_is_who_observes_it(written: Look, path: Path) -> None:
    with FileStore(path) as store, Election(store, "office", b"data") as candidate:
        assert candidate.observe().term == 1
    trace = written()
    (led,), (seen,) = of_kind(trace, "election"), of_kind(trace, "observe")
    assert (led.name, led.facts["token"], seen.facts["token"]) == ("office", 1, 1)


def test_queue_records_who_put_and_who_took_which_item(written: Look, path: Path) -> None:
    with FileStore(path) as store:
        queue = Queue(store, "work")
        queue.put("a")
        queue.take().ack()
        with pytest.raises(fscoord.QueueEmptyError):
            queue.take(block=False)
    trace = written()
    (put,) = of_kind(trace, "put")
    took, empty = of_kind(trace, "take")
    assert put.facts["item"] == took.facts["item"]
    assert empty.outcome == "empty"


def test_compaction_is_a_span(written: Look, path: Path) -> None:
    with FileStore(path) as store:
        store.compact()
    (span,) = of_kind(written(), "compaction")
    assert (span.name, span.outcome) == (str(path), "done")


# Tasks, children, programs


def test_tasks_record_what_threads_record(written: Look, path: Path) -> None:
    async def come(rank: int) -> None:
        async with aio.open_store(path, timeout=30) as store:
            await aio.barrier(store, 2, key="b", rank=rank)
            async with aio.Lock(store, "l"):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(come(0), come(1))

    asyncio.run(both())
    trace = written()
    assert sorted(span.rank for span in of_kind(trace, "barrier")) == [0, 1]
    assert [span.outcome for span in of_kind(trace, "lock")] == ["released"] * 2


def test_task_that_is_cancelled_ends_its_span(written: Look, path: Path) -> None:
    async def main() -> None:
        async with aio.open_store(path, timeout=30) as store:
            task = asyncio.ensure_future(store.wait(["never"]))
            await asyncio.to_thread(until_waiting, store.store)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    (span,) = of_kind(written(), "wait")
    assert span.outcome == "interrupted"


def test_run_records_its_workers_and_the_rendezvous(tmp_path: Path) -> None:
    program = (
        "import fscoord, os; fscoord.barrier(fscoord.open_store(timeout=30), 2, 'b', rank=int(os.environ['RANK']))"
    )
    command = [sys.executable, "-m", "fscoord", "run", "--nproc-per-node", "2", "--trace", "traces"]
    environment = {name: value for name, value in os.environ.items() if name != "FSCOORD_TRACE"}
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    trace = read(tmp_path / "traces")
    assert len(trace.processes) == 3
    workers = of_kind(trace, "worker")
    assert sorted((span.facts["worker_rank"], span.outcome, span.facts["status"]) for span in workers) == [
        (0, "exit", 0),
        (1, "exit", 0),
    ]
    addresses = {process.address for process in trace.processes if process.rank is not None}
    assert {span.facts["address"] for span in workers} == addresses
    assert [span.outcome for span in of_kind(trace, "rendezvous")] == ["passed"]
    (crossing,) = [crossing for crossing in trace.crossings if crossing.name == "b"]
    assert sorted(span.rank for span in crossing.spans) == [0, 1]


def test_worker_that_is_killed_has_its_signal_as_its_status(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fscoord", "run", "--trace", str(tmp_path), "--", "sh", "-c", "kill -9 $$"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    (span,) = of_kind(read(tmp_path), "worker")
    assert span.facts["status"] == -signal.SIGKILL


# Off


def test_process_without_a_trace_calls_no_function_of_the_recorder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What remains is the test of one global. Every path that records when there is a trace runs here without one."""
    monkeypatch.setattr(tracing, "recorder", None)
    called: list[str] = []

    def count(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and (code.co_filename == tracing.__file__ or "trace" in code.co_name.lower()):
            called.append(code.co_qualname if sys.version_info >= (3, 11) else code.co_name)

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        all_at_once([partial(at_barrier, path, rank, "b") for rank in (0, 1)])
        # In another store: in the first one each rank has a session that is closed, and a rank that comes first to a
        # fail-fast barrier may find the other rank dead.
        other = path.with_name("other")
        all_at_once([partial(at_barrier, other, rank, "f", fail_fast=True) for rank in (0, 1)])
        with FileStore(path) as store:
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], 0.3)
            store.set("k", "v")
            assert store.get("k") == b"v"
            with Lock(store, "l"):
                pass
            with Election(store, "e"):
                pass
            queue = Queue(store, "q")
            queue.put("x")
            queue.take().ack()
            synchronize(store, b"x", 0, 1, "s")
            store.compact()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert called == []


def test_state_of_a_store_without_a_trace_looks_for_no_writers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "recorder", None)
    with FileStore(path) as store:
        assert type(state_of(store)).__name__ == "KeyValueState"
