"""Read-write locks: acquisitions of one thread or task again, the change from writer to reader, and what is refused."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.places import Place

from fscoord import LockLostError, Store, aio
from fscoord.recipes import ReadWriteLock, force_release

LIMIT_S = 60


def in_another_thread(call: object) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(LIMIT_S)  # type: ignore[arg-type]


def test_reader_acquires_again_behind_a_waiting_writer(place: Place, store: Store) -> None:
    lock, other = ReadWriteLock(store, "l"), ReadWriteLock(place.open(how="clone"), "l")
    turns: list[str] = []

    def write() -> None:
        with other.writer:
            turns.append("writer")

    waiter = threading.Thread(target=write)
    with lock.reader:
        waiter.start()
        while not lock.waiters():
            pass
        with lock.reader:
            assert len(lock.holders()) == 1
        assert lock.own_side() == "reader"
        turns.append("reader")
    waiter.join(LIMIT_S)
    assert turns == ["reader", "writer"]
    assert not lock.holders()


def test_writer_acquires_both_sides_again(store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    with lock.writer, lock.writer, lock.reader:
        assert lock.own_side() == lock.held_side() == "writer"
        assert lock.reader.token == lock.writer.token
        assert len(lock.holders()) == 1
    assert lock.held_side() is lock.own_side() is None


def test_repr_after_a_downgrade_says_reading(store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    assert repr(lock).endswith(", not held>")
    with lock.writer:
        assert repr(lock).endswith(", held for writing>")
        lock.downgrade()
        assert repr(lock).endswith(", held for reading>")
    assert repr(lock).endswith(", not held>")


def test_reader_that_wants_to_write_is_told_to_release_first(store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    with lock.reader:
        with pytest.raises(RuntimeError, match=r"holds the lock for reading, .* release that side first"):
            lock.writer.acquire()
        assert not lock.writer.acquire(blocking=False)
        assert not lock.writer.acquire(timeout=0)
        assert not lock.waiters()
    with lock.writer:
        assert lock.own_side() == "writer"


def test_side_is_released_only_by_its_own_thread(store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    with lock.reader:
        assert in_another_thread(lock.own_side) is None

        def release() -> None:
            with pytest.raises(RuntimeError, match="not held by this object, in this thread or task"):
                lock.reader.release()

        in_another_thread(release)
        with pytest.raises(RuntimeError, match="not held by this object"):
            lock.writer.release()
        lock.reader.check()


def test_readers_in_two_threads_by_one_object_have_a_hold_and_a_token_each(store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    with lock.reader:
        own = lock.reader.token

        def read() -> int:
            with lock.reader, lock.reader:
                assert len(lock.holders()) == 2
                return lock.reader.token

        assert in_another_thread(read) == own + 1
        assert lock.reader.token == own
        assert [each.token for each in lock.holders()] == [own]


@pytest.mark.parametrize("how", ["downgrade", "release"])
def test_writer_goes_on_as_reader_with_no_writer_between(how: str, place: Place, store: Store) -> None:
    lock, others = ReadWriteLock(store, "l"), place.open(how="clone")
    turns: list[str] = []

    def take(side: str) -> None:
        with getattr(ReadWriteLock(others, "l"), side):
            turns.append(side)

    threads = [threading.Thread(target=take, args=(side,)) for side in ("reader", "writer")]
    lock.writer.acquire()
    token = lock.writer.token
    for count, thread in enumerate(threads, 1):
        thread.start()
        while len(lock.waiters()) < count:
            pass
    if how == "downgrade":
        lock.downgrade()
    else:
        lock.reader.acquire()
        lock.writer.release()
    threads[0].join(LIMIT_S)
    assert turns == ["reader"]
    assert [each.token for each in lock.holders()] == [token]
    assert lock.own_side() == lock.held_side() == "reader"
    with pytest.raises(RuntimeError, match=r"holds the lock for reading, .* release that side first"):
        lock.writer.acquire()
    (lock.writer if how == "downgrade" else lock.reader).release()
    threads[1].join(LIMIT_S)
    assert turns == ["reader", "writer"]


def test_downgrade_is_refused_without_exactly_one_acquisition_for_writing(store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    with pytest.raises(RuntimeError, match="does not hold it"):
        lock.downgrade()
    with lock.reader, pytest.raises(RuntimeError, match="does not hold it"):
        lock.downgrade()
    with lock.writer, lock.writer:
        with pytest.raises(RuntimeError, match="more than once"):
            lock.downgrade()
        assert lock.held_side() == "writer"


@pytest.mark.parametrize("how", ["downgrade", "release"])
def test_writer_that_lost_its_hold_does_not_go_on_as_reader(how: str, store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    lock.writer.acquire()
    lock.reader.acquire()
    assert force_release(store, "l", lock.writer.token)
    with pytest.raises(LockLostError):
        (lock.downgrade if how == "downgrade" else lock.writer.release)()
    if how == "downgrade":
        with pytest.raises(LockLostError):
            lock.writer.release()
    with pytest.raises(LockLostError):
        lock.reader.release()
    assert lock.own_side() is None
    with lock.writer:
        assert lock.held_side() == "writer"


def test_tasks_hold_the_lock_each_by_itself(store: Store) -> None:
    async def main() -> None:
        lock = aio.ReadWriteLock(aio.AsyncStore(store), "l")
        async with lock.writer, lock.writer:
            other = asyncio.ensure_future(lock.own_side())
            assert await other is None
            assert await lock.own_side() == "writer"
        async with lock.writer:
            await lock.downgrade()
            assert await asyncio.ensure_future(lock.reader.acquire(timeout=LIMIT_S))  # a task of its own
            with pytest.raises(RuntimeError, match="in this thread or task"):
                await lock.reader.release()
            assert len(await lock.holders()) == 2

    asyncio.run(main())
