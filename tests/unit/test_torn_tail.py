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

from fscoord import FileStore, StoreTimeoutError
from fscoord._log.files import torn_tail
from fscoord._log.files.torn_tail import Damage, DeadlineReached, Skip, Torn, Verdict, Zeros
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


def test_data_longer_than_a_record_after_a_lost_prefix_is_damage(descriptor: int) -> None:
    write(descriptor, (100, b"x" * 10), (record.RECORD_MAX + 600, b"x"))
    assert isinstance(examine(descriptor, 510, CHAIN, durable=True), Damage)
    os.ftruncate(descriptor, 0)
    write(descriptor, (100, b"x" * 10), (9000, b"x"))
    assert examine(descriptor, 510, CHAIN, durable=True) == Torn(9216)


@pytest.mark.parametrize("more", [0, 1, 512])
def test_bad_record_at_a_sector_end_of_a_durable_log_is_damage(more: int, descriptor: int) -> None:
    """The bytes behind it are no part of it, be they zeros or absent."""
    data, _ = record.encode(record.SET, b"k", b"x" * (1024 - 100 - 30), 1, 2, CHAIN)
    assert len(data) == 1024 - 100
    write(descriptor, (100, data[:500] + b"?" + data[501:] + bytes(more)))
    assert isinstance(examine(descriptor, 100, CHAIN, durable=True), Damage)


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
    with FileStore(path, read_only=read_only) as other:
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
