"""The promises of `HashStore` beyond the contract: as the model, it wakes no waiter in vain, and forgets none."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref

import pytest
from support.places import HANG_S, start_thread

from fscoord.errors import StoreClosedError
from fscoord.stores.memory import HashStore

INTERRUPTS = 300


def waiting(store: HashStore, count: int) -> None:
    """Return when `count` threads sleep in the store."""
    end = time.monotonic() + HANG_S
    while sum(map(len, [*store._shared.readers.values(), *store._shared.poppers.values()])) < count:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_write_wakes_only_the_waiters_for_its_key() -> None:
    store = HashStore(timeout=HANG_S)
    looks: dict[str, int] = {}

    class Counting(HashStore):
        def _check_open(self) -> None:
            looks[threading.current_thread().name] = looks.get(threading.current_thread().name, 0) + 1

    def get(name: str) -> None:
        threading.current_thread().name = name
        handle = Counting(timeout=HANG_S)
        handle._shared = store._shared
        handle.get(name)

    threads = [start_thread(get, f"k{i}") for i in range(8)]
    waiting(store, 8)
    for i in range(8):
        store.set("unrelated", str(i))
        store.set(f"k{i}", "1")
    for thread in threads:
        thread.join()
    assert looks == {f"k{i}": 2 for i in range(8)}, "a look before the sleep and one after"


def test_push_wakes_one_pop() -> None:
    store = HashStore(timeout=HANG_S)
    threads = [start_thread(store.clone().queue_pop, "q") for _ in range(4)]
    waiting(store, 4)
    store.queue_push("q", "1")
    assert sum(map(len, store._shared.poppers.values())) >= 3
    for _ in range(3):
        store.queue_push("q", "1")
    assert [thread.join() for thread in threads] == [b"1"] * 4


def test_pops_are_served_in_the_order_in_which_they_came() -> None:
    store = HashStore(timeout=HANG_S)
    served: list[int] = []

    def pop(number: int) -> None:
        store.clone().queue_pop("q")
        served.append(number)

    threads = []
    for number in range(4):
        threads.append(start_thread(pop, number))
        waiting(store, number + 1)
    for number in range(4):
        store.queue_push("q", "1")
        threads[number].join()
    assert served == [0, 1, 2, 3]


def test_waits_that_are_over_leave_nothing_behind() -> None:
    store = HashStore(timeout=0.01)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            store.get("k")
        with pytest.raises(TimeoutError):
            store.queue_pop("q")
        store.queue_push("other", "1")
        store.queue_pop("other")
    assert not store._shared.readers
    assert not store._shared.poppers
    assert not store._shared.queues


def test_close_ends_the_waits_of_its_handle_and_no_others() -> None:
    store = HashStore(timeout=HANG_S)
    closing, staying = store.clone(), store.clone()
    ended = [start_thread(closing.get, "k"), start_thread(closing.queue_pop, "q")]
    stays = start_thread(staying.get, "k")
    waiting(store, 3)
    closing.close()
    for thread in ended:
        with pytest.raises(StoreClosedError):
            thread.join()
    store.set("k", "1")
    assert stays.join() == b"1"


def test_handle_that_is_closed_keeps_no_data_alive() -> None:
    store = HashStore()
    data = weakref.ref(store._shared)
    store.close()
    gc.collect()
    assert data() is None


@pytest.mark.usefixtures("no_ctrl_c_is_lost")
def test_ctrl_c_at_any_moment_leaves_the_lock_free_and_the_bells_in_order(rng: random.Random) -> None:
    store = HashStore(timeout=HANG_S)
    other = store.clone()
    ready, done = [False], [False]

    def work() -> None:
        while not done[0]:
            other.queue_push("q", "1")
            other.set("k", "1")
            time.sleep(0.0002)  # leaves the interpreter to the others

    def interrupt() -> None:
        for _ in range(INTERRUPTS):
            while not ready[0]:
                time.sleep(0.0001)
            ready[0] = False
            time.sleep(rng.uniform(0, 0.001))
            os.kill(os.getpid(), signal.SIGINT)

    worker, interrupter = start_thread(work), start_thread(interrupt)
    for _ in range(INTERRUPTS):
        try:
            ready[0] = True
            while True:
                store.queue_pop("q")
                store.delete_key("k")
                store.get("k")
        except KeyboardInterrupt:
            pass
    interrupter.join()
    done[0] = True
    worker.join()
    assert not store._shared.lock.locked()
    store.set("k", "1")
    assert store.get("k") == b"1"
