"""How long a waiting thread sleeps between its looks: ever longer, to a limit, and never behind its deadline."""

from __future__ import annotations

import errno
import time
from typing import Any

import pytest

from fscoord._log.wakeup import waiter
from fscoord._log.wakeup.waiter import Ticket
from fscoord._runtime import system
from fscoord._waiting.parking import THREADS, Naps, sleep_through

FAR = 1e9


class Frozen:
    """A clock that stands still, so that a time until something is how long that is to take."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        return 0.0


class Sleeps:
    """A watch that notes how long who waits would sleep, and wakes nobody."""

    heard, deaths, bell, post, sleepers, poll_last = 0, 0, None, None, THREADS, 0.1

    def __init__(self, *, hears: bool) -> None:
        self.hears = hears
        self.slept: list[float] = []
        self.rings = False

    def sleep(self, _: object, until: float) -> Naps[bool]:
        yield from ()
        self.slept.append(until)
        return self.rings


@pytest.fixture(autouse=True)
def _no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "time", Frozen())


def sleep(watch: Any, waiting: Ticket, left: float = FAR) -> float:
    """How long it sleeps the next time."""
    assert sleep_through(waiting.sleep(left)) is watch.rings
    return float(watch.slept[-1])


def doubled(first: float, last: float, times: int) -> list[float]:
    return [min(first * 2**number, last) for number in range(times)]


def test_sleep_with_a_watch_doubles_up_to_a_limit() -> None:
    watch: Any = Sleeps(hears=True)
    waiting = Ticket(watch)
    assert [sleep(watch, waiting) for _ in range(9)] == doubled(waiter.SLOW_FIRST_S, waiter.SLOW_LAST_S, 9)


def test_sleep_with_a_death_watch_doubles_up_to_its_limit() -> None:
    watch: Any = Sleeps(hears=True)
    waiting = Ticket(watch, lambda: 7.0)
    assert [sleep(watch, waiting) for _ in range(9)] == doubled(waiter.VIGIL_FIRST_S, 7.0, 9)
    deaf: Any = Sleeps(hears=False)
    polling = Ticket(deaf, lambda: 7.0)
    assert max(sleep(deaf, polling) for _ in range(12)) <= 1.25 * deaf.poll_last


def test_polls_without_events_have_random_intervals() -> None:
    watch: Any = Sleeps(hears=False)
    waiting = Ticket(watch)
    pauses = [sleep(watch, waiting) for _ in range(30)]
    for pause, plain in zip(pauses, doubled(waiter.POLL_FIRST_S, watch.poll_last, 30), strict=True):
        assert 0.75 * plain <= pause <= 1.25 * plain
    assert len(set(pauses)) == 30


@pytest.mark.parametrize("hears", [False, True])
def test_sleep_is_never_longer_than_the_time_left(hears: bool) -> None:
    watch: Any = Sleeps(hears=hears)
    waiting = Ticket(watch)
    for left in (0.0, 1e-6):
        assert sleep(watch, waiting, left) <= left


def test_sleep_is_not_lengthened_after_a_ring() -> None:
    watch: Any = Sleeps(hears=True)
    waiting = Ticket(watch)
    watch.rings = True
    assert [sleep(watch, waiting) for _ in range(3)] == [waiter.SLOW_FIRST_S] * 3


@pytest.mark.parametrize("keeps_vigil", [False, True])
def test_event_from_before_the_arming_does_not_ring(keeps_vigil: bool) -> None:
    watch: Any = Sleeps(hears=True)
    waiting = Ticket(watch, (lambda: 7.0) if keeps_vigil else None)
    assert not waiting.is_rung()
    watch.heard += 1
    assert waiting.is_rung()
    waiting.arm(3)
    assert not waiting.is_rung()
    watch.deaths += 1
    assert waiting.is_rung() is keeps_vigil
    waiting.arm(3)
    assert not waiting.is_rung()


# -- where one of a node asks for all


class Asker:
    """A post that notes what is said, and fails if it is told to."""

    def __init__(self, *, is_mine: bool = True, marked: bool = True) -> None:
        self._is_mine, self._marked = is_mine, marked
        self.nudged = False
        self.fails = False
        self.said: list[object] = []
        self.paces: list[float] = []

    def add(self, _: object) -> None:
        self._may_fail()

    def try_elect(self, _: object) -> bool:
        self._may_fail()
        return self._is_mine

    def is_poller(self, _: object) -> bool:
        return self._is_mine

    def heartbeat(self, pace: float) -> None:
        self.paces.append(pace)

    def heartbeat_count(self) -> int:
        return 0

    def is_hurried(self, _: object) -> bool:
        self._may_fail()
        return self.nudged

    def ack_hurry(self) -> None:
        self.nudged = False

    def notify(self, buckets: object) -> bool:
        self._may_fail()
        self.said.append(buckets)
        return self._marked

    def _may_fail(self) -> None:
        if self.fails:
            raise OSError(errno.EIO, "Input/output error")


class Node(Sleeps):
    """A watch on the bell of a node."""

    def __init__(self, post: Asker) -> None:
        super().__init__(hears=True)
        self.post: Any = post
        self.lost: list[OSError] = []

    def lose_bell(self, error: OSError) -> None:
        self.lost.append(error)
        self.post = self.bell = None


def test_poller_slows_down_until_there_is_news_or_a_hurry_request() -> None:
    post = Asker()
    node: Any = Node(post)
    waiting = Ticket(node)
    for pace in doubled(waiter.POLL_FIRST_S, node.poll_last, 9):
        assert not sleep_through(waiting.sleep(FAR)), "it is time to ask"
        assert 0.75 * pace <= node.slept[-1] <= 1.25 * pace
    assert post.paces == doubled(2 * waiter.POLL_FIRST_S, node.poll_last, 9)
    waiting.pass_on([7])
    assert post.said == [[7]]
    sleep_through(waiting.sleep(FAR))
    assert node.slept[-1] <= 1.25 * waiter.POLL_FIRST_S
    sleep_through(waiting.sleep(FAR))
    post.nudged = node.rings = True
    assert not sleep_through(waiting.sleep(FAR)), "somebody wants it to ask"
    assert not post.nudged
    node.rings = False
    sleep_through(waiting.sleep(FAR))
    assert node.slept[-1] <= 1.25 * waiter.POLL_FIRST_S


def test_poller_is_not_hurried_by_news_without_a_waiter() -> None:
    post = Asker(marked=False)
    node: Any = Node(post)
    waiting = Ticket(node)
    for _ in range(9):
        sleep_through(waiting.sleep(FAR))
    waiting.pass_on([7])
    waiting.pass_on([])
    assert post.said == [[7]]
    sleep_through(waiting.sleep(FAR))
    assert node.slept[-1] >= 0.75 * node.poll_last


def test_waiter_that_is_not_the_poller_notifies_no_others() -> None:
    post = Asker(is_mine=False)
    node: Any = Node(post)
    Ticket(node).pass_on([7])
    assert not post.said


@pytest.mark.parametrize("doing", ["join", "pass on", "sleep", "is rung", "arm"])
def test_node_bell_that_fails_is_dropped_and_the_log_is_read(doing: str) -> None:
    post = Asker()
    post.fails = doing == "join"
    node: Any = Node(post)
    waiting = Ticket(node)
    post.fails = True
    node.bell = None if doing != "arm" and doing != "is rung" else BrokenBell()
    if doing == "pass on":
        waiting.pass_on([7])
    elif doing == "sleep":
        assert not sleep_through(waiting.sleep(FAR))
    elif doing == "is rung":
        assert waiting.is_rung()
    elif doing == "arm":
        waiting.arm(3)
    assert [error.errno for error in node.lost] == [errno.EIO]


class BrokenBell:
    """A bell that can't be read."""

    def arm(self, _: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    def is_rung(self, *_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")


def test_waiter_beside_a_poller_looks_itself_at_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Frozen()
    monkeypatch.setattr(system, "time", clock)
    post = Asker(is_mine=False)
    beats = iter(range(100))
    monkeypatch.setattr(post, "heartbeat_count", lambda: next(beats))
    node: Any = Node(post)
    waiting = Ticket(node)
    rings = [False, False, True]

    def sleep_(_: object, until: float) -> Naps[bool]:
        yield from ()
        node.slept.append(until)
        return rings.pop(0)

    monkeypatch.setattr(node, "sleep", sleep_)
    clock.monotonic = lambda: waiter.OWN_LOOK_S + 1  # type: ignore[method-assign]
    assert not sleep_through(waiting.sleep(FAR)), "its last look is too old"
    assert rings == [False, True]
    assert sleep_through(waiting.sleep(FAR)), "it sleeps on until it is rung"
    assert rings == []
