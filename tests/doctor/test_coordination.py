"""An instance that takes part learns at each of its requests that the examination was broken off."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from fscoord.doctor.agents import FailedError
from fscoord.doctor.coordination import BrokenOffError, Coordinator

FACTS = {"client": "b"}


class ScriptedAgent:
    """A mailbox agent with scripted answers. A request without an answer fails with `number`."""

    def __init__(self, number: int, **answers: list[Any]) -> None:
        self._number = number
        self.answers = answers

    def ask(self, act: str, limit: float, **arguments: Any) -> Any:
        if self.answers.get(act):
            return self.answers[act].pop(0)
        raise FailedError(os.strerror(self._number), errno=self._number)


class OwnAgent:
    """An agent whose operations all return 1."""

    def ask(self, act: str, limit: float, **arguments: Any) -> int:
        return 1


def partner(number: int = errno.ENOENT, **answers: list[Any]) -> Coordinator:
    return Coordinator(ScriptedAgent(number, **answers), "/place", FACTS)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ESTALE])
def test_roll_that_is_removed_after_its_listing_breaks_the_meeting_off(number: int) -> None:
    coordinator = partner(number, enter=[False], wait=[["beat.1", "roll"]])
    with pytest.raises(BrokenOffError):
        coordinator.gather(2, 60, lambda _: None)


def test_report_that_is_removed_after_its_listing_breaks_the_examination_off() -> None:
    with pytest.raises(BrokenOffError):
        partner(wait=[["beat.1", "over"]]).serve(OwnAgent())


def test_answer_for_which_no_mailbox_is_left_breaks_the_examination_off() -> None:
    agent = ScriptedAgent(errno.ENOENT)
    coordinator = Coordinator(agent, "/place", FACTS)
    name = f"ask.{coordinator.name}.000001"
    question = {"act": "lock", "with": {}, "limit": 1}
    agent.answers = {"wait": [[name]], "fetch": [question]}
    with pytest.raises(BrokenOffError):
        coordinator.serve(OwnAgent())


def test_full_disk_of_the_mailbox_does_not_break_the_examination_off() -> None:
    with pytest.raises(FailedError) as told:
        partner(errno.ENOSPC, wait=[["over"]]).serve(OwnAgent())
    assert told.value.errno == errno.ENOSPC
