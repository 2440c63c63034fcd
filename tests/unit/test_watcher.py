"""ChangeWatcher: the waiters that learn of events; a waiter without events sleeps all the same."""

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

from fscoord._log.shared.node_poller import PollerElection
from fscoord._log.shared.node_waiter import NodeWaiter
from fscoord._log.wakeup import watcher as log_watch
from fscoord._log.wakeup.doorbell import STATE_SIZE, Doorbell, bucket
from fscoord._log.wakeup.watcher import ChangeWatcher, Waiter
from fscoord._waiting.wait import THREAD_BACKEND, WaitBackend

LIMIT_S = 60


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., ChangeWatcher]]:
    made: list[ChangeWatcher] = []

    def make(mode: str, **where: Any) -> ChangeWatcher:
        path = tmp_path / "log"
        path.touch()
        made.append(ChangeWatcher(str(path), None, mode, **where))
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
    mode: str, is_local: bool, is_node: bool, hears: bool, make: Callable[..., ChangeWatcher]
) -> None:
    assert make(mode, is_local=is_local, elect=PollerElection if is_node else None).has_events is hears


def test_process_is_watched_where_there_are_events(make: Callable[..., ChangeWatcher]) -> None:
    watch = make("auto", is_local=True)
    assert watch.watch_process(os.getpid())
    assert watch.watches(os.getpid())
    assert not watch.watches(1)
    deaf = make("poll", is_local=True)
    assert not deaf.watch_process(os.getpid())
    assert not deaf.watches(os.getpid())


def test_watch_without_events_has_no_bell(tmp_path: Path) -> None:
    """Otherwise it would mark it at each look, and writers would ring for no waiter."""
    with closing(Doorbell(str(tmp_path / "bell"), 0o600)) as bell:
        for mode, rings in (("poll", None), ("auto", bell)):
            with closing(ChangeWatcher(str(tmp_path / "log"), bell, mode, is_local=True)) as watch:
                assert watch.bell is rings


def sleep(watch: ChangeWatcher, waiting: Any, left: float) -> bool:
    """Sleep on `watch`; return True when `waiting` is rung, and False after `left` seconds."""
    until = time.monotonic() + left
    watch.begin_sleep(waiting)
    try:
        while not waiting.is_rung():
            seconds = until - time.monotonic()
            if seconds <= 0:
                return False
            watch.block(waiting, seconds)
        return True
    finally:
        watch.end_sleep(waiting)


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
    make: Callable[..., ChangeWatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = make("poll", is_local=True)
    ticket: Any = Waiter(watch)
    ticket.waker = woken = Woken()
    monkeypatch.setattr(ticket, "is_rung", lambda: len(woken.sleeps) == 3)
    assert sleep(watch, ticket, LIMIT_S)
    assert len(woken.sleeps) == 3
    assert all(0 < seconds <= LIMIT_S for seconds in woken.sleeps)
    monkeypatch.setattr(ticket, "is_rung", lambda: False)
    assert not sleep(watch, ticket, -1)


def test_watch_that_is_closed_is_no_longer_shared(make: Callable[..., ChangeWatcher]) -> None:
    watch = make("auto", is_local=True)
    assert not watch.is_stale
    watch.close()
    assert watch.is_stale
    assert not watch.has_events


def test_fork_while_a_watch_is_made_lets_the_child_make_its_own(make: Callable[..., ChangeWatcher]) -> None:
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


def test_listener_thread_wakes_all_sleepers(make: Callable[..., ChangeWatcher], tmp_path: Path) -> None:
    watch = make("auto", is_local=True)
    sleepers: list[Any] = []
    with ExitStack() as stack:
        for _ in range(3):
            sleepers.append(stack.enter_context(start_thread(sleep, watch, Waiter(watch), LIMIT_S)))
        deadline = time.monotonic() + LIMIT_S
        while len(watch._sleeping) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        (tmp_path / "log").write_text("news")
        for sleeper in sleepers:
            sleeper.join()
        assert [sleeper.result for sleeper in sleepers] == [True] * 3


class Loop(WaitBackend):
    """Stands for an event loop, which calls the listener when there is data to read."""

    def __init__(self, *, listens: bool = True) -> None:
        self.listens = listens
        self.heard: list[Callable[[], None]] = []
        self.given_back: list[object] = []

    def subscribe(self, events: object, on_readable: Callable[[], None]) -> bool:
        self.heard.append(on_readable)
        return self.listens

    def release(self, events: object) -> None:
        self.given_back.append(events)
        super().release(events)


def test_watch_in_an_event_loop_reads_events_without_waiting(
    make: Callable[..., ChangeWatcher], tmp_path: Path
) -> None:
    loop = Loop()
    watch = make("auto", is_local=True, backend=loop)
    (heard,) = loop.heard
    waits: list[float] = []
    wait = watch._events.wait
    watch._events.wait = lambda limit: (waits.append(limit), wait(limit))[1]
    heard()
    assert watch.event_count == 0, "there was nothing to read"
    waiting = Waiter(watch)
    assert waiting.max_sleep(time.monotonic() + LIMIT_S) > 0
    (tmp_path / "log").write_text("news")
    heard()
    assert watch.event_count == 1
    assert waits == [0, 0]
    assert waiting.max_sleep(time.monotonic() + LIMIT_S) == 0
    assert waiting.was_rung


def test_thread_that_begins_to_read_events_finds_that_one_was_read_for_it(
    make: Callable[..., ChangeWatcher], tmp_path: Path
) -> None:
    """The thread that was the reader until then has read it, and no further event comes."""
    watch = make("auto", is_local=True)
    waiting = Waiter(watch)
    assert waiting.max_sleep(time.monotonic() + LIMIT_S) > 0
    (tmp_path / "log").write_text("news")
    assert watch._events.wait(LIMIT_S)
    watch._dispatch(watch._events)
    while watch._events.wait(0):
        watch._dispatch(watch._events)
    started = time.monotonic()
    watch.block(waiting, LIMIT_S)
    assert time.monotonic() - started < LIMIT_S / 2
    waiting.close()


def test_watch_in_an_event_loop_listens_again_after_its_first_process(make: Callable[..., ChangeWatcher]) -> None:
    for listens in (True, False):
        loop = Loop(listens=listens)
        watch = make("auto", is_local=True, backend=loop)
        assert not watch.watch_process(2**22 + 1), "there is no such process"
        assert len(loop.heard) == 1
        assert watch.watch_process(os.getpid())
        assert len(loop.heard) == 1 + listens


@pytest.mark.parametrize("how", ["closed", "forgotten"])
def test_event_callback_of_a_closed_watch_gives_the_events_back(
    how: str, make: Callable[..., ChangeWatcher], tmp_path: Path
) -> None:
    """Otherwise it would be called again and again."""
    loop = Loop()
    watch = make("auto", is_local=True, backend=loop) if how == "closed" else _watch(tmp_path, loop)
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
    return ChangeWatcher(str(tmp_path / "log"), None, "auto", is_local=True, backend=loop)


def test_watch_that_is_closed_holds_no_election_and_no_bell(tmp_path: Path) -> None:
    bell = Doorbell(str(tmp_path / "bell"), 0o600)
    watch = ChangeWatcher(str(tmp_path / "log"), bell, "auto", is_local=False, elect=PollerElection)
    post = watch.election
    assert isinstance(post, PollerElection)
    ticket = NodeWaiter(watch, post)
    assert post.try_elect(ticket)
    watch.close()
    assert not post._held
    assert bell.is_lost


def test_watch_that_loses_the_node_bell_leaves_the_election_and_polls(tmp_path: Path) -> None:
    bell = Doorbell(str(tmp_path / "bell"), 0o600)
    watch = ChangeWatcher(str(tmp_path / "log"), bell, "auto", is_local=False, elect=PollerElection)
    try:
        post = watch.election
        assert watch.has_events
        assert isinstance(post, PollerElection)
        ticket = NodeWaiter(watch, post)
        assert post.try_elect(ticket)
        watch.fall_back_to_polling(OSError(errno.EIO, "Input/output error"))
        assert not post._held
        assert not post.try_elect(ticket)
        assert (watch.bell, watch.election, watch.has_events) == (None, None, False)
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
        assert Path(bell.path).read_bytes() == bytes(STATE_SIZE)
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
    """Stands for the ticket of a sleeping thread, and notes that it is woken."""

    def __init__(self, woken: list[Sleeper], *, is_rung: bool = False, sleeps: bool = True) -> None:
        self._woken, self._is_rung, self._sleeps = woken, is_rung, sleeps
        self.waker = self
        self.role_changed = False

    def is_rung(self) -> bool:
        return self._is_rung

    def set(self) -> bool:
        self._woken.append(self)
        return self._sleeps


class Heard:
    """Stands for events, some of which were the ends of processes."""

    def __init__(self, ended: int = 0, *, readable: bool = True) -> None:
        self._ended, self.is_pollable = ended, readable
        self.processes = dict.fromkeys(range(ended), 0)
        self.interruptions = 0

    def interrupt(self) -> None:
        self.interruptions += 1

    def close(self) -> None:
        pass

    def reap_exited(self) -> int:
        return self._ended


def test_listener_wakes_the_rung_sleepers_and_not_itself(make: Callable[..., ChangeWatcher]) -> None:
    watch: Any = make("poll", is_local=True)
    woken: list[Sleeper] = []
    listener, rung, other = (Sleeper(woken, is_rung=rings) for rings in (True, True, False))
    watch._sleeping = {listener, rung, other}
    watch._dispatch(Heard(3), listener)
    assert woken == [rung]
    assert (watch.event_count, watch.deaths) == (1, 3)


@pytest.mark.parametrize(("sleeps", "count"), [(True, 1), (False, 3)])
def test_listener_that_leaves_wakes_a_sleeper_to_take_its_place(
    sleeps: bool, count: int, make: Callable[..., ChangeWatcher]
) -> None:
    """A waiter that was woken before is about to leave, too."""
    watch: Any = make("poll", is_local=True)
    woken: list[Sleeper] = []
    watch._sleeping = {Sleeper(woken, sleeps=sleeps) for _ in range(3)}
    watch._pass_reader_role()
    assert len(woken) == count


def test_sleepers_are_all_woken_by_wake_all_and_by_a_call(
    make: Callable[..., ChangeWatcher],
) -> None:
    watch: Any = make("poll", is_local=True)
    woken: list[Sleeper] = []
    watch._sleeping = {Sleeper(woken) for _ in range(3)}
    watch._on_event()
    assert (set(woken), len(woken), watch.event_count) == (watch._sleeping, 3, 1)
    watch._on_vacancy()
    assert len(woken) == 6
    assert all(sleeper.role_changed for sleeper in watch._sleeping)


@pytest.mark.parametrize("readable", [False, True])
def test_listener_is_interrupted_by_look_about(readable: bool, make: Callable[..., ChangeWatcher]) -> None:
    watch: Any = make("poll", is_local=True)
    watch._events = heard = Heard(readable=readable)
    watch.wake_all()
    assert heard.interruptions == readable


def test_watches_made_at_once_leave_one_shared_and_close_the_other(make: Callable[..., ChangeWatcher]) -> None:
    log_id = os.urandom(16)
    inner: list[ChangeWatcher] = []
    outer = make("auto", is_local=True)

    def make_slowly() -> ChangeWatcher:
        inner.append(log_watch.shared_watcher(log_id, "auto", THREAD_BACKEND, lambda: make("auto", is_local=True)))
        return outer

    watch = log_watch.shared_watcher(log_id, "auto", THREAD_BACKEND, make_slowly)
    assert inner == [watch]
    assert (watch.is_closed, outer.is_closed) == (False, True)
    assert log_watch.shared_watcher(log_id, "auto", THREAD_BACKEND, make_slowly) is watch


def test_watch_during_whose_making_a_signal_handler_forks_is_stale_in_the_child(
    make: Callable[..., ChangeWatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_watch, "_guard", [threading.RLock()])
    watch_file = log_watch.events.watch_file

    def fork_and_watch(*arguments: Any) -> Any:
        log_watch._after_fork_in_child()
        return watch_file(*arguments)

    monkeypatch.setattr(log_watch.events, "watch_file", fork_and_watch)
    assert make("auto", is_local=True).is_stale


def test_fork_closes_the_shared_watches_of_the_parent_in_the_child(
    make: Callable[..., ChangeWatcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_watch, "_watchers", weakref.WeakValueDictionary())
    monkeypatch.setattr(log_watch, "_guard", guard := [threading.RLock()])
    before = guard[0]
    watch = log_watch.shared_watcher(b"", "auto", THREAD_BACKEND, lambda: make("auto", is_local=True))
    log_watch._after_fork_in_child()
    assert watch.is_closed
    assert guard[0] is not before
    assert len(guard) == 1
