"""`FaultyStore` and `FaultyFiles`: the chosen operations fail, as often as asked, and no others do."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import system
from support.places import HANG_S, start_thread

from fscoord.errors import (
    FscoordError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedFilesystemError,
)
from fscoord.stores.file import FileStore
from fscoord.stores.memory import HashStore
from fscoord.testing import FaultyFiles, FaultyStore, StoreContract

CALLS: dict[str, Any] = {
    "set": lambda store: store.set("k", "1"),
    "get": lambda store: store.get("k"),
    "add": lambda store: store.add("n", 1),
    "compare_set": lambda store: store.compare_set("k", "1", "1"),
    "check": lambda store: store.check(["k"]),
    "wait": lambda store: store.wait(["k"]),
    "delete_key": lambda store: store.delete_key("gone"),
    "num_keys": lambda store: store.num_keys(),
    "list_keys": lambda store: store.list_keys(),
    "append": lambda store: store.append("text", "x"),
    "multi_get": lambda store: store.multi_get(["k"]),
    "multi_set": lambda store: store.multi_set(["k"], ["1"]),
    "queue_push": lambda store: store.queue_push("q", "x"),
    "queue_pop": lambda store: store.queue_pop("q", block=False),
    "queue_len": lambda store: store.queue_len("q"),
}
WRITES = ["set", "add", "compare_set", "delete_key", "append", "multi_set", "queue_push", "queue_pop"]


def prepared() -> HashStore:
    inner = HashStore(timeout=HANG_S)
    inner.set("k", "1")
    inner.queue_push("q", "x")
    return inner


class TestWithoutFaults(StoreContract):
    """A store that is told nothing is the store behind it."""

    def make_store(self, tmp_path: Any) -> FaultyStore:
        return FaultyStore(HashStore())


@pytest.mark.parametrize("how", CALLS)
def test_operation_of_each_kind_can_fail_and_then_has_done_nothing(how: str) -> None:
    inner = prepared()
    store = FaultyStore(inner)
    before = inner.num_keys(), inner.queue_len("q")
    with store.fails(how) as hit, pytest.raises(StoreUnavailableError, match=f"{how}.*nothing was done") as caught:
        CALLS[how](store)
    assert not caught.value.maybe_applied
    assert hit == [how]
    assert (inner.num_keys(), inner.queue_len("q")) == before
    CALLS[how](store)


@pytest.mark.parametrize("how", CALLS)
def test_operation_of_each_kind_can_time_out_at_once(how: str) -> None:
    store = FaultyStore(prepared())
    with store.times_out() as hit, pytest.raises(StoreTimeoutError, match=how):
        CALLS[how](store)
    assert hit == [how]


@pytest.mark.parametrize("applied", [True, False])
def test_write_whose_answer_is_lost_may_have_been_done(applied: bool) -> None:
    inner = prepared()
    store = FaultyStore(inner)
    with store.loses_answers(applied=applied) as hit:
        for how in WRITES:
            with pytest.raises(StoreUnavailableError) as caught:
                CALLS[how](store)
            assert caught.value.maybe_applied
        assert store.get("k") == b"1"
    assert hit == WRITES
    assert inner.check(["n", "text"]) is applied


def test_fault_may_have_an_error_of_the_users_own_a_delay_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(system.time, "sleep", naps.append)
    store = FaultyStore(prepared())
    with store.fails("get", error=ZeroDivisionError("mine"), after=2, times=1) as hit, store.delays(seconds=7):
        assert [store.get("k"), store.get("k")] == [b"1"] * 2
        with pytest.raises(ZeroDivisionError, match="mine"):
            store.get("k")
        assert store.get("k") == b"1"
        store.set("k", "2")
    assert hit == ["get"]
    assert naps == [7] * 4, "the call that failed did so before it came to the delay"
    assert store.get("k") == b"2"


def test_timeout_names_the_keys_and_clones_and_barriers_fail_too() -> None:
    store = FaultyStore(HashStore(timeout=HANG_S))
    other = store.clone()
    with store.times_out("wait", "multi_get", times=2), pytest.raises(StoreTimeoutError) as caught:
        other.multi_get(["a", "b"])
    assert caught.value.keys == ("a", "b")
    with store.times_out("wait"), pytest.raises(StoreTimeoutError):
        other.barrier("b", 2)
    with start_thread(other.barrier, "c", 2):
        store.barrier("c", 2)


def day(seed: int) -> list[Any]:
    store = FaultyStore(prepared())
    seen: list[Any] = []
    with store.random_faults(seed, rate=0.5, delay=0) as hit:
        for how in list(CALLS) * 20:
            try:
                seen.append(CALLS[how](store))
            except FscoordError as error:
                seen.append((type(error).__name__, getattr(error, "maybe_applied", None)))
    return [*seen, *hit]


def test_random_faults_is_the_same_for_the_same_seed_and_has_every_fault(seed: int) -> None:
    assert day(seed) == day(seed)
    assert day(1) != day(2)
    for kind in [("StoreTimeoutError", False), ("StoreUnavailableError", False), ("StoreUnavailableError", True)]:
        assert kind in day(1)


def test_random_faults_of_rate_0_has_no_faults_and_one_of_rate_1_nothing_else() -> None:
    store = FaultyStore(prepared())
    with store.random_faults(3, rate=0) as hit:
        for call in CALLS.values():
            call(store)
    assert hit == []
    with store.random_faults(3, rate=1, delay=0) as hit:
        for _ in range(10):
            try:
                store.get("k")
            except FscoordError:
                continue
    assert hit == ["get"] * 10


def test_fault_that_is_impossible_is_refused() -> None:
    store = FaultyStore(HashStore())
    for wrong in [
        lambda: store.fails("push"),
        lambda: store.loses_answers("get"),
        lambda: store.fails("get", after=-1),
        lambda: store.delays(seconds=1, times=-1),
        lambda: store.random_faults(1, rate=1.5),
        lambda: FaultyFiles().fails("mkdir"),
    ]:
        with pytest.raises(ValueError, match=r"no such|negative|between 0 and 1"):
            wrong()


# Files


@pytest.fixture
def files() -> Iterator[FaultyFiles]:
    before = system.os, system.fcntl
    with FaultyFiles() as files:
        yield files
    assert (system.os, system.fcntl) == before


def test_full_disk_fails_a_write_and_the_store_goes_on(files: FaultyFiles, tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        store.set("k", "1")
        with files.fails("write", error=errno.ENOSPC) as hit, pytest.raises(StoreUnavailableError) as caught:
            store.set("k", "2")
        assert caught.value.errno == errno.ENOSPC
        assert not caught.value.maybe_applied
        assert set(hit) == {"write"}
        store.append("k", "3")
        assert store.get("k") == b"13"


@pytest.mark.parametrize("keep", [1, 20, 1000])
def test_torn_write_is_passed_over(files: FaultyFiles, tmp_path: Path, keep: int) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, store.clone() as other:
        store.set("k", "1")
        size = os.path.getsize(tmp_path / "store")
        with files.tears_writes(keep, times=1) as hit, pytest.raises(StoreUnavailableError):
            store.set("k", "2")
        assert hit == ["write"]
        assert size < os.path.getsize(tmp_path / "store") <= size + keep
        assert other.get("k") == b"1"
        other.set("k", "3")
        assert store.get("k") == b"3"


def test_locks_that_the_mount_lacks_are_reported(files: FaultyFiles, tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        with files.fails("lock", error=errno.ENOLCK) as hit, pytest.raises(UnsupportedFilesystemError):
            store.set("k", "1")
        assert set(hit) == {"lock"}
        store.set("k", "2")


def test_lock_that_fails_later_fails_the_write_and_unlocking_never_fails(files: FaultyFiles, tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, store.clone() as other:
        with files.fails("lock", error=errno.EIO), pytest.raises(StoreUnavailableError):
            store.set("k", "1")
        other.set("k", "2")
        assert store.get("k") == b"2"
        store.set("k", "3")
        with files.fails("lock", error=errno.EIO, after=1) as hit:  # to unlock is no attempt at a lock
            store.set("k", "4")
        assert hit == []


def test_stale_handle_fails_the_write_with_its_number(files: FaultyFiles, tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        store.set("k", "1")
        with files.fails("read", error=errno.ESTALE), pytest.raises(StoreUnavailableError) as caught:
            store.set("k", "2")
        assert caught.value.errno == errno.ESTALE
        assert store.get("k") == b"1"


def test_slow_disk_is_slow_for_stores_alone(
    files: FaultyFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []
    real = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: naps.append(seconds) if seconds == 7 else real(seconds))
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        with files.delays("write", seconds=7, times=2):
            store.set("k", "1")
            (tmp_path / "mine").write_bytes(b"of one's own")
            os.close(os.open(tmp_path / "mine", os.O_RDONLY))
            store.set("k", "2")
        store.set("k", "3")
    assert naps.count(7) == 2


def test_faulty_files_are_in_force_once_at_a_time(files: FaultyFiles) -> None:
    with pytest.raises(RuntimeError, match="already"), FaultyFiles():
        pass
