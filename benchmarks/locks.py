"""Locks between processes: what a pair costs where nobody else is, how soon the next has it, and who overtakes whom.

Beside ours: flock(2), the least that a lock can cost; portalocker and filelock, as they come; and the semaphore of
`multiprocessing`, which only processes of one family can share. Ours alone queues, survives its holder, and has tokens.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import filelock
import portalocker

import fscoord
from benchmarks import crew
from benchmarks.measure import Budget, Row, Settings, median, percentile, take_turns
from benchmarks.stores import LIMIT_S
from fscoord.recipes import Lock

OURS = "fscoord Lock"
FLOCK = "flock"
PORTALOCKER = "portalocker.Lock"
FILELOCK = "filelock.FileLock"
FAMILY = "multiprocessing.Lock"
LOCKS = (OURS, FLOCK, PORTALOCKER, FILELOCK, FAMILY)

PAIRS = 2000
HOLD_S = 0.001
"""How long each holds it: so long that the others are asleep by then."""

RUN_S = 1.5
MANY = 8


class Hold(NamedTuple):
    """One hold: when it was asked for, got and given back, by the monotonic clock of the host."""

    asked: float
    got: float
    released: float
    rank: int


class Flock:
    """flock(2) on a descriptor of its own."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def acquire(self) -> None:
        """Block until it is had."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Give it back."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)


def make(kind: str, path: str, family: Any) -> Any:
    """Return a lock of that kind at `path`, or `family`, which has been inherited."""
    if kind == OURS:
        store = fscoord.FileStore(path, timeout=LIMIT_S)
        with suppress(fscoord.StoreTimeoutError):
            store.wait(["never"], 0.01)  # loads what is loaded at the first wait
        return Lock(store, "lock")
    if kind == PORTALOCKER:
        return portalocker.Lock(path, mode="a", timeout=LIMIT_S)
    return {FLOCK: Flock, FILELOCK: filelock.FileLock, FAMILY: lambda _: family}[kind](path)


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row for one process, one for two that take turns, and one for eight that all want it."""
    rounds = settings.rounds(7)
    pairs, missing = take_turns(settings, LOCKS, rounds, lambda kind: alone(kind, settings), "lock and unlock")
    yield Row(
        "lock and unlock, one process",
        "µs",
        f"best of {rounds} rounds",
        {kind: min(taken) for kind, taken in pairs.items()},
        missing,
        budgets=[Budget("20 µs", limit=20.0)],
    )
    rounds = settings.rounds(3)
    kinds = LOCKS[:2] if settings.quick else LOCKS
    found, missing = take_turns(settings, kinds, rounds, lambda kind: together(kind, 2, settings), "lock handed over")
    late = {kind: [percentile(handed_over(holds), 0.5) for holds in lists] for kind, lists in found.items()}
    worst = {kind: max(max(handed_over(holds)) for holds in lists) for kind, lists in found.items()}
    yield Row(
        "lock, from a release to the next of 2 processes",
        "µs",
        f"p50, median of {rounds} rounds",
        {kind: median(values) for kind, values in late.items()},
        missing,
        {kind: {"worst, ms": value / 1e3} for kind, value in worst.items()},
        [Budget("200 µs", limit=200.0)],
    )
    if not settings.quick:
        found, missing = take_turns(
            settings, kinds, rounds, lambda kind: together(kind, MANY, settings), f"lock, {MANY} processes"
        )
    yield Row(
        f"lock, {2 if settings.quick else MANY} processes want it, the longest that one waits",
        "ms",
        f"median of {rounds} rounds",
        {
            kind: median(max(hold.got - hold.asked for hold in holds) * 1e3 for holds in lists)
            for kind, lists in found.items()
        },
        missing,
        {
            kind: {
                "overtaken by at most": median(max(overtakers(holds)) for holds in lists),
                "most to least holds": median(map(bias, lists)),
                "holds/s": median(map(rate, lists)),
            }
            for kind, lists in found.items()
        },
    )


def alone(kind: str, settings: Settings) -> float:
    """Return how long a pair takes where nobody else is, in µs."""
    count = 10 if settings.quick else 100 if kind in (PORTALOCKER, FILELOCK) else PAIRS
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=settings.directory) as place:
        lock = make(kind, str(Path(place, "lock")), multiprocessing.Lock())
        lock.acquire()
        lock.release()
        begin = time.perf_counter()
        for _ in range(count):
            lock.acquire()
            lock.release()
        return (time.perf_counter() - begin) / count * 1e6


def together(kind: str, size: int, settings: Settings) -> list[Hold]:
    """Return all holds of `size` processes that want it again and again, in the order in which they had it."""
    family = multiprocessing.get_context("forkserver").Lock()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=settings.directory) as place:
        lists = crew.run(want, size, kind, str(Path(place, "lock")), family, 0.01 if settings.quick else RUN_S)
    return sorted((hold for holds in lists for hold in holds), key=lambda hold: hold.got)


def want(member: crew.Member, kind: str, path: str, family: Any, seconds: float) -> list[Hold]:
    """Have the lock again and again for so long, once at least."""
    lock = make(kind, path, family)
    lock.acquire()
    lock.release()
    member.start()
    holds: list[Hold] = []
    clock = time.monotonic
    end = clock() + seconds
    while not holds or clock() < end:
        asked = clock()
        lock.acquire()
        got = clock()
        time.sleep(HOLD_S)
        released = clock()
        lock.release()
        holds.append(Hold(asked, got, released, member.rank))
    return holds


def handed_over(holds: list[Hold]) -> list[float]:
    """Return how long it took from each release to the hold of another, who waited, in µs."""
    return [
        (after.got - max(before.released, after.asked)) * 1e6
        for before, after in pairwise(holds)
        if before.rank != after.rank
    ]


def longest_wait(holds: list[Hold]) -> float:
    """Return how long the one waited that waited longest, in ms."""
    return max(hold.got - hold.asked for hold in holds) * 1e3


def overtakers(holds: list[Hold]) -> list[int]:
    """Return for each hold how many had it before who asked for it later."""
    return [sum(other.asked > hold.asked for other in holds[:place]) for place, hold in enumerate(holds)]


def bias(holds: list[Hold]) -> float:
    """Return how many holds the process had that had most, for one of the process that had least."""
    counts = [sum(hold.rank == rank for hold in holds) for rank in {hold.rank for hold in holds}]
    return max(counts) / min(counts)


def rate(holds: list[Hold]) -> float:
    """Return the holds in a second."""
    return len(holds) / (holds[-1].released - holds[0].got)
