"""kill -9 of a writer at any moment: no acknowledged write is lost, no half record counts, no process hangs."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.kill_worker import content
from support.plain_reader import read_log
from support.processes import Processes, let_go, wait_until_ready

from fscoord import FileStore

VICTIMS = 3
PATIENCE_S = 60
"""What a survivor may take for an operation: far more than any takes, so that more is a hang."""


def kill(process: subprocess.Popen[str], delay: float) -> int:
    """Kill the process `delay` seconds from now; return how many operations it has acknowledged."""
    time.sleep(delay)  # the moment is what is drawn at random: there is nothing to wait for
    process.kill()
    out, complaint = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == -signal.SIGKILL, complaint
    return int(out.split()[-1]) if out else 0


def written(records: list[tuple[int, str, bytes, bytes, int, int]]) -> Iterator[tuple[int, int]]:
    """Victim and number of every operation in the log, each checked to be whole."""
    for _, kind, _, value, *_ in records:
        if kind in "SPA" and value.count(b".") >= 2:
            victim, number = map(int, value.split(b".", 2)[:2])
            assert value == content(victim, number), "half an operation counts"
            yield victim, number


def round_of_kills(path: str, lock: str, first: int, rng: random.Random) -> int:
    """Kill some writers at random; return how many torn tails there are in the log."""
    victims = range(first, first + VICTIMS)
    with (
        Processes("kill_worker") as processes,
        FileStore(path, lock=lock, timeout=PATIENCE_S, compact_bytes=None) as survivor,
    ):
        started = {victim: processes.start(json.dumps([path, lock, victim])) for victim in victims}
        for process in started.values():
            wait_until_ready(process)
        for process in started.values():
            let_go(process)
        acknowledged = {}
        for victim, process in started.items():
            acknowledged[victim] = kill(process, rng.expovariate(100))
            survivor.set("survivor", f"after {victim}")
            assert survivor.get("survivor") == f"after {victim}".encode()
        survivor.add("rounds", 1)
        shown = {int(key[9:]): survivor.get(key) for key in survivor.list_keys("value of ")}
    log = read_log(Path(path).read_bytes())
    assert log.ends == "whole"
    found: dict[int, list[int]] = {victim: [] for victim in victims}
    for victim, number in written(log.records):
        if victim in found:
            found[victim].append(number)
    for victim, numbers in found.items():
        assert numbers == list(range(len(numbers))), f"victim {victim}: operations lost, repeated or out of order"
        assert acknowledged[victim] <= len(numbers) <= acknowledged[victim] + 1
        sets = [number for number in numbers if number % 3 == 0]
        assert not sets or shown[victim] == content(victim, sets[-1])
    return sum(kind == "V" for _, kind, *_ in log.records)


def kill_writers(directory: Path, lock: str, rounds: int, rng: random.Random) -> int:
    """Return how many torn tails there were."""
    torn = {}
    for number in range(rounds):
        path = str(directory / f"log{number // 5}")  # some rounds on one log: its history of torn tails goes with it
        torn[path] = round_of_kills(path, lock, number * VICTIMS + 1, rng)
    return sum(torn.values())


@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_killed_writers_lose_nothing_that_was_acknowledged(lock: str, tmp_path: Path, rng: random.Random) -> None:
    kill_writers(tmp_path, lock, 4, rng)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_killed_writers_in_a_hundred_rounds_lose_nothing(lock: str, tmp_path: Path, rng: random.Random, capsys) -> None:
    torn = kill_writers(tmp_path, lock, 100, rng)
    with capsys.disabled():
        print(f" {lock}: {100 * VICTIMS} writers killed, {torn} torn tails")
    assert torn > 0
