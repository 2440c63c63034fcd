"""Waiting for the lock of a log: the looks at the log meanwhile, the end, and its error."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os
from support.internals import log_of
from support.logs import LIMIT_S, Handle, opened
from support.places import until

from fscoord import FileStore, StoreTimeoutError, StoreUnavailableError, UnsupportedFilesystemError
from fscoord._log.format import record
from fscoord._log.handle import NeedsLock
from fscoord._log.log import IN_A_ROW_NS
from fscoord._log.recovery import CLOSED, POSITION
from fscoord._runtime import system


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


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


def test_waiter_that_cannot_block_in_the_kernel_looks_at_the_log_in_turn(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as handle:
        handle.log.handle.path_checked_at = -math.inf
        assert wait(handle, monkeypatch) == ["nap"]
        handle.log.handle.lock.can_block = False
        assert wait(handle, monkeypatch) == ["look", "nap"]
        handle.log.handle.path_checked_at = math.inf
        assert wait(handle, monkeypatch) == ["nap"]


def test_look_is_made_less_often_on_a_shared_mount(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as handle:
        handle.log.handle.lock.can_block = False
        clock = system.time.monotonic
        for shared, age, done in ((False, 0.06, ["look", "nap"]), (True, 0.9, ["wait"]), (True, 1.1, ["look", "wait"])):
            handle.log.handle.is_shared = shared
            now = clock()
            monkeypatch.setattr(system.time, "monotonic", lambda now=now: now)
            handle.log.handle.path_checked_at = now - age
            assert wait(handle, monkeypatch) == done
            monkeypatch.setattr(system.time, "monotonic", clock)


def locks(handle: Handle) -> bool:
    """Return whether the log's lock was free, and is held by `handle` now."""
    try:
        handle.log.handle.lock.try_lock()
    except BlockingIOError:
        return False
    return True


def test_lock_timeout_names_the_session_of_the_holder_if_it_has_written(path: str) -> None:
    with opened(path) as handle, opened(path) as other:
        other.log.handle.lock.try_lock()
        with pytest.raises(StoreTimeoutError, match="a process that has not written yet holds it") as caught:
            handle.log.update(record.SET, b"k", b"v", None, 0)
        assert caught.value.holder == "a process that has not written yet"
        other.log.handle.lock.unlock()
        other.write(b"k", b"v")
        until(lambda: locks(other))  # the thread that waited in the kernel may have the lock for a moment
        with pytest.raises(StoreTimeoutError, match="host:1 holds it") as caught:
            handle.log.update(record.SET, b"k", b"w", None, 0)
        assert caught.value.holder == "host:1"
        assert "rm " not in str(caught.value)
        other.log.handle.lock.unlock()
        handle.write(b"k", b"w")
        assert [found[2] for found in other.look()] == [b"v", b"w"]


def test_lock_timeout_names_an_unknown_process_if_the_holder_is_unknown(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as handle:
        for holder, named in (
            (None, "an unknown process holds it"),
            (7, "session 7 holds it"),
            ("x:1", "x:1 holds it"),
        ):
            monkeypatch.setattr(handle.log.handle.lock, "holder", lambda holder=holder: holder)
            assert named in str(handle.log.lock_timeout(0.5))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), StoreUnavailableError("gone"), NeedsLock()])
def test_error_in_a_look_without_the_lock_is_left_to_the_next_operation(
    error: Exception, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as handle, opened(path) as other:
        handle.look()
        other.write(b"k", b"v")

        def fail() -> None:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(handle.log, "_read", fail)
            handle.log.read_ahead()
        assert not handle.log.handle.shared.is_inside
        assert handle.log.handle.recovery
        handle.log.handle.shared.is_inside = True
        handle.log.read_ahead()  # another operation of this thread was interrupted: it will look itself
        assert handle.log.handle.shared.is_inside
        handle.log.handle.shared.is_inside = False
        handle.log.read_ahead()
        assert not handle.log.handle.recovery & ~CLOSED
        assert len(handle._collector.records) == 1


def test_lock_error_distinguishes_missing_lock_support_from_other_failures(path: str) -> None:
    with opened(path) as handle:
        explain = handle.log._raise_unless_retried
        explain(BlockingIOError(errno.EAGAIN, "taken"), maybe_applied=False)
        explain(PermissionError(errno.EACCES, "taken"), maybe_applied=False)
        with pytest.raises(UnsupportedFilesystemError, match="no ofd locks"):
            explain(OSError(errno.ENOLCK, os.strerror(errno.ENOLCK)), maybe_applied=False)
        with pytest.raises(StoreUnavailableError, match="locking the log") as caught:
            explain(OSError(errno.EIO, "broken"), maybe_applied=False)
        assert not caught.value.maybe_applied
        with pytest.raises(StoreUnavailableError, match="using the log") as caught:
            explain(BlockingIOError(errno.EAGAIN, "taken"), maybe_applied=True)
        assert caught.value.maybe_applied


def test_operation_that_failed_after_registration_was_not_applied(path: str) -> None:
    with faulty_os() as faulty, FileStore(path) as store:
        with faulty.instead(refuse_new_files), pytest.raises(StoreUnavailableError, match="No space") as caught:
            store.compact()
        assert len(log_of(store).sessions) == 1
        assert not caught.value.maybe_applied
        store.compact()
        assert log_of(store).handle.header.generation == 1


def refuse_new_files(name: str, _: object, arguments: tuple[Any, ...]) -> None:
    if name == "open" and arguments[1] & os.O_EXCL and not arguments[0].endswith(".alive"):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")])
def test_write_error_is_not_hidden_by_an_unlock_that_fails(error: OSError, path: str) -> None:
    with faulty_os() as faulty, opened(path) as handle:
        handle.write(b"k", b"1")
        lock = handle.log.handle.lock
        unlock = lock.unlock

        def fails() -> None:
            unlock()
            raise OSError(errno.EIO, "lost")

        lock.unlock = fails
        failing = faulty.fail(0, error.errno or 0, names=("write",))
        with failing, pytest.raises(StoreUnavailableError, match="appending to the log failed") as caught:
            handle.write(b"k", b"2")
        lock.unlock = unlock
        assert caught.value.maybe_applied is (error.errno == errno.EIO)
        handle.write(b"k", b"3")


def test_waiter_blocks_in_the_kernel_for_the_rest_of_its_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[float] = []
    with opened(path) as handle:
        monkeypatch.setattr(
            handle.log.handle.lock, "wait", lambda _, waited, rest, *__, **___: left.append(waited + rest)
        )
        handle.log._wait_for_lock(3, system.time.monotonic() - 10, 100)
    assert left == [pytest.approx(100)]


def test_lock_that_comes_at_the_second_try_is_in_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a wait starts with it."""
    tries: list[int] = []
    with opened(path) as handle, opened(path) as other:
        other.log.handle.lock.try_lock()

        def wait(attempt: int, *_: Any, **__: Any) -> None:
            tries.append(attempt)
            other.log.handle.lock.unlock()

        monkeypatch.setattr(handle.log.handle.lock, "wait", wait)
        handle.write(b"k", b"v")
        assert tries == [1]
        assert len(other.look()) == 1


def test_look_without_the_lock_begins_at_the_last_record_after_an_interruption(
    path: str,
) -> None:
    with opened(path) as handle, opened(path) as other:
        assert handle.look() == []
        other.write(b"k", b"v")
        os.lseek(handle.log.handle.reader_fd, 0, os.SEEK_END)
        handle.log.handle.recovery = POSITION
        handle.log.read_ahead()
        assert [found[1:3] for found in handle._collector.records] == [(b"k", b"v")]
        assert handle.log.handle.recovery == 0
