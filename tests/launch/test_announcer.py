"""`Announcer`: which lines it writes, and when."""

from __future__ import annotations

import io
import os
import re
import time
from types import SimpleNamespace

import pytest
from support.internals import system

from fscoord.launch import Announcer, Console, Failure
from fscoord.launch.announcer import last_lines
from fscoord.rendezvous.handler import Progress, short_names

NODE = "node-1_77_0_0123456789ab_s3"


@pytest.fixture
def lines():
    """Give `lines()`: the lines since the last call, with an announcer as its attribute."""
    err = io.BytesIO()

    def take():
        console.flush()
        found = err.getvalue().decode().splitlines()
        err.truncate(0)
        err.seek(0)
        return found

    with Console(io.BytesIO(), err) as console:
        take.announcer = Announcer(console)
        yield take


def progress(waited, nodes=1, least=2, most=4, left=600.0, *, is_running=False):
    return Progress(nodes, least, most, waited, left, is_running)


def test_wait_is_told_when_it_is_long_when_nodes_come_and_from_time_to_time(lines):
    told = {}
    for waited, nodes in ((0, 1), (0.9, 1), (1.1, 1), (5, 1), (7, 1), (8, 2), (10, 2), (40, 2), (69, 2), (130, 2)):
        lines.announcer.waiting(progress(waited, nodes, 3))
        if found := lines():
            told[waited] = re.sub("since .*", "", found[0])
    one, two = (f"fscoord: waiting for nodes: {count} of 3 here, " for count in (1, 2))
    assert told == {1.1: one, 8: two, 69: two, 130: two}


def test_next_wait_is_told_from_its_beginning(lines):
    lines.announcer.waiting(progress(100))
    assert len(lines()) == 1
    lines.announcer.waiting(progress(0.5))
    assert lines() == []
    lines.announcer.waiting(progress(1.5))
    assert len(lines()) == 1


def test_wait_says_until_when(lines):
    lines.announcer.waiting(progress(2, left=float("inf")))
    assert lines()[0].endswith(", without limit")
    lines.announcer.waiting(progress(200, left=90_000.0))
    assert re.search(r"until \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$", lines()[0])
    lines.announcer.waiting(progress(300, 3))
    assert re.search(r"more nodes: 3 of at most 4 here, since .*; the round begins with these at .* latest", lines()[0])
    lines.announcer.waiting(progress(400, 4, is_running=True))
    assert re.search(r"waiting for a place since .*: the present round runs with 4 nodes$", lines()[0])


def test_wait_has_its_times_in_utc(lines, monkeypatch):
    """As all other messages, because the nodes of a job may have different time zones."""
    zone = SimpleNamespace(
        time=lambda: 1e9,
        monotonic=time.monotonic,
        strftime=time.strftime,
        gmtime=time.gmtime,
        localtime=lambda seconds: time.gmtime(seconds + 7200),
    )
    monkeypatch.setattr(system, "time", zone)
    lines.announcer.waiting(progress(60, 1, 2, left=600))
    lines.announcer.waiting(progress(120, 1, 2, left=90_000.0))
    assert lines() == [
        "fscoord: waiting for nodes: 1 of 2 here, since 01:45:40 UTC, until 01:56:40 UTC",
        "fscoord: waiting for nodes: 1 of 2 here, since 01:44:40 UTC, until 2001-09-10 02:46:40 UTC",
    ]


def test_round_that_is_over_has_its_cause(lines):
    lines.announcer.round_broken(3, "me", [])
    lines.announcer.round_broken(3, "me", [NODE])
    lines.announcer.round_broken(3, "me", ["me", NODE])
    end = "; the workers stop, and the next round forms"
    assert lines() == [
        f"fscoord: round 3 is over: more nodes have come{end}",
        f"fscoord: round 3 is over: lost node-1:77, which died or left{end}",
        f"fscoord: round 3 is over: the other nodes took this node for dead{end}",
    ]


def test_line_of_another_host_has_no_control_characters_and_is_one_line(lines):
    failure = Failure(1, 0, "h\x1b[2J\n", 7, -9, "one\ttwo\x1b\nthree \udc80\n", "", 0)
    lines.announcer.worker_failed(failure, 1, 2)
    first, *rest = lines()
    assert first == (
        "fscoord: rank 1 failed in round 0: killed by SIGKILL (local rank 0, process 7 on h\\x1b[2J\\n);"
        " all workers stop, and start again (restart 1 of 2)"
    )
    assert rest == ["fscoord:   | one\\ttwo\\x1b", "fscoord:   | three \\x80"]


def test_nodes_have_short_names_for_people():
    assert short_names([NODE, "b_c_5_1_ffffffffffff", "of another program"]) == "node-1:77, b_c:5, of another program"


def test_error_file_that_the_store_names_stops_and_fills_no_agent(tmp_path):
    """Its path comes from another node. The last lines of standard error then stand for it."""
    fifo, link = tmp_path / "fifo", tmp_path / "link"
    os.mkfifo(fifo)
    link.symlink_to("/dev/zero")
    for path in (fifo, link, tmp_path, "/dev/zero"):
        assert last_lines(Failure(1, 0, "h", 7, 1, "the end\n", str(path), 0)) == ["the end"]
