"""The verb once: one process runs the command, and all get its result."""

from __future__ import annotations

import shlex
import signal

import pytest
from support.places import until

from fscoord import FileStore
from fscoord.cli import groups as verb
from fscoord.recipes import Lock, once

PATIENCE_S = 60


def test_once_gives_all_the_output_and_the_exit_code_of_one_run(fscoord, tmp_path):
    text = f"echo ran >> {tmp_path}/ran; printf '\\377said'; echo aside >&2; exit 3"
    assert fscoord("once", "w", "--", "sh", "-c", text) == (3, b"\xffsaid", "")
    assert fscoord("once", "w", "--", "sh", "-c", text)[:2] == (3, b"\xffsaid")
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert fscoord("delete", "w/result").code == 0
    assert fscoord("once", "w", "-c", "echo anew") == (0, b"anew\n", "")


def test_once_says_that_an_earlier_call_failed_and_how_to_run_the_command_again(fscoord, path):
    assert fscoord("once", "a b", "-c", "exit 3") == (3, b"", "")
    done = fscoord("once", "a b", "-c", "echo mended")
    command = f"--store {path} delete 'a b/result'"
    says = "fscoord: the command of 'a b' was not run, because another call has run it, with exit code 3;"
    assert done == (3, b"", f"{says} to run it again, first run fscoord {command}\n")
    assert fscoord(*shlex.split(command)).code == 0
    for _ in range(2):
        assert fscoord("once", "a b", "-c", "echo mended") == (0, b"mended\n", "")


def test_caller_that_comes_during_the_run_waits_and_gets_its_result(process, line_with, path, tmp_path):
    child = process("once", "-v", "w", "--", "sh", "-c", f"until [ -e {tmp_path}/go ]; do sleep 0.02; done; echo done")
    line_with(child, "running the command of 'w' for all callers")
    late = process("once", "-v", "w", "false")
    line_with(late, "waiting for the result of 'w'")
    with FileStore(path) as store:
        until(Lock(store, "w").waiters)
    (tmp_path / "go").touch()
    for each in (child, late):
        assert (each.wait(PATIENCE_S), each.stdout.read()) == (0, b"done\n")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_command_that_is_interrupted_is_run_by_the_next_caller(process, fscoord, number, code):
    child = process("once", "w", "--", "sh", "-c", "trap 'exit 4' INT TERM; echo on >&2; while :; do sleep 0.02; done")
    assert child.stderr.readline() == b"on\n"
    child.send_signal(number)
    assert child.wait(PATIENCE_S) == code
    assert fscoord("once", "w", "echo", "next") == (0, b"next\n", "")


def test_command_that_cannot_be_run_here_is_run_by_the_next_caller(fscoord):
    done = fscoord("once", "w", "nothing-of-this-name")
    assert done.code == 69
    assert "can't run nothing-of-this-name" in done.err
    assert fscoord("once", "w", "echo", "next") == (0, b"next\n", "")


def test_output_over_the_limit_is_no_result(fscoord, monkeypatch):
    monkeypatch.setattr(verb, "OUTPUT_MAX", 1000)
    done = fscoord("once", "w", "-c", "while :; do echo more; done")
    assert (done.code, done.out) == (64, b"")
    assert "more than 1000 bytes" in done.err
    assert fscoord("once", "w", "echo", "next").out == b"next\n"


def test_result_that_no_command_wrote_is_reported(fscoord, path):
    with FileStore(path) as store:
        once(store, "w", lambda: b"a value")
    done = fscoord("once", "w", "true")
    assert (done.code, done.out) == (69, b"")
    assert "the result of 'w' has no exit code" in done.err


def test_once_without_a_command_is_a_usage_error(fscoord):
    assert fscoord("once", "w").code == 64
