"""A hand in a process of its own: asked, waited for with a deadline, given up, and never taken for another's answer."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fscoord.doctor.child import ChildHand, FailedError, LostError, StuckError

LIMIT_S = 60


@pytest.fixture
def hand(tmp_path: Path) -> Iterator[ChildHand]:
    made = ChildHand("a hand", str(tmp_path))
    yield made
    assert made.dismiss(LIMIT_S)


def test_a_call_that_does_not_return_is_given_up_at_its_limit_and_the_next_question_is_answered(hand, tmp_path):
    other = ChildHand("the holder", str(tmp_path))
    try:
        assert other.ask("lock", LIMIT_S, name="f", kind="ofd")
        assert not hand.ask("lock", LIMIT_S, name="f", kind="ofd")
        with pytest.raises(StuckError, match="block"):
            hand.ask("block", 0.05, name="f", kind="ofd")
        assert not hand.ask("lock", LIMIT_S, name="f", kind="ofd")
    finally:
        assert other.dismiss(LIMIT_S)
    assert hand.ask("lock", LIMIT_S, name="f", kind="ofd")


def test_an_answer_that_an_interruption_left_behind_is_not_taken_for_the_next_one(hand):
    hand.begin("lock", LIMIT_S, name="f", kind="ofd")  # nobody takes this answer, which is True
    assert hand.ask("look", LIMIT_S, name="f", kind="ofd", how="plain") == []


def test_a_hand_that_dies_is_lost_and_another_takes_its_place(hand, tmp_path):
    assert hand.ask("lock", LIMIT_S, name="f", kind="ofd")
    hand._process.kill()
    with pytest.raises(LostError):
        hand.ask("unlock", LIMIT_S, name="f", kind="ofd")
    assert hand.ask("lock", LIMIT_S, name="f", kind="ofd")


def test_what_an_act_raises_is_told_with_its_number(hand, tmp_path):
    with pytest.raises(FailedError) as told:
        hand.ask("facts", LIMIT_S, path=str(tmp_path / "nothing"))
    assert (told.value.errno, told.value.kind) == (errno.ENOENT, "FileNotFoundError")


@pytest.mark.parametrize("name", ["../f", "/tmp/f", ""])
def test_no_file_outside_of_the_meeting_place_can_be_named(hand, name):
    with pytest.raises(FailedError, match="names no file"):
        hand.ask("look", LIMIT_S, name=name, kind="ofd", how="plain")


def test_a_hand_whose_asker_is_gone_leaves_the_meeting_place(tmp_path):
    place = tmp_path / "place"
    scribe = ChildHand("the scribe")
    assert scribe.ask("enter", LIMIT_S, directory=str(place), name="me", facts={})
    assert sorted(os.listdir(place)) == ["chair", "here.me"]
    assert scribe.dismiss(LIMIT_S)
    assert os.listdir(tmp_path) == []
