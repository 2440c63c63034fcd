"""Write traces of jobs that never ran: with clocks that are wrong on purpose, stragglers, locks and deaths."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

MS = 1_000_000


class Clock:
    """The monotonic clock of a host: true time times a rate, plus an offset, in ns."""

    def __init__(self, offset: int = 0, rate: float = 0.0) -> None:
        self.offset, self.rate = offset, rate

    def at(self, true: int) -> int:
        return true + int(true * self.rate) + self.offset


class WrittenProcess:
    """One process of a trace. Its times are true times; its file has those of its clock."""

    def __init__(self, host: str, pid: int, rank: int | None = None, clock: Clock | None = None) -> None:
        self.host, self.pid, self.rank, self.clock = host, pid, rank, clock or Clock()
        self.rows: list[list[Any]] = []

    def span(
        self,
        kind: str,
        name: str,
        begin: int,
        end: int | None,
        outcome: str = "passed",
        *facts: Any,
        store: str = "s",
        rank: int | None = None,
        thread: int = 1,
    ) -> None:
        """Add a span, which is open if `end` is None."""
        ends = 0 if end is None else self.clock.at(end)
        number = len(self.rows) + 1
        word = "" if end is None else outcome
        self.rows.append([kind, number, thread, self.clock.at(begin), ends, name, store, rank, word, *facts])

    def header(self, segment: int = 1) -> dict[str, Any]:
        return {
            "fscoord_trace": 1,
            "host": self.host,
            "pid": self.pid,
            "start_time": 1,
            "boot_id": self.host,
            "time_namespace": 1,
            "process": f"{self.pid:08x}",
            "segment": segment,
            "monotonic_ns": self.clock.at(0),
            "wall_ns": 1_700_000_000_000_000_000,
        }

    def write(self, directory: Path, *, tail: str = "") -> Path:
        """Write the file, with `tail` at its end."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.host}-{self.pid}-{self.pid:08x}.0.trace"
        lines = [
            json.dumps(self.header()),
            *(json.dumps(self.rows[k : k + 100]) for k in range(0, len(self.rows), 100)),
        ]
        path.write_text("\n".join(lines) + "\n" + tail)
        return path


def meet(processes: Sequence[WrittenProcess], name: str, arrivals: Sequence[int], latency: Sequence[int]) -> int:
    """Add one barrier to all `processes`; return when the last of them left it."""
    last = max(arrivals)
    for process, arrived, late in zip(processes, arrivals, latency, strict=True):
        process.span("barrier", name, arrived, last + late, "passed", "world_size", len(processes), rank=process.rank)
    return last + max(latency)


def write_job(directory: Path, seed: int, *, ranks: int = 8, hosts: int = 2, barriers: int = 20) -> None:
    """Write the trace of a training job in which rank 3 is slow, and ranks 1 and 2 contend for a lock."""
    rng = random.Random(seed)
    clocks = [Clock(rng.randrange(10**15), rng.uniform(-40e-6, 40e-6)) for _ in range(hosts)]
    crew = [
        WrittenProcess(f"node{rank * hosts // ranks}", 1000 + rank, rank, clocks[rank * hosts // ranks])
        for rank in range(ranks)
    ]
    for process in crew:
        process.span("open", "/shared/job", 0, 1000, "done", "label", "", rank=process.rank)
        process.span("rendezvous", "job", 2000, 30 * MS, "passed", "round", 0, store="")
    now = 50 * MS
    token = 0
    for number in range(barriers):
        slow = [rng.expovariate(1 / (4 * MS)) + (60 * MS if rank == 3 and number % 3 else 0) for rank in range(ranks)]
        arrivals = [now + 40 * MS + int(extra) for extra in slow]
        free = now + 2 * MS
        for rank in (1, 2) if ranks > 2 else ():
            token += 1
            held = int(rng.uniform(5, 12) * MS)
            waited = max(0, free - now - 2 * MS)
            facts = ("what", "the lock", "waited_ns", waited, "token", token)
            crew[rank].span("lock", "dataset", now + 2 * MS, now + 2 * MS + waited + held, "released", *facts)
            free = now + 2 * MS + waited + held
        now = meet(crew, f"epoch/{number}", arrivals, [rng.randrange(50_000, 900_000) for _ in crew])
    crew[0].span(
        "wait",
        "plan",
        now,
        now + 150 * MS,
        "passed",
        "key",
        "plan",
        "session",
        2,
        "by",
        f"{crew[1].host}:1001",
        "by_rank",
        1,
    )
    dead = crew[-1]
    crew[0].span(
        "death",
        f"{dead.host}:{dead.pid}",
        now + 180 * MS,
        now + 181 * MS,
        "recorded",
        "session",
        8,
        "dead_rank",
        dead.rank,
        store="",
    )
    for process in crew[:-1]:
        process.span(
            "barrier", "last", now + 160 * MS, now + 182 * MS, "broken", "world_size", ranks, rank=process.rank
        )
        process.span("process", "exit", now + 190 * MS, now + 190 * MS, "done", store="")
    dead.span("wait", "never", now + 10 * MS, None)
    for process in crew:
        process.write(directory)
