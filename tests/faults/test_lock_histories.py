"""What processes that are killed and stopped at any moment saw of a lock: checked against a lock that nobody shares."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from contract.places import Place, until
from contract.worker import Workers, start
from linear import models
from linear.checker import LINEARIZABLE, UNKNOWN, Call, check

PROCESSES = 4
STEPS = 12
"""How many steps of all there are, at least, between two troubles."""
STEP_SIZE = 40
"""How many bytes of a journal one takes at most."""

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
    directory: Path,
    what: str,
    arguments: list[Any],
    troubles: Iterable[Callable[[Any], Any]],
    choose: Callable[[list[Any], Path], Any],
) -> tuple[dict[str, list[Step]], dict[str, float]]:
    """Let processes do `what` with a trouble for one of them now and then; return their steps, and who was killed when.

    Nobody who is in trouble is asked for anything: the others go on, or wait until it is over.
    """
    journals = directory / "journals"
    journals.mkdir()
    place = Place("file-ofd", str(directory))
    store = place.open()
    killed: dict[str, float] = {}
    given = [[*arguments, str(journals / str(number))] for number in range(PROCESSES)]
    with Workers(place.spec(), what, given) as workers:
        start(store, PROCESSES)
        for trouble in troubles:
            enough = size_of(journals) + STEPS * STEP_SIZE
            until(lambda: size_of(journals) >= enough)  # noqa: B023
            victim = choose([process for process in workers.processes if str(process.pid) not in killed], journals)
            moment = time.monotonic()
            if trouble(victim) is kill:
                killed[str(victim.pid)] = moment
        enough = size_of(journals) + STEPS * STEP_SIZE
        until(lambda: size_of(journals) >= enough)
        store.set("over", "1")
        for process in workers.processes:
            out, complaint = process.communicate(timeout=60)
            assert (process.returncode == 0) is (str(process.pid) not in killed), complaint or out
    place.close()
    return steps_of(journals), killed


def kill(victim: Any) -> Any:
    victim.kill()
    victim.wait()
    return kill


def stop_for(seconds: float) -> Callable[[Any], Any]:
    def stop(victim: Any) -> None:
        victim.send_signal(signal.SIGSTOP)
        time.sleep(seconds)  # that long, and not until something has happened: it may have the log's own lock
        victim.send_signal(signal.SIGCONT)

    return stop


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
def test_the_history_of_a_lock_under_kills_and_stops_is_that_of_a_lock(
    tmp_path: Path, kind: str, rng: random.Random
) -> None:
    troubles = [kill, kill, kill, stop_for(0.02), stop_for(0.05)]
    rng.shuffle(troubles)
    steps, killed = run(tmp_path, "hold_again", [kind], troubles, lambda processes, _: rng.choice(processes))
    calls = lock_calls(steps, killed)
    assert sum(call.operation[0] == "acquire" for call in calls) >= STEPS
    assert check(calls, models.counting_lock, (0, "")) == LINEARIZABLE, calls


def test_no_write_of_who_lost_its_lease_comes_after_one_of_who_got_it(tmp_path: Path) -> None:
    ttl = 0.2

    def holder(processes: list[Any], journals: Path) -> Any:
        """Return who has noted a token last: it mostly holds the lock still."""
        tokens = [
            (moment, pid) for pid, own in steps_of(journals).items() for moment, what, _ in own if what == "token"
        ]
        return next(process for process in processes if str(process.pid) == max(tokens)[1])

    steps, _ = run(tmp_path, "write_again", [ttl], [stop_for(3 * ttl)] * 3, holder)
    tokens = [int(rest[0]) for own in steps.values() for _, what, rest in own if what == "token"]
    assert len(tokens) == len(set(tokens))
    calls = []
    for own in steps.values():
        for (begun, what, rest), (ended, result, _) in pairwise(own):
            if what == "write":
                calls.append(Call(begun, ended, ("write", int(rest[0])), result == "written"))
    assert check(calls, models.fenced, 0) == LINEARIZABLE, calls
