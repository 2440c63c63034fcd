"""Waits on every store: who wakes them, when they end by themselves, and what they then say."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from contract.places import HANG_S, Place, start_thread

from fscoord.errors import StoreTimeoutError
from fscoord.store import Store

LATE_S = 10
"""How late a wait may end before a test calls it hung. The machine is noisy; how late it is, benchmarks measure."""


def timed_out(call: Callable[[], Any]) -> StoreTimeoutError:
    with pytest.raises(StoreTimeoutError) as caught:
        call()
    return caught.value


# Time-outs


def test_get_waits_for_the_timeout_of_the_store_and_names_the_key(place: Place) -> None:
    hasty = place.open(timeout=0.05)
    start = time.monotonic()
    error = timed_out(lambda: hasty.get("k"))
    assert 0.05 <= error.waited <= time.monotonic() - start < LATE_S
    assert error.keys == (place.full("k"),)
    assert repr(place.full("k")) in str(error)
    assert isinstance(error, (TimeoutError, LookupError))


@pytest.mark.parametrize("timeout", [0.05, timedelta(milliseconds=50)], ids=["float", "timedelta"])
def test_wait_has_one_deadline_and_names_every_missing_key(place: Place, store: Store, timeout: Any) -> None:
    store.set("there", "1")
    store.queue_push("q", "1")
    start = time.monotonic()
    error = timed_out(lambda: store.wait(["b", "there", "a", "q", "b", "c"], timeout))
    assert 0.05 <= error.waited <= time.monotonic() - start < LATE_S
    assert error.keys == tuple(map(place.full, ["b", "a", "c"]))


def test_multi_get_has_one_deadline_and_names_every_missing_key(place: Place) -> None:
    hasty = place.open(timeout=0.05)
    hasty.set("there", "1")
    start = time.monotonic()
    error = timed_out(lambda: hasty.multi_get(["b", "there", "a", "b"]))
    assert 0.05 <= error.waited <= time.monotonic() - start < LATE_S
    assert error.keys == tuple(map(place.full, ["b", "a"]))


def test_queue_pop_waits_for_the_timeout_of_the_store_and_names_the_queue(place: Place) -> None:
    hasty = place.open(timeout=0.05)
    hasty.set("k", "a value is no item")
    start = time.monotonic()
    error = timed_out(lambda: hasty.queue_pop("k"))
    assert 0.05 <= error.waited <= time.monotonic() - start < LATE_S
    assert error.keys == (place.full("k"),)


@pytest.mark.parametrize("zero", [0, 0.0, timedelta(0)], ids=["int", "float", "timedelta"])
def test_a_timeout_of_zero_looks_once(store: Store, zero: Any) -> None:
    timed_out(lambda: store.wait(["k"], zero))
    store.set("k", "1")
    store.wait(["k"], zero)
    store.set_timeout(zero)
    assert store.get("k") == b"1"
    timed_out(lambda: store.get("other"))
    timed_out(lambda: store.queue_pop("k"))


@pytest.mark.parametrize("endless", [math.inf, timedelta.max, 1e300, 10**400], ids=["inf", "max", "1e300", "10**400"])
def test_a_wait_without_limit_ends_when_the_key_comes(place: Place, store: Store, endless: Any) -> None:
    with start_thread(place.open().wait, ["k"], endless) as waiter:
        store.set("k", "1")
    assert waiter.result is None
    store.set_timeout(endless)
    assert store.get("k") == b"1"


def test_nothing_to_wait_for_is_there_already(store: Store) -> None:
    store.wait([], 0)
    store.set_timeout(0)
    assert store.multi_get([]) == []


def test_a_time_out_names_sixteen_keys_in_words_and_all_in_its_keys(store: Store) -> None:
    error = timed_out(lambda: store.wait([f"key{i:02}" for i in range(20)], 0))
    assert len(error.keys) == 20
    assert "key15" in str(error)
    assert "key16" not in str(error)
    assert "and 4 more" in str(error)


# Wake-ups: the waiter may come before or after the writer; both must end at once, and neither by time-out


def writers(store: Store) -> dict[str, Callable[[], object]]:
    return {
        "set": lambda: store.set("k", "1"),
        "add": lambda: store.add("k", 1),
        "compare_set": lambda: store.compare_set("k", "", "1"),
        "append": lambda: store.append("k", "1"),
        "multi_set": lambda: store.multi_set(["other", "k"], ["2", "1"]),
    }


@pytest.mark.parametrize("how", ["set", "add", "compare_set", "append", "multi_set"])
def test_every_way_to_write_a_value_wakes_get(place: Place, store: Store, how: str) -> None:
    with start_thread(place.open().get, "k") as waiter:
        writers(store)[how]()
    assert waiter.result == b"1"


@pytest.mark.parametrize("how", ["set", "add", "compare_set", "append", "multi_set"])
def test_every_way_to_write_a_value_wakes_wait(place: Place, store: Store, how: str) -> None:
    with start_thread(place.open().wait, ["k"]) as waiter:
        writers(store)[how]()
    assert waiter.result is None


def test_a_push_wakes_both_who_waits_for_the_queue_and_who_pops_it(place: Place, store: Store) -> None:
    with start_thread(place.open().wait, ["q"]) as waiter, start_thread(place.open().queue_pop, "q") as popper:
        store.queue_push("q", "1")
        store.queue_push("q", "2")
    assert waiter.result is None
    assert popper.result == b"1"
    assert store.queue_pop("q") == b"2"


def test_a_wait_for_several_keys_ends_when_the_last_has_come_in_any_order(place: Place, store: Store) -> None:
    keys = ["a", "b", "c", "d"]
    with start_thread(place.open().wait, keys) as first, start_thread(place.open().multi_get, keys) as second:
        for key in reversed(keys):
            store.set(key, key)
    assert first.result is None
    assert second.result == [b"a", b"b", b"c", b"d"]


def test_a_key_that_comes_and_goes_is_waited_for_again(place: Place, store: Store) -> None:
    with start_thread(place.open().wait, ["comes", "stays"]) as waiter:
        for _ in range(20):
            store.set("comes", "1")
            store.delete_key("comes")
        store.set("stays", "1")
        store.set("comes", "1")
    assert waiter.result is None


def test_many_waiters_on_one_key_all_wake(place: Place, store: Store) -> None:
    threads = [start_thread(place.open().get, "k") for _ in range(6)]
    store.set("k", "1")
    assert [thread.join() for thread in threads] == [b"1"] * 6


def test_many_waiters_on_keys_of_their_own_all_wake(place: Place, store: Store) -> None:
    threads = [start_thread(place.open().get, f"k{i}") for i in range(6)]
    for i in reversed(range(6)):
        store.set(f"k{i}", str(i))
    assert [thread.join() for thread in threads] == [str(i).encode() for i in range(6)]


def test_several_threads_wait_on_one_handle(store: Store) -> None:
    threads = [start_thread(store.get, f"k{i}") for i in range(4)] + [start_thread(store.queue_pop, "q")]
    store.queue_push("q", "q")
    for i in range(4):
        store.set(f"k{i}", str(i))
    assert [thread.join() for thread in threads] == [b"0", b"1", b"2", b"3", b"q"]


def test_blocked_pops_take_each_value_once(place: Place, store: Store) -> None:
    threads = [start_thread(place.open().queue_pop, "q") for _ in range(6)]
    for i in range(6):
        store.queue_push("q", str(i))
    assert sorted(thread.join() for thread in threads) == [str(i).encode() for i in range(6)]
    assert store.queue_len("q") == 0


def test_a_pop_that_timed_out_takes_nothing_later(place: Place, store: Store) -> None:
    timed_out(lambda: place.open(timeout=0.05).queue_pop("q"))
    store.queue_push("q", "1")
    assert store.queue_len("q") == 1
    assert store.queue_pop("q") == b"1"


def test_a_wait_sees_what_its_own_handle_writes_from_another_thread(store: Store) -> None:
    with start_thread(store.get, "k") as waiter:
        store.set("k", "1")
    assert waiter.result == b"1"


def test_a_barrier_lets_all_go_when_the_last_has_come(place: Place) -> None:
    passed: list[int] = []

    def come(number: int) -> None:
        place.open(how="clone").barrier("b", 5)
        passed.append(number)

    threads = [start_thread(come, i) for i in range(4)]
    assert not passed
    come(4)
    for thread in threads:
        thread.join()
    assert sorted(passed) == [0, 1, 2, 3, 4]


# Ctrl-C


@pytest.mark.usefixtures("no_ctrl_c_is_lost")
@pytest.mark.parametrize("how", ["get", "wait", "multi_get", "queue_pop", "barrier"])
def test_ctrl_c_ends_a_wait_at_once_and_leaves_the_store_usable(place: Place, store: Store, how: str) -> None:
    calls: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("k"),
        "wait": lambda: store.wait(["k"], math.inf),
        "multi_get": lambda: store.multi_get(["k"]),
        "queue_pop": lambda: store.queue_pop("k"),
        "barrier": lambda: store.barrier("k", 2),
    }
    ring = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))

    def interrupted() -> None:
        ring.start()
        calls[how]()

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    ring.join()
    assert time.monotonic() - start < HANG_S / 2
    other = place.open()
    store.set("after", "1")
    assert other.get("after") == b"1"
    other.set("k", "1")
    other.queue_push("k", "2")
    assert store.get("k") == b"1"
    assert store.queue_pop("k") == b"2"


@pytest.mark.usefixtures("no_ctrl_c_is_lost")
def test_a_value_pushed_while_a_pop_is_interrupted_reaches_another_pop(place: Place, store: Store) -> None:
    pushing = place.open()

    def push_and_interrupt() -> None:
        pushing.queue_push("q", "1")
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(10):
        ring = threading.Timer(0.005, push_and_interrupt)
        popper = start_thread(place.open().queue_pop, "q")
        try:
            ring.start()
            store.queue_pop("q")
            ring.join()
            time.sleep(HANG_S)  # the signal may be handled only now
        except KeyboardInterrupt:
            pass
        ring.join()
        if store.queue_len("q") == 0:  # the interrupted pop has taken it, or the other one
            pushing.queue_push("q", "2")
        assert popper.join() in (b"1", b"2")
        while store.queue_len("q"):
            store.queue_pop("q")
