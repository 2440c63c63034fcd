"""Barriers and exchanges of data with ranks on both hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mounts.conftest import Sides

LIMIT_S = 300
RANKS = 8


def test_ranks_on_both_hosts_meet_at_barriers(sides: Sides, together: Callable[..., list[Any]]) -> None:
    crew = sides.opened(4)
    assert together(crew, "contract.worker.barriers", [["@store", rank, 4, 3] for rank in range(4)]) == [None] * 4


def test_exchange_among_eight_ranks_carries_a_megabyte_each(sides: Sides, together: Callable[..., list[Any]]) -> None:
    crew = sides.opened(RANKS)
    given = [["@store", rank, RANKS, 1 << 20, LIMIT_S] for rank in range(RANKS)]
    assert together(crew, "mounts.work.exchange", given) == [True] * RANKS


def test_broadcast_and_gather_cross_hosts(sides: Sides, together: Callable[..., list[Any]]) -> None:
    crew = sides.opened(4)
    sent = together(crew, "mounts.work.broadcast_and_gather", [["@store", rank, 4, LIMIT_S] for rank in range(4)])
    gathered = [b"0 told x", b"1 told x", b"2 told x", b"3 told x"]
    assert sent == [(b"x", gathered), *[(b"x", None)] * 3]


def test_barrier_names_the_missing_ranks_to_each_rank_that_came(
    sides: Sides, together: Callable[..., list[Any]]
) -> None:
    crew = sides.opened(3)

    def come(limit: float) -> list[list[str]]:
        ranks = zip(crew, (0, 2, 3), strict=True)
        asked = [agent.begin("mounts.work.come_in_vain", "@store", rank, 5, limit) for agent, rank in ranks]
        return [pending.result() for pending in asked]

    limit = 0.5
    come(limit)  # one may give up before another comes; when all have been there, each knows of all
    while come(limit) != [["1", "4"]] * 3:  # on a slow machine one may not have got so far
        limit *= 2
        assert limit < LIMIT_S


@pytest.mark.hosts
def test_write_wakes_sixty_four_waiters_on_two_hosts(sides: Sides) -> None:
    crew = sides.opened(64)
    asked = [agent.begin("with_worker", "mounts.work.linger", "k") for agent in crew]
    for agent in crew:
        assert agent.next_event() == "waiting"
    sides.b.fork().open(sides.path()).set("k", "go")
    assert [pending.result() for pending in asked] == [b"go"] * 64
