"""Processes that interleave at every call of the system, by thousands of seeded schedules; see `simulation.scheduler`.

A failure names its schedule: ``FSCOORD_SCHEDULE=n pytest TEST`` runs that one alone. What it finds becomes a test of
its own, for a schedule is another one as soon as the code makes another call.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import pytest
from simulation import arrivals, nodes, runs, waits, workload
from simulation.workload import Run

pytestmark = [pytest.mark.exhaustive, pytest.mark.once]


def schedules(kind: str, rng: random.Random, count: int) -> list[int]:
    """The ones to run: `FSCOORD_SCHEDULE` alone, or `count`. The continuous check has the same each time."""
    one = os.environ.get("FSCOORD_SCHEDULE")
    if "CI" in os.environ:
        rng = random.Random(kind)
    return [int(one)] if one else [rng.randrange(2**32) for _ in range(count)]


def each(numbers: list[int], run: Callable[[int], Any]) -> list[Any]:
    """Run the schedules; the first that fails is named."""
    done = []
    for number in numbers:
        try:
            done.append(run(number))
        except Exception as error:
            raise AssertionError(f"FSCOORD_SCHEDULE={number} fails: {type(error).__name__}: {error}") from error
    return done


def test_calls_are_linearizable_and_no_acknowledged_one_is_lost_on_any_schedule(
    rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Two to four processes of one or two threads make calls, and compact, while some are killed at any step, and
    others come; some are stopped, and the disk is full for a while. The history is linearizable to its end, which a
    new process reads; and a reader of its own finds the same in the log.
    """
    numbers = schedules("calls", rng, scale(1200))
    ran: list[Run] = each(numbers, workload.run)
    if len(ran) >= 100:
        for what in ("kills", "stops", "fulls", "generations", "tears"):
            assert sum(run.counted[what] for run in ran) > len(ran) // 20, f"hardly any {what}"


def test_calls_under_marker_files_are_linearizable_on_any_schedule(
    rng: random.Random, scale: Callable[[int], int]
) -> None:
    """And while answers to who makes, or removes, a marker get lost. Those of the dead are removed by the others."""
    ran: list[Run] = each(schedules("markers", rng, scale(200)), lambda number: workload.run(number, "soft"))
    if len(ran) >= 60:
        for what in ("kills", "stops", "lost", "generations"):
            assert sum(run.counted[what] for run in ran) > len(ran) // 20, f"hardly any {what}"


def test_combined_calls_of_two_hosts_are_linearizable_on_any_schedule(
    rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Processes on two hosts share a directory, and those of one host combine their writes, while leaders and followers
    are killed and stopped at any step, answers get lost, and time is up. What was refused is never done.
    """
    ran: list[Run] = each(schedules("nodes", rng, scale(600)), nodes.run)
    if len(ran) >= 100:
        for what in ("kills", "stops", "fulls", "generations", "tears", "late", "batches", "claims"):
            assert sum(run.counted[what] for run in ran) > len(ran) // 20, f"hardly any {what}"


def test_calls_beside_a_host_that_vanishes_are_linearizable_on_any_schedule(
    rng: random.Random, scale: Callable[[int], int]
) -> None:
    """One of two hosts on Lustre is switched off. The calls of the other wait for its eviction once, and not again.

    No answer comes from a size that was valid before, and what the host had acknowledged is there.
    """
    ran: list[Run] = each(
        schedules("vanished", rng, scale(150)), lambda number: nodes.run(number, "lustre", vanishes=True)
    )
    if len(ran) >= 100:
        for what in ("blocked", "waited", "old answers", "holes"):
            assert sum(run.counted.get(what, 0) > 0 for run in ran) > len(ran) // 50, f"hardly any {what}"


def test_calls_of_two_hosts_on_lustre_are_linearizable_on_any_schedule(
    rng: random.Random, scale: Callable[[int], int]
) -> None:
    """The locks of all kinds are one space there, some waits for a lock are called deadlocks, times have whole seconds,
    and a symbolic link is refused. Reads are direct, as by default, or under a lock.
    """
    ran: list[Run] = each(schedules("lustre", rng, scale(300)), lambda seed: nodes.run(seed, "lustre"))
    if len(ran) >= 100:
        for what in ("kills", "stops", "fulls", "generations", "tears", "late", "batches", "deadlocks"):
            assert sum(run.counted[what] for run in ran) > len(ran) // 20, f"hardly any {what}"


def test_wait_ends_on_any_schedule_when_its_condition_is_met(rng: random.Random, scale: Callable[[int], int]) -> None:
    """And where the file system tells of events it does so at once, not at the next slow poll, unless somebody was
    killed or stopped.
    """
    each(schedules("waits", rng, scale(300)), waits.run)


def test_wait_on_one_of_two_hosts_ends_on_any_schedule(rng: random.Random, scale: Callable[[int], int]) -> None:
    """And a waiter that is rung reads on in the extent that the process that rang has published."""
    ran: list[waits.Waits] = each(
        schedules("waits of hosts", rng, scale(120)), lambda seed: waits.run(seed, nodes.HOSTS)
    )
    if len(ran) >= 100:
        assert sum(run.extents > 0 for run in ran) > len(ran) // 4, "hardly any extents"


def test_barrier_of_two_hosts_is_passed_on_any_schedule(rng: random.Random, scale: Callable[[int], int]) -> None:
    each(schedules("arrivals of hosts", rng, scale(100)), lambda seed: arrivals.run(seed, nodes.HOSTS))


def test_wait_and_barrier_of_two_hosts_end_on_any_schedule_on_lustre(
    rng: random.Random, scale: Callable[[int], int]
) -> None:
    each(schedules("waits on lustre", rng, scale(60)), lambda seed: waits.run(seed, nodes.HOSTS, "lustre"))
    each(schedules("arrivals on lustre", rng, scale(60)), lambda seed: arrivals.run(seed, nodes.HOSTS, "lustre"))


def test_barrier_is_passed_on_any_schedule_when_all_have_come(rng: random.Random, scale: Callable[[int], int]) -> None:
    """And not before; by a ring, unless an event was lost or somebody stopped. Where the last rank dies in its call,
    those who know the ranks pass: at once if it comes again, or at their time-outs if its arrival was recorded.
    """
    ran: list[arrivals.Meetings] = each(schedules("arrivals", rng, scale(300)), arrivals.run)
    if len(ran) >= 1000:
        assert sum(run.between for run in ran) > len(ran) // 200, "hardly any between the two records"
    if len(ran) >= 100:
        assert sum(run.world.kills for run in ran) > len(ran) // 10, "hardly any kills"


def test_runs_never_mix_on_any_schedule(rng: random.Random, scale: Callable[[int], int]) -> None:
    each(schedules("restarts", rng, scale(150)), runs.run_restarts)


def test_log_ends_with_its_last_participant_on_any_schedule(rng: random.Random, scale: Callable[[int], int]) -> None:
    each(schedules("lives", rng, scale(150)), runs.run_lives)
