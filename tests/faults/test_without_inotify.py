"""Processes that get no inotify instance: the FIFO beside the bell wakes them, and none of them polls."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of, notifier_of, watcher_of
from support.places import Thread, start_thread, wait_in_vain

import fscoord
from fscoord import FileStore, StoreClosedError, aio
from fscoord._log import mount, opened
from fscoord._log.format import record
from fscoord._log.shared import network, node_poller, node_waiter
from fscoord._log.wakeup import watcher as log_ticket
from fscoord._runtime import system
from fscoord._runtime.file_events import FifoSource
from fscoord.stores.file import death_watch, notifier

HANG_S = 60
PROCESSES, INSTANCES = 30, 5


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def no_instance(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The user has used up the instances."""
    refuse_instances(monkeypatch)
    yield
    gc.collect()


def refuse_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    def inotify_init() -> int:
        ctypes.set_errno(errno.EMFILE)
        return -1

    monkeypatch.setattr("watchdog.observers.inotify_c.inotify_init", inotify_init)


@pytest.fixture
def only_rings_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slow poll helps: a ring that is lost is a test that hangs."""
    for name in ("SLOW_FIRST_S", "SLOW_LAST_S"):
        monkeypatch.setattr(log_ticket, name, 3 * HANG_S)
    monkeypatch.setattr(notifier, "ANNOUNCE_S", 3 * HANG_S)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "that never came"
        time.sleep(0.001)


def sleeping(store: FileStore) -> int:
    watch = watcher_of(store)
    return 0 if watch is None else len(watch._sleeping)


def wait_in_thread(store: FileStore, key: str, others: int = 0) -> Thread:
    """Start a thread that waits for `key`, and return when it sleeps beside so many others."""
    thread = start_thread(store.get, key)
    until(lambda: sleeping(store) > others)
    return thread


def events_of(store: FileStore) -> Any:
    watch = watcher_of(store)
    return None if watch is None else watch._events


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Waits


@pytest.mark.parametrize("watch", ["auto", "inotify"])
def test_fifo_wakes_all_threads_of_a_process(
    path: str, watch: str, no_instance: None, only_rings_wake: None, caplog: pytest.LogCaptureFixture
) -> None:
    with FileStore(path, timeout=HANG_S, watch=watch) as store, FileStore(path, timeout=HANG_S) as other:
        for number in range(5):
            threads = [wait_in_thread(store, f"{number} {i % 2}", others=i) for i in range(6)]
            assert isinstance(events_of(store), FifoSource)
            for which in range(2):
                other.set(f"{number} {which}", "1")
                assert [thread.join() for thread in threads[which::2]] == [b"1"] * 3
    assert warnings(caplog) == []


def test_key_that_is_written_between_the_look_and_the_sleep_ends_the_sleep(
    path: str, no_instance: None, only_rings_wake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(store)
        sleep = FifoSource.wait
        written: list[str] = []

        def write_first(source: FifoSource, limit: float) -> bool:
            if not written:
                written.append("k")
                other.set("k", "1")
            return sleep(source, limit)

        monkeypatch.setattr(FifoSource, "wait", write_first)
        assert store.get("k") == b"1"
        assert written == ["k"]


def test_waiters_with_and_without_an_instance_are_woken_by_one_ring(
    path: str, only_rings_wake: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(FileStore(path, timeout=HANG_S))
        wait_in_vain(first)
        children = [Waiting(path, without=number % 2 == 1) for number in range(4)]
        for child in children:
            stack.callback(child.end)
        for number in range(3):
            for child in children:
                child.until_asleep(number)
            first.set(f"k{number}", "1")
        assert [child.result() for child in children] == ["Inotify", "FifoSource"] * 2


class Waiting:
    """A forked process that waits for k0, k1 and k2, and says before each wait that it waits."""

    def __init__(self, path: str, *, without: bool) -> None:
        self._reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                signal.alarm(2 * HANG_S)
                with pytest.MonkeyPatch.context() as patch, FileStore(path, timeout=HANG_S) as store:
                    if without:
                        refuse_instances(patch)
                    for number in range(3):
                        thread = wait_in_thread(store, f"k{number}")
                        os.write(writer, b"%d\n" % number)
                        thread.join()
                    os.write(writer, type(events_of(store)).__name__.encode())
            finally:
                os._exit(0)
        os.close(writer)

    def until_asleep(self, number: int) -> None:
        assert os.read(self._reader, 2) == b"%d\n" % number

    def result(self) -> str:
        return os.read(self._reader, 100).decode()

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self._reader)


def test_tasks_of_an_event_loop_are_woken_by_the_fifo(
    path: str, no_instance: None, only_rings_wake: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[bytes]:
        found = []
        async with aio.AsyncStore(store) as tasks:
            for number in range(5):
                waits = [asyncio.ensure_future(tasks.get(f"{number} {i}")) for i in range(3)]
                while sum(waiter._wakes_at is not None for waiter in all_waiters()) < 3:
                    await asyncio.sleep(0.001)
                for i in range(3):
                    other.set(f"{number} {i}", "1")
                    found.append(await waits[i])
            assert {type(waiter.watcher._events) for waiter in seen} == {FifoSource}
        return found

    seen: set[Any] = set()

    def all_waiters() -> list[Any]:
        found = [each for each in gc.get_objects() if type(each) is log_ticket.Waiter and not each.is_over]
        seen.update(found)
        return found

    with FileStore(path, timeout=HANG_S) as other:
        store = FileStore(path, timeout=HANG_S)
        assert asyncio.run(run()) == [b"1"] * 15
        store.close()
    assert warnings(caplog) == []


def test_close_ends_the_waits_that_the_fifo_would_wake(path: str, no_instance: None, only_rings_wake: None) -> None:
    with FileStore(path, timeout=HANG_S) as other:
        store = FileStore(path, timeout=HANG_S)
        elsewhere = wait_in_thread(other, "k")
        threads = [start_thread(store.get, "k") for _ in range(3)]
        until(lambda: sleeping(store) >= 4)
        store.close()
        for thread in threads:
            with pytest.raises(StoreClosedError):
                thread.join()
        assert elsewhere.is_alive()
        other.set("k", "1")
        assert elsewhere.join() == b"1"
    del thread, threads, elsewhere
    gc.collect()


def test_death_of_a_process_ends_a_wait_at_the_fifo(
    path: str, no_instance: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(death_watch, "BEGIN_S", 0.0)
    monkeypatch.setattr(log_ticket, "DEATH_WATCH_FIRST_S", 3 * HANG_S)  # the next look of its own never comes
    with FileStore(path, timeout=HANG_S) as store:
        child = os.fork()
        if child == 0:
            victim = FileStore(path)
            victim.set("here", str(victim.register()))
            signal.pause()
        try:
            session = int(store.get("here"))
            with start_thread(store.wait_sessions, ["never"], [session]) as thread:
                # In this order: the sleep is one that began after the last look at the session.
                until(lambda: events_of(store) is not None and events_of(store).processes and sleeping(store))
                watch: Any = watcher_of(store)
                assert isinstance(watch._events, FifoSource)
                os.kill(child, signal.SIGKILL)
            assert thread.result == [session]
            assert watch.deaths == 1
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_end_of_a_session_is_rung_at_the_fifo(path: str, no_instance: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_ticket, "DEATH_WATCH_FIRST_S", 3 * HANG_S)
    with FileStore(path, timeout=HANG_S) as store:
        other = FileStore(path, timeout=HANG_S)
        session = other.register()
        with start_thread(store.wait_sessions, ["never"], [session]) as thread:
            until(lambda: sleeping(store))
            assert isinstance(events_of(store), FifoSource)
            time.sleep(2 * death_watch.BEGIN_S)  # before that no wait asks
            other.close()
        assert thread.result == [session]


# The FIFO goes, and comes


def test_waiter_whose_fifo_was_removed_makes_another(
    path: str, no_instance: None, caplog: pytest.LogCaptureFixture
) -> None:
    fifo = Path(path + ".bell.fifo")
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        thread = wait_in_thread(store, "k")
        fifo.unlink()
        until(fifo.exists)  # after a slow poll
        until(lambda: sleeping(store))
        other.set("k", "1")
        assert thread.join() == b"1"
        assert isinstance(events_of(store), FifoSource)
    assert warnings(caplog) == []


def test_waiter_with_a_strange_file_in_place_of_the_fifo_polls_and_says_so_once(
    path: str, no_instance: None, caplog: pytest.LogCaptureFixture
) -> None:
    Path(path + ".bell.fifo").write_text("mine")
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        for number in range(2):
            thread = start_thread(store.get, f"k{number}")
            until(lambda: store_polls(store))
            other.set(f"k{number}", "1")
            assert thread.join() == b"1"
    (message,) = warnings(caplog)
    assert "max_user_instances" in message
    assert "store.bell.fifo is not a FIFO" in message
    assert "polling instead" in message
    assert Path(path + ".bell.fifo").read_text() == "mine"


def store_polls(store: FileStore) -> bool:
    watch = watcher_of(store)
    return watch is not None and not watch.has_events


def test_reader_without_an_instance_polls(path: str, no_instance: None, caplog: pytest.LogCaptureFixture) -> None:
    """It may not write to a bell, so no FIFO can wake it."""
    with FileStore(path, timeout=HANG_S) as other, FileStore(path, timeout=HANG_S, read_only=True) as store:
        other.set("there", "1")
        thread = start_thread(store.get, "k")
        until(lambda: store_polls(store))
        other.set("k", "1")
        assert thread.join() == b"1"
    assert len(warnings(caplog)) == 1
    assert not os.path.exists(path + ".bell.fifo")


def test_fifo_is_removed_with_the_log(path: str, no_instance: None) -> None:
    with FileStore(path, world_size=1, timeout=HANG_S) as store:
        wait_in_vain(store)
        assert os.path.exists(path + ".bell.fifo")
    assert os.listdir(os.path.dirname(path)) == []


def test_handles_that_come_wait_and_go_leave_no_fifo_open(path: str, no_instance: None) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        wait_in_vain(store)
        store.set("k", "1")
        before = len(os.listdir("/proc/self/fd"))
        for number in range(20):
            with FileStore(path, timeout=HANG_S) as other:
                thread = wait_in_thread(other, f"k{number}")
                store.set(f"k{number}", "1")
                thread.join()
            notifier_of(store)._watcher = None  # the next wait makes another
            gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= before


def test_child_waits_at_a_fifo_of_its_own(path: str, no_instance: None, only_rings_wake: None) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        thread = wait_in_thread(store, "for the parent")
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(HANG_S)
                inherited = watcher_of(store)
                getter = start_thread(store.get, "for the child")
                until(lambda: watcher_of(store) is not inherited and sleeping(store))
                source = type(events_of(store)).__name__.encode()
                store.set("the child waits", "1")
                store.set("answer", getter.join() + source)
            finally:
                os._exit(0)
        other.get("the child waits")
        other.set("for the child", "2")
        answer = other.get("answer")
        os.waitpid(child, 0)
        assert answer == b"2FifoSource"
        other.set("for the parent", "1")
        assert thread.join() == b"1"


# The bell of a node


def test_waiters_of_a_node_are_woken_by_the_fifo_beside_its_bell(
    tmp_path: Path, no_instance: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(node_poller, "FALLBACK", str(tmp_path / "node"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(opened, "find_mount", lambda path: mount.Mount("nfs4", str(tmp_path), ("rw",)))
    monkeypatch.setattr(network, "PATH_CHECK_S", math.inf)
    monkeypatch.setattr(system, "O_DIRECT", 0)
    monkeypatch.setattr(log_ticket, "SLOW_LAST_S", 1000.0)
    monkeypatch.setattr(node_waiter, "OWN_POLL_S", 1000.0)
    path = str(tmp_path / "log")
    with FileStore(path, timeout=HANG_S) as afar, FileStore(path, timeout=HANG_S) as store:
        threads = [wait_in_thread(store, f"k{number}", others=number) for number in range(3)]
        assert isinstance(events_of(store), FifoSource)
        for number, thread in enumerate(threads):
            log_of(afar).update(record.SET, b"k%d" % number, b"1", None, HANG_S)  # as another host: no ring
            assert thread.join() == b"1"
    assert warnings(caplog) == []
    (bell, fifo) = sorted((tmp_path / "node").glob("*/*"))
    assert fifo.name == bell.name + ".fifo"


# Many


CROWD = """
import collections, json, logging, os, sys, time
from fscoord import FileStore, barrier
from fscoord._log.wakeup import watcher

path, count, instances, rounds = sys.argv[1], *map(int, sys.argv[2:5])
with open("/proc/sys/user/max_inotify_instances", "w") as file:
    file.write(str(instances))

def work(rank, out):
    watcher.SLOW_FIRST_S = watcher.SLOW_LAST_S = 100.0  # a waiter that is not rung must fail, and not just poll
    said, polls = [], [0]
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("fscoord").addHandler(handler)
    max_sleep = watcher.Waiter.max_sleep

    def counted(self, deadline):
        seconds = max_sleep(self, deadline)
        polls[0] += seconds == 0 and not self.was_rung
        return seconds

    watcher.Waiter.max_sleep = counted
    with FileStore(path, timeout=60) as store:
        for number in range(rounds):
            barrier(store, count, f"b{number}", rank=rank)
            store.get(f"go{number}")
        events = type(store._notifier._watcher._events).__name__
    os.write(out, json.dumps([events, polls[0], said]).encode() + b"\\n")

reader, writer = os.pipe()
children = []
for rank in range(count):
    child = os.fork()
    if child == 0:
        try:
            work(rank, writer)
        finally:
            os._exit(0)
    children.append(child)
os.close(writer)
with FileStore(path, timeout=60) as store:
    for number in range(rounds):
        store.wait([f"b{number}/complete"])
        time.sleep(0.05)  # they all wait
        store.set(f"go{number}", "1")
with open(reader) as file:
    print(json.dumps([json.loads(line) for line in file]))
for child in children:
    os.waitpid(child, 0)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for the limit of a user namespace")
def test_waiters_beyond_the_limit_of_instances_do_not_poll(path: str) -> None:
    """In a user namespace, whose limit can be lowered without anybody else's."""
    root = str(Path(fscoord.__file__).parent.parent)
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", CROWD, path]
    command += map(str, (PROCESSES, INSTANCES, 5))
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == PROCESSES, "a rank failed"
    names = [name for name, _, _ in found]
    assert names.count("Inotify") <= INSTANCES
    assert names.count("Inotify") + names.count("FifoSource") == PROCESSES
    assert [polls for _, polls, _ in found] == [0] * PROCESSES
    assert [said for _, _, said in found] == [[]] * PROCESSES


def test_watch_that_is_used_up_gives_its_instance_back(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may need it: the one without a watch reads the FIFO (fs.inotify.max_user_watches)."""

    def inotify_add_watch(*_: Any) -> int:
        ctypes.set_errno(errno.ENOSPC)
        return -1

    monkeypatch.setattr("watchdog.observers.inotify_c.inotify_add_watch", inotify_add_watch)
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        thread = wait_in_thread(store, "k")
        assert isinstance(events_of(store), FifoSource)
        targets = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and has(fd)]
        assert not any("inotify" in target for target in targets)
        other.set("k", "1")
        assert thread.join() == b"1"


def has(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")
