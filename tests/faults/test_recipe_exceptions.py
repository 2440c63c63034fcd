"""A signal handler raises a built-in exception in the middle of a recipe: the exception comes out unchanged.

Recipes read texts that something else may have written. What they raise about those is a class of its own, so that the
`ValueError` of a handler is neither taken for a foreign text, nor lost where a list does not have what is to leave it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from support.internals import line_of
from support.interrupts import At, TimeoutOrPermissionError, ValueOrLookupError
from support.recipes import RECIPES, use

from fscoord import HashStore, barrier, synchronize
from fscoord.recipes import Lock, once
from fscoord.store import Store

pytestmark = pytest.mark.exhaustive


def enter(hold: Any) -> None:
    try:
        with hold:
            hold.check()
    finally:
        with suppress(RuntimeError):  # it holds nothing, unless an interrupt came before the first line of `__exit__`
            hold.release()


def wake(store: Store) -> None:
    """Be in a line that another one of this process leaves, with a wake-up under way."""
    line, held = line_of(Lock(store, "l")), Lock(store, "l")
    assert held.acquire(timeout=1)
    entry = line.join(line.new_id(), "x")
    held.release()
    line.entries()
    line.leave(entry.id)


ACTS: dict[str, Callable[[Store, int], object]] = {
    **{name: lambda store, count, name=name: use(name, store, f"{name}{count}") for name in RECIPES},  # type: ignore[misc]
    "with": lambda store, _: enter(Lock(store, "l")),
    "line": lambda store, _: wake(store),
    "lease": lambda store, _: enter(Lock(store, "t", ttl=9e9)),
    "once": lambda store, count: once(store, f"o{count}", lambda: b"done"),
    "barrier": lambda store, count: barrier(store, 1, f"b{count}", 0),
    "synchronize": lambda store, count: synchronize(store, b"data", 0, 1, f"a{count}"),
}


@pytest.mark.parametrize("exception", [ValueOrLookupError, TimeoutOrPermissionError])
@pytest.mark.parametrize("name", ACTS)
def test_handlers_exception_comes_out_of_recipes(name: str, exception: type[Exception]) -> None:
    raised = exception("time is up")

    def act() -> None:
        raise raised

    for number in itertools.count(1):
        with HashStore(timeout=1) as store:
            ACTS[name](store, 0)  # what the first one does once for all
            at = At(number, act)
            try:
                with at:
                    ACTS[name](store, 1)
            except Exception as error:
                assert error is raised, f"{type(error).__name__} came out at {at.where}: {error}"
                raised.__traceback__ = None
            else:
                assert not at.reached, f"nothing came out at {at.where}"
        if not at.reached:
            break
    assert number > 10
