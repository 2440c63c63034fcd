"""The verb work: a pool of workers on a queue, with retries, a log, and an end that loses no item."""

from __future__ import annotations

import os
import re
import signal
import sys
from types import SimpleNamespace

import pytest
from launch.conftest import wait_until_gone

from fscoord import FileStore
from fscoord.cli import work
from fscoord.launch import held
from fscoord.recipes import PriorityQueue, Queue

PATIENCE_S = 60
AWAIT_SIGNAL = "while :; do sleep 0.02; done"


@pytest.fixture
def store(path):
    with FileStore(path) as store:
        yield store


@pytest.fixture
def queue(store):
    return PriorityQueue(store, "q")


@pytest.fixture
def meeting(tmp_path):
    """Give the path of a FIFO: a shell that opens it for writing waits for one that opens it for reading."""
    os.mkfifo(tmp_path / "meeting")
    return str(tmp_path / "meeting")


@pytest.fixture
def told(meeting):
    """Give the reader of the FIFO, for which no writer waits. Read as many lines as commands write."""
    with open(meeting, "r+b", buffering=0) as file:
        yield file


def sh(text):
    """Return the words of a shell that runs `text`, in which $1 is the item."""
    return ["--", "sh", "-c", text, "sh", "{}"]


def ready(store, name="q"):
    """Take all free items, and return them in their order."""
    found = PriorityQueue(store, name)
    return [found.take(block=False).data for _ in range(len(found))]


def runs(path):
    """Return the lines of a job log, as dicts by its headings."""
    heads, *lines = [line.split("\t") for line in path.read_text().splitlines()]
    return [dict(zip(heads, line, strict=True)) for line in lines]


def test_items_are_done_once_each_by_several_workers(fscoord, store, queue):
    items = [f"item {number}" for number in range(12)]
    queue.put_all(items)
    done = fscoord("work", "-n", "4", "q", "--", "echo", "done:")
    assert (done.code, done.err) == (0, "")
    assert sorted(done.out.decode().splitlines()) == sorted(f"done: {item}" for item in items)
    assert (ready(store), ready(store, "q.failed")) == ([], [])


def test_commands_run_at_once_as_many_as_are_requested(fscoord, queue, meeting):
    """Each command opens the FIFO to meet the other one, so neither ends alone."""
    queue.put_all(["<", ">"])
    done = fscoord("work", "-j", "2", "q", "-c", f'if test {{}} = "<"; then : < {meeting}; else : > {meeting}; fi')
    assert done == (0, b"", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["echo", "a{}b{}", "{}"], "aI'm $HOMEbI'm $HOME I'm $HOME"),
        (["echo", "last:"], "last: I'm $HOME"),
        (["-c", "echo a{}b"], "aI'm $HOMEb"),
        (["-c", 'echo "$0" "$FSCOORD_ITEM" $FSCOORD_DELIVERIES'], "I'm $HOME I'm $HOME 1"),
        (["sh", "-c", "cat; echo end"], "end"),
    ],
)
def test_item_takes_the_place_of_the_braces_or_comes_last(fscoord, queue, words, said):
    queue.put("I'm $HOME")
    done = fscoord("work", "q", *words, stdin=b"of the caller")
    assert (done.code, done.out.decode(), done.err) == (0, f"{said}\n", "")


def test_item_is_the_standard_input_if_requested(fscoord, queue):
    queue.put(b"a\0{}\xff")
    assert fscoord("work", "--stdin", "q", "--", "sh", "-c", 'cat; echo "$# ${FSCOORD_ITEM-none} {}"') == (
        (0, b"a\0{}\xff0 none {}\n", "")
    )


def test_output_of_each_command_is_kept_together_on_both_streams(fscoord, queue, meeting):
    queue.put_all(["<", ">"])
    text = f'echo "$1 one"; echo "$1 error" >&2; if test "$1" = "<"; then : < {meeting}; else : > {meeting}; fi'
    done = fscoord("work", "-n", "2", "q", *sh(f'{text}; echo "$1 two"'))
    assert done.code == 0
    assert done.out in {b"< one\n< two\n> one\n> two\n", b"> one\n> two\n< one\n< two\n"}
    assert sorted(done.err.splitlines()) == ["< error", "> error"]


def test_item_that_fails_is_tried_again_and_then_put_into_the_failed_ones(fscoord, store, queue):
    queue.put_all(["0", "3", "1"])
    text = 'echo "$1 $FSCOORD_DELIVERIES"; test "$1" -lt $FSCOORD_DELIVERIES'
    done = fscoord("work", "-n", "1", "--retries", "2", "q", *sh(text))
    assert done == (1, b"0 1\n3 1\n3 2\n3 3\n1 1\n1 2\n", "fscoord: 1 item failed, and went to the queue 'q.failed'\n")
    assert (ready(store), ready(store, "q.failed")) == ([], [b"3"])


def test_item_waits_in_the_queue_for_its_retry_while_others_are_done(fscoord, queue, monkeypatch):
    """The first retry of the item comes after all others, because its back-off lasts until they are done."""
    release_due = work._Pool._release_due
    monkeypatch.setattr(work._Pool, "_release_due", lambda pool: pool._done == 2 and release_due(pool))
    queue.put_all(["bad", "b", "c"])
    text = 'echo "$1 $FSCOORD_DELIVERIES"; test "$1 $FSCOORD_DELIVERIES" != "bad 1"'
    done = fscoord("work", "-n", "1", "--retries", "1", "--backoff", "0.01", "q", *sh(text))
    assert done == (0, b"bad 1\nb 1\nc 1\nbad 2\n", "")


def test_backoff_doubles_with_each_retry(store, queue, monkeypatch):
    now = [100.0]
    settings = work._Settings(1, 9, 3.0, work._parse_halt("never"), False, False, 0.0)
    monkeypatch.setattr(work, "environment", lambda _: {})
    pool = work._Pool(queue, queue, None, settings, None)
    monkeypatch.setattr(work, "system", SimpleNamespace(time=SimpleNamespace(monotonic=lambda: now[0])))
    queue.put("a")
    for seconds in (3, 6, 12):
        pool._release_later(queue.take(block=False))
        assert pool._next_due() == now[0] + seconds
        now[0] += seconds - 1
        pool._release_due()
        assert len(queue) == 0
        now[0] += 1
        pool._release_due()
        assert len(queue) == 1


def test_failed_items_are_counted_by_the_exit_code_and_go_where_it_is_said(fscoord, store, queue):
    queue.put_all(["0", "1", "7", "0", "9"])
    done = fscoord("work", "-n", "2", "--failed", "bad", "q", *sh('exit "$1"'))
    assert (done.code, done.out) == (3, b"")
    assert sorted(ready(store, "bad")) == [b"1", b"7", b"9"]


def test_number_of_failed_items_is_no_code_of_an_error(fscoord, queue, monkeypatch):
    monkeypatch.setattr(work, "FAILED_MAX", 2)
    queue.put_all(["a", "b", "c"])
    assert fscoord("work", "q", "false").code == 2


def test_log_of_runs_has_the_columns_of_gnu_parallel_and_is_continued(fscoord, queue, tmp_path):
    log = tmp_path / "log"
    for item in ("a b", "c\nd"):
        queue.put(item)
        fscoord("work", "--joblog", str(log), "q", *sh('echo "$1"; exit 3'))
    queue.put("e")
    fscoord("work", "--stdin", "--joblog", str(log), "q", "--", "sh", "-c", "kill -9 $$")
    text = log.read_text()
    assert text.startswith("Seq\tHost\tStarttime\tJobRuntime\tSend\tReceive\tExitval\tSignal\tCommand\n")
    found = runs(log)
    assert [[run[name] for name in ("Seq", "Send", "Receive", "Exitval", "Signal")] for run in found] == [
        ["1", "0", "4", "3", "0"],
        ["1", "0", "4", "3", "0"],
        ["1", "1", "0", "0", "9"],
    ]
    assert found[0]["Command"] == """sh -c 'echo "$1"; exit 3' sh 'a b'"""
    assert found[1]["Command"].endswith(r" $'c\x0ad'")
    assert {run["Host"] for run in found} == {os.uname().nodename}
    assert all(re.fullmatch(r"\d+\.\d{3}", run["Starttime"]) for run in found)
    assert all(re.fullmatch(r" *\d+\.\d{3}", run["JobRuntime"]) for run in found)


def test_halt_soon_takes_no_more_items_and_lets_commands_end(fscoord, store, queue, tmp_path, monkeypatch):
    def count_and_tell(pool, *arguments, count=work._Pool._count, **named):
        count(pool, *arguments, **named)
        (tmp_path / "counted").touch()

    monkeypatch.setattr(work._Pool, "_count", count_and_tell)
    queue.put_all(["bad", "slow", "rest"])
    text = f"cd {tmp_path}; case $1 in bad) until test -e begun; do sleep 0.02; done; exit 9;; esac; touch begun;"
    text += " until test -e counted; do sleep 0.02; done; echo ended"
    done = fscoord("work", "-n", "2", "--halt", "soon,fail=1", "q", *sh(text))
    assert (done.code, done.out) == (9, b"ended\n")
    assert (ready(store), ready(store, "q.failed")) == ([b"rest"], [b"bad"])


def test_halt_now_stops_the_commands_that_run_and_gives_their_items_back(process, store, queue, meeting):
    queue.put_all(["bad", "slow", "rest"])
    text = f"case $1 in bad) read _ < {meeting}; exit 9;; esac; echo > {meeting}; {AWAIT_SIGNAL}"
    child = process("work", "-n", "2", "--halt", "now,fail=1", "q", *sh(text))
    assert child.wait(PATIENCE_S) == 9
    assert (ready(store), ready(store, "q.failed")) == ([b"slow", b"rest"], [b"bad"])


def test_halt_now_kills_a_command_that_ignores_the_request(process, store, queue, meeting):
    queue.put_all(["bad", "slow"])
    text = f"case $1 in bad) read _ < {meeting}; exit 9;; esac; trap '' TERM; echo > {meeting}; {AWAIT_SIGNAL}"
    child = process("work", "-n", "2", "--grace", "0.01", "--halt", "now,fail=1", "q", *sh(text))
    assert child.wait(PATIENCE_S) == 9
    assert (ready(store), ready(store, "q.failed")) == ([b"slow"], [b"bad"])


def test_halt_counts_failed_items(fscoord, store, queue):
    queue.put_all(["1", "0", "2", "0"])
    assert fscoord("work", "-n", "1", "--halt", "soon,fail=2", "q", *sh('exit "$1"')).code == 2
    assert (ready(store), ready(store, "q.failed")) == ([b"0"], [b"1", b"2"])


def test_pool_that_is_killed_loses_no_item_and_leaves_no_process(process, fscoord, queue, meeting, told):
    queue.put_all(["a", "b", "c"])
    child = process("work", "-n", "2", "q", *sh(f"sleep 600 & echo $! $$ > {meeting}; wait"))
    pids = [int(word) for _ in range(2) for word in told.readline().split()]
    assert len(pids) == 4
    child.kill()
    wait_until_gone(pids)
    done = fscoord("work", "-n", "2", "q", "echo")
    assert (done.code, sorted(done.out.split())) == (0, [b"a", b"b", b"c"])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_ends_the_commands_and_gives_their_items_back(process, store, queue, meeting, told, number, code):
    queue.put_all(["a", "b", "c"])
    text = f"trap 'echo $1 told; exit 9' INT TERM HUP; echo > {meeting}; {AWAIT_SIGNAL}"
    child = process("work", "-n", "2", "--retries", "1", "q", *sh(text))
    assert (told.readline(), told.readline()) == (b"\n", b"\n")
    child.send_signal(number)
    out, _ = child.communicate(timeout=PATIENCE_S)  # the shell may report that its child was terminated
    assert (child.returncode, sorted(out.splitlines())) == (code, [b"a told", b"b told"])
    assert (ready(store), ready(store, "q.failed")) == ([b"a", b"b", b"c"], [])


def test_signal_ends_a_pool_that_waits(process, line_with, queue):
    child = process("work", "-v", "--keep-waiting", "q", "true")
    line_with(child, "waiting for an item")
    child.send_signal(signal.SIGINT)
    assert child.wait(PATIENCE_S) == 130


def test_signal_for_users_reaches_the_command_and_ends_nothing(process, queue, meeting, told):
    queue.put("a")
    text = f"trap 'echo told; exit 0' USR1; echo > {meeting}; {AWAIT_SIGNAL}"
    child = process("work", "q", *sh(text))
    assert told.readline() == b"\n"
    child.send_signal(signal.SIGUSR1)
    assert child.communicate(timeout=PATIENCE_S) == (b"told\n", b"")
    assert child.returncode == 0


def test_pool_waits_for_items_of_other_processes_and_does_those_that_come_back(process, line_with, path, queue):
    queue.put("a")
    with FileStore(path) as other:
        item = Queue(other, "q").take()
        child = process("work", "-v", "q", "echo")
        line_with(child, "waiting for an item of queue 'q', without a time limit")
        assert item.deliveries == 1
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (0, b"a\n")


def test_pool_ends_when_another_process_has_done_the_last_item(process, line_with, path, queue):
    queue.put("a")
    with FileStore(path) as other, Queue(other, "q").take():
        child = process("work", "-v", "q", "echo")
        line_with(child, "waiting for an item of queue 'q'")
    assert child.communicate(timeout=PATIENCE_S)[0] == b""
    assert child.returncode == 0


def test_time_runs_out_for_a_pool_whose_items_another_process_keeps(fscoord, path, queue):
    queue.put("a")
    with FileStore(path) as other, Queue(other, "q").take():
        done = fscoord("work", "--timeout", "0", "q", "echo")
    owner = f"{os.uname().nodename}:{os.getpid()}"
    text = f"fscoord: timeout: no item came into the queue 'q', and 1 item of it did not end: taken by {owner}\n"
    assert done == (75, b"", text)


def test_pool_keeps_waiting_for_further_items_if_requested(process, line_with, store, queue):
    child = process("work", "-v", "--keep-waiting", "q", "echo")
    line_with(child, "waiting for an item")
    queue.put("a")
    assert child.stdout.readline() == b"a\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(PATIENCE_S) == 143
    assert ready(store) == []


def test_queue_that_is_empty_has_no_work(fscoord):
    assert fscoord("work", "q", "true") == (0, b"", "")
    assert fscoord("work", "--keep-waiting", "--timeout", "0", "q", "true") == (0, b"", "")


@pytest.mark.parametrize("words", [["nothing-of-this-name"], ["/dev/null"]])
def test_command_that_cannot_be_run_ends_the_pool_and_gives_its_item_back(fscoord, store, queue, words):
    queue.put_all(["a", "b"])
    done = fscoord("work", "-n", "1", "q", *words)
    assert (done.code, done.err.startswith(f"fscoord: can't run {words[0]}: ")) == (69, True)
    assert (ready(store), ready(store, "q.failed")) == ([b"a", b"b"], [])


def test_item_that_no_argument_can_hold_ends_the_pool(fscoord, store, queue):
    queue.put(b"a\0b")
    done = fscoord("work", "q", "true")
    assert (done.code, "take it with --stdin" in done.err) == (64, True)
    assert ready(store) == [b"a\0b"]


def test_pool_that_was_taken_for_dead_has_its_command_stopped(fscoord, queue, monkeypatch):
    monkeypatch.setattr(held, "CHECK_INTERVAL_S", 0.01)
    queue.put("a")
    losing = f"{sys.executable} -m fscoord delete q/claim/80000000-0000000000000000 && sleep 600"
    done = fscoord("work", "q", "-c", losing)
    assert (done.code, "the command was stopped: " in done.err) == (69, True)


def test_progress_is_a_line_without_a_terminal(fscoord, queue):
    queue.put_all(["0", "1", "0"])
    done = fscoord("work", "--eta", "q", *sh('exit "$1"'))
    assert "fscoord: 3 of 3 items finished, 1 failed, 0 running\n" in done.err


def test_progress_is_a_bar_on_a_terminal(fscoord, queue, monkeypatch):
    monkeypatch.setattr(work, "_is_watched", lambda: True)
    monkeypatch.setattr(work, "BEGIN_S", 0.0)
    queue.put_all(["a", "b"])
    done = fscoord("work", "-n", "1", "q", "echo", person=True)
    assert (done.code, done.out) == (0, b"a\nb\n")
    assert "of 2 items finished, 0 failed" in done.err
    assert "\x1b[" in done.err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["q"], "missing COMMAND"),
        (["--failed", "q", "q", "true"], "--failed must name another queue"),
        (["--halt", "now", "q", "true"], "'now' is neither never nor soon,fail=NUMBER nor now,fail=NUMBER"),
        (["--halt", "soon,fail=0", "q", "true"], "'soon,fail=0' is neither"),
        (["-n", "0", "q", "true"], "0 is not in the range"),
        (["--retries", "-1", "q", "true"], "-1 is not in the range"),
    ],
)
def test_wrong_usage_is_reported_and_changes_nothing(fscoord, store, words, hint):
    done = fscoord("work", *words)
    assert (done.code, done.out) == (64, b"")
    assert hint in done.err
    assert store.num_keys() == 0


def test_log_that_cannot_be_written_is_an_error_before_any_work(fscoord, store, queue, tmp_path):
    queue.put("a")
    assert fscoord("work", "--joblog", f"{tmp_path}/none/log", "q", "true").code == 74
    assert ready(store) == [b"a"]
