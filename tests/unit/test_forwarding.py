"""The way to the newest generation, step by step: what is read of it, what is posted, and what may be removed."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from support.logs import Collector

from fscoord._log.files.opening import LogOptions
from fscoord._log.format import record
from fscoord._log.format.generation_ref import GenerationRef, generation_name, parse_generation_name
from fscoord._log.format.header import Header, LogIdentity
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.generations import forwarding
from fscoord._log.generations.forwarding import ORPHAN_MAX
from fscoord._log.handle import HandleState, Root
from fscoord._log.locking.log_lock import FLOCK, OFD, SOFT, LogLock
from fscoord._log.session_table import SessionTable

WRITER = 5
TIME_NS = 10**18
LINEAGE = b"i" * 16


def successor(generation: int, base: bytes = b"log") -> GenerationRef:
    name = generation_name(base, generation, bytes([generation]) * 6)
    return GenerationRef(generation, bytes([generation]) * 16, 0, 0, name)


class Log:
    """Generation 0 of a log, made of the records that a test wants."""

    def __init__(self, path: Path, kind: int = OFD) -> None:
        self.path = path
        path.touch(0o600)
        found = path.stat()
        self.header = Header(LINEAGE, kind, lineage=LINEAGE, root_inode=found.st_ino, inode=found.st_ino)
        data = self.header.encode()
        _, (size, chain) = Header.decode(data)
        path.write_bytes(data)
        self.place = self.start = LogPosition(size, chain)
        self.handle = HandleState(str(path), LogOptions(kind), Collector(), SessionTable())
        self.handle.root = Root(self.header, self.start, (found.st_dev, found.st_ino), found.st_ino)
        self.owner = LogIdentity(LINEAGE, found.st_ino)
        self.keep = self.handle.owned_fds

    def add(self, kind: int, value: bytes, key: bytes = b"") -> LogPosition:
        data, chain = record.encode(kind, key, value, 1, 2, self.place.chain)
        with self.path.open("ab") as file:
            file.write(data)
        self.place = LogPosition(self.path.stat().st_size, chain)
        return self.place

    def add_bytes(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def newest(self, start: LogPosition | None = None) -> tuple[int | None, LogPosition, bool]:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            found, place, is_torn = forwarding.newest(fd, start or self.start)
        finally:
            os.close(fd)
        return found and found.generation, place, is_torn

    def hint(self) -> GenerationRef | None:
        fd = os.open(self.path, os.O_RDONLY)
        try:
            return forwarding.hint(fd)
        finally:
            os.close(fd)

    def post(
        self, generation: int, known: LogPosition | None = None, *, writing: int = os.O_RDWR | os.O_APPEND
    ) -> LogPosition | None:
        self.handle.write_flags = writing
        place = forwarding.post(self.handle, successor(generation), WRITER, TIME_NS, known)
        assert not self.keep
        return place


@pytest.fixture
def path(memory: Path) -> Path:
    return memory / "log"


# -- the hint


@pytest.mark.parametrize(("kind", "value"), [(record.FORWARD, b"nonsense"), (record.SET, successor(3).forward())])
def test_record_that_names_no_generation_is_no_hint(kind: int, value: bytes, path: Path) -> None:
    log = Log(path)
    log.add(kind, value)
    assert log.hint() is None
    log.path.write_bytes(b"")
    assert log.hint() is None


# -- the whole way


def test_last_generation_that_is_named_is_the_newest(path: Path) -> None:
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


# -- posting


@pytest.mark.parametrize(("error", "tries"), [(errno.EIO, 1), (errno.EAGAIN, 4)])
def test_lock_call_that_fails_is_repeated_only_if_the_lock_is_held(
    error: int, tries: int, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "_TRIES", 4)
    monkeypatch.setattr(forwarding, "_PAUSE_S", 0)
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


def test_file_that_replaced_the_log_is_not_written_to(path: Path) -> None:
    log = Log(path)
    path.write_bytes(Header(b"j" * 16, OFD).encode())
    before = path.read_bytes()
    with pytest.raises(MalformedRecord, match="was replaced by another log"):
        log.post(2)
    assert (path.read_bytes(), log.keep) == (before, set())
    path.unlink()
    with pytest.raises(FileNotFoundError):
        log.post(2)
    assert not log.keep


# -- removing


def make_files(log: Log, names: list[bytes], **changed: object) -> None:
    """Make files that belong to `log`, unless what their headers say is `changed`."""
    for name in names:
        file = log.path.with_name(os.fsdecode(name))
        file.touch()
        known = log.header._replace(
            log_id=b"g" * 16, generation=parse_generation_name(name) or 0, inode=file.stat().st_ino
        )
        file.write_bytes(known._replace(**changed).encode())  # type: ignore[arg-type]


def beside(path: Path) -> set[bytes]:
    return {os.fsencode(name) for name in os.listdir(path.parent)} - {os.fsencode(path.name)}


def remove_superseded(log: Log, newest: GenerationRef, before: bytes | None) -> None:
    forwarding.remove_superseded(log.handle, log.owner, newest, before)
    assert not log.keep


def another(generation: int, random: bytes) -> bytes:
    """The name of another file of this generation."""
    return generation_name(b"log", generation, random)


@pytest.mark.parametrize("kind", [OFD, FLOCK, SOFT])
def test_superseded_files_are_removed_and_those_still_needed_stay(kind: int, path: Path) -> None:
    log = Log(path, kind)
    newest, before = successor(4), successor(3).name
    left, locked = another(4, b"orphan"), another(2, b"locked")
    foreign = [successor(2, b"other").name, b"log.3", b"log.alive", b"log.handle.bell", b"log.3.nothexnothex"]
    make_files(log, [newest.name, before, left, locked, *foreign])
    linked = another(3, b"linked")
    path.with_name(os.fsdecode(linked)).symlink_to(path.with_name("log.alive"))
    holders = []
    for name in (before, locked):
        fd = os.open(path.with_name(os.fsdecode(name)), os.O_RDWR)
        lock = LogLock(str(path), fd, kind, threading.RLock(), set())
        if kind != SOFT:  # then nobody holds a generation's own lock
            lock.try_lock()
        holders.append(fd)
    try:
        remove_superseded(log, newest, before)
    finally:
        for fd in holders:
            os.close(fd)
    assert beside(path) == {newest.name, linked, *foreign} | ({locked} if kind != SOFT else set())


NOT_OWNED = {
    "another lineage": {"lineage": b"j" * 16},
    "another first file": {"root_inode": 1},
    "no number of the first file": {"root_inode": 0},
    "another file": {"inode": 1},
    "no number of the file": {"inode": 0},
}


@pytest.mark.parametrize("changed", NOT_OWNED.values(), ids=NOT_OWNED)
@pytest.mark.parametrize("kind", [OFD, SOFT])
def test_file_whose_header_does_not_prove_its_owner_stays(kind: int, changed: dict[str, object], path: Path) -> None:
    log = Log(path, kind)
    newest, before, left = successor(4), successor(3).name, another(2, b"orphan")
    make_files(log, [before, left], **changed)
    remove_superseded(log, newest, before)
    remove(log)
    assert beside(path) == {before, left}
    assert not path.exists()


OTHERS = {
    "text": b"something else",
    "another version": b"fscoord\n\1\0" + bytes(72),
    "a damaged header": b"fscoord\n\2\0" + bytes(200),
    "zeros and more": bytes(5000) + b"x",
    "long": bytes(ORPHAN_MAX) + b"x",
}


@pytest.mark.parametrize("content", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("kind", [OFD, SOFT])
def test_file_that_is_no_generation_of_a_log_stays(kind: int, content: bytes, path: Path) -> None:
    log = Log(path, kind)
    before, left = successor(3).name, another(2, b"orphan")
    for name in (before, left):
        path.with_name(os.fsdecode(name)).write_bytes(content)
    remove_superseded(log, successor(4), before)
    remove(log)
    assert beside(path) == {before, left}


@pytest.mark.parametrize("content", [b"", b"fscoord\n", b"fscoord\n\3\0" + bytes(100), bytes(5000)])
@pytest.mark.parametrize("kind", [OFD, FLOCK, SOFT])
def test_unsynced_file_of_a_dead_maker_is_removed_unless_it_is_locked(kind: int, content: bytes, path: Path) -> None:
    """It holds nothing, so that it can't say to which log it belongs."""
    log = Log(path, kind)
    left, locked = another(4, b"orphan"), another(4, b"locked")
    for name in (left, locked):
        path.with_name(os.fsdecode(name)).write_bytes(content)
    fd = os.open(path.with_name(os.fsdecode(locked)), os.O_RDWR)
    try:
        if kind != SOFT:
            LogLock(str(path), fd, kind, threading.RLock(), set()).try_lock()
        remove_superseded(log, successor(4), None)
    finally:
        os.close(fd)
    assert beside(path) == ({locked} if kind != SOFT else set())


@pytest.mark.parametrize("kind", [OFD, SOFT])
def test_generation_later_than_the_newest_stays(kind: int, path: Path) -> None:
    """It is there if the log was restored from a backup: then it is what has happened since."""
    log = Log(path, kind)
    newest = successor(4)
    make_files(log, [another(4, b"orphan"), another(5, b"future")])
    remove_superseded(log, newest, None)
    assert beside(path) == {another(5, b"future")}
    make_files(log, [another(2, b"lesser")], generation=5)
    remove_superseded(log, newest, another(2, b"lesser"))
    assert beside(path) == {another(5, b"future"), another(2, b"lesser")}, "what its header says counts"


def test_files_stay_on_a_mount_without_lasting_inode_numbers(path: Path) -> None:
    log = Log(path)
    before, left = successor(3).name, another(2, b"orphan")
    make_files(log, [before, left], root_inode=0, inode=0)
    log.owner = LogIdentity(LINEAGE, 0)
    remove_superseded(log, successor(4), before)
    remove(log)
    assert beside(path) == {before, left}


def test_orphan_is_removed_unless_locked_if_no_generation_came_before(path: Path) -> None:
    log = Log(path)
    newest, left, locked = successor(2), another(1, b"orphan"), another(1, b"locked")
    make_files(log, [newest.name, left, locked])
    fd = os.open(path.with_name(os.fsdecode(locked)), os.O_RDWR)
    try:
        lock = LogLock(str(path), fd, OFD, threading.RLock(), set())
        lock.try_lock()
        remove_superseded(log, newest, None)
    finally:
        os.close(fd)
    assert beside(path) == {newest.name, locked}
    remove_superseded(log, newest, None)
    assert beside(path) == {newest.name}


def remove(log: Log, cleared: Callable[[str], object] = lambda _: None) -> None:
    forwarding.remove_log(log.handle, log.owner, cleared)
    assert not log.keep


# The search for generation 0


def test_search_for_the_root_has_the_directory_open_between_no_two_calls(path: Path) -> None:
    """Another thread may fork there, and nothing in the child would close the directory."""
    log = Log(path)
    opened: list[str] = []

    def look(_: object, event: str, __: object) -> None:
        sys.setprofile(None)
        found = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.lexists(f"/proc/self/fd/{fd}")
        ]
        opened.extend(event for place in found if place == str(path.parent))
        sys.setprofile(look)

    sys.setprofile(look)
    try:
        found = forwarding.find_root(str(path), log.header, LINEAGE)
    finally:
        sys.setprofile(None)
    assert (found, opened) == (str(path), [])
