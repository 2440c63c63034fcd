"""Logs that are compacted on one host while the other reads and writes them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from mounts.agents import Agent, Host
from mounts.conftest import Sides
from mounts.test_histories import KEYS, clocks
from support.told import errors, judge, take_history

LIVE = {f"k{i}": b"x" * 100 for i in range(20)}


def fill(agent: Agent) -> None:
    """Write `LIVE`, each key several times."""
    for _ in range(3):
        agent.multi_set(list(LIVE), list(LIVE.values()))


def agree(sides: Sides, *more: Agent) -> dict[str, bytes]:
    """Return the keys and values, which all handles, old and new, on both hosts must agree on."""
    fresh = [host.fork().open(sides.path()) for host in (sides.a, sides.b)]
    seen = [agent.do("mounts.work.fingerprint", "@store") for agent in (*fresh, *more)]
    assert all(found == seen[0] for found in seen), seen
    return dict(seen[0])


def test_hosts_both_go_on_in_each_new_generation(sides: Sides) -> None:
    a, b = sides.opened(2)
    fill(a)
    for turn, agent in enumerate([a, b, b, a]):
        agent.compact()
        a.set("a", str(turn))
        b.set("b", str(turn))
        assert (a.get("b"), b.get("a")) == (b"%d" % turn,) * 2
    assert agree(sides, a, b) == LIVE | {"a": b"3", "b": b"3"}


def test_compaction_beside_four_writers_loses_nothing(
    sides: Sides, rng: random.Random, together: Callable[..., list[Any]]
) -> None:
    ahead = clocks(sides)
    compactor, *crew = sides.opened(5)
    fill(compactor)
    busy = compactor.begin("with_worker", "mounts.work.keep_compacting", "done")
    seeds = [rng.randrange(2**32) for _ in crew]
    asked = [agent.begin("with_worker", "mounts.work.history", seed, 40, KEYS)
             for agent, seed in zip(crew, seeds, strict=True)]  # fmt: skip
    for pending in asked:
        pending.result()
    crew[0].set("done", "1")
    assert busy.result() > 0
    judge([call for agent in crew for call in take_history(agent.events, ahead[agent.host.name])], KEYS)
    assert [text for agent in crew for text in errors(agent.events)] == []
    found = agree(sides, compactor, *crew)
    assert {key: value for key, value in found.items() if key in LIVE} == LIVE


@pytest.mark.parametrize("lock", ["ofd", pytest.param("soft", marks=pytest.mark.hosts)])
def test_long_values_are_unchanged_on_both_hosts_through_compactions(sides: Sides, lock: str) -> None:
    """They are not kept in memory, but read again from the file, which is another one by then."""
    a, b = sides.opened(2, lock=lock)
    long = {"a": (a, 200_000, 1), "b": (b, 300_000, 2)}
    for key, (writer, size, seed) in long.items():
        writer.do("mounts.work.set_value", "@store", key, size, seed)
    for compactor in (None, b, a):
        if compactor is not None:
            compactor.compact()
        fresh = sides.b.fork().open(sides.path(), lock=lock)
        for agent in (a, b, fresh):
            for key, (_, size, seed) in long.items():
                assert agent.do("mounts.work.has_value", "@store", key, size, seed)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_compactor_that_is_killed_at_its_seal_leaves_all_that_was_there(sides: Sides, share: float) -> None:
    hosts: tuple[tuple[Host, Host], ...] = ((sides.a, sides.b), (sides.b, sides.a))
    for compactor_host, other_host in hosts:
        other = other_host.fork().open(sides.path())
        fill(other)
        compactor = compactor_host.fork().open(sides.path())
        compactor.begin("with_worker", "mounts.trouble.hold_seal", share)
        assert compactor.next_event() == "sealing"
        asked = other.begin("store:set", "after", "1")
        compactor.kill()
        asked.result()
        assert agree(sides, other) == LIVE | {"introduced": b"1", "after": b"1"}
        other.compact()
        other.set("after", "2")
        assert agree(sides, other) == LIVE | {"introduced": b"1", "after": b"2"}
