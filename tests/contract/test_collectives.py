"""Barriers and exchanges, on every store, and on one that knows the contract only."""

from __future__ import annotations

import fcntl
import gc
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.places import ETCD, HANG_S, Place, start_thread
from support.third_party import ThirdPartyStore, place_of

from fscoord.collectives import arrivals, barrier, broadcast, gather, get_all, store_timeout, synchronize
from fscoord.errors import BarrierError, LimitExceededError, StoreGoneError, StoreTimeoutError
from fscoord.store import Store
from fscoord.stores.memory import HashStore
from fscoord.stores.prefix import PrefixStore

LATE_S = HANG_S
"""How late a time-out may come before a test calls it hung: the store's own timeout comes later."""


@pytest.fixture(
    params=["hash", "nested-hash", "third-party", "file-ofd", "file-flock", "file-soft", "nested-file", ETCD]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = place_of(request.param, str(tmp_path))
    yield place
    place.close()


def each(place: Place, ranks: Any, call: Callable[[Store, int], Any]) -> list[Any]:
    """Call `call(store, rank)` in a thread of its own for every rank; return the results, or what was raised."""

    def run(rank: int) -> Any:
        try:
            return call(place.open(how="clone"), rank)
        except (BarrierError, StoreTimeoutError) as error:
            return error

    threads = [start_thread(run, rank) for rank in ranks]
    return [thread.join() for thread in threads]


def timed_out(call: Callable[[], Any]) -> StoreTimeoutError:
    with pytest.raises(StoreTimeoutError) as caught:
        call()
    return caught.value


with_and_without_ranks = pytest.mark.parametrize("ranked", [True, False], ids=["ranked", "unranked"])


def come(store: Store, rank: int, size: int, key: str = "b", ranked: bool = True, timeout: float = HANG_S) -> None:
    barrier(store, size, key, timeout, rank=rank if ranked else None)


# barrier


@with_and_without_ranks
def test_barrier_is_passed_by_all_together(place: Place, ranked: bool) -> None:
    assert each(place, range(5), lambda store, rank: come(store, rank, 5, ranked=ranked)) == [None] * 5


@with_and_without_ranks
def test_barrier_is_passed_only_when_the_last_has_come(place: Place, ranked: bool) -> None:
    passed: list[int] = []

    def early(rank: int) -> None:
        come(place.open(how="clone"), rank, 3, ranked=ranked)
        passed.append(rank)

    threads = [start_thread(early, rank) for rank in (0, 1)]
    timed_out(lambda: place.open().wait(["never"], 0.1))
    assert not passed
    come(place.open(), 2, 3, ranked=ranked)
    for thread in threads:
        thread.join()
    assert sorted(passed) == [0, 1]


@with_and_without_ranks
def test_barrier_of_one_passes_at_once(store: Store, ranked: bool) -> None:
    come(store, 0, 1, ranked=ranked, timeout=0)


@with_and_without_ranks
def test_barriers_follow_each_other_under_keys_of_their_own(place: Place, ranked: bool) -> None:
    def rounds(store: Store, rank: int) -> None:
        for number in range(8):
            come(store, rank, 3, f"b{number}", ranked)

    assert each(place, range(3), rounds) == [None] * 3


@with_and_without_ranks
def test_barrier_that_is_finished_refuses_every_rank(place: Place, store: Store, ranked: bool) -> None:
    each(place, range(2), lambda store, rank: come(store, rank, 2, ranked=ranked))
    for rank in range(2):
        with pytest.raises(BarrierError, match="used before"):
            come(store, rank, 2, ranked=ranked)


def test_callers_beyond_the_world_size_are_an_error(place: Place) -> None:
    results = each(place, range(5), lambda store, _: barrier(store, 3, "b", HANG_S))
    assert results.count(None) == 3
    assert sum(isinstance(result, BarrierError) for result in results) == 2


@pytest.mark.parametrize("rank", [-1, 3, 4])
def test_rank_outside_the_world_is_an_error_and_does_not_arrive(store: Store, rank: int) -> None:
    with pytest.raises(BarrierError, match="not one of 3"):
        barrier(store, 3, "b", rank=rank)
    assert store.num_keys() == 0


def test_callers_with_different_world_sizes_are_an_error(store: Store) -> None:
    timed_out(lambda: come(store, 0, 2, timeout=0))
    with pytest.raises(BarrierError, match=r"world_size=2.*world_size=3"):
        come(store, 1, 3)


def test_world_that_is_larger_does_not_pass_the_finished_barrier_of_a_smaller(place: Place, store: Store) -> None:
    each(place, range(2), lambda store, rank: come(store, rank, 2))
    with pytest.raises(BarrierError, match="world_size"):
        come(store, 3, 4)


def test_rank_that_tries_three_times_does_not_pass_a_barrier_of_three(store: Store) -> None:
    for _ in range(3):
        assert timed_out(lambda: come(store, 1, 3, timeout=0)).missing_ranks == ("0", "2")


def test_rank_that_tries_again_after_a_timeout_counts_once(place: Place, store: Store) -> None:
    timed_out(lambda: come(store, 0, 3, timeout=0))
    timed_out(lambda: come(store, 0, 3, timeout=0.01))
    assert each(place, range(3), lambda store, rank: come(store, rank, 3)) == [None] * 3


def test_rank_that_tries_again_passes_when_the_others_have_gone_on(place: Place, store: Store) -> None:
    timed_out(lambda: come(store, 0, 3, timeout=0))
    assert each(place, [1, 2], lambda store, rank: come(store, rank, 3)) == [None] * 2
    come(place.open(), 0, 3, timeout=0)
    with pytest.raises(BarrierError, match="used before"):
        come(store, 0, 3)


def test_rank_that_comes_last_may_be_on_its_second_try(place: Place, store: Store) -> None:
    timed_out(lambda: come(store, 2, 3, timeout=0))
    threads = [start_thread(come, place.open(), rank, 3) for rank in (0, 1)]
    for thread in threads:
        thread.join()
    come(store, 2, 3, timeout=0)


def test_barrier_whose_last_rank_died_unannounced_is_passed_at_the_deadline(store: Store) -> None:
    class Dying(PrefixStore):
        def wait(self, keys: Any, timeout: Any = None) -> None:
            self.append("b/arrivals", "1/2 ")  # here the process of rank 1 dies
            super().wait(keys, timeout)

    come(Dying("x", store), 0, 2, "b", timeout=0.05)
    assert store.check(["x/b/complete"])


def test_arrivals_key_with_other_content_is_an_error(store: Store) -> None:
    store.set("b/arrivals", "something")
    with pytest.raises(BarrierError, match="not an arrival"):
        come(store, 0, 2, timeout=0)


def test_decoder_without_a_rank_is_a_value_error(store: Store) -> None:
    with pytest.raises(ValueError, match="rank"):
        barrier(store, 2, "b", rank_tracing_decoder=str)
    assert store.num_keys() == 0


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"world_size": 0}, ValueError),
        ({"world_size": "2"}, TypeError),
        ({"key_prefix": None}, TypeError),
        ({"key_prefix": "x" * 1020}, LimitExceededError),
        ({"barrier_timeout": -1}, ValueError),
        ({"barrier_timeout": "1"}, TypeError),
        ({"trace_timeout": -1}, ValueError),
        ({"rank": "0"}, TypeError),
        ({"rank": True}, TypeError),
    ],
    ids=str,
)
@with_and_without_ranks
def test_bad_arguments_of_a_barrier_leave_nothing_behind(
    store: Store, arguments: dict[str, Any], kind: type[Exception], ranked: bool
) -> None:
    given = {"world_size": 2, "key_prefix": "b", "barrier_timeout": 0, "rank": 0 if ranked else None} | arguments
    with pytest.raises(kind):
        barrier(store, **given)
    assert store.num_keys() == 0


# What a time-out says


def late(ranks: list[int], call: Callable[[int], Any]) -> list[StoreTimeoutError]:
    """Let every rank arrive and time out twice, so that each knows all others. Return their errors."""
    for rank in ranks:
        timed_out(lambda: call(rank))  # noqa: B023
    return [timed_out(lambda: call(rank)) for rank in ranks]  # noqa: B023


def test_timeout_of_every_rank_reports_all_missing_ranks_and_the_arguments(place: Place) -> None:
    def call(rank: int) -> None:
        with place.open() as store:
            barrier(store, 6, "run/7", 0.01, rank=rank, rank_tracing_decoder=lambda rank: f"host{rank}")

    start = time.monotonic()
    present = [0, 2, 5]
    errors = late(present, call)
    assert time.monotonic() - start < LATE_S
    for rank, error in zip(present, errors, strict=True):
        assert error.missing_ranks == ("host1", "host3", "host4")
        assert f"on rank {rank}," in str(error)
        assert "key prefix: run/7" in str(error)
        assert "world_size=6" in str(error)
        assert "missing_ranks=[host1, host3, host4]" in str(error)
        assert "timeout=0.01" in str(error)
        assert error.waited >= 0.01


def test_missing_ranks_are_named_by_number_without_a_decoder(store: Store) -> None:
    assert timed_out(lambda: come(store, 1, 3, timeout=0)).missing_ranks == ("0", "2")


def test_rank_zero_may_be_the_missing_rank(store: Store) -> None:
    errors = late([1, 2], lambda rank: come(store, rank, 3, timeout=0))
    assert [error.missing_ranks for error in errors] == [("0",), ("0",)]


def test_missing_ranks_beyond_sixteen_are_counted(store: Store) -> None:
    asked: list[int] = []
    error = timed_out(lambda: barrier(store, 40, "b", 0, 3, lambda rank: str(asked.append(rank) or f"host{rank}")))
    assert len(error.missing_ranks) == len(asked) == 16
    assert error.missing_ranks[:4] == ("host0", "host1", "host2", "host4")
    assert "host16 and 23 more]" in str(error)
    exactly = timed_out(lambda: barrier(store, 17, "c", 0, 0))
    assert len(exactly.missing_ranks) == 16
    assert "more" not in str(exactly)


def test_decoder_that_fails_does_not_hide_the_timeout(store: Store) -> None:
    error = timed_out(lambda: barrier(store, 2, "b", 0, 0, lambda rank: {}[rank]))
    assert error.missing_ranks == ("1 (rank_tracing_decoder raised KeyError(1))",)


def test_decoder_that_is_slow_is_asked_no_more_once_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Clock:
        """The real clock, which each question sets forward by 400 s."""

        def monotonic(self) -> float:
            return time.monotonic() + 400 * len(asked)

    def slow(rank: int) -> str:
        asked.append(rank)
        return f"host{rank}"

    monkeypatch.setattr(arrivals.system, "time", Clock())
    error = timed_out(lambda: barrier(HashStore(), 10, "b", 0, 0, slow, trace_timeout=1000))
    assert asked == [1, 2, 3]
    assert error.missing_ranks == ("host1", "host2", "host3", "4", "5", "6", "7", "8", "9")


def test_timeout_without_ranks_reports_how_many_came(store: Store) -> None:
    for count in (1, 2):
        error = timed_out(lambda: barrier(store, 3, "b", 0))
        assert f"key prefix: b (world_size=3, timeout=0): {count} arrived" in str(error)


def test_callers_with_and_without_a_rank_at_one_barrier_are_reported(store: Store) -> None:
    assert "all callers must give a rank" not in str(timed_out(lambda: barrier(store, 2, "b", 0, rank=1)))
    assert "all callers must give a rank, or none" in str(timed_out(lambda: barrier(store, 2, "b", 0)))
    assert "all callers must give a rank, or none" in str(timed_out(lambda: barrier(store, 2, "b", 0, rank=1)))


def test_timeout_of_a_barrier_does_not_wait_for_a_store_that_refuses_writes(place: Place) -> None:
    """The word that a rank leaves in the store when it gives up is bounded by the trace timeout."""

    class Stuck(PrefixStore):
        def clone(self) -> Any:
            return StuckHandle()

    class StuckHandle(ThirdPartyStore):
        def append(self, key: Any, value: Any) -> None:
            limits.append(self.timeout)
            raise StoreTimeoutError("nobody can write")

    limits: list[timedelta] = []
    error = timed_out(lambda: barrier(Stuck("x", place.open()), 2, "b", 0.05, 0, trace_timeout=3))
    assert error.missing_ranks == ("1",)
    assert timedelta(0) <= limits[0] <= timedelta(seconds=3)


def test_barrier_times_out_in_time_while_another_process_holds_the_log_lock(tmp_path: Path) -> None:
    """The store's own timeout, which bounds every write, is far longer than barrier and trace timeout together."""
    place = Place("file-flock", str(tmp_path))
    try:
        waiter = start_thread(timed_out, lambda: barrier(place.open(), 2, "b", 0.3, 0, trace_timeout=0.3))
        place.base.wait(["b/arrivals"])
        with open(place.path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            error = waiter.join()
        assert error.missing_ranks == ("1",)
        assert 0.3 <= error.waited < LATE_S
    finally:
        place.close()


def test_error_of_the_store_is_no_timeout(store: Store) -> None:
    class Broken(PrefixStore):
        def wait(self, keys: Any, timeout: Any = None) -> None:
            raise StoreGoneError("gone")

    with pytest.raises(StoreGoneError):
        barrier(Broken("x", store), 2, "b", rank=0)


# What it costs


def test_rank_asks_the_store_three_times_and_waits_for_one_key() -> None:
    base = ThirdPartyStore()
    handles = [base.clone() for _ in range(4)]
    threads = [start_thread(barrier, handles[rank], 4, "b", HANG_S, rank) for rank in range(3)]
    while len(base.shared.values.get(b"b/arrivals", b"").split()) < 3:
        time.sleep(0.001)
    barrier(handles[3], 4, "b", HANG_S, 3)
    for thread in threads:
        thread.join()
    assert handles[3].asked == ["append", "get", "set"]
    for handle in handles[:3]:
        assert handle.asked[:2] == ["append", "get"]
        assert handle.asked[2:] in (["wait"], [])


def test_timeouts_of_the_handle_are_left_alone(store: Store) -> None:
    store.set_timeout(7)
    timed_out(lambda: barrier(store, 2, "b", 0, 0))
    timed_out(lambda: barrier(store, 2, "c", 0))
    timed_out(lambda: synchronize(store, b"1", 0, 2, "s", 0))
    timed_out(lambda: gather(store, b"1", 0, 2, "g", 0))
    timed_out(lambda: broadcast(store, None, 1, 2, "c", 0))
    assert store.timeout == timedelta(seconds=7)


@pytest.mark.parametrize(
    "call",
    [
        lambda store, *timeout: barrier(store, 9, "b", *timeout),
        lambda store, *timeout: barrier(store, 2, "b", *(timeout or [None]), 0),
        lambda store, *timeout: barrier(store, 2, "b", *(timeout or [None]), 0, fail_fast=True),
        lambda store, *timeout: synchronize(store, b"1", 0, 2, "s", *timeout),
        lambda store, *timeout: broadcast(store, None, 1, 2, "c", *timeout),
        lambda store, *timeout: gather(store, b"1", 0, 2, "g", *timeout),
    ],
    ids=["unranked barrier", "barrier", "fail-fast barrier", "synchronize", "broadcast", "gather"],
)
def test_timeout_of_the_store_holds_where_a_call_gives_none(place: Place, call: Callable[..., Any]) -> None:
    store = place.open(0.03)
    for arguments in ([], [None]):
        error = start_thread(timed_out, lambda given=arguments: call(store, *given)).join()
        assert "timeout=0.03)" in str(error)
    assert "timeout=0.01)" in str(timed_out(lambda: call(store, 0.01)))


# synchronize and get_all


def test_synchronize_gives_all_ranks_the_data_of_all_in_order(place: Place) -> None:
    results = each(place, range(5), lambda store, rank: synchronize(store, f"data{rank}", rank, 5, "s", HANG_S))
    assert results == [[b"data0", b"data1", b"data2", b"data3", b"data4"]] * 5


def test_synchronize_alone_returns_at_once(store: Store) -> None:
    assert synchronize(store, b"", 0, 1, "s", 0) == [b""]


def test_get_all_reads_keys_that_others_wrote(place: Place, store: Store) -> None:
    store.multi_set(["p0", "p1", "p2"], ["a", "b", "c"])
    assert each(place, range(3), lambda store, rank: get_all(store, rank, "p", 3)) == [[b"a", b"b", b"c"]] * 3


def test_rank_zero_returns_from_get_all_last(place: Place, store: Store) -> None:
    store.multi_set(["p0", "p1", "p2"], ["a", "b", "c"])
    first = start_thread(get_all, place.open(), 0, "p", 3)
    assert get_all(store, 1, "p", 3) == [b"a", b"b", b"c"]
    timed_out(lambda: store.wait(["never"], 0.1))
    assert first.is_alive()
    get_all(store, 2, "p", 3)
    assert first.join() == [b"a", b"b", b"c"]


def test_rank_zero_names_the_ranks_that_have_not_finished(place: Place, store: Store) -> None:
    store.multi_set(["p0", "p1", "p2", "p3"], ["a", "b", "c", "d"])
    get_all(store, 2, "p", 4)
    hasty = place.open(timeout=0.05)
    error = timed_out(lambda: get_all(hasty, 0, "p", 4))
    assert error.missing_ranks == ("1", "3")
    assert "finish" in str(error)
    assert "key prefix: p (world_size=4, missing_ranks=[1, 3], timeout=0.05)" in str(error)


@pytest.mark.parametrize("call", ["barrier", "get_all", "synchronize", "broadcast", "Store.barrier"])
def test_traceback_of_a_time_out_shows_one_error_which_names_all(store: Store, call: str) -> None:
    """The error of the wait inside has nothing more to tell, so it is not shown above."""
    calls: dict[str, Callable[[], object]] = {
        "barrier": lambda: barrier(store, 2, "p", 0, rank=0),
        "get_all": lambda: get_all(store, 0, "p", 2, timeout=0),
        "synchronize": lambda: synchronize(store, b"data", 0, 2, "p", 0),
        "broadcast": lambda: broadcast(store, None, 1, 2, "p", source=0, timeout=0),
        "Store.barrier": lambda: store.barrier("p", 2, 0),
    }
    error = timed_out(calls[call])
    assert error.keys
    assert sum(line.startswith("Traceback") for line in traceback.format_exception(error)) == 1


def test_rank_zero_may_try_again_after_others_have_finished(place: Place, store: Store) -> None:
    store.multi_set(["p0", "p1"], ["a", "b"])
    timed_out(lambda: get_all(place.open(timeout=0), 0, "p", 2))
    get_all(store, 1, "p", 2)
    assert get_all(store, 0, "p", 2) == [b"a", b"b"]


def test_get_all_names_the_ranks_whose_data_is_missing(place: Place, store: Store) -> None:
    store.multi_set(["p0", "p2"], ["a", "c"])
    hasty = place.open(timeout=0.05)
    for rank in range(4):
        error = timed_out(lambda: get_all(hasty, rank, "p", 4))  # noqa: B023
        assert error.missing_ranks == ("1", "3")
        assert f"on rank {rank}, for key prefix: p" in str(error)


def test_synchronize_names_the_ranks_whose_data_is_missing(store: Store) -> None:
    errors = late([0, 2], lambda rank: synchronize(store, b"1", rank, 4, "s", 0))
    for rank, error in zip([0, 2], errors, strict=True):
        assert error.missing_ranks == ("1", "3")
        assert f"in synchronize on rank {rank}, for key prefix: s (world_size=4" in str(error)


def test_synchronize_may_be_tried_again_after_a_timeout(place: Place, store: Store) -> None:
    timed_out(lambda: synchronize(store, b"a", 0, 3, "s", 0))
    results = each(place, range(3), lambda store, rank: synchronize(store, b"abc"[rank : rank + 1], rank, 3, "s"))
    assert results == [[b"a", b"b", b"c"]] * 3


def test_rank_whose_data_was_used_while_it_was_away_gets_the_result_too(place: Place, store: Store) -> None:
    timed_out(lambda: synchronize(store, b"a", 1, 3, "s", 0))
    timed_out(lambda: synchronize(store, b"z", 0, 3, "s", 0))
    assert synchronize(store, b"c", 2, 3, "s") == [b"z", b"a", b"c"]
    results = each(place, [0, 1], lambda store, rank: synchronize(store, b"za"[rank : rank + 1], rank, 3, "s"))
    assert results == [[b"z", b"a", b"c"]] * 2


def test_synchronize_on_a_finished_prefix_raises_and_overwrites_nothing(place: Place, store: Store) -> None:
    each(place, range(3), lambda store, rank: synchronize(store, b"old", rank, 3, "s", HANG_S))
    keys = store.list_keys()
    before = dict(zip(keys, store.multi_get(keys), strict=True))
    for rank in range(3):
        with pytest.raises(BarrierError, match="used before"):
            synchronize(store, b"new", rank, 3, "s")
        with pytest.raises(BarrierError, match="used before"):
            synchronize(store, b"old", rank, 3, "s")
    with pytest.raises(BarrierError):
        synchronize(store, b"new", 3, 4, "s")
    assert dict(zip(store.list_keys(), store.multi_get(store.list_keys()), strict=True)) == before
    assert before["s1"] == b"old"


def test_synchronize_with_other_data_under_a_prefix_in_use_is_refused(store: Store) -> None:
    timed_out(lambda: synchronize(store, b"", 0, 2, "s", 0))
    with pytest.raises(BarrierError, match="other data"):
        synchronize(store, b"new", 0, 2, "s", 0)
    assert store.get("s0") == b""


def test_prefixes_that_differ_never_share_a_key(place: Place) -> None:
    sizes = {"a": 12, "a1": 3, "a1:": 3, "a1::": 2, "a:": 2, "a/": 2, "a//": 2, "": 2, "1": 2, "11": 2, "a/given": 2}
    for prefix, size in sizes.items():

        def exchange(store: Store, rank: int, prefix: str = prefix, size: int = size) -> list[bytes]:
            return synchronize(store, f"{prefix}|{rank}", rank, size, prefix, HANG_S)

        results = each(place, range(size), exchange)
        assert results == [[f"{prefix}|{rank}".encode() for rank in range(size)]] * size


def test_barriers_whose_prefixes_and_ranks_read_alike_do_not_meet(place: Place, store: Store) -> None:
    error = timed_out(lambda: come(store, 10, 12, "a", timeout=0))
    assert "0" in error.missing_ranks
    assert timed_out(lambda: come(store, 1, 2, "a1", timeout=0)).missing_ranks == ("0",)


@pytest.mark.parametrize("prefix", ["data", "torchelastic/data", "sync/", "run-"])
def test_data_lies_where_torch_would_put_it(place: Place, store: Store, prefix: str) -> None:
    each(place, range(2), lambda store, rank: synchronize(store, str(rank), rank, 2, prefix, HANG_S))
    assert store.multi_get([f"{prefix}0", f"{prefix}1"]) == [b"0", b"1"]


# broadcast and gather


def test_broadcast_gives_all_ranks_the_data_of_the_source(place: Place) -> None:
    def speak(store: Store, rank: int) -> bytes:
        return broadcast(store, b"from 2" if rank == 2 else None, rank, 4, "c", HANG_S, source=2)

    assert each(place, range(4), speak) == [b"from 2"] * 4


def test_broadcast_names_a_source_that_does_not_come(store: Store) -> None:
    error = timed_out(lambda: broadcast(store, None, 1, 4, "c", 0.05, source=3))
    assert error.missing_ranks == ("3",)
    assert "in broadcast on rank 1, for key prefix: c" in str(error)


def test_broadcast_of_other_data_for_a_second_time_is_refused(store: Store) -> None:
    assert broadcast(store, b"", 0, 2, "c") == b""
    assert broadcast(store, b"", 0, 2, "c") == b""
    with pytest.raises(BarrierError, match="other data"):
        broadcast(store, b"new", 0, 2, "c")
    assert broadcast(store, None, 1, 2, "c") == b""


def test_source_of_a_broadcast_must_have_data(store: Store) -> None:
    with pytest.raises(TypeError, match="source"):
        broadcast(store, None, 0, 2, "c")
    with pytest.raises(BarrierError, match="not one of 2"):
        broadcast(store, b"1", 0, 2, "c", source=2)


def test_gather_gives_the_target_the_data_of_all(place: Place) -> None:
    results = each(place, range(4), lambda store, rank: gather(store, str(rank), rank, 4, "g7", HANG_S, target=1))
    assert results == [None, [b"0", b"1", b"2", b"3"], None, None]


def test_gather_names_the_ranks_that_did_not_come_and_may_be_tried_again(place: Place, store: Store) -> None:
    gather(store, b"2", 2, 4, "g")
    error = timed_out(lambda: gather(store, b"0", 0, 4, "g", 0.05))
    assert error.missing_ranks == ("1", "3")
    each(place, [1, 3], lambda store, rank: gather(store, str(rank), rank, 4, "g"))
    assert gather(store, b"0", 0, 4, "g") == [b"0", b"1", b"2", b"3"]


def test_gather_on_a_used_prefix_raises_and_overwrites_nothing(place: Place, store: Store) -> None:
    gather(store, b"old", 1, 2, "g")
    with pytest.raises(BarrierError, match="other data"):
        gather(store, b"new", 1, 2, "g")
    assert gather(store, b"mine", 0, 2, "g") == [b"mine", b"old"]
    for rank in range(2):
        with pytest.raises(BarrierError, match="used before"):
            gather(store, b"new", rank, 2, "g")
    assert store.get("g1") == b"old"


# store_timeout


def test_store_timeout_holds_for_the_body_and_no_longer(place: Place) -> None:
    handle = place.open(timeout=7)
    with store_timeout(handle, 0.05):
        assert handle.timeout == timedelta(seconds=0.05)
        timed_out(lambda: handle.get("k"))
    assert handle.timeout == timedelta(seconds=7)


def test_store_timeout_restores_after_an_error(place: Place) -> None:
    handle = place.open(timeout=7)
    with pytest.raises(ZeroDivisionError), store_timeout(handle, timedelta(seconds=3)):
        raise ZeroDivisionError
    assert handle.timeout == timedelta(seconds=7)


@pytest.mark.parametrize("timeout", [-1, "1", None, float("nan")])
def test_store_timeout_refuses_an_invalid_timeout_and_changes_nothing(place: Place, timeout: Any) -> None:
    handle = place.open(timeout=7)
    with pytest.raises((TypeError, ValueError)), store_timeout(handle, timeout):
        pytest.fail("the body runs")
    assert handle.timeout == timedelta(seconds=7)


def test_store_timeout_nests(place: Place) -> None:
    handle = place.open(timeout=7)
    with store_timeout(handle, 1):
        with store_timeout(handle, 2), store_timeout(handle, 2):
            assert handle.timeout == timedelta(seconds=2)
        assert handle.timeout == timedelta(seconds=1)
    assert handle.timeout == timedelta(seconds=7)


@pytest.mark.parametrize("leaving", [[0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1]], ids=str)
def test_store_timeout_may_be_left_in_any_order(place: Place, leaving: list[int]) -> None:
    handle = place.open(timeout=7)
    contexts = [store_timeout(handle, seconds) for seconds in (1, 2, 3)]
    for context in contexts:
        context.__enter__()
    inside = [1, 2, 3]
    for index in leaving:
        assert handle.timeout == timedelta(seconds=inside[-1])
        contexts[index].__exit__(None, None, None)
        inside.remove(index + 1)
    assert handle.timeout == timedelta(seconds=7)


def test_store_timeout_on_two_views_of_one_store_restores_it_too(store: Store) -> None:
    store.set_timeout(7)
    first, second = store_timeout(PrefixStore("a", store), 1), store_timeout(PrefixStore("b", store), 2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert store.timeout == timedelta(seconds=2)
    second.__exit__(None, None, None)
    assert store.timeout == timedelta(seconds=7)


def test_store_timeout_in_many_threads_on_one_handle_leaves_it_as_it_was(place: Place) -> None:
    handle = place.open(timeout=7)
    start = threading.Barrier(4)

    def nest(seconds: int) -> None:
        start.wait()
        for _ in range(50):
            with store_timeout(handle, seconds), store_timeout(handle, seconds + 10):
                assert handle.timeout >= timedelta(seconds=10)

    threads = [start_thread(nest, i + 10) for i in range(4)]
    for thread in threads:
        thread.join()
    assert handle.timeout == timedelta(seconds=7)


def test_store_timeout_around_a_close_lets_the_error_of_the_body_through(place: Place) -> None:
    handle = place.open()

    def fail() -> None:
        handle.close()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), store_timeout(handle, 1):
        fail()


def test_store_timeout_keeps_no_store_alive() -> None:
    handle = HashStore()
    with store_timeout(handle, 1):
        pass
    reference = weakref.ref(handle)
    del handle
    gc.collect()
    assert reference() is None
