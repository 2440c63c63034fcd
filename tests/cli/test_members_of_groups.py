"""The verbs join and group: the members, their data, and the time of a membership."""

from __future__ import annotations

import json
import os

import pytest

from fscoord import FileStore
from fscoord.launch import held
from fscoord.recipes import Membership

ME = f"{os.uname().nodename}:{os.getpid()}"


@pytest.fixture
def store(path):
    with FileStore(path) as store:
        yield store


def test_member_is_listed_as_long_as_its_command_runs(fscoord, store, tmp_path):
    look = f"{os.sys.executable} -m fscoord group --json g > {tmp_path}/said; exit 6"
    assert fscoord("join", "--data", "there:80", "g", "--", "sh", "-c", look) == (6, b"", "")
    (told,) = json.loads((tmp_path / "said").read_text())
    assert (told["number"], told["owner"], told["data"]) == (1, ME, "there:80")
    assert Membership(store, "g").members() == []


def test_group_is_listed_in_the_order_of_joining(fscoord, store):
    assert fscoord("group", "g") == (0, b"", "")
    with Membership(store, "g", b"a\nb"), Membership(store, "g"):
        lines = fscoord("group", "g").out.decode().splitlines()
        assert [line.split() for line in lines] == [["NUMBER", "PROCESS", "DATA"], ["1", ME, "a\\nb"], ["2", ME]]


def test_member_that_is_taken_for_dead_has_its_command_stopped(fscoord, store, monkeypatch):
    monkeypatch.setattr(held, "CHECK_INTERVAL_S", 0.01)
    monkeypatch.setattr(Membership, "members", lambda _: [])
    done = fscoord("join", "g", "sleep", "600")
    assert done.code == 69
    assert "the command was stopped: " in done.err
    assert "another process took it for dead" in done.err


def test_join_without_a_command_is_a_usage_error_and_joins_nothing(fscoord, store):
    assert fscoord("join", "g").code == 64
    assert store.num_keys() == 0
