"""How long a waiting thread sleeps between its looks: ever longer, to a limit, and never behind its deadline."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fscoord import _system as system
from fscoord._log import ticket
from fscoord._log.ticket import Ticket
from fscoord._naps import THREADS, Naps, sleep_through

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


def test_who_hears_sleeps_twice_as_long_each_time_up_to_a_limit() -> None:
    watch: Any = Sleeps(hears=True)
    waiting = Ticket(watch)
    assert [sleep(watch, waiting) for _ in range(9)] == doubled(ticket.SLOW_FIRST_S, ticket.SLOW_LAST_S, 9)


def test_who_keeps_a_vigil_sleeps_for_as_long_as_that_says() -> None:
    watch: Any = Sleeps(hears=True)
    waiting = Ticket(watch, lambda: 7.0)
    assert [sleep(watch, waiting) for _ in range(9)] == doubled(ticket.VIGIL_FIRST_S, 7.0, 9)
    deaf: Any = Sleeps(hears=False)
    polling = Ticket(deaf, lambda: 7.0)
    assert max(sleep(deaf, polling) for _ in range(12)) <= 1.25 * deaf.poll_last


def test_who_hears_nothing_polls_out_of_step_with_others() -> None:
    watch: Any = Sleeps(hears=False)
    waiting = Ticket(watch)
    pauses = [sleep(watch, waiting) for _ in range(30)]
    for pause, plain in zip(pauses, doubled(ticket.POLL_FIRST_S, watch.poll_last, 30), strict=True):
        assert 0.75 * plain <= pause <= 1.25 * plain
    assert len(set(pauses)) == 30


@pytest.mark.parametrize("hears", [False, True])
def test_no_sleep_is_longer_than_what_is_left(hears: bool) -> None:
    watch: Any = Sleeps(hears=hears)
    waiting = Ticket(watch)
    for left in (0.0, 1e-6):
        assert sleep(watch, waiting, left) <= left


def test_who_is_woken_sleeps_no_longer_the_next_time() -> None:
    watch: Any = Sleeps(hears=True)
    waiting = Ticket(watch)
    watch.rings = True
    assert [sleep(watch, waiting) for _ in range(3)] == [ticket.SLOW_FIRST_S] * 3


@pytest.mark.parametrize("keeps_vigil", [False, True])
def test_what_was_heard_before_it_was_armed_rings_no_more(keeps_vigil: bool) -> None:
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
