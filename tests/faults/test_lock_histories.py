"""Histories of a lock by processes that are killed and stopped, checked against a model of a lock."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start
from linear import models
from linear.checker import LINEARIZABLE, UNKNOWN, Call, check
from support.places import Place

PROCESSES = 4
STEPS = 12
"""How many steps of all there are, at least, between two troubles."""
PATIENCE_S = 120
"""How long to wait for anything: on a busy machine a process takes many seconds to begin."""
STEP_SIZE = 40
"""How many bytes of a journal one takes at most."""


def until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


Step = tuple[float, str, list[str]]


def steps_of(journals: Path) -> dict[str, list[Step]]:
    """Return by process, in order: when, what, and with what result."""
    found: dict[str, list[Step]] = {}
    for path in sorted(journals.iterdir()):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                moment, pid, what, *rest = line.split()
                found.setdefault(pid, []).append((float(moment), what, rest))
    return found


def size_of(journals: Path) -> int:
    return sum(path.stat().st_size for path in journals.iterdir())


def run(
    directory: Path, what: str, arguments: list[list[Any]], trouble: Callable[[list[Any], Path], dict[str, float]]
) -> tuple[dict[str, list[Step]], dict[str, float]]:
    """Let processes do `what` during `trouble`, which returns the kills and their times; return both results."""
    journals = directory / "journals"
    journals.mkdir()
    place = Place("file-ofd", str(directory))
    store = place.open(timeout=PATIENCE_S)
    given = [[*own, str(journals / str(number))] for number, own in enumerate(arguments)]
    with Workers(place.spec(), what, given) as workers:
        start(store, len(given))
        killed = trouble(workers.processes, journals)
        make_progress(journals)
        store.set("over", "1")
        for process in workers.processes:
            _, complaint = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode == 0) is (str(process.pid) not in killed), complaint
    place.close()
    return steps_of(journals), killed


def make_progress(journals: Path) -> None:
    enough = size_of(journals) + STEPS * STEP_SIZE
    until(lambda: size_of(journals) >= enough)


def kills_and_stops(rng: random.Random) -> Callable[[list[Any], Path], dict[str, float]]:
    """Return the trouble that kills three processes, one after the other, and stops some for a while, at any moment.

    Nobody who is in trouble is asked for anything: the others go on, or wait until it is over.
    """

    def trouble(processes: list[Any], journals: Path) -> dict[str, float]:
        killed: dict[str, float] = {}
        for kind in rng.sample(["kill", "kill", "stop", "stop", "kill"], 5):
            make_progress(journals)
            victim = rng.choice([process for process in processes if str(process.pid) not in killed])
            if kind == "kill":
                killed[str(victim.pid)] = time.monotonic()
                victim.kill()
                victim.wait()
            else:
                victim.send_signal(signal.SIGSTOP)
                time.sleep(rng.uniform(0.01, 0.05))  # and not until somebody goes on: it may have the log's own lock
                victim.send_signal(signal.SIGCONT)
        return killed

    return trouble


def wake_who_stops(after: float) -> Callable[[list[Any], Path], dict[str, float]]:
    """Return what waits until each has stopped once, and lets it go on so many seconds later."""

    def trouble(processes: list[Any], _: Path) -> dict[str, float]:
        def stopped() -> bool:
            states = [os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG) for process in sleeping]
            woken.extend(process for process, state in zip(sleeping, states, strict=True) if state)
            return bool(woken)

        sleeping = list(processes)
        while sleeping:
            woken: list[Any] = []
            until(stopped)
            time.sleep(after)
            for process in woken:
                process.send_signal(signal.SIGCONT)
                sleeping.remove(process)
        return {}

    return trouble


def lock_calls(steps: dict[str, list[Step]], killed: dict[str, float]) -> list[Call]:
    """Return the calls of a lock that the processes made; a death gives back what was held, sometime."""
    calls = []
    for pid, own in steps.items():
        begun: float | None = None
        for moment, what, rest in own:
            if what in ("acquire", "release"):
                begun = moment
                continue
            name, result = ("acquire", int(rest[0])) if what == "acquired" else ("release", True)
            calls.append(Call(begun, moment, (name, pid), result))
            begun = None
        if pid in killed:
            if begun is not None:
                calls.append(Call(begun, math.inf, (own[-1][1], pid), UNKNOWN))
            calls.append(Call(killed[pid], math.inf, ("release", pid), UNKNOWN))
    return calls


@pytest.mark.parametrize("kind", ["Lock", "Election"])
def test_lock_history_under_kills_and_stops_is_linearizable(tmp_path: Path, kind: str, rng: random.Random) -> None:
    steps, killed = run(tmp_path, "hold_again", [[kind]] * PROCESSES, kills_and_stops(rng))
    calls = lock_calls(steps, killed)
    assert sum(call.operation[0] == "acquire" for call in calls) >= STEPS
    assert check(calls, models.counting_lock, (0, "")) == LINEARIZABLE, calls


def test_lease_holder_that_lost_it_writes_nothing_after_the_next_holder(tmp_path: Path, rng: random.Random) -> None:
    ttl = 0.2
    arguments = [[ttl, rng.randrange(2, 20)] for _ in range(PROCESSES)]
    steps, _ = run(tmp_path, "write_again", arguments, wake_who_stops(3 * ttl))
    tokens = [int(rest[0]) for own in steps.values() for _, what, rest in own if what == "token"]
    assert len(tokens) == len(set(tokens))
    calls = [
        Call(begun, ended, ("write", int(rest[0])), result == "written")
        for own in steps.values()
        for (begun, what, rest), (ended, result, _) in pairwise(own)
        if what == "write"
    ]
    assert check(calls, models.fenced, 0) == LINEARIZABLE, calls
