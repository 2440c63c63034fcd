"""The verb watch: the lines that it prints about changes, and its end."""

from __future__ import annotations

import json

from fscoord import FileStore

PATIENCE_S = 60


def test_watch_prints_the_present_values_if_asked(fscoord):
    fscoord("set", "p/b", "2\n")
    fscoord("set", "p/a", b"\xff")
    fscoord("set", "q", "other")
    assert fscoord("watch", "--timeout", "0", "p/") == (0, b"", "")
    assert fscoord("watch", "--all", "--timeout", "0", "p/") == (0, b"set p/a \\xff\nset p/b 2\\n\n", "")
    lines = fscoord("watch", "--all", "--json", "--timeout", "0").out.splitlines()
    assert [json.loads(line) for line in lines] == [
        {"change": "set", "key": "p/a", "value_base64": "/w=="},
        {"change": "set", "key": "p/b", "value": "2\n"},
        {"change": "set", "key": "q", "value": "other"},
    ]


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
        child = process("watch", "-v", "--interval", "0.01", "--count", "4", "k/")
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
        assert fscoord("watch", "--all", "--timeout", "0") == (0, b"set a 1\n", "")


def test_store_that_is_not_there_is_not_made(fscoord, path):
    assert fscoord("watch").code == 74


def test_watch_reads_nothing_until_a_key_has_changed(fscoord, monkeypatch):
    looks, list_keys = [], FileStore.list_keys
    monkeypatch.setattr(FileStore, "list_keys", lambda *about: (looks.append(about), list_keys(*about))[1])
    fscoord("set", "p/a", "1")
    assert fscoord("watch", "--interval", "0", "--timeout", "0.2", "p/") == (0, b"", "")
    assert 2 <= len(looks) <= 3  # before, at the beginning, at the end
