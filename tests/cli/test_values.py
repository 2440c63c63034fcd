"""The verbs get, set, add, cas, append, delete, wait and keys: their effects on the store, and their output."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support.internals import missing_message, system

from fscoord import FileStore
from fscoord.cli import options

HANG_S = 60
ALL_BYTES = bytes(range(256))


def test_standard_input_is_stored_and_printed_byte_for_byte(fscoord):
    assert fscoord("set", "k", "-", stdin=ALL_BYTES) == (0, b"", "")
    assert fscoord("get", "k") == (0, ALL_BYTES, "")


def test_value_on_standard_input_over_the_limit_is_refused(fscoord, monkeypatch):
    monkeypatch.setattr(options, "VALUE_MAX", 4)
    assert fscoord("set", "k", "-", stdin=b"1234") == (0, b"", "")
    done = fscoord("set", "k", "-", stdin=b"123456")
    assert (done.code, done.err) == (64, "fscoord: the value on standard input is over the limit of 4 bytes\n")
    assert fscoord("get", "k").out == b"1234"


def test_person_is_told_that_a_value_is_read_from_the_terminal(path):
    child, parent = os.openpty()
    environment = {**os.environ, "FSCOORD_STORE": path}
    words = [sys.executable, "-m", "fscoord", "set", "k", "-"]
    with subprocess.Popen(words, stdin=parent, stderr=parent, env=environment) as setting:
        os.close(parent)
        with open(child, "r+b", buffering=0) as terminal:
            said = "fscoord: reading the value from standard input; Ctrl-D at the beginning of a line ends it\r\n"
            assert terminal.readline().decode() == said
            terminal.write(b"v\n\x04")
            assert setting.wait(HANG_S) == 0
    with FileStore(path) as store:
        assert store.get("k") == b"v\n"


def test_standard_input_is_read_only_when_it_has_something(monkeypatch):
    """The process sleeps in poll(2), for a second at most; in read(2) it would miss a signal that comes just before."""
    reader, writer = os.pipe()
    sleeps = []

    class Poll:
        def register(self, *_):
            pass

        def poll(self, milliseconds):
            sleeps.append(milliseconds)
            if len(sleeps) == 3:
                os.write(writer, b"value")
                os.close(writer)
            return select.select([reader], [], [], 0)[0]

    with open(reader) as stream:
        os.set_blocking(reader, False)  # a read too early raises
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setattr(system, "select", SimpleNamespace(poll=Poll, POLLIN=select.POLLIN))
        assert options.content(b"-") == b"value"
    assert len(sleeps) == 4
    assert max(sleeps) <= 1000


def test_bytes_that_are_no_text_pass_the_command_line_unharmed(process, path):
    for words in (["set", b"k\xff", b"\xfe\x80v"], ["push", b"q\xff", b"\xc3"]):
        assert process(*words).wait() == 0
    out, _ = process("get", b"k\xff").communicate()
    assert out == b"\xfe\x80v"
    with FileStore(path) as store:
        assert store.get(b"k\xff") == b"\xfe\x80v"
        assert store.queue_pop(b"q\xff", block=False) == b"\xc3"


def test_dash_alone_can_be_stored_through_standard_input(fscoord):
    fscoord("set", "k", "-", stdin=b"-")
    assert fscoord("get", "k").out == b"-"


def test_value_that_begins_with_a_dash_goes_behind_two_dashes(fscoord):
    refused = fscoord("set", "k", "-5")
    assert refused.code == 64
    assert "put -- before" in refused.err
    assert fscoord("set", "k", "--", "-5").code == 0
    assert fscoord("get", "k").out == b"-5"


@pytest.mark.parametrize(("value", "shown"), [(b"v", b"v\n"), (b"v\n", b"v\n"), (b"", b"\n")])
def test_terminal_output_ends_with_a_newline(fscoord, value, shown):
    fscoord("set", "k", "-", stdin=value)
    assert fscoord("get", "k", terminal=True).out == shown
    assert fscoord("get", "k").out == value


def test_empty_value_and_empty_key_are_as_good_as_others(fscoord, path):
    assert fscoord("set", "", "").code == 0
    assert fscoord("get", "--timeout", "0", "") == (0, b"", "")
    with FileStore(path) as store:
        assert store.list_keys() == [""]


def test_json_has_a_field_of_its_own_for_bytes_that_are_no_text(fscoord):
    fscoord("set", "k", "gr\u00fcn")
    assert json.loads(fscoord("get", "--json", "k").out) == {"key": "k", "value": "gr\u00fcn"}
    fscoord("set", "k", "-", stdin=b"\xff\x00")
    assert json.loads(fscoord("get", "--json", "k").out) == {"key": "k", "value_base64": "/wA="}


def test_add_prints_the_sum(fscoord):
    assert fscoord("add", "n") == (0, b"1\n", "")
    assert fscoord("add", "n", "41").out == b"42\n"
    assert fscoord("add", "n", "-50").out == b"-8\n"
    assert json.loads(fscoord("add", "--json", "n", "8").out) == {"key": "n", "value": 0}


@pytest.mark.parametrize("amount", ["x", "1.5", "--jso", str(2**63)])
def test_add_refuses_an_amount_that_is_no_integer_of_64_bits(fscoord, amount):
    fscoord("add", "n", "1")
    assert fscoord("add", "n", amount).code == 64
    assert fscoord("get", "n").out == b"1"


def test_add_leaves_a_value_that_is_no_integer_alone(fscoord):
    fscoord("set", "k", "many")
    result = fscoord("add", "k")
    assert (result.code, result.out) == (64, b"")
    assert "'many'" in result.err
    assert fscoord("get", "k").out == b"many"


def test_cas_exits_with_0_for_the_winner(fscoord):
    assert fscoord("cas", "leader", "", "a") == (0, b"a", "")
    assert fscoord("cas", "leader", "", "b") == (1, b"a", "")
    assert fscoord("cas", "leader", "a", "b") == (0, b"b", "")
    assert json.loads(fscoord("cas", "--json", "leader", "x", "y").out) == {"key": "leader", "won": False, "value": "b"}


def test_cas_on_a_missing_key_prints_no_value(fscoord, path):
    assert fscoord("cas", "k", "old", "new") == (1, b"", "")
    assert json.loads(fscoord("cas", "--json", "k", "old", "new").out) == {"key": "k", "won": False, "value": None}
    with FileStore(path) as store:
        assert store.num_keys() == 0


def test_cas_takes_one_of_its_values_from_standard_input(fscoord):
    assert fscoord("cas", "k", "", "-", stdin=ALL_BYTES).code == 0
    assert fscoord("cas", "k", "-", "new", stdin=ALL_BYTES) == (0, b"new", "")


@pytest.mark.parametrize(("words", "stdin"), [(["a", "a"], b""), (["-", "-"], b"x"), (["a", "-"], b"a")])
def test_cas_refuses_to_replace_a_value_by_itself(fscoord, words, stdin):
    fscoord("set", "k", "a")
    result = fscoord("cas", "k", *words, stdin=stdin)
    assert result.code == 64
    assert "nothing could change" in result.err


def test_get_with_a_default_does_not_wait(fscoord):
    assert fscoord("get", "--default", "none", "k") == (0, b"none", "")
    assert json.loads(fscoord("get", "--default", "", "--json", "k").out) == {"key": "k", "value": ""}
    fscoord("set", "k", "v")
    assert fscoord("get", "--default", "none", "k") == (0, b"v", "")
    assert fscoord("get", "--default", "none", "--fenced", "k").code == 64


def test_create_exits_with_0_for_one_of_two_equal_values(fscoord):
    assert fscoord("create", "k", "same") == (0, b"", "")
    assert fscoord("create", "k", "same") == (1, b"", "")
    assert fscoord("create", "other", "-", stdin=ALL_BYTES).code == 0
    assert fscoord("get", "other").out == ALL_BYTES


def test_delete_with_an_expected_value_removes_no_other_value(fscoord):
    fscoord("set", "k", "new")
    assert fscoord("delete", "--expected", "old", "k") == (1, b"", "")
    assert fscoord("get", "k").out == b"new"
    assert fscoord("delete", "--expected", "new", "k") == (0, b"", "")
    assert fscoord("delete", "k").code == 1


def test_delete_prints_the_value_that_it_removes(fscoord):
    fscoord("set", "k", "-", stdin=ALL_BYTES)
    assert fscoord("delete", "--print", "k") == (0, ALL_BYTES, "")
    assert fscoord("delete", "--print", "k") == (1, b"", "")
    assert fscoord("delete", "--print", "a", "b").code == 64
    assert fscoord("delete", "--print", "--expected", "a", "a").code == 64


def test_append_lengthens_a_value(fscoord):
    assert fscoord("append", "k", "one ") == (0, b"", "")
    assert fscoord("append", "k", "-", stdin=b"\x00two") == (0, b"", "")
    assert fscoord("get", "k").out == b"one \x00two"


def test_delete_removes_all_and_exits_with_1_if_one_was_missing(fscoord, path):
    for key in "abc":
        fscoord("set", key, "1")
    fscoord("push", "queue", "1")
    assert fscoord("delete", "a", "queue") == (0, b"", "")
    assert fscoord("delete", "nothing", "b") == (1, b"", "")
    with FileStore(path) as store:
        assert store.list_keys() == ["c"]
        assert store.queue_len("queue") == 0


def test_wait_names_the_missing_keys_when_time_runs_out(fscoord):
    fscoord("set", "there", "1")
    fscoord("push", "queue", "1")
    assert fscoord("wait", "there", "queue") == (0, b"", "")
    result = fscoord("wait", "--timeout", "0", "there", "ready/0", "ready/1")
    assert (result.code, result.out) == (75, b"")
    assert "'ready/0', 'ready/1'" in result.err
    assert "there'" not in result.err


def test_wait_returns_when_another_process_sets_the_key(process, line_with, path):
    child = process("wait", "-v", "k")
    line_with(child, "waiting for 'k'")
    with FileStore(path) as store:
        store.set("k", "1")
    assert child.wait() == 0


def test_keys_are_sorted_and_begin_with_the_prefix(fscoord):
    for key in ("b", "a/2", "a/1"):
        fscoord("set", key, "1")
    fscoord("push", "a/queue", "1")
    assert fscoord("keys") == (0, b"a/1\na/2\nb\n", "")
    assert fscoord("keys", "a/") == (0, b"a/1\na/2\n", "")
    assert fscoord("keys", "none") == (0, b"", "")
    assert fscoord("keys", "-0") == (0, b"a/1\0a/2\0b\0", "")
    assert json.loads(fscoord("keys", "--json").out) == [{"key": "a/1"}, {"key": "a/2"}, {"key": "b"}]


def test_keys_that_are_no_text_are_written_as_they_are_but_not_to_a_terminal(fscoord):
    fscoord("set", b"red\x1b[31m\xff", "1")
    assert fscoord("keys").out == b"red\x1b[31m\xff\n"
    assert fscoord("keys", terminal=True).out == b"red\\x1b[31m\\xff\n"
    assert json.loads(fscoord("keys", "--json").out) == [{"key_base64": "cmVkG1szMW3/"}]


def test_keys_verb_on_a_mistyped_path_makes_no_new_store(fscoord, tmp_path):
    assert fscoord("keys", "--store", str(tmp_path / "typo")).code == 74
    assert fscoord("len", "--store", str(tmp_path / "typo"), "queue").code == 74
    assert list(tmp_path.iterdir()) == []


def test_command_is_no_participant_although_the_address_of_a_job_has_a_world_size(fscoord, path):
    """The end of a verb would count as that of a rank, and a verb after the death of a rank would begin a new run."""
    address = f"file:{path}?world_size=2"
    with FileStore(path, 2) as store:
        for words in (["set", "k", "v"], ["append", "k", "w"], ["compact"]):
            assert fscoord(words[0], "--store", address, *words[1:]).code == 0
        assert store.get("k") == b"vw"
    assert fscoord("get", "--store", address, "k").out == b"vw"


def test_value_with_a_token_refuses_older_ones(fscoord):
    assert fscoord("set", "--token", "2", "k", "two") == (0, b"", "")
    done = fscoord("set", "--token", "1", "k", "one")
    assert (done.code, done.out) == (69, b"")
    assert "was written with token 2" in done.err
    assert fscoord("get", "--fenced", "k") == (0, b"two", "")
    assert fscoord("set", "--token", "0", "k", "zero").code == 64


def test_value_without_a_token_is_not_taken_for_one_with_a_token(fscoord):
    fscoord("set", "k", "plain")
    assert fscoord("get", "--fenced", "k").code == 69
    assert fscoord("set", "--token", "1", "k", "one").code == 69
    assert fscoord("get", "k").out == b"plain"


@pytest.mark.parametrize(
    ("keys", "waited", "said"),
    [
        ([b"a"], 0, "key 'a' is not there"),
        ([b"a", b"b"], 0, "keys 'a', 'b' are not there"),
        ([b"a", b"b"], 2, "keys 'a', 'b' did not come within 2 s"),
    ],
)
def test_keys_that_are_missing_are_named_in_one_sentence(keys, waited, said):
    assert missing_message("key", keys, waited) == said
