"""The time from the `set` of one process to the return of the `get` of another: one way, with both awake or asleep."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import crew
from benchmarks.bell import Bell
from benchmarks.measure import Budget, Row, Settings, median, percentile, take_turns
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP, Place, fresh

BARE = "bare inotify"
PAUSE_S = 0.005
"""How long the setter sleeps before it sets. torch's FileStore looks every 10 ms: its next look is 5 ms away then."""

WARM_UP = 3
"""Exchanges that don't count: at its first wait a process imports what it needs for waiting."""


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for an exchange without pauses, and a row for a waiter that has long been asleep."""
    rounds = settings.rounds(7)
    for work, pause, usual in (("ping-pong", 0.0, 1000), ("after a pause of 5 ms", PAUSE_S, 100)):

        def once(kind: str, pause: float = pause, usual: int = usual) -> list[float]:
            count = 3 if settings.quick else usual // 10 if kind == TORCH_FILE and not pause else usual
            return exchange(kind, count, pause, settings.directory)

        found, missing = take_turns(settings, (OURS, TORCH_FILE, TORCH_TCP, BARE), rounds, once, f"wake-up, {work}")
        yield Row(
            f"wake-up, one way, {work}",
            "µs",
            f"p50, median of {rounds} rounds",
            {kind: median(percentile(times, 0.5) for times in lists) for kind, lists in found.items()},
            missing,
            {
                kind: {
                    "p99": median(percentile(times, 0.99) for times in lists),
                    "best p50": min(percentile(times, 0.5) for times in lists),
                }
                for kind, lists in found.items()
            },
            [Budget("1.5 times as fast", TORCH_TCP, 1.5)] if pause else [],
        )


def exchange(kind: str, count: int, pause: float, directory: str) -> list[float]:
    """Return the time of each wake-up, in µs, in an exchange of two processes."""
    with fresh(OURS if kind == BARE else kind, directory) as place:
        return one_way(place, count, pause, bare=kind == BARE)


def one_way(place: Place, count: int, pause: float, *, bare: bool = False) -> list[float]:
    """Return the time of each wake-up, in µs, in an exchange of two processes on the store at `place`."""
    (set_0, got_1), (set_1, got_0) = crew.run(set_and_get, 2, place, bare, count, pause)
    return [(got - begun) / 1e3 for begun, got in (*zip(set_0, got_0, strict=True), *zip(set_1, got_1, strict=True))]


def set_and_get(member: crew.Member, place: Place, bare: bool, count: int, pause: float) -> tuple[list[int], list[int]]:
    """Set a key that the other process waits for, wait for the answer, and repeat; return the times of each call.

    The clock is CLOCK_MONOTONIC, the same in all processes.
    """
    store: Any = Bell(place.address, member.rank) if bare else place.open()
    clock = time.perf_counter_ns
    begun, got = [], []
    member.start()
    for number in range(-WARM_UP, count):
        for setter in (0, 1):
            key = f"{setter}.{number}"
            if setter == member.rank:
                if pause:
                    time.sleep(pause)
                begun.append(clock())
                store.set(key, "1")
            else:
                store.get(key)
                got.append(clock())
    return begun[WARM_UP:], got[WARM_UP:]
