"""All processes meet at barriers, each with a key of its own: the time and the cost of each barrier.

The cost is processor time per rank, of all processes and of TCPStore's server. A machine with a core for each rank
would show the same cost, but not the same time on the clock. The floor is the prototype in `barrier_floor.py`: the same
record format, locks and wake-ups, without recovery, deadlines, liveness and threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import fscoord
from benchmarks import barrier_floor, bell, crew
from benchmarks.measure import Budget, Row, ServerTime, Settings, median, percentile, take_turns
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP, Place, fresh

PROCESSES = (2, 8, 16, 32, 64, 128, 200)
PROCESSES_QUICK = (2, 8)
PEERS_MAX = 128
"""So many processes at most meet in other stores than ours."""

RANKS = "fscoord.barrier, ranks"
STORE = "Store.barrier"
KEYS = "fscoord FileStore, by keys"
TCP_KEYS = "torch TCPStore, by keys"
"""The barrier of torch's elastic utilities: all add, the last one sets, all wait."""
TCP_OWN = "torch TCPStore, its own"
"""A single request, which the server holds back until all have come."""
FILE_KEYS = "torch FileStore, by keys"
FLOOR = "bare floor"
KINDS = {
    RANKS: OURS,
    STORE: OURS,
    KEYS: OURS,
    TCP_KEYS: TORCH_TCP,
    TCP_OWN: TORCH_TCP,
    FILE_KEYS: TORCH_FILE,
    FLOOR: OURS,
}

FACTORS = (
    (RANKS, TCP_KEYS, {2: 2.0, 8: 1.5, 16: 1.5, 32: 1.5, 64: 1.5}),
    (RANKS, TCP_OWN, {8: 1.0, 16: 1.0, 32: 1.0, 64: 1.0}),
    (STORE, TCP_KEYS, {8: 0.95, 16: 0.9, 32: 0.9, 64: 0.5}),
    (KEYS, TCP_KEYS, {8: 0.9, 16: 0.9, 32: 0.9, 64: 0.6}),
)
"""The budgets: a way to meet, its peer, and how many times as fast it is at least, by the number of processes."""

FLOOR_NAP_S = 0.0001
WARM_UP = 5
SPENT = "processor time per rank"


class Meetings(NamedTuple):
    """The results of a process: begin and end, its processor time, and the time of each barrier, all in seconds."""

    begin: float
    end: float
    spent: float
    taken: list[float]


class Found(NamedTuple):
    """A round: ms per barrier, µs of processor time per rank and barrier, and the time of each barrier in ms."""

    wall: float
    spent: float
    taken: list[float]


def measure(settings: Settings) -> Iterator[Row]:
    """Yield two rows per number of processes: the time on the clock, and the processor time."""
    before: dict[int, float] = {}
    for size in PROCESSES_QUICK if settings.quick else PROCESSES:
        rounds = settings.rounds(5 if size <= 32 else 3)
        found, missing = take_turns(
            settings,
            [kind for kind in KINDS if size <= PEERS_MAX or (KINDS[kind] == OURS and kind != FLOOR)],
            rounds,
            partial(once, size=size, settings=settings),
            f"barrier of {size} processes",
            {FLOOR: bell.lacks(size)},
        )
        wall = {kind: median(each.wall for each in lists) for kind, lists in found.items()}
        spent = {kind: median(each.spent for each in lists) for kind, lists in found.items()}
        statistic = f"mean, median of {rounds} rounds"
        details = {
            kind: {
                **_ratios(wall, kind),
                "p50": median(percentile(each.taken, 0.5) for each in lists),
                "worst": max(max(each.taken) for each in lists),
            }
            for kind, lists in found.items()
        }
        of_wall, of_spent = _budgets(size, before)
        yield Row(f"barrier of {size} processes", "ms", statistic, wall, missing, details, of_wall)
        details = {kind: _ratios(spent, kind) for kind in spent}
        yield Row(f"barrier of {size} processes, {SPENT}", "µs", statistic, spent, missing, details, of_spent)
        before[size] = spent[RANKS]


def _ratios(values: dict[str, float], kind: str) -> dict[str, float]:
    names = {"times the floor": FLOOR, "times TCPStore": TCP_KEYS}
    return {name: values[kind] / values[peer] for name, peer in names.items() if peer in values}


def _budgets(size: int, before: dict[int, float]) -> tuple[list[Budget], list[Budget]]:
    wall = [
        Budget(f"{of} {factors[size]:g} times as fast", peer, factors[size], of=of)
        for of, peer, factors in FACTORS
        if size in factors
    ]
    if 8 <= size <= 64:
        return wall, [Budget("at most the floor", FLOOR)]
    if size <= 64:
        return wall, []
    than, factor = (8, 1.3) if size <= PEERS_MAX else (PEERS_MAX, size / PEERS_MAX)
    return wall, [Budget(f"{factor:.4g} times that of {than} processes", limit=before[than] * factor)]


def once(kind: str, size: int, settings: Settings) -> Found:
    """Run one round, in which `size` processes meet in one way."""
    count = 3 if settings.quick else max(20, 60 - size) if kind == FILE_KEYS else max(30, 3000 // size)
    with fresh(KINDS[kind], settings.directory) as place:
        if kind == FLOOR:
            crew.run(make_floor, 1, place)
        server = ServerTime()
        found = crew.run(meet, size, place, kind, count, during=server)
    spent = sum(each.spent for each in found) + (server.spent if KINDS[kind] == TORCH_TCP else 0.0)
    wall = max(each.end for each in found) - min(each.begin for each in found)
    return Found(
        wall / count * 1e3, spent / size / count * 1e6, [taken * 1e3 for each in found for taken in each.taken]
    )


def make_floor(member: crew.Member, place: Place) -> None:
    """Make the files of the floor, and no descriptor of them in the process that measures."""
    barrier_floor.S(place.address)
    member.start()


def meet(member: crew.Member, place: Place, kind: str, count: int) -> Meetings:
    """Pass a few uncounted barriers, begin together with the other processes, and pass `count` barriers."""
    barrier = way_to_meet(member, place, kind)
    for number in range(WARM_UP):
        barrier(f"warm.{number}")
    member.start()
    clock = time.perf_counter
    spent = time.process_time()
    moments = [clock()]
    for number in range(count):
        barrier(f"barrier.{number}")
        moments.append(clock())
    spent = time.process_time() - spent
    taken = [after - before for before, after in pairwise(moments)]
    return Meetings(moments[0], moments[-1], spent, taken)


def way_to_meet(member: crew.Member, place: Place, kind: str) -> Callable[[str], object]:
    """Return the function that a process calls with the key of a barrier."""
    size, rank = member.size, member.rank
    if kind == FLOOR:
        barrier_floor.STRAT_LOCK, barrier_floor.NAP = "n", FLOOR_NAP_S
        floor = barrier_floor.S(place.address)
        return lambda key: floor.barrier(key.encode(), size)
    store = place.open()
    if kind == RANKS:
        return lambda key: fscoord.barrier(store, size, key, rank=rank)
    if kind in (STORE, TCP_OWN):
        return lambda key: store.barrier(key, size)
    return lambda key: barrier_by_keys(store, key, size)


def barrier_by_keys(store: Any, key: str, world_size: int) -> None:
    """Meet as `torch.distributed.elastic.utils.store.barrier` does."""
    if store.add(f"{key}/num_members", 1) == world_size:
        store.set(f"{key}/last_member", "1")
    store.wait([f"{key}/last_member"])
