"""The bell on every schedule of a few waiters and writers: no ring is lost, wherever a thread loses the processor."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fscoord._log.wakeup.doorbell import FIFO_BYTE, Doorbell
from fscoord._runtime import system

pytestmark = [pytest.mark.exhaustive, pytest.mark.once]

BUCKET = 7

Progress = tuple[int, tuple[Any, ...]]
"""How many tokens an actor has used, and the results of its calls since it began or began again. They determine what it
does next."""

State = tuple[tuple[tuple[int, bytes], ...], int, int, tuple[Progress | None, ...]]
"""The cells that were written, the numbers of records and of events, and the progress of each actor; None: it ended."""


class Pause(BaseException):
    """Raised by the call before which an actor loses the processor."""


class World:
    """The bell, the log and the events, which the actors share. It takes the place of the package's `os`.

    An actor is a function without randomness, and returns whether it begins again. To let it make one more call, it is
    run from its beginning: the calls that it has made return what they have returned, the next one is carried out, and
    the one after that raises `Pause`.
    """

    def __init__(self, actors: Sequence[Callable[[World], bool]]) -> None:
        self._actors = actors
        self._next_tokens = [0] * len(actors)
        self.load(((), 0, 0, ((0, ()),) * len(actors)))

    def load(self, state: State) -> None:
        cells, self._records, self._events, self._progress = state
        self._cells = dict(cells)

    def save(self) -> State:
        return tuple(sorted(self._cells.items())), self._records, self._events, self._progress

    def advance(self, number: int) -> str:
        """Let actor `number` make its next call. Return ``"moved"``, ``"asleep"`` or ``"ended"``."""
        progress = self._progress[number]
        if progress is None:
            return "ended"
        self._next_tokens[number], self._past = progress
        self._position, self._has_moved, self._new = 0, False, list[Any]()
        after: Progress | None
        try:
            after = (self._next_tokens[number], ()) if self._actors[number](self) else None
        except Pause:
            after = progress[0], (*self._past, *self._new)
            if not self._has_moved:
                return "asleep"
        self._progress = (*self._progress[:number], after, *self._progress[number + 1 :])
        return "moved"

    def next_token(self, number: int) -> int:
        """Return the next token of actor `number`. No other actor uses it."""
        self._next_tokens[number] += 2
        return self._next_tokens[number] + 0x10000 * number

    def _call(self, call: Callable[[], Any], *, is_seen: bool = True) -> Any:
        """Return the result of `call`. If `is_seen` is false, no actor can observe when the call is made."""
        if self._position < len(self._past):
            self._position += 1
            return self._past[self._position - 1]
        if self._has_moved:
            raise Pause
        found = call()
        self._has_moved = is_seen
        self._new.append(found)
        return found

    # -- the calls of the system ---------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def pread(self, _: int, size: int, offset: int) -> bytes:
        if offset == FIFO_BYTE:
            return b"\0"
        return self._call(lambda: self._cells.get(offset, bytes(size)))  # type: ignore[no-any-return]

    def pwrite(self, _: int, data: bytes, offset: int) -> None:
        self._call(lambda: self._cells.update({offset: data}))

    def utime(self, _: int) -> None:
        self._call(lambda: setattr(self, "_events", self._events + 1))

    # -- the log and the events ----------------------------------------------------------------------------------------

    def append(self) -> None:
        self._call(lambda: setattr(self, "_records", self._records + 1))

    def look(self) -> int:
        return self._call(lambda: self._records)  # type: ignore[no-any-return]

    def count_events(self) -> int:
        # Earlier is safer. So the events are counted when the next call is made.
        return self._call(lambda: self._events, is_seen=False)  # type: ignore[no-any-return]

    def sleep(self, seen: int) -> int:
        """Sleep until there are more than `seen` events. Return how many there are."""

        def wake() -> int:
            if self._events == seen:
                raise Pause
            return self._events

        return self._call(wake)  # type: ignore[no-any-return]


def explore(world: World, actors: int) -> None:
    """Try every schedule. Fail if an actor sleeps in a state in which no actor can go on."""
    begin = world.save()
    seen: set[State] = {begin}
    ways: list[tuple[State, tuple[int, ...]]] = [(begin, ())]
    while ways:
        state, way = ways.pop()
        ends = []
        for number in range(actors):
            world.load(state)
            ends.append(world.advance(number))
            after = world.save()
            if ends[-1] == "moved" and after not in seen:
                seen.add(after)
                ways.append((after, (*way, number)))
        assert "moved" in ends or "asleep" not in ends, f"a ring is lost on the schedule {way}"


def wait_for(bell: Doorbell, records: int) -> Callable[[World], bool]:
    """Return a waiter, which ends once it has found so many records."""

    def wait(world: World) -> bool:
        events = world.count_events()
        mark = bell.arm(BUCKET)
        if world.look() == records:
            return False
        while True:
            events = world.sleep(events)
            if bell.is_rung(BUCKET, mark):
                return True

    return wait


def write(bell: Doorbell) -> Callable[[World], bool]:
    """Return a writer of one record."""

    def write(world: World) -> bool:
        world.append()
        bell.ring(BUCKET)
        return False

    return write


@pytest.mark.parametrize(("waiters", "writers"), [(1, 2), (2, 1), (1, 3), (3, 1), (2, 2)])
def test_ring_is_lost_on_no_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waiters: int, writers: int
) -> None:
    """A thread or process may lose the processor before any call, for as long as the others need for theirs."""
    bells = [Doorbell(str(tmp_path / "bell"), 0o600) for _ in range(waiters + writers)]
    world = World([wait_for(bell, writers) for bell in bells[:waiters]] + [write(bell) for bell in bells[waiters:]])
    with monkeypatch.context() as patch:
        for number, bell in enumerate(bells):
            patch.setattr(bell, "_next_token", partial(world.next_token, number))
        patch.setattr(system, "os", world)
        explore(world, len(bells))
    for bell in bells:
        bell.close()
