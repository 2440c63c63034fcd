"""Several processes add to one counter as fast as they can: how many additions a second, and the worst wait for one."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import crew
from benchmarks.measure import Budget, Row, Settings, median, take_turns
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP, Place, fresh

PROCESSES = (2, 4, 8)


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row per number of processes."""
    rounds = settings.rounds(5)
    for size in PROCESSES:

        def once(store: str, size: int = size) -> tuple[float, float]:
            count = 10 if settings.quick else 48_000 // size
            with fresh(store, settings.directory) as place:
                results = crew.run(additions, size, place, count)
                total = place.open().add("counter", 0)
            if total != size * count:
                raise RuntimeError(f"{store} counted {total} of {size * count} additions")
            begin = min(begin for begin, _, _ in results)
            end = max(end for _, end, _ in results)
            return total / (end - begin) / 1e3, max(worst for _, _, worst in results) * 1e3

        found, missing = take_turns(
            settings, (OURS, TORCH_FILE, TORCH_TCP), rounds, once, f"contended add, {size} processes"
        )
        budgets = [Budget("2x as many", TORCH_FILE, 2.0), Budget("2x as many", TORCH_TCP, 2.0)]
        yield Row(
            f"add, {size} processes at once",
            "k/s",
            f"median of {rounds} rounds",
            {store: median(rate for rate, _ in results) for store, results in found.items()},
            missing,
            {store: {"worst wait, ms": median(worst for _, worst in results)} for store, results in found.items()},
            budgets if size == 8 else [],
            more_is_better=True,
        )


def additions(member: crew.Member, place: Place, count: int) -> tuple[float, float, float]:
    """Add `count` times; return when the first began, when the last ended, and the longest that one took, in s."""
    store = place.open()
    store.add("warm", 1)
    clock = time.perf_counter
    worst = 0.0
    member.start()
    begin = before = clock()
    for _ in range(count):
        store.add("counter", 1)
        after = clock()
        worst = max(worst, after - before)
        before = after
    return begin, after, worst
