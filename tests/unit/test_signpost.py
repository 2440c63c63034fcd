"""The way to the newest generation, step by step: what is read of it, what is posted, and what may be removed."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from faults.faulty import faulty_os
from unit.plain_reader import read_log

from fscoord import _system as system
from fscoord._log import record, signpost
from fscoord._log.header import Header
from fscoord._log.lock import FLOCK, OFD, SOFT, LogLock
from fscoord._log.signpost import Root
from fscoord._log.successor import Place, Successor, generation_name

CHAIN = 77
WRITER = 5


def successor(generation: int, base: bytes = b"log") -> Successor:
    name = generation_name(base, generation, bytes([generation]) * 6)
    return Successor(generation, bytes([generation]) * 16, 0, 0, name)


class Log:
    """Generation 0 of a log, made of the records that a test wants."""

    def __init__(self, path: Path, kind: int = OFD) -> None:
        self.path = path
        self.header = Header(b"i" * 16, kind)
        data = self.header.encode()
        _, size, chain = Header.decode(data)
        path.write_bytes(data)
        path.chmod(0o600)
        self.place = self.start = Place(size, chain)
        found = path.stat()
        self.root = Root(self.header, self.start, (found.st_dev, found.st_ino))
        self.keep: set[int] = set()

    def add(self, kind: int, value: bytes, key: bytes = b"") -> Place:
        data, chain = record.encode(kind, key, value, 1, 2, self.place.chain)
        with self.path.open("ab") as file:
            file.write(data)
        self.place = Place(self.path.stat().st_size, chain)
        return self.place

    def add_bytes(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def newest(self, start: Place | None = None) -> tuple[int | None, Place, bool]:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            found, place, is_torn = signpost.newest(fd, start or self.start)
        finally:
            os.close(fd)
        return found and found.generation, place, is_torn

    def hint(self) -> Successor | None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return signpost.hint(fd)
        finally:
            os.close(fd)

    def post(
        self, generation: int, known: Place | None = None, *, writing: int = os.O_RDWR | os.O_APPEND
    ) -> Place | None:
        place = signpost.post(
            str(self.path), self.root, successor(generation), WRITER, os.O_RDONLY, writing, self.keep, known
        )
        assert not self.keep
        return place


@pytest.fixture
def path(memory: Path) -> Path:
    return memory / "log"


# -- the hint


@pytest.mark.parametrize("before", [0, 1, 11, 12, 26, 27, 300, 430, 431, 432, 433, 512, 5000])
@pytest.mark.parametrize("base", [b"l", b"l" * 238])
def test_what_a_forward_record_at_the_end_names_is_seen_whatever_stands_before(
    before: int, base: bytes, path: Path
) -> None:
    named = successor(7, base)
    data, _ = record.encode(record.FORWARD, b"", named.forward(), 1, 2, CHAIN)
    path.write_bytes(b"\xff" * before + data)
    log = Log(path.with_name("other"))
    log.path = path
    assert log.hint() == named
    path.write_bytes(b"\xff" * before + data[:-1])
    assert log.hint() is None
    path.write_bytes(b"\xff" * before + data + b"f")
    assert log.hint() is None


def test_a_forward_record_that_is_not_sound_is_no_hint(path: Path) -> None:
    log = Log(path)
    assert log.hint() is None
    log.add(record.FORWARD, successor(3).forward())
    assert log.hint() == successor(3)
    data = path.read_bytes()
    for place in range(log.start.offset, len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert log.hint() is None


@pytest.mark.parametrize(("kind", "value"), [(record.FORWARD, b"nonsense"), (record.SET, successor(3).forward())])
def test_what_names_no_generation_is_no_hint(kind: int, value: bytes, path: Path) -> None:
    log = Log(path)
    log.add(kind, value)
    assert log.hint() is None
    log.path.write_bytes(b"")
    assert log.hint() is None


# -- the whole way


def test_the_last_that_is_named_counts(path: Path) -> None:
    log = Log(path)
    assert log.newest() == (None, log.start, False)
    log.add(record.SET, b"v", b"k")
    assert log.newest() == (None, log.place, False)
    log.add(record.SEAL, successor(1).seal())
    assert log.newest() == (1, log.place, False)
    behind_seal = log.add(record.FORWARD, successor(1).forward())
    log.add(record.FORWARD, successor(4).forward())
    log.add(record.FORWARD, b"nonsense")
    log.add(record.SEAL, b"nonsense")
    log.add(record.BELL, b"")
    assert log.newest() == (4, log.place, False)
    assert log.newest(behind_seal) == (4, log.place, False)
    assert log.newest(log.place) == (None, log.place, False)


@pytest.mark.parametrize("chunk", [1, 13, 100, 1 << 18])
def test_a_way_is_read_in_pieces_of_any_size(chunk: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signpost, "_CHUNK", chunk)
    log = Log(path)
    log.add(record.SET, bytes(500), b"k")
    log.add(record.SEAL, successor(1).seal())
    log.add(record.FORWARD, successor(2).forward())
    assert log.newest() == (2, log.place, False)


@pytest.mark.parametrize("kept", [3, 12, 20])
def test_what_is_torn_ends_the_way_until_it_is_stepped_over(kept: int, path: Path) -> None:
    log = Log(path)
    log.add(record.SEAL, successor(1).seal())
    good = log.place
    log.add_bytes(record.encode(record.FORWARD, b"", successor(2).forward(), 1, 2, log.place.chain)[0][:kept])
    assert log.newest() == (1, good, True)
    assert log.post(3) == Place(path.stat().st_size, read_chain(path))
    assert log.newest() == (3, Place(path.stat().st_size, read_chain(path)), False)
    assert [kind for _, kind, *_ in read_log(path.read_bytes()).records] == ["Z", "V", "f"]


def read_chain(path: Path) -> int:
    """The checksum of the last record."""
    data = path.read_bytes()
    start = read_log(data).records[-1][0]
    return int.from_bytes(data[start + 4 : start + 8], "little")


def test_damage_ends_the_way(path: Path) -> None:
    log = Log(path)
    good = log.add(record.SEAL, successor(1).seal())
    log.add(record.FORWARD, successor(2).forward())
    log.add(record.FORWARD, successor(3).forward())
    data = path.read_bytes()
    path.write_bytes(data[: good.offset + 20] + b"x" + data[good.offset + 21 :])
    assert log.newest() == (1, good, True)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="checksum"):
        log.post(4)
    assert (path.read_bytes(), log.keep) == (before, set())


# -- posting


@pytest.mark.parametrize("kind", [OFD, FLOCK, SOFT])
def test_what_is_posted_is_a_record_of_the_poster_at_the_end_and_synced(kind: int, path: Path) -> None:
    log = Log(path, kind)
    log.add(record.SEAL, successor(1).seal())
    with faulty_os() as faulty:
        place = log.post(2)
        names = [name for name, _ in faulty.calls if name in ("write", "fdatasync")]
    assert names == ["fdatasync", "write", "fdatasync"], "what stands before it is safe before it is written"
    assert place == Place(path.stat().st_size, read_chain(path))
    found = read_log(path.read_bytes())
    assert (found.ends, found.successor) == ("whole", (2, b"\2" * 16, "log.2.020202020202"))
    assert found.records[-1][4] == WRITER
    assert not os.path.lexists(f"{path}.lock")


@pytest.mark.parametrize("generation", [1, 2])
def test_what_is_known_already_is_not_posted_again_and_synced_all_the_same(generation: int, path: Path) -> None:
    log = Log(path)
    log.add(record.SEAL, successor(2).seal())
    with faulty_os() as faulty:
        assert log.post(generation) == log.place
        assert "fdatasync" in [name for name, _ in faulty.calls]
    assert path.stat().st_size == log.place.offset


def test_nothing_before_the_place_that_is_known_is_read_unless_the_file_was_cut(path: Path) -> None:
    log = Log(path)
    log.add(record.SEAL, successor(1).seal())
    known = log.post(2)
    assert known is not None
    data = path.read_bytes()
    path.write_bytes(data[: log.start.offset] + bytes(known.offset - log.start.offset))
    place = log.post(3, known)
    assert place is not None
    assert place.offset == path.stat().st_size > known.offset
    path.write_bytes(data[: known.offset - 1])
    with pytest.MonkeyPatch.context() as patch:
        read: list[Place] = []
        real = signpost.newest
        patch.setattr(signpost, "newest", lambda fd, start: (read.append(start), real(fd, start))[1])
        log.post(3, known)
        path.write_bytes(data)
        log.post(3, known)
    assert read == [log.start, known]


@pytest.mark.parametrize("kind", [OFD, FLOCK])
def test_who_does_not_get_the_lock_soon_leaves_it_to_the_next_one(
    kind: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signpost, "_TRIES", 3)
    monkeypatch.setattr(signpost, "_PAUSE_S", 0)
    log = Log(path, kind)
    log.add(record.SEAL, successor(1).seal())
    fd = os.open(path, os.O_RDWR)
    holder = LogLock(str(path), fd, kind, threading.RLock(), set())
    try:
        holder.try_lock()
        assert log.post(2) is None
        assert path.stat().st_size == log.place.offset
        holder.unlock()
        assert log.post(2) is not None
        holder.try_lock()
    finally:
        os.close(fd)
    assert log.newest()[0] == 2


@pytest.mark.parametrize(("error", "tries"), [(errno.EIO, 1), (errno.EAGAIN, 4)])
def test_a_lock_call_that_fails_is_repeated_only_if_somebody_has_the_lock(
    error: int, tries: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signpost, "_TRIES", 4)
    monkeypatch.setattr(signpost, "_PAUSE_S", 0)
    log = Log(path)
    tried: list[int] = []

    def fail() -> None:
        tried.append(1)
        raise OSError(error, os.strerror(error))

    def bind(lock: LogLock, *_: int) -> None:
        lock.try_lock = lock.unlock = fail

    monkeypatch.setattr(LogLock, "_bind_ofd", bind)
    if error == errno.EAGAIN:
        assert log.post(2) is None
    else:
        with pytest.raises(OSError, match="Input/output error"):
            log.post(2)
    assert len(tried) == tries + 1, "one more is the unlocking, whose failure is none"
    assert not log.keep


def test_where_nothing_can_be_appended_by_the_kernel_it_is_written_at_the_end(path: Path) -> None:
    log = Log(path)
    log.add(record.SET, b"v")
    log.post(2, writing=os.O_RDWR)
    log.add_bytes(b"torn")
    log.post(3, writing=os.O_RDWR)
    assert log.newest()[::2] == (3, False)
    assert read_log(path.read_bytes()).ends == "whole"


def test_a_void_that_is_written_for_a_forward_record_names_no_session(path: Path) -> None:
    log = Log(path)
    log.add_bytes(b"torn")
    log.post(2)
    data = path.read_bytes()
    (position,) = [
        start for start in range(0, len(data) - record.VOID_SIZE, record.SECTOR)
        if record.decode_void(data[start:], log.start.chain) is not None
    ]  # fmt: skip
    found = record.decode_void(data[position:], log.start.chain)
    assert found is not None
    assert (found[0], found[2]) == (log.start.offset, 0)


def test_a_log_that_can_not_be_opened_a_second_time_is_not_kept_open(path: Path) -> None:
    log = Log(path)
    failing = pytest.raises(OSError, match="Too many open files")
    with faulty_os() as faulty, faulty.fail(1, errno.EMFILE, names=("open",)), failing:
        log.post(2)
    assert not log.keep


def test_a_file_that_has_taken_the_log_s_place_is_not_written_to(path: Path) -> None:
    log = Log(path)
    path.write_bytes(Header(b"j" * 16, OFD).encode())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="another log by now"):
        log.post(2)
    assert (path.read_bytes(), log.keep) == (before, set())
    path.unlink()
    with pytest.raises(FileNotFoundError):
        log.post(2)
    assert not log.keep


# -- removing


def make_files(path: Path, names: list[bytes]) -> None:
    for name in names:
        path.with_name(os.fsdecode(name)).write_bytes(b"")


def beside(path: Path) -> set[bytes]:
    return {os.fsencode(name) for name in os.listdir(path.parent)} - {os.fsencode(path.name)}


@pytest.mark.parametrize("kind", [OFD, FLOCK, SOFT])
def test_what_is_superseded_goes_and_what_somebody_may_need_stays(kind: int, path: Path) -> None:
    Log(path, kind)
    current, before, left, locked = (successor(number).name for number in (4, 3, 5, 6))
    foreign = [successor(2, b"other").name, b"log.3", b"log.alive", b"log.bell", b"log.3.nothexnothex"]
    make_files(path, [current, before, left, locked, *foreign])
    linked = generation_name(b"log", 9, b"linked")
    path.with_name(os.fsdecode(linked)).symlink_to(path.with_name("log.alive"))
    holders = []
    for name in (before, locked):
        fd = os.open(path.with_name(os.fsdecode(name)), os.O_RDWR)
        lock = LogLock(str(path), fd, kind, threading.RLock(), set())
        if kind != SOFT:  # then nobody holds a generation's own lock
            lock.try_lock()
        holders.append(fd)
    keep: set[int] = set()
    try:
        signpost.remove_superseded(str(path), current, before, kind, keep)
    finally:
        for fd in holders:
            os.close(fd)
    assert not keep
    assert beside(path) == {current, *foreign} | ({locked, linked} if kind != SOFT else set())


def test_without_a_generation_before_only_what_nobody_locks_goes(path: Path) -> None:
    Log(path)
    current, left = successor(1).name, successor(2).name
    make_files(path, [current, left])
    keep: set[int] = set()
    signpost.remove_superseded(str(path), current, None, OFD, keep)
    assert beside(path) == {current}
    fd = os.open(path.with_name(os.fsdecode(current)), os.O_RDWR)
    try:
        lock = LogLock(str(path), fd, OFD, threading.RLock(), set())
        lock.try_lock()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(system.os, "listdir", lambda _: [os.fsdecode(current)])
            signpost.remove_superseded(str(path), left, None, OFD, keep)
    finally:
        os.close(fd)
    assert (beside(path), keep) == ({current}, set())


def remove(log: Log, cleared: Callable[[str], object] = lambda _: None) -> None:
    signpost.remove_log(str(log.path), log.root, cleared, log.keep)
    assert not log.keep


def test_a_finished_log_goes_with_its_generations_and_what_stands_beside_it_goes_first(path: Path) -> None:
    log = Log(path)
    make_files(path, [successor(1).name, successor(2).name, successor(1, b"other").name, b"log.1"])
    cleared: list[tuple[str, bool]] = []
    remove(log, lambda name: cleared.append((name, path.exists())))
    assert cleared == [(str(path), True)]
    assert not path.exists()
    assert beside(path) == {successor(1, b"other").name, b"log.1"}


@pytest.mark.parametrize("why", ["another name", "another log", "no log", "nothing", "a link"])
def test_what_is_not_only_the_finished_log_stays_with_all_beside_it(why: str, path: Path) -> None:
    log = Log(path)
    make_files(path, [successor(1).name])
    elsewhere = path.with_name("elsewhere")
    if why == "another name":
        elsewhere.hardlink_to(path)
    elif why == "another log":
        path.write_bytes(Header(b"j" * 16, OFD).encode())
    elif why == "no log":
        path.write_bytes(b"something")
    else:
        path.rename(elsewhere)
        if why == "a link":
            path.symlink_to(elsewhere)
    before = sorted(os.listdir(path.parent))
    cleared: list[str] = []
    remove(log, cleared.append)
    assert not cleared
    assert sorted(os.listdir(path.parent)) == before


def test_a_log_that_can_t_be_cleared_stays(path: Path) -> None:
    log = Log(path)
    make_files(path, [successor(1).name])

    def refuse(_: str) -> None:
        raise PermissionError(errno.EPERM, "no")

    remove(log, refuse)
    assert path.exists()
    assert beside(path) == {successor(1).name}
