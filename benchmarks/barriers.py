"""All processes meet at a barrier of the store, again and again, each time with another key."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks import crew
from benchmarks.measure import Budget, Row, Settings, median, percentile, take_turns
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP, Place, fresh

PROCESSES = (2, 8, 16, 32, 64)
PROCESSES_QUICK = (2, 8)
BY_KEYS = f"{TORCH_TCP}, by keys"
"""The barrier of torch's elastic utilities on a TCPStore: add, the last one sets, all wait. Its own is one request."""


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row per number of processes."""
    rounds = settings.rounds(5)
    for size in PROCESSES_QUICK if settings.quick else PROCESSES:

        def once(store: str, size: int = size) -> list[float]:
            count = 3 if settings.quick else 40 if store == TORCH_FILE else max(100, 1600 // size)
            with fresh(TORCH_TCP if store == BY_KEYS else store, settings.directory) as place:
                lists = crew.run(meetings, size, place, count, store == BY_KEYS)
                return [taken for times in lists for taken in times]

        found, missing = take_turns(
            settings, (OURS, TORCH_FILE, TORCH_TCP, BY_KEYS), rounds, once, f"barrier of {size} processes"
        )
        yield Row(
            f"barrier of {size} processes",
            "ms",
            f"p50, median of {rounds} rounds",
            {store: median(percentile(times, 0.5) for times in lists) for store, lists in found.items()},
            missing,
            {
                store: {
                    "p99": median(percentile(times, 0.99) for times in lists),
                    "worst": max(max(times) for times in lists),
                }
                for store, lists in found.items()
            },
            [Budget("faster", TORCH_TCP, 1.0)],
        )


def meetings(member: crew.Member, place: Place, count: int, by_keys: bool) -> list[float]:
    """Meet `count` times and return what each took, in ms. The first, for which all must first come, does not count."""
    store = place.open()
    meet = barrier_by_keys if by_keys else type(store).barrier
    taken = []
    member.start()
    meet(store, "first", member.size)
    for number in range(count):
        before = time.perf_counter()
        meet(store, f"barrier.{number}", member.size)
        taken.append((time.perf_counter() - before) * 1e3)
    return taken


def barrier_by_keys(store: Any, key: str, world_size: int) -> None:
    """Meet as `torch.distributed.elastic.utils.store.barrier` does."""
    if store.add(f"{key}/num_members", 1) == world_size:
        store.set(f"{key}/last_member", "1")
    store.wait([f"{key}/last_member"])
