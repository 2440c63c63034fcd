"""Tests of waits: wake-ups, time-outs and errors. Other tests press Ctrl-C, which must end a wait and lose no value."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest

from fscoord._runtime import system
from fscoord._runtime.signals import resend_lost_signals
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.store import Store
from fscoord.testing.contract.place import HANG_S, ContractTests, Place, Thread, start_thread, until

LOST_S = HANG_S / 3
"""If the call has not ended this many seconds after a Ctrl-C, the Ctrl-C is sent again."""

LATE_S = HANG_S
"""How many seconds a wait may last before it counts as hung. A wait that ignores the test's timeout lasts longer."""


def timed_out(call: Callable[[], Any]) -> StoreTimeoutError:
    """Run `call`, which must time out, and return its error."""
    with pytest.raises(StoreTimeoutError) as caught:
        call()
    assert "timeout" in str(caught.value)  # the word for which callers of torch's stores search
    return caught.value


WRITERS: dict[str, Callable[[Store], object]] = {
    "set": lambda store: store.set("k", "1"),
    "add": lambda store: store.add("k", 1),
    "compare_set": lambda store: store.compare_set("k", "", "1"),
    "append": lambda store: store.append("k", "1"),
    "multi_set": lambda store: store.multi_set(["other", "k"], ["2", "1"]),
}
"""All operations that can set the key k to 1."""


class Waiting(ContractTests):
    """Tests of time-outs and wake-ups."""

    # Time-outs

    def test_operation_waits_for_the_timeout_of_the_store_and_names_every_missing_key(self, place: Place) -> None:
        hasty = place.open(timeout=0.05)
        hasty.set("there", "a value that is not an item")
        calls: dict[Callable[[], object], list[str]] = {
            lambda: hasty.get("k"): ["k"],
            lambda: hasty.multi_get(["b", "there", "a", "b"]): ["b", "a"],
            lambda: hasty.queue_pop("there"): ["there"],
        }
        for call, missing in calls.items():
            start = system.time.monotonic()
            error = timed_out(call)
            assert 0.05 <= error.waited <= system.time.monotonic() - start < LATE_S
            assert error.keys == tuple(map(place.full, missing))
            assert all(repr(key) in str(error) for key in error.keys)
            assert isinstance(error, (TimeoutError, LookupError))

    def test_call_with_a_timeout_of_its_own_leaves_that_of_the_handle(self, place: Place, store: Store) -> None:
        waiting = [start_thread(lambda: store.get("later")), start_thread(lambda: store.queue_pop("queue"))]
        calls: dict[str, Callable[[Any], Any]] = {
            "k": lambda limit: store.get("k", timeout=limit),
            "m": lambda limit: store.multi_get(["m"], timeout=limit),
            "q": lambda limit: store.queue_pop("q", timeout=limit),
        }
        for key, call in calls.items():
            for limit in (0, 0.05, timedelta(milliseconds=50)):
                start = system.time.monotonic()
                error = timed_out(lambda: call(limit))  # noqa: B023 - called at once
                assert error.waited <= system.time.monotonic() - start < LATE_S
                assert error.keys == (place.full(key),)
        store.multi_set(["k", "m", "later"], ["1", "2", "3"])
        store.queue_push("q", "4")
        store.queue_push("queue", "5")
        assert [call(0) for call in calls.values()] == [b"1", [b"2"], b"4"]
        assert [thread.join() for thread in waiting] == [b"3", b"5"]

    @pytest.mark.parametrize("timeout", [0.05, timedelta(milliseconds=50)], ids=["float", "timedelta"])
    def test_wait_has_one_deadline_and_names_every_missing_key(self, place: Place, store: Store, timeout: Any) -> None:
        store.set("there", "1")
        store.queue_push("q", "1")
        start = system.time.monotonic()
        error = timed_out(lambda: store.wait(["b", "there", "a", "q", "b", "c"], timeout))
        assert 0.05 <= error.waited <= system.time.monotonic() - start < LATE_S
        assert error.keys == tuple(map(place.full, ["b", "a", "c"]))

    @pytest.mark.parametrize("zero", [0, 0.0, timedelta(0)], ids=["int", "float", "timedelta"])
    def test_timeout_of_zero_looks_once(self, store: Store, zero: Any) -> None:
        timed_out(lambda: store.wait(["k"], zero))
        store.set("k", "1")
        store.wait(["k"], zero)
        store.set_timeout(zero)
        assert store.get("k") == b"1"
        timed_out(lambda: store.get("other"))
        timed_out(lambda: store.queue_pop("k"))

    @pytest.mark.parametrize(
        "endless", [math.inf, timedelta.max, 1e300, 10**400], ids=["inf", "max", "1e300", "10**400"]
    )
    def test_wait_without_limit_ends_when_the_key_comes(self, place: Place, store: Store, endless: Any) -> None:
        with start_thread(place.open().wait, ["k"], endless) as waiter:
            store.set("k", "1")
        assert waiter.result is None
        store.set_timeout(endless)
        assert store.get("k") == b"1"

    def test_wait_for_no_keys_returns_at_once(self, store: Store) -> None:
        store.wait([], 0)
        store.set_timeout(0)
        assert store.multi_get([]) == []

    def test_timeout_names_sixteen_keys_in_its_text_and_all_in_its_keys(self, store: Store) -> None:
        error = timed_out(lambda: store.wait([f"key{i:02}" for i in range(20)], 0))
        assert len(error.keys) == 20
        assert "key15" in str(error)
        assert "key16" not in str(error)
        assert "4 more" in str(error)

    # Wake-ups: the waiter may come before or after the writer; both must end at once, and neither by time-out

    @pytest.mark.parametrize("how", WRITERS)
    def test_get_and_wait_are_woken_by_every_way_to_write_a_value(self, place: Place, store: Store, how: str) -> None:
        with start_thread(place.open().get, "k") as getter, start_thread(place.open().wait, ["k"]) as waiter:
            WRITERS[how](store)
        assert getter.result == b"1"
        assert waiter.result is None

    def test_push_wakes_a_waiter_for_the_queue_and_a_pop(self, place: Place, store: Store) -> None:
        assert store.queue_len("q") == 0
        with start_thread(place.open().wait, ["q"]) as waiter, start_thread(place.open().queue_pop, "q") as popper:
            store.queue_push("q", "1")
            store.queue_push("q", "2")
        assert waiter.result is None
        assert popper.result == b"1"
        assert store.queue_pop("q") == b"2"

    def test_wait_for_several_keys_ends_when_the_last_has_come_in_any_order(self, place: Place, store: Store) -> None:
        keys = ["a", "b", "c", "d"]
        with start_thread(place.open().wait, keys) as first, start_thread(place.open().multi_get, keys) as second:
            for key in reversed(keys):
                store.set(key, key)
        assert first.result is None
        assert second.result == [b"a", b"b", b"c", b"d"]

    def test_key_that_comes_and_goes_is_waited_for_again(self, place: Place, store: Store) -> None:
        with start_thread(place.open().wait, ["comes", "stays"]) as waiter:
            for _ in range(20):
                store.set("comes", "1")
                store.delete_key("comes")
            store.set("stays", "1")
            store.set("comes", "1")
        assert waiter.result is None

    def test_waiters_on_one_key_all_wake(self, place: Place, store: Store) -> None:
        threads = [start_thread(place.open().get, "k") for _ in range(6)]
        store.set("k", "1")
        assert [thread.join() for thread in threads] == [b"1"] * 6

    def test_waiters_on_keys_of_their_own_all_wake(self, place: Place, store: Store) -> None:
        threads = [start_thread(place.open().get, f"k{i}") for i in range(6)]
        for i in reversed(range(6)):
            store.set(f"k{i}", str(i))
        assert [thread.join() for thread in threads] == [str(i).encode() for i in range(6)]

    def test_threads_wait_on_one_handle_for_keys_and_a_queue(self, store: Store) -> None:
        threads = [start_thread(store.get, f"k{i}") for i in range(4)] + [start_thread(store.queue_pop, "q")]
        store.queue_push("q", "q")
        for i in range(4):
            store.set(f"k{i}", str(i))
        assert [thread.join() for thread in threads] == [b"0", b"1", b"2", b"3", b"q"]

    def test_pops_that_block_take_each_value_once(self, place: Place, store: Store) -> None:
        threads = [start_thread(place.open().queue_pop, "q") for _ in range(6)]
        for i in range(6):
            store.queue_push("q", str(i))
        assert sorted(thread.join() for thread in threads) == [str(i).encode() for i in range(6)]
        assert store.queue_len("q") == 0

    def test_pop_that_timed_out_takes_nothing_later(self, place: Place, store: Store) -> None:
        timed_out(lambda: place.open(timeout=0.05).queue_pop("q"))
        store.queue_push("q", "1")
        assert store.queue_len("q") == 1
        assert store.queue_pop("q") == b"1"

    def test_wait_sees_a_write_of_its_own_handle_from_another_thread(self, store: Store) -> None:
        with start_thread(store.get, "k") as waiter:
            store.set("k", "1")
        assert waiter.result == b"1"

    def test_barrier_releases_all_when_the_last_has_come(self, place: Place) -> None:
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


class CtrlC:
    """A context manager in which SIGINT raises `KeyboardInterrupt` only during the call under test.

    A `KeyboardInterrupt` at another time would end pytest.
    """

    def __init__(self) -> None:
        self._is_armed = self._has_begun = self._has_come = False
        self._raised = self._lost_ones = 0
        self._before: object = None
        self._again = resend_lost_signals()

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._again.__enter__()
        self._hook, sys.unraisablehook = sys.unraisablehook, self._lost
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook
        self._again.__exit__(None, None, None)
        signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def press(self) -> None:
        """Wait until the call in `ends` has begun, and send SIGINT to the main thread. Another thread calls this.

        If the call has not ended after `LOST_S` seconds, the `KeyboardInterrupt` was lost: see `ends`. Then SIGINT is
        sent again.
        """
        until(lambda: self._has_begun)
        self._has_begun = False
        self._send()
        end = system.time.monotonic() + LOST_S
        while self._is_armed and system.time.monotonic() < end:
            system.time.sleep(0.001)
        if self._is_armed:
            self._send()

    @staticmethod
    def _send() -> None:
        main = system.threading.main_thread().ident
        assert main is not None
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(main, signal.SIGINT)
        else:  # Windows: a store notices Ctrl-C within `system.SLEEP_MAX_S`
            signal.raise_signal(signal.SIGINT)

    def ends(self, call: Callable[[], object]) -> bool:
        """Run `call` while another thread calls `press`. Return whether the Ctrl-C ended `call`.

        The Ctrl-C may come too late. Up to Python 3.12, it may also be lost without a report: in the finalizer of an
        object of `io`, such as the response of a server (``iobase_finalize`` in CPython). So one loss is allowed, and a
        second loss is a fault of the store.
        """
        self._has_come, self._raised = False, 0
        try:
            try:
                self._is_armed = self._has_begun = True
                call()
            finally:
                self._is_armed = False
        except KeyboardInterrupt:
            self._is_armed = False  # the signal may have arrived just before this line in `finally`
            is_ended = True
        else:
            until(lambda: self._has_come)
            is_ended = False
        self._lost_ones += self._raised > is_ended
        assert self._lost_ones < 2, "the store caught a KeyboardInterrupt twice and went on"
        return is_ended

    def _handle(self, *_: object) -> None:
        self._has_come = True
        if self._is_armed:
            self._raised += 1
            raise KeyboardInterrupt

    def _lost(self, lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            self._raised -= 1  # raised in a finalizer, where Python drops it: the signal is sent again
        self._hook(lost)


def popped(popper: Thread, store: Store, key: str) -> bytes:
    """Wait for `popper`, a thread that pops from the queue `key`, and return the value that it popped.

    An earlier, interrupted pop may take the value instead, and a server may execute that pop at any later moment. So
    this function pushes another value into `store` whenever the queue is empty.
    """

    def is_over() -> bool:
        if popper.is_alive() and store.queue_len(key) == 0:
            store.queue_push(key, "2")
        return not popper.is_alive()

    until(is_over)
    value: bytes = popper.join()
    return value


class Interrupts(ContractTests):
    """Tests of interrupted waits."""

    @pytest.fixture
    def ctrl_c(self) -> Iterator[CtrlC]:
        """Yield a `CtrlC`, which replaces the process's handler for SIGINT during the test."""
        with CtrlC() as ctrl_c:
            yield ctrl_c

    @pytest.mark.parametrize("how", ["get", "wait", "multi_get", "queue_pop", "barrier"])
    def test_ctrl_c_ends_a_wait_at_once_and_leaves_the_store_usable(
        self, place: Place, store: Store, ctrl_c: CtrlC, how: str
    ) -> None:
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: store.get("k"),
            "wait": lambda: store.wait(["k"], math.inf),
            "multi_get": lambda: store.multi_get(["k"]),
            "queue_pop": lambda: store.queue_pop("k"),
            "barrier": lambda: store.barrier("k", 2),
        }
        rescuer = place.open()

        def rescue() -> None:
            with suppress(Exception):  # the test reports the failure of the store itself, and not of this rescue
                rescuer.set("k", "1")
                rescuer.queue_push("k", "2")
                rescuer.barrier("k", 2)

        ring = system.threading.Timer(0.05, ctrl_c.press)
        end = system.threading.Timer(HANG_S / 2, rescue)
        ring.daemon = end.daemon = True
        ring.start()
        end.start()
        try:
            is_ended = ctrl_c.ends(calls[how])
        finally:
            end.cancel()
            ring.join()
        assert is_ended, f"{how} did not wait until Ctrl-C came"
        other = place.open()
        store.set("after", "1")
        assert other.get("after") == b"1"
        other.set("k", "1")
        other.queue_push("k", "2")
        assert store.get("k") == b"1"
        if how == "queue_pop":
            assert popped(start_thread(store.queue_pop, "k"), other, "k") == b"2"
        else:
            assert store.queue_pop("k") == b"2"

    # The signal may arrive in the finalizer of an object, such as a file. There Python reports the exception and drops
    # it, and the signal is sent again.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_value_pushed_while_a_pop_is_interrupted_reaches_another_pop(
        self, place: Place, store: Store, ctrl_c: CtrlC
    ) -> None:
        pushing = place.open()

        def push_and_interrupt() -> None:
            pushing.queue_push("q", "1")
            ctrl_c.press()

        assert store.queue_len("q") == 0
        for _ in range(10):
            ring = system.threading.Timer(0.005, push_and_interrupt)
            popper = start_thread(place.open().queue_pop, "q")
            ring.start()
            try:
                ctrl_c.ends(lambda: store.queue_pop("q"))
            finally:
                ring.join()
            assert popped(popper, pushing, "q") in (b"1", b"2")
            for _ in range(store.queue_len("q")):
                with suppress(QueueEmptyError):
                    store.queue_pop("q", block=False)
            assert store.queue_len("q") == 0
