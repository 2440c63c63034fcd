"""`AsyncioBackend`: how the tasks of an asyncio loop sleep: in no thread, and the loop reads the events for them."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from fscoord._runtime import system
from fscoord._waiting.wait import WaitBackend

__all__ = ["AsyncioBackend", "AsyncioWaker", "call_soon"]

LONGEST_S: Final = 86400.0
"""Longer sleeps are several: no clock of a loop knows infinity."""


class AsyncioWaker:
    """Ends the sleep of a task. It is set from any thread, and used up by a sleep, like `system.AutoResetEvent`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._sleep: Callable[[], asyncio.Future[None] | None] = _no_sleep

    def set(self) -> bool:
        """Wake the task, or keep it from sleeping the next time; False if that was done, or the loop is closed."""
        if self._is_set:
            return False
        self._is_set = True
        return call_soon(self._loop, self._end)

    def _end(self) -> None:
        _finish(self._sleep())

    async def sleep(self, seconds: float) -> None:
        """Wait until set, or for `seconds`, then reset."""
        if not self._is_set and seconds > 0:
            sleep = self._loop.create_future()
            # Weakly, because the store knows this waker: a task whose loop is gone must be collected to close its wait.
            self._sleep = weakref.ref(sleep)
            timer = self._loop.call_later(min(seconds, LONGEST_S), _finish, sleep)
            try:
                await sleep
            finally:
                timer.cancel()
                self._sleep = _no_sleep
        self._is_set = False


class AsyncioBackend(WaitBackend):
    """The tasks of `loop`, which reads events for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._life = system.process_epoch()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether this is the backend of `loop`, in this process."""
        return self.loop is loop and self._life == system.process_epoch()

    def new_waker(self) -> AsyncioWaker:
        """Return the waker of a new wait."""
        return AsyncioWaker(self.loop)

    def subscribe(self, events: Any, on_readable: Callable[[], None]) -> bool:
        """Have the loop call `on_readable` whenever `events` is readable."""
        return call_soon(self.loop, self._add, events, on_readable)

    def _add(self, events: Any, on_readable: Callable[[], None]) -> None:
        for descriptor in events.descriptors():
            self.loop.add_reader(descriptor, on_readable)

    def release(self, events: Any) -> None:
        """Close `events`, after the loop, if it is still open, has stopped reading it.

        A forked child closes them, and leaves its parent's loop alone: both share one epoll instance of the kernel.
        """
        is_here = False
        with suppress(RuntimeError):
            is_here = asyncio.get_running_loop() is self.loop
        if self._life != system.process_epoch() or self.loop.is_closed():
            events.close()
        elif is_here or not call_soon(self.loop, self._remove, events):
            self._remove(events)

    def _remove(self, events: Any) -> None:
        if not self.loop.is_closed():
            for descriptor in events.descriptors():
                self.loop.remove_reader(descriptor)
        events.close()


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> bool:
    """Have `loop` make this call, from any thread; False if it is closed, so that no task waits in it any more."""
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError:
        return False
    return True


def _no_sleep() -> None:
    """Stand for the sleep of a task that does not sleep."""


def _finish(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)
