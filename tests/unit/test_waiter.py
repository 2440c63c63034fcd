"""How long a waiting thread sleeps between its looks: ever longer, to a limit, and never behind its deadline."""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest

from fscoord._log.shared import node_waiter
from fscoord._log.shared.node_waiter import NodeWaiter
from fscoord._log.wakeup import watcher as waiter
from fscoord._log.wakeup.doorbell import STATE_SIZE, cell
from fscoord._log.wakeup.watcher import Waiter
from fscoord._runtime import system
from fscoord._waiting.wait import THREAD_BACKEND

FAR = 1e9


class Clock:
    """A clock that stands at 0 when a sleep begins, so that a time until something is how long that is to take."""

    now = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return self.now


class Sleeps:
    """A watcher that wakes no waiter, unless it `rings`."""

    event_count, deaths, bell, election, backend, poll_last = 0, 0, None, None, THREAD_BACKEND, 0.1

    def __init__(self, *, has_events: bool) -> None:
        self.has_events = has_events
        self.rings = False
        self.sleeping = 0

    def begin_sleep(self, _: object) -> None:
        self.sleeping += 1

    def end_sleep(self, _: object) -> None:
        self.sleeping -= 1


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(system, "time", clock)
    return clock


def sleep(watch: Any, waiting: Waiter, left: float = FAR) -> float:
    """How long it sleeps the next time; then it is woken, if `watch` rings, or has slept for so long."""
    clock: Any = system.time
    seconds = waiting.max_sleep(left)
    if watch.rings and seconds > 0:
        watch.event_count += 1
    elif seconds > 0:
        assert watch.sleeping == 1
        clock.now = seconds
    assert waiting.max_sleep(left) == 0 or seconds == 0
    clock.now = 0.0
    assert watch.sleeping == 0
    assert waiting.was_rung is watch.rings
    waiting.arm(0)
    return seconds


def doubled(first: float, last: float, times: int) -> list[float]:
    return [min(first * 2**number, last) for number in range(times)]


@pytest.mark.parametrize("watches_for_deaths", [False, True])
def test_event_from_before_the_arming_does_not_ring(watches_for_deaths: bool) -> None:
    watch: Any = Sleeps(has_events=True)
    waiting = Waiter(watch, (lambda: 7.0) if watches_for_deaths else None)
    assert not waiting.is_rung()
    watch.event_count += 1
    assert waiting.is_rung()
    waiting.arm(3)
    assert not waiting.is_rung()
    watch.deaths += 1
    assert waiting.is_rung() is watches_for_deaths
    waiting.arm(3)
    assert not waiting.is_rung()


# -- where one process of a node polls for all


class Election:
    """An election that notes what it is asked, and fails if it is told to."""

    def __init__(self, *, elects: bool = True, marked: bool = True) -> None:
        self._elects, self._marked = elects, marked
        self.hurried = False
        self.vacant = elects
        self.fails = False
        self.asked: list[bool] = []
        self.notified: list[object] = []
        self.paces: list[float] = []

    def add(self, _: object) -> None: ...

    def hurry(self, _: object) -> None:
        self._may_fail()

    def try_elect(self, _: object, *, may_queue: bool = True, state: object = None) -> bool:
        self._may_fail()
        self.asked.append(may_queue)
        return self._elects

    def is_vacant(self, _: object = None) -> bool:
        return self.vacant

    def is_poller(self, _: object) -> bool:
        return self._elects

    def heartbeat(self, pace: float) -> None:
        self.paces.append(pace)

    def heartbeat_count(self) -> int:
        return 0

    def is_hurried(self, _: object, __: object = None) -> bool:
        self._may_fail()
        return self.hurried

    def ack_hurry(self) -> None:
        self.hurried = False

    def notify(self, buckets: object, extent: object = None) -> bool:
        self._may_fail()
        self.notified.append(buckets)
        return self._marked

    def _may_fail(self) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")


class Node(Sleeps):
    """A watcher of the bell of a host, which rings for each waiter that has marked it, if `rings`."""

    def __init__(self, election: Election) -> None:
        super().__init__(has_events=True)
        self.election: Any = election
        self.lost: list[OSError] = []
        self.bell: Any = Bell(self)

    def fall_back_to_polling(self, error: OSError) -> None:
        self.lost.append(error)
        self.election = self.bell = None


class Bell:
    """A bell each byte of which changes with each event."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def read(self) -> bytes:
        return bytes([self._node.event_count % 256]) * STATE_SIZE

    def arm(self, number: int, state: bytes | None = None) -> bytes:
        return cell(state or self.read(), number)

    def is_rung(self, number: int, mark: bytes) -> bool:
        return self.arm(number) != mark


def new_waiter(node: Any) -> NodeWaiter:
    waiting = NodeWaiter(node, node.election)
    waiting.arm(0)
    return waiting


def test_poller_slows_down_until_there_is_news_or_a_hurry_request() -> None:
    election = Election()
    node: Any = Node(election)
    waiting = new_waiter(node)
    paces = from_news_on(waiter.POLL_FIRST_S, node)
    for pace in paces:
        assert 0.75 * pace <= sleep(node, waiting) <= 1.25 * pace
    assert election.paces == [*paces[1:], node.poll_last]
    waiting.notify_node([7])
    assert election.notified == [[7]]
    assert sleep(node, waiting) <= 1.25 * waiter.POLL_FIRST_S
    sleep(node, waiting)
    assert waiting.max_sleep(FAR) > 0
    election.hurried = True
    assert waiting.max_sleep(FAR) == 0
    assert not waiting.was_rung, "another waiter wants it to poll"
    assert not election.hurried
    assert sleep(node, waiting) <= 1.25 * waiter.POLL_FIRST_S


def from_news_on(first: float, node: Any) -> list[float]:
    """The pauses between polls after news, until they are as long as they get."""
    quick = doubled(first, node_waiter.NEWS_POLL_S, node_waiter.NEWS_POLLS + 1)
    slower = doubled(2 * node_waiter.NEWS_POLL_S, node.poll_last, 3)
    assert slower[-1] == node.poll_last
    return quick + slower


def test_poller_polls_quickly_after_news_without_a_waiter_and_then_slows_down() -> None:
    """More may come soon. But what nobody waits for makes it no quicker than that, however often it comes."""
    election = Election(marked=False)
    node: Any = Node(election)
    waiting = new_waiter(node)
    for _ in from_news_on(waiter.POLL_FIRST_S, node):
        sleep(node, waiting)
    waiting.notify_node([])
    assert sleep(node, waiting) >= 0.75 * node.poll_last
    waiting.notify_node([7])
    assert election.notified == [[7]]
    for pace in from_news_on(node_waiter.NEWS_POLL_S, node):
        assert 0.75 * pace <= sleep(node, waiting) <= 1.25 * pace
    for _ in range(2 * node_waiter.NEWS_POLLS):
        waiting.notify_node([7])
        assert 0.75 * node_waiter.NEWS_POLL_S <= sleep(node, waiting) <= 1.25 * node_waiter.NEWS_POLL_S


@pytest.mark.parametrize("stands", [False, True])
@pytest.mark.parametrize("armed_for", [1, 3])
def test_waiter_that_becomes_the_poller_is_not_rung_by_its_own_notification(
    armed_for: int, stands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rings every key, for the poller before it may have died. It has just looked itself, and polls at once."""
    election = Election()
    node: Any = Node(election)
    rings = [1]

    def try_elect(_: object, *, may_queue: bool = True, state: object = None) -> bool:
        node.event_count += rings.pop() if rings else 0
        return True

    monkeypatch.setattr(election, "try_elect", try_elect)
    waiting = NodeWaiter(node, node.election, other_buckets=range(1, armed_for))
    if stands:
        waiting.stand_for_election()
    waiting.arm(0)
    assert bool(rings) is not stands, "an election while it arms has rung every key already"
    assert 0 < waiting.max_sleep(FAR) <= 1.25 * waiter.POLL_FIRST_S
    node.event_count += 1
    assert waiting.max_sleep(FAR) == 0
    assert waiting.was_rung, "by another process"


def test_waiter_asks_for_faster_polls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    election = Election(elects=False)
    asked: list[object] = []
    monkeypatch.setattr(election, "hurry", asked.append)
    node: Any = Node(election)
    waiting = new_waiter(node)
    waiting.arm(1)
    assert len(asked) == 1


@pytest.mark.parametrize("doing", ["join", "pass on", "sleep", "is rung", "arm"])
def test_node_bell_that_fails_is_dropped_and_the_log_is_read(doing: str) -> None:
    election = Election()
    node: Any = Node(election)
    node.bell = {"join": Bell(node), "arm": BrokenBell(), "is rung": BrokenBell()}.get(doing)
    waiting = NodeWaiter(node, node.election)
    election.fails = True
    if doing == "pass on":
        waiting.notify_node([7])
    elif doing == "sleep":
        waiting.role_changed = True
        assert waiting.max_sleep(FAR) == 0
        assert not waiting.was_rung
    elif doing == "is rung":
        assert waiting.is_rung()
    else:
        waiting.arm(3)
    assert [error.errno for error in node.lost] == [errno.EIO]


def test_node_bell_is_dropped_when_its_events_cannot_be_read() -> None:
    node: Any = Node(Election())
    waiting = new_waiter(node)
    assert waiting.max_sleep(FAR) > 0
    waiting.fail(OSError(errno.EBADF, "Bad file descriptor"))
    assert not waiting.was_rung
    assert (node.sleeping, len(node.lost)) == (0, 1)
    with pytest.raises(OSError, match="Bad file"):
        Waiter(node).fail(OSError(errno.EBADF, "Bad file descriptor"))


class BrokenBell:
    """A bell that can't be read."""

    def read(self) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def test_waiter_beside_a_poller_looks_itself_at_intervals(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    election = Election(elects=False)
    beats = iter(range(100))
    monkeypatch.setattr(election, "heartbeat_count", lambda: next(beats))
    node: Any = Node(election)
    waiting = new_waiter(node)
    clock.now += first_sleep(waiting)
    assert waiting.max_sleep(FAR) == pytest.approx(waiter.SLOW_LAST_S)
    clock.now = node_waiter.OWN_POLL_S + 1
    assert waiting.max_sleep(FAR) == 0
    assert not waiting.was_rung, "its last poll is too old"
    assert waiting.max_sleep(FAR) == waiter.SLOW_LAST_S
    clock.now += waiter.SLOW_LAST_S
    assert waiting.max_sleep(FAR) == waiter.SLOW_LAST_S, "it sleeps on until it is rung"
    node.event_count += 1
    assert waiting.max_sleep(FAR) == 0
    assert waiting.was_rung


def test_waiter_queues_for_the_role_of_the_poller_after_a_while(clock: Clock) -> None:
    """Most waits are shorter, and a thread for each would cost more than the wait."""
    election = Election(elects=False)
    node: Any = Node(election)
    waiting = new_waiter(node)
    waiting.stand_for_election()
    seconds = first_sleep(waiting)
    clock.now += seconds / 2
    assert waiting.max_sleep(FAR) > 0
    assert election.asked == [False]
    clock.now += seconds
    assert waiting.max_sleep(FAR) == pytest.approx(waiter.SLOW_LAST_S)
    assert election.asked == [False, True]


def test_waiter_that_ends_before_it_queues_looks_at_its_deadline(clock: Clock) -> None:
    """And it starts no thread any more."""
    election = Election(elects=False)
    node: Any = Node(election)
    waiting = new_waiter(node)
    assert waiting.max_sleep(0.01) == 0.01
    clock.now = 0.01
    assert waiting.max_sleep(0.01) == 0
    assert election.asked == []


def test_waiter_that_does_not_queue_yet_asks_when_the_poller_leaves(clock: Clock) -> None:
    election = Election(elects=False)
    node: Any = Node(election)
    waiting = new_waiter(node)
    first_sleep(waiting)
    election.vacant = True
    election._elects = True
    assert 0 < waiting.max_sleep(FAR) <= 1.25 * waiter.POLL_FIRST_S, "it is the poller now"
    assert election.asked == [False]


def first_sleep(waiting: Waiter) -> float:
    """Return how long the first sleep of a waiter is that is not the poller."""
    seconds = waiting.max_sleep(FAR)
    assert 0.75 * node_waiter.QUEUE_AFTER_S <= seconds <= 1.25 * node_waiter.QUEUE_AFTER_S
    return seconds
