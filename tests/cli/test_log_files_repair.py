"""The verb repair: it lists the records that it leaves out, and with --yes it makes the copy."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fscoord import FileStore


@pytest.fixture
def damaged(path: str) -> None:
    """A log of three values, the second of which is damaged."""
    sizes = []
    with FileStore(path) as store:
        for key in ("first", "second", "third"):
            sizes.append(Path(path).stat().st_size)
            store.set(key, "value of " + key)
    data = bytearray(Path(path).read_bytes())
    data[sizes[-1] - 2] ^= 1
    Path(path).write_bytes(data)


def test_repair_without_yes_only_reports_the_records_it_would_leave_out(fscoord, path, damaged, tmp_path):
    before = sorted(os.listdir(tmp_path))
    done = fscoord("repair", "--output", path + ".new")
    assert done.code == 1
    first, second, third, last = done.out.decode().splitlines()
    assert "checksum does not match (set second, a value of 15 bytes, by session 1, unverified)" in first
    assert "it comes after the damage (set third, a value of 14 bytes, by session 1)" in second
    assert "2 records would be copied, 2 would be left out" in third
    assert last == f"{path}.new was not written: that needs --yes"
    assert sorted(os.listdir(tmp_path)) == before


def test_repair_with_yes_writes_a_store_and_leaves_the_log_as_it_was(fscoord, path, damaged):
    before = Path(path).read_bytes()
    done = fscoord("repair", path, "-o", path + ".new", "--yes")
    assert (done.code, done.err) == (0, "")
    assert done.out.decode().endswith(f"{path}.new is written: check it with `fscoord verify {path}.new`\n")
    assert Path(path).read_bytes() == before
    assert fscoord("verify", path + ".new").code == 0
    assert fscoord("--store", path + ".new", "keys").out == b"first\n"
    assert fscoord("repair", path, "-o", path + ".more", "--salvage", "--yes").code == 0
    assert fscoord("--store", path + ".more", "keys").out == b"first\nthird\n"


def test_repair_overwrites_no_file(fscoord, path, damaged):
    Path(path + ".new").write_text("mine")
    done = fscoord("repair", "-o", path + ".new", "--yes")
    assert (done.code, done.out) == (64, b"")
    assert "nothing is overwritten" in done.err
    assert Path(path + ".new").read_text() == "mine"


def test_json_has_a_line_for_each_record_and_the_report_on_the_last(fscoord, path, damaged):
    done = fscoord("repair", "-o", path + ".new", "--json", "--yes")
    assert done.code == 0
    first, second, report = [json.loads(line) for line in done.out.splitlines()]
    assert (first["key"], first["kind"], first["is_certain"]) == ("second", "set", False)
    assert (second["key"], second["kind"], second["is_certain"]) == ("third", "set", True)
    fields = {"path", "output", "is_written", "source", "generation", "kept", "dropped", "dropped_bytes", "notes"}
    assert report.keys() == fields
    assert (report["kept"], report["dropped"], report["is_written"]) == (2, 2, True)


def test_log_that_can_only_be_salvaged_is_refused_with_the_option_for_it(fscoord, path, damaged):
    data = bytearray(Path(path).read_bytes())
    data[20] ^= 1
    Path(path).write_bytes(data)
    done = fscoord("repair", "-o", path + ".new", "--yes")
    assert done.code == 65
    assert "--salvage" in done.err
    assert fscoord("repair", "-o", path + ".new", "--yes", "--salvage").code == 0


def test_wrong_use_of_repair_is_reported(fscoord, path, damaged):
    assert fscoord("repair", path).code == 64
    assert fscoord("repair", "mem:x", "-o", path + ".new").code == 64
    assert fscoord("repair", path + ".other", "-o", path + ".new").code == 74
