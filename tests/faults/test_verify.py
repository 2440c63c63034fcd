"""verify: it finds what keeps a store from being used, where it is, and nothing where there is nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.test_flips import LOGS, contents, flip
from hypothesis import given, strategies as st
from support.faulty import faulty_os
from support.internals import GenerationRef, Header, LogPosition, generation_name, log_of, record, scan
from support.logs import HEADER_SIZE, Handle, look_at, make, moments, opened, put, steps, tear, write_every_kind
from support.processes import Processes, result

from fscoord import CorruptLogError, FileStore, InsecurePathError, StoreTimeoutError, StoreUnavailableError
from fscoord.inspect import Report, verify

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


def damage(report: Report) -> list[tuple[int, int]]:
    """Where something is damaged, and how many bytes that is."""
    return [(finding.offset, finding.size) for finding in report.findings if finding.is_damage]


def reported(path: str) -> int | None:
    """At which offset a handle says that the log is damaged."""
    try:
        look_at(path)
    except CorruptLogError as error:
        return error.offset
    return None


# -- what it says of sound logs


@pytest.mark.parametrize(
    ("name", "verdict", "records", "voids"),
    [
        ("v3/every-kind.log", "sound", [24], 0),
        ("v3/torn.log", "torn", [5], 0),
        ("v3/voided.log", "sound", [13], 2),
        ("v3/durable.log", "sound", [13], 2),
        ("v3-generations/generations.log", "sound", [5, 4], 0),
    ],
)
def test_verify_finds_the_golden_logs_sound(name: str, verdict: str, records: list[int], voids: int) -> None:
    report = verify(DATA / name)
    assert (report.verdict, damage(report)) == (verdict, [])
    assert [generation.records for generation in report.generations] == records
    assert report.generations[0].voids == voids


@pytest.mark.parametrize("durable", [False, True])
def test_log_that_is_cut_anywhere_is_torn_and_never_damaged(durable: bool, path: str, rng: random.Random) -> None:
    data = make(path, write_every_kind, durable=durable)
    ends = {step.end for step in steps(data)}
    for size in rng.sample(moments(data, HEADER_SIZE, all_of_them=True), 120):
        put(path, data[:size])
        report = verify(path)
        assert report.verdict == ("sound" if size == HEADER_SIZE or size in ends else "torn")
        assert report.generations[0].records == len([end for end in ends if end <= size])


@pytest.mark.parametrize("size", [0, 8, HEADER_SIZE - 1])
def test_header_written_in_part_is_an_empty_log(size: int, path: str) -> None:
    put(path, make(path, write_every_kind)[:size])
    report = verify(path)
    assert (report.verdict, damage(report)) == ("empty", [])


def test_verify_writes_nothing_and_needs_only_the_right_to_read(
    public_dir: Path, as_nobody: Callable[..., Any]
) -> None:
    public_dir.chmod(0o755)
    path = public_dir / "log"
    tear(str(path), 30, b"k", b"v" * 50)
    path.chmod(0o444)
    before = (contents(str(path)), path.stat().st_mtime_ns, sorted(os.listdir(public_dir)))
    assert as_nobody(lambda: verify(path).verdict) == "torn"
    with faulty_os() as faulty:
        verify(path)
    assert {name for name, _ in faulty.calls} <= {"open", "read", "fstat", "stat", "listdir"}
    assert (contents(str(path)), path.stat().st_mtime_ns, sorted(os.listdir(public_dir))) == before


def test_verify_of_a_path_that_leads_to_no_log_is_an_error(path: str, tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailableError):
        verify(path)
    with pytest.raises(InsecurePathError):
        verify(tmp_path)
    os.symlink(DATA / "v3/torn.log", path)
    with pytest.raises(InsecurePathError):
        verify(path)


# -- what it says of damage


@pytest.mark.parametrize("name", LOGS)
def test_verify_finds_a_flipped_bit_exactly_if_a_handle_does(name: str, path: str, rng: random.Random) -> None:
    write, durable = LOGS[name]
    write(path, durable)
    data = contents(path)
    for bit in rng.sample(range(8 * len(data)), 60):
        put(path, flip(data, bit))
        report = verify(path)
        found = damage(report)
        assert (found[0][0] if found else None) == reported(path)
        assert report.verdict == ("damaged" if found else "sound")


def test_verify_finds_the_records_behind_a_damaged_one(path: str) -> None:
    data = make(path, write_every_kind)
    found = steps(data)
    for bad in found[1:-1]:
        for offset in (*(bad.start + place for place in (0, 5, 9, 13, 20, 22)), bad.end - 6, bad.end - 3, bad.end - 1):
            put(path, flip(data, 8 * offset))
            report = verify(path)
            assert damage(report) == [(bad.start, bad.end - bad.start)]
            assert report.generations[0].records == len(found) - 1
            assert report.generations[0].ends == "damaged"


def test_verify_reports_each_of_several_damages(path: str) -> None:
    data = make(path, write_every_kind)
    found = steps(data)
    bad = [found[2], found[5], found[-1]]
    for step in bad:
        data = flip(data, 8 * (step.end - 3))
    put(path, data)
    assert damage(verify(path)) == [(step.start, step.end - step.start) for step in bad]


def test_log_inside_a_value_is_not_taken_for_the_records_that_follow(path: str, tmp_path: Path) -> None:
    inner = make(str(tmp_path / "inner"), write_every_kind)
    data = make(path, lambda handle: [handle.write(b"log", inner), handle.write(b"k", b"v")])
    bad = steps(data)[1]
    for offset in (bad.start + 9, bad.end - 2):
        put(path, flip(data, 8 * offset))
        report = verify(path)
        assert damage(report) == [(bad.start, bad.end - bad.start)]
        assert report.generations[0].records == 2
    put(path, flip(data[: bad.end], 8 * (bad.end - 2)))
    assert verify(path).generations[0].records == 1


def test_hole_of_many_blocks_ends_where_records_begin_again(path: str, rng: random.Random) -> None:
    data = make(path, lambda handle: [handle.write(b"%d" % number, bytes([1]) * 100) for number in range(900)])
    found = steps(data)
    start, end = found[100].start, found[700].start
    put(path, data[:start] + rng.randbytes(end - start) + data[end:])
    assert damage(verify(path)) == [(start, end - start)]


def test_damages_too_many_to_list_are_counted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fscoord._log.inspect.verify.FINDINGS_MAX", 2)
    data = make(path, lambda handle: [handle.write(b"k", b"v") for _ in range(12)])
    for step in steps(data)[1::2]:
        data = flip(data, 8 * (step.end - 2))
    put(path, data)
    report = verify(path)
    assert (len(report.findings), report.more, report.verdict) == (2, 4, "damaged")


def test_record_that_needs_a_newer_version_is_damage_to_this_one(path: str) -> None:
    make(path, write_every_kind)
    header, (size, chain) = Header.decode(contents(path))
    assert header.generation == 0
    strange, _ = record.encode(ord("Q"), b"", b"", 1, 0, chain)
    put(path, contents(path)[:size] + strange)
    report = verify(path)
    assert damage(report) == [(size, len(strange))]
    assert "newer" in report.findings[0].message
    harmless, _ = record.encode(ord("q"), b"", b"", 1, 0, chain)
    put(path, contents(path)[:size] + harmless)
    assert verify(path).verdict == "sound"


@pytest.mark.parametrize("kind", [record.MULTI_SET, record.SESSION, record.DEATH, record.SEAL, record.FORWARD])
def test_record_that_is_malformed_is_damage_despite_its_checksum(kind: int, path: str) -> None:
    make(path, write_every_kind)
    _, (size, chain) = Header.decode(contents(path))
    senseless, chain = record.encode(kind, b"", b"?", 1, 0, chain)
    behind, _ = record.encode(record.SET, b"k", b"v", 1, 0, chain)
    put(path, contents(path)[:size] + senseless + behind)
    assert damage(verify(path))[0] == (size, len(senseless))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"hello, world", "not a log of fscoord"),
        (b"fscoord\n\2\0" + bytes(120), "version 2 and was written by a pre-release: remove it"),
        (b"fscoord\n\4\0" + bytes(120), "version 4"),
    ],
)
def test_file_of_another_kind_is_damage_at_0(data: bytes, says: str, path: str) -> None:
    put(path, data)
    report = verify(path)
    assert (report.verdict, damage(report)) == ("damaged", [(0, len(data))])
    assert says in report.findings[0].message


# -- generations


@pytest.fixture
def store(path: str) -> FileStore:
    """A log in its generation 2, and closed."""
    with FileStore(path) as store:
        for number in range(3):
            store.set("k", str(number))
            if number < 2:
                store.compact()
    return store


def newest(path: str) -> str:
    (name,) = [name for name in os.listdir(os.path.dirname(path)) if name.startswith("log.2.")]
    return os.path.join(os.path.dirname(path), name)


def test_verify_follows_generations_to_the_newest(store: FileStore, path: str) -> None:
    report = verify(path)
    assert [(found.generation, found.ends) for found in report.generations] == [(0, "sealed"), (2, "whole")]
    assert report.findings == ()


def test_damage_in_a_later_generation_is_reported_with_its_file(store: FileStore, path: str) -> None:
    file = newest(path)
    put(file, contents(file)[:-1] + b"?")
    report = verify(path)
    assert report.verdict == "damaged"
    assert {finding.file for finding in report.findings} == {file}
    with pytest.raises(CorruptLogError, match="fscoord verify"):
        FileStore(path)


def test_generation_that_was_deleted_is_named(store: FileStore, path: str) -> None:
    os.unlink(newest(path))
    report = verify(path)
    assert report.verdict == "damaged"
    assert "generation 2 of the log is missing" in report.findings[0].message


def test_file_in_the_place_of_a_generation_is_damage(store: FileStore, path: str) -> None:
    put(newest(path), make(path + "2", write_every_kind))
    assert "not the next generation" in verify(path).findings[0].message


def test_snapshot_that_differs_from_its_seal_is_damage(path: str) -> None:
    with FileStore(path) as store:
        store.compact()
    (name,) = [name for name in os.listdir(os.path.dirname(path)) if name.startswith("log.1.")]
    file = os.path.join(os.path.dirname(path), name)
    assert verify(path).verdict == "sound"
    put(file, contents(file)[: Header.decode(contents(file))[1].offset])
    assert "snapshot" in verify(path).findings[0].message


def test_record_written_behind_a_seal_is_damage(path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        store.compact()
    last = steps(contents(path))[-1]
    chain = record.chain_at_end(contents(path))
    behind, _ = record.encode(record.SET, b"k", b"lost", 1, 0, chain)
    with open(path, "ab") as file:
        file.write(behind)
    report = verify(path)
    assert damage(report) == [(last.end, len(behind))]
    assert "after the seal" in report.findings[0].message


def test_forward_record_in_the_torn_tail_of_a_later_generation_names_nothing(store: FileStore, path: str) -> None:
    """Only of generation 0 do openers read the end first."""
    file = newest(path)
    data = contents(file)
    named = GenerationRef(9, bytes(16), 0, 0, generation_name(b"log", 9, bytes(6)))
    forward, _ = record.encode(record.FORWARD, b"", named.forward(), 1, 2, 3)
    chain = record.chain_at_end(data)
    last, _ = record.encode(record.SET, b"k", forward + b"more", 1, 2, chain)
    put(file, data + last[: -len(b"more") - record.TAIL_SIZE])
    assert verify(path).verdict == "torn"


def test_orphan_is_reported_and_harmless(store: FileStore, path: str) -> None:
    orphan = os.path.join(os.path.dirname(path), generation_name(b"log", 3, bytes(6)).decode())
    put(orphan, contents(newest(path)))
    report = verify(path)
    assert report.verdict == "sound"
    assert [(finding.file, finding.is_damage) for finding in report.findings] == [(orphan, False)]


def test_seal_that_skips_a_generation_is_damage(path: str) -> None:
    make(path, write_every_kind)
    _, (size, chain) = Header.decode(contents(path))
    seal = GenerationRef(2, bytes(16), size, chain, generation_name(b"log", 2, bytes(6))).seal()
    data, _ = record.encode(record.SEAL, b"", seal, 1, 0, chain)
    put(path, contents(path)[:size] + data)
    assert "not the next" in verify(path).findings[0].message


# -- a log in use


def test_verify_beside_writers_that_tear_all_the_time_reports_no_damage(path: str, rng: random.Random) -> None:
    count, looks, records = 600, 0, 0
    with opened(path) as handle, Processes("race_worker") as processes:
        lock = handle.log.handle.lock
        lock.try_lock()  # until the first look, or the writers might be done before it
        writers = [processes.start_role("write", path, writer, count, rng.randrange(1 << 32)) for writer in (1, 2)]
        while any(writer.poll() is None for writer in writers):
            report = verify(path, timeout=60)
            lock.unlock()
            assert damage(report) == []
            assert report.generations[0].records >= records, "an older state was seen after a newer one"
            looks, records = looks + 1, report.generations[0].records
        assert sum(result(writer, 60)["tears"] for writer in writers) > 0
    assert looks > 0
    report = verify(path)
    assert damage(report) == []
    assert report.generations[0].records >= 2 * count


def test_verify_beside_writers_that_compact_all_the_time_reports_no_damage(path: str) -> None:
    with FileStore(path):
        pass
    newest = 0
    with Processes("compacting_worker") as processes:
        writers = [processes.start_role("write", path, writer, 400) for writer in (1, 2)]
        while any(writer.poll() is None for writer in writers):
            report = verify(path, timeout=60)
            assert damage(report) == []
            assert report.generations[-1].generation >= newest, "an older state was seen after a newer one"
            newest = report.generations[-1].generation
        assert max(result(writer, 60)["generation"] for writer in writers) > 3
    assert verify(path).verdict == "sound"


@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_verify_does_not_judge_a_write_that_may_be_under_way(lock: str, path: str) -> None:
    with FileStore(path, lock=lock) as store:
        store.set("k", "v")
        whole = contents(path)
        log_lock = log_of(store).handle.lock
        with log_of(store).handle.mutex:
            log_lock.try_lock()
            try:
                assert verify(path, timeout=0).verdict == "sound", "a whole log needs no lock"
                put(path, whole + whole[-30:-10])
                with pytest.raises(StoreTimeoutError) as caught:
                    verify(path, timeout=0)
                assert caught.value.holder == ("session 1" if lock == "ofd" else f"{os.uname().nodename}:{os.getpid()}")
            finally:
                log_lock.unlock()
    assert verify(path).verdict == "damaged"


# -- how what follows damage is found


@given(st.binary(max_size=40), st.binary(max_size=60), st.integers(0, 2**32 - 1), st.integers(0, 2**24 - 1))
def test_prefix_of_a_record_implies_the_chain_before_it(key: bytes, value: bytes, chain: int, writer: int) -> None:
    data, _ = record.encode(record.SET, key, value, writer, 1, chain)
    assert record.chain_if_sound(data, 0) == chain


def test_scan_finds_each_record_from_before_it(path: str) -> None:
    data = make(path, write_every_kind)
    found = steps(data)
    chains = [record.chain_at_end(data[: step.end]) for step in found]
    fd = os.open(path, os.O_RDONLY)
    try:
        for before, after, chain in zip(found, found[1:], chains, strict=False):
            assert scan.find_next(fd, LogPosition(before.start, 12345)) == LogPosition(after.start, chain)
        assert scan.find_next(fd, LogPosition(found[-1].start, 12345)) is None
    finally:
        os.close(fd)


def test_verify_gives_up_a_file_that_was_made_to_be_searched_for_ever(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each 16th of its bytes begins what looks like a record of 65 kB, newlines and all."""
    monkeypatch.setattr(scan, "_WORK_MIN", 0)
    put(path, make(path, write_every_kind) + b"\x0e\1\1\0" + b"\1\1A\1\n\1\1\0\1\n\1\1\x0e\1\1\0" * 25_000)
    with faulty_os() as faulty:
        report = verify(path)
    assert report.verdict == "damaged"
    assert [name for name, _ in faulty.calls].count("read") < 500


def test_records_longer_than_one_read_are_read_whole(path: str) -> None:
    sizes = [scan.CHUNK, scan.CHUNK - 29, 5, 3 << 20, 0]

    def write(handle: Handle) -> None:
        for size in sizes:
            handle.write(b"k", b"x" * size)

    make(path, write)
    report = verify(path)
    assert (report.verdict, report.generations[0].records) == ("sound", 1 + len(sizes))
    os.truncate(path, os.path.getsize(path) - (2 << 20))
    report = verify(path)
    assert (report.verdict, report.generations[0].records) == ("torn", 4)


def test_log_with_a_marker_is_judged_when_the_marker_has_gone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path, lock="soft") as store:
        store.set("k", "1")
    data = Path(path).read_bytes()
    Path(path).write_bytes(data + b"torn")
    marker, naps = Path(path + ".lock"), []

    def finish(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:  # the holder has ended its record
            Path(path).write_bytes(data)
            marker.unlink()

    marker.write_text("1\nelsewhere\n")
    monkeypatch.setattr(scan.system.time, "sleep", finish)
    assert verify(path).verdict == "sound"
    assert naps == [scan.SOFT_LOCK_CHECK_S] * 3


def test_snapshot_that_ends_where_a_piece_ends_is_sound(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path) as store:
        store.multi_set([f"k{number}" for number in range(100)], [b"x" * 100] * 100)
        store.compact()
    for chunk in (1 << 9, 1 << 10, 1 << 12, 1 << 20):
        monkeypatch.setattr(scan, "CHUNK", chunk)
        assert verify(path).verdict == "sound"
