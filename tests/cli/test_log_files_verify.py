"""verify on the command line: words for people, JSON for programs, and an exit code for both."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from support.internals import log_of

from fscoord import FileStore
from fscoord.cli import output


@pytest.fixture
def damaged(path: str) -> tuple[int, int]:
    """A log with a flipped bit in the last record but one; where that begins, and its size."""
    sizes = []
    with FileStore(path) as store:
        for key in ("first", "second", "third"):
            sizes.append(Path(path).stat().st_size)
            store.set(key, "value of " + key)
    data = bytearray(Path(path).read_bytes())
    data[sizes[-1] - 1] ^= 1
    Path(path).write_bytes(data)
    return sizes[-2], sizes[-1] - sizes[-2]


def test_store_that_is_sound_is_reported_so_under_each_of_its_names(fscoord, path):
    with FileStore(path) as store:
        store.set("k", "v")
    for words in (["verify"], ["verify", path], ["verify", "file:" + path], ["verify", "--store", path]):
        done = fscoord(*words)
        assert (done.code, done.err) == (0, "")
        first, second = done.out.decode().splitlines()
        assert first == f"{path}: SOUND"
        assert second.split() == ["generation", "0:", "2", "records,", *second.split()[4:7], f"{path}"]


def test_damage_is_reported_with_its_place_its_size_and_advice(fscoord, path, damaged):
    done = fscoord("verify")
    assert done.code == 65
    text = done.out.decode()
    assert f"at {damaged[0]}, {damaged[1]} bytes: the record's checksum does not match" in text
    assert "do: " in text
    assert done.err == ""


def test_json_report_says_the_same(fscoord, path, damaged):
    done = fscoord("verify", "--json")
    assert done.code == 65
    report = json.loads(done.out)
    assert (report["path"], report["verdict"], report["more_findings"]) == (path, "damaged", 0)
    assert report["files"][0].keys() == {"file", "generation", "size", "records", "voids", "ends"}
    (finding,) = report["findings"]
    assert finding.keys() == {"file", "offset", "size", "is_damage", "says", "advice"}
    assert (finding["offset"], finding["size"], finding["is_damage"]) == (*damaged, True)


def test_torn_tail_is_noted_and_no_failure(fscoord, path):
    with FileStore(path) as store:
        store.set("k", "v" * 50)
    Path(path).write_bytes(Path(path).read_bytes()[:-20])
    done = fscoord("verify")
    assert done.code == 0
    assert "TORN" in done.out.decode()
    assert "never finished" in done.out.decode()


def test_verbs_that_meet_damage_point_to_verify(fscoord, path, damaged):
    for words in (["get", "first"], ["dump"], ["set", "k", "v"]):
        done = fscoord(*words)
        assert done.code == 65
        assert f"fscoord verify {path}" in done.err


def test_store_without_a_log_is_a_wrong_use_and_a_missing_file_an_error(fscoord, path):
    assert fscoord("verify", "mem:x").code == 64
    assert fscoord("verify", path).code == 74
    assert not Path(path).exists()


def verify_while_somebody_keeps_the_lock(fscoord, path):
    """Verify a torn log, which needs the lock, for no longer than a look."""
    with FileStore(path) as store:
        store.set("k", "v" * 50)
        Path(path).write_bytes(Path(path).read_bytes()[:-20])
        with log_of(store).handle.mutex:
            log_of(store).handle.lock.try_lock()
            try:
                return fscoord("verify", "--timeout", "0")
            finally:
                log_of(store).handle.lock.unlock()


def test_holder_of_the_lock_is_named_and_the_exit_code_is_75(fscoord, path):
    done = verify_while_somebody_keeps_the_lock(fscoord, path)
    assert done.code == 75
    assert "session 1 holds it" in done.err


def test_terminal_never_gets_control_characters_from_a_log_in_an_error(fscoord, path, monkeypatch):
    monkeypatch.setattr("fscoord._log.inspect.scan.LogLock.holder", lambda lock: "\x1b[2Jhost:1")
    done = verify_while_somebody_keeps_the_lock(fscoord, path)
    assert "\\x1b[2Jhost:1 holds it" in done.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_shown_on_a_terminal_and_nowhere_else(monkeypatch, path):
    monkeypatch.setattr(output, "BEGIN_S", -1.0)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with output.Progress("reading") as bar:
            for done in (0, 50, 100):
                bar.report("/some/where/[red]\x1b.store", done, 100)
        assert ("reading [red]\\x1b.store" in stream.getvalue()) == shown


def test_progress_of_a_quick_run_loads_no_bar(monkeypatch, path):
    monkeypatch.setattr(output, "BEGIN_S", 1000.0)  # it is a quick one on any machine
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # to import it raises
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with output.Progress("reading") as bar:
        bar.report(path, 1, 2)
    assert terminal.getvalue() == ""
