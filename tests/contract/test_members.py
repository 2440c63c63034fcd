"""The sessions of a store: the stores that detect deaths, and the consequences."""

from __future__ import annotations

import pytest
from support.places import Place

from fscoord import StoreTimeoutError, barrier


def keeps_sessions(place: Place) -> bool:
    return place.is_file or place.is_etcd


def can_tell(place: Place) -> bool:
    return keeps_sessions(place) and place.lock != "soft"


def test_store_has_a_flag_for_liveness(place: Place) -> None:
    assert place.open().has_liveness is can_tell(place)


def test_handle_that_has_closed_is_dead_where_the_store_has_liveness(place: Place) -> None:
    one, two = place.open(), place.open(how="clone")
    one.announce_rank(0)
    two.announce_rank(1)
    number = two.register()
    assert one.dead_ranks([0, 1]) == []
    two.close()
    place.close_newest()
    assert one.dead_ranks([0, 1, 2]) == ([1] if can_tell(place) else [])
    assert one.dead_sessions([number]) == ([number] if can_tell(place) else [])


def test_wait_that_watches_sessions_ends_when_one_of_them_has_closed(place: Place) -> None:
    if not can_tell(place):
        return
    one, two = place.open(), place.open(how="clone")
    alive, number = one.register(), two.register()
    two.close()
    place.close_newest()
    assert one.wait_sessions(["k"], [alive, number]) == [number]


def test_barrier_that_fails_fast_is_a_barrier(place: Place) -> None:
    store = place.open()
    barrier(store, 1, "b", 5, 0, fail_fast=True)
    with pytest.raises(StoreTimeoutError, match=r"missing_ranks=\[1\]"):
        barrier(store, 2, "c", 0.03, 0, fail_fast=True)


def test_rank_whose_barrier_timed_out_is_one_session(place: Place) -> None:
    """So `members` and ``fscoord ps`` do not show the rank once more, as a session that has ended."""
    store = place.open()
    store.announce_rank(0)
    before = store.members()
    for _ in range(2):
        with pytest.raises(StoreTimeoutError, match=r"missing_ranks=\[1\]"):
            barrier(store, 2, "b", 0, 0)
    assert store.members() == before


@pytest.mark.parametrize("call", ["announce_rank", "dead_ranks", "wait_alive"])
def test_rank_is_an_integer(call: str, place: Place) -> None:
    if not keeps_sessions(place):
        return  # it keeps no ranks
    store = place.open()
    bad: object = "1"
    with pytest.raises(TypeError, match="rank must be an int"):
        {
            "announce_rank": lambda: store.announce_rank(bad),  # type: ignore[arg-type]
            "dead_ranks": lambda: store.dead_ranks([bad]),  # type: ignore[list-item]
            "wait_alive": lambda: store.wait_alive(["k"], [bad], 0),  # type: ignore[list-item]
        }[call]()
