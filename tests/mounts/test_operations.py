"""The contract, with processes on both hosts: each write takes effect once, in one order, for both."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from mounts.agents import Agent
from mounts.conftest import Sides

from fscoord.errors import QueueEmptyError, StoreTimeoutError

COUNT = 25
SIZE = 4
LOCKS = ["ofd", "flock", "soft"]


@pytest.fixture(params=LOCKS)
def crew(sides: Sides, request: pytest.FixtureRequest) -> list[Agent]:
    """Agents on both hosts in turn, with one store open, under each kind of lock."""
    return sides.opened(SIZE, lock=request.param)


def test_value_set_on_one_host_is_read_on_the_other_at_once(both: tuple[Agent, Agent]) -> None:
    for i in range(COUNT):
        writer, reader = both if i % 2 else both[::-1]
        writer.set("k", str(i))
        assert reader.get("k") == str(i).encode()
        writer.set(f"new{i}", "1")
        assert reader.check([f"new{i}"])


def test_operation_of_each_kind_is_seen_from_the_other_host(both: tuple[Agent, Agent]) -> None:
    a, b = both
    a.set("k", b"\0\xff")
    a.set(b"\xfe", "odd")
    assert b.multi_get(["k", b"\xfe"]) == [b"\0\xff", b"odd"]
    assert (a.add("n", 5), b.add("n", -7)) == (5, -2)
    assert b.compare_set("k", b"\0\xff", "2") == b"2"
    assert a.compare_set("k", b"\0\xff", "3") == b"2"
    a.append("t", "x" * 5000)
    b.append("t", "y" * 5000)
    assert a.get("t") == b"x" * 5000 + b"y" * 5000
    b.multi_set(["m1", "m2"], ["1", "2"])
    assert a.list_keys("m") == ["m1", "m2"]
    assert (a.delete_key("m1"), b.delete_key("m1"), a.num_keys(), b.num_keys()) == (True, False, 5, 5)
    a.queue_push("q", "1")
    b.queue_push("q", "2")
    assert (a.queue_len("q"), b.queue_pop("q"), a.queue_pop("q")) == (2, b"1", b"2")
    with pytest.raises(QueueEmptyError):
        b.queue_pop("q", block=False)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 300_000, 5_000_000])
def test_values_of_any_size_arrive_whole(both: tuple[Agent, Agent], size: int) -> None:
    a, b = both
    for writer, reader, seed in ((a, b, 1), (b, a, 2)):
        writer.do("mounts.work.set_value", "@store", "k", size, seed)
        assert reader.do("mounts.work.has_value", "@store", "k", size, seed)


def test_add_gives_each_sum_to_one_caller_on_two_hosts(crew: list[Agent], together: Callable[..., list[Any]]) -> None:
    results = together(crew, "contract.worker.add", [["@store", COUNT]] * SIZE)
    assert sorted(chain.from_iterable(results)) == list(range(1, SIZE * COUNT + 1))
    assert all(result == sorted(result) for result in results)
    assert [agent.get("n") for agent in crew] == [b"%d" % (SIZE * COUNT)] * SIZE


def test_appends_lose_nothing_and_keep_each_process_in_its_order(
    crew: list[Agent], together: Callable[..., list[Any]]
) -> None:
    together(crew, "contract.worker.append", [["@store", rank, COUNT] for rank in range(SIZE)])
    for agent in crew:
        tokens = agent.get("text").decode().split()
        for rank in range(SIZE):
            assert [token for token in tokens if token.startswith(f"{rank}.")] == [f"{rank}.{i}" for i in range(COUNT)]
        assert len(tokens) == SIZE * COUNT


def test_queue_item_is_taken_once_by_processes_on_two_hosts(
    crew: list[Agent], together: Callable[..., list[Any]]
) -> None:
    results = together(crew, "contract.worker.move", [["@store", rank, SIZE, COUNT] for rank in range(SIZE)])
    pushed = [f"{rank}.{i}" for rank in range(SIZE) for i in range(COUNT)]
    assert Counter(chain.from_iterable(results)) == Counter(pushed)
    assert [agent.queue_len("q") for agent in crew] == [0] * SIZE


def test_compare_set_lets_one_win(sides: Sides, together: Callable[..., list[Any]]) -> None:
    crew = sides.opened(SIZE)
    crew[0].set("n", "0")
    together(crew, "contract.worker.compare_set", [["@store", COUNT // 3]] * SIZE)
    assert [agent.get("n") for agent in crew] == [b"%d" % (SIZE * (COUNT // 3))] * SIZE


def test_multi_set_is_seen_whole_or_not_at_all(sides: Sides, together: Callable[..., list[Any]]) -> None:
    crew = sides.opened(SIZE)
    assert together(crew, "contract.worker.pair", [["@store", rank, COUNT] for rank in range(SIZE)]) == [False] * SIZE


def test_token_is_relayed_around_processes_on_two_hosts(sides: Sides, together: Callable[..., list[Any]]) -> None:
    crew = sides.opened(SIZE)
    together(crew, "contract.worker.relay", [["@store", rank, SIZE, COUNT // 3] for rank in range(SIZE)])
    assert all(agent.check([f"token{COUNT // 3}.0"]) for agent in crew)


def test_waiter_is_woken_by_the_other_host(both: tuple[Agent, Agent]) -> None:
    for waiter, writer, key in (*zip(both, both[::-1], "kl", strict=True),):
        asked = waiter.begin("store:get", key)
        writer.set("something else", "1")
        writer.set(key, "there")
        assert asked.result() == b"there"
        asked = waiter.begin("store:queue_pop", key)
        writer.queue_push(key, "taken")
        assert asked.result() == b"taken"


def test_wait_names_all_missing_keys_though_other_keys_come(both: tuple[Agent, Agent]) -> None:
    a, b = both
    limit, is_in_time = 1.0, False
    while not is_in_time:
        begun = time.monotonic()
        asked = a.begin("store:wait", ["there", "x", "y"], limit)
        b.set("there", "1")
        is_in_time = time.monotonic() < begun + limit
        error = asked.error()
        assert isinstance(error, StoreTimeoutError)
        assert error.waited >= limit
        if is_in_time:  # else the key may have come after the wait
            assert list(error.keys) == ["x", "y"]
        b.delete_key("there")
        limit *= 2
