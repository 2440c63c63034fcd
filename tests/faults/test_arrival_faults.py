"""Arrivals at a barrier on a full or failing disk, in a compaction, beside a held lock, a close, a signal or a fork."""

from __future__ import annotations

import asyncio
import errno
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faults.holder import Holder
from support.faulty import faulty_os
from support.internals import log_of, notifier_of, ranks_in_slots, watcher_of
from support.interrupts import At, interrupt
from support.places import Thread, start_thread, wait_in_vain
from support.plain_reader import read_newest

from fscoord import (
    FileStore,
    FscoordError,
    HashStore,
    PrefixStore,
    StoreClosedError,
    StoreError,
    StoreTimeoutError,
    StoreUnavailableError,
    barrier,
)
from fscoord._log.wakeup import watcher
from fscoord._log.wakeup.watcher import Waiter
from fscoord._waiting.wait import ArrivalRequest
from fscoord.aio import AsyncStore
from fscoord.store import Store, wait_on
from fscoord.stores.file import notifier
from fscoord.stores.file.arrival_slots import SLOT

HANG_S = 60
SOON_S = HANG_S / 3
TRACE_S = HANG_S

Meet = Callable[[FileStore, int, int, float], None]


class Way:
    """A way to meet: the call of a rank, and the keys that it changes."""

    def __init__(self, name: str, meet: Callable[[FileStore, int, int, float | None], None], prefix: str) -> None:
        self.name, self.meet = name, meet
        words = ("num_members", "last_member") if name == "count" else ("arrivals", "complete")
        self.barrier = f"{prefix}b"
        self.arrivals, self.done = (f"{self.barrier}/{word}" for word in words)

    def arrived(self, store: FileStore, size: int = 2) -> int:
        """Return how many arrivals are in the log, or only in a slot."""
        text = store.get(self.arrivals, default=b"")
        if self.name == "count":
            return int(text or b"0")
        tokens = text.decode().split()
        in_slots = {f"{rank}/{size}" for rank in ranks_in_slots(store, self.barrier, size)}
        return len(tokens) + len(in_slots.difference(tokens))


def by_rank(store: Store, rank: int, size: int, limit: float | None) -> None:
    """Arrive by rank. A call that has timed out waits `TRACE_S` for the lock, to say so in the log."""
    barrier(store, size, "b", limit, rank=rank, trace_timeout=TRACE_S)


WAYS = [
    Way("count", lambda store, _, size, limit: store.barrier("b", size, limit), ""),
    Way("rank", by_rank, ""),
    Way(
        "view",
        lambda store, rank, size, limit: by_rank(PrefixStore("p", store), rank, size, limit),
        "p/",
    ),
]
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.name))


@pytest.fixture
def path(memory: Path, mounts_stay: None) -> Path:
    return memory / "store"


@pytest.fixture
def store(path: Path) -> Iterator[FileStore]:
    with FileStore(path, timeout=HANG_S) as store:
        yield store


@pytest.fixture
def other(path: Path, store: FileStore) -> Iterator[FileStore]:
    with FileStore(path, timeout=HANG_S) as other:
        yield other


@pytest.fixture(autouse=True)
def _only_rings_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLOW_FIRST_S", "SLOW_LAST_S"):
        monkeypatch.setattr(watcher, name, 3.0 * HANG_S)
    monkeypatch.setattr(notifier, "ANNOUNCE_S", 3.0 * HANG_S)


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "that never came"
        time.sleep(0.001)


def watch_of(store: FileStore) -> Any:
    watch = watcher_of(store)
    assert watch is not None
    return watch


def asleep(store: FileStore) -> int:
    """Count the threads of this process that sleep on what `store` watches."""
    watch = watcher_of(store)
    return 0 if watch is None else len(watch._sleeping)


def sleep_in_thread(way: Way, store: FileStore, rank: int, size: int, others: int = 0) -> Thread:
    """Start a thread that arrives, and return when it sleeps beside so many others."""
    thread = start_thread(way.meet, store, rank, size, None)
    until(lambda: asleep(store) > others or not thread.is_alive())
    return thread


def passes_soon(thread: Thread) -> None:
    started = time.monotonic()
    thread.join()
    assert time.monotonic() - started < SOON_S, "its deadline ended the sleep, not a ring"


def nothing_is_left(store: FileStore) -> None:
    assert not notifier_of(store)._waiters
    assert not asleep(store)


# The disk


class Disk:
    """Lets the `number`-th write to the log fail, after `part` of it; and each write of a slot, unless `has_slots`."""

    def __init__(self, fd: int, number: int, error: int, part: float, *, has_slots: bool = True) -> None:
        self._fd, self._left, self._error, self._part, self._has_slots = fd, number, error, part, has_slots

    def __call__(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "pwrite" and len(arguments[1]) == SLOT and not self._has_slots:
            raise OSError(self._error, os.strerror(self._error))
        if name == "write" and arguments[0] == self._fd:
            self._left -= 1
            if self._left == -1:
                real(self._fd, arguments[1][: int(len(arguments[1]) * self._part)])
                raise OSError(self._error, os.strerror(self._error))


@pytest.mark.parametrize("part", [0.0, 0.5], ids=["nothing", "half"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(
    ("way", "number"),
    [(WAYS[0], 0), (WAYS[0], 1), (WAYS[1], 0), (WAYS[2], 0)],
    ids=["count, the arrival", "count, the key", "rank", "view"],
)
def test_last_arrival_whose_write_fails_says_whether_it_counts(
    way: Way, number: int, error: int, part: float, store: FileStore, other: FileStore
) -> None:
    """A rank has arrived in its slot before it writes to the log."""
    other.announce_rank(1)
    thread = sleep_in_thread(way, store, 0, 2)
    other.check(["k"])  # so it knows of the bell, which has the slots
    with (
        faulty_os() as faulty,
        faulty.instead(Disk(log_of(other).handle.lock.fd, number, error, part)),
        pytest.raises(StoreUnavailableError) as caught,
    ):
        way.meet(other, 1, 2, HANG_S)
    found = way.arrived(store), store.check([way.done]), caught.value.maybe_applied
    counts = number == 1 or way.name != "count"
    if number == 0:
        way.meet(other, 1, 2, HANG_S)
    else:
        other.set(way.done, "1")
    passes_soon(thread)
    assert found == (1 + counts, False, counts or error == errno.EIO)
    assert read_newest(Path(store.path)).ends == "whole"
    nothing_is_left(store)


@every_way
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_arrival_that_fails_leaves_no_waiter(way: Way, error: int, store: FileStore) -> None:
    wait_in_vain(store)
    store.announce_rank(0)
    with (
        faulty_os() as faulty,
        faulty.instead(Disk(log_of(store).handle.lock.fd, 0, error, 0.5, has_slots=False)),
        pytest.raises(StoreUnavailableError),
    ):
        way.meet(store, 0, 2, HANG_S)
    nothing_is_left(store)
    assert way.arrived(store) == 0


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: str(way.name))
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_rank_whose_slot_has_no_room_arrives_in_the_log(
    way: Way, error: int, store: FileStore, other: FileStore
) -> None:
    wait_in_vain(store)
    with faulty_os() as faulty, faulty.instead(Disk(-1, 0, error, 0.0, has_slots=False)):
        thread = sleep_in_thread(way, store, 0, 2)
        assert store.get(way.arrivals) == b"0/2 "
        assert not ranks_in_slots(store, way.barrier, 2)
    way.meet(other, 1, 2, HANG_S)
    passes_soon(thread)
    assert way.arrived(store) == 2
    nothing_is_left(store)


@every_way
def test_arrival_is_written_after_the_void_of_a_torn_record(way: Way, store: FileStore, other: FileStore) -> None:
    store.announce_rank(0)
    other.announce_rank(1)
    threads = []
    for handle, rank in ((store, 0), (other, 1)):
        wait_in_vain(handle)
        with FileStore(store.path, timeout=HANG_S) as third:
            third.set("torn", "x" * 100)
        os.truncate(store.path, os.path.getsize(store.path) - 50)
        if rank == 0:
            threads.append(sleep_in_thread(way, handle, rank, 2))
        else:
            way.meet(handle, rank, 2, HANG_S)
    passes_soon(threads[0])
    log = read_newest(Path(store.path))
    assert log.ends == "whole"
    assert [kind for _, kind, *_ in log.records].count("V") == 2


# Compactions, long values, and what else comes in between


@every_way
@pytest.mark.parametrize("spill", [None, 1], ids=["in memory", "spilled"])
def test_arrival_at_which_a_compaction_is_due_is_recorded_once(way: Way, spill: int | None, path: Path) -> None:
    with FileStore(path, timeout=HANG_S, compact_bytes=1, spill_bytes=spill) as store, store.clone() as other:
        for number in range(20):
            store.set("garbage", "x" * number)
        log_of(store).handle.compact_at = math.inf
        store.set("garbage", "x" * 1000)
        store.set("garbage", "")
        threads = []
        for rank in range(3):
            handle = (store, other)[rank % 2]
            handle.announce_rank(rank)
            handle.check(["k"])
            log_of(handle).handle.compact_at = 0
            before = log_of(handle).handle.header.generation
            if rank < 2:
                threads.append(sleep_in_thread(way, handle, rank, 3, others=rank))
            else:
                way.meet(handle, rank, 3, HANG_S)
            assert log_of(handle).handle.header.generation > before or rank, "there was no compaction"
        for thread in threads:
            passes_soon(thread)
        assert way.arrived(store) == 3
        nothing_is_left(store)
        nothing_is_left(other)


@every_way
def test_arrival_of_a_handle_that_must_follow_a_compaction_is_recorded_once(
    way: Way, store: FileStore, other: FileStore
) -> None:
    thread = sleep_in_thread(way, store, 0, 2)
    other.check(["k"])
    with FileStore(store.path, timeout=HANG_S) as third:
        third.compact()
        third.compact()
    way.meet(other, 1, 2, HANG_S)
    passes_soon(thread)
    assert way.arrived(store) == 2


@every_way
def test_handle_that_is_not_registered_registers_with_its_arrival(way: Way, store: FileStore, other: FileStore) -> None:
    assert (log_of(store).handle.lock.session, log_of(other).handle.lock.session) == (0, 0)
    thread = sleep_in_thread(way, store, 0, 2)
    way.meet(other, 1, 2, HANG_S)
    passes_soon(thread)
    assert sorted((log_of(store).handle.lock.session, log_of(other).handle.lock.session)) == [1, 2]
    if way.name != "count":
        assert [member.rank for member in store.members([0, 1])] == [0, 1]


# Limits of time


@every_way
def test_held_lock_ends_an_arrival_at_the_timeout_of_the_store(
    way: Way, path: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It limits the write; that of the barrier limits the wait for others. To arrive in a slot takes no lock."""
    monkeypatch.setitem(globals(), "TRACE_S", 0.1)
    store.announce_rank(0)
    wait_in_vain(store)
    store.set_timeout(0.05)
    with Holder(str(path)), pytest.raises(StoreTimeoutError):
        way.meet(store, 0, 2, 2.0)  # a call whose time is over before it begins to wait arrives in no slot
    nothing_is_left(store)
    assert way.arrived(store) == (way.name != "count")


@every_way
def test_arrival_waits_for_the_lock_longer_than_its_barrier_lasts(way: Way, store: FileStore, other: FileStore) -> None:
    store.announce_rank(0)
    wait_in_vain(store)
    lock = log_of(other).handle.lock
    lock.try_lock()
    thread = start_thread(way.meet, store, 0, 2, 0.01)
    time.sleep(0.05)
    assert thread.is_alive()
    lock.unlock()
    with pytest.raises(StoreTimeoutError):
        thread.join()
    assert way.arrived(store) >= 1
    nothing_is_left(store)


@every_way
def test_timeout_of_zero_counts_an_arrival_and_does_not_wait(way: Way, store: FileStore, other: FileStore) -> None:
    with pytest.raises(StoreTimeoutError):
        way.meet(store, 0, 2, 0.0)
    nothing_is_left(store)
    assert way.arrived(store) >= 1
    way.meet(other, 1, 2, 0.0)
    assert store.check([way.done])


@every_way
def test_barrier_of_one_passes_at_once(way: Way, store: FileStore) -> None:
    way.meet(store, 0, 1, 0.0)
    assert store.check([way.done])
    nothing_is_left(store)


@every_way
def test_read_only_handle_arrives_nowhere(way: Way, path: Path, store: FileStore) -> None:
    store.set("k", "1")
    before = path.read_bytes(), sorted(os.listdir(path.parent))
    with FileStore(path, read_only=True, timeout=HANG_S) as reader:
        with pytest.raises(StoreError, match="read_only"):
            way.meet(reader, 0, 2, HANG_S)
        nothing_is_left(reader)
    assert (path.read_bytes(), sorted(os.listdir(path.parent))) == before


# Threads


@every_way
def test_close_by_another_thread_ends_the_sleep(way: Way, store: FileStore) -> None:
    thread = sleep_in_thread(way, store, 0, 2)
    started = time.monotonic()
    store.close()
    with pytest.raises(StoreClosedError):
        thread.join()
    assert time.monotonic() - started < SOON_S


@every_way
@pytest.mark.parametrize("handles", [1, 2, 4])
def test_threads_that_are_ranks_wake_each_other(way: Way, handles: int, path: Path) -> None:
    """One of them reads the events for the others of its handle, and it may be the first to pass."""
    size, rounds = 4, 25
    stores = [FileStore(path, timeout=HANG_S) for _ in range(handles)]
    late: list[str] = []

    def take_part(rank: int) -> None:
        for number in range(rounds):
            view = PrefixStore(f"round{number}", stores[rank % handles])
            started = time.monotonic()
            way.meet(view, rank, size, None)  # type: ignore[arg-type]
            if time.monotonic() - started > SOON_S:
                late.append(f"rank {rank} in round {number}")

    threads = [start_thread(take_part, rank) for rank in range(size)]
    for thread in threads:
        thread.join()
    assert not late
    for store in stores:
        nothing_is_left(store)
        store.close()


@pytest.mark.parametrize("coherence", ["locked", "direct"])
@every_way
def test_ranks_on_a_shared_mount_wake_each_other(
    way: Way, coherence: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There one process of the node asks for all of them."""
    monkeypatch.undo()  # slow polls are what finds the changes of other hosts
    with FileStore(path, timeout=HANG_S, coherence=coherence) as store, store.clone() as other:
        thread = start_thread(way.meet, store, 0, 2, None)
        until(lambda: way.arrived(other))
        way.meet(other, 1, 2, HANG_S)
        passes_soon(thread)
        assert way.arrived(other) == 2


# Signals, forks, tasks


@pytest.mark.usefixtures("no_ctrl_c_is_lost")
def test_arrival_that_is_interrupted_at_any_point_leaves_nothing_behind(store: FileStore, other: FileStore) -> None:
    """Neither a sleeper nor a lock; and it counts once, or not at all."""
    way = WAYS[0]
    wait_in_vain(store)
    store.announce_rank(0)
    for handle in (store, other):  # which opens the bell, to ring it
        handle.set("others", "0")
    opened, number, reached = len(os.listdir("/proc/self/fd")), 0, True
    while reached:
        number += 1
        at = At(number, interrupt)
        with suppress(KeyboardInterrupt, StoreTimeoutError), at:
            way.meet(store, 0, 2, 0.003)
        reached = at.reached
        assert not asleep(store), at.where
        assert other.add("others", 1) == number, at.where
        assert way.arrived(other) <= 1, at.where
        other.delete_key(way.arrivals)
        store.check(["k"])  # recovers, so that its points are not among the next ones
    assert len(os.listdir("/proc/self/fd")) == opened
    assert number > 30


@every_way
def test_last_arrival_that_is_interrupted_at_any_point_is_whole_or_can_be_completed(
    way: Way, store: FileStore, other: FileStore
) -> None:
    store.announce_rank(1)
    number, reached = 0, True
    while reached:
        number += 1
        with suppress(StoreTimeoutError):
            way.meet(other, 0, 2, 0.0)
        if way.name != "count":
            other.set(way.arrivals, "0/2 ")
        at = At(number, interrupt)
        with suppress(KeyboardInterrupt), at:
            way.meet(store, 1, 2, HANG_S)
        reached = at.reached
        arrived, done = way.arrived(other), other.check([way.done])
        assert arrived == 2 or not done, at.where
        if not reached:
            assert done
        elif way.name != "count":
            with suppress(FscoordError):
                way.meet(store, 1, 2, 0.0)
            assert other.check([way.done]), at.where
        for key in (way.arrivals, way.done):
            other.delete_key(key)
        store.check(["k"])
    assert not asleep(store)
    assert number > 30


@every_way
def test_fork_beside_a_thread_that_sleeps_leaves_both_usable(way: Way, path: Path, store: FileStore) -> None:
    thread = sleep_in_thread(way, store, 0, 2)
    pid = os.fork()
    if not pid:
        status = 1
        try:
            signal.alarm(HANG_S)
            way.meet(store, 1, 2, HANG_S)
            status = 0
        finally:
            os._exit(status)
    passes_soon(thread)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert way.arrived(store) == 2


def meet_in_task(way: Way, store: FileStore, rank: int, limit: float) -> Any:
    place = PrefixStore("p", store) if way.name == "view" else store
    tasks = AsyncStore(place)
    if way.name == "count":
        return tasks.barrier("b", 2, limit)
    from fscoord import aio

    return aio.barrier(tasks, 2, "b", limit, rank=rank)


@every_way
def test_task_that_is_cancelled_at_a_barrier_has_arrived_and_leaves_no_waiter(
    way: Way, store: FileStore, other: FileStore
) -> None:
    async def come_and_leave() -> None:
        task = asyncio.ensure_future(meet_in_task(way, store, 0, HANG_S))
        while not way.arrived(other):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(come_and_leave())
    way.meet(other, 1, 2, 0.0)
    assert other.check([way.done])
    assert not [waiter for each in store._notifiers for waiter in each._waiters]


@every_way
def test_task_is_woken_by_the_last_arrival(way: Way, store: FileStore, other: FileStore) -> None:
    async def come() -> float:
        task = asyncio.ensure_future(meet_in_task(way, store, 0, HANG_S))
        while not way.arrived(other):
            await asyncio.sleep(0.001)
        await asyncio.to_thread(way.meet, other, 1, 2, HANG_S)
        started = time.monotonic()
        await task
        return time.monotonic() - started

    assert asyncio.run(come()) < SOON_S


# Who reads the events


def test_event_that_is_read_by_a_thread_that_is_interrupted_is_not_lost(store: FileStore, other: FileStore) -> None:
    """A signal handler may raise after the read of the event, and before anybody was woken by it."""
    wait_in_vain(store)
    events = watch_of(store)._events
    wait, raised = events.wait, list[bool]()

    def wait_and_be_interrupted(seconds: float) -> bool:
        found = bool(wait(seconds))
        if found and not raised:
            raised.append(True)
            raise KeyboardInterrupt
        return found

    events.wait = wait_and_be_interrupted
    threads = [sleep_in_thread(WAYS[1], store, rank, 3, others=rank) for rank in range(2)]
    barrier(other, 3, "b", HANG_S, rank=2)
    started = time.monotonic()
    ends = [outcome(thread) for thread in threads]
    assert time.monotonic() - started < SOON_S, "the event was lost"
    assert sorted(ends) == ["", "KeyboardInterrupt"]


def outcome(thread: Thread) -> str:
    """Return the name of the error that ended the thread."""
    try:
        thread.join()
    except BaseException as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("sleep", ["max_sleep", "sleep_once"])
def test_event_that_another_thread_reads_before_the_sleep_ends_it(
    sleep: str, store: FileStore, other: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the arming and the sleep. The other thread finds nobody asleep, and goes on reading events."""
    real, is_over = getattr(Waiter, sleep), threading.Event()

    def go_on_reading(watch: Any, reads: threading.Event) -> None:
        with watch._reader_mutex:
            assert watch._events.wait(HANG_S)
            watch._dispatch(watch._events)
            reads.set()
            is_over.wait(HANG_S)

    def let_the_last_arrive(self: Waiter, limit: float) -> Any:
        monkeypatch.setattr(Waiter, sleep, real)
        with start_thread(barrier, other, 2, "b", HANG_S, 1):
            pass
        reads = threading.Event()
        readers.append(start_thread(go_on_reading, self.watcher, reads))
        assert reads.wait(HANG_S)
        return real(self, limit)

    if sleep == "sleep_once":
        wait_in_vain(store)  # the first wait of a handle has no spare waiter
    monkeypatch.setattr(Waiter, sleep, let_the_last_arrive)
    readers: list[Thread] = []
    started = time.monotonic()
    barrier(store, 2, "b", HANG_S, rank=0)
    is_over.set()
    readers[0].join()
    assert time.monotonic() - started < SOON_S, "the event was lost"


@pytest.mark.parametrize("kind", ["file", "hash"])
def test_arrival_whose_time_is_over_ends_at_once(kind: str, tmp_path: Path) -> None:
    """The time counts from the call of the rank, which may have waited since to announce its rank."""
    with FileStore(tmp_path / "log") if kind == "file" else HashStore() as store:
        began = time.monotonic() - HANG_S - 1
        request = ArrivalRequest(b"b/num", b"", b"b/done", 2, HANG_S, None, began)
        before = time.monotonic()
        with pytest.raises(StoreTimeoutError):
            wait_on(store, request)
        assert time.monotonic() - before < HANG_S
        assert store.add("b/num", 0) == 1
