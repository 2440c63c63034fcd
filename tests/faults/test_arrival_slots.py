"""Barriers by slots if a rank is killed, if keys are deleted, and if the bell fails: each ends as without slots."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faults.test_compaction import in_child
from support.faulty import faulty_system
from support.internals import ranks_in_slots, watcher_of
from support.places import Thread, start_thread, wait_in_vain
from support.plain_reader import read_newest

from fscoord import FileStore, StoreTimeoutError, UsedBeforeError, barrier
from fscoord._log.wakeup import watcher
from fscoord.barriers import StoreBarrier
from fscoord.stores.file import arrival, waits
from fscoord.stores.file.arrival_slots import SLOT

HANG_S = 60
SOON_S = HANG_S / 3
KEYS = ("b/arrivals", "b/complete")


@pytest.fixture
def path(memory: Path, mounts_stay: None) -> Path:
    return memory / "store"


@pytest.fixture
def store(path: Path) -> Iterator[FileStore]:
    """A handle on a log with a bell that is announced, without which no rank arrives in a slot."""
    with FileStore(path, timeout=HANG_S) as store:
        wait_in_vain(store)
        yield store


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rings end sleeps, so no rank arrives in the log because it is late."""
    set_polls(monkeypatch, 3.0 * HANG_S)


def set_polls(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    for module in (watcher, waits):
        monkeypatch.setattr(module, "SLOW_FIRST_S", seconds, raising=False)
    monkeypatch.setattr(watcher, "SLOW_LAST_S", seconds)


@pytest.fixture
def fast_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are late, and look again, after a few milliseconds."""
    set_polls(monkeypatch, 0.002)
    monkeypatch.setattr(arrival, "LATE_S", 0.001)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "that never came"
        time.sleep(0.001)


def meet(store: FileStore, rank: int, size: int = 2, timeout: float = HANG_S, name: str = "b") -> None:
    barrier(store, size, name, timeout, rank, trace_timeout=HANG_S)


def sleeps_in_slot(store: FileStore, rank: int, size: int = 2, name: str = "b") -> Thread:
    """Start a thread that arrives in a slot, and return when it sleeps."""
    thread = start_thread(meet, store, rank, size, HANG_S, name)

    def is_asleep() -> bool:
        watch = watcher_of(store)
        return rank in ranks_in_slots(store, name, size) and watch is not None and bool(watch._sleeping)

    until(lambda: is_asleep() or not thread.is_alive())
    return thread


def ends_soon(thread: Thread) -> None:
    started = time.monotonic()
    thread.join()
    assert time.monotonic() - started < SOON_S, "its deadline ended the wait"


def passes(store: FileStore, rank: int, size: int = 2, name: str = "b") -> bool:
    """Return whether the barrier is complete with the arrival of `rank`."""
    with suppress(StoreTimeoutError):
        meet(store, rank, size, 0.0, name)
        return True
    return False


def arrivals(store: FileStore) -> list[str]:
    return store.get(KEYS[0], default=b"").decode().split()


def has_arrived(store: FileStore, rank: int, size: int = 2) -> bool:
    return f"{rank}/{size}" in arrivals(store) or rank in ranks_in_slots(store, "b", size)


# Kills


def die(path: Path, number: int, operation: Callable[[FileStore], None], part: float) -> int:
    """Carry out `operation` in a child that is killed before call `number`. Return how the child ended."""

    def body() -> None:
        left = [number]

        def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            left[0] -= 1
            if left[0] == -1:
                if name in ("write", "pwrite") and part:
                    data = arguments[1][: int(len(arguments[1]) * part)]
                    real(arguments[0], data, *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)

        with faulty_system() as faulty, FileStore(path, timeout=HANG_S) as store:
            store.check(["k"])
            with faulty.instead(does), suppress(StoreTimeoutError):
                operation(store)
            os._exit(0)

    return os.waitstatus_to_exitcode(in_child(body))


def die_in_slot(path: Path, rank: int, size: int = 2) -> None:
    """Let a child arrive as `rank`, and kill it as soon as its slot is written."""

    def body() -> None:
        def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            if name == "pwrite" and len(arguments[1]) == SLOT:
                real(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)

        with faulty_system() as faulty, FileStore(path, timeout=HANG_S) as store, faulty.instead(does):
            meet(store, rank, size)

    assert os.waitstatus_to_exitcode(in_child(body)) == -signal.SIGKILL


def kill_everywhere(
    memory: Path, operation: Callable[[FileStore], None], case: Callable[[FileStore, Callable[[], None]], None]
) -> int:
    """For each call of `operation`, let `case` judge what remains after a kill before the call, or within its write.

    Return the number of kills.
    """
    number = kills = 0
    while True:
        killed = 0
        for part in (0.0, 0.5, 1.0):
            path = memory / f"{number} {part}"
            ends: list[int] = []
            with FileStore(path, timeout=HANG_S) as store:
                wait_in_vain(store)
                case(store, lambda: ends.append(die(path, number, operation, part)))  # noqa: B023 - called at once
            assert ends in ([0], [-signal.SIGKILL])
            killed += ends != [0]
            assert read_newest(path).ends == "whole"
        if not killed:
            return kills
        number, kills = number + 1, kills + killed


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fast_polls", "mounts_stay")
def test_rank_that_is_killed_at_any_call_has_arrived_or_not(memory: Path) -> None:
    """It comes first, and its wait ends at its deadline. The other rank passes only if the dead one had arrived."""

    def case(store: FileStore, dies: Callable[[], None]) -> None:
        dies()
        had_arrived, timed_out = has_arrived(store, 0), "-0/2" in arrivals(store)
        assert passes(store, 1) == had_arrived
        with FileStore(store.path, timeout=HANG_S) as again:
            if had_arrived and not timed_out:
                with pytest.raises(UsedBeforeError):
                    meet(again, 0)
            else:
                meet(again, 0)
        if not had_arrived:
            meet(store, 1)
        assert store.get(KEYS[1]) == b"1"
        assert {"0/2", "1/2"} <= set(arrivals(store)) <= {"0/2", "1/2", "-0/2", "-1/2"}

    assert kill_everywhere(memory, lambda store: meet(store, 0, timeout=0.02), case) > 20


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fast_polls", "mounts_stay")
def test_rank_that_is_killed_at_any_call_when_all_have_arrived_keeps_nobody(memory: Path) -> None:
    """It comes last. The other rank sleeps, and passes if the dead one had arrived, or when it is started again."""

    def case(store: FileStore, dies: Callable[[], None]) -> None:
        thread = sleeps_in_slot(store, 1)
        dies()
        had_arrived = has_arrived(store, 0)
        if had_arrived:
            ends_soon(thread)
        else:
            assert not store.check([KEYS[1]])
        with FileStore(store.path, timeout=HANG_S) as again:
            if had_arrived:
                with pytest.raises(UsedBeforeError):
                    meet(again, 0)
            else:
                meet(again, 0)
        ends_soon(thread)
        assert store.get(KEYS[1]) == b"1"
        assert set(arrivals(store)) == {"0/2", "1/2"}

    assert kill_everywhere(memory, lambda store: meet(store, 0), case) > 20


def delete_both(store: FileStore) -> None:
    for key in KEYS:
        store.delete_key(key)


def delete_by_exchange(store: FileStore) -> None:
    store._exchange(b"step", b"", b"1", [], [key.encode() for key in KEYS])


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_polls", "mounts_stay")
@pytest.mark.parametrize("has_keys", [True, False], ids=["complete", "in a slot"])
@pytest.mark.parametrize("delete", [delete_both, delete_by_exchange])
def test_arrivals_that_a_killed_process_has_deleted_count_no_more(
    delete: Callable[[FileStore], None], has_keys: bool, memory: Path
) -> None:
    def case(store: FileStore, dies: Callable[[], None]) -> None:
        with FileStore(store.path, timeout=HANG_S) as other:
            wait_in_vain(other)
            if has_keys:
                thread = sleeps_in_slot(other, 0)
                meet(store, 1)
                ends_soon(thread)
            else:
                die_in_slot(Path(store.path), 0)
            assert ranks_in_slots(store, "b", 2) == ([0, 1] if has_keys else [0])
        dies()
        done = store.check(["step"]) if delete is delete_by_exchange else False
        if not done:
            delete_both(store)
        assert not store.check([KEYS[0]])
        assert not passes(store, 1), "an arrival that was deleted counts"
        meet(store, 0)

    assert kill_everywhere(memory, delete, case) > 5


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fast_polls", "mounts_stay")
def test_store_barrier_goes_on_when_a_rank_is_killed_at_any_call(memory: Path) -> None:
    """Rank 0 deletes the keys of the barrier before the present one."""

    def execute(store: FileStore, rank: int, passed: int) -> None:
        own = StoreBarrier(store, "c", rank=rank, world_size=2, timeout=HANG_S)
        while own.sequence < passed:
            own.execute_barrier()

    def case(store: FileStore, dies: Callable[[], None]) -> None:
        with FileStore(store.path, timeout=HANG_S) as other:
            thread = start_thread(execute, other, 0, 1)
            execute(store, 1, 1)
            ends_soon(thread)
            thread = start_thread(execute, store, 1, 2)
            dies()
            execute(other, 0, 2)
            ends_soon(thread)
            thread = start_thread(execute, store, 1, 4)
            execute(other, 0, 4)
            ends_soon(thread)
            assert other.list_keys("c/") == ["c/3/arrivals", "c/3/complete", "c/sequence/0", "c/sequence/1"]

    assert kill_everywhere(memory, lambda store: execute(store, 0, 2), case) > 30
