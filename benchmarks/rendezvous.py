"""Eight nodes meet in a rendezvous: the time from the last call to the last return."""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks import crew
from benchmarks.measure import Budget, Row, Settings, median, percentile, take_turns
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP, Place, fresh

NODES = 8
NODES_QUICK = 2
BUDGET_MS = 100.0


def measure(settings: Settings) -> Iterator[Row]:
    """Yield the only row."""
    rounds = settings.rounds(5)
    nodes = NODES_QUICK if settings.quick else NODES

    def once(store: str) -> list[float]:
        with fresh(store, settings.directory) as place:
            times = crew.run(meet, nodes, place, 1 if settings.quick else 5)
        return [
            (max(end for _, end in meeting) - max(begin for begin, _ in meeting)) * 1e3
            for meeting in zip(*times, strict=True)
        ]

    found, missing = take_turns(settings, (OURS, TORCH_FILE, TORCH_TCP), rounds, once, f"rendezvous of {nodes} nodes")
    yield Row(
        f"rendezvous of {nodes} nodes",
        "ms",
        f"p50 of {len(found[OURS][0])} meetings, median of {rounds} rounds",
        {store: median(percentile(times, 0.5) for times in lists) for store, lists in found.items()},
        missing,
        {store: {"worst": max(max(times) for times in lists)} for store, lists in found.items()},
        [Budget("under 100 ms", limit=BUDGET_MS), Budget("faster", TORCH_TCP, 1.0)],
    )


def meet(member: crew.Member, place: Place, count: int) -> list[tuple[float, float]]:
    """Join `count` rendezvous, each with a name of its own; return when each call began and ended."""
    store = place.open()
    spans = []
    member.start()
    for number in range(count):
        handler = make_handler(place, store, f"meeting-{number}", member.size)
        begin = time.monotonic()
        handler.next_rendezvous()
        spans.append((begin, time.monotonic()))
    return spans


def make_handler(place: Place, store: object, run_id: str, nodes: int) -> object:
    """Return the handler of the process that opened `store`."""
    if place.store == OURS:
        from fscoord.rendezvous import C10dRendezvousBackend, DynamicRendezvousHandler
    else:
        from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
        from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
    return DynamicRendezvousHandler.from_backend(run_id, store, C10dRendezvousBackend(store, run_id), nodes, nodes)
