"""Long waits are spoken of, ever more rarely."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from faults.test_fork import until
from support.places import start_thread

from fscoord import FileStore, barrier
from fscoord._waiting import timing
from fscoord._waiting.timing import SlowWaitLogger

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
    told = r"still waiting for barrier 'b' on rank 0 \(1 of 3 arrived, missing ranks 1, 2\), after \d+ s"
    assert re.fullmatch(told, spoken()[0])


def test_barrier_ends_at_its_deadline_though_its_wait_is_logged(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FIRST_S", 0.01)
    with (
        FileStore(tmp_path / "store", timeout=HANG_S) as store,
        pytest.raises(TimeoutError, match=r"missing_ranks=\[1\]"),
    ):
        barrier(store, 2, "b", 0.1, 0)
