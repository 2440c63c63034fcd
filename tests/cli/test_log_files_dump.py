"""dump: a log for people and for programs, as far as it is sound."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fscoord import BrokenBarrierError, FileStore, StoreTimeoutError, barrier
from fscoord.recipes import Lock, Membership

ME = f"{os.uname().nodename}:{os.getpid()}"


def records(text: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_record_is_a_line_with_offset_time_writer_kind_key_and_value(fscoord, path):
    with FileStore(path) as store:
        store.set("k", "v")
        store.queue_push("q", "job 1")
    done = fscoord("dump")
    assert (done.code, done.err) == (0, "")
    heads, *lines = done.out.decode().splitlines()
    assert heads.split() == ["OFFSET", "TIME", "(UTC)", "WRITER", "KIND", "KEY", "VALUE"]
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf" +\d+ {time}      1 session +- .*:{os.getpid()}", lines[0])
    assert re.fullmatch(rf" +\d+ {time}      1 set +k v", lines[1])
    assert re.fullmatch(rf" +\d+ {time}      1 queue_push +q job 1", lines[-1])
    offsets = [int(line.split()[0]) for line in lines]
    assert offsets == sorted(set(offsets))


def test_json_has_the_same_records_one_per_line(fscoord, path):
    with FileStore(path) as store:
        store.set(b"k\xff", "v")
    last = records(fscoord("dump", "--json").out)[-1]
    assert last.keys() == {"generation", "offset", "time", "writer", "kind", "key_base64", "value", "value_size"}
    assert (last["kind"], last["key_base64"], last["value"], last["value_size"]) == ("set", "a/8=", "v", 1)


def test_long_values_are_shortened_unless_asked_for(fscoord, path):
    value = "x" * 59 + "\u20ac" * 10
    with FileStore(path) as store:
        store.set("k", value)
    assert fscoord("dump").out.decode().endswith(f"k {'x' * 59} ... and 30 bytes more\n")
    last = records(fscoord("dump", "--json").out)[-1]
    assert (last["value"], last["value_size"]) == ("x" * 59, 89)
    assert records(fscoord("dump", "--json", "--full").out)[-1]["value"] == value
    assert fscoord("dump", "--full").out.decode().endswith(f"k {value}\n")


def test_terminal_never_gets_control_characters_of_a_value(fscoord, path):
    with FileStore(path) as store:
        store.set("k\n ", "\x1b[2J\x9b\u202e\xff")
    *_, line = fscoord("dump").out.decode().splitlines()
    assert line.endswith("k\\n\\x20 \\x1b[2J\\x9b\\u202e\xff")


def dumped(fscoord) -> list[str]:
    """Return the records as ``KIND KEY VALUE``, without the headings."""
    return [" ".join(line.split()[3:]) for line in fscoord("dump").out.decode().splitlines()[1:]]


def test_session_is_described_by_its_process_rank_and_label(fscoord, path):
    with FileStore(path, rank=3, label="worker 3") as store:
        store.set("k", "v")
    assert dumped(fscoord)[0] == f"session - {ME} rank 3 worker 3"


def test_death_names_the_session_and_the_process_that_was_found_dead(fscoord, path):
    with FileStore(path) as store:
        FileStore(path, rank=1).close()
        assert store.dead_ranks([1]) == [1]
    (death,) = [line for line in dumped(fscoord) if line.startswith("death")]
    number = json.loads(fscoord("members", "--json").out)[0]["number"]
    assert death == f"death - session {number} ({ME}) was found dead"


def test_failure_names_the_rank_and_the_exception_by_which_it_left(fscoord, path):
    with pytest.raises(OSError, match="disk"), FileStore(path, 2, rank=1):
        raise OSError("the disk is full")
    assert dumped(fscoord)[-1] == f"failure - rank 1 ({ME}) left by OSError"
    with FileStore(path, 2, rank=0) as store:  # a new run
        store.set("k", "v")
        assert f"failure - rank 1 ({ME}) left by OSError, which ended the run before" in dumped(fscoord)


def test_arrivals_at_a_barrier_and_its_end_are_told_in_words(fscoord, path):
    with FileStore(path, rank=0) as store:
        with pytest.raises(StoreTimeoutError):
            barrier(store, 2, "b", 0, rank=0)
        FileStore(path, rank=1).close()
        with pytest.raises(BrokenBarrierError):
            barrier(store, 2, "b", 9, rank=0, fail_fast=True)
        barrier(store, 1, "alone", rank=0)
    told = dumped(fscoord)
    for line in (
        "append b/arrivals rank 0 of 2 arrived",
        "append b/arrivals rank 0 of 2 timed out",
        "append b/arrivals rank 1 found dead: the round is broken",
        "set alone/complete all ranks have arrived",
    ):
        assert line in told


def test_line_of_a_lock_names_its_holder_and_waiters(fscoord, path):
    with FileStore(path) as store, FileStore(path) as other, Lock(store, "a b"):
        assert not Lock(other, "a b").acquire(timeout=0.01)
    (taken, *_, waited, left, freed) = [line for line in dumped(fscoord) if line.startswith("compare_set")]
    held = f"compare_set a\\x20b/line held by {ME} (token 1)"
    assert (taken, waited, left) == (held, f"{held}; waiting: {ME}", held)
    assert freed == "compare_set a\\x20b/line free (last token 1)"


def test_keys_that_are_set_at_once_are_told_apart_and_so_are_members(fscoord, path):
    with FileStore(path) as store:
        store.multi_set(["a b", "c"], ["1", "2\n"])
        with Membership(store, "g", "there:80"):
            number = store.register()
    told = dumped(fscoord)
    assert "multi_set - a\\x20b=1, c=2\\n" in told
    assert f"set g/member/0000000000000001 {ME} (session {number}): there:80" in told


@pytest.mark.parametrize("key", ["x/arrivals", "x/line", "x/member/1"])
def test_value_of_another_program_under_such_a_name_is_shown_as_it_is(fscoord, path, key):
    with FileStore(path) as store:
        for write in (store.set, store.append, lambda key, text: store.compare_set(key, "nonsense", text)):
            write(key, "nonsense")
    assert [line for line in dumped(fscoord) if key in line and not line.endswith("nonsense")] == []


@pytest.fixture
def damaged(path: str) -> int:
    """A log with a flipped bit in the last record but one; the offset of that record."""
    offsets = []
    with FileStore(path) as store:
        for key in ("first", "second", "third"):
            offsets.append(os.path.getsize(path))
            store.set(key, "value of " + key)
    data = bytearray(Path(path).read_bytes())
    data[offsets[-1] - 1] ^= 1
    Path(path).write_bytes(data)
    return offsets[-2]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_damaged_log_is_printed_up_to_the_damage(fscoord, damaged, options):
    done = fscoord("dump", *options)
    assert done.code == 65
    assert b"value of first" in done.out
    assert b"value of second" not in done.out
    assert f"{damaged}" in done.err
    assert done.err.count("\n") == 1


def test_verbs_other_than_dump_refuse_a_damaged_log_and_name_the_offset(fscoord, damaged):
    done = fscoord("get", "first")
    assert (done.code, done.out) == (65, b"")
    assert f"{damaged}" in done.err


def test_dump_is_refused_for_stores_without_a_log(fscoord):
    done = fscoord("dump", "--store", "mem:x")
    assert done.code == 64
    assert "file store" in done.err


def test_dump_takes_the_store_as_a_url_and_writes_nothing(fscoord, path, tmp_path):
    with FileStore(path) as store:
        store.set("k", "v")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert fscoord("dump", "--store", f"file:{path}?durable=0").code == 0
    assert {file: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == before


def test_file_that_is_not_there_is_not_made(fscoord, tmp_path):
    assert fscoord("dump").code == 74
    assert list(tmp_path.iterdir()) == []
