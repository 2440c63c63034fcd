"""A call that does not return is logged at growing intervals, and a call that has returned is not."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from fscoord._log.shared import hang_watchdog
from fscoord._log.shared.hang_watchdog import FIRST_S, HangWatchdog, KernelCall
from fscoord._runtime import system

HANG_S = 60


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(system, "time", found)
    return found


@pytest.fixture
def call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelCall]:
    """A call of which a thread of its own takes care, whatever else this process has open."""
    monkeypatch.setattr(hang_watchdog, "_open", weakref.WeakSet())
    monkeypatch.setattr(hang_watchdog, "_watchdog", HangWatchdog())
    found = KernelCall("/some/where")
    yield found
    thread = hang_watchdog._watchdog._thread
    found.close()
    if thread is not None:
        thread.join(HANG_S)


@pytest.fixture(autouse=True)
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The log records, without their texts."""
    found: list[tuple[object, ...]] = []

    class Logger:
        def warning(self, _: str, *values: object) -> None:
            found.append(values)

    monkeypatch.setattr(hang_watchdog, "logger", lambda _: Logger())
    return found


def test_watchdog_warns_of_a_stuck_call_at_doubling_intervals(
    call: KernelCall, clock: Clock, told: list[tuple[object, ...]]
) -> None:
    for _ in range(2):  # each call by itself
        told.clear()
        call.begin()
        for seconds in range(9 * int(FIRST_S)):
            call.warn_if_stuck(clock.now + seconds)
        assert told == [("/some/where", FIRST_S * times, "Does its server answer?") for times in (1, 2, 4, 8)]
        call.end()
        call.warn_if_stuck(clock.now + 1e6)
        assert len(told) == 4
