"""dump: a log for people and for programs, as far as it is sound."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from fscoord import FileStore


def records(text: bytes) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


def test_record_is_a_line_with_offset_time_writer_kind_key_and_value(fscoord, path):
    with FileStore(path) as store:
        store.set("k", "v")
        store.queue_push("q", "job 1")
    done = fscoord("dump")
    assert (done.code, done.err) == (0, "")
    lines = done.out.decode().splitlines()
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
    assert re.fullmatch(rf" +\d+ {time}    1 session +- .*:{os.getpid()}", lines[0])
    assert re.fullmatch(rf" +\d+ {time}    1 set +k v", lines[1])
    assert re.fullmatch(rf" +\d+ {time}    1 queue_push +q job 1", lines[-1])
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
    line = fscoord("dump").out.decode()
    assert line.endswith("k\\n\\x20 \\x1b[2J\\x9b\\u202e\xff\n")


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
