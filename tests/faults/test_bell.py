"""The bell is only a hint: whatever becomes of it, who waits is woken, and mostly nobody else is."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from watchdog.observers import inotify_c

from fscoord import FileStore, UnsupportedFilesystemError, _system as system
from fscoord._log import watch
from fscoord._log.bell import Bell, bucket
from fscoord._log.file import LogFile

HANG_S = 20


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        yield store


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the slow poll away, as far as these tests can see."""
    monkeypatch.setattr(watch, "SLOW_FIRST_S", HANG_S)
    monkeypatch.setattr(watch, "SLOW_LAST_S", HANG_S)


class Waiter(threading.Thread):
    """A thread in `store.get(key)`, asleep when the constructor returns."""

    def __init__(self, store: FileStore, key: str) -> None:
        super().__init__()
        self.store, self.key, self.value, self.took = store, key, b"", 0.0
        before = self.sleepers()
        self.start()
        until(lambda: self.sleepers() > before)

    def sleepers(self) -> int:
        found = self.store._waiting._watch
        return 0 if found is None else len(found._asleep)

    def run(self) -> None:
        start = time.monotonic()
        self.value = self.store.get(self.key)
        self.took = time.monotonic() - start

    def result(self) -> bytes:
        self.join(HANG_S)
        assert not self.is_alive()
        return self.value


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < limit, "it never came to that"
        time.sleep(0.001)


def apart(count: int) -> list[str]:
    """Return `count` keys with buckets of their own."""
    keys = {bucket(f"key{i}".encode()): f"key{i}" for i in range(4 * count)}
    return list(keys.values())[:count]


def test_of_many_waiters_each_write_wakes_the_one_it_is_for(
    store: FileStore, no_poll: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = apart(32)
    waiters = [Waiter(store, key) for key in keys]
    looks = 0
    refresh = LogFile.refresh

    def count(self: LogFile, limit: float) -> None:
        nonlocal looks
        looks += 1
        refresh(self, limit)

    monkeypatch.setattr(LogFile, "refresh", count)
    for key, waiter in zip(keys, waiters, strict=True):
        store.set(key, f"for {key}")
        assert waiter.result() == f"for {key}".encode()
    assert looks <= 2 * len(keys)  # it would be 32 * 33 / 2 if every write woke all who are left


def test_when_the_thread_that_listens_leaves_another_takes_over(store: FileStore, no_poll: None) -> None:
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        keys = [f"{order}{i}" for i in range(3)]
        waiters = [Waiter(store, key) for key in keys]
        for index in order:
            store.set(keys[index], "1")
            assert waiters[index].result() == b"1"


def test_several_handles_of_a_process_share_one_inotify_instance(store: FileStore, no_poll: None) -> None:
    twins = [store.clone() for _ in range(3)]
    waiters = [Waiter(twin, f"k{i}") for i, twin in enumerate(twins)]
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert sum("anon_inode:inotify" in link for link in links) == 1
    for i, waiter in enumerate(waiters):
        store.set(f"k{i}", "1")
        assert waiter.result() == b"1"
    for twin in twins:
        twin.close()


def test_who_wakes_first_does_not_hide_the_ring_from_the_others(store: FileStore, no_poll: None) -> None:
    twins = [store.clone() for _ in range(4)]
    waiters = [Waiter(twin, "k") for twin in twins]
    store.set("k", "v")
    assert [waiter.result() for waiter in waiters] == [b"v"] * 4
    for twin in twins:
        twin.close()


@pytest.mark.parametrize("damage", ["delete", "truncate", "replace"])
def test_a_bell_that_is_damaged_under_a_waiter_costs_a_slow_poll_at_most(store: FileStore, damage: str) -> None:
    bell = Path(store.path + ".bell")
    waiter = Waiter(store, "k")
    if damage == "delete":
        bell.unlink()
    elif damage == "truncate":
        os.truncate(bell, 0)
    else:
        bell.with_suffix(".other").write_bytes(b"")
        bell.with_suffix(".other").replace(bell)
    with store.clone() as other:
        other.set("k", "v")
    assert waiter.result() == b"v"
    waiter = Waiter(store, "again")
    store.set("again", "v")
    assert waiter.result() == b"v"


def test_a_bell_that_was_deleted_is_made_again_and_rung_again(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    bell = Path(store.path + ".bell")
    waiter = Waiter(store, "k")
    bell.unlink()
    until(bell.exists)  # a slow poll has found it missing
    monkeypatch.setattr(watch, "SLOW_FIRST_S", HANG_S)
    second = Waiter(store, "second")
    with store.clone() as other:
        other.set("second", "v")
        assert second.result() == b"v"
        other.set("k", "v")
    assert waiter.result() == b"v"


def test_a_link_in_the_place_of_the_bell_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, no_poll: None
) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "store.bell").symlink_to(target)
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        for key in ("one", "two"):
            waiter = Waiter(store, key)
            store.set(key, "v")  # the log itself is watched instead
            assert waiter.result() == b"v"
    assert target.read_bytes() == b"precious"
    assert [record.levelname for record in caplog.records if ".bell" in record.getMessage()] == ["WARNING"]


def test_a_writer_that_dies_between_clearing_a_mark_and_ringing_is_made_up_for(store: FileStore) -> None:
    waiter = Waiter(store, "k")
    code = """
import os, signal, sys
os.utime = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
import fscoord
fscoord.FileStore(sys.argv[1]).set("k", "v")
"""
    dead = subprocess.run([sys.executable, "-c", code, store.path], timeout=HANG_S, check=False)
    assert dead.returncode == -9
    assert waiter.result() == b"v"
    waiter = Waiter(store, "next")
    store.set("next", "v")
    assert waiter.result() == b"v"


def test_without_space_for_a_mark_waiting_goes_on_by_polling(
    store: FileStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Bell, number: int) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Bell, "mark", full)
    thread = threading.Timer(0.2, store.set, ("k", "v"))
    thread.start()
    assert store.get("k") == b"v"
    thread.join()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_lost_ring_costs_a_slow_poll_at_most(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bell, "ring", lambda self, number: None)
    waiter = Waiter(store, "k")
    store.set("k", "v")
    assert waiter.result() == b"v"


def test_without_inotify_instances_polling_goes_on_with_one_warning(
    store: FileStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> int:
        ctypes.set_errno(errno.EMFILE)
        return -1

    monkeypatch.setattr(inotify_c, "inotify_init", none_left)
    for key in ("one", "two"):
        thread = threading.Timer(0.1, store.set, (key, "v"))
        thread.start()
        assert store.get(key) == b"v"
        thread.join()
    assert len([record for record in caplog.records if "max_user_instances" in record.getMessage()]) == 1


def test_inotify_that_was_demanded_and_is_not_there_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "has_inotify", lambda: False)
    with FileStore(tmp_path / "store", watch="inotify") as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
        with pytest.raises(UnsupportedFilesystemError, match="pass watch='poll' or watch='auto'"):
            store.wait(["missing"], 5)


def test_elsewhere_than_on_linux_an_observer_wakes_who_waits(
    store: FileStore, no_poll: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "has_inotify", lambda: False)
    for key in ("one", "two"):
        waiter = Waiter(store, key)
        assert isinstance(store._waiting._watch._events, system.Observed)
        with store.clone() as other:
            other.set(key, "v")
        assert waiter.result() == b"v"


def test_polling_finds_what_nobody_rang_for(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", watch="poll", timeout=HANG_S) as store:
        waiter = Waiter(store, "k")
        store.set("k", "v")
        assert waiter.result() == b"v"
    assert {path.name for path in tmp_path.iterdir()} == {"store"}


def test_a_read_only_waiter_is_woken_without_a_bell(tmp_path: Path, no_poll: None) -> None:
    with (
        FileStore(tmp_path / "store") as writer,
        FileStore(tmp_path / "store", read_only=True, timeout=HANG_S) as reader,
    ):
        waiter = Waiter(reader, "k")
        assert {path.name for path in tmp_path.iterdir()} == {"store"}
        writer.set("k", "v")
        assert waiter.result() == b"v"


def test_an_idle_waiter_uses_no_processor_time_to_speak_of(store: FileStore) -> None:
    code = """
import fscoord, resource, sys
store = fscoord.FileStore(sys.argv[1])
def wait(seconds):
    try:
        store.wait(["never"], seconds)
    except TimeoutError:
        pass
wait(0.01)
before = resource.getrusage(resource.RUSAGE_SELF)
wait(2)
after = resource.getrusage(resource.RUSAGE_SELF)
print(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
"""
    out = subprocess.run(
        [sys.executable, "-c", code, store.path], timeout=HANG_S, check=True, capture_output=True, text=True
    )
    assert float(out.stdout) < 0.02, "an hundredth of a core; the budget, a thousandth, is under the clock's grain"
