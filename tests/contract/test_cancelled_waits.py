"""Acquisitions that another thread or task cancels, and the labels of contenders."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.places import ETCD, HANG_S, Place, start_thread, until

from fscoord import AcquireCancelledError, Store, StoreTimeoutError, aio
from fscoord.recipes import Contender, Election, Lock, ReadWriteLock, RLock, Semaphore

KINDS: dict[str, Callable[..., Any]] = {
    "Lock": Lock,
    "RLock": RLock,
    "Semaphore": Semaphore,
    "reader": lambda store, name, **more: ReadWriteLock(store, name, **more).reader,
    "writer": lambda store, name, **more: ReadWriteLock(store, name, **more).writer,
    "Election": Election,
}


@pytest.fixture(params=["hash", "nested-hash", "third-party", "file-ofd", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return KINDS[str(request.param)]


def holding(store: Store, kind: Callable[..., Any]) -> Any:
    """Return an object that keeps one of `kind` waiting."""
    return ReadWriteLock(store, "l").writer if kind in (KINDS["reader"], KINDS["writer"]) else kind(store, "l")


def cancelled(call: Callable[[], object]) -> str:
    with pytest.raises(AcquireCancelledError) as found:
        call()
    return str(found.value)


def test_wait_that_is_cancelled_leaves_the_line_at_once(
    place: Place, store: Store, kind: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fscoord.recipes._line.SLOW_LOOK_S", HANG_S)
    hold, other = kind(store, "l"), holding(place.open(how="clone"), kind)
    assert other.acquire()
    waiters = [start_thread(cancelled, hold.acquire) for _ in range(3)]
    until(lambda: len(other.waiters()) == 3)
    hold.cancel()
    assert all("'l' was cancelled by this process" in waiter.join() for waiter in waiters)
    assert not other.waiters()
    other.check()
    other.release()
    assert hold.acquire(timeout=HANG_S), "a later acquisition is not cancelled"
    hold.release()
    assert not [key for key in store.list_keys() if "/wake/" in key]


def test_cancel_without_a_wait_does_nothing(store: Store, kind: Callable[..., Any]) -> None:
    hold = kind(store, "l")
    hold.cancel()
    assert not hold.is_acquired
    with hold:
        hold.cancel()
        hold.check()
        assert hold.is_acquired
    assert not hold.is_acquired


def test_cancel_leaves_the_waits_of_other_objects(place: Place, store: Store) -> None:
    hold, other = Lock(store, "l"), Lock(store, "l")
    with Lock(place.open(how="clone"), "l"):
        waiter = start_thread(hold.acquire, True, HANG_S)
        cancelled_one = start_thread(cancelled, other.acquire)
        until(lambda: len(hold.waiters()) == 2)
        other.cancel()
        assert cancelled_one.join()
        assert len(hold.waiters()) == 1
    assert waiter.join() is True
    hold.release()


def test_waiters_behind_a_cancelled_writer_acquire_at_once(place: Place, store: Store) -> None:
    lock = ReadWriteLock(store, "l")
    with ReadWriteLock(place.open(how="clone"), "l").reader:
        writer = start_thread(cancelled, lock.writer.acquire)
        until(lambda: len(lock.waiters()) == 1)
        reader = start_thread(ReadWriteLock(place.open(how="clone"), "l").reader.acquire)
        until(lambda: len(lock.waiters()) == 2)
        lock.writer.cancel()
        assert reader.join() is True
        assert writer.join()


def test_acquisitions_and_cancellations_at_once_leave_nothing_behind(place: Place, store: Store) -> None:
    """Each acquisition either holds the lock or is cancelled."""
    lock, over = Lock(store, "l"), threading.Event()
    inside: list[int] = []

    def take_turns() -> tuple[int, int]:
        counts = [0, 0]
        for _ in range(60):
            try:
                with lock:
                    inside.append(1)
                    assert len(inside) == 1
                    inside.pop()
                counts[0] += 1
            except AcquireCancelledError:
                counts[1] += 1
        return counts[0], counts[1]

    def cancel() -> None:
        while not over.is_set():
            lock.cancel()

    threads = [start_thread(take_turns) for _ in range(3)]
    canceller = start_thread(cancel)
    counts = [thread.join() for thread in threads]
    over.set()
    canceller.join()
    assert all(sum(each) == 60 for each in counts), counts
    assert sum(done for done, _ in counts), counts
    with lock:
        pass
    assert store.list_keys("l/wake/") == []
    assert store.get("l/line").count(b" ") == 1, "no wake-up is under way"


def test_task_cancels_the_wait_of_another_task(place: Place, store: Store) -> None:
    async def main() -> None:
        lock = aio.Lock(aio.AsyncStore(store), "l")
        async with aio.Lock(aio.AsyncStore(store), "l") as other:
            wait = asyncio.create_task(lock.acquire())
            while not await other.waiters():
                await asyncio.sleep(0)
            await lock.cancel()
            with pytest.raises(AcquireCancelledError):
                await wait
            assert not await other.waiters()
            assert (lock.is_acquired, other.is_acquired) == (False, True)

    asyncio.run(main())


# Labels


@pytest.mark.parametrize("label", ["nightly backup", "100 %20\n", "\udcff \u2028é", "x" * 100])
def test_label_of_each_contender_is_shown(place: Place, store: Store, kind: Callable[..., Any], label: str) -> None:
    other = place.open(how="clone")
    with kind(store, "l", label=label) as hold:
        assert [each.label for each in hold.holders()] == [label]
        assert hold.holders() == [Contender(hold.holders()[0].owner, hold.holders()[0].session, hold.token, label)]
        if kind is KINDS["reader"]:
            return
        waiter = start_thread(kind(other, "l", label="the next").acquire, True, HANG_S)
        until(hold.waiters)
        assert [each.label for each in hold.waiters()] == ["the next"]
    assert waiter.join() is True
    assert [each.label for each in hold.holders()] == ["the next"]


def test_timeout_names_the_label_of_the_holder(place: Place, store: Store) -> None:
    words = r"held by .* \('nightly backup'\), nobody else waiting"
    late = Lock(store, "l", timeout=0.01)
    with (
        Lock(place.open(how="clone"), "l", label="nightly backup"),
        pytest.raises(StoreTimeoutError, match=words),
        late,
    ):
        pytest.fail("two have it")


def test_label_that_is_too_long_is_refused(store: Store, kind: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"a label may have 100 characters, and 'x{20}'... has 101"):
        kind(store, "l", label="x" * 101)
