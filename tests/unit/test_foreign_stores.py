"""Stores that are not of fscoord: stand-ins that have only the methods that torch's functions call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
from support.places import HANG_S, start_thread

from fscoord import (
    RendezvousConnectionError,
    RendezvousStateError,
    StoreTimeoutError,
    barrier,
    broadcast,
    gather,
    get_all,
    store_timeout,
    synchronize,
)
from fscoord.rendezvous import C10dRendezvousBackend

OWN = timedelta(seconds=1234)
DEFAULT = timedelta(seconds=300)
IGNORED = "<val_ignored>"


class Recorder:
    """A store in which every other rank has arrived already. `calls` has each call and each read of its timeout."""

    def __init__(self, arrived: int = 3) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.arrived = arrived

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    @property
    def timeout(self) -> timedelta:
        self.calls.append(("timeout",))
        return OWN

    def set_timeout(self, timeout: timedelta) -> None:
        self.calls.append(("set_timeout", timeout))

    def set(self, key: str, value: str) -> None:
        self.calls.append(("set", key, value))

    def multi_get(self, keys: list[str]) -> list[str]:
        self.calls.append(("multi_get", keys))
        return ["value"] * len(keys)

    def add(self, key: str, amount: int) -> int:
        self.calls.append(("add", key, amount))
        return self.arrived

    def wait(self, keys: list[str]) -> None:
        self.calls.append(("wait", keys))


class Plain:
    """A store in the memory of threads, as a test of torch's functions may have one.

    Time-outs raise `late`. A wait for a key in `never` times out at once. `limits` has the timeouts that waits were
    given.
    """

    def __init__(self, late: Exception) -> None:
        self.late = late
        self.values: dict[str, str] = {}
        self.changed = threading.Condition()
        self.never: set[str] = set()
        self.limits: list[timedelta] = []
        self.timeout = OWN

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        with self.changed:
            self.values[key] = str(int(self.values.get(key, "0")) + amount)
            return int(self.values[key])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        if timeout is not None:
            self.limits.append(timeout)
        limit = (self.timeout if timeout is None else timeout).total_seconds()
        with self.changed:
            if self.never.intersection(keys) or not self.changed.wait_for(
                lambda: all(key in self.values for key in keys), limit
            ):
                raise self.late

    def multi_get(self, keys: list[str]) -> list[str]:
        self.wait(keys)
        return [self.values[key] for key in keys]


class DistStoreError(RuntimeError):
    """The error of torch's stores, known by its name."""


LATE = (DistStoreError("x"), RuntimeError("Wait timeout"), TimeoutError("late"), LookupError("late"))


def end_of_get_all(rank: int) -> list[tuple[Any, ...]]:
    last = "p/finished/last_member"
    calls: list[tuple[Any, ...]] = [
        ("multi_get", ["p0", "p1", "p2"]),
        ("add", "p/finished/num_members", 1),
        ("set", last, IGNORED),
    ]
    return [*calls, ("wait", [last])] if rank == 0 else calls


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("prefix", ["p", b"p"])
def test_get_all_makes_the_calls_of_torch(rank: int, prefix: str | bytes) -> None:
    store: Any = Recorder()
    assert get_all(store, rank, prefix, 3) == ["value"] * 3
    assert store.calls == end_of_get_all(rank)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("given", "limit"), [((), DEFAULT), ((0.5,), timedelta(seconds=0.5))])
def test_synchronize_makes_the_calls_of_torch(rank: int, given: tuple[float, ...], limit: timedelta) -> None:
    store: Any = Recorder()
    assert synchronize(store, b"data", rank, 3, "p", *given) == ["value"] * 3
    assert store.calls == [
        ("timeout",),
        ("set_timeout", limit),
        ("set", f"p{rank}", b"data"),
        *end_of_get_all(rank),
        ("set_timeout", OWN),
    ]


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("is_last", [True, False])
def test_barrier_makes_the_calls_of_torch(rank: int | None, is_last: bool) -> None:
    store: Any = Recorder(3 if is_last else 2)
    barrier(store, 3, "p", rank=rank)
    assert store.calls == [
        ("timeout",),
        ("set_timeout", DEFAULT),
        ("add", "p/num_members", 1),
        *([("set", "p/last_member", IGNORED)] if is_last else []),
        ("wait", ["p/last_member"]),
        ("set_timeout", OWN),
    ]


def test_mock_as_a_store_gets_the_calls_of_torch() -> None:
    store = mock.Mock(spec=["timeout", "set_timeout", "add", "set", "wait"], timeout=OWN)
    store.add.return_value = 1
    barrier(store, key="p", world_size=1, timeout=5)
    assert store.mock_calls == [
        mock.call.set_timeout(timedelta(seconds=5)),
        mock.call.add("p/num_members", 1),
        mock.call.set("p/last_member", IGNORED),
        mock.call.wait(["p/last_member"]),
        mock.call.set_timeout(OWN),
    ]


def test_store_without_a_timeout_keeps_its_own_limit_unless_one_is_given() -> None:
    store = mock.Mock(spec=["add", "set", "wait", "multi_get"])
    store.add.return_value = 1
    barrier(store, 1, "p")
    synchronize(store, "data", 0, 1, "q")
    with pytest.raises(AttributeError, match="timeout"):
        barrier(store, 1, "r", 5)


def test_timeout_is_restored_after_an_error() -> None:
    store: Any = Plain(TimeoutError("late"))
    with pytest.raises(TimeoutError, match="late"):
        get_all(store, 0, "p", 2, timeout=0)
    assert store.timeout == OWN
    with store_timeout(store, 7):
        assert store.timeout == timedelta(seconds=7)
    assert store.timeout == OWN


def test_ranks_meet_in_a_store_of_another_package() -> None:
    store: Any = Plain(TimeoutError("late"))
    threads = [start_thread(synchronize, store, f"data{rank}", rank, 3, "s", HANG_S) for rank in range(3)]
    assert [thread.join() for thread in threads] == [["data0", "data1", "data2"]] * 3
    for thread in [start_thread(barrier, store, 3, "b", HANG_S, rank) for rank in range(3)]:
        thread.join()
    assert store.timeout == OWN


def caught(call: Callable[..., Any], *arguments: Any) -> Exception:
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError("there was no error")


@pytest.mark.parametrize("late", LATE, ids=lambda late: type(late).__name__)
def test_rank_0_names_the_missing_ranks_and_the_others_refer_to_it(late: Exception) -> None:
    store: Any = Plain(late)
    store.never = {"b/last_member", "b2/TRACE"}
    arguments = (store, 3, "b", HANG_S)
    threads = [start_thread(caught, barrier, *arguments, rank, "host{}".format, HANG_S) for rank in (0, 1)]
    first, other = (thread.join() for thread in threads)
    assert isinstance(first, StoreTimeoutError)
    assert isinstance(other, StoreTimeoutError)
    for rank, error, missing in ((0, first, "host2"), (1, other, "<check rank 0 (host0) for missing rank info>")):
        assert str(error) == (
            f"Timed out waiting on barrier on rank {rank}, for key prefix: b (world_size=3, missing_ranks=[{missing}],"
            f" timeout={HANG_S:g})"
        )
    assert (first.missing_ranks, other.missing_ranks) == (("host2",), ())
    assert first.__cause__ is late


def test_rank_0_looks_for_16_missing_ranks_and_no_more() -> None:
    store: Any = Plain(TimeoutError("late"))
    error = caught(barrier, store, 20, "b", 0, 0, None, 0)
    assert isinstance(error, StoreTimeoutError)
    assert error.missing_ranks == tuple(map(str, range(1, 17)))


def test_rank_0_gives_time_to_the_first_missing_rank_only() -> None:
    """The others have had the same time."""
    store: Any = Plain(TimeoutError("late"))
    store.never = {"b1/TRACE", "b2/TRACE", "b3/TRACE"}
    assert isinstance(caught(barrier, store, 4, "b", 0, 0, None, 7), StoreTimeoutError)
    assert store.limits == [timedelta(seconds=7), timedelta(milliseconds=1), timedelta(milliseconds=1)]


@pytest.mark.parametrize("rank", [None, 1])
def test_error_of_the_store_passes_if_rank_0_names_nobody(rank: int | None) -> None:
    late = DistStoreError("x")
    store: Any = Plain(late)
    assert caught(barrier, store, 2, "b", 0, rank) is late


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, KeyError, OSError])
def test_error_that_is_no_timeout_passes_at_once(kind: type[Exception]) -> None:
    failure = kind("connection lost")
    store: Any = Plain(failure)
    assert caught(barrier, store, 2, "b", 0, 0) is failure
    assert list(store.values) == ["b/num_members"]


def test_bad_arguments_change_nothing() -> None:
    store: Any = Recorder()
    for kind, call in (
        (ValueError, lambda: barrier(store, 0, "b")),
        (RuntimeError, lambda: barrier(store, 2, "b", rank=2)),
        (ValueError, lambda: barrier(store, 2, "b", rank_tracing_decoder=str)),
        (AssertionError, lambda: barrier(store, 2, "b", rank_tracing_decoder=str)),
        (ValueError, lambda: barrier(store, 2, "b", fail_fast=True)),
        (ValueError, lambda: barrier(store, 2, "b", -1)),
        (TypeError, lambda: barrier(store, 2, 3)),  # type: ignore[arg-type]
        (RuntimeError, lambda: get_all(store, 2, "b", 2)),
        (RuntimeError, lambda: synchronize(store, "x", -1, 2, "b")),
        (TypeError, lambda: broadcast(store, "x", 0, 2, "b")),
        (TypeError, lambda: gather(store, "x", 0, 2, "b")),
    ):
        with pytest.raises(kind):
            call()
    assert store.calls == []


class TextOnly:
    """A store with the two methods that torch's backend calls. It takes and returns text only."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def get(self, key: str) -> str:
        return self.values[key]

    def compare_set(self, key: str, expected: str, desired: str) -> str:
        current = self.values.get(key, "")
        if current == expected.encode().decode():
            self.values[key] = desired
        return self.values.get(key, expected)


def test_backend_needs_get_and_compare_set_only() -> None:
    store: Any = TextOnly()
    backend = C10dRendezvousBackend(store, "id")
    assert store.values == {"torch.rendezvous.id": "Y2FuaW1hZGFt"}
    assert backend.get_state() is None
    first = backend.set_state(b"\x00first")
    assert first is not None
    assert first[0::2] == (b"\x00first", True)
    second = backend.set_state(b"second", first[1])
    assert second is not None
    assert second[0::2] == (b"second", True)
    for token in (first[1], None, b"\xff", "foreign"):
        assert backend.set_state(b"third", token) == (b"second", second[1], False)
    assert backend.get_state() == second[:2]


def test_backend_reports_a_failing_or_foreign_value_as_torch_does() -> None:
    store: Any = TextOnly()
    backend = C10dRendezvousBackend(store, "id")
    store.values["torch.rendezvous.id"] = "non_base64"
    for call in (backend.get_state, lambda: backend.set_state(b"x")):
        with pytest.raises(RendezvousStateError):
            call()
    del store.values["torch.rendezvous.id"]
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()
