"""The session records of a log, the dead sessions, and the moment when all have left."""

from __future__ import annotations

import pytest

from fscoord._log.format.control_records import Session
from fscoord._log.liveness.session_table import SessionTable


@pytest.mark.parametrize(
    ("participants", "left", "is_finished"),
    [(0, 0, False), (0, 3, False), (1, 0, False), (1, 1, True), (2, 1, False), (2, 2, True), (2, 3, True)],
)
def test_life_is_over_when_all_participants_have_left(participants: int, left: int, is_finished: bool) -> None:
    table = SessionTable(participants)
    table.left = left
    assert table.is_finished is is_finished
    table.is_ended = True
    assert table.is_finished


def test_session_that_adds_details_keeps_its_start_time_and_its_rank() -> None:
    table = SessionTable(0)
    table.add(3, Session("host", 1, rank=7, since_ns=100))
    table.add(3, Session("host", 1, label="more", since_ns=200))
    assert table.sessions[3] == Session("host", 1, label="more", since_ns=100)
    assert table.ranks == {7: {3}}
    table.add(2, Session("host", 2, rank=7, since_ns=300))
    assert (table.ranks, table.last) == ({7: {2, 3}}, 3)


def test_last_time_of_a_snapshot_does_not_replace_a_later_one() -> None:
    table = SessionTable(0)
    table.times[3] = 200
    table.set_last_time(3, 100)
    table.set_last_time(4, 100)
    assert table.times == {3: 200, 4: 100}


def test_death_time_is_that_of_the_first_death_record() -> None:
    table = SessionTable(0)
    table.add_death(3, 100)
    table.add_death(3, 200)
    assert table.deaths == {3: 100}


def test_session_table_is_empty_after_a_life_is_over() -> None:
    table = SessionTable(1)
    table.add(3, Session("host", 1, rank=7, since_ns=100))
    table.add_death(3, 100)
    table.left, table.is_ended = 1, True
    table.reset()
    assert vars(table) == vars(SessionTable(1))
