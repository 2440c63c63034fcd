"""Random calls of processes on two hosts that share a directory, whose writes are combined on each; see `workload`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from simulation.workload import LIMIT_S, Run, with_end
from simulation.world import World
from support.internals import Batch, SharedLogWriter, Station

HOSTS = ("north", "south")
LIMITS = (LIMIT_S, LIMIT_S, 0.2, 0.05)
"""What operations are given, in seconds. The shortest is that of one look of a follower at the seat."""
HARMFUL = ((Station, "read"), (Station, "remove"), (Batch, "decide"), (SharedLogWriter, "append_batch"))
"""Behind these a leader is stopped now and then: a request is read, is claimed, is decided, is appended."""
STOPS_S = (0.06, 0.3, 3.0)
"""Longer than the short deadlines, and than followers believe that a leader lives."""


def counted(counts: dict[str, int]) -> list[Any]:
    """Return patches that count batches and claims."""
    append, decide = SharedLogWriter.append_batch, Batch.decide

    def decide_and_count(plan: Batch, session: int) -> Any:
        found = decide(plan, session)
        counts["claims"] += len(plan.claims)
        return found

    def append_and_count(writer: SharedLogWriter, records: Any) -> None:
        counts["batches"] += len(records) > 1
        append(writer, records)

    return [
        mock.patch.object(Batch, "decide", decide_and_count),
        mock.patch.object(SharedLogWriter, "append_batch", append_and_count),
    ]


def stopped_behind(world: World, place: type, name: str, chance: float) -> Any:
    """Return a patch by which the process is stopped behind a call of method `name`, by that chance."""
    method: Callable[..., Any] = getattr(place, name)

    def stop_behind(*given: Any) -> Any:
        found = method(*given)
        if world.rng.random() < chance:
            world.stops += 1
            world.scheduler.stop(world.scheduler.process, world.rng.choice(STOPS_S))
        return found

    return mock.patch.object(place, name, stop_behind)


def run(seed: int, kind: str = "nfs4", *, vanishes: bool = False) -> Run:
    """Draw a world by `seed`, on a file server of this `kind`, let it happen, and judge what happened.

    With `vanishes`, one of the hosts vanishes.
    """
    world = World(seed, hosts=HOSTS, kind=kind)
    rng = world.rng
    world.wsize = rng.choice([1 << 18, 1 << 18, 600])
    world.files.loses_datagrams = rng.choice([0, 0, 0.1, 1.0])
    options = {
        "compact_bytes": rng.choice([None, None, 300, 900]),
        "watch": "poll",
        "durable": rng.random() < 0.2,
        "spill_bytes": rng.choice([None, None, 1, 3]),
    }
    if kind == "lustre":
        options |= {"lock": rng.choice(["ofd", "ofd", "flock"]), "coherence": rng.choice([None, None, "locked"])}
    this = Run(world, options, rng.randrange(3, 8), limits=rng.choice([(LIMIT_S,), LIMITS]))
    this.counted |= {"batches": 0, "claims": 0}
    chance = rng.choice([0, 0.02, 0.1])
    with world.installed(), ExitStack() as stack:
        for patch in counted(this.counted):
            stack.enter_context(patch)
        for place, name in HARMFUL:
            stack.enter_context(stopped_behind(world, place, name, chance))
        for name in range(rng.randrange(3, 7)):
            this.process(name, rng.choice([1, 1, 1, 2]))
        kills, stops, fulls = rng.choice([0, 0, 1, 2, 4]), rng.choice([0, 0, 1, 2, 3]), rng.choice([0, 0, 0, 1, 2])
        world.plan(kills, stops, fulls, int(vanishes), within=1500)
        world.scheduler.run()
    this.counted |= {"late": this.late, "deadlocks": world.files.called_deadlocks}
    if vanishes:
        files = world.files
        this.counted |= {"blocked": files.blocked, "old answers": files.old_answers, "holes": files.holes}
    with_end(this)
    return this
