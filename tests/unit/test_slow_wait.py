"""Long waits are logged, at growing intervals."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from faults.test_fork import until
from support.internals import SlowWaitLogger, line_module as _line, system, timing
from support.places import start_thread

from fscoord import FileStore, barrier
from fscoord.recipes import Lock

HANG_S = 60


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def spoken(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "fscoord")
    return lambda: [record.getMessage() for record in caplog.records]


def test_wait_is_logged_after_30_seconds_and_then_at_doubling_intervals(
    spoken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(timing.system, "time", clock)
    slow_logger = SlowWaitLogger("fscoord.test", lambda: "it")
    for _ in range(1000):
        slow_logger.warn_if_due()
        clock.now += 1
    assert spoken() == [f"still waiting for it, after {seconds} s" for seconds in (30, 60, 120, 240, 480, 960)]


def test_log_message_of_a_long_wait_names_the_awaited_key(
    spoken: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "FIRST_S", 0.01)
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, FileStore(tmp_path / "store") as other:
        for wait in (store.get, store.queue_pop):
            with start_thread(wait, "k") as waiter:
                until(spoken)
                (other.set if wait == store.get else other.queue_push)("k", "v")
            assert waiter.result == b"v"
    told = rf"still waiting for the value of key 'k' in {re.escape(str(tmp_path))}/store, after \d+ s"
    assert any(re.fullmatch(told, line) for line in spoken())
    assert all("still waiting for" in line for line in spoken())


def test_short_wait_is_not_logged(spoken: Any, tmp_path: Any) -> None:
    with FileStore(tmp_path / "store", timeout=0.05) as store, pytest.raises(TimeoutError):
        store.get("k")
    assert spoken() == []


@pytest.mark.parametrize("fail_fast", [False, True])
def test_log_message_of_a_long_barrier_names_the_missing_ranks(
    fail_fast: bool, spoken: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "FIRST_S", 0.05)

    def come(rank: int) -> None:
        with FileStore(tmp_path / "store", timeout=HANG_S) as store:
            barrier(store, 3, "b", HANG_S, rank, fail_fast=fail_fast)

    with start_thread(come, 0):
        until(spoken)
        with start_thread(come, 1), start_thread(come, 2):
            pass
    told = r"still waiting for barrier 'b' on rank 0 \(1 of 3 arrived, missing ranks 1, 2; late: .*\), after \d+ s"
    assert re.fullmatch(told, spoken()[0])


def test_log_message_of_a_long_barrier_says_who_is_dead_and_who_is_stopped(
    spoken: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "FIRST_S", 0.05)
    monkeypatch.setattr(system, "process_state", lambda _: "T")
    path = tmp_path / "store"
    FileStore(path, rank=1).close()
    with (
        FileStore(path, timeout=HANG_S) as store,
        FileStore(path, rank=2, timeout=HANG_S) as other,
        start_thread(barrier, store, 4, "b", HANG_S, 0),
    ):
        until(spoken)
        for rank in (1, 2, 3):
            other.append("b/arrivals", f"{rank}/4 ")
        other.set("b/complete", "1")
    late = r"late: rank 2 \(\S+, stopped\), rank 3 \(not seen in this store\)"
    missing = rf"missing ranks 1, 2, 3; dead: rank 1 .*; {late}"
    told = rf"still waiting for barrier 'b' on rank 0 \(1 of 4 arrived, {missing}\), after \d+ s"
    assert re.fullmatch(told, spoken()[0])


def test_log_message_of_a_long_wait_for_a_lock_says_that_its_holder_is_stopped(
    spoken: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "FIRST_S", 0.05)
    monkeypatch.setattr(_line, "SLOW_LOOK_S", 0.05)
    monkeypatch.setattr(system, "process_state", lambda _: "T")
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, FileStore(tmp_path / "store") as other:
        held = Lock(other, "l")
        held.acquire()
        with start_thread(Lock(store, "l").acquire, True, HANG_S):
            until(spoken)
            held.release()
    assert re.search(r"a turn at 'l' \(held by \S+:\d+, which is stopped, nobody else waiting\)", spoken()[0])


def test_time_out_of_a_barrier_tells_a_stopped_rank_from_one_that_runs(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(tmp_path / "store") as store, FileStore(tmp_path / "store", rank=1):
        for state, words in (("S", "alive"), ("T", "stopped")):
            monkeypatch.setattr(system, "process_state", lambda _, state=state: state)
            with pytest.raises(
                TimeoutError, match=rf"late: rank 1 \(\S+:\d+, {words}\); to look closer, run fscoord ps"
            ):
                barrier(store, 2, f"b{state}", 0.01, 0)


def test_barrier_ends_at_its_deadline_though_its_wait_is_logged(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FIRST_S", 0.01)
    with (
        FileStore(tmp_path / "store", timeout=HANG_S) as store,
        pytest.raises(TimeoutError, match=r"missing_ranks=\[1\]"),
    ):
        barrier(store, 2, "b", 0.1, 0)
