"""Who lives, by what changes, and not by any clock but one's own."""

from __future__ import annotations

import pytest

from fscoord.rendezvous.keep_alive import Pulse


@pytest.fixture
def pulse():
    return Pulse(interval=5, attempts=3)


def test_a_counter_that_changes_is_life(pulse):
    assert pulse.look(0, "a", {"a": 1}) == frozenset()
    assert pulse.alive == frozenset()  # it may be what a dead job left behind
    assert pulse.look(1, "a", {"a": 2}) == frozenset()
    assert pulse.alive == {"a"}


def test_a_counter_that_does_not_change_for_three_looks_is_death(pulse):
    looks = [pulse.look(now, "a", {"a": 1}) for now in (0, 5, 10, 15)]
    assert looks == [frozenset(), frozenset(), frozenset(), {"a"}]
    assert pulse.look(20, "a", {"a": 1}) == {"a"}


def test_who_never_had_a_counter_is_dead_as_well(pulse):
    for now in (0, 5, 10):
        assert pulse.look(now, "a", {}) == frozenset()
    assert pulse.look(15, "a", {}) == {"a"}


def test_looks_that_follow_each_other_soon_do_not_count(pulse):
    for now in range(15):
        assert pulse.look(now, "a", {"a": 1}) == frozenset(), now
    assert pulse.look(15, "a", {"a": 1}) == {"a"}


def test_a_long_pause_of_ones_own_counts_as_one_look(pulse):
    pulse.look(0, "a", {"a": 1})
    assert pulse.look(10_000, "a", {"a": 1}) == frozenset()
    assert pulse.look(10_001, "a", {"a": 2}) == frozenset()
    assert pulse.alive == {"a"}


def test_a_sign_of_life_starts_the_count_again(pulse):
    for now, beat in [(0, 1), (5, 1), (10, 1), (14, 2), (19, 2), (24, 2)]:
        assert pulse.look(now, "a", {"a": beat}) == frozenset()
    assert pulse.look(29, "a", {"a": 2}) == {"a"}


def test_a_counter_that_goes_back_is_a_change_too(pulse):
    pulse.look(0, "a", {"a": 9})
    pulse.look(1, "a", {"a": 1})
    assert pulse.alive == {"a"}


def test_the_dead_are_not_alive_and_may_come_back(pulse):
    pulse.look(0, "ab", {"a": 1, "b": 1})
    pulse.look(1, "ab", {"a": 2, "b": 2})
    for now in (6, 11, 16):
        pulse.look(now, "ab", {"a": 2, "b": now})
    assert pulse.alive == {"b"}
    assert pulse.look(17, "ab", {"a": 3, "b": 16}) == frozenset()
    assert pulse.alive == {"a", "b"}


def test_whoever_is_seen_coming_lives_and_who_was_there_before_may_not(pulse):
    pulse.meet(frozenset("a"))
    assert pulse.alive == frozenset()
    pulse.meet(frozenset("ab"))
    assert pulse.alive == {"b"}
    pulse.meet(frozenset("a"))
    assert pulse.alive == frozenset()


def test_who_is_not_asked_for_is_forgotten(pulse):
    for now in (0, 5, 10):
        pulse.look(now, "a", {"a": 1})
    pulse.look(11, "", {})
    assert pulse.look(15, "a", {"a": 1}) == frozenset()


def test_who_is_known_to_live_lives(pulse):
    pulse.know("a")
    assert pulse.alive == {"a"}
