"""Sources of events that are closed in the middle of a method, as in a child that a signal handler forks there."""

from __future__ import annotations

import gc
import itertools
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import pytest
from support.places import start_thread, until

from fscoord import FileStore, StoreTimeoutError
from fscoord._log.wakeup.doorbell import Doorbell
from fscoord._runtime import file_events, system
from fscoord._runtime.file_events import FifoSource, Inotify, PollableSource
from fscoord.recipes import Lock

LIMIT_S = 60
T = TypeVar("T")

Make = Callable[[], PollableSource]


@pytest.fixture(params=["inotify", "FIFO"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    with closing(Doorbell(str(tmp_path / "bell"), 0o600)) as bell:
        fifo = bell.open_fifo()
        kinds: dict[str, Make] = {
            "inotify": lambda: Inotify(bell.path, file_events.BELL_RUNG),
            "FIFO": lambda: FifoSource(fifo),
        }
        yield kinds[request.param]


def lose(source: PollableSource) -> None:
    """Do what the steps of a forked child do to a source."""
    system.close_all(os.close, source._descriptors)
    source.after_fork()


def losing_at_every_point(attempt: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> Iterator[Any]:
    """Give what `attempt` returns, or its `OSError`, each time with the new sources lost at another point.

    The points are those at which a signal handler may fork. `prepare` is called before each attempt.
    """
    for number in itertools.count(1):
        before = set(file_events._instances)
        left = number
        prepare()

        def look(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            if event not in ("call", "c_return") or frame.f_code.co_filename == __file__:
                return
            left -= 1
            if left == 0:
                sys.setprofile(None)
                for source in set(file_events._instances) - before:  # noqa: B023 - only called in this turn
                    lose(source)

        sys.setprofile(look)
        try:
            result = attempt()
        except OSError as error:
            result = error.with_traceback(None)
        finally:
            sys.setprofile(None)
        if left > 0:
            assert number > 2
            return
        yield result


def open_files() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def is_useless(source: PollableSource) -> bool:
    """Return whether the source keeps no waiter asleep and does nothing else."""
    source.interrupt()
    return source.wait(LIMIT_S) and source.descriptors() == [] and source.reap_exited() == 0


@pytest.mark.parametrize("is_first", [True, False], ids=["first", "second"])
def test_source_that_is_lost_while_it_begins_to_watch_a_process_watches_none(make: Make, is_first: bool) -> None:
    before = open_files()
    source: PollableSource

    def prepare() -> None:
        nonlocal source
        source = make()
        if not is_first:
            assert source.watch_process(os.getppid())

    for is_watched in losing_at_every_point(lambda: source.watch_process(os.getpid()), prepare):
        assert is_watched is False
        assert not source.watch_process(os.getpid())
        assert is_useless(source)
        source.close()
        assert open_files() == before


def test_source_that_is_lost_while_it_is_read_ends_the_wait(make: Make) -> None:
    before = open_files()
    source: PollableSource

    def prepare() -> None:
        nonlocal source
        source = make()
        assert source.watch_process(os.getpid())
        source.interrupt()

    for was_woken in losing_at_every_point(lambda: source.wait(LIMIT_S), prepare):
        assert was_woken
        assert is_useless(source)
        source.close()
        assert open_files() == before


def test_pidfd_that_is_closed_already_is_not_closed_again(make: Make) -> None:
    """Its number may be that of another file by now."""
    with closing(make()) as source:
        assert source.watch_process(os.getpid())
        (fd,) = source.processes.values()
        lose(source)
        with open(os.devnull) as other:
            os.dup2(other.fileno(), fd)
        source._close_pidfd(fd)
        os.close(fd)


def test_source_that_is_lost_while_it_reaps_processes_survives(make: Make) -> None:
    source: PollableSource
    ended = subprocess.Popen(["true"])
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
    before = open_files()

    def prepare() -> None:
        nonlocal source
        source = make()
        assert source.watch_process(ended.pid)

    for count in losing_at_every_point(lambda: source.reap_exited(), prepare):
        assert count in (0, 1)
        assert is_useless(source)
        source.close()
        assert open_files() == before
    ended.wait()


def test_source_that_is_lost_while_an_event_loop_asks_for_its_descriptors_has_none(make: Make) -> None:
    source: PollableSource

    def prepare() -> None:
        nonlocal source
        source = make()
        assert source.watch_process(os.getpid())

    for _ in losing_at_every_point(lambda: source.descriptors(), prepare):
        assert source.descriptors() == []
        source.close()


def test_source_that_is_lost_while_it_is_made_is_refused(make: Make) -> None:
    before = open_files()
    refused = 0
    for made in losing_at_every_point(make):
        if isinstance(made, PollableSource):
            assert not made.is_closed, "it looks usable"
            made.close()
        else:
            refused += 1
        assert open_files() == before
    assert refused > 5


def interrupting_at_every_point(prepare: Callable[[], T], attempt: Callable[[T], object]) -> Iterator[T]:
    """Give what `prepare` returns, each time after an `attempt` on it that a Ctrl-C has ended at another point.

    The points are those of all Python code but this file, also of the standard library.
    """
    for number in itertools.count(1):
        left = number

        def look(frame: FrameType, event: str, _: object) -> None:
            nonlocal left
            if event not in ("call", "c_return") or frame.f_code.co_filename == __file__:
                return
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

        prepared = prepare()
        gc.disable()  # in another object's finalizer the exception would be lost
        sys.setprofile(look)
        try:
            attempt(prepared)
        except KeyboardInterrupt:
            pass
        finally:
            sys.setprofile(None)
            gc.enable()
        is_last = left > 0
        yield prepared
        if is_last:
            break


def watching(make: Make) -> PollableSource:
    source = make()
    assert source.watch_process(os.getpid())
    return source


def test_source_that_is_dropped_during_a_ctrl_c_leaves_no_descriptor(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python drops what a signal handler raises in the finalizer of an object, and would drop the descriptors, too."""
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    before = open_files()
    for _ in interrupting_at_every_point(lambda: [watching(make)], list.clear):
        assert open_files() == before


def test_source_without_inotify_instance_that_is_collected_closes_only_its_own() -> None:
    """inotify_init(2) returned -1, and os.closerange(-1, 0) would close all descriptors of the process."""
    before = open_files()

    class Owner:
        """Stands for the source."""

    owner, kept = Owner(), system.Descriptors()
    system.close_when_collected(owner, kept)
    kept.update((-1, os.open(os.devnull, os.O_RDONLY)))
    del owner
    assert not kept
    assert open_files() == before


def test_source_whose_close_a_ctrl_c_interrupts_leaves_no_descriptor(make: Make) -> None:
    before = open_files()
    points = 0
    for source in interrupting_at_every_point(lambda: [watching(make)], lambda kept: kept[0].close()):
        source.clear()
        assert open_files() == before
        points += 1
    assert points > 5


def test_source_whose_close_was_interrupted_is_closed_by_a_second_close(make: Make) -> None:
    before = open_files()
    for source in interrupting_at_every_point(lambda: watching(make), lambda source: source.close()):
        source.close()
        assert open_files() == before


class SelectWithout:
    """The module `select` after a library of green threads has removed functions."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(f"module 'select' has no attribute {name!r}")
        return getattr(select, name)


@pytest.mark.parametrize("names", [("epoll",), ("poll", "epoll")])
def test_wait_without_poll_or_epoll_ends_by_a_write_a_deadline_and_a_death(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "select", SelectWithout(*names))
    with FileStore(tmp_path / "s", timeout=LIMIT_S) as store, store.clone() as other:
        with start_thread(store.get, "k") as waiter:
            other.set("k", "v")
        assert waiter.result == b"v"
        with pytest.raises(StoreTimeoutError):
            store.wait(["never"], 0.1)
        with start_thread(Lock(store, "l").acquire):
            pass
        other_lock = Lock(other, "l")
        with start_thread(other_lock.acquire):  # it watches the session of the holder, until that is closed
            until(lambda: other_lock.waiters())
            store.close()


def test_fifo_is_refused_without_epoll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "select", SelectWithout("epoll"))
    with pytest.raises(OSError, match=r"select\.epoll"):
        FifoSource(0)


def test_thread_that_would_block_in_the_kernel_is_refused_where_threads_are_green(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("_thread.start_new_thread", lambda *_: pytest.fail("a green thread was started"))
    assert isinstance(system.try_kernel_thread("name", pytest.fail), RuntimeError)
