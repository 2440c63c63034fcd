"""Locks between processes: the cost of lock and unlock, the time to the next holder, and overtaking.

Overtaking counts from the call of `acquire`: a process may be overtaken until it has written its place in the line. No
process in the line is overtaken. A test shows this from the log: see `arrivals` in tests/contract/test_locks.py.

fscoord's lock is compared with flock(2), the cheapest lock; with portalocker and filelock, with their defaults; and
with the semaphore of `multiprocessing`, which only a process and its children can share. Only fscoord's lock queues,
survives its holder, and has tokens.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
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
from benchmarks.wakeup import BARE, exchange
from fscoord.recipes import Lock

OURS = "fscoord Lock"
FLOCK = "flock"
PORTALOCKER = "portalocker.Lock"
FILELOCK = "filelock.FileLock"
FAMILY = "multiprocessing.Lock"
LOCKS = (OURS, FLOCK, PORTALOCKER, FILELOCK, FAMILY)
WRITES = "two compare_set"
"""The least that a pair of ours can cost."""

PAIRS = 500
HOLD_S = 0.001
"""How long each holds it: so long that the others are asleep by then."""

RUN_S = 1.5
MANY = 8
PAUSE_S = 0.05
"""How long one waits for it when its holder ends."""
ENDS = ("is killed", "closes its store")


class Hold(NamedTuple):
    """One hold: when it was requested, acquired and released, by the monotonic clock of the host."""

    asked: float
    got: float
    released: float
    rank: int


class Flock:
    """flock(2) on a descriptor of its own."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def acquire(self) -> None:
        """Block until the lock is acquired."""
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)


class Writes:
    """The two writes that fscoord's lock makes, with the same numbers of bytes, but without a lock."""

    def __init__(self, store: fscoord.FileStore) -> None:
        self._store = store
        self._values = b"1234 0123456789abcdef", b"1235 0123456789abcdef\n0123456789abcdef x 1235 12 host:12345 -"
        store.set(b"lock/line", self._values[0])

    def acquire(self) -> None:
        """Write the longer record."""
        self._store.compare_set(b"lock/line", *self._values)

    def release(self) -> None:
        """Write the shorter record."""
        self._store.compare_set(b"lock/line", *self._values[::-1])


def open_store(path: str) -> fscoord.FileStore:
    """Return a store with a bell, as a store has once a process has waited.

    The modules of the first wait are loaded.
    """
    store = fscoord.FileStore(path, timeout=LIMIT_S)
    with suppress(fscoord.StoreTimeoutError):
        store.wait(["never"], 0.01)
    return store


def make(kind: str, path: str, family: Any) -> Any:
    """Return a lock of the kind `name` at `path`, or `family`, a lock that the process has inherited."""
    if kind in (OURS, WRITES):
        store = open_store(path)
        return Lock(store, "lock") if kind == OURS else Writes(store)
    if kind == PORTALOCKER:
        return portalocker.Lock(path, mode="a", timeout=LIMIT_S)
    return {FLOCK: Flock, FILELOCK: filelock.FileLock, FAMILY: lambda _: family}[kind](path)


def measure(settings: Settings) -> Iterator[Row]:
    """Yield rows for one process, for two that take turns, for eight that contend, and for a holder that ends."""
    kinds = LOCKS[:2] if settings.quick else LOCKS
    yield pair(settings, LOCKS)
    yield handover(settings, kinds)
    yield from crowd(settings, kinds)
    yield from holders_end(settings)


def measure_ours(settings: Settings) -> Iterator[Row]:
    """Yield the first two of these rows: fscoord's lock beside filelock's, and its hand-over."""
    yield pair(settings, (OURS, FILELOCK))
    yield handover(settings, (OURS,))


def pair(settings: Settings, kinds: tuple[str, ...]) -> Row:
    """Return the cost of a lock and an unlock without other processes."""
    rounds = settings.rounds(15)
    pairs, missing = take_turns(
        settings, (*kinds, WRITES), rounds, lambda kind: alone(kind, settings), "lock and unlock"
    )
    return Row(
        "lock and unlock, one process",
        "µs",
        f"best of {rounds} rounds",
        {kind: min(taken) for kind, taken in pairs.items()},
        missing,
        budgets=[Budget("at most 1.15 times", WRITES, 1 / 1.15)],
    )


def handover(settings: Settings, kinds: tuple[str, ...]) -> Row:
    """Return how soon the next process has the lock, beside a bare wake-up after a sleep of the same length."""
    rounds = settings.rounds(3)

    def once(kind: str) -> list[float]:
        if kind == BARE:
            count = 3 if settings.quick else int(RUN_S / HOLD_S / 2)
            return exchange(kind, count, HOLD_S, settings.directory)
        return handed_over(together(kind, 2, settings))

    found, missing = take_turns(settings, (*kinds, BARE), rounds, once, "lock handed over")
    late = {kind: [percentile(taken, 0.5) for taken in lists] for kind, lists in found.items()}
    worst = {kind: max(map(max, lists)) for kind, lists in found.items()}
    return Row(
        "lock, from a release to the next of 2 processes",
        "µs",
        f"p50, median of {rounds} rounds",
        {kind: median(values) for kind, values in late.items()},
        missing,
        {kind: {"worst, ms": value / 1e3} for kind, value in worst.items()},
        [Budget("at most 3 times", BARE, 1 / 3)],
    )


def crowd(settings: Settings, kinds: tuple[str, ...]) -> Iterator[Row]:
    """Yield how long the last of many processes waits, and how often it is overtaken."""
    rounds = settings.rounds(3)
    size = 2 if settings.quick else MANY
    found, missing = take_turns(
        settings, kinds, rounds, lambda kind: together(kind, size, settings), f"lock, {size} processes"
    )
    yield Row(
        f"lock, {size} processes want it, the longest that one waits",
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


def holders_end(settings: Settings) -> Iterator[Row]:
    """Yield how soon the next process has the lock whose holder ends."""
    rounds = settings.rounds(10)
    for how in ENDS:

        def once(_: str, how: str = how) -> float:
            with tempfile.TemporaryDirectory(prefix="benchmark-", dir=settings.directory) as place:
                got, ended = crew.run(see_the_end, 2, str(Path(place, "lock")), how)
            return float(got - ended) * 1e3

        ends, missing = take_turns(settings, (OURS,), rounds, once, f"lock whose holder {how}")
        yield Row(
            f"lock whose holder {how}, until the next has it",
            "ms",
            f"worst of {rounds} rounds",
            {kind: max(taken) for kind, taken in ends.items()},
            missing,
            {kind: {"p50": median(taken)} for kind, taken in ends.items()},
            [Budget("100 ms", limit=100.0)],
        )


def see_the_end(member: crew.Member, path: str, how: str) -> float:
    """As the waiter: return when this process acquired the lock. As the other rank: return when it ended the holder."""
    if member.rank:
        return end_a_holder(member, path, how)
    lock = Lock(open_store(path), "lock")
    member.start()
    lock.acquire()
    got = time.monotonic()
    lock.release()
    return got


def end_a_holder(member: crew.Member, path: str, how: str) -> float:
    """Fork a holder, and end it once a waiter has waited for a while; return the time of the end."""
    (ordered, order), (heard, say) = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        try:
            store = open_store(path)
            Lock(store, "lock").acquire()
            os.write(say, b"has it")
            os.read(ordered, 1)
            moment = time.monotonic()
            store.close()
            os.write(say, f"{moment}".encode())
            signal.pause()
        finally:
            os._exit(1)
    os.read(heard, 16)
    member.start()
    with fscoord.FileStore(path, timeout=LIMIT_S) as store:
        while not Lock(store, "lock").waiters():
            time.sleep(0.001)
    time.sleep(PAUSE_S)
    moment = time.monotonic()
    if how != ENDS[0]:
        os.write(order, b"!")
        moment = float(os.read(heard, 64))
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    return moment


def alone(kind: str, settings: Settings) -> float:
    """Return the time of a lock and an unlock without other processes, in µs."""
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
    """Return all holds of `size` processes that acquire the lock again and again, in the order of the holds."""
    family = multiprocessing.get_context("forkserver").Lock()
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=settings.directory) as place:
        lists = crew.run(want, size, kind, str(Path(place, "lock")), family, 0.01 if settings.quick else RUN_S)
    return sorted((hold for holds in lists for hold in holds), key=lambda hold: hold.got)


def want(member: crew.Member, kind: str, path: str, family: Any, seconds: float) -> list[Hold]:
    """Acquire and release the lock repeatedly for the given time, once at least."""
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
    """Return the time from each release to the next hold by a process that waited, in µs."""
    return [
        (after.got - max(before.released, after.asked)) * 1e6
        for before, after in pairwise(holds)
        if before.rank != after.rank
    ]


def longest_wait(holds: list[Hold]) -> float:
    """Return the longest wait, in ms."""
    return max(hold.got - hold.asked for hold in holds) * 1e3


def overtakers(holds: list[Hold]) -> list[int]:
    """Return for each hold how many processes overtook it."""
    return [sum(other.asked > hold.asked for other in holds[:place]) for place, hold in enumerate(holds)]


def bias(holds: list[Hold]) -> float:
    """Return the highest number of holds of a process, divided by the lowest."""
    counts = [sum(hold.rank == rank for hold in holds) for rank in {hold.rank for hold in holds}]
    return max(counts) / min(counts)


def rate(holds: list[Hold]) -> float:
    """Return the number of holds in a second."""
    return len(holds) / (holds[-1].released - holds[0].got)
