"""Ctrl-C twice in the recipes: the second comes while something cleans up after the first, at each point of that."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.internals import system
from support.interrupts import At, interrupt
from support.places import until

from fscoord import BrokenBarrierError, FileStore, HashStore, aio
from fscoord.recipes import (
    Condition,
    CyclicBarrier,
    Election,
    Ephemeral,
    Lock,
    Membership,
    Partitioner,
    Queue,
    RateLimiter,
    ReadWriteLock,
    RLock,
    Semaphore,
    once,
)
from fscoord.store import Store
from fscoord.stores.prefix import PrefixStore

HANG_S = 60

# Some of the points are in the end of a generator that nobody has any more: Python drops what is raised there.
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

KINDS: dict[str, Callable[[Store], Any]] = {
    "Lock": lambda store: Lock(store, "l"),
    "Lock with ttl": lambda store: Lock(store, "l", ttl=100),
    "RLock": lambda store: RLock(store, "l"),
    "Semaphore": lambda store: Semaphore(store, "l", 1),
    "reader": lambda store: ReadWriteLock(store, "l").reader,
    "writer": lambda store: ReadWriteLock(store, "l").writer,
    "Election": lambda store: Election(store, "l"),
}
OTHERS = {"reader": "writer"}
"""Who is in the way of whom; otherwise each is in the way of its like."""


@pytest.fixture(params=["hash", "file"])
def store(request: pytest.FixtureRequest, memory: Path) -> Iterator[Store]:
    store = HashStore(timeout=HANG_S) if request.param == "hash" else FileStore(memory / "store", timeout=HANG_S)
    with store:
        yield store


@pytest.fixture
def hash_store() -> Iterator[Store]:
    with HashStore(timeout=HANG_S) as store:
        yield store


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def at_each_two_points(
    act: Callable[[At], None], inside: str = "", kind: str | None = None, first_inside: str = ""
) -> int:
    """Call `act` for each point, and each point after that; return how many such pairs there were.

    The first one is in the part `first_inside` of the package, and the second one in the part `inside`. The kinds have
    nearly all of their code in common: with a `kind` the first one is each seventh, and the seven kinds have all of
    them together.
    """
    count, step = 0, len(KINDS) if kind else 1
    first = 1 + list(KINDS).index(kind) if kind else 1
    while True:
        second = 1
        while True:
            point = At(first, interrupt, second, inside=inside, first_inside=first_inside)
            act(point)
            if len(point.places) < 2:
                break
            count += 1
            second += 1
        if not point.reached:
            return count
        first += step


def is_interrupted(point: At, call: Callable[[], object]) -> bool:
    """Make the call, with the points of it interrupted, and return whether that came out."""
    try:
        with point:
            call()
    except KeyboardInterrupt:
        return True
    return False


def nobody_is_in_line(hold: Any) -> bool:
    wake_keys = [key for key in hold._store.list_keys() if "/wake/" in key]
    return not hold._line.entries() and not hold._held and not wake_keys


# Holds


@pytest.mark.parametrize("way", ["acquire", "__enter__"])
def test_acquisition_interrupted_twice_leaves_nothing_held(hash_store: Store, kind: str, way: str) -> None:
    hold = KINDS[kind](hash_store)

    def act(point: At) -> None:
        if not is_interrupted(point, getattr(hold, way)):
            hold.release()
        assert nobody_is_in_line(hold), point.places

    assert at_each_two_points(act, kind=kind) > 20


def test_acquisition_on_a_file_interrupted_twice_leaves_nothing_held(memory: Path) -> None:
    with FileStore(memory / "store", timeout=HANG_S) as store:
        lock = Lock(store, "l")

        def act(point: At) -> None:
            if not is_interrupted(point, lock.acquire):
                lock.release()
            assert nobody_is_in_line(lock), point.places

        assert at_each_two_points(act, "recipes/") > 100


def test_wait_that_is_given_up_and_interrupted_twice_leaves_nobody_in_line(hash_store: Store, kind: str) -> None:
    other, hold = KINDS[OTHERS.get(kind, kind)](hash_store), KINDS[kind](hash_store)

    def act(point: At) -> None:
        assert other.acquire()
        is_interrupted(point, lambda: hold.acquire(timeout=0))
        assert not hold._held
        other.release()
        assert nobody_is_in_line(hold), point.places

    assert at_each_two_points(act, "recipes/", kind) > 20


def test_wait_on_a_file_interrupted_twice_leaves_nobody_in_line(memory: Path) -> None:
    with FileStore(memory / "store", timeout=HANG_S) as store, FileStore(memory / "store", timeout=HANG_S) as away:
        other, lock = Lock(away, "l"), Lock(store, "l")

        def act(point: At) -> None:
            assert other.acquire()
            is_interrupted(point, lambda: lock.acquire(timeout=0))
            other.release()
            assert nobody_is_in_line(lock), point.places

        assert at_each_two_points(act, "recipes/", first_inside="recipes/") > 100


class HandsOver(PrefixStore):
    """A view in which `let_go` serves each waiter."""

    def __init__(self, store: Store, let_go: Callable[[], object]) -> None:
        super().__init__("", store)
        self._let_go = let_go

    def wait_sessions(self, keys: Any, numbers: Any, timeout: Any = None) -> list[int]:
        profiler = sys.getprofile()
        sys.setprofile(None)  # nobody interrupts that one
        self._let_go()
        sys.setprofile(profiler)
        return super().wait_sessions(keys, numbers, timeout)


def test_wait_that_is_served_and_interrupted_twice_leaves_nothing_held(hash_store: Store, kind: str) -> None:
    def let_go() -> None:
        with suppress(RuntimeError):
            other.release()

    view = HandsOver(hash_store, let_go)
    other, hold = KINDS[OTHERS.get(kind, kind)](PrefixStore("", hash_store)), KINDS[kind](view)

    def act(point: At) -> None:
        assert other.acquire()
        if not is_interrupted(point, hold.acquire):
            hold.release()
        let_go()
        assert nobody_is_in_line(hold), point.places

    assert at_each_two_points(act, "recipes/", kind) > 20


@pytest.mark.parametrize("way", ["release", "__exit__"])
def test_release_interrupted_twice_is_still_done(hash_store: Store, kind: str, way: str) -> None:
    hold = KINDS[kind](hash_store)
    arguments = (None, None, None) if way == "__exit__" else ()

    def act(point: At) -> None:
        assert hold.acquire()
        is_interrupted(point, lambda: getattr(hold, way)(*arguments))
        if point.where.split()[1:] == [way]:  # it had not begun, and is to be called again
            hold.release()
        assert nobody_is_in_line(hold), point.places

    assert at_each_two_points(act, kind=kind) > 20


def test_reentrant_lock_interrupted_twice_keeps_its_depth(hash_store: Store) -> None:
    lock = RLock(hash_store, "l")

    def acquire(point: At) -> None:
        with lock, lock:
            if not is_interrupted(point, lock.acquire):
                lock.release()
            assert len(lock._held[0].levels) == 2, point.places
        assert nobody_is_in_line(lock), point.places

    def release(point: At) -> None:
        with lock, lock:
            assert lock.acquire()
            is_interrupted(point, lock.release)
            if point.where.split()[1:] == ["release"]:
                lock.release()
            assert len(lock._held[0].levels) == 2, point.places
        assert nobody_is_in_line(lock), point.places

    assert at_each_two_points(acquire) > 10
    assert at_each_two_points(release) > 10


@pytest.mark.parametrize("third", [1, 2, 3, 5, 8])
def test_acquisition_interrupted_three_times_soon_leaves_nothing_held(hash_store: Store, third: int) -> None:
    """The third may end the wait for what the thread is still about."""
    lock = Lock(hash_store, "l")
    first, reached = 1, True
    while reached:
        for second in range(1, 40):
            point = At(first, interrupt, second, third)
            if not is_interrupted(point, lock.acquire):
                lock.release()
            until(lambda: nobody_is_in_line(lock))
        reached = point.reached
        first += 1
    assert first > 10


def test_once_interrupted_twice_leaves_the_work_to_the_next_caller(hash_store: Store) -> None:
    numbers = iter(range(10**9))

    def act(point: At) -> None:
        name = str(next(numbers))
        is_interrupted(point, lambda: once(hash_store, name, lambda: b"first"))
        assert not Lock(hash_store, name)._line.entries(), point.places
        assert once(hash_store, name, lambda: b"second") in (b"first", b"second")

    assert at_each_two_points(act, "recipes/", first_inside="recipes/") > 300


# Waits without a hold


@pytest.mark.parametrize("times", [1, 2], ids=["Lock", "RLock"])
def test_wait_for_a_condition_interrupted_twice_leaves_the_lock_free(hash_store: Store, times: int) -> None:
    condition = Condition(hash_store, "c", Lock(hash_store, "l") if times == 1 else None)
    lock = condition._lock

    def act(point: At) -> None:
        for _ in range(times):
            assert condition.acquire()
        was_interrupted = is_interrupted(point, lambda: condition.wait(0))
        released = 0
        while lock._current() is not None:
            condition.release()
            released += 1
        assert released == times or (was_interrupted and not released), point.places
        assert nobody_is_in_line(lock), point.places
        assert not condition._line.entries(), point.places

    assert at_each_two_points(act, "recipes/condition", first_inside="recipes/") > 50


def test_wait_at_a_cyclic_barrier_interrupted_twice_leaves_nobody_waiting(hash_store: Store) -> None:
    barrier = CyclicBarrier(hash_store, "b", 2)

    def act(point: At) -> None:
        with suppress(BrokenBarrierError):
            is_interrupted(point, lambda: barrier.wait(0))
        assert barrier.n_waiting() == 0, point.places
        barrier.reset()
        assert not barrier._line.entries(), point.places

    assert at_each_two_points(act, "recipes/", first_inside="recipes/") > 100


def test_wait_for_a_token_interrupted_twice_leaves_nobody_in_line(
    hash_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "wall_time_ns", lambda: 10**18)  # no token comes but by the wait
    limiter = RateLimiter(hash_store, "r", 1000)

    def act(point: At) -> None:
        is_interrupted(point, lambda: limiter.acquire(timeout=HANG_S))
        assert nobody_is_in_line(limiter._turn), point.places

    assert at_each_two_points(act, "recipes/", first_inside="recipes/") > 100


# Queues


def test_queue_take_interrupted_twice_leaves_the_item_available(store: Store) -> None:
    queue = Queue(store, "q")

    def act(point: At) -> None:
        queue.put("a")
        if is_interrupted(point, lambda: queue.take(block=False)):
            assert queue.taken() == [], point.places
            queue.take(block=False).ack()
        else:
            store.delete_key(store.list_keys("q/claim/")[0])
            queue.take(block=False).ack()

    assert at_each_two_points(act, "recipes/") > 250


@pytest.mark.parametrize("way", ["ack", "release", "end of the with", "with that raises"])
def test_queue_item_interrupted_twice_at_its_end_is_done_or_available(hash_store: Store, way: str) -> None:
    queue = Queue(hash_store, "q")

    def end(item: Any) -> None:
        if way.endswith("with"):
            item.__exit__(None, None, None)
        elif way == "with that raises":
            item.__exit__(ValueError, ValueError(), None)
        else:
            getattr(item, way)()

    def act(point: At) -> None:
        queue.put("a")
        item = queue.take(block=False)
        is_interrupted(point, lambda: end(item))
        if not item._is_over:
            assert point.where.split()[1] in {"ack", "release", "_end", "__exit__"}, "it had begun"
            item.ack()
        assert queue.taken() == [], point.places
        assert len(queue) == 0 or way != "ack" or point.reached
        if len(queue):
            queue.take(block=False).ack()

    assert at_each_two_points(act, "recipes/") > 50


# Ephemeral keys


@pytest.mark.parametrize("way", ["create", "__enter__"])
def test_creation_of_an_ephemeral_key_interrupted_twice_leaves_no_key(hash_store: Store, way: str) -> None:
    key = Ephemeral(hash_store, "e")

    def act(point: At) -> None:
        if is_interrupted(point, getattr(key, way)):
            assert key.get() is None, point.places
        else:
            assert key.delete()

    assert at_each_two_points(act) > 100


@pytest.mark.parametrize("way", ["delete", "__exit__"])
def test_deletion_of_an_ephemeral_key_interrupted_twice_is_still_done(hash_store: Store, way: str) -> None:
    key = Ephemeral(hash_store, "e")
    arguments = (None, None, None) if way == "__exit__" else ()

    def act(point: At) -> None:
        assert key.create()
        is_interrupted(point, lambda: getattr(key, way)(*arguments))
        if point.where.split()[1:] == [way]:  # it had not begun, and is to be called again
            assert key.delete()
        assert key.get() is None, point.places

    assert at_each_two_points(act) > 50


# Groups


@pytest.mark.parametrize("way", ["join", "__enter__"])
def test_group_join_interrupted_twice_leaves_nobody_in_the_group(hash_store: Store, way: str) -> None:
    group = Membership(hash_store, "g")

    def act(point: At) -> None:
        if is_interrupted(point, getattr(group, way)):
            assert group.members() == [], point.places
            assert not group.leave()
        else:
            assert group.leave()

    assert at_each_two_points(act) > 300


@pytest.mark.parametrize("way", ["leave", "__exit__"])
def test_group_leave_interrupted_twice_is_still_done(hash_store: Store, way: str) -> None:
    group = Membership(hash_store, "g")
    arguments = (None, None, None) if way == "__exit__" else ()

    def act(point: At) -> None:
        group.join()
        is_interrupted(point, lambda: getattr(group, way)(*arguments))
        if point.where.split()[1:] == [way]:  # it had not begun, and is to be called again
            assert group.leave()
        assert group.members() == [], point.places

    assert at_each_two_points(act) > 100


@pytest.mark.parametrize("way", ["join", "__enter__"])
def test_partitioner_join_interrupted_twice_leaves_no_holder(hash_store: Store, way: str) -> None:
    group, other = Partitioner(hash_store, "p", 2), Partitioner(hash_store, "p", 2)

    def act(point: At) -> None:
        if is_interrupted(point, getattr(group, way)):
            assert not group.leave()
        else:
            assert sorted(group.partitions) == [0, 1]
            assert group.leave()
        with other:
            assert sorted(other.partitions) == [0, 1], point.places

    assert at_each_two_points(act) > 100


@pytest.mark.parametrize("way", ["leave", "__exit__"])
def test_partitioner_leave_interrupted_twice_is_still_done(hash_store: Store, way: str) -> None:
    group, other = Partitioner(hash_store, "p", 2), Partitioner(hash_store, "p", 2)
    arguments = (None, None, None) if way == "__exit__" else ()

    def act(point: At) -> None:
        group.join()
        is_interrupted(point, lambda: getattr(group, way)(*arguments))
        if point.where.split()[1:] == [way]:  # it had not begun, and is to be called again
            assert group.leave()
        with other:
            assert sorted(other.partitions) == [0, 1], point.places

    assert at_each_two_points(act) > 100


# Tasks of a loop


AIO_KINDS: dict[str, Callable[[aio.AsyncStore], Any]] = {
    "Lock": lambda store: aio.Lock(store, "l"),
    "RLock": lambda store: aio.RLock(store, "l"),
    "Election": lambda store: aio.Election(store, "l"),
}


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("kind", AIO_KINDS)
def test_event_loop_interrupted_twice_leaves_nothing_held(
    hash_store: Store, kind: str, loop: asyncio.AbstractEventLoop
) -> None:
    hold = AIO_KINDS[kind](aio.AsyncStore(hash_store))

    async def use() -> None:
        async with hold:
            pass

    def act(point: At) -> None:
        is_interrupted(point, lambda: loop.run_until_complete(use()))
        if hold._core._held and point.places[-1].split()[1] == "__aexit__":  # it had not begun
            hold._core.release()
        assert nobody_is_in_line(hold._core), point.places

    assert at_each_two_points(act, "recipes/") > 100


def test_event_loop_interrupted_twice_leaves_the_item_available(
    hash_store: Store, loop: asyncio.AbstractEventLoop
) -> None:
    queue = aio.Queue(aio.AsyncStore(hash_store), "q")

    async def use() -> None:
        async with await queue.take(block=False) as item:
            items.append(item)

    items: list[aio.Item] = []

    def act(point: At) -> None:
        if not len(queue._core):
            queue._core.put("a")
        is_interrupted(point, lambda: loop.run_until_complete(use()))
        last = point.places[-1].split()[1] if point.reached else ""
        if items and not items[-1]._core._is_over:
            assert last == "__aexit__", "it had begun"
            items[-1]._core.ack()
        elif last == "__aenter__":  # of what had been taken
            hash_store.delete_key(hash_store.list_keys("q/claim/")[0])
        assert queue._core.taken() == [], point.places

    assert at_each_two_points(act, "recipes/") > 100


def test_event_loop_interrupted_twice_leaves_nobody_in_the_group(
    hash_store: Store, loop: asyncio.AbstractEventLoop
) -> None:
    group = aio.Membership(aio.AsyncStore(hash_store), "g")

    async def use() -> None:
        async with group:
            pass

    def act(point: At) -> None:
        is_interrupted(point, lambda: loop.run_until_complete(use()))
        if group._core._joined and point.places[-1].split()[1] == "__aexit__":  # it had not begun
            group._core.leave()
        assert group._core.members() == [], point.places

    assert at_each_two_points(act, "recipes/") > 100
