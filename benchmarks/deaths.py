"""Kill a rank for which the others wait at a barrier that fails fast: the time until each call raises."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress

import fscoord
from benchmarks import crew
from benchmarks.measure import Budget, Row, Settings, median, percentile, take_turns
from benchmarks.stores import LIMIT_S, OURS, Place, fresh

RANKS = (2, 4, 8, 16, 32)
RANKS_QUICK = (2,)
BUDGET = Budget("worst 100 ms", limit=100.0)
PAUSE_S = 0.1
"""How long all have waited when the one is killed."""


def measure(settings: Settings) -> Iterator[Row]:
    """Yield a row per number of ranks, the killed one among them."""
    rounds = settings.rounds(10)
    for size in RANKS_QUICK if settings.quick else RANKS:

        def once(store: str, size: int = size) -> list[float]:
            with fresh(store, settings.directory) as place:
                told, killed = [], 0.0
                for moment in crew.run(see_a_death, size, place):
                    killed, told = (-moment, told) if moment < 0 else (killed, [*told, moment])
                return [(moment - killed) * 1e3 for moment in told]

        found, missing = take_turns(settings, (OURS,), rounds, once, f"death of one of {size} ranks")
        late = {store: [value for values in lists for value in values] for store, lists in found.items()}
        yield Row(
            f"death of one of {size} ranks known to the others after",
            "ms",
            f"worst of {rounds} rounds",
            {store: max(times) for store, times in late.items()},
            missing,
            {store: {"p50": median(times), "p99": percentile(times, 0.99)} for store, times in late.items()},
            [BUDGET],
        )


def see_a_death(member: crew.Member, place: Place) -> float:
    """Return when this rank learned of the death.

    The last rank kills a process, and returns the time of the kill, negated.

    Times are in seconds, by the monotonic clock of the host.
    """
    victim = 0
    if member.rank == member.size - 1:
        ready, done = os.pipe()
        victim = os.fork()
        if victim == 0:
            be_killed(place, member.rank, done)
        os.read(ready, 1)
        os.close(ready)
        os.close(done)
    store = fscoord.FileStore(place.address, rank=None if victim else member.rank, timeout=LIMIT_S)
    with suppress(fscoord.StoreTimeoutError):
        store.wait(["never"], 0.01)  # loads what is loaded at the first wait
    member.start()
    if victim:
        while not store.check(["end/arrivals"]) or store.get("end/arrivals").count(b" ") < member.size - 1:
            time.sleep(0.001)
        time.sleep(PAUSE_S)
        moment = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        return -moment
    try:
        fscoord.barrier(store, member.size, "end", LIMIT_S, member.rank, fail_fast=True)
    except fscoord.BrokenBarrierError:
        return time.monotonic()
    raise AssertionError("nobody died")


def be_killed(place: Place, rank: int, done: int) -> None:
    """Open the store as `rank`, and wait to be killed."""
    try:
        store = fscoord.FileStore(place.address, rank=rank, timeout=LIMIT_S)
        os.write(done, b"%d" % store.register())
        signal.alarm(int(LIMIT_S))
        signal.pause()
    finally:
        os._exit(1)
