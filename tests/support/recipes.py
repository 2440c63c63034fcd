"""The registry of the recipes: how each is made, used and waited for. Tests that are about all recipes use it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

from fscoord import StoreTimeoutError, recipes
from fscoord.recipes import _line, _look

__all__ = ["RECIPES", "WAITED_FOR", "Recipe", "look_often", "new", "use"]


class Recipe(NamedTuple):
    """How tests use a recipe.

    Attributes:
        calls: returns, for an object, the calls that a process makes in this order while nobody else uses its name.
        arguments: what its constructor takes after the store and the name.
        wait: waits with an object for what another process does. It takes a ``timeout``, and may return a coroutine.
        end: does with another object what the wait is for.
        waits_for: what ``fscoord ps`` shows of the wait, after which the name follows: a constant of `awaited`.
        warning: what a warning calls the wait: a pattern, in which ``NAME`` is the name.
    """

    calls: Callable[[Any], list[Callable[[], Any]]]
    arguments: tuple[Any, ...] = ()
    wait: Callable[..., Any] | None = None
    end: Callable[[Any], object] | None = None
    waits_for: str = ""
    warning: str = ""


def of_a_hold(hold: Any) -> list[Callable[[], Any]]:
    return [hold.holders, hold.waiters, lambda: hold.acquire(timeout=0), hold.check, hold.release]


def of_a_queue(queue: Any) -> list[Callable[[], Any]]:
    taken: list[Any] = []
    batch: list[Any] = []
    ids: list[str] = []
    return [
        lambda: queue.put_all([b"1", b"2"]),
        lambda: taken.append(queue.take(block=False)),
        queue.taken,
        queue.size,
        queue.items,
        lambda: taken[0].release(),
        lambda: queue.take(timeout=0).ack(),
        lambda: queue.take(timeout=0).ack(),
        lambda: queue.join(timeout=0),
        lambda: queue.cancel(queue.put(b"3")),
        lambda: queue.put(b"4", delay=60, expires=90),
        queue.purge,
        lambda: ids.extend(queue.put_all([b"5", b"6"], wants_result=True)),
        lambda: batch.extend(queue.take_all(2, block=False)),
        lambda: [item.ack(b"done") for item in batch[:1]],
        lambda: queue.ack_all(batch[1:]),
        lambda: [queue.result(name, timeout=0) for name in ids],
    ]


def of_a_group(group: Any) -> list[Callable[[], Any]]:
    return [group.join, group.members, lambda: group.update(b"more"), lambda: group.observe(timeout=0), group.leave]


def of_a_partitioner(group: Any) -> list[Callable[[], Any]]:
    def wait() -> None:
        with suppress(StoreTimeoutError):  # no other member comes
            group.wait_changed(timeout=0)

    return [group.join, group.rebalance, wait, group.leave]


def as_a_member(group: Any, **limit: Any) -> Any:
    """Wait for a change of the partitions of `group`, a `Partitioner`, in the group. It alone holds all of them."""

    async def as_a_task() -> Any:
        async with group:
            return await group.wait_changed(**limit)

    if hasattr(group, "__aenter__"):
        return as_a_task()
    with group:
        return group.wait_changed(**limit)


RECIPES: dict[str, Recipe] = {
    "Lock": Recipe(of_a_hold),
    "RLock": Recipe(of_a_hold),
    "Semaphore": Recipe(of_a_hold, (2,)),
    "ReadWriteLock": Recipe(
        lambda both: [
            *of_a_hold(both.reader)[:3],
            both.held_side,
            both.own_side,
            both.reader.release,
            *of_a_hold(both.writer)[:3],
            both.downgrade,
            both.writer.release,
        ]
    ),
    "Election": Recipe(
        lambda office: [
            lambda: office.campaign(0),
            office.leader,
            lambda: office.observe(0, timeout=0),
            office.resign,
        ],
        (b"here",),
        lambda office, **limit: office.observe(**limit),
        lambda office: office.campaign(0),
        "a leader of",
        "a leader of 'NAME' in a later term than 0",
    ),
    "Queue": Recipe(
        of_a_queue,
        (),
        lambda queue, **limit: queue.take(**limit),
        lambda queue: queue.put(b"item"),
        "queue",
        "an item of the queue 'NAME'",
    ),
    "PriorityQueue": Recipe(of_a_queue),
    "Latch": Recipe(
        lambda latch: [latch.missing, latch.count_down, lambda: latch.wait(0)],
        (1,),
        lambda latch, **limit: latch.wait(**limit),
        lambda latch: latch.count_down(),
        "latch",
        r"the latch 'NAME' \([01] of 1 calls missing\)",
    ),
    "Event": Recipe(lambda event: [event.is_set, event.set, lambda: event.wait(0), event.clear, lambda: event.wait(0)]),
    "Condition": Recipe(
        lambda condition: [
            condition.acquire,
            condition.notify,
            lambda: condition.wait(0),
            lambda: condition.wait_for(lambda: True, 0),
            condition.notify_all,
            condition.release,
        ]
    ),
    "CyclicBarrier": Recipe(
        lambda barrier: [
            barrier.reset,  # a process that was killed here may have left the barrier broken
            barrier.wait,
            barrier.n_waiting,
            barrier.abort,
            barrier.is_broken,
            barrier.reset,
        ],
        (1,),
    ),
    "RateLimiter": Recipe(
        lambda limiter: [lambda: limiter.acquire(2), limiter.try_acquire, lambda: limiter.acquire(1, 9)],
        (1000, 1, 2),
    ),
    "DoubleBarrier": Recipe(lambda both: [both.enter, both.leave], (1, 0)),
    "RankZeroFirst": Recipe(
        lambda first: [first.__enter__, lambda: first.__exit__(None, None, None)],
        (0,),
    ),
    "Membership": Recipe(
        of_a_group,
        (b"data",),
        lambda group, **limit: group.observe(**limit),
        lambda group: group.join(),
        "a change of the group",
        "a change of the group 'NAME'",
    ),
    "Ephemeral": Recipe(lambda key: [key.create, key.get, key.delete], (b"data",)),
    "Partitioner": Recipe(
        of_a_partitioner,
        (2,),
        as_a_member,
        lambda group: group.join(),
        "a change of the partitions of",
        "a change of the partitions of 'NAME'",
    ),
    "Fenced": Recipe(lambda value: [lambda: value.set(b"data", value.token() or 3), value.get, value.token]),
}

RESULTS = {"Contender", "Item", "Leader", "Participant", "QueuedItem"}
"""The classes of `fscoord.recipes` that only a recipe makes."""

WAITED_FOR = {name: recipe for name, recipe in RECIPES.items() if recipe.wait is not None}


def new(kind: str, store: Any, name: str, module: Any = recipes) -> Any:
    """Return a new object of the recipe: of `fscoord.recipes`, or of `fscoord.aio` for an `AsyncStore`."""
    return getattr(module, kind)(store, name, *RECIPES[kind].arguments)


def use(kind: str, store: Any, name: str) -> None:
    """Use a new object of the recipe alone, to its end. An `Ephemeral` needs a store that detects deaths."""
    if kind == "Ephemeral" and store.capabilities.processes and not store.has_liveness:
        return
    for call in RECIPES[kind].calls(new(kind, store, name)):
        call()


def look_often(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Make each recipe that waits look for itself after `seconds`."""
    monkeypatch.setattr(_line, "SLOW_LOOK_S", seconds)
    monkeypatch.setattr(_look, "LOOK_S", seconds)
    for name in WAITED_FOR:
        monkeypatch.setattr(sys.modules[getattr(recipes, name).__module__], "LOOK_S", seconds, raising=False)
