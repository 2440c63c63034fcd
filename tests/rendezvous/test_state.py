"""The rules of a rendezvous: each of them as a story, and all of them in random schedules."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import combinations, product

import pytest
from rendezvous.simulation import World

from fscoord import RendezvousStateError
from fscoord.rendezvous.state import Decision, Limits, Observed, State, Verdict, close, decide, evict

TWO_TO_THREE = Limits(2, 3)
FORMING = State()
FULL = State(complete=True, participants=("a", "b", "c"), sequence=7, round=4)
PAIR = State(complete=True, participants=("a", "b"), sequence=7, round=4)
ALL = frozenset("abcdefgh")


def ruled(state, me, limits=TWO_TO_THREE, **seen):
    seen = {"alive": ALL, "life": state.life if me in state.present else None, **seen}
    return decide(state, me, limits, Observed(**seen))


def written(state, me, limits=TWO_TO_THREE, **seen):
    decision = ruled(state, me, limits, **seen)
    assert decision.verdict is Verdict.WRITE
    assert decision.state.sequence == state.sequence + 1
    return decision.state


def is_waiting(state, me, limits=TWO_TO_THREE, **seen):
    decision = ruled(state, me, limits, **seen)
    assert decision.state == state
    return decision.verdict is Verdict.WAIT


# A round forms


def test_first_node_joins_and_waits_for_others():
    state = written(FORMING, "a")
    assert state == State(sequence=1, participants=("a",))
    assert is_waiting(state, "a")


def test_nodes_in_sufficient_number_wait_for_the_last_call():
    state = written(written(FORMING, "b"), "a")
    assert state.participants == ("b", "a")
    assert is_waiting(state, "a")
    assert is_waiting(state, "b")


def test_participant_completes_the_round_by_names_after_the_last_call():
    state = State(participants=("b", "a"))
    done = written(state, "a", is_last_call_over=True)
    assert done == State(sequence=1, complete=True, participants=("a", "b"))
    assert ruled(done, "a").verdict is ruled(done, "b").verdict is Verdict.JOINED


def test_last_call_does_not_help_without_enough_nodes():
    assert is_waiting(State(participants=("a",)), "a", is_last_call_over=True)


def test_last_of_all_nodes_completes_the_round_without_a_last_call():
    state = State(participants=("a", "c"))
    assert written(state, "b") == State(sequence=1, complete=True, participants=("a", "b", "c"))


def test_single_node_is_a_round_when_that_is_enough():
    assert written(FORMING, "a", Limits(1, 1)).complete
    assert not written(FORMING, "a", Limits(1, 2)).complete


def test_round_with_nodes_that_were_never_seen_alive_is_not_completed():
    """They may be what a dead job left behind."""
    state = State(participants=("a", "c"))
    joined = written(state, "b", alive=frozenset("a"))
    assert not joined.complete
    assert is_waiting(joined, "b", alive=frozenset("a"))
    assert is_waiting(joined, "b", alive=frozenset("a"), is_last_call_over=True)
    assert written(joined, "a", alive=frozenset("bc")).complete


def test_round_is_completed_by_a_participant_only():
    state = State(participants=("a", "b"), former=("c",))
    decided = written(state, "d", is_last_call_over=True)
    assert not decided.complete
    assert decided.waiting == ("d",)


def test_dead_nodes_are_taken_out_of_a_forming_round_before_anything_else():
    state = State(participants=("a", "x"), waiting=("y",), former=("z",))
    assert written(state, "b", dead=frozenset("xyz")).participants == ("a", "b")
    gone = written(State(participants=("a", "x")), "a", dead=frozenset("x"))
    assert gone.participants == ("a",)


def test_node_does_not_take_itself_for_dead():
    assert is_waiting(State(participants=("a",)), "a", dead=frozenset("a"))
    assert ruled(PAIR, "a", dead=frozenset("a")).verdict is Verdict.JOINED


# A round is complete


def test_node_that_comes_late_waits():
    state = written(PAIR, "c")
    assert state == replace(PAIR, sequence=8, waiting=("c",))
    assert is_waiting(state, "c")


def test_node_that_comes_to_a_full_round_waits_too():
    state = written(FULL, "d")
    assert state.waiting == ("d",)
    assert is_waiting(state, "d")


def test_waiting_nodes_keep_the_order_of_coming():
    assert written(written(FULL, "e"), "d").waiting == ("e", "d")


def test_participant_that_comes_again_breaks_the_round_and_is_in_the_next():
    state = written(replace(PAIR, waiting=("c",)), "a", returned=4)
    assert (state.round, state.complete, state.participants) == (5, False, ("a",))
    assert (state.former, state.waiting) == (("b",), ("c",))


def test_participant_that_has_not_read_its_outcome_yet_gets_it_first():
    assert ruled(PAIR, "a", returned=3).verdict is Verdict.JOINED
    assert ruled(PAIR, "a", returned=None).verdict is Verdict.JOINED


def test_round_is_broken_when_a_participant_dies():
    state = evict(PAIR, {"a"})
    assert (state.round, state.complete, state.participants, state.former) == (5, False, (), ("b",))
    assert evict(replace(PAIR, waiting=("c",)), {"c"}) == PAIR
    assert evict(PAIR, {"stranger"}) == PAIR


def test_former_participants_have_the_first_places():
    broken = State(round=5, former=("a", "b"), waiting=("d", "e"))
    assert is_waiting(broken, "e")
    state = written(broken, "d")
    assert state.participants == ("d",)
    assert is_waiting(state, "e")
    state = written(written(state, "b"), "a")
    assert (state.complete, state.participants, state.waiting) == (True, ("a", "b", "d"), ("e",))


def test_waiting_nodes_have_the_next_places_before_newcomers():
    broken = State(round=5, former=("a",), waiting=("d", "e"))
    assert written(broken, "f").waiting == ("d", "e", "f")


def test_places_are_not_kept_for_ever():
    broken = State(round=5, former=("a", "b"), waiting=("d", "e"))
    state = written(broken, "e", is_reserve_over=True)
    assert (state.participants, state.waiting) == (("e",), ("d",))
    state = written(written(state, "d", is_reserve_over=True), "f", is_reserve_over=True)
    assert (state.complete, state.participants) == (True, ("d", "e", "f"))
    assert written(state, "a").waiting == ("a",)


def test_former_participant_without_a_place_waits():
    state = State(round=5, participants=("d", "e", "f"), former=("a",))
    assert written(state, "a") == replace(state, sequence=1, former=(), waiting=("a",))


def test_round_that_completes_without_a_former_participant_forgets_it():
    state = State(round=5, participants=("b", "d"), former=("a",))
    assert written(state, "b", is_last_call_over=True).former == ()


# Closing


def test_node_that_waits_in_a_forming_round_learns_that_it_was_closed():
    state = State(participants=("a",), closed=True)
    assert ruled(state, "a").verdict is Verdict.CLOSED


def test_spare_node_learns_that_it_was_not_needed():
    state = replace(FULL, waiting=("d",), closed=True)
    assert ruled(state, "d").verdict is Verdict.SPARE
    assert ruled(replace(PAIR, waiting=("d",), closed=True), "d").verdict is Verdict.CLOSED


def test_participant_gets_its_outcome_even_if_it_was_closed_meanwhile():
    state = close(PAIR, "a")
    assert (state.participants, state.left, state.present) == (("a", "b"), ("a",), {"b"})
    assert ruled(state, "b").verdict is Verdict.JOINED
    assert ruled(state, "b", returned=4).verdict is Verdict.CLOSED


def test_late_joiner_of_a_closed_rendezvous_whose_nodes_live_is_turned_away():
    state = close(PAIR, "a")
    assert ruled(state, "x", alive=frozenset("b")).verdict is Verdict.CLOSED


def test_newcomer_waits_as_long_as_it_is_unknown_whether_the_nodes_live():
    state = close(PAIR, "a")
    assert is_waiting(state, "x", alive=frozenset())


def test_newcomer_begins_another_life_when_all_nodes_have_left():
    state = close(close(PAIR, "a"), "b")
    assert state.present == frozenset()
    fresh = written(state, "x")
    assert fresh == State(sequence=8, life=1, round=5, participants=("x",))


def test_newcomer_begins_another_life_when_all_nodes_have_died():
    state = close(PAIR, "a")
    assert written(state, "x", dead=frozenset("b")).life == 1


def test_earlier_job_that_died_without_closing_is_taken_over():
    state = written(PAIR, "x", dead=frozenset("ab"))
    assert (state.round, state.participants, state.former) == (5, ("x",), ())


def test_node_of_an_ended_life_does_not_get_into_the_next():
    assert ruled(State(life=1), "a", life=0).verdict is Verdict.CLOSED
    assert ruled(close(close(PAIR, "a"), "b"), "a", life=0).verdict is Verdict.CLOSED


def test_round_is_not_broken_any_more_after_closing():
    state = evict(close(PAIR, "a"), {"b"})
    assert (state.round, state.complete, state.participants, state.left) == (4, True, ("a", "b"), ("a", "b"))
    assert evict(state, {"a", "b"}) == state
    assert evict(replace(FULL, closed=True, waiting=("d",)), {"d"}).waiting == ()


# The form


def test_state_survives_encoding_and_decoding():
    state = State(9, 1, 5, True, True, ("a", "bß"), ("c",), ("d",), ("a",))
    assert State.decode(state.encode()) == state
    assert json.loads(state.encode())["format"] == 2


def broken_forms():
    form = json.loads(FULL.encode())
    for name, value in form.items():
        yield {key: other for key, other in form.items() if key != name}
        for wrong in (None, "x", 1.5, {}, [1], [["a"]], 0, True):
            if type(wrong) is not type(value) or isinstance(wrong, list):
                yield {**form, name: wrong}
    yield {**form, "format": 1}
    yield {**form, "more": 1}
    yield from ([], "x", None, 5)


def test_state_that_is_malformed_is_refused():
    forms = list(broken_forms())
    for form in forms:
        with pytest.raises(RendezvousStateError):
            State.decode(json.dumps(form).encode())
    assert len(forms) > 60


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000, b"\x80\x04N."])
def test_state_that_is_no_json_is_refused(data):
    with pytest.raises(RendezvousStateError):
        State.decode(data)


# Jobs of one name

LAUNCHED = Limits(2, 3, 3)
UNNAMED = Limits(2, 3, 2)
RUNNING = replace(PAIR, since=10)


def test_round_that_begins_first_has_its_time_and_later_rounds_keep_it():
    state = State(participants=("b", "a"))
    first = written(state, "a", is_last_call_over=True, now=12)
    assert first.since == 12
    assert written(evict(first, ["a"]), "b", now=15).since == 12
    assert evict(first, ["a"]).since == 12


def test_newcomer_without_a_place_is_refused_once_all_nodes_are_known_alive():
    full = replace(FULL, since=10)
    assert ruled(full, "d", LAUNCHED) == (Decision(Verdict.REFUSED, full))
    assert ruled(full, "d", LAUNCHED, alive=frozenset("ab")) == Decision(Verdict.WAIT, full)
    broken = State(round=5, former=("a", "b"), participants=("c",), since=10)
    assert ruled(broken, "d", LAUNCHED).verdict is Verdict.REFUSED
    assert ruled(replace(RUNNING, waiting=("c",)), "d", LAUNCHED).verdict is Verdict.REFUSED
    assert written(full, "d").waiting == ("d",)  # where spare nodes are wanted


def test_newcomer_takes_the_place_of_a_node_that_is_dead():
    state = written(replace(FULL, since=10), "d", LAUNCHED, dead=frozenset("c"))
    assert (state.participants, state.former) == (("d",), ("a", "b"))


def test_newcomer_joins_a_job_that_runs_if_that_may_grow():
    assert written(RUNNING, "c", LAUNCHED).waiting == ("c",)
    assert ruled(RUNNING, "c", UNNAMED).verdict is Verdict.REFUSED
    forming = State(participants=("a", "b"))
    assert written(forming, "c", UNNAMED).participants == ("a", "b", "c")
    restarting = replace(forming, since=10)
    assert ruled(restarting, "c", UNNAMED).verdict is Verdict.REFUSED


def test_node_of_a_job_is_not_refused_when_it_was_taken_for_dead():
    assert written(replace(FULL, since=10), "d", LAUNCHED, life=0).waiting == ("d",)


def test_newcomer_to_a_job_whose_nodes_have_all_died_begins_another_life():
    state = written(RUNNING, "x", LAUNCHED, dead=frozenset("ab"))
    assert state == State(sequence=8, life=1, round=5, participants=("x",))
    assert written(RUNNING, "x", dead=frozenset("ab")).life == 0


# Everything


def small_states():
    """Every state of up to three nodes that the rules can tell apart."""
    for places in product("pfw-", repeat=3):
        named = {kind: tuple(n for n, place in zip("abc", places, strict=True) if place == kind) for kind in "pfw"}
        for complete, closed in product((False, True), repeat=2):
            if complete and (named["f"] or not 1 <= len(named["p"]) <= 2):
                continue
            lefts = [()]
            if complete and closed:
                lefts = [left for size in range(3) for left in combinations(named["p"], size)]
            for left in lefts:
                if len(named["p"]) <= 2:
                    yield State(3, 1, 2, complete, closed, named["p"], named["f"], named["w"], left)


def everything_seen():
    for dead, alive in product(["", "bc"], ["", "b", "abc"]):
        if set(dead) & set(alive):
            continue
        for life, returned, last, reserve in product((None, 0, 1), (None, 2), (False, True), (False, True)):
            yield Observed(frozenset(dead), frozenset(alive), life, returned, last, reserve)


def test_decisions_in_every_small_state_keep_the_rules():
    limits = Limits(1, 2)
    world = World(random.Random(0), limits)
    count = 0
    for state, seen, me in product(list(small_states()), list(everything_seen()), "ad"):
        count += 1
        world.state = state
        steps = 0
        now = state
        while (decision := decide(now, me, limits, seen)).verdict is Verdict.WRITE:
            world.check_state(decision.state)
            assert decision.state != now
            assert decision.state.sequence == now.sequence + 1
            assert not set(seen.dead) & (decision.state.present - {me})
            now, steps = decision.state, steps + 1
            assert steps <= 3, f"{me} never comes to rest in {state} with {seen}"
        if decision.verdict is Verdict.JOINED:
            assert now.complete
            assert me in now.participants
            assert now.round != seen.returned
        elif decision.verdict is Verdict.WAIT and not now.closed:
            assert me in now.present
        elif decision.verdict in (Verdict.CLOSED, Verdict.SPARE):
            assert now.closed or seen.life not in (None, now.life)
    assert count > 10_000


@pytest.mark.parametrize(("size", "schedules"), [(2, 800), (3, 800), (5, 400), (16, 150)])
def test_random_schedules_end_in_agreement(size, schedules, rng, scale):
    for number in range(scale(schedules)):
        most = rng.randint(1, size)
        least = rng.randint(1, most)
        world = World(random.Random(f"{rng.random()}"), Limits(least, most, rng.choice([None, least, most])))
        try:
            play(world, size)
            world.settle()
            world.check_agreement()
        except AssertionError as error:
            story = "\n".join(world.story[-60:])
            raise AssertionError(
                f"schedule {number}, limits {world.limits}: {error}\n{story}\n{world.state}"
            ) from error


def play(world, size):
    rng = world.rng
    world.come()
    for _ in range(rng.randint(5, 12 * size)):
        chance = rng.random()
        node = rng.choice(list(world.nodes.values())) if world.nodes else None
        if node is None or (chance < 0.1 and len(world.nodes) < size):
            world.come()
        elif chance < 0.12:
            world.die(node)
        elif chance < 0.14:
            world.mistake_for_dead(node)
        elif chance < 0.17 and node.outcome:
            world.again(node)
        elif chance < 0.18:
            world.leave(node)
        elif chance < 0.19 and node.outcome:
            world.close(node)
        elif chance < 0.22:
            world.bury()
        elif chance < 0.25:
            node.decision = None  # its write was lost, or the answer was
        else:
            world.step(node)
