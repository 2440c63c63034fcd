"""The verbs break-lock and holders: the list of holders, the question to the user, and the lost hold."""

from __future__ import annotations

import json
import os
from contextlib import suppress

import pytest
from cli.conftest import PATIENCE_S

from fscoord import FileStore, LockLostError
from fscoord.cli import locks
from fscoord.recipes import Lock, Semaphore, force_release

ME = f"{os.uname().nodename}:{os.getpid()}"


@pytest.fixture
def store(path):
    with FileStore(path) as store:
        yield store


def test_lock_that_was_never_held_has_no_holders(fscoord, store):
    assert fscoord("holders", "a") == (1, b"", "")
    assert fscoord("break-lock", "--yes", "a") == (1, b"", "fscoord: no process holds 'a'\n")
    with Lock(store, "a"):
        assert fscoord("break-lock", "--yes", "--token", "2", "a").err == "fscoord: no process holds 'a' with token 2\n"
        assert fscoord("holders", "a").code == 0


def test_holders_and_waiters_are_listed_and_shown_by_ps_with_their_labels(fscoord, store):
    with Lock(store, "a", label="nightly\tbackup"):
        assert [line.split(maxsplit=4) for line in fscoord("holders", "a").out.decode().splitlines()] == [
            ["TURN", "TOKEN", "STATE", "PROCESS", "LABEL"],
            ["holds", "1", "alive", ME, "nightly\\tbackup"],
        ]
        assert json.loads(fscoord("holders", "--json", "a").out)["holders"][0]["label"] == "nightly\tbackup"
        assert "lock 'a' as 'nightly\\tbackup'" in fscoord("ps").out.decode()


def test_holders_are_listed_with_their_tokens_and_whether_they_live(fscoord, store, path):
    gone = FileStore(path)
    assert Semaphore(store, "a", 2).acquire()
    assert Semaphore(gone, "a", 2).acquire()
    gone.close()
    lines = fscoord("holders", "a").out.decode().splitlines()
    assert [line.split() for line in lines] == [
        ["TURN", "TOKEN", "STATE", "PROCESS"],
        ["holds", "1", "alive", ME],
        ["holds", "2", "ended", ME],
    ]
    assert lines[1].index("alive") == lines[0].index("STATE")
    told = json.loads(fscoord("holders", "--json", "a").out)
    assert [(each["token"], each["owner"], each["alive"]) for each in told["holders"]] == [
        (1, ME, "yes"),
        (2, ME, "no"),
    ]
    assert told["waiters"] == []


def test_break_lock_without_a_terminal_changes_nothing_without_yes(fscoord, store):
    with Lock(store, "a") as lock:
        done = fscoord("break-lock", "a")
        assert (done.code, done.out) == (1, b"")
        assert done.err == (
            f"TURN   TOKEN  STATE  PROCESS\nholds      1  alive  {ME}\n"
            "fscoord: nothing was changed: standard input is not a terminal, so give --yes\n"
        )
        lock.check()


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 1), (b"\n", 1)])
def test_break_lock_asks_on_a_terminal(fscoord, store, monkeypatch, answer, code):
    lock = Lock(store, "a")
    lock.acquire()
    monkeypatch.setattr(locks, "_is_asked", lambda: True)
    done = fscoord("break-lock", "a", stdin=answer)
    assert done.code == code
    assert "Take its hold away?" in done.err
    if code:
        lock.check()
    else:
        with pytest.raises(LockLostError):
            lock.check()


def test_break_lock_takes_away_only_the_hold_of_the_given_token(fscoord, store):
    first, second = Semaphore(store, "a", 2), Semaphore(store, "a", 2)
    assert first.acquire()
    assert second.acquire()
    done = fscoord("break-lock", "--yes", "--token", "2", "a")
    assert (done.code, done.out.decode()) == (0, f"token 2 was taken from {ME}\n")
    first.check()
    with pytest.raises(LockLostError):
        second.check()


def test_break_lock_reports_a_hold_released_meanwhile(fscoord, store, monkeypatch):
    lock = Lock(store, "a")
    lock.acquire()
    monkeypatch.setattr(locks, "_is_asked", lambda: True)
    monkeypatch.setattr(locks.click, "confirm", lambda *_, **__: lock.release() or True)
    done = fscoord("break-lock", "a")
    assert (done.code, done.out.decode()) == (1, f"token 1 had been given back by {ME}\n")


def test_command_whose_hold_is_lost_is_stopped_although_no_message_is_read(store, process):
    """The thread that checks the hold logs the loss on standard error, which is full here."""
    reader, writer = os.pipe()
    child = process("-v", "lock", "--grace", "0.1", "a", "--", "sh", "-c", "echo ready; exec sleep 600", stderr=writer)
    assert child.stdout.readline() == b"ready\n"
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"." * 4096):
            pass
    os.set_blocking(writer, True)
    (holder,) = Lock(store, "a").holders()
    assert force_release(store, "a", holder.token)
    assert child.wait(PATIENCE_S) == 69
    assert child.stdout.read() == b""
    os.close(reader)
    os.close(writer)
