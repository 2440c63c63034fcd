"""The same contract under pyfakefs: polling instead of inotify, threads as ever, and no real descriptor is touched."""

from __future__ import annotations

import fcntl
import gc
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from contract.test_bad_input import TestEveryStore as TestBadInput  # noqa: F401 - the very same, on the `place` below
from contract.test_collectives import *  # noqa: F403
from contract.test_operations import TestEveryStore as TestOperations  # noqa: F401
from contract.test_waiting import TestEveryStore as TestWaiting  # noqa: F401
from pyfakefs.fake_filesystem import FakeFilesystem
from pyfakefs.fake_filesystem_unittest import Patcher
from support.internals import system
from support.places import FILE_KINDS, HANG_S, Place, start_thread, state

from fscoord.barriers import Barrier, BarrierConfig, create_barrier_from_config
from fscoord.collectives import barrier
from fscoord.errors import StoreTimeoutError
from fscoord.rendezvous import RendezvousParameters, create_backend, get_rendezvous_handler
from fscoord.store import Store
from fscoord.stores.file import FileStore
from fscoord.testing import not_faked

REAL = {"os": os, "fcntl": fcntl, "select": select}  # in a dict, where pyfakefs does not look for what to replace
ON_DESCRIPTORS = {
    "os": """close dup dup2 fchmod fchown fdatasync fdopen fstat fstatvfs fsync ftruncate isatty lockf lseek
        posix_fadvise posix_fallocate pread preadv pwrite pwritev read readv sendfile set_blocking set_inheritable
        write writev""",
    "fcntl": "fcntl flock ioctl lockf",
    "select": "poll select epoll",
}


@pytest.fixture(params=["file-ofd"])
def place(request: pytest.FixtureRequest, fs: FakeFilesystem) -> Iterator[Place]:
    fs.create_dir("/shared")
    place = Place(request.param, "/shared")
    assert system.is_fake_fs()
    assert fs.exists("/shared/store")
    assert not REAL["os"].path.exists("/shared/store")
    yield place
    place.close()


@contextmanager
def spying() -> Iterator[list[str]]:
    """Give the list of all calls of real functions that take a descriptor, by whomever."""
    calls: list[str] = []

    def spy(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            calls.append(f"{name}{arguments}")
            return real(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module, names in ON_DESCRIPTORS.items():
            for name in names.split():
                patch.setattr(REAL[module], name, spy(f"{module}.{name}", getattr(REAL[module], name)))
        yield calls


def exercise(open_store: Callable[[], Store]) -> None:
    """Use everything that a store has, with three handles and threads that wait."""
    with open_store() as store, open_store() as other, store.clone() as third:
        with start_thread(other.get, "late") as reader, start_thread(third.queue_pop, "q") as popper:
            store.set("late", "1")
            store.queue_push("q", "2")
        assert (reader.result, popper.result) == (b"1", b"2")
        with start_thread(barrier, other, 2, "b", HANG_S, 1):
            barrier(store, 2, "b", HANG_S, 0)
        store.multi_set(["a", "c"], ["1", "2"])
        other.append("a", "3")
        third.add("n", 1)
        store.compare_set("c", "2", "4")
        other.delete_key("late")
        store.set_timeout(0.01)
        with pytest.raises(TimeoutError):
            store.wait(["never"])
        assert state(store)["values"] == state(other)["values"] == state(third)["values"]


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_store_under_pyfakefs_touches_no_real_descriptor(fs: FakeFilesystem, kind: str) -> None:
    fs.create_dir("/shared")
    before = set(REAL["os"].listdir("/proc/self/fd"))
    with spying() as touched:
        place = Place(kind, "/shared")
        exercise(place.open)
        place.close()
    assert touched == []
    assert set(REAL["os"].listdir("/proc/self/fd")) == before


def test_spy_notices_calls_on_real_descriptors(tmp_path: Path) -> None:
    with spying() as touched:
        FileStore(tmp_path / "store").close()
    assert {call.partition("(")[0] for call in touched} >= {"os.read", "os.fstat", "os.close"}


@pytest.mark.parametrize("lock", ["ofd", "flock", "soft"])
def test_store_left_open_under_pyfakefs_closes_no_real_descriptor_later(tmp_path: Path, lock: str) -> None:
    """Its descriptors' numbers may by then be those of real files."""
    canaries = []
    try:
        with Patcher() as patcher:
            patcher.fs.create_dir("/shared")
            store: Store | None = FileStore("/shared/store", lock=lock)
            store.set("k", "1")
            thread = start_thread(store.get, "k")
            thread.join()
            temporary: Store | None = FileStore()
            temporary.set("k", "1")
        canaries = [os.open(tmp_path / str(i), os.O_RDWR | os.O_CREAT, 0o600) for i in range(64)]
        before = sorted(os.listdir("/proc/self/fd"))
        thread = store = temporary = None
        gc.collect()
        assert sorted(os.listdir("/proc/self/fd")) == before
        for number, canary in enumerate(canaries):
            assert os.readlink(f"/proc/self/fd/{canary}") == str(tmp_path / str(number))
            assert os.fstat(canary).st_size == 0
    finally:
        for canary in canaries:
            try:
                os.close(canary)
            except OSError:
                continue


@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_store_that_is_not_faked_lies_on_the_disk_beside_fake_files(tmp_path: Path, lock: str) -> None:
    with Patcher(additional_skip_names=not_faked()) as patcher:
        patcher.fs.create_file("/fake")
        assert not system.is_fake_fs()
        with FileStore(tmp_path / "store", lock=lock, timeout=HANG_S) as store, store.clone() as other:
            with start_thread(other.get, "k") as reader:
                store.set("k", "v")
            assert REAL["os"].path.exists(tmp_path / "store")
            assert not os.path.exists(tmp_path / "store")
            assert sys.modules["portalocker.portalocker"].fcntl is REAL["fcntl"]
    assert reader.result == b"v"


def test_private_store_works_and_is_removed_under_pyfakefs(fs: FakeFilesystem) -> None:
    store = FileStore()
    store.set("k", "1")
    path = store.path
    assert fs.exists(path)
    assert not REAL["os"].path.exists(path)
    store.close()
    assert not fs.exists(path)
    assert not fs.exists(system.os.path.dirname(path))


def test_barriers_of_a_configuration_meet_under_pyfakefs(fs: FakeFilesystem) -> None:
    fs.create_dir("/shared")

    def make(rank: int) -> Barrier:
        arguments = {"path": "/shared/b", "rank": rank, "world_size": 2, "timeout": HANG_S}
        barrier = create_barrier_from_config(BarrierConfig("file_store", arguments))
        assert barrier is not None
        return barrier

    with make(0) as first, make(1) as second:
        for _ in range(3):
            with start_thread(second.execute_barrier):
                first.execute_barrier()
        with pytest.raises(StoreTimeoutError, match=r"missing_ranks=\[1\]"):
            first.execute_barrier(0)


@pytest.mark.parametrize("endpoint", ["", "/shared/new", "/shared/empty"])
def test_rendezvous_backend_keeps_its_state_under_pyfakefs(fs: FakeFilesystem, endpoint: str) -> None:
    fs.create_file("/shared/empty")
    backend, store = create_backend(RendezvousParameters("c10d", endpoint, "id", 1, 1, store_type="file"))
    with store:
        assert backend.get_state() is None
        first = backend.set_state(b"first")
        assert first is not None
        assert first[2]
        second = backend.set_state(b"second", first[1])
        assert second is not None
        assert second[2]
        assert backend.set_state(b"third", first[1]) == (b"second", second[1], False)
        assert backend.get_state() == second[:2]


def test_nodes_of_a_rendezvous_meet_under_pyfakefs(fs: FakeFilesystem) -> None:
    fs.create_dir("/shared")
    params = RendezvousParameters("c10d", "/shared/job", "id", 2, 2, "localhost")
    handlers = [get_rendezvous_handler(params) for _ in range(2)]
    infos = [thread.join() for thread in [start_thread(handler.next_rendezvous) for handler in handlers]]
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 2), (1, 2)]
    for handler in handlers:
        handler.shutdown()
