"""Liveness between hosts: all agree on each death, and no living process counts as dead."""

from __future__ import annotations

import time
from typing import Any

import pytest
from mounts.agents import Agent, Pending
from mounts.conftest import Sides

from fscoord import StaleRunError
from fscoord.store import Member


def by_number(members: list[Member]) -> dict[int, str]:
    return {member.number: member.alive for member in members}


def test_liveness_of_all_sessions_is_seen_on_both_hosts(sides: Sides) -> None:
    crew = sides.opened(4)
    numbers = [agent.do("mounts.work.session", "@store") for agent in crew]
    for agent in crew:
        members = agent.members()
        assert {member.number: member.pid for member in members} == dict(
            zip(numbers, [other.do("pid") for other in crew], strict=True)
        )
        assert [member.host for member in members] == [crew[i % 2].host.hostname for i in range(4)]
        assert set(by_number(members).values()) == {"yes"}


def test_death_is_seen_on_the_other_host_and_reported_alike_to_all(sides: Sides) -> None:
    crew = sides.opened(4)
    numbers = [agent.do("mounts.work.session", "@store") for agent in crew]
    for victim, witness in ((0, 1), (1, 2)):
        crew[victim].kill()
        assert by_number(crew[witness].members())[numbers[victim]] == "no"
    found = [agent.members() for agent in crew[2:]]
    assert found[0] == found[1]
    assert by_number(found[0]) == {numbers[0]: "no", numbers[1]: "no", numbers[2]: "yes", numbers[3]: "yes"}
    assert all((member.found_dead is None) == (member.alive == "yes") for member in found[0])


def test_process_that_is_stopped_is_not_dead(sides: Sides) -> None:
    crew = sides.opened(2)
    numbers = [agent.do("mounts.work.session", "@store") for agent in crew]
    for sleeper, other, number in zip(crew, crew[::-1], numbers, strict=True):
        sleeper.stop()
        assert by_number(other.members())[number] == "yes"
        sleeper.resume()
        sleeper.set("k", "1")


def test_start_after_a_failed_one_is_another_run_on_both_hosts(sides: Sides) -> None:
    doomed, survivor = sides.opened(2, world_size=2)
    doomed.set("address", "old")
    assert survivor.get("address") == b"old"
    doomed.kill()
    first, second = (agent.open(sides.path(), world_size=2) for agent in sides.agents(2))
    for agent in (first, second):
        assert agent.list_keys() == []
    second.set("address", "new")
    assert first.get("address") == b"new"
    with pytest.raises(StaleRunError, match="was found dead"):
        survivor.get("address")


def test_waiter_for_a_rank_of_the_other_host_learns_of_its_death(sides: Sides) -> None:
    doomed, waiter, other = sides.opened(3)
    for rank, agent in enumerate((doomed, waiter, other)):
        agent.announce_rank(rank)
    asked = [agent.begin("with_worker", "mounts.work.linger_alive", [0, 1, 2]) for agent in (waiter, other)]
    for agent in (waiter, other):
        assert agent.next_event() == "waiting"
    doomed.kill()
    assert [pending.result() for pending in asked] == [[0], [0]]
    assert other.dead_ranks([0, 1, 2]) == [0]


def test_lock_passes_from_a_dead_holder_to_the_other_host(sides: Sides) -> None:
    holder, *others = sides.opened(3)
    holder.begin("with_worker", "mounts.work.hold_named_lock")
    assert holder.next_event() == "holding"
    asked = [agent.begin("mounts.work.pass_named_lock", "@store") for agent in others]
    holder.kill()
    for pending in asked:
        pending.result()
    assert others[0].get("passed") == b"2"


def agreed(crew: dict[Agent, Pending], size: int, limit: float = 300) -> Any:
    """Return the round that each of `crew` told of last, once that is one round of `size` with all ranks."""
    until = time.monotonic() + limit
    last: dict[int, dict[str, Any]] = {}
    while True:
        for i, (agent, pending) in enumerate(crew.items()):
            agent.host.look(0.05)
            assert not pending.is_done(), f"agent {i} of the rendezvous ended: {pending.error()!r}"
            while agent.events:
                last[i] = agent.events.popleft()
        rounds = {told["round"] for told in last.values()}
        ranks = sorted(told["rank"] for told in last.values() if told["world"] == size)
        if len(rounds) == 1 and ranks == list(range(size)):
            return rounds.pop()
        assert time.monotonic() < until, f"they never agree: {last}"


def test_rendezvous_on_both_hosts_goes_on_after_a_death_and_admits_newcomers(sides: Sides) -> None:
    def begin(agent: Agent) -> Pending:
        return agent.begin("with_worker", "mounts.work.meet", sides.full(agent.host, "rendezvous"), 2, 4)

    crew = {agent: begin(agent) for agent in sides.agents(4)}
    first = agreed(crew, 4)
    victim = next(iter(crew))
    del crew[victim]
    victim.kill()
    second = agreed(crew, 3)
    assert second > first
    newcomer = sides.a.fork()
    crew[newcomer] = begin(newcomer)
    assert agreed(crew, 4) > second
