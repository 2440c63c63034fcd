"""Tests of several handles on one store. The handles share the data. Each has its own timeout, session and `close`."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from fscoord.errors import StoreClosedError, StoreTimeoutError
from fscoord.store import Store
from fscoord.testing.contract.place import ContractTests, Place
from fscoord.testing.contract.refusals import CONDITIONAL, ON_KEY


class Handles(ContractTests):
    """Tests of clones, time-outs and closing."""

    def test_clone_shares_the_data_and_has_its_own_timeout(self, place: Place) -> None:
        first = place.open(timeout=7)
        second = first.clone()
        assert second.timeout == timedelta(seconds=7)
        second.set_timeout(3)
        first.set("k", "1")
        assert second.get("k") == b"1"
        assert first.timeout == timedelta(seconds=7)
        second.close()
        assert first.get("k") == b"1"
        third = first.clone()
        first.close()
        if first.capabilities.survives_first_handle:
            place.close()
        assert third.get("k") == b"1"
        third.close()

    def test_timeout_is_read_back_as_timedelta(self, store: Store) -> None:
        cases: list[tuple[Any, timedelta]] = [
            (5, timedelta(seconds=5)),
            (0.25, timedelta(milliseconds=250)),
            (timedelta(minutes=1), timedelta(minutes=1)),
            (0, timedelta(0)),
            (math.inf, timedelta.max),
            (timedelta.max, timedelta.max),
            (1e300, timedelta.max),
        ]
        for given, kept in cases:
            store.set_timeout(given)
            assert store.timeout == kept

    def test_store_has_the_extended_api(self, store: Store) -> None:
        assert store.has_extended_api() is True

    def test_store_is_a_context_manager_that_closes(self, place: Place) -> None:
        with place.open() as handle:
            handle.set("k", "1")
        with pytest.raises(StoreClosedError):
            handle.get("k")
        assert place.open().get("k") == b"1"

    def test_handle_that_is_closed_raises_in_every_call(self, place: Place, store: Store) -> None:
        handle = place.open()
        handle.close()
        handle.close()
        calls: list[Callable[[], object]] = [handle.num_keys, handle.clone, lambda: handle.queue_pop("k")]
        for how, call in ON_KEY.items():
            if how not in CONDITIONAL or store.capabilities.changes_conditionally:
                calls.append(partial(call, handle, "k"))
        for each in calls:
            with pytest.raises(StoreClosedError):
                each()
        assert store.num_keys() == 0
        assert store.queue_len("k") == 0


class Members(ContractTests):
    """Tests of sessions and their liveness."""

    def test_store_with_liveness_keeps_sessions(self, store: Store) -> None:
        assert isinstance(store.has_liveness, bool)
        assert store.capabilities.sessions or not store.has_liveness

    def test_members_are_the_handles_that_announced_a_rank(self, store: Store, other: Store) -> None:
        store.announce_rank(0)
        other.announce_rank(1)
        if not store.capabilities.sessions:
            assert store.members() == []
            assert store.register() == 0
            return
        found = {member.number: (member.rank, member.alive) for member in store.members()}
        alive = "yes" if store.has_liveness else "unknown"
        assert store.register() != other.register()
        assert found[store.register()] == (0, alive)
        assert found[other.register()] == (1, alive)
        assert [member.number for member in other.members([1])] == [other.register()]
        assert other.members([7]) == []

    def test_handle_is_registered_once_and_keeps_its_number(self, store: Store, other: Store) -> None:
        numbers = store.register(), other.register(), store.register(), other.register()
        assert numbers[:2] == numbers[2:]
        assert all(isinstance(number, int) for number in numbers)
        if not store.capabilities.sessions:
            assert set(numbers) == {0}
            return
        assert 0 < numbers[0] != numbers[1] > 0
        assert {member.number for member in store.members()} >= set(numbers)

    def test_session_that_lives_is_never_called_dead(self, store: Store, other: Store) -> None:
        store.announce_rank(0)
        other.announce_rank(1)
        assert store.dead_ranks([0, 1, 2]) == []
        assert other.dead_sessions([store.register(), other.register()]) == []

    def test_wait_that_watches_sessions_returns_or_times_out_like_any_wait(self, place: Place, store: Store) -> None:
        store.set("k", "v")
        assert store.wait_alive(["k"], [1, 2]) == []
        with pytest.raises(StoreTimeoutError) as caught:
            store.wait_alive(["k", "missing"], [1], 0.03)
        assert caught.value.keys == (place.full("missing"),)
        assert store.wait_sessions(["k"], [store.register()]) == []
        with pytest.raises(StoreTimeoutError) as caught:
            store.wait_sessions(["k", "missing"], [store.register()], 0.03)
        assert caught.value.keys == (place.full("missing"),)
