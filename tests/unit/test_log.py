"""`Log` by itself: its state after a failure, nested calls, and calls that go on in another file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults.test_fork import Child, fork_in_c
from support.faulty import faulty_os
from support.internals import log_of
from support.logs import LIMIT_S, Collector, is_open, opened
from support.plain_reader import read_log

from fscoord import CorruptLogError, FileStore, StoreError, StoreUnavailableError
from fscoord._log.files.opening import LogOptions
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.locking.log_lock import OFD, SOFT
from fscoord._log.log import Log
from fscoord._log.mount import Mount
from fscoord._runtime import forks


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


def test_mount_of_the_log_is_looked_up_unless_it_is_given(path: str) -> None:
    said = Mount("nfs4", "/somewhere", ())
    for mount in (said, None):
        log = make(path, mount=mount)
        assert (log.mount is said) is (mount is said)
        assert isinstance(log.mount, Mount)
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


def test_lock_handed_over_between_operations_is_used_and_acknowledged(log: Log, path: str) -> None:
    handover = threading.Lock()
    handover.acquire()
    log.handle.lock.try_lock()
    log.handle.lock.handover = handover
    log.handle.lock.try_lock = lambda: pytest.fail("it is asked for again")
    log.update(record.SET, b"k", b"v", None, LIMIT_S)
    assert (log.handle.lock.handover, handover.locked()) == (None, False)
    with opened(path) as other:
        other.write(b"k", b"w")


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


def test_unlock_failure_is_raised_while_the_caller_handles_another_error(log: Log) -> None:
    def failing() -> None:
        unlock()
        raise OSError(errno.EIO, "the unlock")

    log.update(record.SET, b"k", b"u", None, LIMIT_S)
    unlock, log.handle.lock.unlock = log.handle.lock.unlock, failing
    try:
        raise LookupError("of the caller")
    except LookupError:
        with pytest.raises(StoreUnavailableError, match="the unlock") as caught:
            log.update(record.SET, b"k", b"v", None, LIMIT_S)
    assert caught.value.maybe_applied


def test_participant_with_a_smaller_world_size_than_have_left_can_leave(path: str) -> None:
    many, few = make(path, participants=3), make(path, participants=1)
    few.update(record.SET, b"k", b"v", None, LIMIT_S)
    few.follower.settle()
    many.leave("", LIMIT_S, lambda _: None)
    with open(path, "rb") as file:
        few.leave("", LIMIT_S, lambda _: None)
        assert read_log(file.read()).finished
    assert not os.path.exists(path)
    many.close()
    few.close()


def test_handle_that_is_closed_closes_its_lock(log: Log) -> None:
    """Which sends away who waits for it, and gives it back if it came meanwhile."""
    handover = threading.Lock()
    handover.acquire()
    log.update(record.SET, b"k", b"v", None, LIMIT_S)
    log.handle.lock.handover = handover
    log.close()
    assert (log.handle.lock.is_closed, handover.locked()) == (True, False)


@pytest.mark.parametrize("what", ["compact", "a new run"])
def test_compaction_that_cannot_open_its_new_generation_may_be_applied(what: str, path: str) -> None:
    with opened(path) as writer:
        writer.write(b"k", b"v")
    log = Log(path, Snapshot(), LogOptions(OFD, limit=LIMIT_S, run_id=(b"job", 1)), lambda: Session("host", 1))
    succeed = log.compactor._commit
    with faulty_os() as faulty:

        def fail_later(*arguments: Any) -> None:
            succeed(*arguments)
            faulty._instead = refuse

        def refuse(name: str, _: object, arguments: tuple[Any, ...]) -> None:
            if name == "open":
                raise OSError(errno.EMFILE, "too many")

        log.compactor._commit = fail_later
        with pytest.raises(StoreUnavailableError, match="too many") as caught:
            log.compact(LIMIT_S) if what == "compact" else log.join_run(LIMIT_S)
        assert caught.value.maybe_applied
        faulty._instead = None
    log.refresh(LIMIT_S)
    assert log.handle.header.generation == 1
    log.close()


class Snapshot(Collector):
    """A `Collector` whose log can be compacted."""

    def snapshot(self, fetch: object) -> list[tuple[int, bytes, bytes]]:
        return [(kind, key, value) for kind, key, value, *_ in self.records]

    def relocate_spilled(self, spots: object) -> bool:
        return True

    def live_size(self) -> int:
        return 0


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
        return forks._life[0] - before, log.session

    with Child(fork_in_c, work) as child:
        assert child.result() == (1, 2 if operation == "update" else 0)
    log.update(record.SET, b"k", b"x", None, LIMIT_S)
    assert log.session == 1


def test_record_to_be_written_counts_towards_the_compaction_threshold(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(log.compactor, "compact_if_due", lambda more: asked.append(more))
    log.update(record.SET, b"k", b"v", None, LIMIT_S)
    log.handle.compact_at = log.handle.offset + 100
    log.update(record.SET, b"k", bytes(99), None, LIMIT_S)
    assert asked == []
    log.handle.compact_at = log.handle.offset + 100
    log.update(record.SET, b"k", bytes(100), None, LIMIT_S)
    assert asked == [100]
