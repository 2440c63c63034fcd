"""What operations on several keys, on queues and on barriers mean."""

from __future__ import annotations

import pytest

from fscoord.errors import BarrierError, QueueEmptyError, StoreTimeoutError
from fscoord.store import Store
from fscoord.testing.contract.base import ContractTests

__all__ = ["Several"]


class Several(ContractTests):
    """Several keys at once, queues, barriers."""

    # Several at once

    def test_append_appends_always_even_an_equal_value(self, store: Store, other: Store) -> None:
        store.append("k", "x")
        other.append("k", b"x")
        store.append("k", "")
        other.append("k", bytearray(b"\0y"))
        assert store.get("k") == b"xx\0y"
        other.append("empty", "")
        assert store.get("empty") == b""

    def test_multi_set_and_multi_get_keep_the_order(self, store: Store, other: Store) -> None:
        store.multi_set(["a", b"b", "c"], ["1", b"2", memoryview(b"3")])
        assert other.multi_get(["c", "a", "b", "a"]) == [b"3", b"1", b"2", b"1"]
        assert other.multi_get([]) == []
        store.multi_set([], [])
        assert store.num_keys() == 3

    def test_multi_set_of_one_key_twice_keeps_the_later_value(self, store: Store) -> None:
        store.multi_set(["a", "a"], ["1", "2"])
        assert store.get("a") == b"2"

    def test_multi_set_takes_iterators(self, store: Store) -> None:
        store.multi_set(iter(["a", "b"]), iter(["1", "2"]))
        assert store.multi_get(iter(["a", "b"])) == [b"1", b"2"]

    # Queues

    def test_a_queue_gives_its_values_in_their_order_once(self, store: Store, other: Store) -> None:
        values: list[str | bytes] = ["1", b"", "3", "3"]
        for value in values:
            store.queue_push("q", value)
        assert other.queue_len("q") == 4
        assert [other.queue_pop("q"), store.queue_pop("q"), other.queue_pop("q")] == [b"1", b"", b"3"]
        assert store.queue_pop("q", block=False) == b"3"
        assert store.queue_len("q") == other.queue_len("q") == 0

    def test_an_empty_queue_says_so_at_once_without_block(self, store: Store) -> None:
        with pytest.raises(QueueEmptyError, match="q"):
            store.queue_pop("q", block=False)
        store.queue_push("q", "1")
        assert store.queue_pop("q", False) == b"1"
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q", False)

    def test_a_queue_and_a_value_of_one_name_do_not_touch(self, store: Store, other: Store) -> None:
        store.set("k", "value")
        store.queue_push("k", "item")
        assert other.get("k") == b"value"
        assert other.queue_pop("k") == b"item"
        assert store.get("k") == b"value"
        assert store.num_keys() == 1

    # Barriers

    def test_a_barrier_of_one_passes_and_its_key_serves_once(self, store: Store, other: Store) -> None:
        store.barrier("b", 1)
        with pytest.raises(BarrierError, match="arrival 2 of 1"):
            other.barrier("b", 1)
        other.barrier("b2", 1)

    def test_a_barrier_uses_the_keys_of_c10d(self, store: Store) -> None:
        store.barrier("b", 1)
        assert store.get("b/num_members") == b"1"
        assert store.check(["b/last_member"])

    def test_a_barrier_that_too_few_reach_times_out(self, store: Store) -> None:
        with pytest.raises(StoreTimeoutError) as caught:
            store.barrier("b", 2, timeout=0.05)
        assert caught.value.waited >= 0.05
