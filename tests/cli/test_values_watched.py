"""The verb watch: the lines that it prints about changes, and its end."""

from __future__ import annotations

import json
import signal

from fscoord import FileStore, Store

PATIENCE_S = 60


def test_watch_prints_the_present_values_if_asked(fscoord):
    fscoord("set", "p/b", "2\n")
    fscoord("set", "p/a", b"\xff")
    fscoord("set", "q", "other")
    assert fscoord("watch", "--timeout", "0", "p/") == (0, b"", "")
    assert fscoord("watch", "--all", "--timeout", "0", "p/") == (0, b"set p/a \\xff\nset p/b 2\\n\n", "")
    lines = fscoord("watch", "--all", "--json", "--timeout", "0").out.splitlines()
    found = [json.loads(line) for line in lines]
    assert len({change.pop("position") for change in found}) == 1
    assert found == [
        {"change": "set", "key": "p/a", "value_base64": "/w=="},
        {"change": "set", "key": "p/b", "value": "2\n"},
        {"change": "set", "key": "q", "value": "other"},
    ]


def test_watch_goes_on_after_a_position_and_prints_each_change_of_a_key(fscoord):
    fscoord("set", "k", "0")
    start = json.loads(fscoord("watch", "--all", "--json", "--timeout", "0").out)["position"]
    for value in "123":
        fscoord("set", "k", value)
    fscoord("delete", "k")
    told = b"set k 1\nset k 2\nset k 3\ndelete k\n"
    assert fscoord("watch", "--after", start, "--timeout", "0") == (0, told, "")
    second = fscoord("watch", "--after", start, "--json", "--count", "2").out.splitlines()[1]
    place = json.loads(second)["position"]
    assert fscoord("watch", "--after", place, "--timeout", "0").out == b"set k 3\ndelete k\n"


def test_watch_after_a_compacted_position_says_where_it_can_begin(fscoord):
    fscoord("set", "k", "0")
    start = json.loads(fscoord("watch", "--all", "--json", "--timeout", "0").out)["position"]
    fscoord("compact")
    assert fscoord("watch", "--after", start, "--timeout", "0") == (0, b"", ""), "the first file is still there"
    fscoord("compact")
    done = fscoord("watch", "--after", start, "--timeout", "0")
    assert (done.code, done.out) == (69, b"")
    assert "removed by a compaction" in done.err
    assert fscoord("watch", "--after", done.err.split()[-1], "--timeout", "0") == (0, b"", "")


def test_watch_refuses_what_is_not_a_position(fscoord):
    fscoord("set", "k", "0")
    assert fscoord("watch", "--after", "then").code == 64
    assert fscoord("watch", "--after", "99.1").code == 74


def test_ctrl_c_ends_a_watch_with_its_exit_code(process, line_with, path):
    with FileStore(path) as store:
        store.set("k", "1")
        child = process("watch", "-v", "k")
        line_with(child, "watching for changes")
        store.set("k", "2")
        assert child.stdout.readline() == b"set k 2\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(PATIENCE_S) == 130


def test_watch_says_on_a_terminal_what_it_waits_for_and_how_long(fscoord):
    fscoord("set", "k", "v")
    said = fscoord("watch", "--timeout", "0", "p/", person=True).err
    assert said == "fscoord: watching for changes of keys that begin with 'p/', up to 0 s\n"
    said = fscoord("watch", "--all", "--count", "1", person=True).err
    assert said == "fscoord: watching for 1 change of keys that begin with '', without a time limit\n"


def test_long_value_is_cut_short_for_people_alone(fscoord):
    fscoord("set", "k", "x" * 200)
    assert fscoord("watch", "--all", "--timeout", "0").out == b"set k " + b"x" * 120 + b"...\n"
    assert len(json.loads(fscoord("watch", "--all", "--json", "--timeout", "0").out)["value"]) == 200


def test_changes_are_printed_as_they_come(process, line_with, path):
    with FileStore(path) as store:
        store.multi_set(["k/a", "k/b", "k/c"], ["1", "2", "3"])
        child = process("watch", "-v", "--count", "4", "k/")
        line_with(child, "watching for 4 changes of keys that begin with 'k/'")
        store.set("other", "x")
        for change, told in (
            (lambda: store.set("k/b", "22"), b"set k/b 22\n"),
            (lambda: store.delete_key("k/a"), b"delete k/a\n"),
            (lambda: store.set("k/d", ""), b"set k/d\n"),
            (lambda: store.append("k/c", "3"), b"set k/c 33\n"),
        ):
            change()
            assert child.stdout.readline() == told
        assert child.wait(PATIENCE_S) == 0


def test_watch_ends_after_the_given_count_even_if_more_came_at_once(fscoord):
    for key in "abc":
        fscoord("set", key, "1")
    assert fscoord("watch", "--all", "--count", "2") == (0, b"set a 1\nset b 1\n", "")


def test_watch_with_too_few_changes_in_time_is_a_timeout(fscoord):
    fscoord("set", "a", "1")
    done = fscoord("watch", "--all", "--count", "2", "--timeout", "0.01")
    assert (done.code, done.out) == (75, b"set a 1\n")
    assert "1 of 2 changes" in done.err


def test_key_that_is_deleted_while_it_is_read_is_not_waited_for(fscoord, monkeypatch, path):
    fscoord("set", "a", "1")
    fscoord("set", "b", "1")
    list_keys = FileStore.list_keys

    def list_and_delete(store, prefix=""):
        found = list_keys(store, prefix)
        if "b" in found:
            other.delete_key("b")
        return found

    with FileStore(path) as other:
        monkeypatch.setattr(FileStore, "list_keys", list_and_delete)
        assert fscoord("watch", "--all", "--timeout", "0") == (0, b"set a 1\ndelete b\n", "")


def test_store_that_is_not_there_is_not_made(fscoord, path):
    assert fscoord("watch").code == 74


def test_store_that_reports_no_changes_is_refused(fscoord, monkeypatch):
    fscoord("set", "k", "1")
    monkeypatch.setattr(FileStore, "_watch", Store._watch)
    done = fscoord("watch", "k")
    assert (done.code, done.out) == (74, b"")
    assert "can't report changes" in done.err
