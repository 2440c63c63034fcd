"""torch's process groups on gloo, over each store: the time to make one, and the time of a monitored barrier in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from benchmarks import crew
from benchmarks.measure import Row, Settings, median, percentile, take_turns
from benchmarks.stores import LIMIT_S, OURS, TORCH_FILE, TORCH_TCP, Place, fresh, is_missing

PROCESSES = (2, 4, 8)
PROCESSES_QUICK = (2,)
BARRIERS = 10
"""In each group. A group that is made does not ask its store again, so that these are not about the store."""


Span = tuple[float, float]


def measure(settings: Settings) -> Iterator[Row]:
    """Yield two rows per number of processes. Without torch there are no rows, because all stores here need torch."""
    reason = is_missing(TORCH_FILE)
    if reason:
        settings.report(f"process groups are not measured: {reason}")
        return
    rounds = settings.rounds(5)
    for size in PROCESSES_QUICK if settings.quick else PROCESSES:

        def once(store: str, size: int = size) -> tuple[list[float], list[float]]:
            with fresh(store, settings.directory) as place:
                members = crew.run(groups, size, place, 1 if settings.quick else 10)
            made, met = zip(*members, strict=True)
            return from_last_call_to_last_return(made), from_last_call_to_last_return(met)

        found, missing = take_turns(
            settings, (OURS, TORCH_FILE, TORCH_TCP), rounds, once, f"process groups of {size} processes"
        )
        for which, work in enumerate(("init_process_group", "monitored_barrier")):
            yield Row(
                f"{work}, {size} processes",
                "ms",
                f"p50 of {len(found[OURS][0][which])}, median of {rounds} rounds",
                {store: median(percentile(lists[which], 0.5) for lists in all_) for store, all_ in found.items()},
                missing,
                {store: {"worst": max(max(lists[which]) for lists in all_)} for store, all_ in found.items()},
            )


def from_last_call_to_last_return(spans: Sequence[list[Span]]) -> list[float]:
    """Return, for each common call of all processes, the ms from the last call to the last return."""
    return [
        (max(end for _, end in time_) - max(begin for begin, _ in time_)) * 1e3 for time_ in zip(*spans, strict=True)
    ]


def groups(member: crew.Member, place: Place, count: int) -> tuple[list[Span], list[Span]]:
    """Make `count` process groups, one after the other; return the times of each begin and end, and of a barrier.

    The first group does not count, because torch then opens files that it keeps open.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch.distributed as dist

    limit = timedelta(seconds=LIMIT_S)
    store = store_for_torch(place)
    made, met = [], []
    member.start()
    for number in range(count + 1):
        begin = time.monotonic()
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"{number}", store), rank=member.rank, world_size=member.size, timeout=limit
        )
        made.append((begin, time.monotonic()))
        for _ in range(BARRIERS):
            begin = time.monotonic()
            dist.monitored_barrier(timeout=limit)
            met.append((begin, time.monotonic()))
        dist.destroy_process_group()
    return made[1:], met[BARRIERS:]


def store_for_torch(place: Place) -> Any:
    """Return the store at `place` in the form that torch takes."""
    if place.store != OURS:
        return place.open()
    from fscoord.integrations.torch import TorchStore

    return TorchStore(place.open())
