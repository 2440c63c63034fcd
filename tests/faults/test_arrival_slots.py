"""Barriers by slots beside kills, deletes, forks, new runs and a damaged bell: each ends as it does without slots."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from faults.test_compaction import in_child, kills
from support.faulty import faulty_os, faulty_system
from support.internals import ranks_in_slots, watcher_of
from support.places import Thread, start_thread, wait_in_vain
from support.plain_reader import read_newest

from fscoord import (
    FileStore,
    PrefixStore,
    StaleRunError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    UsedBeforeError,
    aio,
    barrier,
)
from fscoord._log.wakeup import watcher
from fscoord.barriers import StoreBarrier
from fscoord.status import status
from fscoord.stores.file import arrival, waits
from fscoord.stores.file.arrival import Arrival
from fscoord.stores.file.arrival_slots import HASH, SLOT, START, row_of

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
        assert not ranks_in_slots(store, "b", 2)  # two threads that open the bell at once have a file each
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


def die(path: Path, number: int, operation: Callable[[FileStore], None]) -> int:
    """Carry out `operation` in a child that is killed at point `number`. Return how the child ended."""

    def body() -> None:
        with faulty_system() as faulty, FileStore(path, timeout=HANG_S) as store:
            store.check(["k"])
            with faulty.instead(kills(number)), suppress(StoreTimeoutError):
                operation(store)
            os._exit(0)

    return os.waitstatus_to_exitcode(in_child(body))


def die_in_slot(path: Path, rank: int, size: int = 2, **options: Any) -> None:
    """Let a child arrive as `rank`, and kill it as soon as its slot is written."""

    def body() -> None:
        def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            if name == "pwrite" and len(arguments[1]) == SLOT:
                real(*arguments)
                os.kill(os.getpid(), signal.SIGKILL)

        with faulty_system() as faulty, FileStore(path, timeout=HANG_S, **options) as store, faulty.instead(does):
            meet(store, rank, size)

    assert os.waitstatus_to_exitcode(in_child(body)) == -signal.SIGKILL


def content_of(store: FileStore, name: str, size: int) -> bytes:
    assert store._slots is not None
    return store._slots.content(name.encode() + b"/arrivals", size)


def write_slot(store: FileStore, rank: int, size: int = 2, name: str = "b") -> None:
    """Write the slot of `rank`, as a rank does that has read the log before."""
    content, bell = content_of(store, name, size), store._slots and store._slots.bell()
    assert bell
    os.pwrite(bell.fd, content, row_of(content) + SLOT * rank)


def kill_everywhere(
    memory: Path, operation: Callable[[FileStore], None], case: Callable[[FileStore, Callable[[], None]], None]
) -> int:
    """For each call of `operation`, let `case` judge what remains after a kill before the call, or within its write.

    Return the number of kills.
    """
    for number in itertools.count():
        path = memory / str(number)
        ends: list[int] = []
        with FileStore(path, timeout=HANG_S) as store:
            wait_in_vain(store)
            case(store, lambda: ends.append(die(path, number, operation)))  # noqa: B023 - called at once
        assert ends in ([0], [-signal.SIGKILL])
        assert read_newest(path).ends == "whole"
        if ends == [0]:
            break
    return number


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


def delete_by_transaction(store: FileStore) -> None:
    store.transact(set={"step": "1"}, delete=KEYS)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("no_polls", "mounts_stay")
@pytest.mark.parametrize("has_keys", [True, False], ids=["complete", "in a slot"])
@pytest.mark.parametrize("delete", [delete_both, delete_by_transaction])
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
        done = store.check(["step"]) if delete is delete_by_transaction else False
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


# Time-outs, restarts and tools


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("timeout", [0.0, 0.06], ids=["in the log", "in a slot"])
def test_time_out_names_no_rank_that_has_a_slot(timeout: float, store: FileStore, path: Path) -> None:
    """A rank that has died after its arrival is neither missing nor dead, as in the log."""
    die_in_slot(path, 1, 3)
    with pytest.raises(StoreTimeoutError) as caught:
        meet(store, 0, 3, timeout)
    assert (caught.value.missing_ranks, caught.value.dead_ranks) == (("2",), ())
    assert "rank 1" not in str(caught.value)
    assert sorted(arrivals(store)) == ["-0/3", "0/3", "1/3"]


@pytest.mark.usefixtures("fast_polls")
def test_rank_whose_slot_is_written_before_the_last_look_of_another_is_not_missing(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, before = Arrival.look, list[list[str]]()

    def look_when_another_has_arrived(self: Arrival, timeout: float, *, reads: bool) -> Any:
        if timeout == 0 and not before:
            before.append(arrivals(store))
            write_slot(store, 1, 3)
        return look(self, timeout, reads=reads)

    monkeypatch.setattr(arrival, "LATE_S", HANG_S)  # it arrives in the log at its first look
    monkeypatch.setattr(Arrival, "look", look_when_another_has_arrived)
    with pytest.raises(StoreTimeoutError) as caught:
        meet(store, 0, 3, 0.1)
    assert before == [["0/3"]]
    assert caught.value.missing_ranks == ("2",)


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("timeout", [0.0, 0.06], ids=["in the log", "in a slot"])
@pytest.mark.parametrize("restarts", [False, True])
def test_rank_that_timed_out_may_arrive_again(restarts: bool, timeout: float, store: FileStore, path: Path) -> None:
    with FileStore(path, timeout=HANG_S) as other, FileStore(path, timeout=HANG_S) as third:
        sleeping = sleeps_in_slot(other, 1, 3)
        with pytest.raises(StoreTimeoutError):
            meet(store, 0, 3, timeout)
        with FileStore(path, timeout=HANG_S) if restarts else store.clone() as again:
            handle = again if restarts else store
            thread = start_thread(meet, handle, 0, 3)
            meet(third, 2, 3)
            ends_soon(thread)
            ends_soon(sleeping)
        meet_again_is_refused(store, 2, 3)


def meet_again_is_refused(store: FileStore, rank: int, size: int = 2) -> None:
    with pytest.raises(UsedBeforeError):
        meet(store, rank, size)


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("is_open", [False, True], ids=["opened later", "opened before"])
def test_rank_that_died_before_the_end_is_refused_when_it_comes_again(
    is_open: bool, store: FileStore, path: Path
) -> None:
    """It has never seen the end, and its slot is still there."""
    opened = [FileStore(path, timeout=HANG_S)] if is_open else []
    die_in_slot(path, 0)
    meet(store, 1)
    assert ranks_in_slots(store, "b", 2) == [0, 1]
    with opened[0] if is_open else FileStore(path, timeout=HANG_S) as again:
        meet_again_is_refused(again, 0)
    meet_again_is_refused(store, 1)


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("handle", ["the same", "opened before", "opened later"])
def test_rank_that_arrived_in_the_log_is_refused_when_it_comes_again(handle: str, store: FileStore, path: Path) -> None:
    """The log alone says so, because its slot is empty. The handle that was opened before has not read on."""
    with FileStore(path, timeout=HANG_S, rank=0) as before, FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(before)
        thread = sleeps_in_slot(other, 1)
        meet(store, 0, timeout=0.0)
        ends_soon(thread)
        assert ranks_in_slots(store, "b", 2) == [1]
        if handle == "opened later":
            with FileStore(path, timeout=HANG_S) as later:
                meet_again_is_refused(later, 0)
        else:
            meet_again_is_refused(store if handle == "the same" else before, 0)


@pytest.mark.usefixtures("fast_polls")
def test_barrier_that_lasts_shows_the_ranks_that_wait_and_those_that_died(store: FileStore, path: Path) -> None:
    """Also the rank whose process ends before it is late."""
    die_in_slot(path, 1, 3)
    thread = start_thread(meet, store, 0, 3)

    def rounds() -> list[tuple[str, int, Any]]:
        return [(each.name, each.come, each.missing) for each in status(path).picture.rounds]

    until(lambda: rounds() == [("b", 2, (2,))])
    with FileStore(path, timeout=HANG_S) as other:
        assert sorted(arrivals(other)) == ["0/3", "1/3"]
        meet(other, 2, 3)
        ends_soon(thread)
        assert rounds() == []
        assert sorted(arrivals(other)) == ["0/3", "1/3", "2/3"]


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("fail_fast", [False, True])
def test_rank_that_died_in_its_slot_breaks_no_barrier(fail_fast: bool, store: FileStore, path: Path) -> None:
    die_in_slot(path, 1, 3)
    thread = start_thread(partial(barrier, fail_fast=fail_fast), store, 3, "b", HANG_S, 0)
    until(lambda: has_arrived(store, 0, 3))
    with FileStore(path, timeout=HANG_S) as other:
        assert other.members([1])[0].alive == "no"
        barrier(other, 3, "b", HANG_S, 2, fail_fast=fail_fast)
        ends_soon(thread)
        assert sorted(arrivals(other)) == ["0/3", "1/3", "2/3"]


@pytest.mark.usefixtures("no_polls")
def test_rank_that_comes_in_its_slot_when_others_are_in_the_log_arrives_there_too(store: FileStore, path: Path) -> None:
    """It has not read on. A rank with `fail_fast` looks only at the log before it breaks a barrier for a dead rank."""

    def come() -> None:
        def write_after_another_has_arrived(name: str, _: object, arguments: tuple[Any, ...]) -> None:
            if name == "pwrite" and len(arguments[1]) == SLOT:
                path.with_name("ready").touch()
                until(lambda: b"0/3 " in path.read_bytes())

        signal.alarm(HANG_S)
        with FileStore(path, timeout=HANG_S) as other:
            wait_in_vain(other)
            with faulty_os() as faulty, faulty.instead(write_after_another_has_arrived):
                meet(other, 1, 3)

    pid = os.fork()
    if pid == 0:
        try:
            come()
        finally:
            os._exit(1)
    try:
        until(path.with_name("ready").exists)
        thread = start_thread(partial(barrier, fail_fast=True), store, 3, "b", HANG_S, 0)
        until(lambda: arrivals(store) == ["0/3", "1/3"])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with FileStore(path, timeout=HANG_S) as third:
        assert third.members([1])[0].alive == "no"
        barrier(third, 3, "b", HANG_S, 2, fail_fast=True)
    ends_soon(thread)


# Deletes


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize(
    ("delete", "found"),
    [
        (lambda store, key: store.delete_key(key), False),
        (lambda store, key: store.pop(key), None),
        (lambda store, key: store.transact(set={"x": "1"}, delete=[key]), True),
        (lambda store, key: PrefixStore("b", store).delete_key(key.removeprefix("b/")), False),
    ],
    ids=["delete_key", "pop", "transact", "view"],
)
@pytest.mark.parametrize("key", KEYS)
def test_delete_of_a_key_that_is_absent_takes_away_the_arrivals_in_slots(
    key: str, delete: Callable[[FileStore, str], Any], found: Any, store: FileStore, path: Path
) -> None:
    die_in_slot(path, 0)
    with FileStore(path, timeout=HANG_S) as other:
        assert delete(other, key) == found
        assert not ranks_in_slots(other, "b", 2)
    assert not passes(store, 1)
    assert arrivals(store) == ["1/2", "-1/2"]


@pytest.mark.usefixtures("no_polls")
def test_delete_takes_away_the_arrivals_of_its_own_barrier_alone(store: FileStore, path: Path) -> None:
    """The slots of both barriers are in one row."""
    row = row_of(content_of(store, "b", 2))
    other = next(name for name in map(str, range(10_000)) if row_of(content_of(store, name, 3)) == row)
    with FileStore(path, timeout=HANG_S) as first, FileStore(path, timeout=HANG_S) as second:
        threads = [sleeps_in_slot(first, 1), sleeps_in_slot(second, 2, 3, other)]
        store.delete_key("b/complete")
        assert (ranks_in_slots(store, "b", 2), ranks_in_slots(store, other, 3)) == ([], [2])
        for name, size, thread in (("b", 2, threads[0]), (other, 3, threads[1])):
            again = start_thread(meet, store, 1, size, HANG_S, name)
            meet(store, 0, size, HANG_S, name)
            ends_soon(again)
            ends_soon(thread)


@pytest.mark.usefixtures("no_polls")
def test_key_that_was_deleted_serves_again(store: FileStore, path: Path) -> None:
    """A handle that has arrived in a slot arrives at the same key in the log from then on."""
    with FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(other)
        for number in range(5):
            rank = number % 2
            thread = start_thread(meet, other, rank)
            until(lambda: has_arrived(store, rank))  # noqa: B023 - called at once
            meet(store, 1 - rank)
            ends_soon(thread)
            assert sorted(arrivals(store)) == ["0/2", "1/2"]
            delete_both(store if number % 3 else other)
            assert store.list_keys() == []


@pytest.mark.usefixtures("no_polls")
def test_call_that_waits_during_a_delete_counts_once_at_most(
    store: FileStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It misses a ring, and the other rank deletes the keys and comes again."""
    monkeypatch.setattr(arrival, "LATE_S", 0.0001)
    with FileStore(path, timeout=HANG_S) as other, faulty_system() as faulty:
        wait_in_vain(other)
        thread = sleeps_in_slot(other, 0)
        faulty.utime = lambda *_: None
        meet(store, 1)
        delete_both(store)
        assert not passes(store, 1)
        faulty.utime = os.utime
        watch: Any = watcher_of(other)
        count = watch.event_count
        os.utime(f"{path}.bell")
        until(lambda: watch.event_count > count and watch._sleeping)  # it has looked, and sleeps again
        assert arrivals(store) == ["1/2", "-1/2"]
        meet(store, 0)
        ends_soon(thread)
        assert arrivals(store) == ["1/2", "-1/2", "0/2"]


def replace_by_link(bell: Path) -> None:
    bell.rename(bell.with_name("moved"))
    bell.symlink_to("moved")


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_delete_that_can_not_clear_the_slots_fails_before_its_record(
    error: int, has_key: bool, store: FileStore, path: Path
) -> None:
    die_in_slot(path, 0)
    if has_key:
        meet(store, 1)
    before = path.read_bytes()

    def fail(name: str, _: Any, arguments: tuple[Any, ...]) -> None:
        if name == "pwrite" and arguments[1] == bytes(SLOT):
            raise OSError(error, os.strerror(error))

    for delete in (
        lambda: store.delete_key("b/complete"),
        lambda: store.pop("b/arrivals"),
        lambda: store.transact(set={"x": "1"}, delete=["b/complete"]),
    ):
        with (
            faulty_system() as faulty,
            faulty.instead(fail),
            pytest.raises(StoreUnavailableError, match="clearing the slots of a barrier") as caught,
        ):
            delete()
        assert (caught.value.errno, caught.value.maybe_applied) == (error, False)
        assert path.read_bytes() == before
    assert store.delete_key("b/complete") == has_key
    assert not ranks_in_slots(store, "b", 2)


@pytest.mark.usefixtures("no_polls")
def test_delete_by_a_handle_that_can_not_open_the_bell_fails_before_its_record(store: FileStore, path: Path) -> None:
    die_in_slot(path, 0)
    meet(store, 1)
    replace_by_link(path.with_name("store.bell"))
    before = path.read_bytes()
    with FileStore(path, timeout=HANG_S) as other:
        with pytest.raises(
            StoreUnavailableError, match=r"slots of a barrier failed: the bell .*[.]bell can't be opened"
        ):
            other.delete_key("b/complete")
        assert path.read_bytes() == before
        path.with_name("store.bell").unlink()
    with FileStore(path, timeout=HANG_S) as other:
        assert other.delete_key("b/complete")


def test_read_only_handle_deletes_nothing(store: FileStore, path: Path) -> None:
    die_in_slot(path, 0)
    with FileStore(path, read_only=True, timeout=HANG_S) as reader, pytest.raises(StoreError, match="read_only"):
        reader.delete_key("b/complete")
    assert ranks_in_slots(store, "b", 2) == [0]


# Runs and forks


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("kind", ["run_id", "world_size"])
def test_slot_of_an_earlier_run_counts_in_no_later_one(kind: str, path: Path) -> None:
    """The ranks of the later run use the same file of slots, where the arrival of the earlier one still is."""
    options: list[dict[str, Any]] = (
        [{"run_id": ("job", number)} for number in range(2)] if kind == "run_id" else [{"world_size": 2}] * 2
    )

    def die() -> None:
        with FileStore(path, timeout=HANG_S, **options[0]) as store:
            wait_in_vain(store)
            die_in_slot(path, 0)
            assert ranks_in_slots(store, "b", 2) == [0]
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.waitstatus_to_exitcode(in_child(die)) == -signal.SIGKILL
    with FileStore(path, timeout=HANG_S, **options[1]) as store:
        wait_in_vain(store)
        with open(f"{path}.bell", "rb") as bell:
            bell.seek(START)
            assert len(bell.read().strip(b"\0")) in range(HASH, SLOT)
        assert not passes(store, 1)
        with FileStore(path, timeout=HANG_S) as other:
            ends_soon(start_thread(meet, other, 0))
        assert passes(store, 1)


@pytest.mark.usefixtures("fast_polls")
def test_rank_of_an_earlier_run_that_sleeps_in_a_slot_is_stale(path: Path) -> None:
    with FileStore(path, timeout=HANG_S, run_id=("job", 0)) as old:
        wait_in_vain(old)
        thread = start_thread(meet, old, 0)
        until(lambda: has_arrived(old, 0))
        with FileStore(path, timeout=HANG_S, run_id=("job", 1)) as new:
            with pytest.raises(StaleRunError):
                thread.join()
            assert new.list_keys() == []
            assert not passes(new, 1)


@pytest.mark.usefixtures("no_polls")
def test_child_opens_slots_of_its_own_beside_a_thread_that_sleeps_in_one(store: FileStore) -> None:
    """The child comes as the same rank, which has arrived, and times out. The rank of the parent is not disturbed."""
    thread = sleeps_in_slot(store, 0, 3)
    inherited = os.stat(f"/proc/self/fd/{store._slots.bell().fd}").st_ino  # type: ignore[union-attr]

    def child() -> None:
        with pytest.raises(StoreTimeoutError) as caught:
            meet(store, 0, 3, 0.06)
        assert caught.value.missing_ranks == ("1", "2")
        bell = store._slots.bell()  # type: ignore[union-attr]
        assert bell is not None
        assert os.fstat(bell.fd).st_ino == inherited
        start_thread(meet, store, 1, 3)  # it ends with the process
        until(lambda: has_arrived(store, 1, 3))

    assert os.waitstatus_to_exitcode(in_child(child)) == 0
    assert thread.is_alive()
    meet(store, 2, 3)
    ends_soon(thread)
    assert set(arrivals(store)) == {"0/3", "-0/3", "1/3", "2/3"}


# The log and the bell


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("compactions", [1, 2, 5])
def test_compaction_while_a_rank_sleeps_in_a_slot_changes_nothing(
    compactions: int, store: FileStore, path: Path
) -> None:
    with FileStore(path, timeout=HANG_S) as other, FileStore(path, timeout=HANG_S) as third:
        threads = [sleeps_in_slot(other, 0, 3), sleeps_in_slot(third, 1, 3)]
        for _ in range(compactions):
            store.compact()
        assert ranks_in_slots(store, "b", 3) == [0, 1]
        meet(store, 2, 3)
        for thread in threads:
            ends_soon(thread)
        assert sorted(arrivals(other)) == ["0/3", "1/3", "2/3"]
        meet_again_is_refused(third, 1, 3)


@pytest.mark.usefixtures("no_polls")
def test_delete_after_a_compaction_counts_for_a_call_that_waits(
    store: FileStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handle reads the log again from a snapshot, which has no deletes. The slots are cleared."""
    monkeypatch.setattr(arrival, "LATE_S", HANG_S)
    with FileStore(path, timeout=HANG_S) as other:
        thread = sleeps_in_slot(other, 0)
        store.multi_set(KEYS, ["1/2 ", ""])
        delete_both(store)
        for _ in range(3):
            store.compact()
        assert not passes(store, 1)
        meet(store, 0)
        ends_soon(thread)


def remove(bell: Path) -> None:
    bell.unlink()


def replace(bell: Path) -> None:
    bell.rename(bell.with_name("old"))
    bell.write_bytes(bell.with_name("old").read_bytes())
    bell.chmod(0o600)


def truncate(bell: Path) -> None:
    os.truncate(bell, 0)


def cut_slots(bell: Path) -> None:
    os.truncate(bell, START + 5)


@pytest.mark.usefixtures("fast_polls")
@pytest.mark.parametrize("damage", [remove, replace, replace_by_link, truncate, cut_slots])
@pytest.mark.parametrize("is_late", [True, False])
def test_damage_to_the_bell_changes_only_the_time(
    is_late: bool, damage: Callable[[Path], None], store: FileStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bell is damaged while ranks sleep in slots, and another rank has died there."""
    if not is_late:
        monkeypatch.setattr(arrival, "LATE_S", 0.02)
    with FileStore(path, timeout=HANG_S) as other, FileStore(path, timeout=HANG_S) as third:
        thread = start_thread(meet, other, 0, 3)
        until(lambda: ("0/3" in arrivals(store)) if is_late else has_arrived(store, 0, 3))
        damage(path.with_name("store.bell"))
        second = start_thread(meet, third, 1, 3)
        assert store.check([KEYS[1]]) is False
        until(lambda: {"0/3", "1/3"} <= set(arrivals(store)))
        meet(store, 2, 3)
        ends_soon(thread)
        ends_soon(second)
        assert sorted(arrivals(store)) == ["0/3", "1/3", "2/3"]


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("damage", [remove, replace, truncate])
def test_arrival_of_a_dead_rank_in_a_bell_that_is_gone_is_lost(
    damage: Callable[[Path], None], store: FileStore, path: Path
) -> None:
    """No delete could clear the slots of a file without a name, so they count no more."""
    die_in_slot(path, 0)
    assert ranks_in_slots(store, "b", 2) == [0]
    damage(path.with_name("store.bell"))
    assert not passes(store, 1)
    with FileStore(path, timeout=HANG_S) as other:
        meet(other, 0)


@pytest.mark.usefixtures("fast_polls")
def test_bytes_of_no_barrier_in_the_slots_change_only_the_time(
    path: Path, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Ranks meet again and again while another thread writes random bytes, and slots of other barriers, over theirs."""
    size, rounds, passed = 3, scale(30), list[tuple[int, int]]()
    stores = [FileStore(path, timeout=HANG_S) for _ in range(size)]
    for store in stores:
        wait_in_vain(store)

    def take_part(rank: int) -> None:
        for number in range(rounds):
            stores[rank].set(f"came/{number}/{rank}", "1")
            meet(stores[rank], rank, size, HANG_S, f"b{number}")
            assert stores[rank].check([f"came/{number}/{each}" for each in range(size)]), "a false end"
            passed.append((rank, number))

    def spoil() -> None:
        bell = stores[0]._slots.bell()  # type: ignore[union-attr]
        assert bell is not None
        while not is_over:
            content = content_of(stores[0], f"b{rng.randrange(rounds)}", rng.choice([2, 4, size]))
            place = row_of(content) + SLOT * rng.randrange(size) + rng.choice([0, 0, rng.randrange(SLOT)])
            wrong = content if content[HASH] != size else rng.randbytes(rng.randrange(1, 3 * SLOT))
            os.pwrite(bell.fd, wrong, place)

    is_over: list[bool] = []
    spoiler = start_thread(spoil)
    for thread in [start_thread(take_part, rank) for rank in range(size)]:
        thread.join()
    is_over.append(True)
    spoiler.join()
    assert len(passed) == size * rounds
    for number in range(rounds):
        assert sorted(stores[0].get(f"b{number}/arrivals").split()) == [b"0/3", b"1/3", b"2/3"]
    for store in stores:
        store.close()


# Users


@pytest.mark.usefixtures("no_polls")
def test_users_of_whom_one_can_not_write_the_bell_meet_in_the_log(
    public_dir: Path, as_nobody: Callable[..., Any]
) -> None:
    path = public_dir / "store"
    with FileStore(path, timeout=HANG_S, mode=0o666) as store:
        wait_in_vain(store)
        path.with_name("store.bell").chmod(0o600)
        thread = sleeps_in_slot(store, 0)

        def come() -> list[str]:
            with FileStore(path, timeout=HANG_S, mode=0o666) as other:
                with pytest.raises(StoreUnavailableError, match="can't be opened"):
                    other.delete_key("b/complete")
                with pytest.raises(StoreTimeoutError) as caught:
                    meet(other, 1, timeout=0.06)
                assert caught.value.missing_ranks == ("0",)
                return arrivals(other)

        assert as_nobody(come) == ["1/2", "-1/2"]
        assert thread.is_alive()
        meet(store, 1)
        ends_soon(thread)


# Threads, groups and tasks


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("handles", [1, 2])
def test_threads_with_one_rank_at_one_barrier_arrive_once(handles: int, store: FileStore, path: Path) -> None:
    """The second one arrives in the log, and so its call is a repeated one."""
    with FileStore(path, timeout=HANG_S) as other:
        first = sleeps_in_slot(store, 0)
        second = start_thread(meet, (store, other)[handles - 1], 0)
        until(lambda: arrivals(store) == ["0/2"])
        assert first.is_alive()
        assert second.is_alive()
        with FileStore(path, timeout=HANG_S) as third:
            meet(third, 1)
        ends_soon(first)
        ends_soon(second)
        assert sorted(arrivals(store)) == ["0/2", "1/2"]


@pytest.mark.usefixtures("no_polls")
def test_call_whose_slot_another_call_of_the_handle_uses_arrives_in_the_log(store: FileStore, path: Path) -> None:
    """The slots of both barriers are in one row."""
    row = row_of(content_of(store, "b", 2))
    name = next(name for name in map(str, range(10_000)) if row_of(content_of(store, name, 2)) == row)
    first = sleeps_in_slot(store, 0)
    second = start_thread(meet, store, 0, 2, HANG_S, name)
    until(lambda: store.get(f"{name}/arrivals", default=b"") == b"0/2 ")
    assert ranks_in_slots(store, "b", 2) == [0]
    with FileStore(path, timeout=HANG_S) as other:
        for thread, each in ((first, "b"), (second, name)):
            meet(other, 1, 2, HANG_S, each)
            ends_soon(thread)
    third = sleeps_in_slot(store, 0, name="c")  # its slot is free again
    meet(store, 1, name="c")
    ends_soon(third)


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("is_shared", [False, True], ids=["a handle for each", "one handle"])
def test_groups_with_equal_ranks_meet_apart(is_shared: bool, path: Path) -> None:
    """No group waits for a poll, because the slots of their barriers are in rows of their own."""
    size, groups, rounds = 2, 3, 20
    with FileStore(path, timeout=HANG_S) as base, ExitStack() as opened:
        wait_in_vain(base)
        stores = [base if is_shared else opened.enter_context(base.clone()) for _ in range(size * groups)]
        by_row = {row_of(content_of(base, name, size)): name for name in map(str, range(10_000))}
        names = list(by_row.values())[: rounds * groups]

        def take_part(group: int, rank: int) -> None:
            for number in range(rounds):
                meet(stores[group * size + rank], rank, size, HANG_S, names[number * groups + group])

        for thread in [start_thread(take_part, group, rank) for group in range(groups) for rank in range(size)]:
            ends_soon(thread)
        for name in names:
            assert sorted(base.get(f"{name}/arrivals").split()) == [b"0/2", b"1/2"]


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("sleeps", ["task", "thread"])
def test_tasks_and_threads_meet_in_slots(sleeps: str, store: FileStore, path: Path) -> None:
    with FileStore(path, timeout=HANG_S) as other:
        wait_in_vain(other)

        async def come(rank: int) -> None:
            await aio.barrier(aio.AsyncStore(store), 2, "b", HANG_S, rank=rank)

        async def sleep_first() -> None:
            task = asyncio.ensure_future(come(0))
            while not has_arrived(other, 0):
                await asyncio.sleep(0.001)
            assert ranks_in_slots(other, "b", 2) == [0]
            await asyncio.to_thread(meet, other, 1)
            await asyncio.wait_for(task, SOON_S)

        if sleeps == "task":
            asyncio.run(sleep_first())
        else:
            thread = sleeps_in_slot(other, 1)
            asyncio.run(come(0))
            ends_soon(thread)
        assert arrivals(store) == (["0/2", "1/2"] if sleeps == "task" else ["1/2", "0/2"])
