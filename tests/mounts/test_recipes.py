"""Recipes, transactions and watches between hosts, while processes are killed and stopped at any moment."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from linear import models
from linear.checker import LINEARIZABLE, UNKNOWN, Call, check
from mounts.agents import LIMIT_S, Agent
from mounts.conftest import Sides
from mounts.test_histories import clocks
from mounts.test_shown_waits import await_shown
from support.told import Ahead

WIDTH = 4
STEPS = 8
"""How many steps of all there are, at least, between two troubles."""
STOPPED_S = 0.05
PARTITIONS = 7


def make_progress(sides: Sides, crew: list[Agent], steps: int) -> None:
    enough = sum(len(agent.events) for agent in crew) + steps
    end = time.monotonic() + LIMIT_S
    while sum(len(agent.events) for agent in crew) < enough:
        assert time.monotonic() < end, "nobody gets on"
        sides.look(1)


def kill_and_stop(sides: Sides, crew: list[Agent], rng: random.Random, kinds: list[str]) -> list[Agent]:
    """Kill or stop some of `crew` at any moment, as `kinds` says; return the killed ones.

    Nobody who is in trouble is asked for anything: the others go on, or wait until it is over.
    """
    killed: list[Agent] = []
    for kind in rng.sample(kinds, len(kinds)):
        make_progress(sides, crew, STEPS)
        victim = rng.choice([agent for agent in crew if agent not in killed])
        if kind == "kill":
            victim.kill()
            killed.append(victim)
        else:
            victim.stop()
            time.sleep(rng.uniform(0.1, 1) * STOPPED_S)  # and not until somebody goes on: it may have the log's lock
            victim.resume()
    make_progress(sides, crew, STEPS)
    return killed


def moments(agent: Agent, ahead: dict[str, Ahead]) -> list[tuple[str, Any, int, int]]:
    """Return what `agent` reported: what, with what result, and when, in host a's time, at least and at most."""
    least, most = ahead[agent.host.name]
    return [(what, result, moment - most, moment - least) for what, result, moment in agent.events]


def lock_calls(agent: Agent, steps: list[tuple[str, Any, int, int]]) -> list[Call]:
    """Return the calls of a lock that `agent` made; its death gives back what it held, sometime."""
    me = f"{agent.host.name}{agent.number}"
    calls: list[Call] = []
    begun: int | None = None
    for what, result, least, most in steps:
        if what in ("acquire", "release"):
            begun = least
        else:
            assert begun is not None
            calls.append(Call(begun, most, ({"acquired": "acquire", "released": "release"}[what], me), result))
            begun = None
    if agent.status:
        if begun is not None:
            calls.append(Call(begun, math.inf, (steps[-1][0], me), UNKNOWN))
        calls.append(Call(steps[-1][2] if steps else -math.inf, math.inf, ("release", me), UNKNOWN))
    return calls


@pytest.mark.parametrize("kind", ["Lock", pytest.param("Election", marks=pytest.mark.long)])
def test_lock_history_on_both_hosts_is_linearizable(sides: Sides, kind: str, rng: random.Random) -> None:
    ahead = clocks(sides)
    crew = sides.opened(WIDTH)
    asked = [agent.begin("with_worker", "mounts.work.hold_again", kind) for agent in crew]
    killed = kill_and_stop(sides, crew, rng, ["kill", "kill", "stop", "stop"])
    end = sides.a.fork().open(sides.path())
    end.set("over", "1")
    for agent, pending in zip(crew, asked, strict=True):
        if agent not in killed:
            pending.result()
    calls = [call for agent in crew for call in lock_calls(agent, moments(agent, ahead))]
    assert sum(call.operation[0] == "acquire" for call in calls) >= STEPS
    assert check(calls, models.counting_lock, (0, "")) == LINEARIZABLE, calls


def item_calls(agent: Agent, steps: list[tuple[str, Any, int, int]]) -> list[tuple[str, Call]]:
    """Return, by item, the calls that `agent` made; what it had when it died is free again, sometime."""
    me = f"{agent.host.name}{agent.number}"
    calls: list[tuple[str, Call]] = []
    what, item, begun = "", "", 0
    for word, name, least, most in steps:
        if word == "taken":
            calls.append((name, Call(begun, most, ("take", me), True)))
        elif word == "ended":
            calls.append((name, Call(begun, most, (what, me), True)))
        what, item, begun = word, name, least
    if agent.status and what in ("done", "give back"):
        calls.append((item, Call(begun, math.inf, (what, me), UNKNOWN)))
    if agent.status and what in ("taken", "done", "give back"):
        calls.append((item, Call(begun, math.inf, ("die", me), UNKNOWN)))
    return calls


def test_queue_item_is_neither_lost_nor_taken_by_two(sides: Sides, rng: random.Random) -> None:
    """One that is killed before it could tell of what it took had that for as long as nobody else took it."""
    ahead = clocks(sides)
    crew = sides.opened(WIDTH)
    asked = [
        agent.begin("with_worker", "mounts.work.put_and_take", str(number), rng.randrange(2**32))
        for number, agent in enumerate(crew)
    ]
    killed = kill_and_stop(sides, crew, rng, ["kill", "stop", "kill"])
    last = sides.b.fork().open(sides.path())
    last.set("over", "1")
    for agent, pending in zip(crew, asked, strict=True):
        if agent not in killed:
            pending.result()
    last.do("with_worker", "mounts.work.drain")
    steps = {agent: moments(agent, ahead) for agent in [*crew, last]}
    put = {
        name
        for own in steps.values()
        for (what, name, _, _), _ in pairwise(own)  # what came behind it says that it was put
        if what == "put"
    }
    calls: dict[str, list[Call]] = {}
    for agent, own in steps.items():
        for name, call in item_calls(agent, own):
            calls.setdefault(name, []).append(call)
    for name in put:
        assert any(call.operation[0] == "done" for call in calls.get(name, [])), f"{name} is lost"
    wrong = {name: own for name, own in calls.items() if check(own, models.item, "") != LINEARIZABLE}
    assert not wrong


@pytest.mark.parametrize("ttl", [None, 1.0], ids=["without a ttl", "with a ttl"])
def test_holder_that_is_stopped_keeps_its_lock_unless_it_has_a_ttl(sides: Sides, ttl: float | None) -> None:
    holder, other = sides.opened(2)
    said = holder.begin("with_worker", "mounts.work.hold_and_stop", ttl)
    assert holder.next_event() == "holding"
    assert other.do("mounts.work.try_named_lock", "@store", LIMIT_S / 2 if ttl else 0.3) == bool(ttl)
    while not said.is_done():  # it may be woken before it has stopped
        holder.resume()
        holder.host.look(0.05)
    assert said.result() == ("LockLostError" if ttl else "released")
    assert other.do("mounts.work.try_named_lock", "@store", LIMIT_S / 2)


def test_holder_that_closes_its_store_frees_its_lock_for_the_other_host(sides: Sides) -> None:
    holder, other = sides.opened(2)
    assert holder.do("mounts.work.take_named_lock", "@store")
    taken = other.begin("mounts.work.try_named_lock", "@store", LIMIT_S / 2)
    holder.do("close")
    assert taken.result()


def test_event_wakes_a_waiter_on_either_host_which_is_shown_before(sides: Sides) -> None:
    """The waiters have written nothing, and so have no session when they begin to wait."""
    *waiters, setter = sides.opened(3)
    asked = [waiter.begin("mounts.work.await_event", "@store") for waiter in waiters]
    await_shown(setter, sides.full(setter.host), [(None, "event", ["front/wake/0"])] * 2)
    setter.do("mounts.work.set_event", "@store")
    assert [pending.result() for pending in asked] == [True, True]
    waiters[1].do("mounts.work.clear_event", "@store")
    assert [agent.do("mounts.work.event_is_set", "@store") for agent in (*waiters, setter)] == [False] * 3


def test_notification_of_a_condition_reaches_the_other_host(sides: Sides) -> None:
    waiter, notifier = sides.opened(2)
    asked = waiter.begin("with_worker", "mounts.work.await_notification")
    assert waiter.next_event() == "holding"
    notifier.do("mounts.work.change_and_notify", "@store")
    assert asked.result() is True


def test_cyclic_barrier_of_both_hosts_is_broken_by_the_death_of_a_waiter(
    sides: Sides, together: Callable[..., list[Any]]
) -> None:
    crew = sides.opened(3)
    orders = together(crew, "mounts.work.meet_in_rounds", [["@store", 3, 4]] * 3)
    assert [sorted(of_round) for of_round in zip(*orders, strict=True)] == [[0, 1, 2]] * 4
    victim, other, third = crew
    victim.begin("mounts.work.meet_in_rounds", "@store", 3, 1)
    asked = other.begin("mounts.work.meet_in_rounds", "@store", 3, 1)
    end = time.monotonic() + LIMIT_S
    while third.do("mounts.work.arrived", "@store", 3) < 2:
        assert time.monotonic() < end, "two do not arrive"
    victim.kill()
    assert "died" in str(asked.error()), asked


def test_partitions_of_a_killed_member_go_to_the_members_on_both_hosts(sides: Sides) -> None:
    crew = sides.opened(3)
    for member in crew:
        member.begin("with_worker", "mounts.work.keep_partitions", PARTITIONS)
    await_shares(sides, crew)
    crew[1].kill()
    await_shares(sides, [crew[0], crew[2]])


def await_shares(sides: Sides, members: list[Agent]) -> None:
    """Return when `members` have reported fair shares of all partitions, each as the last that it reported."""
    end = time.monotonic() + LIMIT_S
    while True:
        shares = [member.events[-1] if member.events else [] for member in members]
        is_fair = max(map(len, shares)) - min(map(len, shares)) <= 1
        if is_fair and sorted(itertools.chain.from_iterable(shares)) == list(range(PARTITIONS)):
            return
        assert time.monotonic() < end, shares
        sides.look(1)


def test_watch_on_one_host_misses_no_change_of_the_other_through_compactions(sides: Sides) -> None:
    watcher, writer = sides.opened(2)
    asked = watcher.begin("with_worker", "mounts.work.watch_numbers", 39)
    for first in range(0, 40, 10):
        while watcher.next_event() < first - 1:  # a watch that lags behind two compactions may lose changes
            pass
        writer.do("mounts.work.set_numbers", "@store", first, first + 5)
        writer.compact()
        writer.do("mounts.work.set_numbers", "@store", first + 5, first + 10)
    assert asked.result() == list(range(40))


def test_contended_transactions_of_both_hosts_lose_nothing(sides: Sides, together: Callable[..., list[Any]]) -> None:
    crew = sides.opened(WIDTH)
    crew[0].multi_set(["purse/a", "purse/b"], ["100", "0"])
    together(crew, "mounts.work.transfer", [["@store", 10]] * WIDTH)
    moved = 10 * WIDTH
    for agent in crew:
        found = agent.multi_get(["purse/a", "purse/b", "transfers"])
        assert [int(value) for value in found] == [100 - moved, moved, moved]


def test_item_of_a_killed_consumer_goes_to_a_consumer_on_the_other_host(sides: Sides) -> None:
    for victim, other in (sides.opened(2), sides.opened(2)[::-1]):
        other.do("mounts.work.put_item", "@store", "work")
        victim.begin("with_worker", "mounts.work.take_and_keep")
        assert victim.next_event() == (b"work", 1)
        asked = other.begin("mounts.work.take_and_ack", "@store")
        victim.kill()
        assert asked.result() == (b"work", 2)
