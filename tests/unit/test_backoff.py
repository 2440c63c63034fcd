"""Loops that try again because others were quicker: each ends in time and pauses, whatever the store answers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.places import HANG_S, start_thread

from fscoord import HashStore, PrefixStore, StoreTimeoutError
from fscoord._waiting import timing
from fscoord._waiting.timing import FREE_TRIES, LONGEST_PAUSE_S, Backoff
from fscoord.collectives import barrier
from fscoord.errors import BarrierError, BrokenBarrierError, CompactedError, StoreUnavailableError
from fscoord.recipes import Fenced, Lock, Queue
from fscoord.recipes._line import Line
from fscoord.stores.etcd import EtcdStore
from fscoord.stores.etcd.transactions import TxnResult
from fscoord.stores.tcp import TCPStore

LIMIT_S = 0.2
TRIES_MAX = FREE_TRIES + 60
"""How many tries fit into `LIMIT_S`, with their pauses; without pauses there are thousands."""


class Clock:
    """A clock that only sleeps move."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


class Refusing(HashStore):
    """A store in which others change a key just before each compare-and-set of it, to what `answers` yields."""

    def __init__(self, key: bytes, answers: Callable[[int], bytes]) -> None:
        super().__init__(timeout=LIMIT_S)
        self.key, self.answers, self.tries = key, answers, 0

    def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
        if key != self.key:
            return super().compare_set(key, expected, desired)
        self.tries += 1
        found = self.answers(self.tries)
        self.set(key, found)
        return found


def error_of(call: Callable[[], object], kind: type[Exception] = StoreTimeoutError) -> Any:
    """Return what `call` raises, in a thread: a loop without an end fails the test."""

    def run() -> Exception:
        with pytest.raises(kind) as caught:
            call()
        return caught.value

    return start_thread(run).join()


# The pauses


def test_backoff_gives_free_tries_then_pauses_that_grow_until_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(timing.system, "time", clock)
    backoff = Backoff(1.0)
    assert all(backoff.pause() for _ in range(FREE_TRIES - 1))
    assert clock.pauses == []
    while backoff.pause():
        pass
    assert clock.pauses[:4] == [0.001, 0.002, 0.004, 0.008]
    assert max(clock.pauses) == LONGEST_PAUSE_S
    assert (backoff.waited(), sum(clock.pauses)) == (pytest.approx(1.0), pytest.approx(1.0))
    assert backoff.tries == FREE_TRIES + len(clock.pauses)


def test_backoff_without_time_still_has_its_free_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.system, "time", Clock())
    backoff = Backoff(0.0)
    assert [backoff.pause() for _ in range(FREE_TRIES)] == [True] * (FREE_TRIES - 1) + [False]


# Recipes


def test_fenced_set_that_others_always_overtake_ends_with_the_stores_timeout() -> None:
    store = Refusing(b"f", lambda number: b"1 value %d" % number)
    error = error_of(lambda: Fenced(store, "f").set(b"mine", 7))
    assert "other processes changed key 'f' before each of" in str(error)
    assert error.keys == ("f",)
    assert store.tries < TRIES_MAX


@pytest.mark.parametrize("is_taken", [False, True], ids=["free", "taken"])
@pytest.mark.parametrize("blocking", [True, False])
def test_lock_whose_line_others_always_change_ends_with_the_stores_timeout(is_taken: bool, blocking: bool) -> None:
    def line(number: int) -> bytes:
        head = b"%d stamp%d" % (number, number)
        return head + b"\nid x %d 0 host:1 -" % number if is_taken else head

    store = Refusing(b"l/line", line)
    call = Lock(store, "l").acquire
    if is_taken and not blocking:
        assert start_thread(call, False).join() is False
    else:
        assert "other processes changed key 'l/line' before each of" in str(error_of(lambda: call(blocking)))
    assert store.tries < 3 * TRIES_MAX  # with those of the way out


@pytest.mark.parametrize("is_taken", [False, True], ids=["free", "taken"])
def test_lock_whose_line_others_always_change_is_not_acquired_at_the_deadline(is_taken: bool) -> None:
    def line(number: int) -> bytes:
        head = b"%d stamp%d" % (number, number)
        return head + b"\nid x %d 0 host:1 -" % number if is_taken else head

    store = Refusing(b"l/line", line)
    store.set_timeout(1.0)
    tries = []
    for timeout in (0, 0.05):
        store.tries = 0
        assert start_thread(Lock(store, "l").acquire, True, timeout).join() is False
        tries.append(store.tries)
    assert max(tries) < 5 * FREE_TRIES


def test_queue_whose_items_others_always_take_first_is_left_at_the_deadline() -> None:
    class Taken(HashStore):
        """A store in whose queue another consumer is always quicker."""

        _decides = False  # a take needs several operations, as on a server
        tries = 0

        def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
            if b"/claim/" in bytes(key) and expected != desired:  # which is how a key is read
                self.tries += 1
                Queue(self, "q").put("another")
                super().set(key, b"1 0 host:1 %d" % self.tries)
            return super().compare_set(key, expected, desired)

    store = Taken(timeout=HANG_S)
    Queue(store, "q").put("first")
    for timeout in (0, 0.05):
        error_of(lambda given=timeout: Queue(store, "q").take(timeout=given))  # type: ignore[misc]
    assert store.tries < 200


def test_waiter_that_always_finds_dead_ones_before_it_ends_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore(timeout=HANG_S)
    held, waits = Lock(store, "l"), Lock(store, "l")
    looks: list[object] = []
    with held:
        monkeypatch.setattr(Line, "_bury", lambda *given: looks.append(given) is None)
        assert start_thread(waits.acquire, True, 0.05).join() is False
    assert 0 < len(looks) < TRIES_MAX


def test_queue_take_ends_at_the_deadline_while_others_put_and_take_all_items() -> None:
    class Busy(HashStore):
        """A store in whose queue there was always something a moment ago."""

        _decides = False  # a take needs several operations, as on a server
        looks = 0

        def check(self, keys: Any) -> bool:
            names = list(keys)
            self.looks += 1
            return names == [b"q/bell"] or super().check(names)

    store = Busy(timeout=0.05)
    for timeout in (None, 0):
        error = error_of(lambda given=timeout: Queue(store, "q").take(timeout=given))  # type: ignore[misc]
        assert "'q'" in str(error)


def test_queue_take_in_one_step_ends_at_the_deadline_while_items_come_back() -> None:
    class Restless(HashStore):
        """A store in whose queue an item is released before each step."""

        def _transact_by(self, choose: Any) -> bool:
            if choose.__name__ == "choose" and "take" in choose.__qualname__:
                self.add("q/returns", 1)
            return super()._transact_by(choose)

    store = Restless(timeout=HANG_S)
    error_of(lambda: Queue(store, "q").take(timeout=0))


def test_queue_take_with_no_time_looks_once_more_where_something_was_put() -> None:
    class Late(HashStore):
        """A store in whose queue another process puts an item after the first look."""

        _decides = False  # a take needs several operations, as on a server

        def check(self, keys: Any) -> bool:
            names = list(keys)
            if names == [b"q/bell"] and not super().check(["q/number"]):
                Queue(self, "q").put(b"item")
            return super().check(names)

    assert Queue(Late(), "q").take(timeout=0).data == b"item"


# Barriers


class Mortal(HashStore):
    """A store in which rank 1 is dead."""

    has_liveness = True  # type: ignore[assignment]

    def dead_ranks(self, ranks: Any) -> list[int]:
        return [rank for rank in ranks if rank == 1]


def test_barrier_whose_arrivals_vanish_after_a_break_ends_with_an_error() -> None:
    store = Mortal(timeout=HANG_S)
    with pytest.raises(BrokenBarrierError):
        barrier(PrefixStore("p", store), 2, "b", HANG_S, 0, fail_fast=True)

    class Forgetful(PrefixStore):
        """A view through which the arrivals are removed after this rank has arrived."""

        def wait_alive(self, *given: Any) -> list[int]:
            store.delete_key("p/b/arrivals")
            return super().wait_alive(*given)

    view = Forgetful("p", store)
    assert "was deleted" in str(error_of(lambda: barrier(view, 2, "b", HANG_S, 0, fail_fast=True), BarrierError))


def test_barrier_whose_verdict_never_counts_ends_at_the_deadline() -> None:
    class Deaf(Mortal):
        """A store that loses each verdict."""

        verdicts = 0

        def append(self, key: Any, value: Any) -> None:
            if bytes(value).startswith(b"!"):
                self.verdicts += 1
            else:
                super().append(key, value)

    store = Deaf(timeout=HANG_S)
    error = error_of(lambda: barrier(store, 2, "b", LIMIT_S, 0, fail_fast=True))
    assert error.missing_ranks == ("1",)
    assert store.verdicts < TRIES_MAX


# Stores on servers


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch) -> EtcdStore:
    """A store whose writes others always overtake; no server is asked."""
    store = EtcdStore("http://127.0.0.1:1", "p", timeout=LIMIT_S)
    kv = {"key": "cC9x", "create_revision": "5", "mod_revision": "5", "value": "MQ=="}
    refused = TxnResult(False, [{"response_range": {"kvs": [kv]}, "kvs": [kv]}], 7)
    store.tries = 0  # type: ignore[attr-defined]

    def write(*_: object) -> TxnResult:
        store.tries += 1  # type: ignore[attr-defined]
        return refused

    monkeypatch.setattr(store._transactions, "write", write)
    monkeypatch.setattr(store._transactions, "read", lambda *_: (refused.answers, 7))
    return store


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda store: store.queue_pop("q"), "took the first value of queue 'q'"),
        (lambda store: store.queue_pop("q", block=False), "took the first value of queue 'q'"),
        (lambda store: store.add("n", 1), "changed key 'n'"),
    ],
    ids=["pop", "pop without waiting", "add"],
)
def test_etcd_operation_that_others_always_overtake_ends_with_its_timeout(
    etcd: EtcdStore, call: Callable[[EtcdStore], object], words: str
) -> None:
    assert f"other processes {words} at each of" in str(error_of(lambda: call(etcd)))
    assert etcd.tries < TRIES_MAX  # type: ignore[attr-defined]


def test_etcd_session_whose_number_others_always_take_ends_with_its_timeout(
    etcd: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd._client, "call", lambda *_: {"ID": "1"})
    assert "other processes began a session at each of" in str(error_of(etcd.register))
    assert etcd.tries < TRIES_MAX  # type: ignore[attr-defined]


def test_etcd_read_that_always_meets_a_compaction_ends_with_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    store = EtcdStore("http://127.0.0.1:1", "p", timeout=LIMIT_S)
    tries = itertools.count()

    def call(*_: object) -> None:
        next(tries)
        raise CompactedError("gone")

    monkeypatch.setattr(store._client, "call", call)
    assert "compacted its history" in str(error_of(lambda: store.check(["k"]), StoreUnavailableError))
    assert next(tries) < TRIES_MAX


class PushedChannel:
    """A connection to a server where others push into the queue as fast as it is emptied."""

    def __init__(self, length: int, values: Iterator[bytes | None]) -> None:
        self._length, self._values = length, values

    def delete(self, _: bytes) -> bool:
        return False

    def queue_len(self, _: bytes) -> int:
        return self._length

    def queue_pop(self, _: bytes) -> bytes | None:
        return next(self._values)


@pytest.mark.parametrize(("values", "left"), [([b"1"] * 10, 7), ([None] * 3, 2)])
def test_tcp_delete_key_takes_no_more_values_than_there_were(
    values: list[bytes | None], left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pops = iter(values)
    store = TCPStore.__new__(TCPStore)
    channel = PushedChannel(3, pops)
    monkeypatch.setattr(TCPStore, "_deadline", lambda _: None)
    monkeypatch.setattr(TCPStore, "_has_queues", lambda *_: True)
    store._connections = SimpleNamespace(call=lambda operation, _: operation(channel))
    assert store.delete_key("q") == (values[0] is not None)
    assert len(list(pops)) == left
