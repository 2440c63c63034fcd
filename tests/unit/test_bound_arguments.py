"""The arguments of a call that is made in a thread for a task: what other tasks may change meanwhile is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fscoord.aio._driver import bound


def returned(*arguments: Any, **named: Any) -> Any:
    return (*arguments, *named.values())


@pytest.mark.parametrize("make", [lambda: ["a"], lambda: {"a"}, lambda: {"a": 1}], ids=["list", "set", "dict"])
def test_argument_that_is_changed_after_the_call_was_bound_is_passed_as_it_was(make: Callable[[], Any]) -> None:
    given, named = make(), make()
    call = bound(returned, (given,), {"name": named})
    given.clear()
    named.clear()
    assert call() == (make(), make())


def test_views_and_iterators_are_read_before_other_tasks_run() -> None:
    given = {"a": 1}
    call = bound(returned, (given.keys(), given.values(), given.items(), iter(given), map(str, [1])), {})
    given.clear()
    assert call() == (["a"], [1], [("a", 1)], ["a"], ["1"])


def test_argument_that_can_not_change_is_passed_as_it_is() -> None:
    given = ("a", b"b", 1, None, ("c",))
    assert all(one is other for one, other in zip(bound(returned, given, {})(), given, strict=True))
