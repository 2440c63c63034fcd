"""get and wait without permission to write: the option --read-only, and the errors that name it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fscoord import FileStore
from fscoord.recipes import Membership, PriorityQueue

HANG_S = 60
HINT = "`fscoord {} --read-only` needs no permission to write\n"


@pytest.fixture
def shared(public_dir):
    """Give the path of a store that other users may read, and not write."""
    path = str(public_dir / "store")
    with FileStore(path, mode=0o644) as store:
        store.set("k", "v")
    return path


def state(path):
    """Return what a writer would change: the names in the directory of `path`, and the sizes and times of the files."""
    with os.scandir(os.path.dirname(path)) as files:
        return sorted((entry.name, entry.stat().st_size, entry.stat().st_mtime_ns) for entry in files)


@pytest.mark.parametrize("words", [["get", "k"], ["wait", "k"]], ids=lambda words: words[0])
def test_reader_of_another_user_is_told_of_the_option_that_needs_no_permission(fscoord, as_nobody, shared, words):
    done = as_nobody(fscoord, *words, "--store", shared)
    assert done.code == 77
    assert done.err.startswith(f"fscoord: {shared}: ")
    assert done.err.endswith(HINT.format(words[0]))


@pytest.mark.parametrize("options", ["", "?coherence=locked", "?coherence=direct", "?coherence=local"])
def test_store_of_another_user_is_read_and_left_as_it_was(fscoord, as_nobody, shared, options):
    before = state(shared)
    address = f"file:{shared}{options}"
    assert as_nobody(fscoord, "get", "--read-only", "--store", address, "k") == (0, b"v", "")
    assert as_nobody(fscoord, "wait", "--read-only", "--store", address, "k") == (0, b"", "")
    assert as_nobody(fscoord, "get", "--read-only", "--timeout", "0", "--store", address, "none").code == 75
    assert state(shared) == before


def test_value_that_is_set_later_ends_a_wait_that_only_reads(process, line_with, shared):
    child = process("get", "-v", "--read-only", "later", env={"FSCOORD_STORE": shared})
    line_with(child, "waiting for 'later'")
    before = state(shared)
    with FileStore(shared, mode=0o644) as store:
        assert state(shared) == before
        store.set("later", "at last")
    assert child.communicate(timeout=HANG_S)[0] == b"at last"


def test_fenced_value_is_read_without_permission(fscoord, as_nobody, shared):
    assert fscoord("set", "--store", f"file:{shared}?mode=0644", "--token", "3", "f", "v").code == 0
    assert as_nobody(fscoord, "get", "--read-only", "--fenced", "--store", shared, "f").out == b"v"


@pytest.mark.parametrize("words", [["get", "k"], ["wait", "k"]], ids=lambda words: words[0])
def test_store_that_is_not_there_is_not_made_by_a_reader_and_not_waited_for(fscoord, path, words):
    done = fscoord(words[0], "--read-only", *words[1:])
    assert done.code == 74
    assert done.err == f"fscoord: no store at {path}; check the path (`set` creates one)\n"
    assert not os.path.exists(path)


def test_reader_that_may_not_even_read_gets_no_advice_that_would_not_help(fscoord, as_nobody, public_dir):
    path = str(public_dir / "store")
    FileStore(path).close()
    for words in (["get", "k"], ["get", "--read-only", "k"]):
        done = as_nobody(fscoord, *words, "--store", path)
        assert done.code == 77
        assert "--read-only" not in done.err


def test_reader_on_a_file_system_that_is_read_only_is_told_the_same(fscoord, small_disk: Path):
    path = str(small_disk / "store")
    with FileStore(path) as store:
        store.set("k", "v")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        done = fscoord("get", "--store", path, "k")
        assert done.code == 74
        assert done.err.endswith(HINT.format("get"))
        assert fscoord("get", "--read-only", "--store", path, "k") == (0, b"v", "")
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_verbs_that_record_deaths_say_why_they_write_and_which_do_not(fscoord, as_nobody, shared):
    with FileStore(shared, mode=0o644) as store, Membership(store, "g", b""):
        PriorityQueue(store, "q").put(b"item")
        for words in (["group", "g"], ["items", "q"], ["leader", "--timeout", "0", "e"]):
            done = as_nobody(fscoord, *words, "--store", shared)
            assert done.code == 77
            assert done.err.endswith(
                f"`fscoord {words[0]}` records the deaths that it finds, so it writes; members, holders, ps and dump"
                " only read\n"
            )


def test_verb_that_writes_gets_no_advice_on_how_to_read(fscoord, as_nobody, shared):
    done = as_nobody(fscoord, "set", "--store", shared, "k", "v")
    assert done.code == 77
    assert done.err.count(";") == 1
    assert "only read" not in done.err
