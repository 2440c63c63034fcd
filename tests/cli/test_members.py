"""The verb members: the sessions of a store, living and dead."""

from __future__ import annotations

import json
import os
import re

from fscoord import FileStore
from fscoord.status.findings import clock_text

ME = f"{os.uname().nodename}:{os.getpid()}"
TIME = r"\d+-\d+-\d+T\d+:\d+:\d+Z"


def lines(done):
    assert (done.code, done.err) == (0, "")
    return done.out.decode().splitlines()


def test_members_are_a_table_sorted_by_rank_those_without_one_last(fscoord, path):
    with FileStore(path, label="no rank") as other, FileStore(path, rank=3, label="a b\n"), FileStore(path, rank=0):
        other.set("k", "v")
        heads, *rows = lines(fscoord("members"))
        assert heads.split() == ["RANK", "SESSION", "PROCESS", "STATE", "SINCE", "LABEL"]
        assert re.fullmatch(rf" +0 +3  {ME} +alive  {TIME}", rows[0])
        assert re.fullmatch(rf" +3 +2  {ME} +alive  {TIME}  a b\\n", rows[1])
        assert re.fullmatch(rf" +- +1  {ME} +alive  {TIME}  no rank", rows[2])
        assert rows[1].index("alive") == heads.index("STATE")


def test_session_that_has_ended_is_told_apart_from_one_that_was_found_dead(fscoord, path):
    with FileStore(path, rank=3) as store:
        FileStore(path, rank=4).close()
        assert re.fullmatch(rf" +4 +2  {ME} +ended  {TIME}", lines(fscoord("members"))[2])
        assert store.dead_ranks([4]) == [4]
        found = store.members()[1].found_dead
        assert found is not None
        row = rf" +4 +2  {ME} +dead, found {clock_text(found)}  {TIME}"
        assert re.fullmatch(row, lines(fscoord("members"))[2])


def test_members_are_printed_as_json(fscoord, path):
    with FileStore(path, rank=3) as store:
        (found,) = json.loads(fscoord("members", "--json").out)
        assert found == store.members()[0]._asdict()


def test_store_that_is_not_there_has_no_members(fscoord, path):
    assert fscoord("members").code == 74
    assert not os.path.exists(path)


def test_barrier_fails_fast_when_asked(fscoord, path):
    with FileStore(path) as store:
        FileStore(path, rank=1).close()
        done = fscoord("barrier", "-n", "2", "--rank", "0", "--fail-fast", "start")
        assert (done.code, done.out) == (69, b"")
        assert "Barrier broken on rank 0" in done.err
        assert "dead: rank 1" in done.err
        assert store.members()[1].alive == "no"
