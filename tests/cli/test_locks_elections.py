"""The verbs elect and leader: the leader, its data, and the next term."""

from __future__ import annotations

import json
import os
import signal

import pytest

from fscoord import FileStore
from fscoord.cli import locks
from fscoord.launch import Ending, held
from fscoord.recipes import Election

PATIENCE_S = 60


@pytest.fixture
def store(path):
    with FileStore(path) as store:
        yield store


def test_leader_runs_its_command_and_is_shown_to_others(fscoord, tmp_path, store):
    look = f"{os.sys.executable} -m fscoord leader --json o > {tmp_path}/said; echo $FSCOORD_TOKEN > {tmp_path}/term"
    assert fscoord("elect", "--data", "there:80", "o", "--", "sh", "-c", look) == (0, b"", "")
    told = json.loads((tmp_path / "said").read_text())
    assert told == {"term": 1, "owner": f"{os.uname().nodename}:{os.getpid()}", "data": "there:80"}
    assert (tmp_path / "term").read_text() == "1\n"
    assert Election(store, "o").holders() == []


def test_leader_is_shown_on_one_line(fscoord, store):
    with Election(store, "o", b"a\nb"):
        assert fscoord("leader", "o").out == f"1 {os.uname().nodename}:{os.getpid()} a\\nb\n".encode()
        assert fscoord("leader", "--timeout", "0", "--after", "1", "o").code == 75
        assert fscoord("elect", "-n", "o", "true") == (1, b"", "")
        assert fscoord("elect", "-n", "--again", "-E", "4", "o", "true") == (4, b"", "")
    assert fscoord("leader", "--timeout", "0", "o").code == 75


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(locks, "PAUSE_S", 0)


def test_candidate_whose_command_fails_campaigns_again_until_it_succeeds(fscoord, at_once, tmp_path):
    text = f"echo $FSCOORD_TOKEN >> {tmp_path}/terms; [ $FSCOORD_TOKEN = 3 ]"
    assert fscoord("elect", "o", "-c", text).code == 1
    assert fscoord("elect", "--again", "o", "-c", text).code == 0
    assert (tmp_path / "terms").read_text() == "1\n2\n3\n"


def test_leader_that_loses_its_term_campaigns_again(fscoord, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(held, "CHECK_INTERVAL_S", 0.01)
    breaks = f"{os.sys.executable} -m fscoord break-lock --yes o > {tmp_path}/said 2>&1"
    text = f"[ $FSCOORD_TOKEN = 2 ] && exit 0; {breaks}; while :; do sleep 0.02; done"
    assert fscoord("elect", "--again", "o", "-c", text).code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_leader_that_is_ended_by_a_signal_does_not_campaign_again(fscoord, monkeypatch, number):
    endings = iter([Ending(128 + number, frozenset([number]), b"")])
    monkeypatch.setattr("fscoord.cli.run_command.run_held", lambda *_, **__: next(endings))
    assert fscoord("elect", "--again", "o", "true").code == 128 + number
