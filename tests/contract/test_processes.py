"""The contract between real processes: everything that several of them do at once happens once, in some order."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start, work
from support.places import HANG_S, Place, start_thread

from fscoord.collectives import barrier, synchronize
from fscoord.store import Store

COUNT = 60
SIZE = 3


every_lock = pytest.mark.parametrize("place", ["file-ofd", "file-flock", "file-soft"], indirect=True)
"""For one test of each kind of access: all writes hold the lock in the same way, and reads and waits need none."""


@pytest.fixture(params=["file-ofd"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


def all_ranks(*more: Any) -> list[list[Any]]:
    return [[rank, *more] for rank in range(SIZE)]


@every_lock
def test_sums_are_given_to_one_caller_each(place: Place, store: Store) -> None:
    results = work(store, place.spec(), "add", [[COUNT]] * SIZE)
    assert sorted(chain.from_iterable(results)) == list(range(1, SIZE * COUNT + 1))
    assert all(result == sorted(result) for result in results)
    assert store.get("n") == b"%d" % (SIZE * COUNT)


def test_appends_lose_nothing_and_keep_each_process_in_its_order(place: Place, store: Store) -> None:
    work(store, place.spec(), "append", all_ranks(COUNT))
    tokens = store.get("text").decode().split()
    for rank in range(SIZE):
        assert [token for token in tokens if token.startswith(f"{rank}.")] == [f"{rank}.{i}" for i in range(COUNT)]
    assert len(tokens) == SIZE * COUNT


def test_appends_of_equal_values_are_all_kept(place: Place, store: Store) -> None:
    work(store, place.spec(), "append_same", [[COUNT]] * SIZE)
    assert store.get("text") == b"x" * (SIZE * COUNT)


@every_lock
def test_compare_set_lets_one_win(place: Place, store: Store) -> None:
    store.set("n", "0")
    work(store, place.spec(), "compare_set", [[COUNT // 3]] * SIZE)
    assert store.get("n") == b"%d" % (SIZE * (COUNT // 3))


@every_lock
def test_queue_gives_each_item_to_one_process(place: Place, store: Store) -> None:
    results = work(store, place.spec(), "move", all_ranks(SIZE, COUNT))
    pushed = [f"{rank}.{i}" for rank in range(SIZE) for i in range(COUNT)]
    assert Counter(chain.from_iterable(results)) == Counter(pushed)
    assert store.queue_len("q") == 0


def test_queue_is_drained_in_order_by_several_processes(place: Place, store: Store) -> None:
    for i in range(COUNT):
        store.queue_push("q", str(i))
    results = work(store, place.spec(), "drain", [[]] * SIZE)
    for result in results:
        assert result == sorted(result, key=int)
    assert sorted(chain.from_iterable(results), key=int) == [str(i) for i in range(COUNT)]


@every_lock
def test_multi_set_is_seen_whole_or_not_at_all(place: Place, store: Store) -> None:
    assert work(store, place.spec(), "pair", all_ranks(COUNT)) == [False] * SIZE


def test_token_goes_around(place: Place, store: Store) -> None:
    work(store, place.spec(), "relay", all_ranks(SIZE, COUNT // 3))
    assert store.check([f"token{COUNT // 3}.0"])


def test_processes_meet_at_barriers(place: Place, store: Store) -> None:
    assert work(store, place.spec(), "barriers", all_ranks(SIZE, 10)) == [None] * SIZE


def test_processes_and_a_thread_here_exchange_their_data(place: Place, store: Store) -> None:
    with Workers(place.spec(), "exchange", [[rank, SIZE + 1] for rank in range(SIZE)]) as workers:
        start(store, SIZE)
        here = start_thread(synchronize, place.open(), "from here", SIZE, SIZE + 1, "s", HANG_S)
        expected = [f"from {rank}" for rank in range(SIZE)] + ["from here"]
        assert workers.results() == [expected] * SIZE
        assert [data.decode() for data in here.join()] == expected


def test_processes_all_name_the_missing_ranks(place: Place, store: Store) -> None:
    for kind, message, missing in work(store, place.spec(), "time_out", [[rank, 4, 3] for rank in (0, 2, 3)]):
        assert kind == "StoreTimeoutError"
        assert "missing_ranks=[host1]" in message
        assert missing == ["host1"]


@every_lock
def test_processes_that_are_killed_in_a_wait_leave_the_store_usable(place: Place, store: Store) -> None:
    with Workers(place.spec(), "linger", [[]] * SIZE) as workers:
        start(store, SIZE)
        for process in workers.processes:
            process.send_signal(signal.SIGKILL)
            process.wait(HANG_S)
        with start_thread(place.open().get, "k") as waiter:
            store.set("k", "1")
        assert waiter.result == b"1"
        barrier(store, 1, "b", 0, 0)
