"""Linearizable: the results of real processes while others were killed, stopped, forked, or found the disk full.

Small histories are searched, which trusts nothing; large ones are compared with the log, their witness.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from histories.crew import Crew, Member
from histories.worker import QUEUES, VALUES, write_all
from linear import models
from linear.checker import LINEARIZABLE, UNKNOWN, Call, check
from linear.witness import read_generations
from support.plain_reader import read_newest
from support.told import Witnessed, errors, judge, take_history

WIDTH = 4
TOLD = 40
"""How many lines are told between one thing that befalls them and the next."""


def told(member: Member) -> list[Any]:
    return [ast.literal_eval(line.decode()) for line in member.lines]


def let_happen(path: str, rng: random.Random, options: dict[str, Any]) -> Crew:
    """Let four processes make calls, two of which fork, while they are killed and replaced, stopped, or full."""
    with Crew(rng) as crew:
        names = iter(range(1, 99))

        def start(forks: int) -> None:
            name = next(names)
            crew.start(name, "history", path, name, rng.randrange(2**32), forks, options)

        for number in range(WIDTH):
            start(number % 2)
        plan = [*["kill"] * 2, *["stop"] * 2, *["full"] * 2]
        rng.shuffle(plan)
        for turn, what in enumerate(plan, 1):
            crew.listen_until(lambda enough=turn * TOLD: crew.told() >= enough)  # type: ignore[misc]
            if what == "kill" and crew.kill_one() is not None:
                start(0)
            elif what == "stop":
                crew.stop_one()
            elif what == "full":
                crew.let_disk_be_full(path)
        crew.listen_until(lambda: crew.told() >= (len(plan) + 1) * TOLD)
        crew.kill_all()
    return crew


@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_small_histories_are_linearizable_under_any_fault(
    lock: str, tmp_path: Path, rng: random.Random, scale: Callable[[int], int]
) -> None:
    happened: dict[str, int] = {"kill": 0, "stop": 0, "full": 0}
    for number in range(scale(2)):
        path = tmp_path / f"log {number}"
        options = {"lock": lock, "compact_bytes": rng.choice([None, 1000, 4000]), "durable": rng.random() < 0.2}
        crew = let_happen(str(path), rng, options)
        judge([call for member in crew.members for call in take_history(told(member))], VALUES + QUEUES)
        assert [text for member in crew.members for text in errors(told(member))] == []
        log = read_newest(path)
        assert log.ends in ("whole", "torn")
        for what, count in crew.happened.items():
            happened[what] += count
    assert happened["kill"] == scale(2) * 2


def test_lock_holds_are_linearizable_though_holders_are_killed_and_stopped(
    tmp_path: Path, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Each hold ends before the next begins, tokens rise, and the dead hold nothing for long."""
    for number in range(scale(1)):
        path = str(tmp_path / f"log {number}")
        with Crew(rng) as crew:
            for name in range(WIDTH):
                crew.start(name, "hold", path, name)
            for turn, what in enumerate(["kill", "stop", "kill"], 1):
                crew.listen_until(lambda enough=turn * TOLD: crew.told() >= enough)  # type: ignore[misc]
                if what == "stop":
                    crew.stop_one()
                elif crew.kill_one() is not None:
                    crew.start(10 + turn, "hold", path, 10 + turn)
            crew.listen_until(lambda: crew.told() >= 4 * TOLD)
            crew.kill_all()
        calls = [call for member in crew.members for call in take_holds(member)]
        verdict = check(calls, models.lock, (None, 0))
        assert verdict == LINEARIZABLE, (verdict, sorted(calls))


def take_holds(member: Member) -> list[Call]:
    calls: list[Call] = []
    begun: dict[int, tuple[str, int]] = {}
    for name, number, word, *more in told(member):
        if word != "done":
            begun[number] = (word, more[0])
            continue
        what, start = begun.pop(number)
        token, end = more
        operation = (what, name, token) if what == "acquire" else (what, name)
        calls.append(Call(start, end, operation, True))
    if member.was_killed:  # what it was about, and its death, which frees the lock some time after
        for what, start in begun.values():
            if what == "release":
                calls.append(Call(start, math.inf, (what, member.name), UNKNOWN))
        calls.append(Call(max((call.end for call in calls), default=0), math.inf, ("die", member.name), UNKNOWN))
    return calls


@pytest.mark.parametrize("coherence", [None, "locked"], ids=["slots", "log"])
def test_barrier_ends_for_no_rank_before_all_have_come_under_any_fault(
    coherence: str | None, tmp_path: Path, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """A rank that is killed is started again at the barrier where it was."""
    for number in range(scale(1)):
        options = {"compact_bytes": rng.choice([None, 1000, 4000]), "coherence": coherence}
        path = str(tmp_path / f"log {number}")
        with Crew(rng) as crew:
            for rank in range(WIDTH):
                crew.start(rank, "meet", path, rank, WIDTH, 0, options)
            for turn, what in enumerate(["kill", "stop"] * 3, 1):
                crew.listen_until(lambda enough=turn * TOLD: crew.told() >= enough)  # type: ignore[misc]
                if what == "stop":
                    crew.stop_one()
                elif (victim := crew.kill_one()) is not None:
                    crew.listen_until(lambda: victim.is_over)
                    rank = victim.name
                    reached = max(
                        (each[1] for member in crew.members for each in told(member) if each[0] == rank), default=0
                    )
                    crew.start(rank, "meet", path, rank, WIDTH, reached, options)
            crew.listen_until(lambda: crew.told() >= 8 * TOLD)
            assert all(member.was_killed or not member.is_over for member in crew.members), "one has failed"
            crew.kill_all()
        begins: dict[int, dict[int, int]] = {}
        ends: list[tuple[int, int]] = []
        for rank, barrier, what, time_ns in [each for member in crew.members for each in told(member)]:
            if what == "begin":
                come = begins.setdefault(barrier, {})
                come[rank] = min(time_ns, come.get(rank, time_ns))
            else:
                ends.append((barrier, time_ns))
        early = [each for each in ends if len(begins[each[0]]) < WIDTH or max(begins[each[0]].values()) > each[1]]
        assert not early, (early, [begins[barrier] for barrier, _ in early])
        assert len(ends) > 2 * TOLD


def have_witnessed(tmp_path: Path, rng: random.Random, count: int, kills: int, keys: int, width: int) -> int:
    """Let processes make `count` calls each, and compare what they were told with the log; return how many calls."""
    path, kept = tmp_path / "log", tmp_path / "kept"
    kept.mkdir()
    write_all(path, keys)
    with Crew(rng) as crew:
        names = iter(range(1, 10**6))

        def start() -> None:
            name = next(names)
            options = {"compact_bytes": 1 << 16, "watch": "poll"}
            crew.start(name, "testify", str(path), str(kept), name, rng.randrange(2**32), count, keys, options)

        for _ in range(width):
            start()
        for turn in range(1, kills + 1):
            enough = turn * width * count // (kills + 1)
            crew.listen_until(lambda enough=enough: crew.told() >= enough)  # type: ignore[misc]
            if turn % 2 == 0:
                crew.stop_one()
            elif crew.kill_one() is not None:
                start()
        crew.finish()
    witnessed = Witnessed()
    for member in crew.members:
        witnessed.take(member.name, member.lines, member.was_killed)
    calls = witnessed.compare(read_generations(path, kept))
    assert witnessed.undecided == []
    assert len(list(kept.iterdir())) > 1, "never compacted"
    return calls


def test_large_histories_are_linearizable_in_the_order_of_the_log(
    tmp_path: Path, rng: random.Random, record_property: Callable[[str, object], None]
) -> None:
    record_property("calls", have_witnessed(tmp_path, rng, 6000, 3, 8, WIDTH))


@pytest.mark.long
def test_millions_of_calls_are_linearizable_in_the_order_of_the_log(
    tmp_path: Path, rng: random.Random, scale: Callable[[int], int], capsys: Any
) -> None:
    calls = have_witnessed(tmp_path, rng, scale(25_000), 20, 32, 8)
    with capsys.disabled():
        print(f"\n{calls} calls")
