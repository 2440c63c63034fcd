"""A signal handler raises a built-in exception in the middle of a recipe: the exception comes out unchanged.

Recipes read texts that something else may have written. What they raise about those is a class of its own, so that the
`ValueError` of a handler is neither taken for a foreign text, nor lost where a list does not have what is to leave it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from support.interrupts import At

from fscoord import HashStore, barrier, synchronize
from fscoord.recipes import (
    Election,
    Fenced,
    Latch,
    Lock,
    Membership,
    PriorityQueue,
    Queue,
    ReadWriteLock,
    RLock,
    Semaphore,
    once,
)
from fscoord.store import Store

pytestmark = pytest.mark.exhaustive

EXCEPTIONS = [ValueError, IndexError, TimeoutError, OverflowError, KeyError]


def use(hold: Any) -> None:
    try:
        with hold:
            hold.check()
    finally:
        if hold._held:  # `__exit__` was interrupted before its first line, where nothing can catch that
            hold.release()


def work(queue: Queue) -> None:
    queue.put("a")
    queue.take().ack()


def pass_on(queue: Queue) -> None:
    queue.put("a")
    queue.take(block=False).release()
    len(queue)
    queue.take().ack()


def take_part(group: Membership) -> None:
    with group:
        group.update("new")
        group.members()


def lead(office: Election) -> None:
    with office:
        office.leader()


def write(value: Fenced) -> None:
    value.set("value", value.token() or 1)
    value.get()


def wake(store: Store) -> None:
    """Be in a line that another one of this process leaves, with a wake-up under way."""
    line, held = Lock(store, "l")._line, Lock(store, "l")
    assert held.acquire(timeout=1)
    entry = line.join(line.new_id(), "x")
    held.release()
    line.entries()
    line.leave(entry.id)


ACTS: dict[str, Callable[[Store, int], object]] = {
    "Lock": lambda store, _: use(Lock(store, "l")),
    "line": lambda store, _: wake(store),
    "RLock": lambda store, _: use(RLock(store, "r")),
    "lease": lambda store, _: use(Lock(store, "t", ttl=9e9)),
    "Semaphore": lambda store, _: use(Semaphore(store, "s", 2)),
    "writer": lambda store, _: use(ReadWriteLock(store, "w").writer),
    "Election": lambda store, _: lead(Election(store, "e", "data")),
    "Queue": lambda store, _: work(Queue(store, "q")),
    "queue": lambda store, _: pass_on(Queue(store, "q")),
    "PriorityQueue": lambda store, _: work(PriorityQueue(store, "p")),
    "Membership": lambda store, _: take_part(Membership(store, "g", "data")),
    "Fenced": lambda store, _: write(Fenced(store, "f")),
    "Latch": lambda store, count: Latch(store, f"d{count}", 1).count_down(),
    "once": lambda store, count: once(store, f"o{count}", lambda: b"done"),
    "barrier": lambda store, count: barrier(store, 1, f"b{count}", 0),
    "synchronize": lambda store, count: synchronize(store, b"data", 0, 1, f"a{count}"),
}


@pytest.mark.parametrize("exception", EXCEPTIONS)
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
