"""`Log` by itself: its state after a failure, nested calls, and calls that go on in another file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults.test_fork import Child, fork_in_c
from support.internals import log_of
from support.logs import LIMIT_S, Collector, Handle, is_open, opened

from fscoord import CorruptLogError, FileStore, StoreError, StoreUnavailableError
from fscoord._log.files.opening import LogOptions
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.locking.log_lock import OFD, SOFT
from fscoord._log.log import IN_A_ROW_NS, Log
from fscoord._log.mount import Mount
from fscoord._log.recovery import POSITION
from fscoord._runtime import forks, system


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


def make(path: str, *, lock: int = OFD, participants: int = 0, mount: Mount | None = None) -> Log:
    wanted = LogOptions(lock, limit=LIMIT_S)
    return Log(path, Collector(), wanted._replace(world_size=participants), lambda: Session("host", 1), mount)


@pytest.fixture
def log(path: str) -> Iterator[Log]:
    log = make(path)
    yield log
    log.close()


def test_log_that_failed_to_open_leaves_no_descriptor_while_the_error_lives(path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        for _ in range(2):  # the second is one that generation 0 names
            store.compact()
            assert store.get("k") == b"1"
        file = log_of(store).handle.file
    Path(file).write_bytes(b"no log" * 100)
    with pytest.raises(CorruptLogError) as caught:
        make(path)
    assert not is_open(path), caught.value
    assert not is_open(file)


@pytest.mark.parametrize("inner", ["refresh", "update", "close"])
def test_nested_call_of_the_same_thread_is_refused(inner: str, log: Log) -> None:
    """As a signal handler makes it."""
    calls = {
        "refresh": lambda: log.refresh(LIMIT_S),
        "update": lambda: log.update(record.SET, b"k", b"2", None, LIMIT_S),
        "close": log.close,
    }

    def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
        with pytest.raises(StoreError, match="interrupted a call"):
            calls[inner]()
        return None, record.SET, b"1"

    for _ in range(2):
        log.update(0, b"k", b"", decide, LIMIT_S)
    assert [value for _, _, value, *_ in log.machine.records] == [b"1", b"1"]


def test_unlock_that_is_interrupted_is_repeated(path: str) -> None:
    """A soft lock is given back by Python's code, where an interruption may come at any line."""
    log = make(path, lock=SOFT)
    log.update(record.SET, b"k", b"u", None, LIMIT_S)
    unlock, asked = log.handle.lock.unlock, []

    def interrupted() -> None:
        asked.append(1)
        if len(asked) == 1:
            raise KeyboardInterrupt
        unlock()

    log.handle.lock.unlock = interrupted
    with pytest.raises(KeyboardInterrupt):
        log.update(record.SET, b"k", b"v", None, LIMIT_S)
    assert not os.path.lexists(path + ".lock")
    log.handle.lock.unlock = unlock
    log.update(record.SET, b"k", b"w", None, LIMIT_S)
    log.close()


@pytest.mark.parametrize(
    ("first", "expected"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (StoreError("mine"), StoreError),
        (LookupError("of the caller"), LookupError),
        (OSError(errno.ENOSPC, "no space"), StoreUnavailableError),
    ],
)
def test_unlock_that_fails_does_not_hide_the_error_of_the_operation(
    first: BaseException, expected: type[BaseException], log: Log
) -> None:
    log.update(record.SET, b"k", b"u", None, LIMIT_S)
    unlock, failed = log.handle.lock.unlock, []

    def failing() -> None:
        unlock()
        failed.append(1)
        raise OSError(errno.EIO, "the unlock")

    def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
        raise first

    log.handle.lock.unlock = failing
    with pytest.raises(expected) as caught:
        log.update(record.SET, b"k", b"v", decide, LIMIT_S)
    assert failed
    assert caught.value is first or "no space" in str(caught.value)
    log.handle.lock.unlock = unlock
    log.update(record.SET, b"k", b"w", None, LIMIT_S)


def test_handle_that_is_closed_closes_its_lock(log: Log) -> None:
    """Which sends away who waits for it, and gives it back if it came meanwhile."""
    handover = threading.Lock()
    handover.acquire()
    log.update(record.SET, b"k", b"v", None, LIMIT_S)
    log.handle.lock.handover = handover
    log.close()
    assert (log.handle.lock.is_closed, handover.locked()) == (True, False)


@pytest.mark.parametrize("operation", ["close", "refresh", "update"])
def test_child_forked_in_c_is_another_session_from_its_first_call(operation: str, log: Log) -> None:
    log.update(record.SET, b"k", b"v", None, LIMIT_S)

    def work() -> tuple[int, int]:
        before = forks._life[0]
        if operation == "close":
            log.close()
        elif operation == "refresh":
            log.refresh(LIMIT_S)
        else:
            log.update(record.SET, b"k", b"w", None, LIMIT_S)
        return forks._life[0] - before, log.handle.lock.session

    with Child(fork_in_c, work) as child:
        assert child.result() == (1, 2 if operation == "update" else 0)
    log.update(record.SET, b"k", b"x", None, LIMIT_S)
    assert log.handle.lock.session == 1


def test_reading_ahead_opens_the_file_again_only_after_an_interrupted_operation(path: str) -> None:
    """A contended writer reads ahead at many of its attempts, and an open costs as much as to decode 20 records."""
    with opened(path) as writer, opened(path) as handle:
        log = handle.log
        descriptors = [log.handle.reader_fd]
        for flag in (0, POSITION):
            writer.write(b"k", b"v")
            log.handle.recovery = flag
            log.read_ahead()
            descriptors.append(log.handle.reader_fd)
        assert (log.handle.offset, log.handle.recovery) == (writer.log.handle.offset, 0)
    assert (descriptors[0] == descriptors[1], descriptors[1] == descriptors[2]) == (True, False)


def wait(handle: Handle, monkeypatch: pytest.MonkeyPatch, *, limit: float = LIMIT_S) -> list[str]:
    """Wait for the lock once, without waiting; return what was done."""
    done: list[str] = []
    monkeypatch.setattr(handle.log, "read_ahead", lambda: done.append("look"))

    def note(*_: object, flags: int, patient: bool, in_a_row: bool) -> bool:
        done.append("nap in a row" if in_a_row else "nap" if patient else "wait")
        return in_a_row

    monkeypatch.setattr(handle.log.handle.lock, "wait", note)
    handle.log._wait_for_lock(1, system.time.monotonic(), limit)
    return done


def test_writer_that_wrote_just_before_naps_longer_and_then_reads_without_the_lock(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as handle:
        handle.log.update(record.SET, b"k", b"1", None, LIMIT_S)
        written = handle.log.writer.last_time
        monkeypatch.setattr(system.time, "time_ns", lambda: written + IN_A_ROW_NS - 1)
        assert wait(handle, monkeypatch) == ["nap in a row", "look"]
        monkeypatch.setattr(system.time, "time_ns", lambda: written + IN_A_ROW_NS)
        assert wait(handle, monkeypatch) == ["nap"]
