"""The bytes after the last good record: cases that the exhaustive tests do not meet."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_system
from support.internals import log_of
from support.logs import HEADER_SIZE, SECTOR, look_at, make, opened, put, steps, tear
from support.plain_reader import read_log

from fscoord import CorruptLogError, FileStore, StoreTimeoutError
from fscoord._log.files import torn_tail
from fscoord._log.files.torn_tail import Damage, DeadlineReached, Skip, Torn, Verdict, Zeros, void_place
from fscoord._log.format import record
from fscoord._log.replay import cursor
from fscoord.inspect import verify

CHAIN = 77


def examine(fd: int, offset: int, chain: int, *, durable: bool) -> Verdict:
    """The result of `examine` on a new file; with holes, if they are wanted, as well."""
    verdict = torn_tail.examine(fd, offset, chain, Zeros(), durable=durable)
    assert torn_tail.examine(fd, offset, chain, Zeros(is_sparse=True), durable=durable) == verdict
    return verdict


@pytest.fixture
def path(memory: Path) -> str:
    return str(memory / "log")


@pytest.fixture
def descriptor(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def write(fd: int, *pieces: tuple[int, bytes]) -> None:
    for offset, data in pieces:
        os.pwrite(fd, data, offset)


@pytest.mark.parametrize(
    ("end", "place"), [(12, 1024), (512, 1024), (513, 1536), (1023, 1536), (1024, 1536), (1025, 2048)]
)
def test_void_lies_at_the_first_sector_at_least_one_sector_further(end: int, place: int) -> None:
    assert void_place(end) == place
    assert place % SECTOR == 0
    assert SECTOR <= place - end < 2 * SECTOR


def test_tail_that_is_empty_counts_as_torn(descriptor: int) -> None:
    """A writer asks only when there is something; if it vanishes meanwhile, so be it."""
    assert examine(descriptor, 100, CHAIN, durable=False) == Torn(1024)


def test_prefix_that_is_torn_promises_nothing_after_itself(descriptor: int) -> None:
    write(descriptor, (504, b"torn"))
    assert examine(descriptor, 504, CHAIN, durable=False) == Torn(1024), "the prefix would have ended at 512"


def test_void_counts_only_for_the_record_that_it_names(descriptor: int) -> None:
    torn, _ = record.encode(record.SET, b"k", b"v", 1, 2, CHAIN)
    for named, chain, verdict in (
        (100, CHAIN, Skip),
        (99, CHAIN, Damage),
        (100, CHAIN + 1, Damage),
    ):
        os.ftruncate(descriptor, 0)
        write(descriptor, (100, torn[:20]), (1024, record.encode_void(named, 1, 2, chain)[0]))
        assert isinstance(examine(descriptor, 100, CHAIN, durable=False), verdict)


def test_void_counts_only_at_the_edge_of_a_sector(descriptor: int) -> None:
    torn, _ = record.encode(record.SET, b"k", b"v", 1, 2, CHAIN)
    void, _ = record.encode_void(100, 1, 2, CHAIN)
    for place, verdict in ((1024, Skip), (1025, Damage), (1300, Damage), (1536, Skip)):
        os.ftruncate(descriptor, 0)
        write(descriptor, (100, torn[:20]), (place, void))
        assert isinstance(examine(descriptor, 100, CHAIN, durable=False), verdict)


def test_void_after_a_lost_prefix_counts_only_for_the_record_that_it_names(descriptor: int) -> None:
    for named, verdict in ((510, Skip), (509, Damage)):
        os.ftruncate(descriptor, 0)
        write(descriptor, (1030, b"the rest of a record"), (2048, record.encode_void(named, 1, 2, CHAIN)[0]))
        assert isinstance(examine(descriptor, 510, CHAIN, durable=True), verdict)


def test_void_without_a_torn_record_before_it_is_damage(path: str) -> None:
    data = make(path, lambda handle: handle.write(b"k", b"v"))
    chain = record.chain_at_end(data)
    put(path, data + record.encode_void(len(data), 1, 2, chain)[0])
    with pytest.raises(CorruptLogError):
        look_at(path)


def test_void_may_lie_further_on_after_zeros(path: str) -> None:
    """A power failure may have left the file longer, with nothing in it."""
    tear(path, 20, b"k", b"v")
    os.truncate(path, os.path.getsize(path) + 5000)
    assert [found[1] for found in look_at(path)] == [b"before"]
    size = os.path.getsize(path)
    with opened(path) as handle:
        handle.write(b"new", b"value")
    data = Path(path).read_bytes()
    assert data[-(-size // SECTOR) * SECTOR :][:4] == b"\x25\0\0\0"
    assert read_log(data).ends == "whole"
    assert look_at(path)[-1][1] == b"new"


def test_prefix_whose_first_byte_is_zero_at_a_sector_end_is_not_lost(path: str) -> None:
    """Of a durable log: the zero is what was written there, so that a flipped bit elsewhere is damage."""

    def write_records(handle) -> None:
        handle.write(b"", b"")
        handle.write(b"", b"x" * ((-os.path.getsize(path) - 29 - 1) % SECTOR))
        assert os.path.getsize(path) % SECTOR == SECTOR - 1
        handle.write(b"k", b"y" * (512 - 30))

    data = make(path, write_records, durable=True)
    start = steps(data)[-1].start
    assert data[start] == 0
    put(path, data[:-30] + b"z" + data[-29:])
    with pytest.raises(CorruptLogError) as caught:
        look_at(path)
    assert caught.value.offset == start


def test_prefix_whose_last_byte_is_zero_in_a_lost_sector_is_torn(path: str) -> None:
    """Of a durable log: the prefix is sound all the same, but nothing behind it is what was written."""
    data = make(path, lambda handle: handle.write(b"k", b"x"), durable=True)
    chain = record.chain_at_end(data)
    padding, chain = record.encode(record.SET, b"", b"x" * ((505 - len(data) - 29) % SECTOR), 1, 2, chain)
    begin = len(data + padding)
    assert begin % SECTOR == 505
    last = next(
        encoded
        for size in range(900, 3000)
        if (encoded := record.encode(record.SET, b"k", b"y" * size, 1, 2, chain)[0])[7] == 0
    )
    whole = data + padding + last
    put(path, whole[: begin + 7] + bytes(SECTOR) + whole[begin + 7 + SECTOR :])
    assert read_log(Path(path).read_bytes()).ends == "torn"
    assert [found[1] for found in look_at(path)] == [b"k", b""]


def test_data_longer_than_a_record_after_a_lost_prefix_is_damage(descriptor: int) -> None:
    write(descriptor, (100, b"x" * 10), (record.RECORD_MAX + 600, b"x"))
    assert isinstance(examine(descriptor, 510, CHAIN, durable=True), Damage)
    os.ftruncate(descriptor, 0)
    write(descriptor, (100, b"x" * 10), (9000, b"x"))
    assert examine(descriptor, 510, CHAIN, durable=True) == Torn(9216)


@pytest.mark.parametrize("distance", range(8, 32))
def test_record_within_the_minimum_size_of_a_lost_one_is_not_looked_for(distance: int, descriptor: int) -> None:
    offset = 512 - 8
    write(descriptor, (offset + distance, record.encode(record.SET, b"k", b"v", 1, 2, CHAIN)[0]))
    verdict = examine(descriptor, offset, CHAIN, durable=True)
    assert isinstance(verdict, Torn if distance < 29 else Damage)


def test_record_is_found_at_any_offset_and_with_any_chain() -> None:
    for kind, key, value in ((record.SET, b"k", b"v"), (record.LEAVE, b"", b""), (record.SET, b"k" * 1024, bytes(900))):
        data, _ = record.encode(kind, key, value, 3, 10**18, 0xDEAD_BEEF)
        for before in (b"", bytes(3), b"x" * 700, b"\x25\0\0\0" * 9):
            assert torn_tail._holds_record(before + data)
            assert torn_tail._holds_record(before + data + b"x")
            assert not torn_tail._holds_record(before + data[:-1])
            assert not torn_tail._holds_record(before + data[:8] + bytes([data[8] ^ 1]) + data[9:])
    assert not torn_tail._holds_record(bytes(5000))
    assert not torn_tail._holds_record(b"x" * 5000)


def test_record_search_in_a_huge_value_is_fast(seed: int) -> None:
    """The bound is what pytest allows a test; without the filter it would take hours."""
    import random

    assert not torn_tail._holds_record(random.Random(seed).randbytes(8 << 20))
    assert not torn_tail._holds_record((b"\x20\x01\0\0" * 4 + bytes(13)) * (1 << 12))


def test_chain_begins_with_the_header(path: str) -> None:
    """The records of one log are damage behind the header of another."""
    data = make(path, lambda handle: handle.write(b"k", b"v"))
    other = make(path + "2", lambda handle: handle.write(b"k", b"v"))
    put(path, other[:HEADER_SIZE] + data[HEADER_SIZE:])
    with pytest.raises(CorruptLogError) as caught:
        look_at(path)
    assert caught.value.offset == HEADER_SIZE


@pytest.mark.parametrize("more", [0, 1, 512])
def test_bad_record_at_a_sector_end_of_a_durable_log_is_damage(more: int, descriptor: int) -> None:
    """The bytes behind it are no part of it, be they zeros or absent."""
    data, _ = record.encode(record.SET, b"k", b"x" * (1024 - 100 - 30), 1, 2, CHAIN)
    assert len(data) == 1024 - 100
    write(descriptor, (100, data[:500] + b"?" + data[501:] + bytes(more)))
    assert isinstance(examine(descriptor, 100, CHAIN, durable=True), Damage)


@pytest.mark.parametrize(("more", "verdict"), [(0, Torn), (1, Damage)])
def test_tail_with_a_lost_prefix_is_at_most_one_record_long(
    more: int, verdict: type, descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RECORD_MAX", 1000)
    size = 2040 + record.RECORD_MAX + more
    write(descriptor, (2050, b"what is left of it"), (size - 1, b"S"))
    assert isinstance(examine(descriptor, 2040, CHAIN, durable=True), verdict)


def test_record_whose_kind_is_no_letter_is_not_recognised_by_itself() -> None:
    for kind, is_sound in (("S", True), ("q", True), ("1", False)):
        data, _ = record.encode(ord(kind), b"k", b"v", 1, 2, CHAIN)
        assert record.chain_if_sound(b"..." + data, 3) == (CHAIN if is_sound else None)
        assert record.chain_if_sound(b"..." + data[:-1], 3) is None


def test_data_shorter_than_the_minimum_holds_no_record() -> None:
    data, _ = record.encode(record.SET, b"", b"", 1, 2, CHAIN)
    for size in range(len(data)):
        assert record.chain_if_sound(data[:size], 0) is None
        assert record.chain_if_sound(b"." * 100 + data[:size], 100) is None
    assert record.chain_if_sound(data, 0) == CHAIN


# -- what is known to be zeros


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Where, and how much, is read in search of data, 1,000 bytes at a time."""
    monkeypatch.setattr(torn_tail, "_CHUNK", 1000)
    done: list[tuple[int, int]] = []
    read_at = torn_tail.read_at

    def noted(fd: int, offset: int, size: int) -> bytes:
        done.append((offset, size))
        return read_at(fd, offset, size)

    monkeypatch.setattr(torn_tail, "read_at", noted)
    return done


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("place", [0, 1, 999, 1000, 1001, 2499, 2500, 4998, 4999])
def test_data_after_zeros_is_found_at_its_first_byte(
    place: int, is_sparse: bool, descriptor: int, reads: list[tuple[int, int]]
) -> None:
    os.ftruncate(descriptor, 5000)
    write(descriptor, (place, b"x"))
    for start, end in ((0, 5000), (place, 5000), (0, place + 1), (place, place + 1), (max(0, place - 1), 6000)):
        assert Zeros(is_sparse=is_sparse).first_data(descriptor, start, end) == place
    for start, end in ((0, place), (place + 1, 5000), (place, place), (place + 1, 6000), (5000, 6000)):
        assert Zeros(is_sparse=is_sparse).first_data(descriptor, start, end) is None
    os.ftruncate(descriptor, 0)
    assert Zeros(is_sparse=is_sparse).first_data(descriptor, 0, 5000) is None


def test_zeros_are_read_once_for_repeated_queries(descriptor: int, reads: list[tuple[int, int]]) -> None:
    os.ftruncate(descriptor, 2500)
    zeros = Zeros()
    assert zeros.first_data(descriptor, 100, 2500) is None
    assert reads == [(100, 1000), (1100, 1000), (2100, 400)]
    reads.clear()
    for start, end in ((100, 2500), (700, 900), (2500, 2500), (100, 1600)):
        assert zeros.first_data(descriptor, start, end) is None
    assert not reads
    write(descriptor, (3000, b"x"))
    for _ in range(2):
        assert zeros.first_data(descriptor, 600, 3001) == 3000
    assert reads == [(2500, 501), (3000, 1)]
    reads.clear()
    for start in (50, 3001):  # before, and after, what is known
        assert zeros.first_data(descriptor, start, 3001) == (3000 if start == 50 else None)
    assert reads == [(50, 1000), (1050, 1000), (2050, 951)]
    reads.clear()
    zeros.forget()
    assert zeros.first_data(descriptor, 2900, 2950) is None
    assert reads == [(2900, 50)]


def test_zeros_known_end_where_the_data_begins(descriptor: int) -> None:
    write(descriptor, (1000, b"x"), (2000, b"y"))
    zeros = Zeros()
    assert zeros.first_data(descriptor, 0, 3000) == 1000
    assert zeros.first_data(descriptor, 1000, 3000) == 1000
    assert zeros.first_data(descriptor, 1001, 3000) == 2000
    assert zeros.first_data(descriptor, 999, 3000) == 1000


@pytest.mark.parametrize("is_sparse", [False, True])
def test_holes_are_skipped_unread_where_the_file_system_reports_them(
    is_sparse: bool, descriptor: int, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torn_tail, "_CHUNK", 1 << 16)
    asked: list[int] = []

    class Os:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        def lseek(self, fd: int, offset: int, whence: int) -> int:
            asked.append(whence)
            return os.lseek(fd, offset, whence)

    monkeypatch.setattr(torn_tail.system, "os", Os())
    size = 64 << 20
    os.ftruncate(descriptor, size)
    assert Zeros(is_sparse=is_sparse).first_data(descriptor, 100, size) is None
    write(descriptor, (size - 5, b"x"))
    assert Zeros(is_sparse=is_sparse).first_data(descriptor, 100, size) == size - 5
    assert (os.SEEK_DATA in asked) == is_sparse
    assert len(reads) < 10 if is_sparse else len(reads) == 2048


def test_hole_query_that_fails_is_an_error(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    os.ftruncate(descriptor, 5 << 20)
    failing = pytest.raises(OSError, match="Input/output error")
    with faulty_system() as faulty, faulty.fail(0, errno.EIO, names=("lseek",)), failing:
        Zeros(is_sparse=True).first_data(descriptor, 0, 5 << 20)
    assert Zeros(is_sparse=True).first_data(descriptor, 0, 5 << 20) is None


def test_zero_search_that_ran_out_of_time_resumes_at_the_same_place(
    descriptor: int, reads: list[tuple[int, int]]
) -> None:
    os.ftruncate(descriptor, 3500)
    write(descriptor, (3400, b"x"))
    zeros = Zeros()
    zeros.deadline = float("-inf")
    for _ in range(3):
        with pytest.raises(DeadlineReached):
            zeros.first_data(descriptor, 0, 3500)
    assert zeros.first_data(descriptor, 0, 3500) == 3400
    assert reads == [(0, 1000), (1000, 1000), (2000, 1000), (3000, 500)]
    zeros.forget()
    assert zeros.first_data(descriptor, 2400, 3400) is None, "it was the last piece"
    zeros.deadline = time.monotonic() + 3600
    assert zeros.first_data(descriptor, 0, 3500) == 3400


def test_void_search_ends_at_its_deadline_and_can_be_repeated(descriptor: int) -> None:
    """After a record whose beginning is lost each sector may hold its void."""
    write(descriptor, (1030, b"x" * 3000))
    zeros = Zeros()
    zeros.deadline = float("-inf")
    with pytest.raises(DeadlineReached):
        torn_tail.examine(descriptor, 510, CHAIN, zeros, durable=True)
    zeros.deadline = float("inf")
    assert torn_tail.examine(descriptor, 510, CHAIN, zeros, durable=True) == Torn(4096)


@pytest.mark.parametrize("read_only", [True, False])
def test_handle_that_times_out_in_zeros_reads_on_with_each_call(
    read_only: bool, path: str, reads: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torn_tail, "_CHUNK", 4096)
    monkeypatch.setattr(cursor, "SCAN_GRACE_S", -1.0)
    with FileStore(path) as store:
        store.set("k", "1")
    size = os.path.getsize(path)
    os.truncate(path, size + 10 * 4096)
    with FileStore(path, timeout=0.001, read_only=read_only) as other:
        log_of(other).handle.zeros.is_sparse = False
        log_of(other).handle.zeros.forget()
        other.set_timeout(timedelta(0))
        reads.clear()
        tries = 0
        while True:
            tries += 1
            try:
                assert log_of(other).refresh(-1.0) is None
                break
            except StoreTimeoutError as error:
                assert f"in the {10 * 4096} bytes after offset {size};" in str(error)
                assert "timeout" in str(error)
        assert 8 <= tries <= 12
        assert sum(count for _, count in reads if count == 4096) <= 11 * 4096
        assert other.get("k") == b"1"
        if not read_only:
            other.set("k", "2")
            assert other.get("k") == b"2"
    assert verify(path).verdict == ("torn" if read_only else "sound")
