"""Locks of two kinds that exclude each other, and waits that are called deadlocks, as on Lustre."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.internals import log_of
from support.lustre_locks import LustreLocks, lustre_locks
from support.places import start_thread

from fscoord import FileStore, StoreTimeoutError
from fscoord._log.inspect.verify import verify
from fscoord._log.locking import log_lock
from fscoord._runtime import system
from fscoord.doctor.probe_file import ProbeFile
from fscoord.status import status

LIMIT_S = 60
KINDS = ["ofd", "flock"]
MOUNT = "lustre 10.0.0.1@tcp:/fs rw,flock,checksum,nolock"


@pytest.fixture
def path(memory: Path) -> str:
    return str(memory / "log")


@pytest.fixture(autouse=True)
def locks(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LustreLocks]:
    monkeypatch.setattr(system, "mount_table", lambda: [f"1 0 0:1 / {os.path.dirname(path)} rw - {MOUNT}"])
    with lustre_locks() as here:
        yield here


def lock_all(fd: int, kind: int) -> None:
    """Lock or unlock all bytes, as flock(2) of another program does there."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))


@pytest.mark.parametrize("how", ["direct", "locked"])
@pytest.mark.parametrize("lock", KINDS)
def test_store_works_with_one_lock_space(lock: str, how: str, path: str) -> None:
    """The descriptors of one process take the log's lock, the bytes of their sessions and the lock of a compaction."""
    options = {"lock": lock, "coherence": how, "timeout": LIMIT_S}
    with FileStore(path, rank=0, world_size=3, **options) as first, FileStore(path, rank=1, **options) as second:
        threads = [start_thread(add_often, store) for store in (first, second, first, second)]
        for thread in threads:
            with thread:
                pass
        first.compact()
        second.add("n", 1)
        assert first.get("n") == b"201"
        with FileStore(path, **options, read_only=True) as reader:
            assert reader.get("n") == b"201"
        assert first.dead_ranks([0, 1]) == []
        assert verify(path).verdict == "sound"
        assert [each.rank for each in status(path).picture.participants]


def add_often(store: FileStore) -> None:
    for _ in range(50):
        store.add("n", 1)


@pytest.mark.parametrize("lock", KINDS)
def test_empty_file_becomes_a_log_under_both_kinds_of_lock(lock: str, path: str) -> None:
    """One descriptor takes an open-file-description lock and then the log's kind; a descriptor excludes not itself."""
    Path(path).touch(mode=0o600)
    with FileStore(path, lock=lock, timeout=LIMIT_S) as store:
        assert store.add("n", 1) == 1


@pytest.mark.parametrize("lock", KINDS)
@pytest.mark.parametrize("count", [1, 6])
def test_wait_that_is_called_a_deadlock_goes_on_until_the_lock_is_free(
    count: int, lock: str, path: str, locks: LustreLocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lock, "DEADLOCK_NAP_S", 0.001)
    monkeypatch.setattr(log_lock, "POLL_S", 0.002)
    with FileStore(path, lock=lock, timeout=LIMIT_S) as store, FileStore(path, lock=lock, timeout=LIMIT_S) as holder:
        holder.set("k", "1")
        kernel = log_of(holder).handle.lock
        kernel.try_lock()
        locks.deadlocks, locks.waits = count, 0
        with start_thread(store.add, "n", 1) as waiter:
            while locks.waits <= count:
                threading.Event().wait(0.001)
            assert waiter.is_alive()
            kernel.unlock()
        assert waiter.result == 1
        assert log_of(store).handle.lock.can_block


@pytest.mark.parametrize("lock", KINDS)
def test_doctor_waits_where_a_wait_is_called_a_deadlock(lock: str, path: str, locks: LustreLocks) -> None:
    one, other = ProbeFile(path), ProbeFile(path)
    try:
        assert one.take(lock)
        assert not other.take(lock)
        assert not other.take(lock, shared=True)
        one.lock(lock).unlock()
        locks.deadlocks = 3
        other.lock(lock).block(other.writer, 0)
        assert not one.take(lock)
    finally:
        one.close()
        other.close()


@pytest.mark.parametrize("how", ["direct", "locked"])
def test_lock_of_another_program_is_awaited_and_its_holder_is_unknown(how: str, path: str) -> None:
    """flock(1), on Lustre: it is no lock of fscoord, and yet it excludes writers, and readers under a lock."""
    with FileStore(path, coherence=how, timeout=LIMIT_S) as store, FileStore(path, coherence=how) as other:
        store.set("k", "1")
        fd = os.open(path, os.O_RDWR)
        try:
            lock_all(fd, fcntl.F_WRLCK)
            other.set_timeout(0.1)
            with pytest.raises(StoreTimeoutError, match="an unknown process holds it"):
                other.set("k", "2")
            if how == "locked":
                with pytest.raises(StoreTimeoutError, match="an unknown process holds it"):
                    other.get("k")
            lock_all(fd, fcntl.F_UNLCK)
            other.set_timeout(LIMIT_S)
            other.set("k", "2")
        finally:
            os.close(fd)
        assert store.get("k") == b"2"
