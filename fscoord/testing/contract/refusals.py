"""Tests of bad arguments: each raises a clear error of the right kind, and changes nothing in the store."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from fscoord._arguments import KEY_MAX, VALUE_MAX
from fscoord.errors import FscoordError, LimitExceededError
from fscoord.store import Store
from fscoord.testing.contract.place import ContractTests, Place, state

LONG = "x" * (KEY_MAX + 1)
HUGE = bytes(VALUE_MAX + 1)
NO_KEYS = [None, 1, 1.5, bytearray(b"k"), memoryview(b"k"), ["k"]]
NO_VALUES = [None, 1, 1.5, ["v"], object()]
NO_TIMEOUTS = [-1, -0.001, math.nan, -math.inf, timedelta(seconds=-1)]

Call = Callable[[Store, Any], Any]
Refused = Callable[[type[BaseException], Call, Any], BaseException]

ON_KEY: dict[str, Call] = {
    "set": lambda store, key: store.set(key, "1"),
    "get": lambda store, key: store.get(key),
    "add": lambda store, key: store.add(key, 1),
    "compare_set": lambda store, key: store.compare_set(key, "", "1"),
    "check": lambda store, key: store.check(["k", key]),
    "wait": lambda store, key: store.wait(["k", key], 0),
    "delete_key": lambda store, key: store.delete_key(key),
    "delete_key_expected": lambda store, key: store.delete_key(key, expected="v"),
    "create": lambda store, key: store.create(key, "1"),
    "pop": lambda store, key: store.pop(key),
    "get_default": lambda store, key: store.get(key, default=None),
    "list_keys": lambda store, key: store.list_keys(key),
    "append": lambda store, key: store.append(key, "1"),
    "multi_get": lambda store, key: store.multi_get(["k", key]),
    "multi_set": lambda store, key: store.multi_set(["other", key], ["1", "2"]),
    "queue_push": lambda store, key: store.queue_push(key, "1"),
    "queue_pop": lambda store, key: store.queue_pop(key, block=False),
    "queue_len": lambda store, key: store.queue_len(key),
    "barrier": lambda store, key: store.barrier(key, 1),
}
CONDITIONAL = ("delete_key_expected", "create", "pop")
"""The operations of `ON_KEY` that only a store with `Capabilities.changes_conditionally` has."""
ON_VALUE: dict[str, Call] = {
    "set": lambda store, value: store.set("k", value),
    "compare_set_expected": lambda store, value: store.compare_set("k", value, "1"),
    "compare_set_desired": lambda store, value: store.compare_set("k", "v", value),
    "create": lambda store, value: store.create("fresh", value),
    "append": lambda store, value: store.append("k", value),
    "multi_set": lambda store, value: store.multi_set(["other", "k"], ["1", value]),
    "queue_push": lambda store, value: store.queue_push("q", value),
}
ON_KEYS: dict[str, Call] = {
    "check": lambda store, keys: store.check(keys),
    "wait": lambda store, keys: store.wait(keys, 0),
    "multi_get": lambda store, keys: store.multi_get(keys),
    "multi_set_keys": lambda store, keys: store.multi_set(keys, ["1"]),
    "multi_set_values": lambda store, values: store.multi_set(["k"], values),
}
ON_TIMEOUT: list[Call] = [
    lambda store, timeout: store.wait(["k"], timeout),
    lambda store, timeout: store.wait([], timeout),
    lambda store, timeout: store.set_timeout(timeout),
    lambda store, timeout: store.barrier("b", 1, timeout),
    lambda store, timeout: store.get("k", timeout=timeout),
    lambda store, timeout: store.multi_get(["k"], timeout=timeout),
    lambda store, timeout: store.queue_pop("q", timeout=timeout),
]


class Refusals(ContractTests):
    """Tests of refused arguments and their errors."""

    @pytest.fixture
    def refused(self, place: Place, store: Store) -> Refused:
        """Return `refused(kind, call)`, which checks that `call` raises `kind` and leaves the state unchanged."""
        store.set("k", "v")
        store.set("n", "1")
        store.queue_push("q", "item")
        other = place.open()

        def check(kind: type[BaseException], call: Call, argument: Any) -> BaseException:
            before = state(store), state(other)
            with pytest.raises(kind) as caught:
                call(store, argument)
            assert (state(store), state(other)) == before == (before[0], before[0])
            assert str(caught.value), "the error says nothing"
            return caught.value

        return check

    @pytest.mark.parametrize("how", ON_KEY)
    def test_key_of_a_wrong_type_is_a_type_error(self, refused: Refused, how: str) -> None:
        for key in NO_KEYS:
            assert "key" in str(refused(TypeError, ON_KEY[how], key))

    @pytest.mark.parametrize("how", ON_KEY)
    def test_key_that_is_too_long_or_has_no_encoding_is_refused(self, refused: Refused, how: str) -> None:
        assert isinstance(refused(LimitExceededError, ON_KEY[how], LONG), ValueError)
        refused(LimitExceededError, ON_KEY[how], LONG.encode())
        for surrogate in ["\ud800", "\udc7f", "\udd00", "a\udfffb"]:
            error = refused(ValueError, ON_KEY[how], surrogate)
            assert not isinstance(error, UnicodeError)
            assert "U+DC80" in str(error)

    @pytest.mark.parametrize("how", ON_VALUE)
    def test_value_of_a_wrong_type_is_a_type_error(self, refused: Refused, how: str) -> None:
        for value in NO_VALUES:
            assert "value" in str(refused(TypeError, ON_VALUE[how], value))
        refused(ValueError, ON_VALUE[how], "\ud800")

    @pytest.mark.parametrize("how", ON_VALUE)
    def test_value_that_is_too_long_is_refused(self, refused: Refused, how: str) -> None:
        refused(LimitExceededError, ON_VALUE[how], HUGE)

    def test_value_over_the_limit_that_the_store_claims_is_refused(self, store: Store, refused: Refused) -> None:
        limit = store.capabilities.value_max
        refused(LimitExceededError, ON_VALUE["set"], HUGE[: limit + 1])
        refused(LimitExceededError, ON_VALUE["queue_push"], HUGE[: limit + 1])

    def test_append_past_the_limit_of_a_value_is_refused(self, refused: Refused) -> None:
        refused(LimitExceededError, lambda store, value: store.append("k", value), HUGE[:VALUE_MAX])

    def test_multi_set_past_the_limit_is_refused_whole(self, refused: Refused) -> None:
        half = HUGE[: VALUE_MAX // 2]
        refused(LimitExceededError, lambda store, values: store.multi_set(["a", "b"], values), [half, half])

    @pytest.mark.parametrize("how", ON_KEYS)
    def test_text_in_place_of_a_sequence_of_keys_is_a_type_error(self, refused: Refused, how: str) -> None:
        for single in ["k", b"k", bytearray(b"k"), memoryview(b"k")]:
            assert "sequence" in str(refused(TypeError, ON_KEYS[how], single))
        refused(TypeError, ON_KEYS[how], None)
        refused(TypeError, ON_KEYS[how], 1)

    def test_multi_set_of_unequal_lengths_writes_nothing(self, refused: Refused) -> None:
        refused(ValueError, lambda store, values: store.multi_set(["a", "b"], values), ["1"])
        refused(ValueError, lambda store, values: store.multi_set(["a", "b"], values), ["1", "2", "3"])
        refused(ValueError, lambda store, keys: store.multi_set(keys, ["1"]), [])

    @pytest.mark.parametrize("amount", [None, 1.5, 1.0, "1", True, b"1"])
    def test_add_takes_an_int_only(self, refused: Refused, amount: Any) -> None:
        for key in ["n", "fresh"]:
            refused(TypeError, lambda store, value: store.add(key, value), amount)  # noqa: B023

    def test_add_refuses_an_amount_beyond_64_bits(self, refused: Refused) -> None:
        for amount in [2**63, -(2**63) - 1, 10**40]:
            for key in ["n", "fresh"]:
                refused(OverflowError, lambda store, value: store.add(key, value), amount)  # noqa: B023

    def test_add_refuses_a_value_that_is_no_integer_and_keeps_it(self, refused: Refused) -> None:
        refused(ValueError, lambda store, key: store.add(key, 1), "k")

    @pytest.mark.parametrize("timeout", NO_TIMEOUTS, ids=str)
    def test_timeout_that_is_negative_or_nan_is_refused(self, refused: Refused, timeout: Any) -> None:
        for call in ON_TIMEOUT:
            refused(ValueError, call, timeout)

    @pytest.mark.parametrize("timeout", ["1", b"1", True, [1]])
    def test_timeout_of_a_wrong_type_is_a_type_error(self, refused: Refused, timeout: Any) -> None:
        for call in ON_TIMEOUT:
            refused(TypeError, call, timeout)

    def test_set_timeout_refuses_none(self, refused: Refused) -> None:
        refused(TypeError, lambda store, value: store.set_timeout(value), None)

    @pytest.mark.parametrize("size", [0, -1])
    def test_barrier_of_world_size_below_one_is_refused(self, refused: Refused, size: int) -> None:
        refused(ValueError, lambda store, value: store.barrier("b", value), size)

    @pytest.mark.parametrize("size", [None, 1.0, "1", True])
    def test_world_size_that_is_no_int_is_refused(self, refused: Refused, size: Any) -> None:
        refused(TypeError, lambda store, value: store.barrier("b", value), size)

    def test_argument_is_refused_even_when_the_answer_would_not_need_it(self, refused: Refused) -> None:
        refused(TypeError, lambda store, value: store.compare_set("fresh", "no match", value), None)
        refused(TypeError, lambda store, keys: store.check(keys), ["missing", None])

    def test_iterator_that_fails_changes_nothing(self, refused: Refused) -> None:
        def values() -> Any:
            yield "1"
            raise ZeroDivisionError("from the caller")

        refused(ZeroDivisionError, lambda store, value: store.multi_set(["a", "b"], value), values())

    def test_errors_of_the_store_are_of_one_tree(self, refused: Refused) -> None:
        assert isinstance(refused(LimitExceededError, ON_KEY["set"], LONG), FscoordError)
