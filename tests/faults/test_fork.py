"""Forks: by Python and behind its back, of idle handles and of busy, waiting, locking ones."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of, state_of, watcher_of
from support.interrupts import At, interrupt
from support.places import start_thread, wait_in_vain

from fscoord import FileStore
from fscoord._log.locking import kernel_wait as log_line, log_lock, process_mutex as log_shared
from fscoord._log.wakeup import watcher as log_watch
from fscoord._runtime import system
from fscoord.errors import StoreClosedError, StoreGoneError, StoreTimeoutError

HANG_S = 60


def fork_in_c() -> int:
    """fork(2) as a library in C calls it: Python's hooks don't run, and it does not know.

    No other thread may be waiting for the interpreter then, such as that of a pytest-xdist worker: the child would hand
    the interpreter over to a thread that it does not have, and hang. So threads first get it, and then ask no more.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    try:
        time.sleep(2 * interval)  # a thread that began to wait before asks within that time, and is served
        await_other_threads()  # on a busy machine that time may be over before it has run
        return int(ctypes.PyDLL(None).fork())
    finally:
        sys.setswitchinterval(interval)


def await_other_threads() -> None:
    """Return when no other thread has run, or is about to run, since this one let go of the interpreter."""
    deadline = time.monotonic() + HANG_S
    before, runs = None, runs_of_other_threads()
    while runs is None or runs != before:
        assert time.monotonic() < deadline, "another thread runs all the time"
        time.sleep(0.001)
        before, runs = runs, runs_of_other_threads()


def runs_of_other_threads() -> list[str] | None:
    """Return how often each other thread of this process has run; None if one of them runs."""
    found: list[str] = []
    for task in os.listdir("/proc/self/task"):
        if task == str(threading.get_native_id()):
            continue
        try:
            lines = Path(f"/proc/self/task/{task}/status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            return None
        if "State:\tS (sleeping)" not in lines:
            return None
        found += [line for line in lines if "ctxt_switches" in line]
    return found


FORKS = [pytest.param(os.fork, id="os.fork"), pytest.param(fork_in_c, id="fork in C")]
every_fork = pytest.mark.parametrize("fork", FORKS)
every_kernel_kind = pytest.mark.parametrize("lock", ["ofd", "flock"])


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


class SlowOpen(types.ModuleType):
    """In the place of `os` under the package: an open of one path stops when the kernel has opened the file."""

    def __init__(self, path: str) -> None:
        super().__init__("os")
        self._path = path
        self.opened, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str, *given: Any) -> int:
        fd = os.open(path, *given)
        if path == self._path:
            self.opened.set()
            self.go_on.wait(HANG_S)
        return fd


@every_fork
@pytest.mark.parametrize("suffix", ["", ".alive"])
def test_file_that_another_thread_is_opening_is_closed_in_a_child(
    fork: Any, suffix: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its locks would otherwise be held by the child as well, and outlive the parent."""
    with FileStore(path, rank=0) as first, open(path + suffix, "rb") as own:
        slow = SlowOpen(path + suffix)
        monkeypatch.setattr(system, "os", slow)
        with start_thread(lambda: FileStore(path, rank=1).close()) as thread:
            assert slow.opened.wait(HANG_S)
            reader, writer = os.pipe()
            pid = fork()
            if not pid:
                try:
                    system.process_epoch()  # after a fork in C this is the first call
                    names = [name for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
                    kept = [name for name in names if os.readlink(f"/proc/self/fd/{name}") == path + suffix]
                    os.write(writer, " ".join(kept).encode())
                finally:
                    os._exit(0)
            os.close(writer)
            said = os.read(reader, 100).decode()
            os.close(reader)
            os.waitpid(pid, 0)
            slow.go_on.set()
        assert thread.result is None
        assert said == str(own.fileno()), "the program's own descriptor stays, and no other"
        assert path + suffix not in system.opens_under_way.values()
        first.set("k", "v")


class Child:
    """A forked child that calls `function`; `result` waits for it and returns, or raises, what that did.

    It is reaped at the end of the ``with``; should it hang, an alarm ends it.
    """

    def __init__(self, fork: Callable[[], int], function: Callable[..., Any], *arguments: Any) -> None:
        self._reader, writer = os.pipe()
        self.pid = fork()
        if self.pid == 0:
            self._work(writer, function, arguments)
        os.close(writer)

    def _work(self, writer: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(HANG_S)
            try:
                outcome = (True, function(*arguments))
            except BaseException:
                outcome = (False, traceback.format_exc())
            os.write(writer, pickle.dumps(outcome))
        finally:
            os._exit(0)

    def result(self) -> Any:
        ready, _, _ = select.select([self._reader], [], [], 2 * HANG_S)
        packed = os.read(self._reader, 1 << 20) if ready else b""
        assert packed, "the child hangs, or died"
        works, value = pickle.loads(packed)
        assert works, value
        return value

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._reader)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "that never came"
        time.sleep(0.001)


# Use of an inherited handle


@every_fork
@every_kernel_kind
def test_parent_and_child_use_one_handle(path: str, lock: str, fork: Callable[[], int]) -> None:
    def work(store: FileStore) -> dict[str, Any]:
        for _ in range(50):
            store.add("n", 1)
        store.append("text", "child")
        return {"k": store.get("k"), "own": len(log_of(store).handle.owned_fds)}

    with FileStore(path, lock=lock, timeout=HANG_S) as store:
        store.set("k", "before")
        with Child(fork, work, store) as child:
            for _ in range(50):
                store.add("n", 1)
            assert child.result() == {"k": b"before", "own": 2}
        assert store.get("n") == b"100"
        assert store.get("text") == b"child"
        with FileStore(path, lock=lock) as fresh:
            assert fresh.list_keys() == store.list_keys() == ["k", "n", "text"]


@every_fork
def test_child_is_a_session_of_its_own(path: str, fork: Callable[[], int]) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        store.set("k", "parent")
        with Child(fork, store.set, "k", "child") as child:
            child.result()
            store.get("k")
            assert [session.pid for session in log_of(store).table.sessions.values()] == [os.getpid(), child.pid]


@every_fork
def test_child_goes_on_when_its_parent_is_gone(path: str, fork: Callable[[], int]) -> None:
    def parent(store: FileStore) -> None:
        store.set("parent", "1")
        if fork() == 0:
            try:
                signal.alarm(HANG_S)
                store.wait(["the parent is gone"])
                store.set("child", store.get("parent"))
            finally:
                os._exit(0)

    with FileStore(path, timeout=HANG_S) as store:
        with Child(fork, parent, store) as child:
            child.result()
        store.set("the parent is gone", "1")
        assert store.get("child") == b"1"


@every_fork
@every_kernel_kind
@pytest.mark.parametrize("what", ["uses", "closes", "leaves"])
def test_lock_of_the_parent_outlives_anything_its_child_does(
    path: str, lock: str, what: str, fork: Callable[[], int]
) -> None:
    def work(store: FileStore) -> None:
        if what == "uses":
            store.set_timeout(0)
            with pytest.raises(StoreTimeoutError):
                store.set("k", "1")
            store.check(["k"])
        if what == "closes":
            store.close()

    with FileStore(path, lock=lock) as store, FileStore(path, lock=lock, timeout=0) as other:
        kernel = log_of(store).handle.lock
        kernel.try_lock()
        try:
            with Child(fork, work, store) as child:
                child.result()
            with pytest.raises(StoreTimeoutError):
                other.set("k", "1")
        finally:
            kernel.unlock()
        other.set("k", "1")


def test_descriptors_of_a_store_are_not_inherited_by_another_program(path: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with FileStore(path, spill_bytes=128 * 1024) as store, FileStore(path, rank=1) as other:
        store.set("long", b"x" * 200_000)
        store.compact()
        assert len(other.get("long")) == len(store.get("long")) == 200_000
        wait_in_vain(other)
        opened = {int(name) for name in set(os.listdir("/proc/self/fd")) - before}
        found = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in opened if is_open(fd)}
        assert len(found) > 5
        assert any("inotify" in name for name in found.values())
        assert not {fd: name for fd, name in found.items() if os.get_inheritable(fd)}


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:  # it was that of the list itself
        return False
    return True


@every_fork
def test_handle_that_is_closed_is_closed_in_the_child_too(path: str, fork: Callable[[], int]) -> None:
    def work(store: FileStore) -> bool:
        with pytest.raises(StoreClosedError):
            store.set("k", "1")
        return True

    store = FileStore(path)
    store.close()
    with Child(fork, work, store) as child:
        assert child.result()


@every_fork
def test_close_in_the_child_leaves_the_parents_handle_open(path: str, fork: Callable[[], int]) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        store.set("k", "1")
        with Child(fork, store.close) as child:
            child.result()
        store.set("k", "2")
        assert store.get("k") == b"2"


@every_fork
def test_child_of_a_temporary_store_does_not_remove_it(fork: Callable[[], int]) -> None:
    with FileStore(timeout=HANG_S) as store:
        with Child(fork, store.close) as child:
            child.result()
        assert os.path.exists(store.path)
        store.set("k", "1")


@every_fork
def test_child_does_not_make_a_log_again_that_is_gone(path: str, fork: Callable[[], int]) -> None:
    def work(store: FileStore) -> bool:
        os.unlink(path)
        for call in (lambda: store.get("k"), lambda: store.set("k", "1")):
            with pytest.raises(StoreGoneError):
                call()
        return os.path.exists(path)

    with FileStore(path) as store:
        store.set("k", "1")
        with Child(fork, work, store) as child:
            assert child.result() is False


def test_pool_of_forked_workers_shares_an_inherited_handle(path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        store.set("k", "1")
        with multiprocessing.get_context("fork").Pool(3) as pool:
            results = pool.starmap(store_add, [(path, 1)] * 60)
            pool.close()
            pool.join()
        assert sorted(results) == list(range(1, 61))
        assert store.get("n") == b"60"


_inherited: dict[str, FileStore] = {}


def store_add(path: str, amount: int) -> int:
    if path not in _inherited:
        _inherited[path] = FileStore(path, timeout=HANG_S)
    return _inherited[path].add("n", amount)


# Forks at bad moments


class Slow(types.ModuleType):
    """`os`, but the thread that writes stops half-way until it is told to go on."""

    def __init__(self) -> None:
        super().__init__("os")
        self.reached, self.go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: bytes) -> int:
        half = len(data) // 2
        os.write(fd, data[:half])
        self.reached.set()
        assert self.go.wait(HANG_S)
        return half + os.write(fd, data[half:])


@every_fork
@every_kernel_kind
def test_fork_during_an_append_of_another_thread_leaves_the_child_usable(
    path: str, lock: str, fork: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has no such thread: it neither waits for its mutex nor believes its half of a record."""

    def work(store: FileStore) -> Any:
        system.os = os
        store.set_timeout(0.05)
        assert not store.check(["k"])
        with pytest.raises(StoreTimeoutError) as caught:
            store.add("n", 1)
        os.kill(os.getppid(), signal.SIGUSR1)
        store.set_timeout(HANG_S)
        return caught.value.holder, store.add("n", 1), store.get("k")

    slow = Slow()
    before = signal.signal(signal.SIGUSR1, lambda *_: slow.go.set())
    try:
        with FileStore(path, lock=lock, timeout=HANG_S) as store:
            store.set("introduced", "1")
            monkeypatch.setattr(system, "os", slow)
            with start_thread(store.set, "k", "whole"):
                assert slow.reached.wait(HANG_S)
                with Child(fork, work, store) as child:
                    holder, number, value = child.result()
            assert holder == f"{os.uname().nodename}:{os.getpid()}"
            assert (number, value) == (1, b"whole")
            monkeypatch.undo()
            assert store.get("n") == b"1"
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_forks_at_random_while_threads_work_leave_the_children_usable(
    path: str, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Whatever the threads held when the fork came, the child has a handle that works and knows all.

    By Python's fork alone: after one in C beside threads that run, a child may find Python's own lock held for ever.
    """
    done = threading.Event()

    def work(store: FileStore) -> int:
        store.queue_push("children", "1")
        with FileStore(path) as fresh:
            assert fresh.list_keys() == store.list_keys()
            assert len(fresh.get("text")) <= len(store.get("text"))
        return store.add("n", 1)

    def busy(store: FileStore, name: str) -> None:
        while not done.is_set():
            store.set(name, "v" * 100)
            store.append("text", "x")
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], 0.001)

    with FileStore(path, timeout=HANG_S) as store:
        store.append("text", "x")
        threads = [start_thread(busy, store, f"k{number}") for number in range(2)]
        try:
            until(lambda: store.check(["k0", "k1"]))  # no key comes between two looks of a child
            for number in range(scale(25)):
                time.sleep(rng.random() / 500)
                with Child(os.fork, work, store) as child:
                    assert child.result() == number + 1
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert store.queue_len("children") == scale(25)


@every_fork
def test_fork_during_a_request_for_the_lock_does_not_pass_it_to_the_child(
    path: str, fork: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child does not inherit the request: it makes its own, and the parent's is granted to the parent."""

    def work(store: FileStore) -> int:
        assert len(os.listdir("/proc/self/fd")) < 100
        return store.add("n", 1)

    monkeypatch.setattr(log_lock, "NAP_PHASE_S", 0)
    with FileStore(path, timeout=HANG_S) as store, FileStore(path) as other:
        kernel = log_of(other).handle.lock
        kernel.try_lock()
        try:
            with start_thread(store.add, "n", 1) as waiter:
                until(lambda: any(request.fd >= 0 for request in list(log_line._requests.values())))
                with Child(fork, work, store) as child:
                    time.sleep(0)
                    kernel.unlock()
                    assert {child.result(), waiter.join()} == {1, 2}
        finally:
            kernel.unlock()
        assert store.get("n") == b"2"


def test_forked_child_does_not_keep_the_lock_of_a_parent_that_is_killed(path: str) -> None:
    """It closes what it inherited at once, used or not."""

    def parent() -> int:
        store = FileStore(path)
        log_of(store).handle.lock.try_lock()
        pid = os.fork()
        if pid == 0:
            signal.alarm(HANG_S)
            signal.pause()
            os._exit(0)
        return pid

    with FileStore(path, timeout=HANG_S) as store:
        with Child(os.fork, parent) as child:
            orphan = child.result()
        try:
            store.set("k", "1")
        finally:
            os.kill(orphan, signal.SIGKILL)


@every_fork
def test_child_interrupted_anywhere_in_its_first_call_knows_each_record_once(
    path: str, fork: Callable[[], int], rng: random.Random
) -> None:
    """Its handle then knows every record once, not twice and not never. Each third point is tried."""

    def work(store: FileStore, number: int) -> tuple[bool, str]:
        at = At(number, interrupt)
        try:
            with at:
                store.queue_push("q", "child")
        except KeyboardInterrupt:
            pass
        store.set("works", "1")
        with FileStore(store.path) as fresh:
            state, truth = state_of(store), state_of(fresh)
            assert (state.values, state.queues) == (truth.values, truth.queues), at.where
        return at.reached, at.where

    number, reached = rng.randint(-2, 0), True
    while reached:
        number += 3
        with FileStore(f"{path}{number}", timeout=HANG_S) as store:
            for item in range(5):
                store.queue_push("q", str(item))
            with Child(fork, work, store, number) as child:
                reached, _ = child.result()
    assert number > 60


# Forks of processes that wait


@every_fork
def test_fork_of_a_process_that_waits_lets_both_wait_apart(path: str, fork: Callable[[], int]) -> None:
    """Parent and child wait apart: each is woken by its own key, and takes no event from the other."""

    def work(store: FileStore) -> bytes:
        store.set("the child is there", "1")
        return store.get("for the child")

    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        with start_thread(store.get, "for the parent") as waiter:
            until(lambda: watcher_of(store) and watcher_of(store)._sleeping)
            with Child(fork, work, store) as child:
                other.get("the child is there")
                other.set("for the parent", "1")
                assert waiter.join() == b"1"
                other.set("for the child", "2")
                assert child.result() == b"2"
        with start_thread(store.get, "again") as waiter:
            other.set("again", "3")
        assert waiter.result == b"3"


@every_fork
def test_child_reads_no_events_of_its_parent(path: str, fork: Callable[[], int]) -> None:
    def work(store: FileStore) -> list[str]:
        wait_in_vain(store)
        return inotify_instances()

    with FileStore(path, timeout=HANG_S) as store:
        wait_in_vain(store)
        (mine,) = inotify_instances()
        with Child(fork, work, store) as child:
            (theirs,) = child.result()
        assert theirs != "" != mine


def inotify_instances() -> list[str]:
    """The inotify descriptors of this process, and what they watch."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:inotify":
                found.append(Path(f"/proc/self/fdinfo/{name}").read_text())
        except OSError:
            continue
    return found


@pytest.mark.parametrize("module", [log_shared, log_watch], ids=["handles", "watches"])
def test_fork_while_another_thread_has_the_guard_leaves_the_child_usable(module: Any, path: str) -> None:
    """The thread that has the guard is not there in the child, and never gives it back."""
    taken, over = threading.Event(), threading.Event()

    def hold() -> None:
        with module._guard[0]:
            taken.set()
            over.wait(2 * HANG_S)

    def use() -> bytes:
        with FileStore(path, timeout=0.05) as store:
            store.set("k", "v")
            with pytest.raises(StoreTimeoutError):
                store.get("missing")
            return store.get("k")

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert taken.wait(HANG_S)
        with Child(os.fork, use) as child:
            assert child.result() == b"v"
    finally:
        over.set()
        holder.join()
