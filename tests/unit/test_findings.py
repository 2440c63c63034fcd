"""Findings on a picture, and their order: data in, findings out."""

from __future__ import annotations

from typing import Any

import pytest
from support.internals import RoundState

from fscoord.recipes import Contender
from fscoord.recipes.holdings import LineState
from fscoord.status import LogLock, Picture, SessionStatus, ShownWait, StatusFinding, find_all
from fscoord.status.findings import clock_text, duration, place_in_line

DEATH = 12 * 3600 + 3 * 60 + 11.0


def waiting(kind: str, name: str, *keys: str, seconds: float = 42.0, size: int = 0) -> ShownWait:
    return ShownWait(kind, name, keys, len(keys), size, seconds, 0)


def at_barrier(name: str, seconds: float = 42.0, size: int = 0) -> ShownWait:
    return waiting("barrier", name, f"{name}/complete", seconds=seconds, size=size)


def in_line(name: str, number: int, seconds: float = 42.0) -> ShownWait:
    return waiting("lock", name, f"{name}/wake/{number}", seconds=seconds)


def person(number: int, rank: int | None = None, waits: ShownWait | None = None, **more: Any) -> SessionStatus:
    rank = number if rank is None else rank
    return SessionStatus(
        number, rank, "", f"node{number}", 1000 + number, 0.0, more.pop("alive", "yes"), waiting=waits, **more
    )


def line(name: str, holders: list[int], waiters: list[int], *, kind: str = "lock", needs_all: bool = True) -> LineState:
    return LineState(
        kind,
        name,
        tuple(Contender(f"node{number}:1", number, number) for number in holders),
        tuple(Contender(f"node{number}:1", number, 0) for number in waiters),
        tuple(b"%s/wake/%d" % (name.encode(), number) for number in waiters),
        needs_all,
    )


def round_of(name: str, world_size: int, missing: list[int]) -> RoundState:
    done = name.encode() + b"/complete"
    return RoundState(name, done, world_size, world_size - len(missing), tuple(missing))


def picture(*participants: SessionStatus, **more: Any) -> Picture:
    ranks: dict[int, tuple[int, ...]] = {}
    for each in participants:
        if each.rank is not None:
            ranks[each.rank] = (*ranks.get(each.rank, ()), each.number)
    return Picture("store", participants, more.pop("ranks", ranks), **more)


def kinds(found: list[StatusFinding]) -> list[str]:
    return [finding.kind for finding in found]


def test_picture_in_which_nobody_waits_has_no_findings() -> None:
    assert find_all(picture(person(1), person(2, alive="no"))) == []
    assert find_all(picture()) == []


def test_barrier_tells_how_many_came_and_the_state_of_each_missing_rank() -> None:
    seen = picture(
        *(person(number, number - 1, at_barrier("epoch 7")) for number in range(1, 6)),
        person(6, 5, idle=41.0),
        person(8, 7, alive="no", found_dead=DEATH),
        rounds=(round_of("epoch 7", 8, [5, 6, 7]),),
    )
    (found,) = find_all(seen)
    assert found.kind == "barrier"
    assert found.message == (
        "barrier 'epoch 7': 5 of 8 came, and the first has waited for 42 s. Missing: 5, 6, 7 (rank 7 (node8:1008) is"
        " dead, as found at 12:03:11 UTC; rank 5 (node6:1006) is alive, waits for nothing in this store, last wrote"
        " 41 s ago; rank 6 was not seen in this store). Start rank 7 again, or end the job"
    )
    assert found.sessions == (6, 8)
    assert found.seconds == 42.0


def test_barrier_whose_missing_ranks_live_is_a_finding_only_after_a_while() -> None:
    def seen(seconds: float) -> Picture:
        rounds = (round_of("b", 2, [2]),)
        return picture(person(1, 1, at_barrier("b", seconds)), person(2), rounds=rounds)

    assert find_all(seen(9.0)) == []
    assert kinds(find_all(seen(11.0))) == ["barrier"]
    assert kinds(find_all(seen(0.5), slow=0)) == ["barrier"]


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"alive": "no"}, "has ended). Start rank 2 again, or end the job"),
        ({"is_stopped": True}, "is stopped). Continue 1002 on node2 (kill -CONT 1002) or kill it"),
    ],
)
def test_barrier_that_waits_for_an_ended_or_stopped_rank_is_a_finding(state: dict[str, Any], words: str) -> None:
    rounds = (round_of("b", 2, [2]),)
    (found,) = find_all(picture(person(1, 1, at_barrier("b", 1.5)), person(2, **state), rounds=rounds))
    assert found.message.endswith(f"Missing: 2 (rank 2 (node2:1002) {words}")


def test_rank_that_was_restarted_has_not_ended() -> None:
    rounds = (round_of("b", 2, [2]),)
    seen = picture(person(1, 1, at_barrier("b", 1.5)), person(2, alive="no"), person(3, 2), rounds=rounds)
    assert find_all(seen) == []


def test_barrier_at_which_only_ended_sessions_waited_is_no_finding() -> None:
    rounds = (round_of("b", 2, [2]),)
    assert find_all(picture(person(1, 1, at_barrier("b"), alive="no"), person(2, alive="no"), rounds=rounds)) == []


def test_barrier_without_ranks_tells_that_none_can_be_named() -> None:
    state = RoundState("b", b"b/last_member", 0, 3, None)
    seen = picture(person(1, 1, waiting("barrier", "b", "b/last_member", size=4)), rounds=(state,))
    (found,) = find_all(seen)
    assert "barrier 'b': 3 of 4 came" in found.message
    assert "it is unknown which are missing" in found.message


def test_exchange_names_the_ranks_whose_data_is_missing() -> None:
    waits = waiting("exchange", "x", "x1", "x2", size=3)
    seen = picture(person(1, 0, waits), person(2, 1, alive="no", found_dead=DEATH), person(3, 2))
    (found,) = find_all(seen)
    assert found.message.startswith(
        "exchange 'x' of 3 ranks: 1 wait, the first for 42 s. Missing: 1, 2 (rank 1 (node2:1002) is dead"
    )


def test_exchange_whose_ranks_wait_for_one_key_names_those_that_do_not_wait() -> None:
    waits = waiting("exchange", "x", "x/given", size=3)
    seen = picture(person(1, 0, waits), person(2, 1, waits), person(3, 2))
    (found,) = find_all(seen)
    assert "Missing: 2 (rank 2 (node3:1003) is alive" in found.message


def test_deadlock_of_two_locks_is_spelled_out() -> None:
    seen = picture(
        person(1, 0, in_line("b", 1)),
        person(2, 1, in_line("a", 2, seconds=40.0)),
        lines=(line("a", [1], [2]), line("b", [2], [1])),
    )
    found = find_all(seen)
    assert kinds(found) == ["deadlock"]
    assert found[0].message == (
        "rank 0 waits for lock 'b', which rank 1 holds; rank 1 waits for lock 'a', which rank 0 holds. This is a"
        " deadlock unless another thread of one of these processes releases its hold: end one of them (node1:1001,"
        " node2:1002)"
    )
    assert found[0].sessions == (1, 2)
    assert found[0].seconds == 42.0


def test_deadlock_of_three_is_one_finding() -> None:
    lines = (line("a", [1], [3]), line("b", [2], [1]), line("c", [3], [2]))
    (found,) = find_all(picture(person(1), person(2), person(3), lines=lines))
    assert found.sessions == (1, 2, 3)


def test_deadlock_may_lead_through_a_barrier() -> None:
    """Rank 1 waits for the lock of rank 2, which waits at the barrier for rank 1."""
    seen = picture(
        person(1, waits=in_line("l", 1)),
        person(2, waits=at_barrier("b")),
        lines=(line("l", [2], [1]),),
        rounds=(round_of("b", 2, [1]),),
    )
    assert kinds(find_all(seen)) == ["deadlock", "barrier"]


def test_dead_session_is_in_no_deadlock() -> None:
    lines = (line("a", [1], [2]), line("b", [2], [1]))
    assert "deadlock" not in kinds(find_all(picture(person(1, alive="no"), person(2), lines=lines)))


def test_session_that_waits_for_itself_is_no_deadlock() -> None:
    """Another thread of it may let go."""
    assert find_all(picture(person(1), lines=(line("a", [1], [1]),))) == []


def test_sessions_of_several_ranks_that_meet_at_one_barrier_are_no_deadlock() -> None:
    """Each is two ranks, in two threads, of which one has come."""
    seen = picture(
        person(1, 0, at_barrier("b", 1.0)),
        person(2, 2, at_barrier("b", 1.0)),
        rounds=(round_of("b", 4, [1, 3]),),
        ranks={0: (1,), 1: (1,), 2: (2,), 3: (2,)},
    )
    assert find_all(seen) == []


def test_semaphore_is_in_a_deadlock_only_if_it_has_one_holder() -> None:
    def seen(holders: list[int]) -> Picture:
        lines = (line("s", holders, [1], kind="semaphore", needs_all=False), line("a", [1], [2]))
        return picture(person(1), person(2), person(3), lines=lines)

    assert find_all(seen([2, 3])) == []
    assert kinds(find_all(seen([2]))) == ["deadlock"]


def test_lock_whose_holder_is_stopped_is_a_finding_with_the_remedy() -> None:
    seen = picture(person(1, is_stopped=True), person(2, waits=in_line("a", 2, 1.5)), lines=(line("a", [1], [2]),))
    (found,) = find_all(seen)
    assert found.kind == "lock"
    assert found.message == (
        "lock 'a': rank 1 (node1:1001) holds it and is stopped, and 1 waits for it. Continue 1001 on node1"
        " (kill -CONT 1001) or kill it"
    )


@pytest.mark.parametrize(
    ("found_dead", "words"), [(None, "has ended"), (DEATH, "is dead, as found at 12:03:11 UTC")], ids=["ended", "dead"]
)
def test_lock_whose_holder_has_ended_or_is_dead_is_a_finding(found_dead: float | None, words: str) -> None:
    holder = person(1, alive="no", found_dead=found_dead)
    (found,) = find_all(picture(holder, person(2, waits=in_line("a", 2, 1.5)), lines=(line("a", [1], [2]),)))
    assert found.message == f"lock 'a': rank 1 (node1:1001) holds it and {words}, and 1 waits for it"


def test_process_of_a_holder_without_a_rank_is_named_once() -> None:
    holder = person(1, is_stopped=True)._replace(rank=None)
    (found,) = find_all(picture(holder, person(2, waits=in_line("a", 2, 1.5)), lines=(line("a", [1], [2]),)))
    assert found.message.startswith("lock 'a': node1:1001 holds it and is stopped, and")


def test_lock_for_which_nobody_waits_is_no_finding() -> None:
    assert find_all(picture(person(1, is_stopped=True), lines=(line("a", [1], []),))) == []
    lines = (line("a", [1], [2]), line("b", [2], [1]))
    assert find_all(picture(person(1, alive="no"), person(2, alive="no"), lines=lines)) == []


def test_holder_that_does_nothing_is_a_finding_after_a_while() -> None:
    def seen(**more: Any) -> list[StatusFinding]:
        lines = (line("a", [1], [2]),)
        return find_all(picture(person(1, **more), person(2, waits=in_line("a", 2)), lines=lines))

    (found,) = seen(idle=100.0)
    assert found.kind == "idle"
    assert found.message.startswith("lock 'a': 1 waits for it, the first for 42 s, and its holder is idle in this st")
    assert kinds(seen(idle=None)) == ["idle"]
    assert seen(idle=1.0) == []
    assert seen(idle=100.0, waits=waiting("key", "", "plan")) == []


def test_writer_that_is_stopped_inside_the_log_is_a_finding() -> None:
    (found,) = find_all(picture(person(1, is_stopped=True), log_lock=LogLock(1, "node1:1001", 0.3)))
    assert found.kind == "log-lock"
    assert "rank 1 (node1:1001) is stopped and holds the lock of the store's log" in found.message
    assert "kill -CONT 1001" in found.message


def test_unknown_holder_of_the_log_is_named_as_far_as_it_is_known() -> None:
    (found,) = find_all(picture(log_lock=LogLock(0, "node9:7", 12.0)))
    assert found.message.startswith("node9:7 has held the lock of the store's log for 12 s without writing")
    assert found.sessions == ()


def test_findings_that_never_end_come_first_and_then_the_longest() -> None:
    seen = picture(
        person(1, 0, at_barrier("slow", 500.0)),
        person(2, 1),
        person(3, 2, at_barrier("dead", 2.0)),
        person(4, 3, alive="no"),
        person(5, 4, in_line("x", 5)),
        person(6, 5, in_line("y", 6)),
        person(7, 6, is_stopped=True),
        lines=(line("x", [6], [5]), line("y", [5], [6]), line("z", [7], [2])),
        rounds=(round_of("slow", 2, [1]), round_of("dead", 4, [3])),
    )
    found = find_all(seen)
    assert [(finding.kind, finding.urgency) for finding in found] == [
        ("deadlock", 0),
        ("barrier", 0),
        ("lock", 1),
        ("barrier", 2),
    ]


def test_missing_ranks_beyond_eight_are_counted() -> None:
    rounds = (round_of("b", 100, list(range(1, 100))),)
    (found,) = find_all(picture(person(1, 0, at_barrier("b")), rounds=rounds))
    assert "Missing: 1, 2, 3, 4, 5, 6, 7, 8... (rank 1 was not seen in this store; " in found.message
    assert found.message.endswith("; and 91 more)")


@pytest.mark.parametrize(
    ("holders", "waiters", "number", "words"),
    [
        ([1], [2], 2, ", 2nd in line"),
        ([1], [2, 3], 3, ", 3rd in line"),
        ([1], list(range(2, 13)), 11, ", 11th in line"),
        ([1], list(range(2, 30)), 21, ", 21st in line"),
        ([1], [2], 9, ""),
    ],
)
def test_place_in_line_counts_the_holders(holders: list[int], waiters: list[int], number: int, words: str) -> None:
    assert place_in_line([line("l", holders, waiters)], in_line("l", number)) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.04, "0.0 s"), (9.96, "10.0 s"), (42.9, "42 s"), (60, "1 min"), (185, "3 min 5 s"), (7800, "2 h 10 min")],
)
def test_duration_has_at_most_two_units(seconds: float, words: str) -> None:
    assert duration(seconds) == words
    assert duration(90000) == "1 d 1 h"


def test_time_of_day_is_in_utc() -> None:
    assert clock_text(DEATH) == "12:03:11 UTC"


@pytest.mark.parametrize(
    ("kind", "name", "keys", "count", "words"),
    [
        ("barrier", "epoch 7", ("epoch 7/complete",), 1, "barrier 'epoch 7'"),
        ("key", "", ("plan",), 1, "key 'plan'"),
        ("key", "", ("a", "b", "c"), 5, "keys 'a', 'b' and 3 more"),
        ("key", "", ("a", "b"), 2, "keys 'a', 'b'"),
        ("queue", "", ("work",), 1, "queue 'work'"),
        ("rendezvous", "job", ("x",), 1, "rendezvous 'job'"),
    ],
)
def test_wait_is_told_in_words(kind: str, name: str, keys: tuple[str, ...], count: int, words: str) -> None:
    assert ShownWait(kind, name, keys, count, 0, 1.0, 0).words() == words
