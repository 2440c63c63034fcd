"""dump: what a log holds, record by record, up to its end or its damage."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os, faulty_system
from support.internals import log_of
from support.logs import make, opened, put, steps, tear, write_every_kind
from support.plain_reader import read_log

from fscoord import CorruptLogError, FileStore, InsecurePathError, StoreUnavailableError
from fscoord._log.format import record
from fscoord.inspect import dump


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


def test_dump_gives_records_of_any_kind_in_order(path: str) -> None:
    data = make(path, write_every_kind)
    entries = list(dump(path))
    assert [entry.offset for entry in entries] == [step.start for step in steps(data)]
    assert entries[0].kind == "session"
    assert entries[0].value == b"host:1"
    assert {entry.writer for entry in entries} == {1}


def test_dump_gives_all_records_that_are_longer_than_one_read(path: str) -> None:
    sizes = [1 << 18, (1 << 18) - 29, 5, 3 << 20, 0]
    make(path, lambda handle: [handle.write(b"k", b"x" * size) for size in sizes])
    assert [len(entry.value) for entry in dump(path)][1:] == sizes
    with faulty_os() as faulty:
        list(dump(path))
        assert [name for name, _ in faulty.calls].count("read") < 40


def test_dump_ends_at_a_torn_tail_and_not_at_a_voided_one(path: str) -> None:
    torn = tear(path, 30, b"k", b"v" * 50)
    assert [entry.kind for entry in dump(path)] == ["session", "set"]
    with opened(path) as handle:
        handle.write(b"new", b"value")
    entries = list(dump(path))
    assert [entry.kind for entry in entries] == ["session", "set", "void", "session", "set"]
    void = entries[2]
    assert void.value == str(torn).encode()
    assert (void.offset % 512, void.writer) == (0, 0)
    assert abs(void.time - entries[3].time) < 60


@pytest.mark.parametrize("part", ["length", "check", "time", "kind", "value", "newline", "checksum", "end"])
def test_dump_reports_damage_after_the_records_before_it(part: str, path: str) -> None:
    data = make(path, write_every_kind)
    bad = steps(data)[4]
    head, end = {"length": 2, "check": 6, "time": 15, "kind": 22}, {"value": 7, "newline": 6, "checksum": 3, "end": 1}
    offset = bad.start + head[part] if part in head else bad.end - end[part]
    put(path, data[:offset] + bytes([data[offset] ^ 8]) + data[offset + 1 :])
    entries = dump(path)
    assert [next(entries).offset for _ in range(4)] == [step.start for step in steps(data)[:4]]
    with pytest.raises(CorruptLogError) as caught:
        next(entries)
    assert caught.value.offset == bad.start


def test_record_that_announces_a_great_length_is_not_allocated(path: str) -> None:
    tear(path, 1000, b"k", bytes(32 << 20))
    with faulty_os() as faulty:
        assert [entry.kind for entry in dump(path)] == ["session", "set"]
        assert [name for name, _ in faulty.calls].count("read") < 5


def test_record_written_during_a_dump_is_given_or_not_but_never_in_part(path: str) -> None:
    with opened(path) as handle:
        handle.write(b"k", b"1")
        entries = dump(path)
        assert next(entries).kind == "session"
        handle.write(b"k", b"2")
        assert [entry.value for entry in entries] in ([b"1"], [b"1", b"2"])
    assert read_log(Path(path).read_bytes()).ends == "whole"


def test_dump_that_is_not_finished_gives_its_descriptor_back(path: str) -> None:
    make(path, write_every_kind)
    before = len(os.listdir("/proc/self/fd"))
    entries = dump(path)
    next(entries)
    entries.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_dump_of_a_file_that_is_no_log_is_an_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError):
        list(dump(path))
    with pytest.raises(InsecurePathError):
        list(dump(tmp_path))
    Path(path).write_bytes(b"text")
    with pytest.raises(CorruptLogError, match="not a log of fscoord"):
        list(dump(path))


def test_header_that_is_damaged_is_damage_at_its_beginning(path: str) -> None:
    Path(path).write_bytes(b"fscoord\n" + bytes(200))
    with pytest.raises(CorruptLogError, match="version") as caught:
        list(dump(path))
    assert caught.value.offset == 0


def compacted(path: str) -> str:
    """Make a log that has a second generation; return the path of that."""
    with FileStore(path) as store:
        store.set("k", "1")
        store.compact()
        assert store.get("k") == b"1"
        return log_of(store).handle.file


def next_record(data: bytes, kind: int, value: bytes) -> bytes:
    """A record that follows the last of the whole log `data`."""
    return record.encode(kind, b"", value, 9, 1, record.chain_at_end(data))[0]


def test_dump_reads_a_log_that_others_may_write(path: str) -> None:
    os.chmod(compacted(path), 0o666)
    os.chmod(path, 0o666)
    assert [entry.kind for entry in dump(path)][-1] == "multi_set"


def test_pipe_in_the_place_of_a_generation_is_refused_and_not_waited_for(path: str) -> None:
    file = compacted(path)
    os.unlink(file)
    os.mkfifo(file)
    with pytest.raises(InsecurePathError, match="not a regular file") as caught:
        list(dump(path))
    assert os.path.basename(file) in str(caught.value)


@pytest.mark.parametrize("how", ["header", "another"])
def test_generation_that_is_not_the_expected_one_is_damage_at_its_beginning(how: str, path: str) -> None:
    file = compacted(path)
    make(path + "2", write_every_kind)
    Path(file).write_bytes(b"no log" * 100 if how == "header" else Path(path + "2").read_bytes())
    opened: list[str] = []
    closed: list[str] = []

    def note(name: str, _: object, arguments: tuple[Any, ...]) -> None:
        if name == "open":
            opened.append(arguments[0])
        elif name == "close":
            link = f"/proc/self/fd/{arguments[0]}"
            closed.append(os.readlink(link) if os.path.lexists(link) else "what may be another's by now")

    with (
        faulty_system() as faulty,
        faulty.instead(note),
        pytest.raises(
            CorruptLogError, match="not a log of fscoord" if how == "header" else "not the next generation"
        ) as caught,
    ):
        list(dump(path))
    assert (caught.value.offset, caught.value.path) == (0, path)
    assert opened == closed == [path, file]


def test_prefix_that_is_bad_at_the_very_end_is_damage_and_not_torn(path: str) -> None:
    data = make(path, write_every_kind)
    put(path, data + b"no prefix" + b"\xff" * 4)
    with pytest.raises(CorruptLogError) as caught:
        list(dump(path))
    assert caught.value.offset == len(data)


@pytest.mark.parametrize("sealed", [False, True])
def test_lost_sector_is_torn_behind_a_seal_and_damage_where_nothing_is_synced(sealed: bool, path: str) -> None:
    if sealed:
        compacted(path)
    else:
        make(path, write_every_kind)
    before = Path(path).read_bytes()
    log = read_log(before)
    data = bytearray(before + next_record(before, record.FORWARD, b"n" * 1500))
    sector = -(-(len(before) + record.PREFIX_SIZE) // 512) * 512
    data[sector : sector + 512] = bytes(512)
    put(path, bytes(data))
    told = []
    try:
        for entry in dump(path):
            told.append(entry.kind)
    except CorruptLogError as error:
        told.append(f"damage at {error.offset}")
    assert told[len(log.records) :] == (["session", "multi_set"] if sealed else [f"damage at {log.offset}"])


def test_session_record_that_describes_nobody_is_damage(path: str) -> None:
    data = make(path, write_every_kind)
    put(path, data + next_record(data, record.SESSION, b"nobody"))
    with pytest.raises(CorruptLogError, match="cut short") as caught:
        list(dump(path))
    assert caught.value.offset == len(data)
