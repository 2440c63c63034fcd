"""By position and by torch's names the arguments are torch's; `world_size`, `key` and `timeout` are common to all."""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import fscoord
from fscoord import HashStore, PrefixStore, Store, StoreTimeoutError, aio, barriers, recipes

SHORT_S = 0.02
HANG_S = 60

# Names, order and defaults of torch.distributed.elastic.utils.store in torch 2.
OF_TORCH = {
    "barrier": "world_size key_prefix barrier_timeout rank rank_tracing_decoder trace_timeout",
    "synchronize": "data rank world_size key_prefix timeout",
    "get_all": "rank prefix world_size",
}
ALONE: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "barrier": ((1, "k", 1, 0), {"world_size": 1, "rank": 0}),
    "synchronize": (("d", 0, 1, "k", 1), {"data": "d", "rank": 0, "world_size": 1}),
    "get_all": ((0, "k", 1), {"rank": 0, "world_size": 1}),
    "broadcast": (("d", 0, 1, "k", 1), {"data": "d", "rank": 0, "world_size": 1}),
    "gather": (("d", 0, 1, "k", 1), {"data": "d", "rank": 0, "world_size": 1}),
}
TORCH_NAMES = {
    "barrier": {"key_prefix": "k", "barrier_timeout": 1},
    "synchronize": {"key_prefix": "k", "timeout": 1},
    "get_all": {"prefix": "k"},
}
RESULTS = {"barrier": None, "synchronize": [b"d"], "get_all": [b"d"], "broadcast": b"d", "gather": [b"d"]}


def usual(name: str, store: Store, *arguments: Any, **keywords: Any) -> Any:
    return getattr(fscoord, name)(store, *arguments, **keywords)


def in_a_loop(name: str, store: Store, *arguments: Any, **keywords: Any) -> Any:
    async def call() -> Any:
        return await getattr(aio, name)(aio.AsyncStore(store), *arguments, **keywords)

    return asyncio.run(call())


@pytest.fixture(params=[usual, in_a_loop], ids=["usual", "asyncio"])
def call(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def store() -> Iterator[Store]:
    with HashStore(timeout=2 * HANG_S) as store:
        store.set("k0", "d")
        yield store


@pytest.mark.parametrize("name", OF_TORCH)
def test_positional_arguments_are_those_of_torch(name: str) -> None:
    parameters = inspect.signature(getattr(fscoord, name)).parameters.values()
    assert [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD] == [
        "store",
        *OF_TORCH[name].split(),
    ]


@pytest.mark.parametrize("name", ALONE)
def test_collectives_accept_positional_arguments(name: str, call: Callable[..., Any], store: Store) -> None:
    assert call(name, store, *ALONE[name][0]) == RESULTS[name]


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_collectives_accept_the_names_of_torch(name: str, call: Callable[..., Any], store: Store) -> None:
    assert call(name, store, **ALONE[name][1], **TORCH_NAMES[name]) == RESULTS[name]


@pytest.mark.parametrize("timeout", [{}, {"timeout": None}, {"timeout": 1}, {"timeout": math.inf}], ids=str)
@pytest.mark.parametrize("name", ALONE)
def test_collectives_accept_the_common_names(
    name: str, timeout: dict[str, Any], call: Callable[..., Any], store: Store
) -> None:
    assert call(name, store, **ALONE[name][1], key="k", **timeout) == RESULTS[name]


@pytest.mark.parametrize("name", ALONE)
def test_timeout_by_its_common_name_is_obeyed(name: str, call: Callable[..., Any], store: Store) -> None:
    given = {**ALONE[name][1], "world_size": 2, "key": "k", "timeout": SHORT_S}
    if name == "broadcast":
        given["rank"] = 1
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError):
        call(name, store, **given)
    assert SHORT_S <= time.monotonic() - started < HANG_S


@pytest.mark.parametrize("name", TORCH_NAMES)
def test_argument_given_by_two_names_or_none_is_refused(name: str, call: Callable[..., Any], store: Store) -> None:
    given = ALONE[name][1]
    torch_name = next(iter(TORCH_NAMES[name]))
    with pytest.raises(TypeError, match=f"key and {torch_name} are two names of one argument"):
        call(name, store, **given, key="k", **{torch_name: "k"})
    with pytest.raises(TypeError, match=f"key is missing: give key, or {torch_name} as in torch"):
        call(name, store, **given)
    without = {argument: value for argument, value in given.items() if argument != "world_size"}
    with pytest.raises(TypeError, match="world_size"):
        call(name, store, **without, key="k")
    assert store.num_keys() == 1


def test_timeout_given_by_two_names_is_refused(call: Callable[..., Any], store: Store) -> None:
    with pytest.raises(TypeError, match="timeout and barrier_timeout are two names of one argument"):
        call("barrier", store, 1, "k", 1, timeout=1)


@pytest.mark.parametrize("kind", [HashStore, lambda: PrefixStore("p", HashStore())], ids=["hash", "prefix"])
def test_barriers_of_stores_and_recipes_accept_the_common_names(kind: Callable[[], Store]) -> None:
    store = kind()
    store.barrier(key="k", world_size=1, timeout=1)
    asyncio.run(aio.AsyncStore(store).barrier(key="l", world_size=1, timeout=1))
    both = recipes.DoubleBarrier(store=store, name="d", world_size=1, rank=0, timeout=1)
    both.enter(timeout=1)
    both.leave(timeout=1)
    barriers.StoreBarrier(store, rank=0, world_size=1, timeout=1).execute_barrier(timeout=1)
