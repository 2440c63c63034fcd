"""The finds of the fuzzer, each as it was found: the defects stay corrected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.internals import OFD, GenerationRef, Header, Session, generation_name, record
from support.logs import look_at, make, opened, put, write_every_kind

from fscoord import CorruptLogError, FileStore, LimitExceededError, StoreGoneError
from fscoord.inspect import dump, repair, verify


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


def put_records(path: str, *records: tuple[int, bytes, bytes, int]) -> int:
    """Let the log at `path` hold these records, kind, key, value and writer, alone; return where they begin."""
    data = make(path, write_every_kind)
    _, (size, chain) = Header.decode(data)
    data = data[:size]
    for kind, key, value, writer in records:
        one, chain = record.encode(kind, key, value, writer, 0, chain)
        data += one
    put(path, data)
    return size


@pytest.mark.parametrize("base", [b"a\0b", b"x" * 300], ids=["zero byte", "too long"])
@pytest.mark.parametrize("kind", [record.SEAL, record.FORWARD])
def test_generation_name_that_no_file_can_have_is_damage(kind: int, base: bytes, path: str) -> None:
    """A ValueError came through, or was said to be one of the disk."""
    successor = GenerationRef(1, bytes(16), 0, 0, generation_name(base, 1, bytes(6)))
    start = put_records(path, (kind, b"", successor.seal() if kind == record.SEAL else successor.forward(), 1))
    assert verify(path).findings[0][1] == start
    with pytest.raises(CorruptLogError):
        list(dump(path))
    if kind == record.SEAL:
        with pytest.raises(CorruptLogError):
            look_at(path)


def test_session_numbers_that_are_used_up_are_reported(path: str) -> None:
    """A struct.error came through."""
    put_records(path, (record.SESSION, b"", Session("host", 1).encode(), (1 << 32) - 1))
    with opened(path) as handle, pytest.raises(LimitExceededError, match="session"):
        handle.write(b"k", b"v")
    assert verify(path).verdict == "sound"


def test_session_may_have_the_last_number(path: str) -> None:
    put_records(path, (record.SESSION, b"", Session("host", 1).encode(), (1 << 32) - 2))
    with opened(path) as handle, opened(path) as late:
        handle.write(b"k", b"v")
        assert handle.log.handle.lock.session == (1 << 32) - 1
        with pytest.raises(LimitExceededError, match="session"):
            late.write(b"k", b"v")
    assert verify(path).verdict == "sound"


@pytest.mark.timeout(60)
def test_generation_that_is_gone_and_only_a_later_one_names_ends_the_search(path: str) -> None:
    """It went from generation 0 to 1, found 2 missing, and began again, for ever."""
    first, second = (generation_name(b"log", number, bytes(6)) for number in (1, 2))
    header = Header(b"1" * 16, OFD, generation=1).encode()
    _, (size, chain) = Header.decode(header)
    put_records(path, (record.SEAL, b"", GenerationRef(1, b"1" * 16, size, chain, first).seal(), 1))
    seal, _ = record.encode(record.SEAL, b"", GenerationRef(2, b"2" * 16, 0, 0, second).seal(), 1, 0, chain)
    put(os.path.join(os.path.dirname(path), first.decode()), header + seal)
    for read_only in (False, True):
        with pytest.raises(StoreGoneError, match="lost generation 2"):
            FileStore(path, timeout=5, read_only=read_only)
    assert "generation 2 of the log is missing" in verify(path).findings[0].message


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", [record.SEAL, record.FORWARD])
def test_generation_that_leads_back_to_itself_ends_the_search(kind: int, path: str, tmp_path: Path) -> None:
    """A reader followed it in a circle; so did repair behind damage."""
    name = generation_name(b"log", 1, bytes(6))
    header = Header(b"1" * 16, OFD, generation=1).encode()
    _, (size, chain) = Header.decode(header)
    again = GenerationRef(1, b"1" * 16, size, chain, name)
    put_records(path, (record.SEAL, b"", again.seal(), 1))
    back, _ = record.encode(kind, b"", again.seal() if kind == record.SEAL else again.forward(), 1, 0, chain)
    file = os.path.join(os.path.dirname(path), name.decode())
    put(file, header + back)
    found = verify(path).findings[0]
    assert found.file == file
    assert ("not the next" if kind == record.SEAL else "only generation 0 may") in found.message
    with pytest.raises(CorruptLogError):
        list(dump(path))
    if kind == record.SEAL:
        with pytest.raises(CorruptLogError, match="not the next"):
            FileStore(path, timeout=5)
    assert repair(path, tmp_path / "copy").generation == 1


def test_forward_record_behind_a_torn_one_is_damage(path: str) -> None:
    """Openers go by it, and `verify` called the log torn."""
    put_records(path, (record.SET, b"k", b"v" * 400, 1))
    way = GenerationRef(1, b"1" * 16, 0, 0, generation_name(b"log", 1, bytes(6)))
    forward, _ = record.encode(record.FORWARD, b"", way.forward(), 1, 0, 12345)
    with open(path, "rb") as file:
        data = file.read()
    put(path, data[:-200] + forward)
    assert verify(path).verdict == "damaged"
    put(path, data[:-200])
    assert verify(path).verdict == "torn"
