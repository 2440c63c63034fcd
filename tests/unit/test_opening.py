"""Opening a log: its header, whole, agreed upon, and not more than that."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of
from support.logs import opened, put
from support.plain_reader import read_log

from fscoord import FileStore, StoreError, StoreTimeoutError, StoreUnavailableError, UnsupportedFilesystemError
from fscoord._log.files import safe_files
from fscoord._log.files.opening import read_header
from fscoord._log.format.header import Header
from fscoord._log.locking import process_mutex
from fscoord._log.locking.log_lock import OFD, LogLock
from fscoord._runtime import system


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


LONG = Header(b"i" * 16, 1, run_ids=tuple((b"job %d" % number * 20, number) for number in range(100)))


def test_header_longer_than_one_read_is_read_whole(path: str) -> None:
    """Of a job that was started over a hundred times."""
    header = LONG.encode()
    assert len(header) > 3 * 4096
    put(path, header)
    with opened(path) as handle:
        assert handle.log.handle.header == LONG
        handle.write(b"k", b"v")
        assert [found[1] for found in handle.look()] == [b"k"]
    assert read_log(Path(path).read_bytes()).values == {b"k": b"v"}


def test_header_is_read_up_to_its_maximum_size_only(path: str) -> None:
    data = bytearray(LONG.encode() + bytes(1 << 20))
    data[12:16] = b"\xff\xff\xff\xff"
    put(path, bytes(data))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert len(read_header(fd)) <= 1 << 16
    finally:
        os.close(fd)
    before = Path(path).read_bytes()
    with pytest.raises(StoreError, match="its size is damaged"):
        FileStore(path)
    assert Path(path).read_bytes() == before


@pytest.mark.parametrize("kind", [0, 2, 3, 7, 255])
def test_log_with_another_kind_of_lock_can_be_read_but_not_written(kind: int, path: str) -> None:
    put(path, Header(b"i" * 16, kind).encode())
    with pytest.raises(StoreError, match=r"this log is locked by .* locks, not by \"ofd\""):
        FileStore(path)
    with FileStore(path, read_only=True) as store:
        assert store.num_keys() == 0


def test_empty_file_stays_empty_where_the_mount_has_no_ofd_locks(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(path).touch()
    real = fcntl.fcntl

    def refuse(fd: int, command: int, lock: bytes) -> bytes:
        if command == fcntl.F_OFD_SETLK and lock[0] != fcntl.F_UNLCK:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return real(fd, command, lock)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(UnsupportedFilesystemError):
        FileStore(path)
    assert Path(path).read_bytes() == b""


def test_opener_of_an_empty_file_under_initialisation_obeys_its_timeout(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        lock = LogLock(path, fd, OFD, threading.RLock(), set())
        lock.try_lock()
        with pytest.raises(StoreTimeoutError, match="the lock to write its header was not released within 0 s"):
            FileStore(path, timeout=0)
        assert os.fstat(fd).st_size == 0
        lock.unlock()
        FileStore(path, timeout=0).close()
        assert os.fstat(fd).st_size > 0
    finally:
        os.close(fd)


def test_platform_without_ofd_locks_is_an_error_that_names_other_kinds(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "has_ofd_locks", lambda: False)
    for given in (path, Path(path), os.fsencode(path)):
        with pytest.raises(UnsupportedFilesystemError, match='pass lock="flock"') as caught:
            FileStore(given)
        assert (caught.value.path, str(caught.value).partition(":")[0]) == (path, path)
    with FileStore(path + "2", lock="flock") as store:
        store.set("k", "v")


def test_look_without_the_lock_is_not_entered_twice(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter for a lock that does not come looks meanwhile; a signal handler may interrupt that."""
    busy: list[bool] = []
    with FileStore(path) as store:
        log = log_of(store)
        monkeypatch.setattr(log, "_read", lambda: busy.append(log.handle.shared.is_inside))
        log.read_ahead()
        assert (busy, log.handle.shared.is_inside) == ([True], False)
        log.handle.shared.is_inside = True
        log.read_ahead()
        log.handle.shared.is_inside = False
        assert busy == [True]


def test_store_cannot_be_called_from_within_its_own_answer(path: str) -> None:
    with FileStore(path) as store, pytest.raises(StoreError, match="signal handler or finalizer"):
        log_of(store).inspect(lambda: store.check(["k"]))


def test_path_that_is_replaced_again_and_again_is_an_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FileStore(path).close()
    monkeypatch.setattr(safe_files, "same_file", lambda one, other: False)
    with pytest.raises(StoreUnavailableError, match="replaced again and again") as caught:
        FileStore(path)
    assert caught.value.path == path


@pytest.mark.parametrize("header", [Header(b"i" * 16, 1), LONG], ids=["short", "long"])
def test_header_that_arrives_in_two_reads_is_read_whole(
    header: Header, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = header.encode()
    pieces: list[bytes] = []
    monkeypatch.setattr(system, "os", Pieces(pieces))
    for cut in {1, 70, 77, 78, len(data) - 5, len(data) - 4, len(data) - 1}:
        pieces[:] = [data[:cut], data[cut:], b""]
        assert read_header(-1) == data


class Pieces(types.ModuleType):
    """`os`, whose reads bring these `pieces`."""

    def __init__(self, pieces: list[bytes]) -> None:
        super().__init__("os")
        self.read = lambda fd, size: pieces.pop(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def test_opener_of_an_empty_file_initialises_it_when_the_lock_comes(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    lock = LogLock(path, fd, OFD, threading.RLock(), set())
    lock.try_lock()

    class Time:
        """The clock, and a sleep in which the lock is given back."""

        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

        def sleep(self, _: float) -> None:
            lock.unlock()

    try:
        with monkeypatch.context() as patched:
            patched.setattr(system, "time", Time())
            FileStore(path, timeout=60).close()
        assert os.fstat(fd).st_size > 0
    finally:
        os.close(fd)


def test_error_without_a_system_text_keeps_its_own_text() -> None:
    assert "opening failed: out of order" in str(safe_files.unavailable(OSError("out of order"), "/x/log", "opening"))
    text = str(safe_files.unavailable(OSError(errno.EIO, "Input/output error"), "/x/log", "opening"))
    assert text == "/x/log: opening failed: Input/output error"


def test_fork_renews_the_process_mutexes_in_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_mutex, "_mutexes", system.WeakObjects())
    monkeypatch.setattr(process_mutex, "_guard", guard := [threading.RLock()])
    before, log = guard[0], process_mutex.process_mutex_for((b"", 1, 2))
    mutex, log.is_inside = log.mutex, True
    process_mutex._after_fork_in_child()
    assert guard[0] is not before
    assert len(guard) == 1
    assert log.mutex is not mutex
    assert not log.is_inside
    assert process_mutex.process_mutex_for((b"", 1, 2)) is log
