"""Watch: who hears of events, and that who hears of none sleeps all the same."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from fscoord._log.bell import Bell, bucket
from fscoord._log.ticket import Ticket
from fscoord._log.watch import Watch
from fscoord._naps import sleep_through

LIMIT_S = 60


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def make(mode: str, **where: bool) -> Watch:
        path = tmp_path / "log"
        path.touch()
        made.append(Watch(str(path), None, mode, **where))
        return made[-1]

    yield make
    for watch in made:
        watch.close()


@pytest.mark.parametrize(
    ("mode", "is_local", "is_node", "hears"),
    [
        ("auto", True, False, True),
        ("inotify", True, False, True),
        ("poll", True, False, False),
        ("auto", False, False, False),
        ("auto", False, True, True),
        ("inotify", False, False, True),
        ("poll", False, True, False),
    ],
)
def test_events_are_listened_to_where_they_tell_of_all_writers_or_somebody_insists(
    mode: str, is_local: bool, is_node: bool, hears: bool, make: Callable[..., Watch]
) -> None:
    assert make(mode, is_local=is_local, is_node=is_node).hears is hears


def test_a_process_is_watched_where_there_are_events(make: Callable[..., Watch]) -> None:
    watch = make("auto", is_local=True)
    assert watch.watch_process(os.getpid())
    assert watch.watches(os.getpid())
    assert not watch.watches(1)
    deaf = make("poll", is_local=True)
    assert not deaf.watch_process(os.getpid())
    assert not deaf.watches(os.getpid())


class Woken:
    """Counts the sleeps of a ticket, which all end at once."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.sleeps.append(seconds)
        return True

    def set(self) -> bool:
        return False


def test_who_hears_of_nothing_sleeps_until_it_is_woken(
    make: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = make("poll", is_local=True)
    ticket: Any = Ticket(watch)
    ticket.wake = woken = Woken()
    monkeypatch.setattr(ticket, "is_rung", lambda: len(woken.sleeps) == 3)
    assert sleep_through(watch.sleep(ticket, time.monotonic() + LIMIT_S))
    assert len(woken.sleeps) == 3
    assert all(0 < seconds <= LIMIT_S for seconds in woken.sleeps)
    monkeypatch.setattr(ticket, "is_rung", lambda: False)
    assert not sleep_through(watch.sleep(ticket, time.monotonic() - 1))


def test_a_watch_that_is_closed_is_not_shared_any_more(make: Callable[..., Watch]) -> None:
    watch = make("auto", is_local=True)
    assert not watch.is_stale
    watch.close()
    assert watch.is_stale
    assert not watch.hears


@given(st.binary(max_size=40))
def test_every_key_has_a_byte_of_the_bell_that_others_can_compute(key: bytes) -> None:
    assert bucket(key) == zlib.crc32(key) % 4096


def test_a_bell_is_new_to_who_made_it_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "bell")
    first, second = Bell(path, 0o600), Bell(path, 0o600)
    assert (first.is_new, second.is_new) == (True, False)
    for bell in (first, second):
        assert not bell.is_lost
        bell.close()
        assert bell.is_lost


def test_a_bell_rings_for_who_has_marked_and_for_nobody_twice(tmp_path: Path) -> None:
    bell = Bell(str(tmp_path / "bell"), 0o600)
    try:
        bell.ring(7)
        assert Path(bell.path).read_bytes() == bytes(4096)
        for _ in range(300):  # the byte counts on, and over
            mark = bell.mark(7)
            assert bell.mark(7) == mark
            assert not bell.is_rung(7, mark)
            bell.ring(8)
            assert not bell.is_rung(7, mark)
            bell.ring(7)
            assert bell.is_rung(7, mark)
            rung = Path(bell.path).read_bytes()
            bell.ring(7)
            assert Path(bell.path).read_bytes() == rung
    finally:
        bell.close()
