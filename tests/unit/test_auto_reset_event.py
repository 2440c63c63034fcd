"""`AutoResetEvent`: it wakes one wait, and no wait sleeps for long in one system call."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest

from fscoord._runtime import system
from fscoord._runtime.system import SLEEP_MAX_S, AutoResetEvent


class Clock:
    """A lock and a clock: time passes while the lock is waited for."""

    def __init__(self, comes_at: float = math.inf) -> None:
        self.now, self.comes_at = 0.0, comes_at
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def acquire(self, *, timeout: float) -> bool:
        self.sleeps.append(timeout)
        self.now = min(self.now + timeout, max(self.now, self.comes_at))
        return self.now >= self.comes_at


def wait_by(clock: Clock, seconds: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    wakeup: Any = AutoResetEvent()
    wakeup._lock = clock
    monkeypatch.setattr(system, "time", clock)
    return bool(wakeup.wait(seconds))


@pytest.mark.parametrize("seconds", [0.0, 0.2, SLEEP_MAX_S, 2.5, 60.0])
def test_wait_ends_in_time_and_sleeps_for_a_second_at_most(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes just before the system call does not end it; the next call does."""
    clock = Clock()
    assert not wait_by(clock, seconds, monkeypatch)
    assert clock.now == pytest.approx(seconds)
    assert max(clock.sleeps) <= SLEEP_MAX_S


def test_wait_without_limit_ends_when_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(comes_at=7.25)
    assert wait_by(clock, math.inf, monkeypatch)
    assert clock.now == 7.25
    assert max(clock.sleeps) <= SLEEP_MAX_S


def test_time_that_is_over_is_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    assert not wait_by(clock, -3.0, monkeypatch)
    assert clock.sleeps == [0.0]


def test_wakeup_that_was_set_before_ends_one_wait_at_once() -> None:
    wakeup = AutoResetEvent()
    assert wakeup.set()
    assert not wakeup.set()
    assert wakeup.wait(60)
    assert not wakeup.wait(0)


def test_wakeup_ends_the_wait_of_another_thread() -> None:
    wakeup = AutoResetEvent()
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(wakeup.wait(60)))
    thread.start()
    wakeup.set()
    thread.join(60)
    assert woken == [True]
