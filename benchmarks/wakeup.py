"""How long after one process began to set a key the other's get returns it: one way, both processes awake or asleep."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from benchmarks import crew
from benchmarks.measure import Budget, Row, Settings, median, percentile, take_turns
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP, Place, fresh

PAUSE_S = (0.001, 0.011)
"""How long the setter waits before it sets: torch's FileStore looks every 10 ms, so any moment of that is as likely."""

WARM_UP = 3
"""Exchanges that don't count: at its first wait a process imports what it needs for waiting."""


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for an exchange without pauses, and one in which the waiter has long been asleep."""
    rounds = settings.rounds(7)
    for work, pause, usual in (("ping-pong", False, 1000), ("after a pause", True, 100)):

        def once(store: str, pause: bool = pause, usual: int = usual) -> list[float]:
            count = 3 if settings.quick else usual // 10 if store == TORCH_FILE and not pause else usual
            with fresh(store, settings.directory) as place:
                first, second = crew.run(exchange, 2, place, count, pause)
                return [*first, *second]

        found, missing = take_turns(settings, (OURS, TORCH_FILE, TORCH_TCP), rounds, once, f"wake-up, {work}")
        yield Row(
            f"wake-up, one way, {work}",
            "µs",
            f"p50, median of {rounds} rounds",
            {store: median(percentile(times, 0.5) for times in lists) for store, lists in found.items()},
            missing,
            {
                store: {
                    "p99": median(percentile(times, 0.99) for times in lists),
                    "best p50": min(percentile(times, 0.5) for times in lists),
                }
                for store, lists in found.items()
            },
            [Budget("2x faster", TORCH_TCP, 2.0), Budget("100x faster", TORCH_FILE, 100.0)],
        )


def exchange(member: crew.Member, place: Place, count: int, pause: bool) -> list[float]:
    """Set a key that the other waits for, wait for the answer, and so on; return what each wake-up took, in µs.

    The clock is CLOCK_MONOTONIC, the same in all processes; the time of the call to `set` is in the value.
    """
    store = place.open()
    dice = random.Random(member.rank)
    taken = []
    member.start()
    for number in range(-WARM_UP, count):
        for setter in (0, 1):
            key = f"{setter}.{number}"
            if setter == member.rank:
                if pause:
                    time.sleep(dice.uniform(*PAUSE_S))
                store.set(key, str(time.perf_counter_ns()))
            else:
                value = store.get(key)
                if number >= 0:
                    taken.append((time.perf_counter_ns() - int(value)) / 1e3)
    return taken
