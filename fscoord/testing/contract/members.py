"""Who has a store open: what every store answers, and what those answer that keep sessions."""

from __future__ import annotations

import pytest

from fscoord.errors import StoreTimeoutError
from fscoord.store import Store
from fscoord.testing.contract.base import ContractTests
from fscoord.testing.contract.place import Place

__all__ = ["Members"]


class Members(ContractTests):
    """Sessions, and who of them lives."""

    def test_a_store_that_can_tell_who_lives_keeps_sessions(self, store: Store) -> None:
        assert isinstance(store.has_liveness, bool)
        assert store.capabilities.sessions or not store.has_liveness

    def test_members_are_the_handles_that_have_said_who_they_are(self, store: Store, other: Store) -> None:
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

    def test_a_handle_is_registered_once_and_keeps_its_number(self, store: Store, other: Store) -> None:
        numbers = store.register(), other.register(), store.register(), other.register()
        assert numbers[:2] == numbers[2:]
        assert all(isinstance(number, int) for number in numbers)
        if not store.capabilities.sessions:
            assert set(numbers) == {0}
            return
        assert 0 < numbers[0] != numbers[1] > 0
        assert {member.number for member in store.members()} >= set(numbers)

    def test_nobody_who_lives_is_called_dead(self, store: Store, other: Store) -> None:
        store.announce_rank(0)
        other.announce_rank(1)
        assert store.dead_ranks([0, 1, 2]) == []
        assert other.dead_sessions([store.register(), other.register()]) == []

    def test_a_wait_that_watches_is_a_wait(self, place: Place, store: Store) -> None:
        store.set("k", "v")
        assert store.wait_alive(["k"], [1, 2]) == []
        with pytest.raises(StoreTimeoutError) as caught:
            store.wait_alive(["k", "missing"], [1], 0.03)
        assert caught.value.keys == (place.full("missing"),)
        assert store.wait_sessions(["k"], [store.register()]) == []
        with pytest.raises(StoreTimeoutError) as caught:
            store.wait_sessions(["k", "missing"], [store.register()], 0.03)
        assert caught.value.keys == (place.full("missing"),)
