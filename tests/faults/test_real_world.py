"""Faults that the tests cause in earnest: by mounts, limits, clocks and other programs in the same process."""

from __future__ import annotations

import errno
import fcntl
import gc
import importlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.faulty import faulty_os, faulty_system
from support.internals import log_of, watcher_of
from support.places import Thread, wait_in_vain
from support.plain_reader import read_log
from support.processes import stop

import fscoord
from fscoord import FileStore, FscoordError, StoreTimeoutError, StoreUnavailableError, UnsupportedFilesystemError
from fscoord._runtime import file_events, system

HANG_S = 60
DAY_S = 86_400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


# -- mounts ------------------------------------------------------------------------------------------------------------


@contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    directory.mkdir()
    subprocess.run(["mount", *arguments, str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def remount(directory: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(directory)], check=True)


@pytest.fixture
def needs_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")


def test_log_on_a_file_system_remounted_read_only_can_be_read(needs_root: None, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "tmpfs") as disk:
        with FileStore(disk / "store") as store:
            store.set("k", "v")
        remount(disk, "ro")
        with pytest.raises(StoreUnavailableError, match="read_only=True") as caught:
            FileStore(disk / "store")
        assert caught.value.errno == errno.EROFS
        with pytest.raises(StoreUnavailableError, match="Read-only file system"):
            FileStore(disk / "another")
        with FileStore(disk / "store", read_only=True) as reader:
            assert reader.get("k") == b"v"
            with pytest.raises(StoreTimeoutError):
                reader.wait(["never"], 0.01)
            assert [member.number for member in reader.members()] == [1]
            remount(disk, "rw")
            with FileStore(disk / "store") as store:
                store.set("k", "w")
            assert reader.get("k") == b"w"


def test_log_is_one_under_two_mounts(needs_root: None, tmp_path: Path) -> None:
    """A bind mount cannot be told from another name of the directory, and need not be: the file is the same."""
    (tmp_path / "here").mkdir()
    with (
        mounted(tmp_path / "there", "--bind", str(tmp_path / "here")) as there,
        FileStore(tmp_path / "here" / "store") as one,
        FileStore(there / "store", timeout=HANG_S) as other,
    ):
        with Thread(other.get, "k") as waiting:
            one.set("k", "v")
            assert waiting.join() == b"v"
        one.compact()
        assert other.add("n", 1) == 1
        assert one.add("n", 1) == 2
        assert [member.alive for member in other.members()] == ["yes", "yes"]


# -- limits ------------------------------------------------------------------------------------------------------------


def dup_until_it_fails() -> Iterator[int]:
    while True:
        try:
            yield os.dup(0)
        except OSError as error:
            assert error.errno == errno.EMFILE
            return


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers: list[int] = []
    gc.collect()  # and no more until the end: what is thrown away may give a descriptor back
    gc.disable()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 2, limits[1]))
    try:
        fillers.extend(dup_until_it_fails())
        yield
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gc.enable()


def test_store_goes_on_if_no_descriptor_is_left_and_another_fails_at_once(path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        with no_descriptor_left():
            for place in (path, path.with_name("another")):
                with pytest.raises(StoreUnavailableError, match="raise the limit") as caught:
                    FileStore(place, timeout=HANG_S)
                assert caught.value.errno == errno.EMFILE
            assert store.add("n", 1) == 1
            assert store.get("k") == b"v"
        assert not path.with_name("another").exists()
        with FileStore(path) as other:
            assert other.get("n") == b"1"


WITHOUT_EVENTS = """
import logging, sys, threading
from fscoord import FileStore

limit = "/proc/sys/user/max_inotify_instances"
with open(limit, "w") as file:
    file.write("0")
messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("fscoord").addHandler(handler)
with FileStore(sys.argv[1], timeout=60) as store, FileStore(sys.argv[1], timeout=60) as other:
    thread = threading.Thread(target=lambda: store.set("k", "v"))
    started = threading.Thread(target=lambda: found.append(other.get("k")))
    found = []
    started.start()
    thread.start()
    started.join()
    thread.join()
    while not messages:
        try:
            other.wait(["never"], 0.01)
        except TimeoutError:
            pass
    print(found, messages)
"""


def test_wait_goes_on_by_polling_if_the_kernel_gives_no_inotify_instance(needs_root: None, path: Path) -> None:
    """In a user namespace, whose limit can be lowered without anybody else's. Nor is there a FIFO in its place."""
    path.with_name(path.name + ".bell.fifo").mkdir()
    root = str(Path(fscoord.__file__).parent.parent)
    command = ["unshare", "--user", "--map-root-user", sys.executable, "-c", WITHOUT_EVENTS, str(path)]
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("[b'v'] ")
    assert done.stdout.count("no events from the file system") == 1


def test_event_queue_that_overflows_still_ends_a_wait(path: Path) -> None:
    """The kernel says so by an event of its own (inotify(7), IN_Q_OVERFLOW), which is one more reason to look."""
    overflow = struct_event(wd=-1, mask=0x4000)
    with FileStore(path, timeout=HANG_S) as store, FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(other)
        with faulty_os() as faulty:
            real = faulty.read
            lost: list[bytes] = []

            def read(fd: int, size: int) -> bytes:
                data = real(fd, size)
                if "inotify" in os.readlink(f"/proc/self/fd/{fd}") and data:
                    lost.append(data)
                    return overflow
                return data

            faulty.read = read  # type: ignore[method-assign]
            deadline, number = time.monotonic() + HANG_S, 0
            while not lost:
                assert time.monotonic() < deadline, "there was no event"
                number += 1
                with Thread(other.get, f"key {number}") as waiting:
                    until(lambda: watcher_of(other)._sleeping)  # one that begins later finds the key without an event
                    store.set(f"key {number}", "v")
                    assert waiting.join() == b"v"


LISTENER = """
import sys
from fscoord import FileStore

with FileStore(sys.argv[1], read_only=True, timeout=600) as store:
    store.wait(["late"])
    print("it came", flush=True)
"""
OVERFLOW = 0x4000


def test_reader_whose_event_queue_overflowed_while_stopped_finds_its_key(path: Path) -> None:
    """A reader's queue, for that watches the log itself. Equal events that follow each other count once only."""
    full = int(Path("/proc/sys/fs/inotify/max_queued_events").read_text())
    with FileStore(path, timeout=HANG_S, compact_bytes=None, watch="poll") as store:
        store.set("k", "v")
        environment = os.environ | {"PYTHONPATH": str(Path(fscoord.__file__).parent.parent)}
        command = [sys.executable, "-c", LISTENER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            try:
                until(lambda: watches(child.pid))
                stop(child.pid)
                like_it, another = (file_events.Inotify(str(path), file_events.LOG_CHANGED) for _ in range(2))
                for number in range(full // 2 + 1):
                    store.set("k", str(number))
                    os.utime(path)
                assert OVERFLOW in masks(like_it._sources[0])
                while another.wait(0):  # to the end, where that event is
                    pass
                store.set("late", "1")
                os.kill(child.pid, signal.SIGCONT)
                assert child.stdout is not None
                assert child.stdout.readline() == "it came\n"
                assert another.wait(HANG_S)
            finally:
                child.kill()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def watches(pid: int) -> bool:
    """Return whether the process watches a file."""
    try:
        return any("inotify wd:" in found.read_text() for found in Path(f"/proc/{pid}/fdinfo").iterdir())
    except (FileNotFoundError, ProcessLookupError):  # closed meanwhile
        return False


def masks(fd: int) -> set[int]:
    """Return the kinds of events in the queue of `fd`: of a watched file, without names."""
    data = b""
    try:
        while True:
            data += os.read(fd, 1 << 16)
    except BlockingIOError:
        pass
    return {int.from_bytes(data[start + 4 : start + 8], sys.byteorder) for start in range(0, len(data), 16)}


def struct_event(wd: int, mask: int) -> bytes:
    return wd.to_bytes(4, sys.byteorder, signed=True) + mask.to_bytes(4, sys.byteorder) + bytes(8)


# -- clocks ------------------------------------------------------------------------------------------------------------


class JumpingClock(ModuleType):
    """`time`, but the wall clock is a day early or late, in turn, at every look."""

    def __init__(self) -> None:
        super().__init__("time")
        self._day = DAY_S

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def time(self) -> float:
        self._day = -self._day
        return time.time() + self._day

    def time_ns(self) -> int:
        return int(self.time() * 1e9)


def test_store_does_not_depend_on_the_wall_clock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "time", JumpingClock())
    with FileStore(path, timeout=HANG_S, rank=0) as store, FileStore(path, timeout=HANG_S, rank=1) as other:
        for number in range(1, 20):
            assert (store, other)[number % 2].add("n", 1) == number
        with Thread(other.get, "k") as waiting:
            store.set("k", "v")
            assert waiting.join() == b"v"
        for handle in (store, other):
            with pytest.raises(StoreTimeoutError) as caught:
                handle.wait(["never"], 0.02)
            assert 0.02 <= caught.value.waited < HANG_S
        store.compact()
        assert other.get("n") == b"19"
        assert [member.alive for member in other.members()] == ["yes", "yes"]
        with Thread(store.barrier, "b", 2) as waiting:
            other.barrier("b", 2)
            waiting.join()
    assert read_log(path.read_bytes()).ends == "whole"


# -- others in the same process ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_lock_outlives_another_library_that_opens_and_closes_the_log(lock: str, path: Path) -> None:
    """As it would not if it were a lock of the process, which any close(2) of the file gives back (fcntl(2))."""
    with FileStore(path, lock=lock) as store, FileStore(path, lock=lock, timeout=0) as other:
        store.set("k", "v")
        other.set("k", "w")
        kernel = log_of(store).handle.lock
        kernel.try_lock()
        try:
            with open(path, "rb+") as stranger:
                stranger.read()
                fcntl.lockf(stranger, fcntl.LOCK_SH | fcntl.LOCK_NB, 1)
            with pytest.raises(StoreTimeoutError):
                other.set("k", "x")
        finally:
            kernel.unlock()
        other.set_timeout(HANG_S)  # the request that it gave up may hold the lock for a moment
        other.set("k", "y")
        assert store.get("k") == b"y"


@contextmanager
def second_copy() -> Iterator[Any]:
    """Import the package once more, as if another had brought a copy of its own."""
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fscoord"}
    try:
        yield importlib.import_module("fscoord")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fscoord"]:
            del sys.modules[name]
        sys.modules.update(ours)


@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_copies_of_the_package_in_one_process_exclude_each_other(lock: str, path: Path) -> None:
    with second_copy() as another:
        assert another.FileStore is not FileStore
        with (
            FileStore(path, lock=lock, timeout=HANG_S) as ours,
            another.FileStore(path, lock=lock, timeout=0) as theirs,
        ):
            ours.set("k", "v")
            theirs.set("k", "w")
            kernel = log_of(ours).handle.lock
            kernel.try_lock()
            try:
                with pytest.raises(another.StoreTimeoutError):
                    theirs.set("k", "x")
            finally:
                kernel.unlock()
            theirs.set_timeout(HANG_S)
            threads = [threading.Thread(target=add_often, args=(store,)) for store in (ours, theirs)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert ours.get("n") == theirs.get("n") == b"400"


def add_often(store: Any) -> None:
    for _ in range(200):
        store.add("n", 1)


# -- what file systems say ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL], ids=errno.errorcode.get)
def test_store_on_a_mount_without_locks_reports_it_and_takes_no_weaker_ones(error: int, path: Path) -> None:
    with faulty_system() as faulty, FileStore(path, timeout=HANG_S) as store:
        before = path.read_bytes()
        with (
            faulty.fail(0, error, names=("fcntl",), for_good=True),
            pytest.raises(UnsupportedFilesystemError, match="has no ofd locks") as caught,
        ):
            store.set("k", "v")
        assert str(path) in str(caught.value)
        assert "mount it with locks" in str(caught.value)
        assert path.read_bytes() == before
        store.set("k", "v")


@pytest.mark.parametrize("error", [errno.EEXIST, errno.EIO, errno.ETIMEDOUT], ids=errno.errorcode.get)
def test_link_that_was_made_although_the_answer_is_an_error_is_a_log(error: int, path: Path) -> None:
    """link(2), "BUGS": NFS may say so when the reply was lost."""

    def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "link":
            real(*arguments)
            raise OSError(error, os.strerror(error))

    with faulty_os() as faulty, faulty.instead(does):
        try:
            FileStore(path, timeout=HANG_S).close()
        except FscoordError as told:
            assert isinstance(told, StoreUnavailableError)
            assert error != errno.EEXIST
    assert os.listdir(path.parent) == [path.name]
    with FileStore(path, timeout=HANG_S) as store:
        store.set("k", "v")
        assert store.get("k") == b"v"
