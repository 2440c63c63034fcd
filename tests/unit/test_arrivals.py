"""The arrival at a barrier and the wait for the others, which a `FileStore` makes one operation."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os
from support.internals import ChangeWatcher, log_of, watcher
from support.places import wait_in_vain

from fscoord import (
    BarrierError,
    FileStore,
    HashStore,
    PrefixStore,
    StoreClosedError,
    StoreTimeoutError,
    UsedBeforeError,
    barrier,
    gather,
    synchronize,
)
from fscoord.stores.file.arrival_slots import START

HANG_S = 120
BLOCK = ChangeWatcher.block

Meet = Callable[..., None]


def meet_by_count(store: FileStore, _: int) -> None:
    store.barrier("b", 2)


def meet_by_rank(store: FileStore, rank: int, key: str = "b") -> None:
    barrier(store, 2, key, rank=rank)


def meet_on_a_view(store: FileStore, rank: int, key: str = "b") -> None:
    barrier(PrefixStore("view", store), 2, key, rank=rank)


every_way = pytest.mark.parametrize("meet", [meet_by_count, meet_by_rank, meet_on_a_view])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(path: Path) -> Iterator[FileStore]:
    with FileStore(path, timeout=HANG_S) as store:
        yield store


def meet_in_child(path: Path, meet: Meet) -> None:
    """Let a child process be rank 1, and return when it has passed."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            with FileStore(path, timeout=HANG_S) as store:
                meet(store, 1)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_last_arrival_right_after_the_unlock_of_another_wakes_it(
    store: FileStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No look comes between the write and the sleep, so the wait must be armed before the unlock."""
    monkeypatch.setattr(watcher, "SLOW_FIRST_S", 100.0)
    store.set("registered", "1")
    lock = log_of(store).handle.lock
    unlock, unlocked = lock.unlock, []

    def unlock_and_let_the_last_arrive() -> None:
        unlock()
        unlocked.append(log_of(store).handle.offset)
        if b"b/num_members" in path.read_bytes():  # a shorter text may be in a random id
            lock.unlock = unlock
            meet_in_child(path, meet_by_count)

    lock.unlock = unlock_and_let_the_last_arrive
    started = time.monotonic()
    meet_by_count(store, 0)
    assert time.monotonic() - started < HANG_S / 2, "no ring ended the sleep, but its deadline"
    assert len(unlocked) <= 3, "the rank, the bell, and the arrival"


class LastArrival:
    """Lets a child arrive before a system call of the other rank: the call `number` after the write of its slot.

    If that rank sleeps earlier, the child arrives before its sleep.
    """

    def __init__(self, path: Path, meet: Meet, number: int) -> None:
        self._path, self._meet, self._number = path, meet, number
        self._calls: Iterator[int] | None = None  # since the write of the slot
        self._has_come = self.slept = False

    def _come(self) -> None:
        self._has_come = True
        meet_in_child(self._path, self._meet)

    def before_call(self, name: str, _: object, arguments: tuple[Any, ...]) -> None:
        if self._calls is None:
            if name == "pwrite" and arguments[2] >= START:
                self._calls = count()
        elif not self._has_come and next(self._calls) == self._number:
            self._come()

    def before_sleep(self, waiter: Any, seconds: float) -> None:
        if not self._has_come:
            self.slept = True
            self._come()
        BLOCK(waiter.watcher, waiter, seconds)


@pytest.mark.parametrize("meet", [meet_by_rank, meet_on_a_view])
def test_last_arrival_before_each_call_of_another_wakes_it(
    meet: Meet, store: FileStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that arrives in a slot arms before it looks at the log, and reads the slots after that."""
    monkeypatch.setattr(watcher, "SLOW_FIRST_S", 100.0)
    wait_in_vain(store)
    store.announce_rank(0)
    for number in count():
        last = LastArrival(path, partial(meet, key=f"{number}"), number)
        started = time.monotonic()
        with faulty_os() as faulty, faulty.instead(last.before_call), monkeypatch.context() as patch:
            patch.setattr(ChangeWatcher, "block", last.before_sleep)
            meet(store, 0, f"{number}")
        assert time.monotonic() - started < HANG_S / 2, f"no ring ended the sleep, but its deadline: call {number}"
        if last.slept:
            break
    assert number == 4, "it reads and writes its cell, and reads the log and the slots"


@every_way
def test_arrival_that_is_not_the_last_reads_once_before_its_sleep(
    meet: Meet, store: FileStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_in_vain(store)
    store.announce_rank(0)
    with faulty_os() as faulty:
        block = ChangeWatcher.block

        def block_and_meet(self: ChangeWatcher, waiter: Any, seconds: float) -> None:
            monkeypatch.setattr(ChangeWatcher, "block", block)
            before.extend(name for name, _ in faulty.calls)
            meet_in_child(path, meet)
            self.block(waiter, seconds)

        monkeypatch.setattr(ChangeWatcher, "block", block_and_meet)
        before: list[str] = []
        faulty.calls.clear()
        meet(store, 0)
    is_in_slot = meet is not meet_by_count
    assert before.count("read") == 1 + is_in_slot, "before a slot is first used, the log is read on"
    assert before.count("write") == (not is_in_slot)


@pytest.mark.parametrize("meet", [meet_by_count, meet_by_rank])
def test_key_of_the_end_that_is_there_already_ends_the_wait_at_once(
    meet: Meet, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watcher, "SLOW_FIRST_S", 100.0)
    store.multi_set(["b/last_member", "b/complete"], ["1", "1"])
    started = time.monotonic()
    meet(store, 0)
    assert time.monotonic() - started < HANG_S / 2


@every_way
def test_arrival_on_a_closed_handle_opens_nothing(meet: Meet, store: FileStore) -> None:
    store.close()
    with pytest.raises(StoreClosedError):
        meet(store, 0)


def test_arrival_is_recorded_once_if_the_wait_ends_at_its_deadline(store: FileStore) -> None:
    for _ in range(2):
        with pytest.raises(StoreTimeoutError):
            barrier(store, 2, "b", 0.01, rank=0)
    assert store.get("b/arrivals") == b"0/2 -0/2 0/2 -0/2 "
    with pytest.raises(StoreTimeoutError):
        store.barrier("c", 3, 0.01)
    assert store.get("c/num_members") == b"1"


def test_arrival_beyond_the_world_size_counts_and_raises(store: FileStore) -> None:
    store.barrier("b", 1)
    with pytest.raises(BarrierError, match="got arrival 2 of 1"):
        store.barrier("b", 1)
    assert store.get("b/num_members") == b"2"


def test_delete_clears_slots_unless_its_expectation_is_refused(path: Path, store: FileStore) -> None:
    def slots() -> bytes:
        return Path(f"{path}.bell").read_bytes()[START:]

    wait_in_vain(store)
    for limit in (0.1, 1, 10):  # on a busy machine the time may be up before the rank arrives in its slot
        key = f"b{limit}/arrivals"
        with pytest.raises(StoreTimeoutError):
            barrier(store, 2, f"b{limit}", limit, rank=0)
        written = slots()
        if any(written):
            break
    assert any(written)
    assert store.delete_key(key, expected="other") is False
    assert slots() == written
    assert store.delete_key(key, expected=store.get(key)) is True
    assert not any(slots())


USES = {
    "barrier with ranks": lambda store: barrier(store, 1, "start", rank=0),
    "barrier without ranks": lambda store: barrier(store, 1, "start"),
    "gather": lambda store: gather(store, "data", 0, 1, "start"),
    "synchronize": lambda store: synchronize(store, "data", 0, 1, "start"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("view", [False, True])
def test_key_that_was_used_before_is_named_with_the_store_and_the_way_out(store, use, view: bool) -> None:
    place = PrefixStore("view", store) if view else store
    use(place)
    with pytest.raises(UsedBeforeError) as caught:
        use(place)
    for part in ("start", "key of its own", "run_id=", "world_size=", f"{store.path} and {store.path}.*"):
        assert part in str(caught.value)


def test_data_of_an_earlier_run_are_named_with_the_store_and_the_way_out(store: FileStore) -> None:
    store.set("names/0", "left behind")
    with pytest.raises(UsedBeforeError, match=r"names/0.*used before.*run_id= or world_size=.*") as caught:
        synchronize(store, "data", 0, 1, "names/")
    assert store.path in str(caught.value)
    assert store.get("names/0") == b"left behind"


def test_key_that_was_used_before_on_a_store_without_a_path_has_the_general_advice() -> None:
    with HashStore() as store:
        barrier(store, 1, "start", rank=0)
        with pytest.raises(UsedBeforeError, match=r"'start'.*give every barrier and exchange a key of its own$"):
            barrier(store, 1, "start", rank=0)
