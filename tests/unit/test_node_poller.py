"""The election of a host's poller by itself: the poller, its successor, and the messages in the bell."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.faulty import FaultyOs, faulty_os
from support.interrupts import At, interrupt

from fscoord._log.shared import node_poller
from fscoord._log.shared.node_poller import PollerElection
from fscoord._log.shared.node_waiter import NodeWaiter
from fscoord._log.wakeup.doorbell import Doorbell
from fscoord._log.wakeup.watcher import POLL_FIRST_S, ChangeWatcher
from fscoord._runtime import system

HANG_S = 60


class Ticket:
    """Stands for a thread's ticket."""


class Process:
    """Stands for a process of the node: locks of two descriptors exclude each other inside one, too."""

    def __init__(self, path: str) -> None:
        self.bell = Doorbell(path, 0o600)
        self.called = threading.Event()
        self.election = PollerElection(self.bell, self.called.set)
        self.waiter = Ticket()

    def close(self) -> None:
        self.election.close()
        self.bell.close()


def in_line() -> list[threading.Thread]:
    """The threads that wait for a election."""
    return [thread for thread in threading.enumerate() if thread.name == "fscoord-poller"]


@pytest.fixture
def start(memory: Path) -> Iterator[Callable[[], Process]]:
    path = str(memory / "bell")
    with closing(Process(path)) as first, closing(Process(path)) as second:
        both = iter((first, second))
        yield lambda: next(both)
    for thread in in_line():
        thread.join(HANG_S)


@pytest.mark.parametrize("is_armed", [False, True])
def test_poller_that_leaves_signals_the_bell_if_a_waiter_is_armed(start: Callable[[], Process], is_armed: bool) -> None:
    one, two = start(), start()
    one.election.add(one.waiter)
    assert one.election.try_elect(one.waiter)
    if is_armed:
        two.bell.arm(3000)
    with faulty_os() as faulty:
        one.election.remove(one.waiter)
    assert (("utime", one.bell.fd) in faulty.calls) is is_armed


def test_vacancy_that_was_wrong_is_not_believed_again(start: Callable[[], Process]) -> None:
    """The byte is only a hint. Each waiter of the process would try for the lock again and again."""
    one, two = start(), start()
    for process in (one, two):
        process.election.add(process.waiter)
    assert one.election.try_elect(one.waiter)
    two.election._put(node_poller.TERM_BYTE, 6)
    assert two.election.is_vacant()
    assert not two.election.try_elect(two.waiter, may_queue=False)
    assert not two.election.is_vacant()
    assert not two.election._requested
    one.election.remove(one.waiter)
    assert two.election.is_vacant()
    assert two.election.try_elect(two.waiter, may_queue=False)


@pytest.mark.parametrize("term", [0, 1, 2, 253, 254, 255])
def test_term_byte_differs_after_each_election_and_each_end(start: Callable[[], Process], term: int) -> None:
    one = start()
    one.election._put(node_poller.TERM_BYTE, term)
    one.election.add(one.waiter)
    assert one.election.try_elect(one.waiter)
    during = one.election._byte(node_poller.TERM_BYTE)
    one.election.remove(one.waiter)
    after = one.election._byte(node_poller.TERM_BYTE)
    assert during & 1
    assert not after & 1
    assert len({term, during, after}) == 3


def test_poller_that_was_killed_is_replaced_by_a_wait_that_queues(start: Callable[[], Process]) -> None:
    """It has left the term byte odd."""
    one = start()
    one.election._put(node_poller.TERM_BYTE, 7)
    one.election.add(one.waiter)
    assert not one.election.try_elect(one.waiter, may_queue=False)
    assert one.election.try_elect(one.waiter)


def test_thread_beside_the_poller_of_its_process_sees_no_vacancy(start: Callable[[], Process]) -> None:
    one = start()
    one.election.add(one.waiter)
    assert one.election.try_elect(one.waiter)
    one.election._put(node_poller.TERM_BYTE, 8)
    assert not one.election.is_vacant()


def test_process_that_queues_sees_no_vacancy(start: Callable[[], Process]) -> None:
    one, two = start(), start()
    for process in (one, two):
        process.election.add(process.waiter)
    assert one.election.try_elect(one.waiter)
    assert not two.election.try_elect(two.waiter)
    two.election._put(node_poller.TERM_BYTE, 8)
    assert not two.election.is_vacant()


@pytest.mark.parametrize("fails", ["thread", "lock"])
def test_election_request_that_fails_keeps_no_descriptor_and_is_repeated(
    fails: str, start: Callable[[], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = start(), start()
    for process in (one, two):
        process.election.add(process.waiter)
    assert one.election.try_elect(one.waiter)
    faulty = FaultyOs(("fcntl",))

    def fail(name: str, real: Callable[..., Any], given: tuple[Any, ...]) -> None:
        if given[1] == fcntl.F_OFD_SETLKW:
            raise OSError(errno.EIO, "Input/output error")

    def start_no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched, faulty.instead(fail):
        if fails == "thread":
            patched.setattr(threading.Thread, "start", start_no_thread)
        else:
            patched.setattr(system, "fcntl", faulty.fcntl)
        assert not two.election.try_elect(two.waiter)
        for thread in in_line():
            thread.join(HANG_S)
    assert not two.election._requested
    assert not two.election.try_elect(two.waiter)
    assert len(two.election._requested) == 1
    one.election.remove(one.waiter)
    assert two.called.wait(HANG_S)
    assert two.election.try_elect(two.waiter)


def test_forked_child_first_closes_the_election_of_its_parent(start: Callable[[], Process]) -> None:
    one = start()
    one.election.add(one.waiter)
    assert one.election.try_elect(one.waiter)
    guard, (fd,) = one.election._guard, one.election._held
    system.close_all(os.close, one.election._held)
    one.election.after_fork()
    assert one.election._guard is not guard
    assert not one.election._held
    assert not one.election.try_elect(one.waiter)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


@pytest.mark.parametrize(("seconds", "pace"), [(0.001, 1), (0.1, 100), (0.255, 255), (9.0, 255)])
def test_poller_heartbeat_publishes_its_interval(seconds: float, pace: int, start: Callable[[], Process]) -> None:
    one, two = start(), start()
    before = two.election.heartbeat_count()
    one.election.heartbeat(seconds)
    assert two.election.heartbeat_count() != before
    assert two.election._byte(node_poller.INTERVAL_BYTE) == pace


def test_heartbeat_goes_on_from_that_of_the_poller_before(start: Callable[[], Process]) -> None:
    """Otherwise a waiter that saw the count of the poller before would take the new one for stopped."""
    one, two = start(), start()
    assert one.election.try_elect(one.waiter)
    one.election.heartbeat(0.001)
    before = two.election.heartbeat_count()
    one.election.remove(one.waiter)
    assert two.election.try_elect(two.waiter)
    two.election.heartbeat(0.001)
    assert two.election.heartbeat_count() != before


@pytest.mark.parametrize(
    ("pace", "is_hurried"), [(node_poller.SLOW_INTERVAL_MS, False), (node_poller.SLOW_INTERVAL_MS + 1, True)]
)
def test_new_waiter_hurries_a_slow_poller(pace: int, is_hurried: bool, start: Callable[[], Process]) -> None:
    one, two = start(), start()
    one.election.add(one.waiter)
    assert one.election.try_elect(one.waiter)
    one.election.heartbeat(pace / 1000)
    assert not one.election.is_hurried(one.waiter)
    with faulty_os() as faulty:
        two.election.hurry(two.bell.read())
    assert one.election.is_hurried(one.waiter) is is_hurried
    assert (("utime", two.bell.fd) in faulty.calls) is is_hurried, "that is the event which others listen for"
    assert not two.election.is_hurried(two.waiter)
    one.election.ack_hurry()
    assert not one.election.is_hurried(one.waiter)


@pytest.mark.parametrize("is_contended", [False, True])
def test_interrupted_candidate_can_still_become_the_poller(memory: Path, *, is_contended: bool) -> None:
    """And it has no descriptor that no thread uses, nor the lock without a poller."""
    reached, number = True, 0
    while reached:
        number += 1
        with closing(Process(str(memory / "bell"))) as one, closing(Process(str(memory / "bell"))) as two:
            for process in (one, two):
                process.election.add(process.waiter)
            if is_contended:
                assert one.election.try_elect(one.waiter)
            at = At(number, interrupt, first_inside="_log/shared/node_poller.py")
            with suppress(KeyboardInterrupt), at:
                two.election.try_elect(two.waiter)
            reached = at.reached
            if is_contended:
                two.election.try_elect(two.waiter)
                assert len(two.election._requested) == 1, at.where
                one.election.remove(one.waiter)
                assert two.called.wait(HANG_S), at.where
            assert two.election.try_elect(two.waiter), at.where
            assert len(two.election._held) == 1, at.where
            assert not two.election._requested, at.where
    assert number > 5
    for thread in in_line():
        thread.join(HANG_S)


@pytest.mark.parametrize("may_queue", [False, True])
def test_waiter_that_begins_to_sleep_while_the_poller_leaves_takes_over(memory: Path, *, may_queue: bool) -> None:
    """It has asked already, and is not among the sleepers yet. The process holds the lock, so no other one can poll."""

    def begin_sleep(sleeper: Any) -> None:
        if sleeper is follower and not seen:
            seen.append(sleeper)
            poller.close()
        begin(sleeper)

    seen: list[Any] = []
    path = str(memory / "bell")
    with closing(ChangeWatcher(path, Doorbell(path, 0o600), "auto", is_local=False, elect=PollerElection)) as watcher:
        begin, watcher.begin_sleep = watcher.begin_sleep, begin_sleep  # type: ignore[method-assign]
        poller, follower = NodeWaiter(watcher, watcher.election), NodeWaiter(watcher, watcher.election)
        follower._may_queue = may_queue
        assert poller.max_sleep(math.inf) <= 1.25 * POLL_FIRST_S
        follower.arm(0)  # a new poller rings those that are armed
        assert follower.max_sleep(math.inf) <= 1.25 * POLL_FIRST_S, "it does not poll"
        assert seen
        follower.close()


def test_poller_whose_end_is_interrupted_is_replaced_by_the_next_wait(memory: Path) -> None:
    """Its traceback has gone, and with it the waiter, which nothing removes from the election any more."""
    path = str(memory / "bell")
    for number in count(1):
        with closing(
            ChangeWatcher(path, Doorbell(path, 0o600), "auto", is_local=False, elect=PollerElection)
        ) as watcher:
            poller = NodeWaiter(watcher, watcher.election)
            poller.arm(0)
            assert poller.max_sleep(math.inf) <= 1.25 * POLL_FIRST_S
            watcher.end_sleep(poller)
            poller._wakes_at = None
            at = At(number, interrupt, first_inside="_log/wakeup/")
            with suppress(KeyboardInterrupt), at:
                poller.close()
            del poller
            follower = NodeWaiter(watcher, watcher.election)
            follower._may_queue = True  # as after a while: the term byte may be that of a poller that died
            follower.arm(0)
            assert follower.max_sleep(math.inf) <= 1.25 * POLL_FIRST_S, at.where
            follower.close()
        if not at.reached:
            break
    assert number > 5
