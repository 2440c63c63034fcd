"""Zeros after the last record, by the gigabyte: a file that was made longer by mistake, or restored in part.

No handle reads them twice, no call exceeds its deadline because of them, and no later record is missed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.internals import log_of

from fscoord import FileStore, StoreTimeoutError
from fscoord._log import mount
from fscoord._log.files import torn_tail
from fscoord._log.files.torn_tail import DeadlineReached, Zeros
from fscoord._runtime import system
from fscoord.inspect import repair, verify

HANG_S = 60
GIB = 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def make(path: Path, zeros: int, *, durable: bool = False, torn: bool = False) -> None:
    with FileStore(path, timeout=HANG_S, durable=durable) as store:
        store.set("k", "1")
        if torn:
            store.set("torn", "x" * 100)
    if torn:  # the half of the value is written, and its prefix is sound
        os.truncate(path, path.stat().st_size - 50)
    os.truncate(path, path.stat().st_size + zeros)


class Reads:
    """Takes the place of os.read, and counts the bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self.usual = os.read

    def __call__(self, fd: int, size: int) -> bytes:
        data = self.usual(fd, size)
        self.bytes += len(data)
        return data


@pytest.fixture
def without_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mount.Mount, "reports_holes", property(lambda _: False))


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("durable", [False, True])
def test_zeros_are_read_once_by_a_handle(
    path: Path, durable: bool, torn: bool, without_holes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(path, 64 << 20, durable=durable, torn=torn)
    with FileStore(path, read_only=True, timeout=HANG_S) as store:
        assert store.get("k") == b"1"
        reads = Reads()
        monkeypatch.setattr(os, "read", reads)
        for _ in range(10):
            assert store.get("k") == b"1"
        monkeypatch.setattr(os, "read", reads.usual)
        assert reads.bytes < 10 * 200_000, "each look reads a chunk, and not what follows it"


def test_holes_are_not_read_where_the_file_system_reports_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not mount.find_mount(str(path)).reports_holes:
        monkeypatch.setattr(mount.Mount, "reports_holes", property(lambda _: True))
    make(path, 200 * GIB)
    reads = Reads()
    monkeypatch.setattr(os, "read", reads)
    with FileStore(path, timeout=HANG_S) as store:
        assert store.get("k") == b"1"
        store.set("k", "2")
        assert store.get("k") == b"2"
    with FileStore(path, read_only=True, timeout=HANG_S) as store:
        assert store.get("k") == b"2"
    assert reads.bytes < 20 << 20


def test_opening_a_log_that_ends_in_zeros_ends_with_its_deadline(path: Path, without_holes: None) -> None:
    """Unbounded, each of them would read for an hour or more."""
    make(path, 8192 * GIB)
    started = time.monotonic()
    for call in (
        lambda: FileStore(path, read_only=True, timeout=0.2),
        lambda: FileStore(path, timeout=0.2),
        lambda: FileStore(path, timeout=0),
    ):
        with pytest.raises(StoreTimeoutError, match=r"no complete record was found within"):
            call()
    assert time.monotonic() - started < HANG_S


def test_open_handles_meet_their_deadlines_and_go_on_reading(path: Path, without_holes: None) -> None:
    make(path, 0)
    with FileStore(path, timeout=0.2) as store, FileStore(path, timeout=0.2) as other:
        size = path.stat().st_size
        os.truncate(path, 8192 * GIB)
        started = time.monotonic()
        for call in (
            lambda: store.get("k"),
            lambda: store.set("k", "2"),
            lambda: other.add("n", 1),
            lambda: store.check(["k"]),
            lambda: store.wait(["never"], 0.2),
        ):
            with pytest.raises(StoreTimeoutError):
                call()
        assert time.monotonic() - started < HANG_S
        assert log_of(store).handle.zeros._end > size + (1 << 20), "each goes on where the one before has stopped"
        os.truncate(path, size)
        assert store.get("k") == b"1"
        store.set("k", "2")
        assert other.get("k") == b"2"


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("zeros", [1, 600, 70_000, 3 << 20])
def test_records_behind_zeros_are_found_by_every_handle(
    path: Path, zeros: int, holes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mount.Mount, "reports_holes", property(lambda _: holes))
    make(path, zeros)
    with FileStore(path, timeout=HANG_S) as writer, FileStore(path, read_only=True, timeout=HANG_S) as early:
        assert early.get("k") == b"1"
        for number in range(3):
            writer.set("k", f"more {number}")
            assert early.get("k") == b"more %d" % number
        os.truncate(path, path.stat().st_size + zeros)
        assert early.get("k") == b"more 2"
        with FileStore(path, timeout=HANG_S) as another:
            another.set("k", "last")
        assert early.get("k") == b"last"
        assert writer.get("k") == b"last"
    assert verify(path).verdict == "sound"


def test_repair_copies_a_log_without_the_zeros(path: Path, tmp_path: Path) -> None:
    make(path, 300 << 20)
    assert verify(path).verdict == "torn"
    repair(path, tmp_path / "copy", write=True)
    assert (tmp_path / "copy").stat().st_size < 1000
    with FileStore(tmp_path / "copy", timeout=HANG_S) as store:
        assert store.get("k") == b"1"


# -- Zeros by itself ---------------------------------------------------------------------------------------------------


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


class Clock:
    """A clock that goes on by a second whenever it is asked."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 1
        return self.now


@pytest.mark.parametrize("is_sparse", [False, True])
def test_first_data_is_found_wherever_it_is(descriptor: int, is_sparse: bool) -> None:
    os.ftruncate(descriptor, 5 << 20)
    for place in (0, 1, 4095, 1 << 20, (1 << 20) + 1, (5 << 20) - 1):
        os.pwrite(descriptor, b"x", place)
        for start in (0, 1, place - 1, place, place + 1):
            zeros = Zeros(is_sparse=is_sparse)
            expected = place if place >= start else None
            assert zeros.first_data(descriptor, max(start, 0), 5 << 20) == expected
            assert zeros.first_data(descriptor, max(start, 0), 5 << 20) == expected, "the second time as well"
        assert Zeros(is_sparse=is_sparse).first_data(descriptor, 0, place) is None, "what is behind does not count"
        os.pwrite(descriptor, b"\0", place)
    assert Zeros(is_sparse=is_sparse).first_data(descriptor, 0, 5 << 20) is None
    assert Zeros(is_sparse=is_sparse).first_data(descriptor, 6 << 20, 7 << 20) is None


def test_first_data_is_found_in_bytes_added_since(descriptor: int) -> None:
    zeros = Zeros()
    os.ftruncate(descriptor, 1000)
    assert zeros.first_data(descriptor, 100, 1000) is None
    os.ftruncate(descriptor, 3000)
    os.pwrite(descriptor, b"x", 2000)
    assert zeros.first_data(descriptor, 100, 3000) == 2000
    assert zeros.first_data(descriptor, 50, 3000) == 2000, "and of what lies before nothing is known"
    os.pwrite(descriptor, b"x", 60)
    zeros.forget()
    assert zeros.first_data(descriptor, 50, 3000) == 60


def test_first_data_stops_at_the_deadline_and_goes_on(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "time", Clock())
    monkeypatch.setattr(torn_tail, "_CHUNK", 4096)
    os.ftruncate(descriptor, 100 * 4096)
    os.pwrite(descriptor, b"x", 50 * 4096)
    zeros, stops = Zeros(), 0
    while True:
        zeros.deadline = system.time.monotonic() + 5
        try:
            found = zeros.first_data(descriptor, 0, 100 * 4096)
            break
        except DeadlineReached:
            stops += 1
    assert found == 50 * 4096
    assert 5 <= stops <= 15


def test_search_for_a_void_stops_at_the_deadline(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a durable log whose last record has lost its beginning, with data in every sector after it."""
    monkeypatch.setattr(system, "time", Clock())
    os.pwrite(descriptor, b"x" * (100 * 512), 4096)
    zeros = Zeros()
    zeros.deadline = 20.0
    with pytest.raises(DeadlineReached):
        torn_tail.examine(descriptor, 1024, 77, zeros, durable=True)


def test_search_skips_sectors_of_zeros(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    decode: Callable[[bytes, int], object] = torn_tail.record.decode_void
    monkeypatch.setattr(torn_tail.record, "decode_void", lambda data, chain: calls.append(1) or decode(data, chain))
    os.pwrite(descriptor, b"x", 40 << 20)
    assert isinstance(
        torn_tail.examine(descriptor, 1024, 77, Zeros(), durable=True), (torn_tail.Torn, torn_tail.Damage)
    )
    assert len(calls) < 10
