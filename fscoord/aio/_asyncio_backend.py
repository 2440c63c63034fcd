"""`AsyncioBackend` lets tasks wait in an asyncio loop, which also receives file events. No wait occupies a thread."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, Final

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._waiting.wait import WaitBackend

LONGEST_S: Final = 86400.0
"""The longest sleep, in seconds, because a loop can't set an infinite timer. A longer wait sleeps several times."""


class AsyncioWaker:
    """Wakes the task that sleeps in `sleep`.

    Any thread may call `set`. A waiting thread has a `system.AutoResetEvent`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_set = False
        self._sleep: Callable[[], asyncio.Future[None] | None] = _no_sleep

    def set(self) -> bool:
        """Wake the task. If the task does not sleep now, its next `sleep` returns at once.

        Returns:
            False if the waker was set already, or if the loop is closed.
        """
        if self._is_set:
            return False
        self._is_set = True
        return call_soon(self._loop, self._end)

    def _end(self) -> None:
        finish(self._sleep())

    async def sleep(self, seconds: float) -> None:
        """Sleep until the waker is set, or for `seconds`; then reset the waker."""
        if not self._is_set and seconds > 0:
            sleep = self._loop.create_future()
            # The store refers to this waker, and the future refers to its task. With a strong reference to the future,
            # a task whose loop is gone would never be collected, and its wait never closed.
            self._sleep = weakref.ref(sleep)
            timer = self._loop.call_later(min(seconds, LONGEST_S), finish, sleep)
            try:
                await sleep
            finally:
                timer.cancel()
                self._sleep = _no_sleep
        self._is_set = False


class AsyncioBackend(WaitBackend):
    """The wait backend for the tasks of `loop`. The loop receives file events for all these tasks."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._life = system.process_epoch()

    def is_of(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Return whether this backend is for `loop`, and was made in this process and not in its parent."""
        return self.loop is loop and self._life == system.process_epoch()

    def new_waker(self) -> AsyncioWaker:
        """Return a new waker for one wait."""
        return AsyncioWaker(self.loop)

    def subscribe(self, events: Any, on_readable: Callable[[], None]) -> bool:
        """Make the loop call `on_readable` whenever `events` is readable. Return False if the loop is closed."""
        return call_soon(self.loop, self._add, events, on_readable)

    def _add(self, events: Any, on_readable: Callable[[], None]) -> None:
        for descriptor in events.descriptors():
            self.loop.add_reader(descriptor, on_readable)

    def release(self, events: Any) -> None:
        """Remove `events` from the loop, and close `events`.

        A forked child only closes `events`. The child shares its parent's epoll instance, so it must not remove
        descriptors.
        """
        running = None
        try:
            running = asyncio.get_running_loop()
        except RuntimeError as error:
            raise_if_foreign(error)
        if self._life != system.process_epoch() or self.loop.is_closed():
            events.close()
        elif running is self.loop or not call_soon(self.loop, self._remove, events):
            self._remove(events)

    def _remove(self, events: Any) -> None:
        if not self.loop.is_closed():
            for descriptor in events.descriptors():
                self.loop.remove_reader(descriptor)
        events.close()


def call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: Any) -> bool:
    """Schedule `call` in `loop`. Any thread may call this function.

    Return False if the loop is closed. Then `call` is not scheduled, and no task waits for `call`.
    """
    try:
        loop.call_soon_threadsafe(call, *arguments)
    except RuntimeError as error:
        raise_if_foreign(error, "asyncio", "uvloop")
        return False
    return True


def _no_sleep() -> None:
    """Return None, like a weak reference to a dead future. `AsyncioWaker._sleep` is this function between sleeps."""


def finish(future: asyncio.Future[None] | None) -> None:
    """Set the result of `future` to None, unless `future` is done or None."""
    if future is not None and not future.done():
        future.set_result(None)
