"""Liveness of nodes by changes of the state, measured only by the observer's own clock."""

from __future__ import annotations

import pytest

from fscoord.rendezvous.keep_alive import FailureDetector


@pytest.fixture
def detector():
    return FailureDetector(interval=5, attempts=3)


def test_node_whose_counter_changes_is_alive(detector):
    assert detector.check(0, "a", {"a": 1}) == frozenset()
    assert detector.alive == frozenset()  # it may be what a dead job left behind
    assert detector.check(1, "a", {"a": 2}) == frozenset()
    assert detector.alive == {"a"}


def test_node_whose_counter_does_not_change_for_three_looks_is_dead(detector):
    looks = [detector.check(now, "a", {"a": 1}) for now in (0, 5, 10, 15)]
    assert looks == [frozenset(), frozenset(), frozenset(), {"a"}]
    assert detector.check(20, "a", {"a": 1}) == {"a"}


def test_node_that_never_had_a_counter_is_dead_as_well(detector):
    for now in (0, 5, 10):
        assert detector.check(now, "a", {}) == frozenset()
    assert detector.check(15, "a", {}) == {"a"}


def test_looks_that_follow_each_other_soon_do_not_count(detector):
    for now in range(15):
        assert detector.check(now, "a", {"a": 1}) == frozenset(), now
    assert detector.check(15, "a", {"a": 1}) == {"a"}


def test_detector_counts_a_long_pause_of_its_own_as_one_look(detector):
    detector.check(0, "a", {"a": 1})
    assert detector.check(10_000, "a", {"a": 1}) == frozenset()
    assert detector.check(10_001, "a", {"a": 2}) == frozenset()
    assert detector.alive == {"a"}


def test_sign_of_life_starts_the_count_again(detector):
    for now, beat in [(0, 1), (5, 1), (10, 1), (14, 2), (19, 2), (24, 2)]:
        assert detector.check(now, "a", {"a": beat}) == frozenset()
    assert detector.check(29, "a", {"a": 2}) == {"a"}


def test_counter_that_goes_back_is_a_change_too(detector):
    detector.check(0, "a", {"a": 9})
    detector.check(1, "a", {"a": 1})
    assert detector.alive == {"a"}


def test_dead_nodes_are_not_alive_and_may_come_back(detector):
    detector.check(0, "ab", {"a": 1, "b": 1})
    detector.check(1, "ab", {"a": 2, "b": 2})
    for now in (6, 11, 16):
        detector.check(now, "ab", {"a": 2, "b": now})
    assert detector.alive == {"b"}
    assert detector.check(17, "ab", {"a": 3, "b": 16}) == frozenset()
    assert detector.alive == {"a", "b"}


def test_node_seen_coming_is_alive_and_one_there_before_may_not_be(detector):
    detector.observe_members(frozenset("a"))
    assert detector.alive == frozenset()
    detector.observe_members(frozenset("ab"))
    assert detector.alive == {"b"}
    detector.observe_members(frozenset("a"))
    assert detector.alive == frozenset()


def test_node_that_is_not_asked_for_is_forgotten(detector):
    for now in (0, 5, 10):
        detector.check(now, "a", {"a": 1})
    detector.check(11, "", {})
    assert detector.check(15, "a", {"a": 1}) == frozenset()


def test_node_that_is_known_to_live_is_alive(detector):
    detector.mark_alive("a")
    assert detector.alive == {"a"}
