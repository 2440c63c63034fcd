"""Tests of each operation: on one key, on several keys, on queues and barriers, and in several threads at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from fscoord._arguments import INT64_MAX, INT64_MIN, KEY_MAX
from fscoord._runtime import system
from fscoord.errors import BarrierError, QueueEmptyError, StoreError, StoreTimeoutError
from fscoord.store import Store
from fscoord.testing.contract.place import ContractTests, Place, start_thread

ODD_KEYS = ["", "\0", "a\0b", "-/a", "k/", "/", " ", "ключ", "\U0001f600", "\udcff\udc80", "x" * KEY_MAX]


class Values(ContractTests):
    """Tests of values, counters, compare-and-set, and the presence of keys."""

    # Values

    @pytest.mark.parametrize(
        ("given", "kept"),
        [
            ("text", b"text"),
            ("", b""),
            (b"\0\xff\n", b"\0\xff\n"),
            (bytearray(b"array"), b"array"),
            (memoryview(b"view"), b"view"),
            (memoryview(b"abcdef")[::2], b"ace"),
            ("\udcff", b"\xff"),
            ("значение", "значение".encode()),
            (b"v" * 200_000, b"v" * 200_000),
        ],
        ids=["str", "empty", "bytes", "bytearray", "memoryview", "strided", "surrogate", "unicode", "large"],
    )
    def test_value_comes_back_as_bytes(self, store: Store, other: Store, given: Any, kept: bytes) -> None:
        store.set("k", given)
        for handle in (store, other):
            value = handle.get("k")
            assert value == kept
            assert type(value) is bytes

    def test_value_set_last_counts_for_every_handle(self, store: Store, other: Store) -> None:
        store.set("k", "1")
        assert other.get("k") == b"1"
        other.set("k", "2")
        assert store.get("k") == b"2"

    @pytest.mark.parametrize("key", ODD_KEYS, ids=ascii)
    def test_key_may_be_any_text_and_its_bytes_are_the_same_key(
        self, place: Place, store: Store, other: Store, key: str
    ) -> None:
        key = key[: KEY_MAX - len(place.full(""))]
        store.set(key, "1")
        name = key.encode("utf-8", "surrogateescape")
        assert other.get(name) == b"1"
        assert other.add(name, 1) == 2
        assert store.get(key) == b"2"
        if "\udcff" in key and not store.capabilities.lists_any_key:
            with pytest.raises(StoreError, match="no UTF-8"):
                other.list_keys()
        else:
            assert other.list_keys() == [key]
        assert other.delete_key(name)
        assert not store.check([key])

    def test_keys_that_look_like_deletions_delete_nothing(self, store: Store) -> None:
        store.set("a", "1")
        store.set("-/a", "")
        store.set("-a", "")
        assert store.get("a") == b"1"

    def test_get_does_not_take_a_queue_for_a_value(self, place: Place, store: Store) -> None:
        store.queue_push("q", "1")
        hasty = place.open(timeout=0)
        with pytest.raises(StoreTimeoutError) as caught:
            hasty.get("q")
        assert caught.value.keys == (place.full("q"),)
        with pytest.raises(StoreTimeoutError):
            hasty.multi_get(["q"])

    # Counters

    def test_add_counts_from_zero_in_decimal_text(self, store: Store, other: Store) -> None:
        assert store.add("n", 5) == 5
        assert other.add("n", -7) == -2
        assert store.get("n") == b"-2"
        assert store.add("n", 0) == -2
        store.set("n", "1")
        assert other.add("n", 2) == 3

    @pytest.mark.parametrize("text", ["0", "-0", "007", "-12", str(INT64_MAX - 1), str(INT64_MIN)])
    def test_add_takes_any_integer_in_decimal_text(self, store: Store, text: str) -> None:
        store.set("n", text)
        assert store.add("n", 1) == int(text) + 1

    @pytest.mark.parametrize(
        "text", ["", "abc", "12abc", " 12", "12 ", "+1", "1.0", "0x1", "1_0", "-", "--1", "٣", "\0"]
    )
    def test_add_to_a_value_that_is_no_integer_is_an_error_that_keeps_it(
        self, store: Store, other: Store, text: str
    ) -> None:
        store.set("n", text)
        with pytest.raises(ValueError, match="n"):
            other.add("n", 1)
        assert store.get("n") == other.get("n") == text.encode()

    @pytest.mark.parametrize(("text", "amount"), [(str(INT64_MAX), 1), (str(INT64_MIN), -1), ("1", INT64_MAX)])
    def test_add_past_64_bits_is_an_error_that_keeps_the_value(self, store: Store, text: str, amount: int) -> None:
        store.set("n", text)
        with pytest.raises(OverflowError):
            store.add("n", amount)
        assert store.get("n") == text.encode()

    # Comparing

    @pytest.mark.parametrize(
        ("before", "expected", "desired", "returned", "after"),
        [
            (None, "", "new", b"new", b"new"),
            (None, "", "", b"", b""),
            (None, "x", "new", b"x", None),
            ("old", "old", "new", b"new", b"new"),
            ("old", "other", "new", b"old", b"old"),
            ("old", "", "new", b"old", b"old"),
            ("", "", "new", b"new", b"new"),
            ("", "x", "new", b"", b""),
            ("old", "old", "old", b"old", b"old"),
            (b"\xff\0", b"\xff\0", b"\0", b"\0", b"\0"),
        ],
    )
    def test_compare_set_sets_on_a_match_and_returns_the_present_value(
        self, store: Store, other: Store, before: Any, expected: Any, desired: Any, returned: bytes, after: bytes | None
    ) -> None:
        if before is not None:
            store.set("k", before)
        assert other.compare_set("k", expected, desired) == returned
        assert store.check(["k"]) == (after is not None)
        if after is not None:
            assert store.get("k") == after

    # Presence

    def test_check_is_true_when_every_key_has_a_value_or_a_queue(self, store: Store, other: Store) -> None:
        assert store.check([])
        assert not store.check(["a"])
        other.set("a", "")
        other.queue_push("q", "")
        assert store.check(["a"])
        assert store.check(["a", "q", "a"])
        assert not store.check(["a", "b"])
        assert store.check(key for key in ["a"])
        assert other.queue_pop("q") == b""
        assert not store.check(["q"])

    def test_delete_key_returns_whether_the_key_was_there(self, store: Store, other: Store) -> None:
        assert store.delete_key("a") is False
        store.set("a", "")
        assert other.delete_key("a") is True
        assert store.delete_key("a") is False
        assert not other.check(["a"])
        store.queue_push("a", "1")
        store.queue_push("a", "2")
        store.set("a", "1")
        assert other.delete_key("a") is True
        assert store.queue_len("a") == 0
        assert not store.check(["a"])
        assert store.delete_key("a") is False

    # Looking once, and changing on a condition

    def test_get_with_a_default_never_waits(self, store: Store, other: Store) -> None:
        assert store.get("k", default=None) is None
        assert store.get("k", default="none") == "none"
        store.queue_push("k", "item")
        assert store.get("k", default=None) is None
        other.set("k", "")
        assert store.get("k", default=None) == b""
        other.set("k", b"v" * 200_000)
        assert store.get("k", default=None) == b"v" * 200_000
        assert store.num_keys() == 1
        with pytest.raises(TypeError, match="default"):
            store.get("k", default=None, timeout=1)

    def test_create_returns_whether_this_caller_made_the_key(self, place: Place, store: Store, other: Store) -> None:
        if not store.capabilities.changes_conditionally:
            with pytest.raises(StoreError, match="create"):
                store.create("k", "v")
            assert not store.check(["k"])
            return
        assert store.create("k", "same")
        assert not other.create("k", "same")
        other.set("k", "")
        assert not store.create("k", "new")
        assert store.get("k") == b""
        store.delete_key("k")
        store.queue_push("k", "item")
        assert other.create("k", b"new")
        assert store.get("k") == b"new"
        assert sum(at_once(place, lambda handle, _: handle.create("race", "same"))) == 1

    def test_pop_returns_the_value_that_it_removed(self, place: Place, store: Store, other: Store) -> None:
        store.queue_push("k", "item")
        if not store.capabilities.changes_conditionally:
            store.set("k", "v")
            with pytest.raises(StoreError, match="pop"):
                store.pop("k")
            assert store.get("k") == b"v"
            return
        assert other.pop("k") is None
        assert store.queue_len("k") == 1
        store.set("k", b"v" * 200_000)
        assert other.pop("k") == b"v" * 200_000
        assert not store.check(["k"])
        store.set("k", "")
        assert other.pop("k") == b""
        assert store.pop("k") is None
        store.set("race", "1")
        assert sorted(at_once(place, lambda handle, _: handle.pop("race") or b"")) == [b""] * (THREADS - 1) + [b"1"]

    def test_delete_key_with_an_expected_value_removes_no_other_value(self, store: Store, other: Store) -> None:
        store.set("k", "new")
        if not store.capabilities.changes_conditionally:
            with pytest.raises(StoreError, match="expected"):
                store.delete_key("k", expected="new")
            assert store.get("k") == b"new"
            return
        assert not other.delete_key("k", expected="old")
        assert not other.delete_key("k", expected="")
        assert store.get("k") == b"new"
        assert other.delete_key("k", expected=b"new")
        assert not store.check(["k"])
        assert not store.delete_key("k", expected="new")
        store.queue_push("k", "item")
        assert not store.delete_key("k", expected="")
        assert store.queue_len("k") == 1
        store.set("k", "")
        assert other.delete_key("k", expected="")
        assert not store.check(["k"])

    def test_deleted_key_starts_afresh(self, store: Store, other: Store) -> None:
        store.add("n", 5)
        other.delete_key("n")
        assert store.add("n", 1) == 1
        other.delete_key("n")
        assert other.compare_set("n", "", "new") == b"new"
        store.delete_key("n")
        other.append("n", "x")
        assert store.get("n") == b"x"

    def test_fresh_store_has_no_keys(self, store: Store) -> None:
        assert store.num_keys() == 0
        assert store.list_keys() == []

    def test_keys_with_a_value_are_listed_sorted(self, place: Place, store: Store) -> None:
        names = ["b", "a/2", "a/1", "", "a", "\U0001f600", "\udcff", "é"]
        if not store.capabilities.lists_any_key:
            names.remove("\udcff")
        for name in names:
            store.set(name, "1")
        store.queue_push("queue", "1")
        passing = place.open()
        assert passing.num_keys() == len(names)
        assert passing.list_keys() == sorted(names, key=lambda name: name.encode("utf-8", "surrogateescape"))
        passing.close()
        assert store.num_keys() == len(names)
        store.delete_key("b")
        assert store.num_keys() == len(names) - 1
        assert store.list_keys("a") == ["a", "a/1", "a/2"]
        assert store.list_keys(b"a/") == ["a/1", "a/2"]
        assert store.list_keys("é".encode()[:1]) == ["é"]
        assert store.list_keys("nothing") == []


class Several(ContractTests):
    """Tests of several keys at once, queues and barriers."""

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

    def test_transaction_changes_all_keys_or_none(self, place: Place, store: Store, other: Store) -> None:
        if not store.capabilities.transacts:
            with pytest.raises(StoreError, match="transact"):
                store.transact(set={"k": "v"})
            assert not store.check(["k"])
            return
        store.multi_set(["k", "old", "n"], ["1", "x", "5"])
        store.queue_push("old", "item")
        assert other.transact(
            compare={"k": "1", "new": None},
            set={"k": b"2", "new": "", "\udcff": "y"},
            add={"n": -7, "m": 1},
            delete=["old", "missing"],
        )
        assert other.multi_get(["k", "new", b"\xff", "n", "m"]) == [b"2", b"", b"y", b"-2", b"1"]
        assert not store.check(["old"])
        for refused in ({"k": "1"}, {"k": None}, {"new": None}, {"missing": ""}, {"k": "2", "n": "x"}):
            assert not store.transact(compare=refused, set={"k": "3"}, add={"n": 1, "new": 1}, delete=["m"])
        with pytest.raises(ValueError, match="new"):
            store.transact(compare={"k": "2"}, set={"k": "3"}, add={"n": 1, "new": 1}, delete=["m"])
        assert store.multi_get(["k", "new", "n", "m"]) == [b"2", b"", b"-2", b"1"]
        assert store.transact()
        assert store.transact(compare={"k": "2"}, delete=["missing"])
        assert not store.transact(compare={"k": "3"})
        at_once(place, lambda handle, _: handle.transact(add={"n": 2, "m": 1}))
        assert store.multi_get(["n", "m"]) == [b"%d" % (2 * THREADS - 2), b"%d" % (THREADS + 1)]
        assert sum(at_once(place, lambda handle, _: handle.transact(compare={"r": None}, set={"r": "1"}))) == 1

    def test_multi_set_takes_iterators(self, store: Store) -> None:
        store.multi_set(iter(["a", "b"]), iter(["1", "2"]))
        assert store.multi_get(iter(["a", "b"])) == [b"1", b"2"]

    # Queues

    def test_queue_gives_its_values_in_their_order_once(self, store: Store, other: Store) -> None:
        values: list[str | bytes] = ["1", b"", "3", "3"]
        for value in values:
            store.queue_push("q", value)
        assert other.queue_len("q") == 4
        assert [other.queue_pop("q"), store.queue_pop("q"), other.queue_pop("q")] == [b"1", b"", b"3"]
        assert store.queue_pop("q", block=False) == b"3"
        assert store.queue_len("q") == other.queue_len("q") == 0

    def test_queue_that_is_empty_raises_at_once_without_block(self, store: Store) -> None:
        with pytest.raises(QueueEmptyError, match="q"):
            store.queue_pop("q", block=False)
        store.queue_push("q", "1")
        assert store.queue_pop("q", False) == b"1"
        with pytest.raises(QueueEmptyError):
            store.queue_pop("q", False)

    def test_queue_and_value_of_one_name_do_not_touch(self, store: Store, other: Store) -> None:
        store.set("k", "value")
        store.queue_push("k", "item")
        assert other.get("k") == b"value"
        assert other.queue_pop("k") == b"item"
        assert store.get("k") == b"value"
        assert store.num_keys() == 1

    # Barriers

    def test_barrier_of_one_passes_and_its_key_serves_once(self, store: Store, other: Store) -> None:
        store.barrier("b", 1)
        with pytest.raises(BarrierError, match="arrival 2 of 1"):
            other.barrier("b", 1)
        other.barrier("b2", 1)

    def test_barrier_uses_the_keys_of_c10d(self, store: Store) -> None:
        store.barrier("b", 1)
        count, *rest = reversed(store.list_keys("b"))
        assert store.get(count) == b"1"
        # torch's server counts in the key itself.
        assert (count, rest) in [("b/num_members", ["b/last_member"]), ("b", [])]

    def test_barrier_that_too_few_reach_times_out(self, store: Store) -> None:
        start = system.time.monotonic()
        with pytest.raises(StoreTimeoutError) as caught:
            store.barrier("b", 2, timeout=0.05)
        took = system.time.monotonic() - start
        # The timeout also covers the arrival, which a store may count as part of the wait. On a busy machine no time is
        # left for the wait.
        assert took >= 0.05
        assert 0 <= caught.value.waited <= took


THREADS = 4
TIMES = 25


def at_once(place: Place, work: Callable[[Store, int], Any]) -> list[Any]:
    """Call ``work(handle, number)`` in some threads, each with a handle of its own, and return their results."""
    threads = [start_thread(work, place.open(), number) for number in range(THREADS)]
    return [thread.join() for thread in threads]


class Threads(ContractTests):
    """Tests of operations of several threads at once: no operation is lost, and none takes effect twice."""

    def test_sums_are_given_to_one_thread_each(self, place: Place, store: Store) -> None:
        results = at_once(place, lambda handle, _: [handle.add("n", 1) for _ in range(TIMES)])
        assert sorted(chain.from_iterable(results)) == list(range(1, THREADS * TIMES + 1))
        assert store.get("n") == b"%d" % (THREADS * TIMES)

    def test_threads_on_one_handle_lose_no_addition(self, place: Place, store: Store) -> None:
        results = at_once(place, lambda _, __: [store.add("n", 1) for _ in range(TIMES)])
        assert sorted(chain.from_iterable(results)) == list(range(1, THREADS * TIMES + 1))

    def test_compare_set_by_many_threads_on_a_new_key_lets_one_win(self, place: Place, store: Store) -> None:
        results = at_once(place, lambda handle, number: handle.compare_set("k", "", str(number)))
        assert set(results) == {store.get("k")}

    def test_compare_set_counts_as_well_as_add(self, place: Place, store: Store) -> None:
        store.set("n", "0")

        def count(handle: Store, number: int) -> None:
            for i in range(TIMES):
                current, mine = handle.get("n"), b" %d.%d" % (number, i)
                for _ in range(THREADS * TIMES):  # each refusal means that another thread has counted
                    current = handle.compare_set("n", current, wanted(current) + mine)
                    if current.endswith(mine):
                        break

        def wanted(current: bytes) -> bytes:
            return b"%d" % (int(current.split()[0]) + 1)

        at_once(place, count)
        assert store.get("n").split()[0] == b"%d" % (THREADS * TIMES)

    def test_appends_of_threads_are_all_kept_and_each_threads_in_order(self, place: Place, store: Store) -> None:
        def write(handle: Store, number: int) -> None:
            for i in range(TIMES):
                handle.append("text", f"{number}.{i} ")

        at_once(place, write)
        tokens = store.get("text").decode().split()
        for number in range(THREADS):
            mine = [token for token in tokens if token.startswith(f"{number}.")]
            assert mine == [f"{number}.{i}" for i in range(TIMES)]
        assert len(tokens) == THREADS * TIMES

    def test_queue_gives_each_item_to_one_thread(self, place: Place, store: Store) -> None:
        def move(handle: Store, number: int) -> list[bytes]:
            taken = []
            for i in range(TIMES):
                handle.queue_push("q", f"{number}.{i}")
                taken.append(handle.queue_pop("q"))
            return taken

        taken = Counter(chain.from_iterable(at_once(place, move)))
        assert taken == Counter(b"%d.%d" % (number, i) for number in range(THREADS) for i in range(TIMES))
        assert store.queue_len("q") == 0

    def test_multi_set_is_seen_whole_or_not_at_all(self, place: Place) -> None:
        def pairs(handle: Store, number: int) -> list[list[bytes]]:
            seen = []
            for i in range(TIMES):
                handle.multi_set(["a", "b"], [f"{number}.{i}"] * 2)
                seen.append(handle.multi_get(["a", "b"]))
            return seen

        assert all(first == second for first, second in chain.from_iterable(at_once(place, pairs)))

    def test_threads_meet_at_barriers(self, place: Place) -> None:
        def meet(handle: Store, _: int) -> list[int]:
            here = []
            for i in range(3):
                handle.add(f"here{i}", 1)
                handle.barrier(f"barrier{i}", THREADS)
                here.append(int(handle.get(f"here{i}")))
            return here

        assert at_once(place, meet) == [[THREADS] * 3] * THREADS
