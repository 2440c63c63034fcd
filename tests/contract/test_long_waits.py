"""A wait of 30 seconds is logged: in recipes, in an event loop, and on stores whose own waits log nothing."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.internals import timing
from support.places import Place, start_thread, until
from support.recipes import RECIPES, WAITED_FOR, look_often, new

from fscoord import aio
from fscoord.aio._driver import SlicedWaits
from fscoord.recipes import Election, Lock, ReadWriteLock, Semaphore, once
from fscoord.store import Store

LIMIT = 60
HELD = r"\(held by this process \((thread|task) \S+\) as \S+:\d+, nobody else waiting\)"


@pytest.fixture(params=["file-ofd", "hash", "nested-hash"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = Place(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture(autouse=True)
def _waits_are_soon_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "FIRST_S", 0.02)
    look_often(monkeypatch, 0.01)


@pytest.fixture
def spoken(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "fscoord")
    return lambda: [record.getMessage() for record in caplog.records]


def told(what: str, lines: list[str]) -> bool:
    assert all(re.fullmatch(rf"still waiting for {what}, after \d+ s", line) for line in lines), lines
    return bool(lines)


WAITS: dict[str, tuple[Callable[[Store], Any], Callable[[Store, Any], object], Callable[[Store], object], str]] = {
    "Lock": (
        lambda store: Lock(store, "l").__enter__(),
        lambda store, held: held.release(),
        lambda store: Lock(store, "l").acquire(timeout=LIMIT),
        f"a turn at 'l' {HELD}",
    ),
    "Semaphore": (
        lambda store: Semaphore(store, "s").__enter__(),
        lambda store, held: held.release(),
        lambda store: Semaphore(store, "s").__enter__(),
        f"a turn at 's' {HELD}",
    ),
    "writer": (
        lambda store: ReadWriteLock(store, "w").reader.__enter__(),
        lambda store, held: held.release(),
        lambda store: ReadWriteLock(store, "w").writer.acquire(timeout=LIMIT),
        f"a turn at 'w' {HELD}",
    ),
    "campaign": (
        lambda store: Election(store, "c").__enter__(),
        lambda store, held: held.release(),
        lambda store: Election(store, "c").campaign(LIMIT),
        f"a turn at 'c' {HELD}",
    ),
    "once": (
        lambda store: Lock(store, "o").__enter__(),
        lambda store, held: held.release(),
        lambda store: once(store, "o", lambda: b"done"),
        f"a turn at 'o' {HELD}",
    ),
    **{
        name: (
            partial(new, name, name="NAME"),
            lambda _, made, name=name: RECIPES[name].end(made),  # type: ignore[misc]
            lambda store, name=name: RECIPES[name].wait(new(name, store, "NAME"), timeout=LIMIT),  # type: ignore[misc]
            recipe.warning,
        )
        for name, recipe in WAITED_FOR.items()
    },
    "get": (
        lambda store: store,
        lambda _, store: store.set("k", "v"),
        lambda store: store.get("k"),
        r"(key|the value of key) '(job/a/b/)?k'( in .*)?",
    ),
    "queue_pop": (
        lambda store: store,
        lambda _, store: store.queue_push("k", "v"),
        lambda store: store.queue_pop("k"),
        r"a value in queue '(job/a/b/)?k'( in .*)?",
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_long_wait_is_logged(name: str, store: Store, place: Place, spoken: Any) -> None:
    begin, end, wait, what = WAITS[name]
    begun = begin(place.open())
    with start_thread(wait, store):
        until(spoken)
        said = spoken()  # on a busy machine more is said between the end and the moment when the waiter sees it
        end(store, begun)
    assert told(what, said)


TASKS: dict[str, tuple[str, Callable[[aio.AsyncStore], Coroutine[Any, Any, object]]]] = {
    "Lock": ("Lock", lambda store: aio.Lock(store, "l").acquire(timeout=LIMIT)),
    **{
        name: (
            name,
            lambda store, name=name: RECIPES[name].wait(new(name, store, "NAME", aio), timeout=LIMIT),  # type: ignore[misc]
        )
        for name in WAITED_FOR
    },
    "get": ("get", lambda store: store.get("k")),
    "wait": ("get", lambda store: store.wait(["k"])),
    "queue_pop": ("queue_pop", lambda store: store.queue_pop("k")),
}


@pytest.mark.parametrize("by_slices", [False, True])
@pytest.mark.parametrize("name", TASKS)
def test_long_wait_of_a_task_is_logged(
    name: str, by_slices: bool, store: Store, place: Place, spoken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, wait = TASKS[name]
    begin, end, _, what = WAITS[kind]
    begun = begin(store)

    async def run() -> None:
        async with aio.AsyncStore(place.open()) as tasks:
            if by_slices:
                tasks._driver._bind_loop(asyncio.get_running_loop())
                tasks._driver._sliced_waits = SlicedWaits(tasks.store)
                monkeypatch.setattr("fscoord.aio._driver.SLICE_S", 0.01)
            waiting = asyncio.create_task(wait(tasks))
            while not spoken():
                await asyncio.sleep(0.001)
            said.extend(spoken())  # on a busy machine more is said between the end and the moment when the task sees it
            await asyncio.to_thread(end, store, begun)
            await waiting

    said: list[str] = []
    asyncio.run(asyncio.wait_for(run(), LIMIT))
    assert told("(the value of )?" + what, said)
