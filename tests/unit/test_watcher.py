"""ChangeWatcher: the waiters that learn of events; a waiter without events sleeps all the same."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fscoord._log.shared.node_poller import PollerElection
from fscoord._log.shared.node_waiter import NodeWaiter
from fscoord._log.wakeup import watcher as log_watch
from fscoord._log.wakeup.doorbell import Doorbell
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


def test_error_of_the_events_goes_to_the_waiter_that_reads_them(make: Callable[..., ChangeWatcher]) -> None:
    watch = make("auto", is_local=True)

    def wait(_: float) -> bool:
        raise OSError(errno.EBADF, "Bad file descriptor")

    watch._events.wait = wait
    with pytest.raises(OSError, match="Bad file"):
        watch.block(Waiter(watch), LIMIT_S)
    failed: list[OSError] = []
    waiting: Any = Waiter(watch)
    waiting.fail = failed.append  # as a waiter beside a poller, which then polls
    watch.block(waiting, LIMIT_S)
    assert [error.errno for error in failed] == [errno.EBADF]


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
