"""A key that is deleted between two calls: nothing in the package checks for a key and then waits for its value."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.internals import Key, keys_bytes
from support.places import HANG_S
from support.recipes import RECIPES, use

from fscoord import HashStore, PrefixStore, Store, StoreTimeoutError, barrier
from fscoord.aio import AsyncStore, once as once_in_a_task
from fscoord.barriers import StoreBarrier
from fscoord.recipes import Fenced, once
from fscoord.rendezvous import C10dRendezvousBackend, RendezvousStateError


class Fleeting(HashStore):
    """A store whose keys are deleted by another process as soon as a caller has checked for them."""

    def check(self, keys: Iterable[Key]) -> bool:
        names = keys_bytes(keys)
        found = super().check(names)
        for name in names:
            self.delete_key(name)
        return found


def a_state_that_was_removed(store: Store) -> None:
    backend = C10dRendezvousBackend(store, "id")
    backend.get_state()
    store.delete_key("torch.rendezvous.id")
    with pytest.raises(RendezvousStateError):
        backend.get_state()


def a_barrier_in_vain(store: Store) -> None:
    with pytest.raises(StoreTimeoutError):
        barrier(store, 2, "b", 0.01)


# Not an election, which takes the loss of its key for the loss of its term.
LOOKS: dict[str, Callable[[Store], object]] = {
    "Fenced.set": lambda store: Fenced(store, "k").set("v", 4),
    "Fenced.token": lambda store: Fenced(store, "k").token(),
    **{name: lambda store, name=name: use(name, store, "a") for name in sorted(set(RECIPES) - {"Election"})},  # type: ignore[misc]
    "sequence": lambda store: (store.set("k/sequence/0", "1"), sequence_of(store)),
    "once": lambda store: [once(store, "work", lambda: b"done") for _ in range(2)],
    "once in a task": lambda store: [asyncio.run(once_in_a_task(AsyncStore(store), "work", work)) for _ in range(2)],
    "barrier": a_barrier_in_vain,
    "get_state": a_state_that_was_removed,
}


def sequence_of(store: Store) -> int:
    return StoreBarrier(store, "k", rank=0, world_size=1).sequence


async def work() -> bytes:
    return b"done"


@pytest.mark.parametrize("name", LOOKS)
def test_look_at_a_key_that_another_process_deletes_does_not_wait(name: str) -> None:
    with Fleeting(timeout=HANG_S) as store:
        store.set("k", "3 v")
        started = time.monotonic()
        LOOKS[name](store)
        assert time.monotonic() - started < HANG_S / 2


class Earlier(HashStore):
    """A store that was written before the arguments `default`, `timeout` and `expected` were added."""

    def get(self, key: Key) -> bytes:  # type: ignore[override]
        return super().get(key)

    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:  # type: ignore[override]
        return super().multi_get(keys)

    def queue_pop(self, key: Key, block: bool = True) -> bytes:  # type: ignore[override]
        return super().queue_pop(key, block)

    def delete_key(self, key: Key) -> bool:  # type: ignore[override]
        return super().delete_key(key)


@pytest.mark.parametrize("wrap", [lambda store: store, lambda store: PrefixStore("p", store)], ids=["store", "view"])
def test_store_that_was_written_earlier_takes_the_arguments_that_were_added(wrap: Callable[[Store], Any]) -> None:
    store = wrap(Earlier(timeout=HANG_S))
    assert store.get("k", default=None) is None
    for call in (
        lambda: store.get("k", timeout=0),
        lambda: store.multi_get(["k"], timeout=0),
        lambda: store.queue_pop("q", timeout=0),
    ):
        with pytest.raises(StoreTimeoutError):
            call()
    store.set("k", "v")
    store.queue_push("q", "item")
    assert store.get("k", default=None) == store.get("k") == store.get("k", timeout=0) == b"v"
    assert store.multi_get(["k"], timeout=0) == [b"v"]
    assert store.queue_pop("q", timeout=0) == b"item"
    assert store.delete_key("k")
