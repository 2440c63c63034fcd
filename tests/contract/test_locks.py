"""Locks, on every kind of store."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from contract.worker import START_S, Workers, start
from support.internals import Waiter, bucket, decode_changes, line_module as _line, parse_line, watcher as ticket
from support.places import ETCD, HANG_S, Place, start_thread, until
from support.third_party import ThirdPartyPlace, place_of

from fscoord import aio
from fscoord.errors import FscoordError, LimitExceededError, LockLostError, StoreTimeoutError, StoreUnavailableError
from fscoord.inspect import dump
from fscoord.recipes import Lock, RLock, Semaphore
from fscoord.store import Store
from fscoord.stores.file import death_watch
from fscoord.stores.memory import HashStore
from fscoord.stores.prefix import PrefixStore


@pytest.fixture(params=["hash", "nested-hash", "third-party", "file-ofd", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = place_of(request.param, str(tmp_path))
    yield place
    place.close()


def line_up(place: Place, count: int, then: Callable[[Lock, int], None]) -> list[Any]:
    """Let so many threads wait for the lock, one after the other; each calls `then` when it has it."""

    def run(rank: int) -> None:
        lock = Lock(place.open(how="clone"), "l")
        assert lock.acquire()
        then(lock, rank)

    look = Lock(place.open(how="clone"), "l")
    threads = []
    for rank in range(count):
        threads.append(start_thread(run, rank))
        until(lambda: len(look.waiters()) == rank + 1)  # noqa: B023
    return threads


class Interrupted(PrefixStore):
    """A view in which the operation number `at` is interrupted, before or after it was done."""

    def __init__(self, store: Store, at: int, after: bool, transacts: bool) -> None:
        super().__init__("x", store)
        self.count, self.at, self.after, self.hit = 0, at, after, False
        self.capabilities = self.capabilities._replace(transacts=transacts)

    def _full(self, key: Any) -> bytes:
        return super()._full(key)

    def _step(self, name: str, *arguments: Any) -> Any:
        self.count += 1
        now = self.count == self.at
        self.hit |= now
        if now and not self.after:
            raise KeyboardInterrupt
        result = getattr(super(), name)(*arguments)
        if now:
            raise KeyboardInterrupt
        return result

    def get(self, key: Any) -> bytes:
        return self._step("get", key)

    def set(self, key: Any, value: Any) -> None:
        self._step("set", key, value)

    def check(self, keys: Any) -> bool:
        return self._step("check", keys)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self._step("wait", keys, timeout)

    def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
        return self._step("compare_set", key, expected, desired)

    def delete_key(self, key: Any) -> bool:
        return self._step("delete_key", key)

    def _transact(self, *arguments: Any) -> bool:
        return bool(self._step("_transact", *arguments))


# One at a time


def test_lock_has_one_holder_at_a_time_and_tokens_rise(place: Place) -> None:
    holds: list[tuple[int, int]] = []
    inside = threading.Lock()

    def run(rank: int) -> None:
        lock = Lock(place.open(how="clone"), "l")
        for _ in range(10):
            with lock:
                assert inside.acquire(blocking=False), "two have it"
                holds.append((lock.token, rank))
                inside.release()

    for thread in [start_thread(run, rank) for rank in range(4)]:
        thread.join()
    assert [token for token, _ in holds] == list(range(1, 41))


def test_lock_is_granted_in_the_order_of_arrival(place: Place, store: Store) -> None:
    served: list[int] = []
    lock = Lock(store, "l")
    assert lock.acquire()
    threads = line_up(place, 4, lambda lock, rank: (served.append(rank), lock.release()))
    assert [waiter.token for waiter in lock.waiters()] == [0, 0, 0, 0]
    assert [owner.owner.rpartition(":")[2] for owner in lock.holders()] == [str(os.getpid())]
    lock.release()
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3]
    assert not lock.locked()


def test_release_wakes_the_next_waiter_alone(place: Place, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = Lock(store, "l")
    assert lock.acquire()
    threads = line_up(place, 5, lambda lock, _: lock.release())
    first = lock._line.entries()[1].id
    keys: list[Any] = []
    set_key, in_one_step = store.set, store._transact
    monkeypatch.setattr(store, "set", lambda key, value: (keys.append(key), set_key(key, value)))
    monkeypatch.setattr(store, "_transact", lambda changes: (keys.extend(changes.set), in_one_step(changes))[1])
    lock.release()
    assert [key for key in keys if key != b"l/line"] == [b"l/wake/" + first.encode()]
    for thread in threads:
        thread.join()


def test_lock_leaves_one_key_behind(place: Place, store: Store) -> None:
    before = store.num_keys()
    lock = Lock(store, "l")
    assert lock.acquire()
    threads = line_up(place, 3, lambda lock, _: lock.release())
    lock.release()
    for thread in threads:
        thread.join()
    assert store.num_keys() == before + 1


def test_locks_of_other_names_are_other_locks(store: Store) -> None:
    names = ["l", "l/l", "l/line", "", "m"]
    assert all(Lock(store, name).acquire(blocking=False) for name in names)


def test_locks_take_the_place_of_those_of_threading(store: Store) -> None:
    lock = Lock(store, "l")
    assert lock.acquire(True, 0)
    assert lock.locked()
    assert not Lock(store, "l").acquire(False)
    assert not Lock(store, "l").acquire(timeout=0.01)
    assert not Lock(store, "l").acquire(timeout=timedelta(seconds=0))
    lock.release()
    assert not lock.locked()
    with pytest.raises(RuntimeError, match="not held"):
        lock.release()
    with pytest.raises(ValueError, match="can't specify a timeout"):
        lock.acquire(False, 1)
    with pytest.raises(ValueError, match="timeout"):
        lock.acquire(timeout=-2)


def test_acquire_without_blocking_changes_nothing(store: Store) -> None:
    with Lock(store, "l"):
        before = store.get("l/line")
        assert not Lock(store, "l").acquire(blocking=False)
        assert store.get("l/line") == before


def test_lock_that_times_out_names_the_holder_and_leaves_the_line(store: Store) -> None:
    with Lock(store, "l") as lock:
        rest = f"waiting{re.escape(store._closer_look())}$"
        words = f"^timeout: the lock 'l' not acquired within 0.01 s; held by .*:{os.getpid()}, nobody else {rest}"
        with pytest.raises(StoreTimeoutError, match=words) as caught, Lock(store, "l", timeout=0.01):
            pytest.fail("it is held")
        assert caught.value.holder == lock.holders()[0].owner
        assert caught.value.keys == ("l",)
        assert not lock.waiters()


def test_lock_that_its_own_process_holds_names_the_thread(place: Place, store: Store) -> None:
    def words() -> str:
        with pytest.raises(StoreTimeoutError) as caught, Lock(place.open(how="clone"), "l", timeout=0.01):
            pytest.fail("it is held")
        assert caught.value.holder == lock.holders()[0].owner
        return str(caught.value)

    lock = Lock(store, "l")
    with lock:
        owner = lock.holders()[0].owner
        own = f"held by this process (thread {threading.current_thread().name}) as {owner}, nobody else waiting"
        assert own in words()
        assert own in start_thread(words).join()
        assert own in lock._line._held_up(lock._line.entries()[0]._replace(id="another"))
    thread = start_thread(lock.acquire)
    thread.join()
    assert f"held by this process (thread {thread._thread.name}) as {owner}" in words()
    entry = lock._line.entries()[0]
    lock.release()
    assert entry.id not in _line.callers


def test_lock_that_a_task_of_its_own_process_holds_names_the_task(store: Store) -> None:
    before = set(_line.callers)  # of holds that other tests have left

    async def wait() -> str:
        tasks = aio.AsyncStore(store)
        asyncio.current_task().set_name("worker")  # type: ignore[union-attr]
        async with aio.Lock(tasks, "l"):
            with pytest.raises(StoreTimeoutError) as caught:
                await aio.Lock(tasks, "l", timeout=0.01).__aenter__()
        return str(caught.value)

    assert "held by this process (task worker) as " in asyncio.run(wait())
    assert set(_line.callers) <= before


def test_entry_of_the_parent_is_not_taken_for_one_of_the_forked_child() -> None:
    with HashStore() as store, Lock(store, "l") as lock:
        entry = lock._line.entries()[0]
        assert _line.caller_of(entry) is threading.current_thread()
        assert _line.caller_of(entry._replace(owner="parent:1")) is None


def test_timeout_of_the_store_holds_for_a_lock_that_has_none(store: Store) -> None:
    store.set_timeout(0.01)
    with Lock(store, "l"), pytest.raises(StoreTimeoutError, match=r"0\.01 s"):
        Lock(store, "l").__enter__()


def test_name_that_is_too_long_is_refused_at_once(store: Store) -> None:
    with pytest.raises(LimitExceededError):
        Lock(store, "x" * 1010)


def test_lock_without_waiters_writes_once_to_acquire_and_once_to_release() -> None:
    store = ThirdPartyPlace().base
    lock = Lock(store, "l")
    with lock:
        pass
    store.asked.clear()
    with lock:
        assert store.asked == ["compare_set"]
    assert store.asked == ["compare_set"] * 2


@pytest.mark.parametrize("holds", [True, False], ids=["held", "free again"])
def test_acquire_that_read_an_empty_line_too_early_overtakes_no_waiter(place: Place, store: Store, holds: bool) -> None:
    class Late(PrefixStore):
        is_late = False

        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            if self.is_late:  # between its look at the line and its write
                self.is_late = False
                assert first.acquire()
                threads.append(start_thread(second.acquire))
                until(first.waiters)
                if not holds:
                    first.release()
                    threads.pop().join()
            return super().compare_set(key, expected, desired)

    first, second = (Lock(PrefixStore("x", place.open(how="clone")), "l") for _ in range(2))
    threads: list[Any] = []
    view = Late("x", store)
    late = Lock(view, "l")
    with late:
        pass
    view.is_late = True
    assert not late.acquire(timeout=0.01)
    assert len(first.waiters()) == holds
    if holds:
        first.release()
        threads.pop().join()
    assert second.token == 3
    second.release()
    with late:
        assert late.token == 4


def wake_by_rings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a waiter that is not woken sleep for longer than a test may take."""
    for module, name in (
        (_line, "SLOW_LOOK_S"),
        (ticket, "DEATH_WATCH_FIRST_S"),
        (death_watch, "PROBE_S"),
        (death_watch, "DEATH_POLL_S"),
    ):
        monkeypatch.setattr(module, name, 10 * HANG_S)


def test_release_wakes_1_of_64_waiters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wake_by_rings_alone(monkeypatch)  # on a busy machine there is no moment in which all 64 sleep, and none looks
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    monkeypatch.setattr(Waiter, "max_sleep", spied := SpiedSleep(Waiter.max_sleep))
    lock = Lock(store, "l")
    assert lock.acquire()
    gate = threading.Event()
    threads = line_up(place, 64, lambda lock, _: (gate.wait(HANG_S), lock.release()))
    try:
        waiting = [bucket(lock._line._wake_key(entry.id)) for entry in lock._line.entries()[1:]]
        until(lambda: sorted(spied.asleep) == sorted(waiting))
        spied.rung.clear()
        lock.release()
        # Not until the first waiter was rung: if it was just looking at the line by itself, it acquires without a ring.
        until(lambda: lock.holders() and sorted(spied.asleep) == sorted(waiting[1:]))
        # The release writes the line and one wake key. A waiter also listens to the byte for the end of the session
        # before it, and one of these 64 bytes may be that of the wake key.
        written = {waiting[0], bucket(lock._line._key)}
        assert [heard for heard in spied.rung if not written.intersection(heard)] == []
    finally:  # otherwise 64 threads outlive a failure, and fail the tests after it
        gate.set()
        if lock._held:
            lock.release()
        for thread in threads:
            thread.join()
        place.close()


class SpiedSleep:
    """In the place of `Waiter.max_sleep`: for which buckets waiters sleep now, and which waiters were rung."""

    def __init__(self, max_sleep: Callable[[Waiter, float], float]) -> None:
        self._max_sleep = max_sleep
        self._sleeping: dict[int, int] = {}  # by waiter: two may sleep for one bucket
        self.rung: list[tuple[int, ...]] = []  # all the buckets of each waiter that was rung, that of its key first

    @property
    def asleep(self) -> list[int]:
        return list(self._sleeping.values())

    def __get__(self, waiter: Waiter, _: type) -> Callable[[float], float]:
        def max_sleep(deadline: float) -> float:
            self._sleeping.pop(id(waiter), None)
            seconds = self._max_sleep(waiter, deadline)
            if seconds > 0:
                self._sleeping[id(waiter)] = waiter._bucket
            elif waiter.was_rung:
                self.rung.append((waiter._bucket, *waiter._other_buckets))
            return seconds

        return max_sleep


# What goes wrong


def test_hold_that_was_taken_away_is_noticed(store: Store) -> None:
    lock = Lock(store, "l")
    with pytest.raises(LockLostError):
        lock.check()
    assert lock.acquire()
    lock.check()
    lock._line.leave(lock._line.entries()[0].id)  # somebody breaks it
    with pytest.raises(LockLostError, match="no longer in line"):
        lock.check()
    with pytest.raises(LockLostError, match="no longer in line"):
        lock.release()
    with Lock(store, "l") as other:
        assert other.token == 2
        with pytest.raises(RuntimeError, match="not held"):
            lock.release()


def test_hold_that_another_has_taken_away_is_noticed_at_release(place: Place, store: Store) -> None:
    lock, other = Lock(store, "l"), Lock(place.open(how="clone"), "l")
    assert lock.acquire()
    other._line.leave(other._line.entries()[0].id)
    with pytest.raises(LockLostError, match="no longer in line"):
        lock.release()
    with lock:
        assert lock.token == 2


def test_waiter_that_is_taken_out_of_the_line_raises(place: Place, store: Store) -> None:
    with Lock(store, "l") as lock:
        waiter = start_thread(Lock(place.open(how="clone"), "l").acquire)
        until(lock.waiters)
        entry = lock._line.entries()[1]
        lock._line.leave(entry.id)
        store.set(f"l/wake/{entry.id}", "")
        with pytest.raises(LockLostError, match="no longer in line"):
            waiter.join()


def test_waiter_acquires_though_the_releaser_died_before_waking_it(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dying(PrefixStore):
        def set(self, key: Any, value: Any) -> None:
            raise StoreUnavailableError("here the process dies")

    monkeypatch.setattr(_line, "SLOW_LOOK_S", 0.01)
    lock = Lock(Dying("x", store), "l")
    assert lock.acquire()
    with start_thread(Lock(PrefixStore("x", place.open(how="clone")), "l").acquire) as waiter:
        until(lock.waiters)
        with pytest.raises(StoreUnavailableError):
            lock.release()
    assert waiter.result


def test_wake_key_of_a_waiter_that_has_gone_does_not_stay(
    place: Place, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(PrefixStore):
        def set(self, key: Any, value: Any) -> None:
            waiter.join()  # it has looked by itself, had its turn and gone
            super().set(key, value)

    def come_and_go() -> None:
        with Lock(PrefixStore("x", place.open(how="clone")), "l", HANG_S):
            pass

    monkeypatch.setattr(_line, "SLOW_LOOK_S", 0.01)
    lock = Lock(Slow("x", store), "l")
    assert lock.acquire()
    waiter = start_thread(come_and_go)
    until(lock.waiters)
    lock.release()
    assert not PrefixStore("x", store).list_keys("l/wake")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("held", [False, True], ids=["free", "held"])
def test_interruption_at_any_operation_leaves_no_holder_and_no_waiter(store: Store, held: bool, after: bool) -> None:
    for transacts in {False, store.capabilities.transacts}:
        at, hit = 0, True
        while hit:
            at += 1
            lock = Lock(PrefixStore("x", store), "l")
            if held:
                assert lock.acquire()
            view = Interrupted(store, at, after, transacts)
            try:
                acquired = Lock(view, "l").acquire(timeout=0)
            except KeyboardInterrupt:
                acquired = False
            hit = view.hit
            if acquired:
                lock._line.leave(lock._line.entries()[0].id)
            if held:
                lock.release()
            assert lock._line.entries() == []
            assert not PrefixStore("x", store).list_keys("l/wake")
        assert at > 2


def test_waiter_that_is_served_while_it_gives_up_has_the_lock(place: Place, store: Store) -> None:
    class Late(PrefixStore):
        calls = 0

        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            self.calls += 1
            if self.calls == 2:  # the first joins the line, the second would leave it
                holder.release()
            return super().compare_set(key, expected, desired)

    holder = Lock(PrefixStore("x", place.open()), "l")
    assert holder.acquire()
    lock = Lock(Late("x", store), "l")
    assert lock.acquire(timeout=0)
    lock.release()


def test_line_with_other_content_is_an_error_that_names_the_key(store: Store) -> None:
    store.set("l/line", "something")
    with pytest.raises(FscoordError, match=r"l/line.*not a valid line of waiters"):
        Lock(store, "l").acquire()


def test_line_that_is_deleted_meanwhile_begins_anew(store: Store) -> None:
    class Deleted(PrefixStore):
        deleted = False

        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            if not self.deleted:
                self.deleted = self.delete_key(key)
            return super().compare_set(key, expected, desired)

    with Lock(PrefixStore("x", store), "l"):
        pass
    with Lock(Deleted("x", store), "l") as lock:
        assert lock.token == 1
    assert lock._line.entries() == []


# Processes


def test_lock_of_a_killed_holder_goes_to_the_next_living_waiter(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "hold", [["l"]] * 3) as workers:
        start(store, 3)
        lock = Lock(store, "l")
        until(lambda: len(lock.waiters()) == 2)
        waiter = start_thread(Lock(place.open(how="clone"), "l").acquire, True, HANG_S)
        until(lambda: len(lock.waiters()) == 3)
        line = [place.owner for place in [*lock.holders(), *lock.waiters()]]
        by_owner = {str(process.pid): process for process in workers.processes}
        for owner in (line[1], line[0], line[2]):  # one in the middle, the holder, and the next one
            process = by_owner[owner.rpartition(":")[2]]
            process.kill()
            process.wait(HANG_S)
        assert waiter.join()
    assert [owner.owner.rpartition(":")[2] for owner in lock.holders()] == [str(os.getpid())]
    place.close()


def no_overlap(directory: str, processes: int, times: int) -> None:
    place = Place("file-ofd", directory)
    store = place.open(timeout=START_S)
    store.set("n", "0")
    with Workers(place.spec(), "count_under_lock", [["l", times]] * processes) as workers:
        start(store, processes)
        assert workers.results(patience=3600) == [times] * processes
    assert store.get("n") == b"%d" % (processes * times)
    tokens = [int(token) for token in store.get("tokens").split()]
    assert tokens == list(range(1, processes * times + 1))
    assert Lock(store, "l")._line.entries() == []
    assert not store.list_keys("l/wake")
    place.close()


def arrivals(path: str) -> dict[str, int]:
    """Return, in the order in which they came to stand in the line "l", each with its token in the end."""
    found: dict[str, int] = {}
    for entry in dump(path):
        changes: Any = [(entry.key, entry.value)] if entry.kind == "compare_set" else []
        if entry.kind in ("multi_set", "transaction"):
            changes = decode_changes(entry.value)
        for text in [value for key, value in changes if key == b"l/line"]:
            for each in parse_line(text).entries:
                found[each.id] = each.token
    return found


def test_holds_of_processes_do_not_overlap_and_tokens_are_granted_in_order(tmp_path: Path) -> None:
    no_overlap(str(tmp_path), 4, 25)
    assert list(arrivals(f"{tmp_path}/store").values()) == list(range(1, 101))


@pytest.mark.long
@pytest.mark.parametrize(("processes", "times"), [(8, 500), (32, 1000)])
def test_holds_by_the_thousand_of_many_processes_do_not_overlap(tmp_path: Path, processes: int, times: int) -> None:
    no_overlap(str(tmp_path), processes, times)


@pytest.mark.parametrize("kind", ["Lock", "Semaphore"])
def test_close_without_release_wakes_the_next_waiter_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    wake_by_rings_alone(monkeypatch)
    monkeypatch.setattr(death_watch, "BEGIN_S", 0.0)
    kinds: dict[str, Callable[[Store], Any]] = {
        "Lock": lambda s: Lock(s, "l"),
        "Semaphore": lambda s: Semaphore(s, "l", 2),
    }
    make = kinds[kind]
    place = Place("file-ofd", str(tmp_path))
    holders = [place.open() for _ in range(1 if kind == "Lock" else 2)]
    assert all(make(holder).acquire() for holder in holders)
    monkeypatch.setattr(Waiter, "max_sleep", spied := SpiedSleep(Waiter.max_sleep))
    waiter = start_thread(make(place.open()).acquire)
    until(lambda: spied.asleep)
    holders[-1].close()
    assert waiter.join()
    place.close()


def test_store_without_waiters_is_closed_without_a_bell(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Lock(store, "l"):
        pass
    store.close()
    place.close()
    assert not list(tmp_path.glob("*.bell"))


def test_lock_of_a_killed_holder_is_free_for_acquire_without_blocking(tmp_path: Path) -> None:
    place = Place("file-ofd", str(tmp_path))
    store = place.open()
    with Workers(place.spec(), "hold", [["l"]]) as workers:
        start(store, 1)
        lock = Lock(store, "l")
        until(lock.locked)
        assert not lock.acquire(blocking=False)
        workers.processes[0].kill()
        workers.processes[0].wait(HANG_S)
        assert lock.acquire(blocking=False)
    place.close()


def test_forked_child_holds_nothing(store: Store) -> None:
    lock = Lock(store, "l")
    assert lock.acquire()
    child = os.fork()
    if not child:
        try:
            lock.release()
        except RuntimeError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    lock.release()


# Again and again by one thread


def test_thread_may_acquire_a_reentrant_lock_again(place: Place, store: Store) -> None:
    lock = RLock(store, "l")
    with lock, lock:
        assert lock.acquire(blocking=False)
        token = lock.token
        lock.release()
        assert lock.token == token
        assert not start_thread(lock.acquire, False).join()
        assert not RLock(place.open(how="clone"), "l").acquire(False)
        with pytest.raises(RuntimeError, match="in this thread"):
            start_thread(lock.release).join()
    assert not lock.locked()
    with pytest.raises(RuntimeError, match="not held"):
        lock.release()


# As a decorator, and under a condition


def test_lock_decorates_a_function(store: Store) -> None:
    lock = Lock(store, "l")

    @lock
    def work(number: int, *, more: int = 0) -> tuple[int, int]:
        """Do it."""
        assert lock.locked()
        return number + more, lock.token

    assert [work(1, more=2), work(4)] == [(3, 1), (4, 2)]
    assert (work.__name__, work.__doc__) == ("work", "Do it.")
    assert not lock.locked()

    @lock
    def fails() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not lock.locked()


def test_lock_refuses_to_decorate_a_function_whose_body_runs_after_the_call(store: Store) -> None:
    async def task() -> None: ...

    def steps() -> Iterator[int]:
        yield 1

    async def both() -> AsyncIterator[int]:
        yield 1

    for function in (task, steps, both):
        with pytest.raises(TypeError, match=r"runs after the call.*aio"):
            Lock(store, "l")(function)


def test_lock_for_tasks_decorates_a_coroutine_function(store: Store) -> None:
    async def run() -> list[int]:
        lock = aio.Lock(aio.AsyncStore(store), "l")

        @lock
        async def work(number: int) -> int:
            assert await lock.locked()
            return number

        found = [await work(1), *await asyncio.gather(work(2), work(3))]
        assert not await lock.locked()
        return found

    assert asyncio.run(run()) == [1, 2, 3]


def test_condition_waits_on_a_reentrant_lock(store: Store) -> None:
    lock = RLock(store, "r")
    condition = threading.Condition(lock)
    told: list[int] = []

    def wait() -> bool:
        with condition, condition:
            found = condition.wait_for(lambda: told, HANG_S)
            assert lock._is_owned()
            assert len(lock.holders()) == 1
        return bool(found)

    waiter = start_thread(wait)
    until(lambda: condition._waiters)  # type: ignore[attr-defined]
    with condition:
        told.append(1)
        condition.notify()
    assert waiter.join()
    assert not lock.locked()
    with pytest.raises(RuntimeError, match="un-acquired"):
        condition.notify()
