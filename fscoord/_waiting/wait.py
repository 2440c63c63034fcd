"""`Wait`: one wait in a store, and `block_on`, which carries it out in a thread; `fscoord.aio` has the loop's driver.

A wait does everything except sleep. It says how long to sleep, and names what ends a sleep early; a driver sleeps. Code
that leaves its blocking to a driver is known as "sans-I/O".

The order of the calls is what makes a wake-up safe::

    arm     from here on a change wakes this wait
    look    finds every change from before
    sleep   until woken, and for `max_sleep` seconds at most

A change that came before `arm` is found by the look, and one that comes after it ends the sleep. In the other order a
change between the look and the arming would neither be found nor wake anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar

from fscoord._runtime import system

__all__ = ["NOT_YET", "THREAD_BACKEND", "NotYet", "Wait", "WaitBackend", "Waker", "block_on", "next_look"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class NotYet:
    """The type of `NOT_YET`."""


NOT_YET: Final = NotYet()
"""What a look returns while the condition does not hold."""


class Waker(Protocol):
    """Ends the sleep of one wait."""

    def set(self) -> bool:
        """Wake the waiter, or keep it from sleeping the next time; from any thread. False if that was done already."""


class WaitBackend:
    """How waits sleep, and how they learn of file events. This one is for threads: each sleeps by itself."""

    def new_waker(self) -> Waker:
        """Return the waker of a new wait."""
        return system.AutoResetEvent()

    def subscribe(self, events: Any, on_readable: Callable[[], None]) -> bool:  # noqa: ARG002 - see there
        """Have `on_readable` called whenever `events` is readable; False if a waiting thread must read it instead."""
        return False

    def release(self, events: Any) -> None:
        """Unsubscribe from `events`, and close it."""
        events.close()


THREAD_BACKEND: Final = WaitBackend()


class Wait(Protocol[T_co]):
    """One wait, from its first look to its last. It is used by one thread at a time.

    An operation that changes the store may arm a wait while it still holds the store's lock. Its own look, made under
    that lock, then stands for the first look of the wait.
    """

    def arm(self) -> None:
        """Have every change from now on end the next sleep. It must come before the look."""

    def look(self) -> T_co | NotYet:
        """Return what is waited for, or `NOT_YET`.

        Raises:
            StoreTimeoutError: it is not there, and the time is up.
        """

    def max_sleep(self) -> float:
        """Return for how many seconds to sleep at most; 0.0 when it is time to look.

        It is called again after each sleep, because a sleep may also end for the sake of another waiter.
        """

    def block(self, seconds: float) -> None:
        """Sleep in this thread until woken, or for `seconds`."""

    @property
    def waker(self) -> Waker:
        """What ends a sleep that an event loop makes in the place of `block`."""

    def close(self) -> None:
        """The wait is over: give back what was armed. It may be called twice."""


def block_on(wait: Wait[T]) -> T:
    """Return what `wait` finds, sleeping in this thread."""
    try:
        while True:
            wait.arm()
            found = wait.look()
            if not isinstance(found, NotYet):
                return found
            while (seconds := wait.max_sleep()) > 0:
                wait.block(seconds)
    finally:
        wait.close()


def next_look(wait: Wait[T]) -> tuple[T | NotYet, float]:
    """Do all that `block_on` does between two sleeps; return what was found, or for how long to sleep first.

    An event loop makes this one call in another thread, since each of its parts may block for a moment. The wait is
    closed as soon as it has ended.
    """
    is_over = True
    try:
        while (seconds := wait.max_sleep()) <= 0:
            wait.arm()
            found = wait.look()
            if not isinstance(found, NotYet):
                return found, 0.0
        is_over = False
        return NOT_YET, seconds
    finally:
        if is_over:
            wait.close()
