"""Semaphores and read-write locks. `test_locks` tests the features that they share with locks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start
from support.internals import line_of
from support.places import ETCD, HANG_S, Place, start_thread, until

from fscoord import aio
from fscoord.recipes import ReadWriteLock, Semaphore
from fscoord.recipes.lock import PlainReadWriteLock
from fscoord.store import Store


@pytest.fixture(params=["hash", "nested-hash", "file-ofd", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


class Crowd:
    """How many readers and writers are inside, and the most there ever were."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = {"r": 0, "w": 0}
        self.most = 0

    def enter(self, kind: str) -> None:
        with self.lock:
            self.inside[kind] += 1
            self.most = max(self.most, sum(self.inside.values()))
            assert self.inside["w"] <= 1
            assert not (self.inside["w"] and self.inside["r"])

    def leave(self, kind: str) -> None:
        with self.lock:
            self.inside[kind] -= 1


# Semaphores


def test_semaphore_has_as_many_holders_at_a_time_as_its_value(place: Place) -> None:
    crowd = Crowd()

    def run() -> None:
        semaphore = Semaphore(place.open(how="clone"), "s", 2)
        for _ in range(8):
            with semaphore:
                crowd.enter("r")
                crowd.leave("r")

    for thread in [start_thread(run) for _ in range(4)]:
        thread.join()
    assert 1 <= crowd.most <= 2


def test_semaphore_object_may_hold_it_as_often_as_its_value_and_no_more(store: Store) -> None:
    semaphore = Semaphore(store, "s", 3)
    assert [semaphore.acquire(blocking=False) for _ in range(4)] == [True, True, True, False]
    assert [owner.token for owner in semaphore.holders()] == [1, 2, 3]
    assert semaphore.token == 3
    semaphore.release()
    assert semaphore.token == 2
    assert Semaphore(store, "s", 3).acquire(timeout=0)
    for _ in range(2):
        semaphore.release()
    with pytest.raises(ValueError, match="not held"):
        semaphore.release()
    assert [owner.token for owner in semaphore.holders()] == [4]


def test_semaphore_releases_several_acquisitions_or_none(store: Store) -> None:
    semaphore = Semaphore(store, "s", 3)
    assert all(semaphore.acquire(blocking=False) for _ in range(3))
    with pytest.raises(ValueError, match="not held 4 times"):
        semaphore.release(4)
    for number in (0, -1):
        with pytest.raises(ValueError, match="n must be at least 1"):
            semaphore.release(number)
    assert len(semaphore.holders()) == 3
    semaphore.release(2)
    assert [owner.token for owner in semaphore.holders()] == [1]
    semaphore.release(n=1)
    assert not semaphore.holders()


def test_semaphore_for_tasks_releases_several_acquisitions_or_none(store: Store) -> None:
    async def run() -> None:
        semaphore = aio.Semaphore(aio.AsyncStore(store), "s", 3)
        for _ in range(3):
            await semaphore.acquire()
        with pytest.raises(ValueError, match="not held 4 times"):
            await semaphore.release(4)
        await semaphore.release(3)
        assert not await semaphore.holders()
        with pytest.raises(ValueError, match="not held"):
            await semaphore.release()

    asyncio.run(run())


def test_holder_that_leaves_serves_the_next_waiter_in_line(place: Place, store: Store) -> None:
    first, second = Semaphore(store, "s", 2), Semaphore(store, "s", 2)
    assert first.acquire()
    assert second.acquire()
    waiter = start_thread(Semaphore(place.open(how="clone"), "s", 2).acquire)
    until(first.waiters)
    first.release()
    assert waiter.join()
    assert [owner.token for owner in second.holders()] == [2, 3]


def test_callers_with_different_values_are_an_error(store: Store) -> None:
    assert Semaphore(store, "s", 2).acquire()
    with pytest.raises(ValueError, match=r"value=3 here and 2 for .*: all contenders must"):
        Semaphore(store, "s", 3).acquire()
    assert len(Semaphore(store, "s", 2).holders()) == 1
    with pytest.raises(ValueError, match="value"):
        Semaphore(store, "s", 0)


def test_place_of_a_dead_holder_is_free_whichever_holder_it_was(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "hold_semaphore", [["s", 2]]) as workers:
        start(store, 1)
        semaphore = Semaphore(store, "s", 2)
        until(semaphore.holders)
        assert semaphore.acquire()
        waiter = start_thread(Semaphore(place.open(how="clone"), "s", 2).acquire, True, HANG_S)
        until(semaphore.waiters)
        workers.processes[0].kill()
        workers.processes[0].wait(HANG_S)
        assert waiter.join()  # though the one right before it lives
    place.close()


# Readers and writers


def test_readers_share_and_a_writer_is_alone(place: Place) -> None:
    crowd = Crowd()

    def run(kind: str) -> None:
        lock = ReadWriteLock(place.open(how="clone"), "l")
        for _ in range(8):
            with lock.reader if kind == "r" else lock.writer:
                crowd.enter(kind)
                crowd.leave(kind)

    for thread in [start_thread(run, kind) for kind in "rrww"]:
        thread.join()


def queue_up(place: Place, kinds: str, then: Callable[[str], Any]) -> list[Any]:
    """Let one thread after the other wait, for reading or writing; each calls `then` when it has it, and releases."""

    def run(kind: str) -> None:
        lock = ReadWriteLock(place.open(how="clone"), "l")
        with lock.reader if kind == "r" else lock.writer:
            then(kind)

    look = ReadWriteLock(place.open(how="clone"), "l")
    threads = []
    for number, kind in enumerate(kinds):
        threads.append(start_thread(run, kind))
        until(lambda: len(look.waiters()) == number + 1)  # noqa: B023
    return threads


def test_readers_behind_one_another_acquire_together(place: Place, store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    together = threading.Barrier(3)
    with lock.writer:
        threads = queue_up(place, "rrr", lambda _: together.wait(HANG_S))
    for thread in threads:
        thread.join()
    assert not lock.holders()


def test_reader_behind_a_waiting_writer_waits_for_it(place: Place, store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    order: list[str] = []
    with lock.reader:
        assert ReadWriteLock(store, "l").reader.acquire(blocking=False)
        threads = queue_up(place, "wr", order.append)
        assert not ReadWriteLock(store, "l").reader.acquire(blocking=False)
        assert [waiter.token for waiter in lock.waiters()] == [0, 0]
        assert [owner.token for owner in lock.holders()] == [1, 2]
        line_of(lock.reader).leave(line_of(lock.reader).entries()[1].id)
        assert not order
    for thread in threads:
        thread.join()
    assert order == ["w", "r"]


def test_reader_does_not_become_a_writer(store: Store) -> None:
    lock = ReadWriteLock(store, "l", timeout=0.01)
    with lock.reader, pytest.raises(RuntimeError, match="the lock for writing 'l' was not acquired"), lock.writer:
        pytest.fail("two have it")


@pytest.mark.parametrize(
    ("held", "wanted"), [("reader", "writer"), ("writer", "reader"), ("writer", "writer")], ids="-".join
)
def test_plain_lock_refuses_an_acquisition_that_would_wait_for_its_own_thread(
    store: Store, held: str, wanted: str
) -> None:
    both = PlainReadWriteLock(store, "l")
    words = rf"for {'reading' if held == 'reader' else 'writing'}.*release that side first"
    with getattr(both, held):
        with pytest.raises(RuntimeError, match=words):
            getattr(both, wanted).acquire()
        with pytest.raises(RuntimeError, match=words), getattr(both, wanted):
            pytest.fail("it is held")
        assert not getattr(both, wanted).acquire(blocking=False)
        assert not getattr(ReadWriteLock(store, "l"), wanted).acquire(timeout=0.01)
        assert len(both.holders()) == 1
        assert not both.waiters()
        thread = start_thread(getattr(both, wanted).acquire)
        until(both.waiters)
    assert thread.join()  # the wait of another thread ends with the release
    getattr(both, wanted).release()


def test_plain_reader_behind_a_writer_that_waits_for_it_is_refused(place: Place, store: Store) -> None:
    lock = PlainReadWriteLock(store, "l")
    with lock.reader:
        with lock.reader:
            assert len(lock.holders()) == 2
        writer = start_thread(ReadWriteLock(place.open(how="clone"), "l").writer.acquire)
        until(lock.waiters)
        with pytest.raises(RuntimeError, match="for reading"):
            lock.reader.acquire()
    assert writer.join()


def test_upgrade_of_a_task_is_refused_and_that_of_another_task_waits(store: Store) -> None:
    async def run() -> None:
        lock = aio.ReadWriteLock(aio.AsyncStore(store), "l")
        async with lock.reader:
            with pytest.raises(RuntimeError, match="for reading"):
                await lock.writer.acquire()
            other = asyncio.create_task(lock.writer.acquire())
            while not await lock.waiters():
                await asyncio.sleep(0)
            assert await lock.held_side() == "reader"
        assert await other

    asyncio.run(run())


def test_read_write_lock_says_which_side_is_held(store: Store) -> None:
    lock, other = ReadWriteLock(store, "l"), ReadWriteLock(store, "l")
    assert lock.held_side() is None
    with other.reader:
        assert lock.held_side() == "reader"
    with other.writer:
        assert lock.held_side() == "writer"
    assert lock.held_side() is None
