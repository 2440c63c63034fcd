"""A cluster of three members, of which one dies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.etcd_server import Trio
from support.internals import streams_of
from support.places import HANG_S, start_thread, until

from fscoord import EtcdStore
from fscoord.errors import StoreUnavailableError

pytestmark = pytest.mark.etcd


@pytest.fixture
def trio() -> Iterator[Trio]:
    trio = Trio()
    yield trio
    trio.stop()


def test_waits_counters_and_sessions_outlive_the_leader(trio: Trio) -> None:
    """A write that was under way may have happened or not, and says so; whatever was acknowledged is still there."""
    with (
        EtcdStore(trio.address, "p", HANG_S, session_ttl=60) as store,
        EtcdStore(trio.address, "p", HANG_S) as other,
    ):
        store.announce_rank(0)
        sure = 0
        for _ in range(10):
            store.add("n", 1)
            sure += 1
        waits = [start_thread(other.get, "later"), start_thread(other.queue_pop, "q")]
        until(lambda: len(streams_of(other)) == 2)
        trio.kill(trio.leader())
        maybe = 0
        for _ in range(10):
            try:
                store.add("n", 1)
                sure += 1
            except StoreUnavailableError as error:
                assert error.maybe_applied
                maybe += 1
        assert sure <= int(other.get("n")) <= sure + maybe
        for call in (lambda: store.set("later", "1"), lambda: store.queue_push("q", "2")):
            until(lambda call=call: _done(call))
        assert [each.join() for each in waits] == [b"1", b"2"]
        assert other.dead_ranks([0]) == []


def _done(call: object) -> bool:
    try:
        call()
    except StoreUnavailableError:
        return False
    return True


def test_cluster_without_a_majority_is_an_error_that_names_the_members(trio: Trio) -> None:
    with EtcdStore(trio.address, "p", HANG_S) as store:
        store.set("k", "v")
        trio.kill(0)
        trio.kill(1)
        store.set_timeout(0.5)
        with pytest.raises(StoreUnavailableError, match=str(trio.ports[2])):
            store.get("k")
        with pytest.raises(StoreUnavailableError):
            store.set("k", "w")
