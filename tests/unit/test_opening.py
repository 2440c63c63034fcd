"""Opening a log: its header, whole, agreed upon, and not more than that."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of

from fscoord import FileStore, StoreError, StoreTimeoutError, StoreUnavailableError, UnsupportedFilesystemError
from fscoord._log.files import safe_files
from fscoord._log.locking import process_mutex
from fscoord._log.locking.log_lock import OFD, LogLock
from fscoord._runtime import system


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


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
