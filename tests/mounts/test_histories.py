"""Linearizable between hosts: what overlapping calls on both returned could have been returned by calls one by one.

Small histories are searched; a large one is compared with the log.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from histories.worker import CHILDREN
from mounts.agents import Agent, Host, Pending
from mounts.conftest import Sides
from mounts.nemesis import HOLDER_KILLED, Nemesis
from mounts.trouble import FULL, HOLDING, SEALING
from support.told import Ahead, Witnessed, errors, judge, take_history

KEYS = ["v1", "v2", "v3", "q1", "q2"]
WIDTH = 4
TOLD = 40
"""How much is told between one thing that befalls them and the next."""


def count_lost(texts: list[str], leaders: int, followers: int) -> int:
    """Return how many of these errors are the loss of a result. Fail if there are others, or more than deaths explain.

    If a leader is killed, and the log is compacted twice before one of its `followers`, the other processes of its
    host, reads on, no record gives that process the result of its addition any more. See
    `fscoord._log.shared.combining.outcomes`.
    """
    assert all("the operation took effect, but its result is lost" in text for text in texts), texts
    assert len(texts) <= leaders * followers, texts
    return len(texts)


def clocks(sides: Sides) -> dict[str, Ahead]:
    """For each host, what its clock may be ahead of host a's. One machine has one clock."""
    reference = sides.a.fork()
    name, _ = reference.do("mounts.work.clock")
    found = {"a": (0, 0)}
    other = sides.b.fork()
    bounds = []
    for _ in range(20):
        _, before = reference.do("mounts.work.clock")
        machine, there = other.do("mounts.work.clock")
        _, after = reference.do("mounts.work.clock")
        bounds.append((there - after, there - before))
    lows, highs = zip(*bounds, strict=True)
    found["b"] = (0, 0) if machine == name else (max(lows), min(highs))
    return found


@pytest.mark.parametrize("lock", ["ofd", "soft"])
def test_random_calls_on_both_hosts_are_linearizable(
    sides: Sides, lock: str, rng: random.Random, scale: Callable[[int], int]
) -> None:
    ahead = clocks(sides)
    crew = sides.opened(WIDTH, lock=lock)
    seeds = [rng.randrange(2**32) for _ in crew]
    asked = [agent.begin("with_worker", "mounts.work.history", seed, scale(80), KEYS)
             for agent, seed in zip(crew, seeds, strict=True)]  # fmt: skip
    for pending in asked:
        pending.result()
    judge([call for agent in crew for call in take_history(agent.events, ahead[agent.host.name])], KEYS)
    assert [text for agent in crew for text in errors(agent.events)] == []


def draw_plan(rng: random.Random) -> list[tuple[str, float, int]]:
    """Draw what befalls one by itself: each thing at a share of a write, and some calls before the next."""
    words = rng.sample([HOLDING, SEALING, FULL], 3)
    return [
        (word, rng.choice([0.0, 0.5, 1.0]) if word != FULL else rng.random(), rng.randrange(2, 6)) for word in words
    ]


def let_happen(sides: Sides, name: str, rng: random.Random, options: dict[str, Any]) -> Nemesis:
    """Let four processes make calls while they are killed and replaced, and stopped; the first on each host goes on as
    two, and others stop in a write or find the disk full.
    """
    numbers = itertools.count(1)

    def begin(host: Host) -> tuple[Agent, Pending]:
        agent, number = host.fork(), next(numbers)
        forks, plan = (1, []) if number <= 2 else (0, draw_plan(rng))
        role = "mounts.trouble.history"
        given = (sides.full(host, name), options, number, rng.randrange(2**32), KEYS, forks, plan)
        return agent, agent.begin("with_worker", role, *given)

    nemesis = Nemesis(sides, rng, begin)
    for host in [sides.a, sides.b] * (WIDTH // 2):
        nemesis.start(host)
    for turn, what in enumerate(rng.sample(["kill", "stop"] * 2, 4), 1):
        nemesis.go_on_until(lambda enough=turn * TOLD: nemesis.told() >= enough)  # type: ignore[misc]
        if what == "kill":
            nemesis.kill_one()
        else:
            nemesis.stop_one()
    nemesis.go_on_until(lambda: {HOLDING, SEALING, FULL} <= nemesis.happened.keys())
    enough = nemesis.told() + TOLD
    nemesis.go_on_until(lambda: nemesis.told() >= enough)
    for agent in nemesis.agents:
        agent.kill()
    return nemesis


def test_random_calls_are_linearizable_though_processes_are_killed_and_stopped(
    sides: Sides, rng: random.Random, scale: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    ahead, total = clocks(sides), Counter[str]()
    for number in range(scale(2)):
        name = f"log {number}"
        options = {"compact_bytes": rng.choice([None, 1000, 4000]), "durable": rng.random() < 0.2}
        nemesis = let_happen(sides, name, rng, options)
        told = {agent: [event for event in agent.events if not isinstance(event, str)] for agent in nemesis.agents}
        calls = [call for agent, events in told.items() for call in take_history(events, ahead[agent.host.name])]
        judge(calls, KEYS)
        leaders = nemesis.happened["kill"] + nemesis.happened[HOLDER_KILLED]
        followers = WIDTH // 2  # another one of its host, and the forked child
        lost = count_lost([text for events in told.values() for text in errors(events)], leaders, followers)
        forked = {number for events in told.values() for number, *_ in events if number > CHILDREN}
        total += nemesis.happened + Counter(calls=len(calls), fork=len(forked), undecided=lost)
        assert sides.a.fork().do("mounts.trouble.how_it_ends", sides.full(sides.a, name)) in ("whole", "torn")
    assert total["kill"] == total["stop"] == scale(2) * 2
    for what, count in total.items():
        record_property(what, count)


def test_large_history_is_linearizable_in_the_order_of_the_log(
    sides: Sides, rng: random.Random, scale: Callable[[int], int], record_property: Callable[[str, object], None]
) -> None:
    count, keys, troubles = scale(250), 8, scale(3)
    ahead = clocks(sides)
    first, numbers = sides.a.fork().open(sides.path()), itertools.count(1)
    first.do("os.mkdir", sides.full(sides.a, "kept"))
    first.multi_set([f"v{key}" for key in range(keys)], [f"first.{key}" for key in range(keys)])
    names: dict[Agent, int] = {}

    def begin(host: Host) -> tuple[Agent, Pending]:
        agent, number = host.fork(), next(numbers)
        names[agent] = number
        paths = sides.full(host), sides.full(host, "kept")
        given = (*paths, {"compact_bytes": 1 << 11}, number, rng.randrange(2**32), count, keys)
        return agent, agent.begin("with_worker", "mounts.trouble.testify", *given)

    nemesis = Nemesis(sides, rng, begin)
    for host in [sides.a, sides.b] * (WIDTH // 2):
        nemesis.start(host)
    for turn in range(1, troubles + 1):
        enough = turn * WIDTH * count // (troubles + 1)
        nemesis.go_on_until(lambda enough=enough: nemesis.told() >= enough)  # type: ignore[misc]
        if turn % 2:
            nemesis.kill_one()
        else:
            nemesis.stop_one()
    nemesis.go_on_until(lambda: not nemesis.at_work)
    witnessed = Witnessed()
    for agent in nemesis.agents:
        agent.kill()
        witnessed.take(names[agent], agent.events, agent in nemesis.killed, ahead[agent.host.name])
    reader = sides.a.fork()
    records = reader.do("mounts.trouble.read_records", sides.full(sides.a), sides.full(sides.a, "kept"))
    calls = witnessed.compare(records)
    generations = len(reader.do("os.listdir", sides.full(sides.a, "kept")))
    assert generations, "never compacted"  # some 14 are usual
    undecided = count_lost(witnessed.undecided, nemesis.happened["kill"], WIDTH // 2 - 1)
    counts = [("calls", calls), ("generations", generations), ("undecided", undecided)]
    for what, number in [*nemesis.happened.items(), *counts]:
        record_property(what, number)


def test_history_with_one_wrong_result_is_found(sides: Sides, rng: random.Random) -> None:
    crew = sides.opened(2)
    for agent in crew:
        agent.do("with_worker", "mounts.work.history", rng.randrange(2**32), 40, KEYS)
    calls = [call for agent in crew for call in take_history(agent.events)]
    reads = [i for i, (_, call) in enumerate(calls) if call.operation == ("read",)]
    i = rng.choice(reads)
    calls[i] = (calls[i][0], calls[i][1]._replace(result=b"a value that nobody wrote"))
    with pytest.raises(AssertionError, match="not linearizable"):
        judge(calls, KEYS)
