"""A process that died or closed its store is in no list of holders or waiters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import line_of
from support.places import ETCD, HANG_S, Place, start_thread, until

from fscoord import FileStore, aio
from fscoord.errors import QueueEmptyError, StoreClosedError, StoreTimeoutError
from fscoord.recipes import Election, Lock, Queue, ReadWriteLock, RLock, Semaphore
from fscoord.store import Store

KINDS: dict[str, Callable[[Store], Any]] = {
    "Lock": lambda store: Lock(store, "l"),
    "RLock": lambda store: RLock(store, "l"),
    "Semaphore": lambda store: Semaphore(store, "l", 1),
    "writer": lambda store: ReadWriteLock(store, "l").writer,
    "Election": lambda store: Election(store, "l", "data"),
}


@pytest.fixture(params=["file-ofd", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> Callable[[Store], Any]:
    return KINDS[request.param]


def die(store: Any) -> None:
    """Close the store of which this is a view."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    store.close()


def test_dead_holder_is_not_among_the_owners(place: Place, store: Store, make: Callable[[Store], Any]) -> None:
    lost, look = place.open(), make(store)
    assert make(lost).acquire()
    assert len(look.holders()) == 1
    die(lost)
    assert look.holders() == []
    assert look.acquire(blocking=False)
    assert len(look.holders()) == 1


def test_dead_waiter_is_not_among_the_waiters(place: Place, store: Store, make: Callable[[Store], Any]) -> None:
    lost, holder = place.open(), make(store)
    assert holder.acquire()
    with start_thread(wait_until_closed, make(lost)):
        until(holder.waiters)
        die(lost)
    assert holder.waiters() == []
    assert len(holder.holders()) == 1


def wait_until_closed(hold: Any) -> None:
    with pytest.raises(StoreClosedError):
        hold.acquire()


def test_dead_holder_of_a_lock_has_not_locked_it(place: Place, store: Store) -> None:
    lost = place.open()
    assert Lock(lost, "l").acquire()
    assert Lock(store, "l").locked()
    die(lost)
    assert not Lock(store, "l").locked()


def test_dead_reader_is_not_among_the_owners(place: Place, store: Store) -> None:
    lost, lock = place.open(), ReadWriteLock(store, "l")
    assert ReadWriteLock(lost, "l").reader.acquire()
    assert lock.reader.acquire()
    die(lost)
    assert [owner.token for owner in lock.holders()] == [2]


def test_dead_leader_does_not_lead(place: Place, store: Store) -> None:
    lost, look = place.open(), Election(store, "e", "second")
    assert Election(lost, "e", "first").campaign()
    assert look.observe().data == b"first"
    die(lost)
    assert look.leader() is None
    with pytest.raises(StoreTimeoutError, match="has no leader"):
        look.observe(timeout=0)
    with start_thread(look.observe) as observer:
        assert look.campaign()
    assert observer.result.data == b"second"


def test_dead_consumer_has_taken_nothing(place: Place, store: Store) -> None:
    lost, queue = place.open(), Queue(store, "q")
    queue.put_all(["a", "b"])
    Queue(lost, "q").take()
    assert (len(queue.taken()), len(queue)) == (1, 1)
    die(lost)
    assert (len(queue.taken()), len(queue)) == (0, 2)
    assert [queue.take(block=False).data, queue.take(block=False).data] == [b"a", b"b"]
    with pytest.raises(QueueEmptyError):
        queue.take(block=False)


def test_dead_holders_are_not_named_by_a_timeout(place: Place, store: Store) -> None:
    first, second = place.open(), place.open()
    assert Semaphore(first, "s", 2).acquire()
    assert Semaphore(store, "s", 2).acquire()
    line = line_of(Semaphore(second, "s", 2))
    die(first)
    error = line.timed_out("the semaphore", 1.0)
    assert error.args[0].count(":") == 2, "one holder, and the end of the first words"


def test_dead_holders_are_not_named_in_a_loop_either(tmp_path: Path) -> None:
    async def look() -> None:
        async with aio.open_store(tmp_path / "store") as store:
            lock, queue, office = aio.Lock(store, "l"), aio.Queue(store, "q"), aio.Election(store, "e")
            assert not await lock.locked()
            assert await lock.holders() == await lock.waiters() == []
            assert await queue.taken() == []
            assert await queue.size() == 1
            assert await office.leader() is None

    with FileStore(tmp_path / "store", timeout=HANG_S) as lost:
        assert Lock(lost, "l").acquire()
        Queue(lost, "q").put("a")
        Queue(lost, "q").take()
        assert Election(lost, "e").campaign()
    asyncio.run(look())
