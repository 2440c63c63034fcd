"""The session records of a log, the dead sessions, and the participants that left or failed."""

from __future__ import annotations

import pytest

from fscoord._log.format.control_records import Failure, Session
from fscoord._log.session_table import SessionTable

PARTICIPANT = Session("host", 1, rank=7, world_size=3)


def table_with(*sessions: Session) -> SessionTable:
    table = SessionTable()
    for number, session in enumerate(sessions, start=1):
        table.add(number, session)
    return table


def test_session_that_adds_details_keeps_its_start_time_and_its_rank() -> None:
    table = SessionTable()
    table.add(3, Session("host", 1, rank=7, since_ns=100))
    table.add(3, Session("host", 1, label="more", since_ns=200))
    assert table.sessions[3] == Session("host", 1, label="more", since_ns=100)
    assert table.ranks == {7: {3}}
    table.add(2, Session("host", 2, rank=7, since_ns=300))
    assert (table.ranks, table.last) == ({7: {2, 3}}, 3)


def test_last_time_of_a_snapshot_does_not_replace_a_later_one() -> None:
    table = SessionTable()
    table.times[3] = 200
    table.set_last_time(3, 100)
    table.set_last_time(4, 100)
    assert table.times == {3: 200, 4: 100}


def test_death_time_is_that_of_the_first_death_record() -> None:
    table = SessionTable()
    table.add_death(3, 100)
    table.add_death(3, 200)
    assert table.deaths == {3: 100}


def test_world_size_is_that_of_the_first_participant() -> None:
    table = table_with(Session("host", 1), PARTICIPANT, PARTICIPANT._replace(world_size=4))
    assert table.world_size == 3
    assert table.participants() == [2, 3]


@pytest.mark.parametrize(
    ("sessions", "left", "fails"),
    [
        ([PARTICIPANT], [], True),
        ([PARTICIPANT], [1], False),
        ([Session("host", 1, rank=7)], [], False),
        ([PARTICIPANT, PARTICIPANT._replace(replaces=1)], [], False),
    ],
    ids=["participant", "left before", "not a participant", "registered again"],
)
def test_death_is_a_failure_if_a_participant_has_not_left(
    sessions: list[Session], left: list[int], fails: bool
) -> None:
    table = table_with(*sessions)
    table.left.update(left)
    table.add_death(1, 100)
    assert table.failure == (Failure(PARTICIPANT, time_ns=100) if fails else None)


def test_first_failure_of_a_run_counts_and_that_of_the_run_before_is_kept_beside_it() -> None:
    table = table_with(PARTICIPANT, PARTICIPANT)
    before = Failure(PARTICIPANT, "KeyError", is_previous=True, time_ns=1)
    table.add_failure(before)
    table.add_failure(Failure(PARTICIPANT, "ValueError", time_ns=2))
    table.add_death(2, 3)
    assert table.failure == Failure(PARTICIPANT, "ValueError", time_ns=2)
    assert table.failures() == [before, table.failure]


def test_failure_says_which_participant_and_when() -> None:
    at = (3 * 3600 + 4 * 60 + 5) * 10**9
    assert str(Failure(PARTICIPANT, "KeyError", time_ns=at)) == "rank 7 (host:1) left by KeyError at 03:04:05 UTC"
    assert str(Failure(Session("h", 2), time_ns=at)) == "h:2 was found dead at 03:04:05 UTC"
    found = Failure.decode(Failure(PARTICIPANT, "KeyError", is_previous=True).encode(), 9)
    assert found == Failure(PARTICIPANT, "KeyError", is_previous=True, time_ns=9)


def test_session_table_is_empty_after_a_run_is_over() -> None:
    table = table_with(PARTICIPANT)
    table.add_death(1, 100)
    table.left.add(2)
    table.previous, table.sealed_by, table.is_ended = table.failure, 3, True
    table.reset()
    assert vars(table) == vars(SessionTable())
