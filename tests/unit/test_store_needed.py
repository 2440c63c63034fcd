"""A path, a class or a store of another kind in the place of a store: the error names the argument and what to pass."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.recipes import RECIPES, new

import fscoord
from fscoord import HashStore, PrefixStore, aio, recipes
from fscoord.aio import AsyncStore
from fscoord.rendezvous import C10dRendezvousBackend


def named(kind: str, module: Any, store: Any) -> Any:
    return new(kind, store, "x", module)


TAKERS: dict[str, Callable[[Any], Any]] = {
    **{name: partial(named, name, recipes) for name in RECIPES},
    "once": lambda store: recipes.once(store, "x", lambda: b""),
    "@once": lambda store: recipes.once(store, "x")(lambda: b""),
    "force_release": lambda store: recipes.force_release(store, "x", 1),
    "barrier": lambda store: fscoord.barrier(store, 1, "x"),
    "barrier of ranks": lambda store: fscoord.barrier(store, 1, "x", 5, 0),
    "synchronize": lambda store: fscoord.synchronize(store, b"", 0, 1, "x"),
    "get_all": lambda store: fscoord.get_all(store, 0, "x", 1),
    "broadcast": lambda store: fscoord.broadcast(store, b"", 0, 1, "x"),
    "gather": lambda store: fscoord.gather(store, b"", 0, 1, "x"),
    "tree_barrier": lambda store: fscoord.collectives.tree_barrier(store, store, 0, 1, 1, "x"),
    "store_timeout": lambda store: fscoord.store_timeout(store, 1).__enter__(),
    "PrefixStore": lambda store: PrefixStore("p", store),
    "AsyncStore": AsyncStore,
}
TAKERS_OF_ASYNC: dict[str, Callable[[Any], Any]] = {
    **{name: partial(named, name, aio) for name in RECIPES},
    "once": lambda store: asyncio.run(aio.once(store, "x", lambda: asyncio.sleep(0, b""))),
    "force_release": lambda store: asyncio.run(aio.force_release(store, "x", 1)),
    "barrier": lambda store: asyncio.run(aio.barrier(store, 1, "x")),
    "synchronize": lambda store: asyncio.run(aio.synchronize(store, b"", 0, 1, "x")),
    "get_all": lambda store: asyncio.run(aio.get_all(store, 0, "x", 1)),
    "broadcast": lambda store: asyncio.run(aio.broadcast(store, b"", 0, 1, "x")),
    "gather": lambda store: asyncio.run(aio.gather(store, b"", 0, 1, "x")),
    "tree_barrier": lambda store: asyncio.run(aio.tree_barrier(store, store, 0, 1, 1, "x")),
}


def refusal(taker: Callable[[Any], Any], argument: object) -> str:
    with pytest.raises(TypeError) as caught:
        taker(argument)
    return str(caught.value)


@pytest.mark.parametrize("taker", list(TAKERS))
def test_path_instead_of_a_store_is_refused_with_the_call_that_opens_it(taker: str) -> None:
    call = TAKERS[taker]
    assert refusal(call, "a.store") == "a store is needed, got str: FileStore('a.store')"
    assert refusal(call, Path("a.store")).endswith(f"got {type(Path()).__name__}: FileStore('a.store')")
    assert refusal(call, "tcp://host:1") == "a store is needed, got str: open_store('tcp://host:1')"
    assert refusal(call, "mem:x") == "a store is needed, got str: open_store('mem:x')"


@pytest.mark.parametrize("taker", [name for name in TAKERS if name != "PrefixStore"])
def test_object_that_is_not_a_store_is_refused(taker: str) -> None:
    assert refusal(TAKERS[taker], None).startswith("a store is needed, got NoneType: pass a store")
    assert refusal(TAKERS[taker], {}).startswith("a store is needed, got dict: pass a store")


@pytest.mark.parametrize("taker", list(TAKERS_OF_ASYNC))
def test_store_that_is_not_asynchronous_is_refused_with_the_call_that_wraps_it(taker: str) -> None:
    with HashStore() as store:
        shown = refusal(TAKERS_OF_ASYNC[taker], store)
    assert shown == "store must be an AsyncStore, got HashStore: pass AsyncStore(store)"
    shown = refusal(TAKERS_OF_ASYNC[taker], "a.store")
    assert shown == "store must be an AsyncStore, got str: pass aio.open_store('a.store')"


def test_asynchronous_store_in_a_blocking_recipe_is_refused_with_its_store() -> None:
    with HashStore() as store:
        shown = refusal(TAKERS["Lock"], AsyncStore(store))
    assert shown == "a store is needed, got AsyncStore: pass its .store, or use fscoord.aio"


def test_backend_of_a_rendezvous_names_what_it_needs() -> None:
    assert refusal(lambda store: C10dRendezvousBackend(store, "x"), "a.store").startswith("a store is needed, got str")
