"""One file of a log from end to end: the part that is read, and when and how long its lock is held."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.faulty import FaultyOs, faulty_os

from fscoord import StoreTimeoutError, StoreUnavailableError, UnsupportedFilesystemError
from fscoord._log.format import record
from fscoord._log.format.record import LogPosition
from fscoord._log.inspect import scan
from fscoord._log.inspect.scan import CHUNK, Scan, Sound, Torn, WriterLockout
from fscoord._log.locking.log_lock import FLOCK, OFD, SOFT, LogLock
from fscoord._runtime import system

CHAIN = 77


class Holder:
    """Another process that has the lock of the log."""

    def __init__(self, path: str, kind: int, session: int = 0) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self._lock = LogLock(path, self._fd, kind, threading.RLock(), set())
        self._lock.bind(self._fd, session)
        try:
            self._lock.try_lock()
        except OSError:
            os.close(self._fd)
            raise

    def close(self) -> None:
        self._lock.unlock()
        os.close(self._fd)


class File:
    """A file of a log, open to be scanned."""

    def __init__(self, path: str) -> None:
        self.path, self.fd = path, os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def lockout(self, kind: int = OFD, limit: float = 0) -> WriterLockout:
        return WriterLockout(self.path, self.fd, kind, limit)

    def close(self) -> None:
        os.close(self.fd)


@pytest.fixture
def file(memory: Path) -> Iterator[File]:
    with closing(File(str(memory / "log"))) as found:
        yield found


def prefix(length: int) -> bytes:
    """The first bytes of a record of `length` bytes."""
    return struct.pack("<II", length, (length * 2_654_435_761 + CHAIN) % 2**32)


@pytest.mark.parametrize("there", [0, 1, 14, 15, 30])
def test_scan_allocates_no_memory_for_a_length_beyond_the_file(there: int, file: File) -> None:
    data = prefix(60 << 20) + b"x" * there
    os.write(file.fd, data)
    asked: list[int] = []
    with faulty_os() as faulty, faulty.instead(lambda name, _, given: name == "read" and asked.append(given[1])):
        segments = list(Scan(file.fd, LogPosition(0, CHAIN), durable=False, lockout=file.lockout()).segments())
    assert segments == [Torn(0, len(data))]
    assert max(asked) <= CHUNK


def test_scan_reads_a_file_to_its_end_in_pieces_of_any_size(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    data, chain = b"", CHAIN
    for value in (b"a", b"bb", b"c", b""):
        more, chain = record.encode(record.SET, b"k", value, 1, 2, chain)
        data += more
    os.write(file.fd, data)
    for size in range(1, len(data) + 2):
        monkeypatch.setattr(scan, "CHUNK", size)
        scanned = Scan(file.fd, LogPosition(0, CHAIN), durable=False, lockout=file.lockout())
        found = [entry[2] for segment in scanned.segments() if isinstance(segment, Sound) for entry in segment.records]
        assert (found, scanned.place) == ([b"a", b"bb", b"c", b""], LogPosition(len(data), chain))


# -- keeping writers away


@pytest.mark.parametrize(
    ("kind", "session", "who"),
    [(OFD, 0, "a process that has not written yet"), (OFD, 9, "session 9"), (FLOCK, 0, str(os.getpid()))],
    ids=["newcomer", "session", "process"],  # the same in each worker of pytest-xdist
)
def test_lockout_timeout_names_the_holder(kind: int, session: int, who: str, file: File) -> None:
    lockout = file.lockout(kind)
    with closing(Holder(file.path, kind, session)):
        with pytest.raises(StoreTimeoutError) as caught:
            lockout.acquire()
        assert who in str(caught.value.holder)
        assert 0 <= caught.value.waited < 60
        assert not lockout.is_held
    lockout.acquire()
    assert lockout.is_held
    lockout.release()


def test_lockout_succeeds_when_the_lock_comes_in_time(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder(file.path, OFD)
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            holder.close()

    monkeypatch.setattr(system, "time", FaultyTime(nap))
    lockout = file.lockout(limit=60)
    lockout.acquire()
    lockout.release()
    assert naps == [scan.RETRY_S] * 3


class FaultyTime:
    """The clock, and sleeps that a test sees instead."""

    def __init__(self, sleep: Callable[[float], None]) -> None:
        self.sleep = sleep

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.mark.parametrize(
    ("error", "raised"), [(38, UnsupportedFilesystemError), (5, StoreUnavailableError)], ids=["ENOSYS", "EIO"]
)
def test_lock_call_failure_is_not_reported_as_a_timeout(
    error: int, raised: type[Exception], file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty = FaultyOs(("fcntl",))
    monkeypatch.setattr(system, "fcntl", faulty.fcntl)
    lockout = file.lockout(limit=60)
    with faulty.fail(0, error), pytest.raises(raised):
        lockout.acquire()
    assert not lockout.is_held


@pytest.mark.parametrize("gone_after", [0, 1, 7, None])
def test_marker_is_waited_for_a_second_at_most(
    gone_after: int | None, file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A soft lock can't be shared: a writer that lives needs less for one record."""
    marker = Path(f"{file.path}.lock")
    naps: list[float] = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == gone_after:
            marker.unlink()

    if gone_after != 0:
        marker.symlink_to("somebody")
    monkeypatch.setattr(system, "time", FaultyTime(nap))
    lockout = file.lockout(SOFT)
    lockout.acquire()
    assert lockout.is_held
    assert naps == [0.05] * (20 if gone_after is None else gone_after)
    lockout.release()


def test_tail_that_may_be_unfinished_is_judged_under_the_lock(file: File) -> None:
    whole, chain = record.encode(record.SET, b"k", b"v", 1, 2, CHAIN)
    os.write(file.fd, whole + whole[:10])
    lockout = file.lockout()
    scanned = Scan(file.fd, LogPosition(0, CHAIN), durable=False, lockout=lockout)
    segments = scanned.segments()
    found = next(segments)
    assert (found.offset, found.end, scanned.place) == (0, len(whole), LogPosition(len(whole), chain))
    assert not lockout.is_held
    with closing(Holder(file.path, OFD)), pytest.raises(StoreTimeoutError):
        next(segments)
    os.ftruncate(file.fd, len(whole))
    scanned = Scan(file.fd, scanned.place, durable=False, lockout=lockout)
    with closing(Holder(file.path, OFD)):
        assert list(scanned.segments()) == [], "there is nothing to judge"
    assert not lockout.is_held
