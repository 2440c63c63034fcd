"""Events, conditions, cyclic barriers and rate limiters, on every kind of store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start
from support.places import ETCD, HANG_S, Place, start_thread, until
from support.third_party import place_of

from fscoord._runtime import system
from fscoord.errors import BrokenBarrierError, StoreTimeoutError
from fscoord.recipes import Condition, CyclicBarrier, Event, Lock, RateLimiter, RLock, event, force_release
from fscoord.store import Store
from fscoord.stores.file import FileStore

SECOND = 10**9


@pytest.fixture(params=["hash", "nested-hash", "third-party", "file-ofd", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = place_of(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def file_store(path: Path) -> Iterator[FileStore]:
    with FileStore(path, timeout=HANG_S) as store:
        yield store


# Event


def test_waiters_of_an_event_return_although_it_is_cleared_at_once(place: Place, store: Store) -> None:
    ready = Event(store, "e")
    for _ in range(5):  # the wake keys are used in turn
        handles = [place.open(how="clone") for _ in range(3)]
        threads = [start_thread(Event(handle, "e").wait, HANG_S) for handle in handles]
        ready.set()
        ready.clear()
        ready.set()
        assert [thread.join() for thread in threads] == [True] * 3
        assert ready.is_set()
        assert ready.wait(0)
        ready.clear()
        assert not ready.is_set()
        assert not ready.wait(0.01)


def test_event_that_was_set_by_a_dead_process_wakes_its_waiters(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event, "LOOK_S", 0.01)
    thread = start_thread(Event(place.open(how="clone"), "e").wait, HANG_S)
    store.set("e/count", "1")  # and the process dies before it wakes them
    assert thread.join()
    Event(store, "e").set()
    assert store.check(["e/wake/0"])


def test_foreign_wake_key_does_not_set_an_event(place: Place, store: Store) -> None:
    store.set("e/wake/0", "1")
    thread = start_thread(Event(place.open(how="clone"), "e").wait, HANG_S)
    until(lambda: not store.check(["e/wake/0"]))
    assert thread.is_alive()
    Event(store, "e").set()
    assert thread.join()


# Condition


def waiting(condition: Condition) -> int:
    return len(condition._line.entries())


def wait_in(place: Place, then: Callable[[], object] = int, timeout: float = HANG_S) -> bool:
    with Condition(place.open(how="clone"), "c") as condition:
        found = condition.wait(timeout)
        then()
        return found


def test_notifications_wake_the_waiters_in_their_order(place: Place, store: Store) -> None:
    order: list[int] = []
    condition = Condition(store, "c")
    threads = []
    for number in range(4):
        threads.append(start_thread(wait_in, place, lambda number=number: order.append(number)))
        until(lambda: waiting(condition) == number + 1)  # noqa: B023
    with condition:
        condition.notify()
    until(lambda: order == [0])
    with condition:
        condition.notify(2)
    until(lambda: len(order) == 3)
    assert sorted(order) == [0, 1, 2]
    with condition:
        condition.notify_all()
    assert all(thread.join() for thread in threads)
    assert waiting(condition) == 0


def test_wait_for_tests_the_data_again_after_each_notification(place: Place, store: Store) -> None:
    def fill() -> bool:
        with Condition(place.open(how="clone"), "c") as other:
            return other.wait_for(lambda: store.get("data", default=b"") == b"2", HANG_S)

    condition, thread = Condition(store, "c"), start_thread(fill)
    for value in ("1", "2"):
        until(lambda: waiting(condition) == 1)
        with condition:
            store.set("data", value)
            condition.notify()
    assert thread.join() is True
    with condition:
        assert condition.wait_for(lambda: False, 0.01) is False


@pytest.mark.parametrize("kind", [Lock, RLock])
def test_wait_that_times_out_has_the_lock_again_as_often_as_before(store: Store, kind: Any) -> None:
    lock = kind(store, "l")
    condition = Condition(store, "c", lock)
    times = 2 if kind is RLock else 1
    for _ in range(times):
        assert condition.acquire()
    assert condition.wait(0) is False
    assert waiting(condition) == 0
    for _ in range(times):
        assert lock.locked()
        condition.release()
    assert not lock.locked()


def test_condition_whose_lock_is_not_held_refuses_to_wait_and_to_notify(store: Store) -> None:
    condition = Condition(store, "c")
    for call in (condition.wait, condition.notify, condition.notify_all, lambda: condition.wait_for(bool)):
        with pytest.raises(RuntimeError, match="the lock 'c/lock' is not held by this object"):
            call()
    with condition, pytest.raises(ValueError, match="n must be"):
        condition.notify(0)
    with pytest.raises(TypeError, match=r"needs a Lock or an RLock of fscoord.recipes, got set"):
        Condition(store, "c", set())  # type: ignore[arg-type]


def test_error_in_a_wait_leaves_the_lock_free_and_ends_the_block_with_that_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    condition = Condition(store, "c")
    monkeypatch.setattr(condition._line, "await_turn", interrupt)
    with pytest.raises(KeyboardInterrupt), condition:
        condition.wait()
    assert not condition._lock.locked()
    assert waiting(condition) == 0


def test_wait_leaves_the_hold_of_another_thread_of_the_same_lock_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Lock(store, "l")
    condition = Condition(store, "c", lock)
    is_free, is_taken = threading.Event(), threading.Event()
    release = lock._release

    def release_and_lose(*arguments: Any) -> bool:
        found = release(*arguments)
        is_free.set()
        assert is_taken.wait(HANG_S)
        return found

    def wait() -> None:
        with condition:
            condition.wait(0)

    monkeypatch.setattr(lock, "_release", release_and_lose)
    thread = start_thread(wait)
    assert is_free.wait(HANG_S)
    assert lock.acquire(timeout=HANG_S)
    token = lock.token
    is_taken.set()
    until(lock.waiters)
    assert lock.token == token
    lock.release()
    thread.join()
    assert not lock.locked()


def test_block_whose_wait_fails_leaves_the_hold_of_another_thread_alone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = Lock(store, "l")
    condition = Condition(store, "c", lock)
    is_free, is_taken = threading.Event(), threading.Event()

    def interrupt(*_: object) -> object:
        is_free.set()
        assert is_taken.wait(HANG_S)
        raise KeyboardInterrupt

    def wait() -> None:
        with suppress(KeyboardInterrupt), condition:
            condition.wait()

    monkeypatch.setattr(condition._line, "await_turn", interrupt)
    thread = start_thread(wait)
    assert is_free.wait(HANG_S)
    assert lock.acquire(timeout=HANG_S)
    is_taken.set()
    thread.join()
    lock.check()
    lock.release()


def test_notification_goes_past_a_dead_waiter(path: Path, file_store: FileStore) -> None:
    condition = Condition(file_store, "c")
    with FileStore(path, timeout=HANG_S) as dead, FileStore(path, timeout=HANG_S) as alive:
        thread = start_thread(leave_by_death, dead)
        until(lambda: waiting(condition) == 1)
        second = start_thread(wait_on, alive)
        until(lambda: waiting(condition) == 2)
        dead.close()
        with condition:
            condition.notify()
        assert second.join() is True
        thread.join()


def wait_on(store: Store) -> bool:
    with Condition(store, "c") as condition:
        return condition.wait(HANG_S)


def leave_by_death(store: Store) -> None:
    with suppress(Exception):  # its handle is closed while it waits
        wait_on(store)


# CyclicBarrier


def test_rounds_of_a_cyclic_barrier_give_each_process_a_number(place: Place, store: Store) -> None:
    def run() -> list[int]:
        barrier = CyclicBarrier(place.open(how="clone"), "b", 3)
        return [barrier.wait() for _ in range(5)]

    found = [thread.join() for thread in [start_thread(run) for _ in range(3)]]
    assert [sorted(numbers) for numbers in zip(*found, strict=True)] == [[0, 1, 2]] * 5
    assert store.list_keys() == ["b/line"]
    assert CyclicBarrier(store, "b", 3).n_waiting() == 0


def enter(place: Place, count: int, parties: int = 9) -> tuple[CyclicBarrier, list[Any]]:
    """Let so many threads wait at a barrier for more."""
    barrier = CyclicBarrier(place.open(how="clone"), "b", parties)
    threads = [start_thread(raised, place) for _ in range(count)]
    until(lambda: barrier.n_waiting() == count)
    return barrier, threads


def raised(place: Place) -> str:
    with pytest.raises(BrokenBarrierError) as caught:
        CyclicBarrier(place.open(how="clone"), "b", 9, HANG_S).wait()
    return str(caught.value)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (lambda barrier: barrier.abort(), r"called abort\(\); call reset"),
        (lambda barrier: barrier.wait(0.01), "waited for as long as its timeout"),
    ],
    ids=["abort", "time-out"],
)
def test_barrier_that_breaks_is_broken_for_all_until_it_is_reset(
    place: Place, act: Callable[[CyclicBarrier], object], why: str
) -> None:
    barrier, threads = enter(place, 2)
    with suppress(BrokenBarrierError):
        act(barrier)
    assert barrier.is_broken()
    for thread in threads:
        assert f"the barrier 'b' is broken: {system.process_name()} " in thread.join()
    with pytest.raises(BrokenBarrierError, match=why):
        barrier.wait()
    barrier.reset()
    assert not barrier.is_broken()
    assert CyclicBarrier(barrier._store, "b", 1).wait() == 0


def test_barrier_that_another_process_has_reset_is_usable_again(place: Place, store: Store) -> None:
    barrier, other = CyclicBarrier(store, "b", 1), CyclicBarrier(place.open(how="clone"), "b", 1)
    for _ in range(2):
        barrier.abort()
        with pytest.raises(BrokenBarrierError):
            barrier.wait()
        other.reset()
        assert barrier.wait() == 0


def test_reset_of_a_barrier_with_waiters_breaks_their_round_only(place: Place) -> None:
    barrier, threads = enter(place, 2)
    barrier.reset()
    assert all(thread.join().endswith("called reset()") for thread in threads)
    assert not barrier.is_broken()


def test_barrier_refuses_another_number_of_parties(place: Place) -> None:
    barrier, threads = enter(place, 1)
    with pytest.raises(ValueError, match=r"'b' has parties=3 here and 9 for .*: all must give the same"):
        CyclicBarrier(barrier._store, "b", 3).wait()
    barrier.abort()
    assert threads[0].join()


def test_process_that_is_interrupted_breaks_the_barrier(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> object:
        raise KeyboardInterrupt

    barrier = CyclicBarrier(store, "b", 2)
    monkeypatch.setattr(barrier._line, "await_turn", interrupt)
    with pytest.raises(KeyboardInterrupt):
        barrier.wait()
    with pytest.raises(BrokenBarrierError, match="was interrupted while it waited"):
        barrier.wait()


def test_process_that_is_killed_in_a_barrier_breaks_it_for_the_others(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    with Workers(place.spec(), "wait_at_a_barrier", [[]]) as workers:
        start(place.open(), 1)
        barrier, threads = CyclicBarrier(place.open(), "b", 9), [start_thread(raised, place)]
        until(lambda: barrier.n_waiting() == 2)
        (process,) = workers.processes
        process.kill()
        assert f":{process.pid} died while it waited; call reset()" in threads[0].join()
    with pytest.raises(BrokenBarrierError, match="died while it waited"):
        barrier.wait()
    place.close()


def test_round_in_which_nobody_waits_removes_the_keys_of_a_process_that_was_killed(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "wait_at_a_barrier", [[]]) as workers:
        start(store, 1)
        barrier = CyclicBarrier(store, "b", 1)
        until(lambda: barrier.n_waiting() == 1)
        workers.processes[0].kill()
        workers.processes[0].wait()
    barrier.reset()
    assert barrier.wait() == 0
    assert store.list_keys("b/") == ["b/line"]
    place.close()


# RateLimiter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The wall clock, in ns."""
    now = [1000 * SECOND]
    monkeypatch.setattr(system, "wall_time_ns", lambda: now[0])
    return now


def test_loss_of_the_turn_is_no_error_once_the_tokens_are_taken(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    limiter = RateLimiter(store, "r", 1, per=3600, burst=4)
    take = limiter._take

    def lose_turn(n: int, waited: int) -> int:
        missing = take(n, waited)
        assert force_release(store, "r", limiter._turn.token)
        return missing

    with monkeypatch.context() as patch:
        patch.setattr(limiter, "_take", lose_turn)
        limiter.acquire(2)
        assert limiter.try_acquire()
    assert count_free(limiter) == 1


def count_free(limiter: RateLimiter) -> int:
    """Take tokens without waiting, until there are none. Return the number."""
    count = 0
    while limiter.try_acquire():
        count += 1
    return count


def test_bucket_fills_at_the_rate_up_to_the_burst(store: Store, clock: list[int]) -> None:
    limiter = RateLimiter(store, "r", rate=2, per=1, burst=5)
    assert count_free(limiter) == 5
    clock[0] += SECOND
    assert count_free(limiter) == 2
    clock[0] += 2 * SECOND
    assert limiter.try_acquire(4)
    assert not limiter.try_acquire()
    clock[0] += 1000 * SECOND
    assert count_free(limiter) == 5


def test_processes_share_one_rate(place: Place, store: Store) -> None:
    def run() -> None:
        limiter = RateLimiter(place.open(how="clone"), "r", 50)
        for _ in range(5):
            limiter.acquire()

    started = time.monotonic()
    for thread in [start_thread(run) for _ in range(4)]:
        thread.join()
    assert time.monotonic() - started >= 19 / 50 - 0.001  # 20 tokens, of which one was there


def test_tokens_are_given_out_in_the_order_of_the_requests(place: Place, store: Store) -> None:
    def take(number: int) -> None:
        limiter = RateLimiter(place.open(how="clone"), "r", 20)
        take_tokens = limiter._take

        def take_and_note(n: int, waited: int) -> int:
            missing = take_tokens(n, waited)
            if not missing:
                order.append(number)  # before the next in line has its turn
            return missing

        limiter._take = take_and_note  # type: ignore[method-assign]
        limiter.acquire()

    order: list[int] = []
    threads = []
    with Lock(store, "r") as first:  # a process that is first in line of the limiter, and waits
        for number in range(3):
            threads.append(start_thread(take, number))
            until(lambda: len(first.waiters()) > number)  # noqa: B023
        assert not RateLimiter(store, "r", 20).try_acquire(), "the others came first"
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2]


def test_clock_that_is_set_back_costs_the_bursts_and_stalls_nobody(store: Store, clock: list[int]) -> None:
    limiter = RateLimiter(store, "r", rate=100, burst=3)
    assert count_free(limiter) == 3
    clock[0] -= 900 * SECOND
    assert not limiter.try_acquire()
    for _ in range(3):
        limiter.acquire(timeout=HANG_S / 2)  # each waits for 10 ms
    clock[0] += 901 * SECOND
    assert count_free(limiter) == 3


def test_clocks_that_differ_let_no_more_tokens_out(store: Store, clock: list[int]) -> None:
    ahead, behind = clock[0] + 500 * SECOND, clock[0]
    limiter = RateLimiter(store, "r", rate=100, burst=3)
    count = 0
    for _ in range(10):  # two hosts in turn
        clock[0] = ahead
        count += count_free(limiter)
        clock[0] = behind
        count += count_free(limiter)
    assert count == 3


def test_limiter_whose_tokens_come_too_late_says_so_at_once(store: Store) -> None:
    limiter = RateLimiter(store, "r", 1, per=3600, burst=2)
    limiter.acquire(2)
    with pytest.raises(StoreTimeoutError, match=r"1 of the tokens of the rate limiter 'r' would come in 3.6e"):
        limiter.acquire(timeout=HANG_S * 30)
    assert store.list_keys() == ["r/bucket", "r/line"]
    for n in (0, 3):
        with pytest.raises(ValueError, match=r"n must be|n=3 tokens are never in a bucket with burst=2"):
            limiter.acquire(n)
    for rate, per in ((0, 1), (float("inf"), 1), (1, 0)):
        with pytest.raises(ValueError, match="must be finite and above zero"):
            RateLimiter(store, "r", rate, per)


@pytest.mark.usefixtures("clock")  # so that the second token is not there yet, however slow the machine is
def test_foreign_key_that_would_end_each_sleep_is_removed(store: Store) -> None:
    limiter = RateLimiter(store, "r", 10)
    limiter.acquire()
    store.set("r/never", "1")
    limiter.acquire()
    assert not store.check(["r/never"])


def test_process_that_is_killed_while_it_is_first_in_line_takes_no_token(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "wait_for_a_token", [[]]) as workers:
        start(store, 1)
        bucket = store.get("r/bucket")
        until(Lock(store, "r").holders)
        workers.processes[0].kill()
        workers.processes[0].wait()
        assert store.get("r/bucket") == bucket
        RateLimiter(store, "r", 1, per=0.01).acquire(timeout=HANG_S)
    place.close()
