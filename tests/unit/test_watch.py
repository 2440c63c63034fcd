"""Watch: who hears of events, and that who hears of none sleeps all the same."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from support.places import start_thread

from fscoord._log.wakeup import watcher as log_watch
from fscoord._log.wakeup.doorbell import Doorbell, bucket
from fscoord._log.wakeup.waiter import Ticket
from fscoord._log.wakeup.watcher import Watch
from fscoord._waiting.parking import THREADS, Sleepers, sleep_through

LIMIT_S = 60


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Watch]]:
    made: list[Watch] = []

    def make(mode: str, **where: Any) -> Watch:
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
def test_events_are_used_where_they_show_all_writers_or_on_request(
    mode: str, is_local: bool, is_node: bool, hears: bool, make: Callable[..., Watch]
) -> None:
    assert make(mode, is_local=is_local, is_node=is_node).hears is hears


def test_process_is_watched_where_there_are_events(make: Callable[..., Watch]) -> None:
    watch = make("auto", is_local=True)
    assert watch.watch_process(os.getpid())
    assert watch.watches(os.getpid())
    assert not watch.watches(1)
    deaf = make("poll", is_local=True)
    assert not deaf.watch_process(os.getpid())
    assert not deaf.watches(os.getpid())


def test_watch_without_events_has_no_bell(tmp_path: Path) -> None:
    """It would mark it at each look, and writers would ring for nobody."""
    with closing(Doorbell(str(tmp_path / "bell"), 0o600)) as bell:
        for mode, rings in (("poll", None), ("auto", bell)):
            with closing(Watch(str(tmp_path / "log"), bell, mode, is_local=True)) as watch:
                assert watch.bell is rings


class Woken:
    """Counts the sleeps of a ticket, which all end at once."""

    def __init__(self) -> None:
        self.sleeps: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.sleeps.append(seconds)
        return True

    def set(self) -> bool:
        return False


def test_watch_without_events_sleeps_until_it_is_woken(
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


def test_watch_that_is_closed_is_no_longer_shared(make: Callable[..., Watch]) -> None:
    watch = make("auto", is_local=True)
    assert not watch.is_stale
    watch.close()
    assert watch.is_stale
    assert not watch.hears


def test_fork_while_a_watch_is_made_lets_the_child_make_its_own(make: Callable[..., Watch]) -> None:
    """The thread that was making it is not there in the child, and never lets go."""
    is_making, may_end = threading.Event(), threading.Event()

    def be_at_it() -> None:
        with log_watch._guard[0]:
            is_making.set()
            may_end.wait(LIMIT_S)

    thread = threading.Thread(target=be_at_it)
    thread.start()
    try:
        assert is_making.wait(LIMIT_S)
        child = os.fork()
        if not child:
            os._exit(0 if log_watch._guard[0].acquire(blocking=False) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        may_end.set()
        thread.join()


def test_listener_thread_wakes_all_sleepers(make: Callable[..., Watch], tmp_path: Path) -> None:
    watch = make("auto", is_local=True)
    sleepers: list[Any] = []
    with ExitStack() as stack:
        for _ in range(3):
            sleep = watch.sleep(Ticket(watch), time.monotonic() + LIMIT_S)
            sleepers.append(stack.enter_context(start_thread(sleep_through, sleep)))
        deadline = time.monotonic() + LIMIT_S
        while len(watch._asleep) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        (tmp_path / "log").write_text("news")
        for sleeper in sleepers:
            sleeper.join()
        assert [sleeper.result for sleeper in sleepers] == [True] * 3


class Loop(Sleepers):
    """Stands for an event loop, which calls who listens when there is something to read."""

    def __init__(self, *, listens: bool = True) -> None:
        self.listens = listens
        self.heard: list[Callable[[], None]] = []
        self.given_back: list[object] = []

    def listen(self, events: object, heard: Callable[[], None]) -> bool:
        self.heard.append(heard)
        return self.listens

    def give_back(self, events: object) -> None:
        self.given_back.append(events)
        super().give_back(events)


def test_watch_in_an_event_loop_reads_events_without_waiting(make: Callable[..., Watch], tmp_path: Path) -> None:
    loop = Loop()
    watch = make("auto", is_local=True, sleepers=loop)
    (heard,) = loop.heard
    waits: list[float] = []
    wait = watch._events.wait
    watch._events.wait = lambda limit: (waits.append(limit), wait(limit))[1]
    heard()
    assert watch.heard == 0, "there was nothing to read"
    naps = watch.sleep(Ticket(watch), time.monotonic() + LIMIT_S)
    next(naps)
    (tmp_path / "log").write_text("news")
    heard()
    assert watch.heard == 1
    assert waits == [0, 0]
    with pytest.raises(StopIteration) as end:
        next(naps)
    assert end.value.value is True


def test_watch_in_an_event_loop_listens_again_after_its_first_process(make: Callable[..., Watch]) -> None:
    for listens in (True, False):
        loop = Loop(listens=listens)
        watch = make("auto", is_local=True, sleepers=loop)
        assert not watch.watch_process(2**22 + 1), "there is no such process"
        assert len(loop.heard) == 1
        assert watch.watch_process(os.getpid())
        assert len(loop.heard) == 1 + listens


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_event_callback_of_a_closed_watch_gives_the_events_back(
    how: str, make: Callable[..., Watch], tmp_path: Path
) -> None:
    """Or it would be called again and again."""
    loop = Loop()
    watch = make("auto", is_local=True, sleepers=loop) if how == "closed" else _watch(tmp_path, loop)
    events = watch._events
    if how == "closed":
        watch._events = None
    else:
        watch = None
        gc.collect()
    loop.given_back.clear()
    loop.heard[0]()
    assert loop.given_back == [events]


def _watch(tmp_path: Path, loop: Loop) -> Any:
    (tmp_path / "log").touch()
    return Watch(str(tmp_path / "log"), None, "auto", is_local=True, sleepers=loop)


def test_watch_that_is_closed_holds_no_election_and_no_bell(tmp_path: Path) -> None:
    bell = Doorbell(str(tmp_path / "bell"), 0o600)
    watch = Watch(str(tmp_path / "log"), bell, "auto", is_local=False, is_node=True)
    post, ticket = watch.post, Ticket(watch)
    assert post is not None
    assert post.try_elect(ticket)
    watch.close()
    assert not post._held
    assert bell.is_lost


def test_watch_that_loses_the_node_bell_leaves_the_election_and_polls(tmp_path: Path) -> None:
    bell = Doorbell(str(tmp_path / "bell"), 0o600)
    watch = Watch(str(tmp_path / "log"), bell, "auto", is_local=False, is_node=True)
    try:
        ticket, post = Ticket(watch), watch.post
        assert watch.hears
        assert post is not None
        assert post.try_elect(ticket)
        watch.lose_bell(OSError(errno.EIO, "Input/output error"))
        assert not post._held
        assert not post.try_elect(ticket)
        assert (watch.bell, watch.post, watch.hears) == (None, None, False)
    finally:
        watch.close()
        bell.close()


@given(st.binary(max_size=40))
def test_bucket_of_a_key_is_its_crc_modulo_the_bell_size(key: bytes) -> None:
    assert bucket(key) == zlib.crc32(key) % 4096


def test_bell_is_new_only_to_its_creator(tmp_path: Path) -> None:
    path = str(tmp_path / "bell")
    first, second = Doorbell(path, 0o600), Doorbell(path, 0o600)
    assert (first.is_new, second.is_new) == (True, False)
    for bell in (first, second):
        assert not bell.is_lost
        bell.close()
        assert bell.is_lost


def test_bell_rings_once_for_each_arming(tmp_path: Path) -> None:
    bell = Doorbell(str(tmp_path / "bell"), 0o600)
    try:
        bell.ring(7)
        assert Path(bell.path).read_bytes() == bytes(4096)
        for _ in range(300):  # the byte counts on, and over
            mark = bell.arm(7)
            assert bell.arm(7) == mark
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


class Sleeper:
    """Stands for the ticket of somebody who sleeps, and notes that it is woken."""

    def __init__(self, woken: list[Sleeper], *, is_rung: bool = False, sleeps: bool = True) -> None:
        self._woken, self._is_rung, self._sleeps = woken, is_rung, sleeps
        self.wake = self
        self.is_called = False

    def is_rung(self) -> bool:
        return self._is_rung

    def set(self) -> bool:
        self._woken.append(self)
        return self._sleeps


class Heard:
    """Stands for events, some of which were the ends of processes."""

    def __init__(self, ended: int = 0, *, readable: bool = True) -> None:
        self._ended, self.is_pollable = ended, readable
        self.interruptions = 0

    def interrupt(self) -> None:
        self.interruptions += 1

    def close(self) -> None:
        pass

    def reap_exited(self) -> int:
        return self._ended


def test_listener_wakes_the_rung_sleepers_and_not_itself(make: Callable[..., Watch]) -> None:
    watch: Any = make("poll", is_local=True)
    woken: list[Sleeper] = []
    listener, rung, other = (Sleeper(woken, is_rung=rings) for rings in (True, True, False))
    watch._asleep = {listener, rung, other}
    watch._tell(Heard(3), listener)
    assert woken == [rung]
    assert (watch.heard, watch.deaths) == (1, 3)


@pytest.mark.parametrize(("sleeps", "count"), [(True, 1), (False, 3)])
def test_listener_that_leaves_wakes_a_sleeper_to_take_its_place(
    sleeps: bool, count: int, make: Callable[..., Watch]
) -> None:
    """Who was woken before is about to leave, too."""
    watch: Any = make("poll", is_local=True)
    woken: list[Sleeper] = []
    watch._asleep = {Sleeper(woken, sleeps=sleeps) for _ in range(3)}
    watch._hand_on()
    assert len(woken) == count


def test_sleepers_are_all_woken_by_wake_all_and_by_a_call(
    make: Callable[..., Watch],
) -> None:
    watch: Any = make("poll", is_local=True)
    woken: list[Sleeper] = []
    watch._asleep = {Sleeper(woken) for _ in range(3)}
    watch._wake_all()
    assert (set(woken), len(woken), watch.heard) == (watch._asleep, 3, 1)
    log_watch._call_all(watch)
    assert len(woken) == 6
    assert all(sleeper.is_called for sleeper in watch._asleep)
    log_watch._call_all(None)


@pytest.mark.parametrize("readable", [False, True])
def test_listener_is_interrupted_by_look_about(readable: bool, make: Callable[..., Watch]) -> None:
    watch: Any = make("poll", is_local=True)
    watch._events = heard = Heard(readable=readable)
    watch.look_about()
    assert heard.interruptions == readable


def test_watches_made_at_once_leave_one_shared_and_close_the_other(make: Callable[..., Watch]) -> None:
    log_id = os.urandom(16)
    inner: list[Watch] = []
    outer = make("auto", is_local=True)

    def make_slowly() -> Watch:
        inner.append(log_watch.shared_watch(log_id, "auto", THREADS, lambda: make("auto", is_local=True)))
        return outer

    watch = log_watch.shared_watch(log_id, "auto", THREADS, make_slowly)
    assert inner == [watch]
    assert (watch.is_closed, outer.is_closed) == (False, True)
    assert log_watch.shared_watch(log_id, "auto", THREADS, make_slowly) is watch


def test_fork_closes_the_shared_watches_of_the_parent_in_the_child(
    make: Callable[..., Watch], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_watch, "_watches", weakref.WeakValueDictionary())
    monkeypatch.setattr(log_watch, "_guard", guard := [threading.RLock()])
    before = guard[0]
    watch = log_watch.shared_watch(b"", "auto", THREADS, lambda: make("auto", is_local=True))
    log_watch._after_fork_in_child()
    assert watch.is_closed
    assert guard[0] is not before
    assert len(guard) == 1
