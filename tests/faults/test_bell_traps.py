"""Traps of waiting: bells that are full, cut, gone, foreign or not rung, and waiters that come, go and are many."""

from __future__ import annotations

import errno
import gc
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.holder import Holder
from support.disks import fill
from support.faulty import faulty_os
from support.internals import log_of, notifier_of, watcher_of
from support.places import Thread, start_thread, wait_in_vain
from support.processes import TESTS

import fscoord
from fscoord import FileStore
from fscoord._log.log import Log
from fscoord._log.wakeup import watcher as log_watch
from fscoord._log.wakeup.doorbell import Doorbell, bucket
from fscoord._log.wakeup.watcher import Waiter
from fscoord._runtime import file_events, system
from fscoord.errors import StoreClosedError, StoreTimeoutError, UnsupportedFilesystemError
from fscoord.stores.file import notifier

HANG_S = 60


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def only_rings_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slow poll helps: a ring that is lost is a test that hangs. Nor is one needed to announce the bell later."""
    for name in ("SLOW_FIRST_S", "SLOW_LAST_S"):
        monkeypatch.setattr(log_watch, name, 3 * HANG_S)
    monkeypatch.setattr(notifier, "ANNOUNCE_S", 3 * HANG_S)


@pytest.fixture
def no_inotify(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a platform that has none: watchdog's `Observer` is used."""
    monkeypatch.setattr(system, "has_inotify", lambda: False)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "that never came"
        time.sleep(0.001)


def asleep(store: FileStore) -> int:
    """Count the threads of this process that sleep on what `store` watches."""
    watch = watcher_of(store)
    return 0 if watch is None else len(watch._sleeping)


def wait_in_thread(store: FileStore, key: str, others: int = 0) -> Thread:
    """Start a thread that waits for `key`, and return when it sleeps beside so many others."""
    thread = start_thread(store.get, key)
    until(lambda: asleep(store) > others or not thread.is_alive())
    return thread


def is_woken_by_a_ring(path: str, store: FileStore) -> None:
    with FileStore(path, timeout=HANG_S) as other:
        waiter = wait_in_thread(store, "ring")
        other.set("ring", "1")
        assert waiter.join() == b"1"
        other.delete_key("ring")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# Bells that can't be had


def make_link(bell: Path) -> None:
    bell.with_name("target").write_bytes(bytes(4096))
    bell.symlink_to("target")


def make_foreign(bell: Path) -> None:
    bell.write_bytes(bytes(4096))
    os.chown(bell, 65534, 65534)


def make_writable(bell: Path) -> None:
    bell.write_bytes(bytes(4096))
    bell.chmod(0o666)


def make_linked(bell: Path) -> None:
    bell.write_bytes(bytes(4096))
    bell.with_name("another name").hardlink_to(bell)


STRANGE = {
    "a symbolic link": make_link,
    "another's": make_foreign,
    "open to all": make_writable,
    "known by two names": make_linked,
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
}


@pytest.mark.parametrize("what", STRANGE)
def test_bell_of_a_foreign_kind_or_owner_is_left_alone(
    path: str, what: str, caplog: pytest.LogCaptureFixture, only_rings_wake: None
) -> None:
    """Waiters watch the log itself then; each handle that would have rung, or marked, says so once."""
    if what == "another's" and os.geteuid() != 0:
        pytest.skip("needs root, to give a file away")
    bell = Path(path + ".bell")
    STRANGE[what](bell)
    before = bell.lstat()
    with FileStore(path, timeout=HANG_S) as store:
        for _ in range(2):
            is_woken_by_a_ring(path, store)
        assert len(warnings(caplog)) == 1
        assert "waits continue" in warnings(caplog)[0]
    after = bell.lstat()
    assert (after.st_ino, after.st_mode, after.st_mtime_ns) == (before.st_ino, before.st_mode, before.st_mtime_ns)
    if stat.S_ISREG(after.st_mode):
        assert bell.read_bytes() == bytes(4096)


def test_bell_without_room_on_the_disk_is_done_without(
    small_disk: Path, caplog: pytest.LogCaptureFixture, only_rings_wake: None
) -> None:
    path = str(small_disk / "store")
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        store.set("k", "1")
        fill(small_disk)
        waiter = wait_in_thread(store, "more")
        assert len(warnings(caplog)) == 1
        assert "No space left" in warnings(caplog)[0]
        assert sorted(os.listdir(small_disk)) == ["ballast", "store", "store.alive"]
        other.set("more", "1")  # it fits in the last page of the log
        assert waiter.join() == b"1"
        other.set("more", b"x" * 1000)


def test_bell_that_was_truncated_on_a_full_disk_is_done_without(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A mark needs a page then that is not there; through a mapping it would kill the process."""
    path = str(small_disk / "store")
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        is_woken_by_a_ring(path, store)
        os.truncate(path + ".bell", 0)
        fill(small_disk)
        with start_thread(store.get, "more") as waiter:
            until(lambda: warnings(caplog))
            other.set("more", "1")
        assert waiter.result == b"1"
        assert len(warnings(caplog)) == 1
        assert "No space left" in warnings(caplog)[0]


@pytest.mark.parametrize(("name", "number"), [("pwrite", 0), ("pwrite", 1), ("pread", 0), ("pread", 1), ("utime", 0)])
def test_bell_that_fails_is_done_without(path: str, name: str, number: int, caplog: pytest.LogCaptureFixture) -> None:
    """On either side; the write that would have rung has succeeded."""
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        is_woken_by_a_ring(path, store)
        other.set("introduced", "1")
        with faulty_os() as faulty, faulty.fail(number, errno.EIO, names=(name,), for_good=True):
            waiter = start_thread(store.get, "k")
            until(lambda: warnings(caplog) or asleep(store))
            other.set("k", "1")
            assert waiter.join() == b"1"
            other.set("k", "2")
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], 0.01)
        assert 1 <= len(warnings(caplog)) <= 2
        for message in warnings(caplog):
            assert "store.bell can't be used" in message
            assert "waits continue" in message


def test_waiter_without_an_inotify_instance_is_still_woken(path: str, caplog: pytest.LogCaptureFixture) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        store.set("k", "1")
        is_woken_by_a_ring(path, other)  # loads what is loaded at the first wait
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        notifier_of(other)._watcher = None
        notifier_of(other)._spare.clear()
        gc.collect()
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 2, limits[1]))
        try:
            keep = fill_gaps(highest - 1)
            try:
                waiter = start_thread(store.get, "later")
                until(lambda: warnings(caplog))
            finally:
                for descriptor in keep:
                    os.close(descriptor)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        other.set("later", "1")
        assert waiter.join() == b"1"
        for _ in range(3):
            with pytest.raises(StoreTimeoutError):
                store.wait(["never"], 0.01)
        (message,) = warnings(caplog)
        assert "polling instead" in message


def fill_gaps(highest: int) -> list[int]:
    """Leave no descriptor free up to this number."""
    taken = []
    while True:
        descriptor = os.open("/dev/null", os.O_RDONLY)
        taken.append(descriptor)
        if descriptor >= highest:
            os.close(taken.pop())
            return taken


# Bells that change while somebody waits


def test_bell_that_is_truncated_while_a_waiter_sleeps_still_wakes_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        waiter = wait_in_thread(store, "k")
        os.truncate(path + ".bell", 0)
        other.set("k", "1")
        assert waiter.join() == b"1"
        for name in ("SLOW_FIRST_S", "SLOW_LAST_S"):
            monkeypatch.setattr(log_watch, name, 3 * HANG_S)
        is_woken_by_a_ring(path, store)


def test_bell_that_is_truncated_over_and_over_costs_no_more_than_polls(path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        waiter = wait_in_thread(store, "k")
        looks = count_looks(store)
        os.truncate(path + ".bell", 0)
        with pytest.raises(StoreTimeoutError):
            FileStore(path).wait(["never"], 0.5)
        assert len(looks) < 20
        store.set("k", "1")
        waiter.join()


def count_looks(store: FileStore) -> list[float]:
    """Return a list that grows with every look of `store` at the log."""
    looks: list[float] = []
    refresh = log_of(store).refresh

    def look(limit: float) -> None:
        looks.append(limit)
        refresh(limit)

    log_of(store).refresh = look  # type: ignore[method-assign]
    return looks


def test_bell_that_is_deleted_while_a_waiter_sleeps_is_made_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiter makes another one at its next slow poll, and tells the writers."""
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        waiter = wait_in_thread(store, "k")
        assert other.num_keys() == 0
        assert log_of(other).handle.bell == 1
        os.unlink(path + ".bell")
        until(lambda: os.path.exists(path + ".bell"))
        until(lambda: other.num_keys() == 0 and log_of(other).handle.bell == 2)
        for name in ("SLOW_FIRST_S", "SLOW_LAST_S"):
            monkeypatch.setattr(log_watch, name, 3 * HANG_S)
        other.set("k", "1")
        assert waiter.join() == b"1"
        is_woken_by_a_ring(path, store)


def test_bell_that_is_deleted_before_the_next_wait_is_made_again(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        is_woken_by_a_ring(path, store)
        os.unlink(path + ".bell")
        waiter = start_thread(store.get, "k")
        until(lambda: other.num_keys() == 0 and log_of(other).handle.bell == 2)
        for name in ("SLOW_FIRST_S", "SLOW_LAST_S"):
            monkeypatch.setattr(log_watch, name, 3 * HANG_S)
        other.set("k", "1")
        assert waiter.join() == b"1"


# Rings that do not come

KILLED_RINGER = """
import os, signal, sys
from support.faulty import faulty_os
from fscoord import FileStore

store = FileStore(sys.argv[1], timeout=60)
with faulty_os() as faulty:
    def die(name, *_):
        if name == "utime":
            os.kill(os.getpid(), signal.SIGKILL)
    with faulty.instead(die):
        store.set("k", "1")
"""


def test_waiter_is_woken_though_the_writer_was_killed_before_it_rang(path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        waiter = wait_in_thread(store, "k")
        root = str(Path(fscoord.__file__).parent.parent)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(TESTS)])}
        done = subprocess.run([sys.executable, "-c", KILLED_RINGER, path], env=environment, timeout=HANG_S)
        assert done.returncode == -signal.SIGKILL
        assert waiter.join() == b"1"


def test_ring_that_is_lost_costs_a_slow_poll(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        waiter = wait_in_thread(store, "k")
        monkeypatch.setattr(Doorbell, "ring", lambda *_: None)
        other.set("k", "1")
        assert waiter.join() == b"1"


def test_wait_marks_its_other_key_if_one_came_between_look_and_mark(
    path: str, monkeypatch: pytest.MonkeyPatch, only_rings_wake: None
) -> None:
    """The wait then marks the other key that it lacks, before it sleeps."""
    arm = Waiter.arm
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:

        def arm_late(ticket: Waiter, number: int) -> None:
            monkeypatch.setattr(Waiter, "arm", arm)
            other.set("a", "1")
            arm(ticket, number)

        monkeypatch.setattr(Waiter, "arm", arm_late)
        waiter = start_thread(store.wait, ["a", "b"])
        until(lambda: asleep(store))
        other.set("b", "1")
        waiter.join()


def test_key_that_comes_just_before_the_mark_is_seen_by_the_look_behind_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arm = Waiter.arm
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:

        def arm_late(ticket: Waiter, number: int) -> None:
            other.set("a", "1")
            arm(ticket, number)

        monkeypatch.setattr(Waiter, "arm", arm_late)
        monkeypatch.setattr(Waiter, "max_sleep", lambda *_: pytest.fail("it sleeps, though what it waits for is there"))
        assert store.get("a") == b"1"


def test_bell_is_announced_as_soon_as_a_stopped_holder_goes_on(path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other, Holder(path) as holder:
        waiter = wait_in_thread(store, "k")
        assert other.num_keys() == 1
        assert log_of(other).handle.bell == 0
        holder.finish()
        until(lambda: other.num_keys() and log_of(other).handle.bell)
        assert log_of(other).handle.bell == 1
        other.set("k", "1")
        assert waiter.join() == b"1"


# Many waiters


@pytest.mark.parametrize("handles", [1, 4])
def test_listener_may_leave_and_another_takes_over(path: str, handles: int, only_rings_wake: None) -> None:
    """Threads on one handle, or on several, are woken one after the other in any order."""
    with FileStore(path, timeout=HANG_S) as other:
        stores = [FileStore(path, timeout=2 * HANG_S) for _ in range(handles)]
        for order in (range(8), reversed(range(8)), [3, 1, 4, 0, 5, 2, 7, 6]):
            waiters = []
            for number in range(8):
                waiters.append(wait_in_thread(stores[number % handles], f"k{number}", others=number))
            for number in order:
                other.set(f"k{number}", "1")
                assert waiters[number].join() == b"1"
            for number in range(8):
                other.delete_key(f"k{number}")
        for store in stores:
            store.close()


def test_listener_may_time_out_and_another_takes_over(path: str, only_rings_wake: None) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        hasty = start_thread(times_out, lambda: store.wait(["never"], 0.1))
        until(lambda: asleep(store) or not hasty.is_alive())
        waiters = [wait_in_thread(store, f"k{number}", others=number) for number in range(3)]
        hasty.join()
        for number, waiter in enumerate(waiters):
            other.set(f"k{number}", "1")
            assert waiter.join() == b"1"


def times_out(call: Callable[[], object]) -> None:
    with pytest.raises(StoreTimeoutError):
        call()


@pytest.mark.usefixtures("no_ctrl_c_is_lost")
def test_listener_may_be_interrupted_and_another_takes_over(path: str, only_rings_wake: None) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        waiters: list[Thread] = []

        def disturb() -> None:
            until(lambda: asleep(store))
            waiters.extend(wait_in_thread(store, f"k{number}", others=number + 1) for number in range(3))
            os.kill(os.getpid(), signal.SIGINT)

        with start_thread(disturb), pytest.raises(KeyboardInterrupt):
            store.get("never")
        for number, waiter in enumerate(waiters):
            other.set(f"k{number}", "1")
            assert waiter.join() == b"1"


def test_waiters_for_one_key_are_all_woken(path: str, only_rings_wake: None) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        waiters = [wait_in_thread((store, other)[number % 2], "k", others=number) for number in range(16)]
        store.set("k", "1")
        assert [waiter.join() for waiter in waiters] == [b"1"] * 16


def keys_apart(count: int) -> list[str]:
    """As many keys, no two of which share a bucket."""
    keys: dict[int, str] = {}
    number = 0
    while len(keys) < count:
        keys.setdefault(bucket(str(number).encode()), str(number))
        number += 1
    return list(keys.values())


def test_write_wakes_none_but_the_waiters_for_its_key(
    path: str, monkeypatch: pytest.MonkeyPatch, only_rings_wake: None
) -> None:
    """32 threads wait for 32 keys, which are set one by one: each looks at the log about once more, not 32 times."""
    keys = keys_apart(32)
    looks: list[int] = []
    refresh = Log.refresh

    def count(log: Log, limit: float) -> None:
        looks.append(threading.get_ident())
        refresh(log, limit)

    with FileStore(path, timeout=2 * HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        waiters = [wait_in_thread(store, key, others=number) for number, key in enumerate(keys)]
        monkeypatch.setattr(Log, "refresh", count)
        for key, waiter in zip(keys, waiters, strict=True):
            other.set(key, "1")
            assert waiter.join() == b"1"
        assert 32 <= len(looks) <= 64


WAITERS = """
import sys, threading
from fscoord import FileStore
from fscoord._log.wakeup import watcher
from fscoord._log.log import Log
from fscoord.stores.file import notifier, waits

watcher.SLOW_FIRST_S = watcher.SLOW_LAST_S = notifier.ANNOUNCE_S = 60
path, *keys = sys.argv[1:]
looks, refresh = [], Log.refresh


def count(log, limit):
    looks.append(limit)
    refresh(log, limit)


store = FileStore(path, timeout=60)
threads = [threading.Thread(target=store.get, args=(key,)) for key in keys]
for thread in threads:
    thread.start()
while store._notifier._watcher is None or len(store._notifier._watcher._sleeping) < len(keys):
    pass
Log.refresh = count
print("ready", flush=True)
for thread in threads:
    thread.join()
print(len(looks), flush=True)
"""


def test_write_wakes_none_but_the_waiters_for_its_key_in_other_processes(path: str) -> None:
    """The same with four processes of eight threads."""
    keys = keys_apart(32)
    environment = os.environ | {"PYTHONPATH": str(Path(fscoord.__file__).parent.parent)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WAITERS, path, *keys[first::4]], stdout=subprocess.PIPE, text=True, env=environment
        )
        for first in range(4)
    ]
    try:
        with FileStore(path, timeout=HANG_S) as store:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for key in keys:
                store.set(key, "1")
            looks = [int(process.communicate(timeout=HANG_S)[0]) for process in processes]
        assert 32 <= sum(looks) <= 64
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# Other ways to wait


def test_watch_by_polling_sees_a_write_without_making_a_bell(path: str) -> None:
    with FileStore(path, timeout=HANG_S, watch="poll") as store, FileStore(path, timeout=HANG_S) as other:
        waiter = wait_in_thread(store, "k")
        watch = watcher_of(store)
        assert watch is not None
        assert not watch.has_events
        assert os.listdir(os.path.dirname(path)) == ["store"]
        other.set("k", "1")
        assert waiter.join() == b"1"


@pytest.mark.parametrize("lock", ["ofd", "flock", "soft"])
def test_reader_waits_without_writing_anything(path: str, lock: str, only_rings_wake: None) -> None:
    with FileStore(path, lock=lock, timeout=HANG_S) as store:
        store.set("k", "1")
        size = os.path.getsize(path)
        with FileStore(path, read_only=True, timeout=HANG_S) as reader:
            waiter = wait_in_thread(reader, "more")
            assert os.path.getsize(path) == size
            assert not os.path.exists(path + ".bell")
            store.set("other", "1")
            until(lambda: asleep(reader))
            store.set("more", "1")
            assert waiter.join() == b"1"


def test_watch_by_inotify_is_an_error_where_there_is_none(path: str, no_inotify: None) -> None:
    with FileStore(path, timeout=HANG_S, watch="inotify") as store:
        store.set("k", "1")
        with pytest.raises(UnsupportedFilesystemError, match="watch='poll'"):
            store.get("never")


def test_watch_by_inotify_is_an_error_where_the_system_refuses_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(file_events, "watch_file", refuse)
    Path(path + ".bell.fifo").mkdir()  # a FIFO would be in the place of inotify
    with (
        FileStore(path, timeout=HANG_S, watch="inotify") as store,
        pytest.raises(UnsupportedFilesystemError, match=r"Too many open files.*store\.bell\.fifo"),
    ):
        store.get("never")


def test_observer_wakes_where_there_is_no_inotify(path: str, no_inotify: None, only_rings_wake: None) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        for number in range(3):
            waiters = [wait_in_thread((store, other)[i % 2], f"k{number}", others=i) for i in range(4)]
            other.set(f"k{number}", "1")
            assert [waiter.join() for waiter in waiters] == [b"1"] * 4
        assert not os.path.exists(path + ".bell")


def test_observer_ends_with_the_last_handle(path: str, no_inotify: None) -> None:
    threads = set(threading.enumerate())
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        for handle in (store, other):
            wait_in_vain(handle)
        started = set(threading.enumerate()) - threads
        assert started
    for thread in started:
        thread.join(HANG_S)
        assert not thread.is_alive()


def test_forked_child_waits_without_the_observer_of_its_parent(path: str, no_inotify: None) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        wait_in_vain(store)
        pid = os.fork()
        if pid == 0:
            try:
                signal.alarm(HANG_S)
                store.set_timeout(0.05)
                try:
                    store.get("never")
                except StoreTimeoutError:
                    store.set("the child", "works")
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert store.get("the child") == b"works"
        is_woken_by_a_ring(path, store)


def test_ring_that_another_takes_before_this_thread_listens_is_not_lost(path: str, only_rings_wake: None) -> None:
    """The other leaves right after it, and this thread takes its place; nothing would come after that."""

    class Ears:
        def acquire(self, *, blocking: bool) -> bool:
            watch._reader_mutex = ears
            other.set("k", "1")
            assert watch._events.wait(HANG_S)
            watch._dispatch(watch._events)
            return bool(ears.acquire(blocking=blocking))

    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(store)
        watch: Any = watcher_of(store)
        ears = watch._reader_mutex
        watch._reader_mutex = Ears()
        assert start_thread(store.get, "k").join() == b"1"


def test_write_rings_while_another_thread_opens_the_bell_of_their_handle(
    path: str, monkeypatch: pytest.MonkeyPatch, only_rings_wake: None
) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        waiter = wait_in_thread(other, "k")
        notifier, opened = notifier_of(store), list[bool]()
        open_bell = notifier.open_bell

        def open_and_let_another_write() -> Doorbell | None:
            opened.append(True)
            if len(opened) == 1:
                start_thread(store.set, "k", "1").join()
            return open_bell()

        monkeypatch.setattr(notifier, "open_bell", open_and_let_another_write)
        store.set("another", "1")
        started = time.monotonic()
        assert waiter.join() == b"1"
        assert time.monotonic() - started < HANG_S / 2, "its deadline ended the wait"


# Ends


@pytest.mark.parametrize("way", ["bell", "log", "observer", "poll"])
def test_close_ends_the_waits_of_other_threads(
    path: str, way: str, monkeypatch: pytest.MonkeyPatch, only_rings_wake: None
) -> None:
    """At once; and those of other handles on the same log go on."""
    if way == "observer":
        monkeypatch.setattr(system, "has_inotify", lambda: False)
    monkeypatch.setattr(log_watch, "POLL_LAST_S", 3 * HANG_S)
    options: dict[str, Any] = {"read_only": way == "log", "watch": "poll" if way == "poll" else "auto"}
    with FileStore(path, timeout=HANG_S) as other:
        other.set("there", "1")
        store = FileStore(path, timeout=HANG_S, **options)
        elsewhere = wait_in_thread(other, "k")
        waiters = [start_thread(store.get, "k") for _ in range(3)]
        until(lambda: asleep(store) >= 3)
        store.close()
        for waiter in waiters:
            with pytest.raises(StoreClosedError):
                waiter.join()
        assert elsewhere.is_alive()
        other.set("k", "1")
        assert elsewhere.join() == b"1"
    del waiter, waiters  # their errors, whose tracebacks keep what the waits used
    gc.collect()


def test_handles_that_come_wait_and_go_leave_nothing_open(path: str) -> None:
    with FileStore(path, timeout=HANG_S) as store:
        wait_in_vain(store)
        store.set("k", "1")
        before = len(os.listdir("/proc/self/fd"))
        for number in range(30):
            with FileStore(path, timeout=HANG_S) as other:
                waiter = wait_in_thread(other, f"k{number}", others=0)
                store.set(f"k{number}", "1")
                waiter.join()
            abandoned = FileStore(path)
            with pytest.raises(StoreTimeoutError):
                abandoned.wait(["never"], 0.001)
            del abandoned
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


IDLE = """
import resource, sys
from fscoord import FileStore

def wait(limit):
    try:
        store.wait(["never"], limit)
    except TimeoutError:
        pass

path, watch, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
store = FileStore(path, watch=watch)
limit = 0.3
while store._notifier._watcher is None or not store._notifier._watcher.is_announced:  # it imports, opens and announces
    wait(limit)
    limit *= 2
before = resource.getrusage(resource.RUSAGE_SELF)
wait(seconds)
after = resource.getrusage(resource.RUSAGE_SELF)
print((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / seconds)
"""


def test_waiter_that_is_idle_uses_next_to_no_processor(path: str, record_property: Any) -> None:
    """The promise is 0.1 %; on a busy machine even that little may be measured as more."""
    environment = os.environ | {"PYTHONPATH": str(Path(fscoord.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", IDLE, path, "auto", "2"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=HANG_S,
        check=True,
    )
    share = float(done.stdout)
    record_property("percent of a processor", 100 * share)
    assert share < 0.01


def test_writes_all_ring_for_their_keys_if_and_only_if_there_is_a_bell(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rung: list[list[bytes]] = []
    with FileStore(path) as store, FileStore(path) as waiter:
        monkeypatch.setattr(notifier_of(store), "notify", lambda names: rung.append(list(names)))

        def write_all() -> None:
            store.set("a", "1")
            store.add("b", 1)
            store.compare_set("c", "", "1")
            store.append("d", "1")
            store.multi_set(["e", "f"], ["1", "2"])
            store.queue_push("g", "1")
            store.queue_pop("g")
            store.delete_key("a")
            store.multi_set([], [])

        write_all()
        assert (log_of(store).handle.bell, rung) == (0, [])
        with start_thread(waiter.get, "awaited") as thread:
            until(lambda: asleep(waiter))
            until(lambda: store.check(["never"]) or log_of(store).handle.bell)
            write_all()
            waiter.set("awaited", "1")
        assert thread.result == b"1"
    assert [names for names in rung if names != [b"g"]] == [[b"a"], [b"b"], [b"c"], [b"d"], [b"e", b"f"], [b"a"]]
    assert [b"g"] in rung
