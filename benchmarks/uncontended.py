"""One process with one handle alone: the cost of each operation."""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from benchmarks.measure import Budget, Row, Settings, median, take_turns
from benchmarks.stores import OUR_HASH, OURS, TORCH_FILE, TORCH_HASH, TORCH_TCP, fresh, is_missing

OPERATIONS = {
    "set": 'store.set("key", "value")',
    "get": 'store.get("key")',
    "add": 'store.add("counter", 1)',
    "check": 'store.check(["key"])',
    "compare_set": 'store.compare_set("key", "value", "value")',
}
FACTORS = {"set": 1.2, "get": 1.0, "add": 1.5, "check": 1.0, "compare_set": 1.5}
"""The budgets: how many times as fast as torch's FileStore, on a machine whose system calls are slow."""
SECONDS_PER_MEASUREMENT = 0.02


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row per operation."""
    rounds = settings.rounds(15)
    stores = (OURS, TORCH_FILE, TORCH_TCP, TORCH_HASH, OUR_HASH)
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for store in stores:
            if not is_missing(store):
                handles[store] = stack.enter_context(fresh(store, settings.directory)).open()
                handles[store].set("key", "value")
        for operation, statement in OPERATIONS.items():
            timers = {store: timeit.Timer(statement, globals={"store": handles[store]}) for store in handles}
            counts = {store: 10 if settings.quick else _count(timer) for store, timer in timers.items()}

            def once(store: str, timers: Any = timers, counts: Any = counts) -> float:
                return float(timers[store].timeit(counts[store]) / counts[store] * 1e6)

            found, missing = take_turns(settings, stores, rounds, once, operation)
            yield Row(
                f"{operation}, one process",
                "µs",
                f"best of {rounds} rounds",
                {store: min(times) for store, times in found.items()},
                missing,
                {store: {"median of rounds": median(times)} for store, times in found.items()},
                [Budget(f"{FACTORS[operation]:g} times as fast", TORCH_FILE, FACTORS[operation])],
            )
        for handle in handles.values():
            if hasattr(handle, "close"):
                handle.close()
        handles.clear()


def _count(timer: timeit.Timer) -> int:
    timer.timeit(100)
    return max(100, int(SECONDS_PER_MEASUREMENT / (timer.timeit(200) / 200)))
