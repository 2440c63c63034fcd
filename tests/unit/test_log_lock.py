"""The lock of a log by itself: exclusion, the name of the holder, waits, and hand-overs."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fscoord._log.locking import log_lock as lock
from fscoord._log.locking.log_lock import FLOCK, NAP_FIRST_S, NAP_S, OFD, POLL_S, SOFT, SPINS, LogLock
from fscoord._runtime import system

Make = Callable[..., LogLock]

every_kernel_kind = pytest.mark.parametrize("kind", [OFD, FLOCK])


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "log").touch()
    return str(tmp_path / "log")


@pytest.fixture
def make(path: str) -> Iterator[Make]:
    """Make the lock of one more handle on the log, in the name of a session."""
    made: list[LogLock] = []

    def make_one(kind: int, session: int = 0, *, shared: bool = False) -> LogLock:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        made.append(LogLock(path, fd, kind, threading.RLock(), {fd}, shared=shared))
        made[-1].bind(fd, session)
        return made[-1]

    yield make_one
    for one in made:
        one.close()
        os.close(one.fd)


def test_holder_is_unknown_if_the_kernel_cannot_be_asked(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = make(OFD)
    monkeypatch.setattr(one, "fd", 1 << 20)
    assert one.holder() is None
    monkeypatch.undo()
    flock = make(FLOCK)

    def fails(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(system, "flock_holder", fails)
    assert flock.holder() is None


@every_kernel_kind
@pytest.mark.parametrize("waited_for", [4, 0, 3, 5, 1000])
def test_lock_that_is_adopted_is_held_in_the_name_of_its_session(
    kind: int, waited_for: int, path: str, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another handle of the process may have waited for it. The handle that waited does not lock a second time."""
    one, two = make(kind, 4), make(kind, 5)
    old, fd = one.fd, os.open(path, os.O_RDWR | os.O_CLOEXEC)
    one.block(fd, waited_for)
    with pytest.raises(BlockingIOError):
        one.try_lock()
    if kind == OFD:
        assert two.holder() == waited_for
    handover = threading.Lock()
    locked: list[object] = []
    fcntl = system.fcntl.fcntl
    with monkeypatch.context() as patch:
        patch.setattr(system.fcntl, "fcntl", lambda *given: (locked.append(given), fcntl(*given))[1])
        one.adopt(fd, waited_for, handover, left := set())
    assert left == {old}
    os.close(old)
    assert len(locked) == (kind == OFD and waited_for != 4)
    assert (one.fd, one.session, one.handover) == (fd, 4, handover)
    assert one._descriptors == {fd}
    if kind == OFD:
        assert two.holder() == 4
    with pytest.raises(BlockingIOError):
        two.try_lock()
    one.handover = None
    one.unlock()
    make(kind, 2000).try_lock()


@every_kernel_kind
def test_lock_handed_over_and_not_taken_is_released_at_close(kind: int, path: str, make: Make) -> None:
    one, two = make(kind), make(kind)
    fd, handover = os.open(path, os.O_RDWR | os.O_CLOEXEC), threading.Lock()
    handover.acquire()
    one.block(fd, 0)
    one.adopt(fd, 0, handover, left := set())
    os.close(left.pop())
    one.close()
    assert (one.handover, handover.locked(), one.is_closed) == (None, False, True)
    two.try_lock()
    two.unlock()
    another = LogLock(path, one.fd, kind, threading.RLock(), set())
    another.try_lock()
    one.unlock()  # now it does nothing, for its descriptor may be another's
    with pytest.raises(BlockingIOError):
        two.try_lock()
    another.unlock()


@every_kernel_kind
def test_fork_does_not_release_the_lock_of_the_parent(kind: int, make: Make) -> None:
    one, two = make(kind), make(kind)
    one.try_lock()
    fd, unlock, one.handover = one.fd, one.unlock, threading.Lock()
    one.after_fork(mutex := threading.RLock())
    one.unlock()
    assert one.handover is None
    assert one.mutex is one.next_on(one.fd).mutex is mutex
    with pytest.raises(OSError, match="closed by a fork"):
        one.try_lock()
    assert one.holder() is None
    with pytest.raises(BlockingIOError):
        two.try_lock()
    unlock()
    one.fd = fd


@every_kernel_kind
def test_unwanted_grant_is_released_though_a_child_inherited_its_descriptor(kind: int, path: str, make: Make) -> None:
    one, two = make(kind), make(kind)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    inherited = os.dup(fd)  # as a child has it that was forked in C
    try:
        one.block(fd, 4)
        one.unblock(fd, 4)
        os.close(fd)
        two.try_lock()
        two.unlock()
    finally:
        os.close(inherited)


def test_lock_held_by_another_is_distinguished_from_other_lock_errors(make: Make) -> None:
    blocking, refused = BlockingIOError(errno.EAGAIN, ""), PermissionError(errno.EACCES, "")
    ofd, flock = make(OFD), make(FLOCK)
    assert [one.is_taken(error) for one in (ofd, flock) for error in (blocking, refused)] == [True, True, True, False]
    assert not ofd.is_taken(OSError(errno.EIO, ""))


@pytest.mark.parametrize("patient", [False, True])
def test_lock_wait_grows_with_the_tries_and_ends_at_the_deadline(
    patient: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(system.time, "sleep", done.append)
    monkeypatch.setattr(system.os, "sched_yield", lambda: done.append("yield"))
    monkeypatch.setattr(
        lock, "wait_for_lock", lambda _, left, __, keeps, **___: done.append(("line", left)) or keeps_it.append(keeps)
    )
    keeps_it: list[bool] = []
    one = make(OFD)

    def wait(attempt: int, waited: float, left: float = 9.0) -> object:
        done.clear()
        one.wait(attempt, waited, left, lambda: -1, patient=patient)
        (what,) = done
        return what

    if patient:
        assert [wait(attempt, 0.0) for attempt in range(1, SPINS + 1)] == ["yield"] * SPINS
        naps = [wait(SPINS + number, 0.0) for number in range(1, 20)]
        assert naps[:4] == [NAP_FIRST_S, 2 * NAP_FIRST_S, 4 * NAP_FIRST_S, 8 * NAP_FIRST_S]
        assert naps[4:] == [NAP_S] * 15
        assert wait(SPINS + 1, 0.0, NAP_FIRST_S / 2) == NAP_FIRST_S / 2
        assert wait(SPINS + 1, lock.NAP_PHASE_S) == ("line", 9.0)
    else:
        assert wait(1, 0.0) == ("line", 9.0)
    assert keeps_it == [not patient], "on a mount that hosts share"
    one.can_block = False
    assert wait(3, 1.0) == 0.003
    assert wait(500, 1.0) == POLL_S
    assert wait(500, 1.0, 0.02) == 0.02


def test_lock_wait_of_a_writer_that_had_the_lock_just_before_naps_longer(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[object] = []
    monkeypatch.setattr(system.time, "sleep", done.append)
    monkeypatch.setattr(lock, "wait_for_lock", lambda _, left, __, **___: done.append(("line", left)))
    one = make(OFD)

    def wait(waited: float, left: float = 9.0, *, patient: bool = True) -> bool:
        return one.wait(1, waited, left, lambda: -1, patient=patient, in_a_row=True)

    longest = lock.IN_A_ROW_PHASES * lock.NAP_PHASE_S
    assert [wait(0.0), wait(longest - 0.001), wait(0.0, 0.0001)] == [True] * 3
    assert [wait(longest), wait(0.0, patient=False)] == [False] * 2
    assert done == [lock.IN_A_ROW_NAP_S, lock.IN_A_ROW_NAP_S, 0.0001, ("line", 9.0), ("line", 9.0)]


@pytest.mark.parametrize("is_thread", [False, True])
def test_lock_wait_no_longer_blocks_once_no_thread_can_start(
    is_thread: bool, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    if is_thread:
        monkeypatch.setattr(system, "try_thread", lambda *_: RuntimeError("can't start new thread"))
    else:
        monkeypatch.setattr(lock, "wait_for_lock", fails)
    one = make(OFD)
    one.wait(1, 0.0, 9.0, lambda: -1, patient=False)
    assert not one.can_block


@every_kernel_kind
def test_leaving_a_file_succeeds_though_its_kernel_lock_cannot_be_released(kind: int, make: Make) -> None:
    def failing() -> None:
        raise OSError(errno.ENOLCK, "the server does not know this file")

    one = make(kind)
    one.unlock = failing
    one.leave()
    assert one.is_closed


def test_leaving_a_file_whose_marker_cannot_be_removed_is_an_error(make: Make) -> None:
    def failing() -> None:
        raise OSError(errno.EIO, "the marker stays")

    one = make(SOFT)
    one.unlock = failing
    with pytest.raises(OSError, match="stays"):
        one.leave()


def test_flock_failure_other_than_taken_is_the_error_of_the_system(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    _, exceptions = system.load_flock_locker()
    failure: list[BaseException | None] = []

    class Fails:
        def lock(self, fd: int, flags: int) -> None:
            raise exceptions.LockException(errno.ENOLCK, "no locks") from failure[-1]

    monkeypatch.setattr(system, "load_flock_locker", lambda: (Fails(), exceptions))
    one = make(FLOCK)
    for cause, number in ((OSError(errno.EIO, "broken"), errno.EIO), (None, errno.ENOLCK)):
        failure.append(cause)
        with pytest.raises(OSError, match="broken" if cause else "no locks") as caught:
            one.try_lock()
        assert caught.value.errno == number
        assert not one.is_taken(caught.value)
