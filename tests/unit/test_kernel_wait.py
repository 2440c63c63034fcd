"""Waits for a lock in the kernel: the waiter that gets it, waiters that have left, and descriptors closed once."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_system
from support.places import start_thread, until

from fscoord._log.files.safe_files import open_descriptor
from fscoord._log.locking import kernel_wait
from fscoord._log.locking.kernel_wait import cancel_wait, wait_for_lock
from fscoord._runtime import system

LIMIT_S = 60


class FakeLock:
    """A lock that comes when a test says so."""

    kind = 1
    session = 7

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDWR)
        self.mutex = threading.RLock()
        self.handover: Any = None
        self.can_block = True
        self.is_closed = False
        self.file_key: tuple[int, int, int] | None = None
        self.blocks = threading.Event()
        self.comes = threading.Semaphore(0)
        self.unlocked = threading.Event()
        self.reopened: list[int] = []
        self.unblocked: list[int] = []
        self.blocked_on: list[int] = []
        self.fails = 0

    def reopen(self) -> int:
        self.reopened.append(open_descriptor(self.path, os.O_RDWR))
        return self.reopened[-1]

    def block(self, fd: int, session: int) -> None:
        assert session == self.session
        self.blocked_on.append(fd)
        if self.fails:
            self.fails -= 1
            raise OSError(system.errno.EIO, "the server has forgotten the descriptor")
        self.blocks.set()
        assert self.comes.acquire(timeout=LIMIT_S)

    def unblock(self, fd: int, session: int) -> None:
        assert session == self.session
        self.unblocked.append(fd)

    def adopt(self, fd: int, session: int, handover: Any, left: set[int]) -> None:
        assert session == self.session
        left.add(self.fd)
        self.fd, self.handover = fd, handover

    def unlock(self) -> None:
        self.unlocked.set()


Make = Callable[[], FakeLock]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    (tmp_path / "log").touch()
    made: list[FakeLock] = []

    def make_one() -> FakeLock:
        made.append(FakeLock(str(tmp_path / "log")))
        return made[-1]

    yield make_one
    for lock in made:
        os.close(lock.fd)
    assert is_over()


before: list[object] = []
"""The threads and requests that were there before the test: another may have left one that is about to end."""


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that is granted the lock may take any time to take it, and the next wait any time to come."""
    monkeypatch.setattr(kernel_wait, "HANDOVER_S", LIMIT_S)
    monkeypatch.setattr(kernel_wait, "KEEP_S", LIMIT_S)
    before[:] = [*threading.enumerate(), *kernel_wait._requests.values()]


@pytest.fixture
def strange_closes() -> Iterator[list[int]]:
    """The descriptors that were closed when they were not open: by then their numbers may be those of others."""
    strange: list[int] = []

    def look(name: str, _: object, arguments: tuple[Any, ...]) -> None:
        if name == "close" and not os.path.lexists(f"/proc/self/fd/{arguments[0]}"):
            strange.append(arguments[0])

    with faulty_system() as faulty, faulty.instead(look):
        yield strange


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fscoord-lock" and thread not in before]


def requests() -> list[Any]:
    return [request for request in list(kernel_wait._requests.values()) if request not in before]


def is_over() -> bool:
    return not requests() and not threads()


def in_line() -> int:
    return sum(len(request.waiters) for request in requests())


def test_lock_from_the_kernel_is_granted_with_its_own_descriptor(make: Make, strange_closes: list[int]) -> None:
    lock = make()
    with start_thread(wait_for_lock, lock, LIMIT_S, lock.reopen):
        assert lock.blocks.wait(LIMIT_S)
        assert [thread.daemon for thread in threads()] == [True], "a process may end while it waits"
        lock.comes.release()
    assert [lock.fd] == lock.reopened
    assert lock.handover.locked()
    lock.handover.release()
    until(is_over)
    assert os.fstat(lock.fd)
    assert not lock.unlocked.is_set()
    assert not strange_closes


def test_lock_that_is_granted_and_not_taken_is_released(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_wait, "HANDOVER_S", 0.01)
    lock = make()
    with start_thread(wait_for_lock, lock, LIMIT_S, lock.reopen):
        lock.comes.release()
    assert lock.unlocked.wait(LIMIT_S)
    until(is_over)
    assert lock.handover is None


@pytest.fixture
def ends_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let every wait end as soon as the kernel was asked: the time is out, or there was an interruption."""

    def end(lock: FakeLock, error: type[BaseException] | None = None) -> None:
        class Ended(system.AutoResetEvent):
            def wait(self, timeout: float) -> bool:
                assert lock.blocks.wait(LIMIT_S)
                if error is not None:
                    raise error
                return False

        monkeypatch.setattr(system, "AutoResetEvent", Ended)

    return end


def test_waiter_that_is_interrupted_gets_no_lock(make: Make, ends_with: Callable[..., None]) -> None:
    lock = make()
    ends_with(lock, KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        wait_for_lock(lock, LIMIT_S, lock.reopen)
    lock.comes.release()
    until(is_over)
    assert lock.handover is None


def test_waiter_whose_path_leads_to_another_file_stops_asking_the_kernel(
    make: Make, tmp_path: Path, strange_closes: list[int]
) -> None:
    lock = make()
    (tmp_path / "other").touch()
    lock.path = str(tmp_path / "other")
    wait_for_lock(lock, LIMIT_S, lock.reopen)
    until(is_over)
    assert not lock.can_block
    assert not lock.blocks.is_set()
    assert not os.path.lexists(f"/proc/self/fd/{lock.reopened[0]}")
    assert not strange_closes


def test_waiter_that_is_cancelled_leaves_the_others_queued(make: Make) -> None:
    first, second = make(), make()
    with start_thread(wait_for_lock, first, LIMIT_S, first.reopen) as stays:
        assert first.blocks.wait(LIMIT_S)
        with start_thread(wait_for_lock, second, LIMIT_S, second.reopen):
            until(lambda: in_line() == 2)
            cancel_wait(second)
        assert stays.is_alive()
        assert in_line() == 1
        first.comes.release()
    first.handover.release()
    until(is_over)
    assert second.handover is None


# The thread and the descriptor that are kept for the next wait


def contend(lock: FakeLock, *, keeps: bool = True) -> None:
    """Wait for the lock, which another process releases after a while, and release it."""
    with start_thread(lambda: wait_for_lock(lock, LIMIT_S, lock.reopen, keeps=keeps)):
        lock.comes.release()
    handover, lock.handover = lock.handover, None
    handover.release()


def is_open(fd: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def end(lock: FakeLock) -> None:
    """Do what the close of a handle does."""
    lock.is_closed = True
    cancel_wait(lock)
    until(is_over)


def test_close_of_a_handle_closes_the_kept_descriptor_and_ends_the_thread(
    make: Make, strange_closes: list[int]
) -> None:
    lock = make()
    kept = lock.fd
    contend(lock)
    assert is_open(kept)
    lock.is_closed = True
    cancel_wait(lock)
    assert not is_open(kept), "before the close returns"
    until(is_over)
    assert not strange_closes


def test_kept_thread_ends_when_no_wait_comes(
    make: Make, monkeypatch: pytest.MonkeyPatch, strange_closes: list[int]
) -> None:
    monkeypatch.setattr(kernel_wait, "KEEP_S", 0.01)
    lock = make()
    kept = lock.fd
    contend(lock)
    until(is_over)
    assert not is_open(kept)
    assert not strange_closes


def test_kept_descriptor_that_the_server_has_forgotten_is_replaced(make: Make, strange_closes: list[int]) -> None:
    lock = make()
    kept = lock.fd
    contend(lock)
    lock.fails = 1
    contend(lock)
    assert lock.blocked_on == [lock.reopened[0], kept, lock.reopened[1]]
    assert lock.can_block
    end(lock)
    assert not strange_closes


def test_wait_of_another_handle_opens_its_own_descriptor(make: Make, strange_closes: list[int]) -> None:
    """Handles of one process may differ in the flags of open(2)."""
    one, two = make(), make()
    contend(one)
    (thread,) = threads()
    contend(two)
    assert threads() == [thread]
    assert len(two.reopened) == 1
    end(two)
    assert not strange_closes
