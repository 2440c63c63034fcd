"""Ctrl-C at each point of a recipe: nothing stays held, and no entry stays in a line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.interrupts import At, interrupt

from fscoord import FileStore, HashStore
from fscoord.recipes import Election, Lock, RLock, Semaphore
from fscoord.store import Store

KINDS: dict[str, Callable[[Store], Any]] = {
    "Lock": lambda store: Lock(store, "l"),
    "Lock with ttl": lambda store: Lock(store, "l", ttl=100),
    "RLock": lambda store: RLock(store, "l"),
    "Semaphore": lambda store: Semaphore(store, "l", 2),
    "Election": lambda store: Election(store, "l"),
}


@pytest.fixture(params=["hash", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    store = HashStore(timeout=60) if request.param == "hash" else FileStore(str(tmp_path / "store"), timeout=60)
    with store:
        yield store


def at_each_point(act: Callable[[At], None], before: Callable[[], object] = lambda: None) -> list[str]:
    """Call `act` for one point after the other, until it has no more; return where they were.

    ``before()`` sees to it that each time as much is known of who was here last, so that the points are the same.
    """
    found: list[str] = []
    while True:
        before()
        point = At(len(found) + 1, interrupt)
        act(point)
        if not point.reached:
            return found
        found.append(point.where)


def use(hold: Any) -> None:
    """Have it and give it back, which also sets up what the first one does."""
    with hold:
        pass


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Callable[[Store], Any]:
    return KINDS[request.param]


@pytest.fixture
def hold(kind: Callable[[Store], Any], store: Store) -> Any:
    hold = kind(store)
    use(hold)
    return hold


@pytest.fixture(params=["itself", "another"])
def settle(request: pytest.FixtureRequest, kind: Callable[[Store], Any], hold: Any, store: Store) -> Callable[[], None]:
    """Give the call before each acquisition. The acquisition knows the line if `hold` had it last, or must read it."""
    users = [hold] if request.param == "itself" else [hold, kind(store)]

    def settle() -> None:
        for each in users:
            use(each)

    return settle


def holds(hold: Any) -> bool:
    try:
        return hold.token is not None
    except RuntimeError:
        return False


def nobody_is_in_line(hold: Any) -> bool:
    return not hold.holders() and not hold.waiters() and not holds(hold)


def test_acquisition_that_is_interrupted_holds_nothing(hold: Any, settle: Callable[[], None]) -> None:
    def act(point: At) -> None:
        acquired = False
        with suppress(KeyboardInterrupt):
            with point:
                hold.acquire()
            acquired = True
        assert acquired is not point.reached
        assert acquired or nobody_is_in_line(hold), point.where
        if acquired:
            hold.release()

    found = at_each_point(act, settle)
    assert any(where.startswith("recipes/_hold.py") and "after append" in where for where in found)


def test_context_entry_that_is_interrupted_holds_nothing(hold: Any, settle: Callable[[], None]) -> None:
    def act(point: At) -> None:
        entered = False
        with suppress(KeyboardInterrupt):
            with point:
                hold.__enter__()
            entered = True
        assert entered or nobody_is_in_line(hold), point.where
        if entered:
            hold.release()

    assert len(at_each_point(act, settle)) > 10


@pytest.mark.parametrize("way", ["release", "__exit__"])
def test_release_that_is_interrupted_is_still_done(hold: Any, way: str) -> None:
    arguments = (None, None, None) if way == "__exit__" else ()

    def act(point: At) -> None:
        assert hold.acquire()
        with suppress(KeyboardInterrupt), point:
            getattr(hold, way)(*arguments)
        if point.where.split()[1:] == [way]:  # it had not begun: to be called again
            hold.check()
            hold.release()
        assert nobody_is_in_line(hold), point.where

    assert len(at_each_point(act)) > 10


def test_reentrant_lock_that_is_interrupted_keeps_count_of_its_acquisitions(store: Store) -> None:
    lock = RLock(store, "l")

    def act(point: At) -> None:
        with lock:
            with suppress(KeyboardInterrupt), point:
                lock.acquire()
            if not point.reached:
                lock.release()
            lock.check()
        assert nobody_is_in_line(lock), point.where

    def leave(point: At) -> None:
        with lock:
            assert lock.acquire()
            with suppress(KeyboardInterrupt), point:
                lock.release()
            if point.where.split()[1:] == ["release"]:
                lock.release()
            lock.check()
        assert nobody_is_in_line(lock), point.where

    assert len(at_each_point(act)) > 3
    assert len(at_each_point(leave)) > 3


def test_release_that_a_signal_handler_breaks_off_with_any_error_is_done() -> None:
    """Such as the `TimeoutError` of a program that uses SIGALRM."""

    def raise_it() -> None:
        raise TimeoutError

    with HashStore(timeout=60) as store:
        lock, number, reached = Lock(store, "l"), 0, True
        while reached:
            number += 1
            assert lock.acquire()
            point = At(number, raise_it)
            with suppress(TimeoutError), point:
                lock.release()
            if point.where.split()[1:] == ["release"]:
                lock.release()
            assert nobody_is_in_line(lock), point.where
            reached = point.reached
    assert number > 10
