"""Linearizable between hosts: what overlapping calls on both returned could have been returned by calls one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from linear import models
from linear.checker import LINEARIZABLE, UNKNOWN, Call, check_each
from mounts.agents import Agent, AgentDiedError
from mounts.conftest import Sides

VALUES = ["v1", "v2", "v3"]
QUEUES = ["q1", "q2"]
WIDTH = 4


def model(key: str) -> tuple[Any, Any]:
    return (models.queue, ()) if key in QUEUES else (models.value, None)


def clocks(sides: Sides) -> dict[str, tuple[float, float]]:
    """For each host, what its clock may be ahead of host a's, at least and at most. One machine has one clock."""
    reference = sides.a.fork()
    name, _ = reference.do("mounts.work.clock")
    found = {"a": (0.0, 0.0)}
    other = sides.b.fork()
    bounds = []
    for _ in range(20):
        _, before = reference.do("mounts.work.clock")
        machine, there = other.do("mounts.work.clock")
        _, after = reference.do("mounts.work.clock")
        bounds.append((there - after, there - before))
    lows, highs = zip(*bounds, strict=True)
    found["b"] = (0.0, 0.0) if machine == name else (max(lows), min(highs))
    return found


def take_history(agent: Agent, ahead: tuple[float, float]) -> list[tuple[str, Call]]:
    """Put together what `agent` reported, in host a's time: never shorter than it was."""
    least, most = ahead
    begun: dict[int, tuple[str, tuple[Any, ...], float]] = {}
    calls = []
    for number, *rest in agent.events:
        if number not in begun:
            key, operation, moment = rest
            begun[number] = (key, operation, moment - most)
            continue
        key, operation, start = begun[number]
        word, result, *when = rest
        if word == "done":
            calls.append((key, Call(start, when[0] - least, operation, result)))
        elif word == "maybe":
            calls.append((key, Call(start, math.inf, operation, UNKNOWN)))
        begun[number] = ("", (), -1)
    calls += [(key, Call(start, math.inf, op, UNKNOWN)) for key, op, start in begun.values() if key]
    return calls


def judge(calls: list[tuple[str, Call]]) -> None:
    """Fail unless every key's history is linearizable; one that is too hard to tell fails, too."""
    verdicts = check_each(calls, model)
    wrong = {
        key: [verdict, *sorted((call for name, call in calls if name == key), key=lambda call: call.start)]
        for key, verdict in verdicts.items()
        if verdict != LINEARIZABLE
    }
    assert not wrong, wrong
    assert len(verdicts) == len(VALUES + QUEUES), "a key that nobody used proves nothing"


@pytest.mark.parametrize("lock", ["ofd", "soft"])
def test_random_calls_on_both_hosts_are_linearizable(
    sides: Sides, lock: str, rng: random.Random, scale: Callable[[int], int]
) -> None:
    ahead = clocks(sides)
    crew = sides.opened(WIDTH, lock=lock)
    seeds = [rng.randrange(2**32) for _ in crew]
    asked = [agent.begin("with_worker", "mounts.work.history", seed, scale(80), VALUES, QUEUES)
             for agent, seed in zip(crew, seeds, strict=True)]  # fmt: skip
    for pending in asked:
        pending.result()
    judge([call for agent in crew for call in take_history(agent, ahead[agent.host.name])])


def test_they_are_while_processes_are_killed_and_others_come(
    sides: Sides, rng: random.Random, scale: Callable[[int], int]
) -> None:
    ahead = clocks(sides)
    crew, calls = sides.opened(WIDTH), []
    asked: dict[int, Any] = {}

    def begin(agent: Agent) -> Agent:
        seed = rng.randrange(2**32)
        asked[id(agent)] = agent.begin("with_worker", "mounts.work.history", seed, 10_000, VALUES, QUEUES)
        return agent

    for agent in crew:
        begin(agent)
    for turn in range(scale(8)):
        victim = crew[turn % WIDTH]
        while len(victim.events) < 2 * rng.randrange(8, 20):
            victim.host.look(1)
        victim.kill()
        with pytest.raises(AgentDiedError):
            asked[id(victim)].result()
        calls += take_history(victim, ahead[victim.host.name])
        crew[turn % WIDTH] = begin(victim.host.fork().open(sides.path()))
    for agent in crew:
        agent.kill()
        calls += take_history(agent, ahead[agent.host.name])
    judge(calls)


def test_a_history_with_one_lie_is_found(sides: Sides, rng: random.Random) -> None:
    crew = sides.opened(2)
    for agent in crew:
        agent.do("with_worker", "mounts.work.history", rng.randrange(2**32), 40, VALUES, QUEUES)
    calls = [call for agent in crew for call in take_history(agent, (0.0, 0.0))]
    reads = [i for i, (_, call) in enumerate(calls) if call.operation == ("read",)]
    i = rng.choice(reads)
    calls[i] = (calls[i][0], calls[i][1]._replace(result=b"a value that nobody wrote"))
    with pytest.raises(AssertionError, match="not linearizable"):
        judge(calls)
