"""The verbs lock, rwlock and sem: holders, waiters, and the end of the command."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from launch.conftest import wait_until_gone
from support.places import until

from fscoord import FileStore, LockLostError, StoreGoneError
from fscoord.cli import groups, output, run_command
from fscoord.launch import held
from fscoord.recipes import Lock, ReadWriteLock, Semaphore, force_release

PATIENCE_S = 60
ME = f"{os.uname().nodename}:{os.getpid()}"
SINCE = r"in the store since \d\d:\d\d:\d\d UTC"


@pytest.fixture
def store(path):
    with FileStore(path) as store:
        yield store


@pytest.fixture
def said(tmp_path):
    """Give `said()`: what the command has written to the file ``said`` of the test's directory."""
    return lambda: (tmp_path / "said").read_text()


def sh(text):
    return ["--", "sh", "-c", text]


def test_command_runs_under_the_lock_and_ends_with_its_own_code(fscoord, store, path, tmp_path, said):
    look = f"echo $FSCOORD_TOKEN $FSCOORD_STORE > {tmp_path}/said; exit 5"
    assert fscoord("lock", "a", *sh(look)) == (5, b"", "")
    assert said() == f"1 {path}\n"
    assert fscoord("lock", "a", *sh(look)).code == 5
    assert said() == f"2 {path}\n"
    assert Lock(store, "a").holders() == []


def test_relative_path_is_passed_on_in_full(fscoord, tmp_path, said, monkeypatch):
    monkeypatch.chdir(tmp_path)
    look = sh("echo $FSCOORD_STORE > said")
    assert fscoord("lock", "--store", "s", "a", *look).code == 0
    assert said() == f"{tmp_path}/s\n"
    assert fscoord("lock", "--store", "file:./s?timeout=9", "a", *look).code == 0
    assert said() == f"file://{tmp_path}/s?timeout=9\n"


@pytest.mark.parametrize(
    "words",
    [
        ["a", "true"],
        ["a", "--", "true"],
        ["-c", "true", "a"],
        ["a", "-c", "true"],
        ["--", "a", "true"],
        ["-x", "a", "true"],
    ],
    ids=" ".join,
)
def test_command_may_be_given_in_several_ways(fscoord, words):
    assert fscoord("lock", *words) == (0, b"", "")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["a"], "missing COMMAND"),
        (["a", "--"], "missing COMMAND"),
        (["a", ""], "missing COMMAND"),
        (["a", "-n", "true"], "'-n' found where COMMAND is expected"),
        (["-c", "true", "a", "true"], "either -c TEXT or COMMAND"),
        (["--ttl", "0", "a", "true"], "--ttl must be a finite time above 0"),
        (["-E", "256", "a", "true"], "256"),
        (["--unknown", "a", "true"], "--unknown"),
        (["-w", "soon", "a", "true"], "not a number of seconds"),
        (["k" * 2000, "true"], "limit"),
    ],
)
def test_wrong_usage_is_reported_before_a_command_is_run(fscoord, words, hint):
    done = fscoord("lock", *words)
    assert (done.code, done.out) == (64, b"")
    assert hint in done.err


def test_command_text_is_run_by_the_shell_of_the_user(fscoord, monkeypatch, tmp_path):
    monkeypatch.setenv("SHELL", "/bin/sh")
    assert fscoord("lock", "a", "-c", "exit $(( 2 + 4 ))").code == 6
    monkeypatch.delenv("SHELL")
    assert fscoord("lock", "a", "-c", "exit 7").code == 7


def test_lock_not_acquired_in_time_has_the_exit_codes_of_flock(fscoord, store):
    with Lock(store, "a"):
        assert fscoord("lock", "-n", "a", "true") == (1, b"", "")
        assert fscoord("lock", "-w", "0.01", "a", "true") == (1, b"", "")
        assert fscoord("lock", "-w", "0", "-E", "7", "a", "true") == (7, b"", "")
        assert fscoord("lock", "--timeout", "0.01", "-E", "8", "a", "true").code == 8
        done = fscoord("lock", "--timeout", "0.01", "a", "true")
        assert done.code == 75
        assert (
            f"timeout: the lock 'a' not acquired within 0.01 s; held by {os.uname().nodename}:{os.getpid()}, nobody"
            f" else waiting; to look closer, run fscoord ps {store.path}\n" in done.err
        )
        assert "held by" in fscoord("lock", "-v", "-n", "a", "true").err
    assert fscoord("lock", "-n", "a", "true").code == 0


def test_lock_is_shared_by_readers(fscoord, store):
    lock = ReadWriteLock(store, "a")
    with lock.reader:
        assert fscoord("lock", "-n", "-s", "a", "true").code == 0
        assert fscoord("rwlock", "-n", "-s", "a", "true").code == 0
        assert fscoord("lock", "-n", "a", "true").code == 1
        assert fscoord("rwlock", "-n", "-x", "a", "true").code == 1
    with lock.writer:
        assert fscoord("lock", "-n", "-s", "a", "true").code == 1
    done = fscoord("rwlock", "a", "true")
    assert done.code == 64
    assert "give -s to read or -x to write" in done.err


@pytest.mark.parametrize("words", [["lock"], ["rwlock", "-s"], ["sem", "-j", "2"], ["elect"]], ids=" ".join)
def test_hold_of_a_command_has_the_label_of_the_option(fscoord, store, path, tmp_path, words):
    shown = f"{sys.executable} -m fscoord --store {path} holders a > {tmp_path}/shown"
    assert fscoord(*words, "--label", "nightly backup", "a", "-c", shown).code == 0
    assert (tmp_path / "shown").read_text().splitlines()[1].endswith("nightly backup")


def test_label_that_is_too_long_is_a_wrong_use(fscoord):
    done = fscoord("lock", "--label", "x" * 101, "a", "true")
    assert (done.code, "a label may have 100 characters" in done.err) == (64, True)


def test_semaphore_admits_as_many_as_its_value(fscoord, store):
    with Semaphore(store, "a", 2):
        assert fscoord("sem", "-j", "2", "-n", "a", "true").code == 0
        with Semaphore(store, "a", 2):
            assert fscoord("sem", "-j", "2", "-n", "a", "true").code == 1
        other = fscoord("sem", "-j", "3", "a", "true")
        assert other.code == 64
        assert "value=3" in other.err
    assert fscoord("sem", "a", "true").code == 64


def test_rate_limits_how_often_commands_begin(fscoord, process, store):
    assert fscoord("rate", "a", "1/h", "sh", "-c", "exit 7").code == 7
    assert fscoord("rate", "-n", "a", "1/h", "true") == (1, b"", "")
    assert fscoord("rate", "-w", "0.01", "-E", "9", "a", "1/h", "true").code == 9
    done = fscoord("rate", "--timeout", "0.01", "a", "1/h", "true")
    assert done.code == 75
    assert "timeout: 1 of the tokens of the rate limiter 'a' would come in 3.6e+03 s, after" in done.err
    assert fscoord("rate", "-w", "60", "a", "1/0.01s", "-c", "exit 3").code == 3
    assert fscoord("rate", "--burst", "2", "b", "1/h", "true").code == 0
    assert fscoord("rate", "--burst", "2", "-n", "b", "1/h", "true").code == 0
    assert fscoord("rate", "c", "1/h", "no-such-command").code == 69
    child = process("rate", "-v", "--label", "mail", "-w", "7200", "c", "1/h", "true")
    until(Lock(store, "c").holders)
    assert Lock(store, "c").holders()[0].label == "mail"
    assert "the turn of rate limiter 'c' as 'mail'" in fscoord("ps").out.decode()
    child.send_signal(signal.SIGINT)
    child.communicate()
    assert child.returncode == 130
    assert not Lock(store, "c").holders()


@pytest.mark.parametrize("rate", ["0/s", "5", "5/", "/s", "-1/s", "5/w", "1e3/s", "5/0s"])
def test_rate_that_is_none_is_a_usage_error(fscoord, rate):
    done = fscoord("rate", "a", rate, "true")
    assert done.code == 64
    assert f"{rate!r} is not a rate above zero, such as 10/s" in done.err or rate.startswith("-")


def test_semaphore_whose_name_is_that_of_a_lock_is_refused_and_told_so(fscoord, store):
    with Lock(store, "a"):
        done = fscoord("sem", "-j", "1", "a", "true")
    assert done.code == 64
    assert f"{ME} uses 'a' as a lock, not as a semaphore: use another name for the lock or for the sem" in done.err


@pytest.mark.parametrize("name", ["nothing-of-this-name", "/dev/null"])
def test_command_that_cannot_be_run_is_reported_and_releases_the_lock(fscoord, store, name):
    done = fscoord("lock", "a", name)
    assert (done.code, done.out) == (69, b"")
    assert done.err.startswith(f"fscoord: can't run {name}: ")
    assert Lock(store, "a").holders() == []


def test_lock_that_is_held_is_waited_for_until_it_is_released(fscoord, process, line_with, tmp_path, store, said):
    with Lock(store, "a") as lock:
        child = process("lock", "-v", "a", *sh(f"echo child >> {tmp_path}/said"))
        line_with(child, "waiting for the lock 'a'")
        (tmp_path / "said").write_text("first\n")
        assert lock.token == 1
    assert child.wait(PATIENCE_S) == 0
    assert said() == "first\nchild\n"


def test_ctrl_c_and_sigterm_end_the_wait_and_leave_the_line(process, line_with, store):
    with Lock(store, "a") as lock:
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            child = process("lock", "-v", "a", "true")
            line_with(child, "waiting for the lock 'a'")
            child.send_signal(number)
            assert (child.wait(PATIENCE_S), child.stderr.read().strip()) == (code, b"")
        assert lock.waiters() == []


def test_signals_are_passed_on_and_then_the_lock_is_released(process, store):
    text = "trap 'echo told; exit 9' TERM; echo ready; while :; do sleep 0.02; done"
    child = process("lock", "a", *sh(text))
    assert child.stdout.readline() == b"ready\n"
    child.terminate()
    assert (child.wait(PATIENCE_S), child.stdout.read()) == (9, b"told\n")
    assert Lock(store, "a").holders() == []


def test_lock_whose_process_is_killed_is_free_and_its_whole_command_is_killed(process, store):
    child = process("lock", "a", *sh("sh -c 'sleep 600 & echo $!'; sleep 600 & echo $! $$; wait"))
    pids = [int(word) for _ in range(2) for word in child.stdout.readline().split()]
    assert len(pids) == 3
    child.kill()
    wait_until_gone(pids)
    assert Lock(store, "a").acquire(timeout=PATIENCE_S)


def test_lock_that_is_broken_stops_the_command(fscoord, store, tmp_path, said, monkeypatch):
    monkeypatch.setattr(held, "CHECK_INTERVAL_S", 0.01)
    text = f"trap 'echo told > {tmp_path}/said; exit 0' TERM; fscoord_break; while :; do sleep 0.02; done"
    breaks = f"{os.sys.executable} -m fscoord break-lock --yes a > {tmp_path}/broken 2>&1"
    done = fscoord("lock", "a", *sh(text.replace("fscoord_break", breaks)))
    assert done.code == 69
    assert "the command was stopped: " in done.err
    assert "or removed it; stop the work, and wait in line again" in done.err
    assert done.err.count("\n") == 1
    assert said() == "told\n"
    assert (tmp_path / "broken").read_text().startswith("TURN   TOKEN  STATE  PROCESS\nholds      1  alive  ")


def test_lock_that_is_lost_as_the_command_ends_is_reported(fscoord, store, monkeypatch):
    def run_and_lose(*_, **__):
        assert force_release(store, "a", 1)
        return held.Ending(0, frozenset(), b"")

    monkeypatch.setattr(run_command, "run_held", run_and_lose)
    done = fscoord("lock", "a", "true")
    assert done.code == 69
    assert "no longer in line" in done.err


def test_lock_with_a_ttl_renews_its_lease_while_the_command_runs(fscoord, store, monkeypatch):
    seen = []

    def look(_, __, check, *, patience, **___):
        check()
        seen.append((patience, store.get("a/line").decode().split()[-1]))
        return held.Ending(0, frozenset(), b"")

    monkeypatch.setattr(run_command, "run_held", look)
    assert fscoord("lock", "--ttl", "90", "a", "true").code == 0
    assert seen == [(90.0, "90.0:0")]


def test_lock_whose_key_holds_something_else_is_an_error(fscoord, store):
    store.set("a/line", "something else")
    done = fscoord("lock", "a", "true")
    assert done.code == 69
    assert "not a valid line of waiters" in done.err


def test_lock_that_is_lost_is_an_error_with_an_exit_code_of_its_own(fscoord, monkeypatch, store):
    def lose(*_, **__):
        raise LockLostError("the command was stopped: it was taken")

    monkeypatch.setattr(run_command, "run_held", lose)
    assert fscoord("lock", "a", "true") == (69, b"", "fscoord: the command was stopped: it was taken\n")
    assert Lock(store, "a").holders() == []


@pytest.fixture
def note(monkeypatch, capsys):
    """Give `note(more, **how)`: what the note of a wait for "it" tells a person, with `more` about its holders."""
    monkeypatch.setattr(output, "_is_watched", lambda: True)

    def tell(more, *, is_over=False):
        due = []
        timer = SimpleNamespace(start=lambda: None, cancel=lambda: None)
        monkeypatch.setattr(output, "Timer", lambda _, call: due.append(call) or timer)
        with output.telling_if_slow(logging.getLogger("fscoord.tests"), "waiting for it", more) as end:
            if is_over:
                end()
            due[0]()
        return capsys.readouterr().err

    return tell


def test_person_who_waits_is_told_who_holds_it(note):
    assert note(lambda: "held by him") == "fscoord: waiting for it; held by him\n"
    assert note(None) == "fscoord: waiting for it\n"


def test_wait_is_told_without_its_holders_if_these_cannot_be_read(note):
    def fail():
        raise StoreGoneError("gone")

    assert note(fail) == "fscoord: waiting for it\n"


def test_wait_that_has_ended_is_not_told(note):
    assert note(lambda: "held by him", is_over=True) == ""


def test_wait_of_a_script_starts_no_thread_that_reads_the_holders(fscoord, store, monkeypatch):
    monkeypatch.setattr(output, "Timer", None)  # calling it would be an error
    assert fscoord("lock", "a", "true").code == 0
    with Lock(store, "a"):
        assert fscoord("lock", "-w", "0.01", "a", "true") == (1, b"", "")


def test_holders_are_logged_once_with_v_when_the_wait_lasts(process, line_with, store):
    with Lock(store, "a"):
        child = process("lock", "-v", "a", "true")
        line_with(child, "waiting for the lock 'a', up to 300 s")
        line = line_with(child, "held by")
        held = rf"held by {ME} \(alive, {SINCE}\), nobody else waiting\n"
        assert re.fullmatch(rf"fscoord: waiting for the lock 'a', up to 300 s; {held}", line)
    assert child.wait(PATIENCE_S) == 0
    assert b"held by" not in child.stderr.read()


def test_work_that_begins_here_ends_the_wait_for_its_result(fscoord, store, monkeypatch, tmp_path):
    notes = []
    note = nullcontext(lambda: notes.append((tmp_path / "said").exists()))
    monkeypatch.setattr(groups, "telling_if_slow", lambda *_: note)
    assert fscoord("once", "w", *sh(f"echo x > {tmp_path}/said")).code == 0
    assert notes == [False]


def test_holders_are_named_with_their_states_and_the_other_waiters_are_counted(
    process, store, path, line_with, monkeypatch
):
    stopped = process("sem", "-v", "-j", "3", "s", "sleep", "600")
    line_with(stopped, "has the semaphore")
    stopped.send_signal(signal.SIGSTOP)
    slots = Semaphore(store, "s", 3)
    with FileStore(path) as other, slots, Semaphore(other, "s", 3):
        for count in (1, 2):
            process("sem", "-j", "3", "s", "true")
            until(lambda count=count: len(slots.waiters()) == count)
        until(lambda: "stopped" in run_command.holders_text(store, slots))
        first = rf"{os.uname().nodename}:{stopped.pid} \(stopped, {SINCE}\)"
        second = rf"{ME} \(alive, {SINCE}\)"
        monkeypatch.setattr(run_command, "HOLDERS_SHOWN", 2)
        found = run_command.holders_text(store, slots)
        assert re.fullmatch(rf"held by {first}, {second} and 1 more, 1 other waiting", found)
