"""The verbs put, take and items: items that are taken, acknowledged, and handed out again."""

from __future__ import annotations

import json
import os
import signal

import pytest
from launch.conftest import wait_until_gone

from fscoord import FileStore
from fscoord.cli import queues
from fscoord.launch import held
from fscoord.recipes import PriorityQueue, Queue

PATIENCE_S = 60
ME = f"{os.uname().nodename}:{os.getpid()}"


@pytest.fixture
def store(path):
    with FileStore(path) as store:
        yield store


@pytest.fixture
def said(tmp_path):
    """Give `said()`: the lines that commands have written to the file ``said`` of the test's directory."""
    return lambda: (tmp_path / "said").read_bytes().splitlines()


def sh(text):
    return ["--", "sh", "-c", text]


def ready(store, name="q"):
    """Take all free items, and return them in their order."""
    queue = PriorityQueue(store, name)
    return [queue.take(block=False).data for _ in range(len(queue))]


def test_items_are_taken_in_order_and_done_when_their_command_exits_with_0(fscoord, store, tmp_path, said):
    assert fscoord("put-item", "q", "b", "a") == (0, b"", "")
    assert fscoord("put-item", "--priority", "-1", "q", "-", stdin=b"\xff now") == (0, b"", "")
    look = sh(f'echo "$FSCOORD_ITEM" >> {tmp_path}/said')
    assert fscoord("take-item", "q", *look) == (0, b"", "")
    assert said() == [b"\xff now"]
    assert fscoord("take-item", "-n", "--each", "q", *look) == (0, b"", "")
    assert said() == [b"\xff now", b"b", b"a"]
    assert (ready(store), Queue(store, "q").taken()) == ([], [])


def test_item_whose_command_fails_goes_back_to_its_place_and_ends_the_work(fscoord, store, tmp_path, said):
    fscoord("put-item", "q", "a", "b", "c")
    look = sh(f'echo "$FSCOORD_ITEM" >> {tmp_path}/said; test "$FSCOORD_ITEM" = a || exit 9')
    assert fscoord("take-item", "--each", "q", *look) == (9, b"", "")
    assert said() == [b"a", b"b"]
    assert ready(store) == [b"b", b"c"]


def test_item_whose_command_fails_goes_to_another_queue_if_one_is_given(fscoord, store):
    fscoord("put-item", "q", "3", "0", "9", "0")
    fail = sh('exit "$FSCOORD_ITEM"')
    assert fscoord("take-item", "--failed", "bad", "q", *fail) == (3, b"", "")
    assert fscoord("take-item", "-n", "--each", "--failed", "bad", "q", *fail) == (9, b"", "")
    assert (ready(store), ready(store, "bad")) == ([], [b"3", b"9"])


def test_item_goes_to_the_failed_ones_only_after_so_many_deliveries(fscoord, store, tmp_path, said):
    fscoord("put-item", "q", "a", "b")
    look = sh(f'echo "$FSCOORD_ITEM $FSCOORD_DELIVERIES" >> {tmp_path}/said; test "$FSCOORD_ITEM" = b || exit 9')
    words = ["take-item", "-n", "--each", "--failed", "bad", "--max-deliveries", "2", "q"]
    assert fscoord(*words, *look) == (9, b"", "")
    assert said() == [b"a 1", b"a 2", b"b 1"]
    assert (ready(store), ready(store, "bad")) == ([], [b"a"])


def test_item_whose_consumers_died_goes_to_the_failed_ones_without_another_command(fscoord, store, path, tmp_path):
    fscoord("put-item", "q", "a")
    with FileStore(path) as lost:
        Queue(lost, "q").take()
    words = ["take-item", "-n", "--failed", "bad", "--max-deliveries", "1", "q"]
    assert fscoord(*words, *sh(f"touch {tmp_path}/said")).code == 1
    assert not (tmp_path / "said").exists()
    assert (ready(store), ready(store, "bad")) == ([], [b"a"])


@pytest.mark.parametrize("words", [["nothing-of-this-name"], ["/dev/null"]])
def test_command_that_cannot_be_run_gives_the_item_back(fscoord, store, words):
    fscoord("put-item", "q", "a")
    assert fscoord("take-item", "q", *words).code == 69
    assert ready(store) == [b"a"]


def test_queue_that_is_empty_exits_like_pop_and_is_no_failure_with_each(fscoord):
    assert fscoord("take-item", "-n", "q", "true") == (1, b"", "")
    done = fscoord("take-item", "--timeout", "0", "q", "true")
    assert (done.code, done.out) == (75, b"")
    assert "no item came into the queue 'q'" in done.err
    assert fscoord("take-item", "-n", "--each", "q", "true") == (0, b"", "")
    assert fscoord("take-item", "--timeout", "0", "--each", "q", "true") == (0, b"", "")


def test_store_that_cannot_be_reached_is_a_timeout_even_with_each(fscoord, monkeypatch):
    def stuck(*_, **__):
        raise queues.StoreTimeoutError("the lock did not come", keys=[])

    monkeypatch.setattr(PriorityQueue, "take", stuck)
    assert fscoord("take-item", "--each", "q", "true").code == 75


def test_item_too_large_for_a_variable_is_given_back_or_read_from_stdin(fscoord, store, tmp_path):
    big = b"x" * (queues.VARIABLE_MAX + 1)
    for data, has in ((big, f"{len(big)} bytes"), (b"a\0b", "a NUL byte")):
        fscoord("put-item", "q", "-", stdin=data)
        done = fscoord("take-item", "q", "true")
        assert done.code == 64
        assert f"the item has {has}" in done.err
        assert "take it with --stdin" in done.err
        look = sh(f'cat > {tmp_path}/input; test "${{FSCOORD_ITEM-none}}" = none')
        assert fscoord("take-item", "--stdin", "q", *look) == (0, b"", "")
        assert (tmp_path / "input").read_bytes() == data
    fscoord("put-item", "q", "-", stdin=big[:-1])
    assert fscoord("take-item", "-n", "q", *sh(f"test ${{#FSCOORD_ITEM}} = {len(big) - 1}")) == (0, b"", "")


def test_item_on_standard_input_hides_the_variable_of_an_outer_item(fscoord, monkeypatch):
    monkeypatch.setenv("FSCOORD_ITEM", "of the other")
    fscoord("put-item", "q", "a")
    assert fscoord("take-item", "--stdin", "q", *sh('test "${FSCOORD_ITEM-none}" = none')).code == 0


def test_command_finds_the_store(fscoord, tmp_path):
    other = str(tmp_path / "other")
    fscoord("put-item", "--store", other, "q", "a")
    assert fscoord("take-item", "--store", other, "q", *sh(f'test "$FSCOORD_STORE" = {other}')).code == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["take-item", "q"], "missing COMMAND"),
        (["take-item", "q", "-n", "true"], "'-n' found where COMMAND is expected"),
        (["take-item", "--failed", "q", "q", "true"], "--failed must name another queue"),
        (["take-item", "--max-deliveries", "3", "q", "true"], "--max-deliveries needs --failed OTHER"),
        (["put-item", "q"], "VALUE..."),
        (["put-item", "q", "-", "-"], "only one VALUE"),
        (["put-item", "--priority", "4294967296", "q", "a"], "32 bits"),
    ],
)
def test_wrong_usage_is_reported_and_changes_nothing(fscoord, store, words, hint):
    done = fscoord(*words)
    assert (done.code, done.out) == (64, b"")
    assert hint in done.err
    assert store.num_keys() == 0


def test_waiter_for_an_item_is_woken_by_put(process, line_with, store):
    child = process("take-item", "-v", "q", *sh('echo "has $FSCOORD_ITEM"'))
    line_with(child, "waiting for an item of queue 'q'")
    Queue(store, "q").put("a")
    out, _ = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, out) == (0, b"has a\n")


def test_signal_ends_the_wait_for_an_item(process, line_with):
    child = process("take-item", "-v", "q", "true")
    line_with(child, "waiting for an item")
    child.terminate()
    assert child.wait(PATIENCE_S) == 143


def test_signal_is_passed_on_and_the_item_is_given_back(process, store):
    Queue(store, "q").put_all(["a", "b"])
    text = "trap 'echo told; exit 9' TERM; echo ready; while :; do sleep 0.02; done"
    child = process("take-item", "--each", "--failed", "bad", "q", *sh(text))
    assert child.stdout.readline() == b"ready\n"
    child.terminate()
    assert (child.wait(PATIENCE_S), child.stdout.read()) == (9, b"told\n")
    assert ready(store) == [b"a", b"b"]


def test_signal_ends_the_work_even_if_its_command_exits_with_0(process, store):
    Queue(store, "q").put_all(["a", "b"])
    child = process("take-item", "--each", "q", *sh("trap 'exit 0' INT; echo ready; while :; do sleep 0.02; done"))
    assert child.stdout.readline() == b"ready\n"
    child.send_signal(signal.SIGINT)
    assert child.wait(PATIENCE_S) == 0
    assert ready(store) == [b"b"]


def test_consumer_that_is_killed_takes_its_command_along_and_frees_its_item(process, store):
    Queue(store, "q").put("a")
    child = process("take-item", "q", *sh("sleep 600 & echo $! $$; wait"))
    pids = [int(word) for word in child.stdout.readline().split()]
    assert len(pids) == 2
    assert Queue(store, "q").taken()[0].owner == f"{os.uname().nodename}:{child.pid}"
    child.kill()
    wait_until_gone(pids)
    assert Queue(store, "q").take(timeout=PATIENCE_S).data == b"a"


def test_consumer_that_was_taken_for_dead_has_its_command_stopped(fscoord, store, monkeypatch):
    monkeypatch.setattr(held, "CHECK_INTERVAL_S", 0.01)
    fscoord("put-item", "q", "a")
    losing = sh(f"{os.sys.executable} -m fscoord delete q/claim/80000000-0000000000000000 && sleep 600")
    done = fscoord("take-item", "q", *losing)
    assert done.code == 69
    assert "the command was stopped: " in done.err
    assert "another process took the holder for dead, and the item was handed out again" in done.err
    assert ready(store) == [b"a"]


def test_items_shows_the_number_waiting_and_the_owners_of_those_taken(fscoord, store):
    assert fscoord("items", "q") == (0, b"0 waiting, 0 taken\n", "")
    queue = Queue(store, "q")
    queue.put_all(["a", "b", "c"])
    with queue.take(), queue.take():
        taken = {"owner": ME, "session": store.register(), "alive": "yes", "deliveries": 1}
        text = f"1 waiting, 2 taken\nSTATE  DELIVERIES  PROCESS\nalive           1  {ME}\nalive           1  {ME}\n"
        assert fscoord("items", "q").out.decode() == text
        assert json.loads(fscoord("items", "--json", "q").out) == {
            "queue": "q",
            "waiting": 1,
            "taken": [taken, taken],
        }
