"""How the tasks of an asyncio loop sleep and are woken: no thread sleeps for them, the loop listens for all."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from fscoord._runtime import system
from fscoord._waiting.parking import Sleepers

__all__ = ["LoopWake", "Tasks", "finish_soon"]

LONGEST_S: Final = 86400.0
"""Longer sleeps are several: no clock of a loop knows infinity."""


class LoopWake:
    """What ends a task's sleep early. It is set from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._sleep: Callable[[], asyncio.Future[None] | None] = _nobody

    def set(self) -> bool:
        """Wake the task that sleeps, or will; False if that was done already, or the loop is over."""
        if self._is_set:
            return False
        self._is_set = True
        return finish_soon(self._loop, self._end)

    def _end(self) -> None:
        _finish(self._sleep())

    async def sleep(self, seconds: float) -> None:
        """Sleep until it is set, or so many seconds; that uses it up."""
        if not self._is_set and seconds > 0:
            sleep = self._loop.create_future()
            # Weakly: a store that knows this keeps no task alive whose loop is no more, and which undoes its wait then.
            self._sleep = weakref.ref(sleep)
            timer = self._loop.call_later(min(seconds, LONGEST_S), _finish, sleep)
            try:
                await sleep
            finally:
                timer.cancel()
                self._sleep = _nobody
        self._is_set = False


class Tasks(Sleepers):
    """The tasks of `loop`, which listens to events for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._life = system.process_epoch()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether these are the tasks of `loop`, in this process."""
        return self.loop is loop and self._life == system.process_epoch()

    def new_wake(self) -> LoopWake:
        """Return what wakes one of them."""
        return LoopWake(self.loop)

    def listen(self, events: Any, heard: Callable[[], None]) -> bool:
        """Have the loop call `heard` whenever `events` has something to read."""
        return finish_soon(self.loop, self._add, events, heard)

    def _add(self, events: Any, heard: Callable[[], None]) -> None:
        for descriptor in events.descriptors():
            self.loop.add_reader(descriptor, heard)

    def give_back(self, events: Any) -> None:
        """Close `events`, after the loop, if it still is, has stopped listening to it.

        A forked child closes them, and leaves its parent's loop alone: both share what the kernel tells it.
        """
        is_here = False
        with suppress(RuntimeError):
            is_here = asyncio.get_running_loop() is self.loop
        if self._life != system.process_epoch() or self.loop.is_closed():
            events.close()
        elif is_here or not finish_soon(self.loop, self._remove, events):
            self._remove(events)

    def _remove(self, events: Any) -> None:
        if not self.loop.is_closed():
            for descriptor in events.descriptors():
                self.loop.remove_reader(descriptor)
        events.close()


def finish_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> bool:
    """Have `loop` make this call, from any thread; False if it is closed, and so nobody waits in it any more."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True


def _nobody() -> None:
    """Stand for the sleep of a task that does not sleep."""


def _finish(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
