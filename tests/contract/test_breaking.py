"""`force_release`: the holder loses its hold, and the next waiter gets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.internals import Exclusive
from support.places import HANG_S, Place, start_thread, until

from fscoord.errors import LockLostError
from fscoord.recipes import Election, Lock, ReadWriteLock, Semaphore, force_release
from fscoord.store import Store


@pytest.fixture(params=["hash", "nested-hash", "file-ofd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


KINDS: list[Callable[[Store], Exclusive]] = [
    lambda store: Lock(store, "h"),
    lambda store: Election(store, "h"),
    lambda store: Semaphore(store, "h", 1),
    lambda store: ReadWriteLock(store, "h").writer,
    lambda store: ReadWriteLock(store, "h").reader,
]


@pytest.mark.parametrize("kind", KINDS, ids=["lock", "election", "semaphore", "writer", "reader"])
def test_holder_that_was_released_by_force_learns_it_at_check_and_release(
    store: Store, kind: Callable[[Store], Exclusive]
) -> None:
    hold = kind(store)
    assert hold.acquire()
    assert force_release(store, "h", hold.token)
    with pytest.raises(LockLostError):
        hold.check()
    with pytest.raises(LockLostError):
        hold.release()
    assert hold.acquire(blocking=False)
    assert hold.token == 2
    hold.release()


def test_waiter_next_in_line_acquires_at_once_with_a_higher_token(place: Place, store: Store) -> None:
    def take() -> int:
        with Lock(place.open(how="clone"), "h") as lock:
            return lock.token

    first = Lock(store, "h")
    first.acquire()
    next_one = start_thread(take)
    until(first.waiters)
    assert force_release(store, "h", 1)
    assert next_one.join() == 2


def test_readers_behind_a_writer_acquire_all_together(place: Place, store: Store) -> None:
    both = threading.Barrier(2)

    def take() -> None:
        with ReadWriteLock(place.open(how="clone"), "h").reader:
            both.wait(HANG_S)

    writer = ReadWriteLock(store, "h").writer
    writer.acquire()
    readers = [start_thread(take) for _ in range(2)]
    until(lambda: len(writer.waiters()) == 2)
    assert force_release(store, "h", 1)
    for reader in readers:
        reader.join()


def test_semaphore_loses_only_the_given_hold_and_one_waiter_is_served(place: Place, store: Store) -> None:
    def take() -> int:
        semaphore = Semaphore(place.open(how="clone"), "h", 2)
        with semaphore:
            return semaphore.token

    first, second = Semaphore(store, "h", 2), Semaphore(store, "h", 2)
    first.acquire()
    second.acquire()
    third = start_thread(take)
    until(first.waiters)
    assert force_release(store, "h", 2)
    assert third.join() == 3
    first.check()
    with pytest.raises(LockLostError):
        second.check()


def test_token_without_a_holder_changes_nothing(store: Store) -> None:
    assert not force_release(store, "h", 1)
    with Lock(store, "h") as lock:
        assert not force_release(store, "h", 2)
        lock.check()
    assert not force_release(store, "h", 1)
    with pytest.raises(ValueError, match="token"):
        force_release(store, "h", 0)
