"""The verb members: the sessions of a store, living and dead."""

from __future__ import annotations

import json
import os
import re

from fscoord import FileStore


def test_members_lists_the_sessions_that_live_and_those_that_are_dead(fscoord, path):
    with FileStore(path, rank=3, label="a b\n") as store:
        FileStore(path, rank=4).close()
        done = fscoord("members")
        lines = done.out.decode().splitlines()
        host = os.uname().nodename
        assert (done.code, done.err, len(lines)) == (0, "", 2)
        assert re.fullmatch(rf" +1 yes +{host}:{os.getpid()} +3 \d+-\d+-\d+T\d+:\d+:\d+Z a b\\n", lines[0])
        assert re.fullmatch(rf" +2 no +{host}:{os.getpid()} +4 \d+-\d+-\d+T\d+:\d+:\d+Z", lines[1])
        assert store.members()[0].found_dead is None


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
