"""The asynchronous stores and recipes have the names and arguments of the others."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from support.recipes import RESULTS

import fscoord
from fscoord import aio, recipes, visibility

COLLECTIVES = ("barrier", "broadcast", "gather", "get_all", "synchronize", "tree_barrier")
CLASSES = [
    (fscoord.Store, aio.AsyncStore),
    *((getattr(recipes, name), getattr(aio, name)) for name in aio.__all__ if hasattr(recipes, name)),
]
FUNCTIONS = [
    *((getattr(fscoord.collectives, name), getattr(aio, name)) for name in COLLECTIVES),
    (fscoord.open_store, aio.open_store),
    (visibility.wait_visible, aio.wait_visible),
]

# What is said of somebody is the same for both; a hold is what all asynchronous locks are.
DATA = RESULTS - {"Item"}
OWN = {"AsyncStore", "AsyncWatch", "Hold", "open_store", "wait_visible", *COLLECTIVES}
OWN_MEMBERS = {("AsyncStore", "store")}


def members(kind: Any) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def arguments(call: Any) -> list[tuple[str, object, object]]:
    """Return name, kind and default of the arguments; the store has another type, and so has what is awaited."""
    return [(each.name, each.kind, each.default) for each in inspect.signature(call).parameters.values()]


def named(pair: Any) -> str:
    return str(pair[1].__name__)


def test_recipes_all_have_a_version_for_tasks() -> None:
    assert set(recipes.__all__) - DATA == set(aio.__all__) - OWN


def test_collectives_all_have_a_version_for_tasks() -> None:
    functions = {
        name for name in fscoord.collectives.__all__ if not inspect.isclass(getattr(fscoord.collectives, name))
    }
    assert functions - {"store_timeout"} == set(COLLECTIVES)


@pytest.mark.parametrize("pair", [pair for pair in CLASSES if inspect.isclass(pair[1])], ids=named)
def test_class_for_tasks_has_the_same_members(pair: tuple[Any, Any]) -> None:
    usual, asynchronous = pair
    own = {name for kind, name in OWN_MEMBERS if kind == asynchronous.__name__}
    assert members(asynchronous) - own == members(usual)
    for name in members(usual):
        one, other = (inspect.getattr_static(kind, name) for kind in pair)
        assert callable(one) == callable(other), f"{name}: one is called and the other is not"
        if callable(one):
            assert arguments(other) == arguments(one), name


@pytest.mark.parametrize(
    "pair", [pair for pair in CLASSES if pair[1] is not aio.AsyncStore and inspect.isclass(pair[1])], ids=named
)
def test_class_for_tasks_is_made_of_the_same_arguments(pair: tuple[Any, Any]) -> None:
    if pair[1] is aio.Item:
        return  # it comes from a queue
    assert arguments(pair[1]) == arguments(pair[0])


@pytest.mark.parametrize(
    "pair", [*FUNCTIONS, (recipes.once, aio.once), (recipes.force_release, aio.force_release)], ids=named
)
def test_function_for_tasks_has_the_same_arguments(pair: tuple[Any, Any]) -> None:
    assert arguments(pair[1]) == arguments(pair[0])


def test_properties_never_ask_the_store() -> None:
    """A property is what the object itself knows."""
    for usual, _ in CLASSES:
        if inspect.isclass(usual):
            properties = {name for name in members(usual) if isinstance(inspect.getattr_static(usual, name), property)}
            assert properties <= {
                "name",
                "is_acquired",
                "partitions",
                "parties",
                "token",
                "term",
                "timeout",
                "has_liveness",
                "capabilities",
            }


def test_reader_and_writer_sides_have_the_same_members() -> None:
    with fscoord.HashStore() as store:
        one, other = recipes.ReadWriteLock(store, "l"), aio.ReadWriteLock(aio.AsyncStore(store), "l")
        for side in ("reader", "writer"):
            assert members(type(getattr(one, side))) == members(type(getattr(other, side)))
