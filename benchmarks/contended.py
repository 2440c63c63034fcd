"""Several processes add to one counter as fast as they can: the additions per second, their cost, and the waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from benchmarks import crew
from benchmarks.measure import Budget, Row, ServerTime, Settings, median, take_turns
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP, Place, fresh

PROCESSES = (2, 4, 8, 16)
FACTORS = {8: 1.3, 16: 1.2}
"""The budgets: how many times as many additions as with TCPStore, by the number of processes."""
TOTAL = 48_000
FAIR_S = 0.05
"""How long a call may take at most; which share of the calls did is a figure."""


class Additions(NamedTuple):
    """The results of a process: begin, end and longest wait in s, calls longer than `FAIR_S`, processor time."""

    begin: float
    end: float
    worst: float
    late: int
    spent: float


class Found(NamedTuple):
    """A round: 1000 calls per second, µs of processor time per call, the longest wait in ms, % of the calls in time."""

    rate: float
    spent: float
    worst: float
    in_time: float


def measure(settings: Settings) -> Iterator[Row]:
    """Yield four rows per number of processes."""
    rounds = settings.rounds(5)
    for size in PROCESSES:
        found, missing = take_turns(
            settings,
            (OURS, TORCH_FILE, TORCH_TCP),
            rounds,
            partial(once, size=size, settings=settings),
            f"contended add, {size} processes",
        )
        work = f"add, {size} processes at once"
        statistic = f"median of {rounds} rounds"
        judged = size in FACTORS
        yield Row(
            work,
            "k/s",
            statistic,
            {store: median(each.rate for each in lists) for store, lists in found.items()},
            missing,
            budgets=[Budget(f"{FACTORS[size]:g} times as many", TORCH_TCP, FACTORS[size])] if judged else [],
            more_is_better=True,
        )
        yield Row(
            f"{work}, processor time",
            "µs",
            statistic,
            {store: median(each.spent for each in lists) for store, lists in found.items()},
            missing,
        )
        yield Row(
            f"{work}, longest wait",
            "ms",
            f"worst of {rounds} rounds",
            {store: max(each.worst for each in lists) for store, lists in found.items()},
            missing,
            {store: {"median of rounds": median(each.worst for each in lists)} for store, lists in found.items()},
            [Budget("at most 100", limit=100.0)] if judged else [],
        )
        yield Row(
            f"{work}, waits of at most 50 ms",
            "%",
            f"worst of {rounds} rounds",
            {store: min(each.in_time for each in lists) for store, lists in found.items()},
            missing,
            budgets=[Budget("at least 99.9", limit=99.9)] if judged else [],
            more_is_better=True,
        )


def once(store: str, size: int, settings: Settings) -> Found:
    """Run one round, in which `size` processes add."""
    count = 10 if settings.quick else TOTAL // size
    with fresh(store, settings.directory) as place:
        server = ServerTime()
        found = crew.run(additions, size, place, count, during=server)
        total = place.open().add("counter", 0)
    if total != size * count:
        raise RuntimeError(f"{store} counted {total} of {size * count} additions")
    seconds = max(each.end for each in found) - min(each.begin for each in found)
    spent = sum(each.spent for each in found) + (server.spent if store == TORCH_TCP else 0.0)
    return Found(
        total / seconds / 1e3,
        spent / total * 1e6,
        max(each.worst for each in found) * 1e3,
        100.0 - 100.0 * sum(each.late for each in found) / total,
    )


def additions(member: crew.Member, place: Place, count: int) -> Additions:
    """Add `count` times."""
    store = place.open()
    for _ in range(5):
        store.add("warm", 1)
    clock = time.perf_counter
    worst = 0.0
    late = 0
    member.start()
    spent = time.process_time()
    begin = before = clock()
    for _ in range(count):
        store.add("counter", 1)
        after = clock()
        if after - before > worst:
            worst = after - before
        if after - before > FAIR_S:
            late += 1
        before = after
    return Additions(begin, after, worst, late, time.process_time() - spent)
