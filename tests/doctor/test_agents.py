"""An agent in a process of its own: its answers, its deadlines, its death; and no answer is taken for another one."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.internals import process_of
from support.interrupts import At, interrupt

from fscoord.doctor import agents
from fscoord.doctor.agents import FailedError, LocalAgent, LostError, MailboxAgent, SilentError, StuckError

LIMIT_S = 60


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalAgent]:
    monkeypatch.setattr(agents, "END_S", float(LIMIT_S))  # a killed process may take longer on a busy machine
    made = LocalAgent("an agent", str(tmp_path))
    yield made
    assert made.dismiss(LIMIT_S)


def test_call_that_does_not_return_is_given_up_at_its_limit_and_the_next_works(agent, tmp_path):
    other = LocalAgent("the holder", str(tmp_path))
    try:
        assert other.ask("lock", LIMIT_S, name="f", kind="ofd")
        assert not agent.ask("lock", LIMIT_S, name="f", kind="ofd")
        with pytest.raises(StuckError, match="block"):
            agent.ask("block", 0.05, name="f", kind="ofd")
        assert not agent.ask("lock", LIMIT_S, name="f", kind="ofd")
    finally:
        assert other.dismiss(LIMIT_S)
    assert agent.ask("lock", LIMIT_S, name="f", kind="ofd")


def test_answer_left_behind_by_an_interruption_is_not_taken_for_the_next(agent):
    agent.begin("lock", LIMIT_S, name="f", kind="ofd")  # nobody takes this answer, which is True
    assert agent.ask("look", LIMIT_S, name="f", kind="ofd", how="plain") == []


def test_agent_that_dies_is_lost_and_another_takes_its_place(agent, tmp_path):
    assert agent.ask("lock", LIMIT_S, name="f", kind="ofd")
    process_of(agent).kill()
    with pytest.raises(LostError):
        agent.ask("unlock", LIMIT_S, name="f", kind="ofd")
    assert agent.ask("lock", LIMIT_S, name="f", kind="ofd")


def test_exception_of_an_act_is_reported_with_its_error_number(agent, tmp_path):
    with pytest.raises(FailedError) as told:
        agent.ask("facts", LIMIT_S, path=str(tmp_path / "nothing"))
    assert (told.value.errno, told.value.kind) == (errno.ENOENT, "FileNotFoundError")


@pytest.mark.parametrize("name", ["../f", "/tmp/f", ""])
def test_file_outside_of_the_meeting_place_cannot_be_named(agent, name):
    with pytest.raises(FailedError, match="names no file"):
        agent.ask("look", LIMIT_S, name=name, kind="ofd", how="plain")


def test_agent_whose_parent_is_gone_leaves_the_mailbox(tmp_path):
    place = tmp_path / "place"
    scribe = LocalAgent("the scribe")
    assert scribe.ask("enter", LIMIT_S, directory=str(place), name="me", facts={})
    assert sorted(os.listdir(place)) == ["chair", "here.me"]
    assert scribe.dismiss(LIMIT_S)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_to_all_processes_of_a_job_leaves_the_agents_to_their_parent(tmp_path, number):
    """As from `scancel`. A mailbox agent that dies leaves the mailbox behind."""
    place = tmp_path / "place"
    scribe = MailboxAgent("the scribe")
    assert scribe.ask("enter", LIMIT_S, directory=str(place), name="me", facts={})
    process_of(scribe).send_signal(number)
    assert "here.me" in scribe.ask("wait", LIMIT_S, prefixes=[], known=[], seconds=0)
    assert scribe.dismiss(LIMIT_S)
    assert os.listdir(tmp_path) == []


def test_agent_is_killed_again_if_an_interruption_ended_the_first_try(agent):
    """Its process would else live until the memory of its pipes is freed, and the kernel would keep its locks."""
    agent.ask("lock", LIMIT_S, name="f", kind="ofd")
    process, points = process_of(agent), 0
    while True:
        with At(points + 1, interrupt, first_inside="doctor/agents") as at:
            try:
                agent.kill()
            except KeyboardInterrupt:
                pass
        if not at.reached:
            break
        points += 1
        assert process_of(agent) is process, at.where
    assert points > 3
    assert process.returncode == -signal.SIGKILL
    assert process.stdin.closed


def test_agent_that_waits_for_messages_ends_when_its_parent_is_gone(tmp_path):
    place = tmp_path / "place"
    scribe = MailboxAgent("the scribe")
    assert scribe.ask("enter", LIMIT_S, directory=str(place), name="me", facts={})
    scribe.begin("wait", LIMIT_S, prefixes=["none"], known=[], seconds=100 * LIMIT_S)
    assert scribe.dismiss(LIMIT_S)
    assert os.listdir(tmp_path) == []


def test_mailbox_agent_whose_call_returns_late_still_leaves_the_mailbox(agent, tmp_path):
    place = tmp_path / "place"
    scribe = MailboxAgent("the scribe")
    assert agent.ask("lock", LIMIT_S, name="f", kind="ofd")
    assert scribe.ask("enter", LIMIT_S, directory=str(place), name="me", facts={})
    scribe.ask("settle", LIMIT_S, directory=str(tmp_path))
    with pytest.raises(SilentError, match=r"did not answer within 0\.05 s \(block\)"):
        scribe.ask("block", 0.05, name="f", kind="ofd")
    assert os.listdir(place)
    agent.ask("unlock", LIMIT_S, name="f", kind="ofd")
    assert scribe.dismiss(LIMIT_S)
    assert not place.exists()


def test_agent_that_does_not_start_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(agents, "START_S", -1.0)
    monkeypatch.setattr(agents, "END_S", float(LIMIT_S))
    with pytest.raises(LostError, match="did not start"):
        MailboxAgent("the scribe").ask("facts", LIMIT_S, path=str(tmp_path))


def test_exception_that_ends_an_agent_is_reported(agent):
    with pytest.raises(LostError, match=r"during vanish: AttributeError: .*vanish"):
        agent.ask("vanish", LIMIT_S)


def test_agent_keeps_no_open_file_of_its_parent(agent, tmp_path):
    """A reader of the standard input would wait for an agent that the kernel blocks."""
    agent.ask("settle", LIMIT_S, directory=str(tmp_path))
    ours = {os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)} - {os.devnull}
    theirs = {os.readlink(f"/proc/{process_of(agent).pid}/fd/{fd}") for fd in (0, 1, 2)}
    assert not ours & theirs
    assert len(theirs) == 3
