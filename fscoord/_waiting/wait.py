"""How an operation waits: `WaitRequest`, what it waits for; `Wait`, one wait; `block_on`, which drives it in a thread.

A recipe or a collective is written once, as a generator that yields a `WaitRequest` wherever it would wait
(`WaitSteps`). `fscoord.store.run_blocking` runs such steps in a thread, and `fscoord.aio` runs them in a task of an
event loop. Both have the store make a `Wait` of each request, drive that, and send its answer into the generator.

A `Wait` does everything except sleep: it returns for how long to sleep, and has a waker that ends a sleep early. There
are two drivers, `block_on` for threads and `next_look` for event loops. Code that leaves its blocking to a driver is
known as "sans-I/O".

The order of the calls is what makes a wake-up safe::

    arm     from here on a change wakes this wait
    look    finds every change from before
    sleep   until woken, and for `max_sleep` seconds at most

A change that came before `arm` is found by the look, and one that comes after it ends the sleep. In the other order a
change between the look and the arming would neither be found nor end the sleep, which then lasts until the next poll.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from fscoord._runtime import system
from fscoord._waiting.timing import SlowWaitLogger

__all__ = [
    "ITEM",
    "KEYS",
    "NOT_YET",
    "THREAD_BACKEND",
    "VALUES",
    "BarrierRequest",
    "NotYet",
    "Wait",
    "WaitBackend",
    "WaitRequest",
    "WaitSteps",
    "Waker",
    "block_on",
    "next_look",
]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


KEYS: Final = "keys"
VALUES: Final = "values"
ITEM: Final = "item"


class WaitRequest(NamedTuple):
    """What is waited for.

    Attributes:
        kind: `KEYS`, until each has a value or a non-empty queue; `VALUES` of the keys; or one `ITEM` of a queue.
        keys: the keys, checked; for an item, the name of the queue.
        timeout: the most seconds to wait.
        ranks: for `KEYS`: the wait also ends when one of these ranks is known dead.
        sessions: likewise for sessions.
        slow_logger: logs that this wait is long; without it the store logs that in its own words.

    The answer is the list of the dead ranks or sessions for `KEYS` (empty when all keys are there), the list of the
    values for `VALUES`, and the value for `ITEM`.
    """

    kind: str
    keys: list[bytes]
    timeout: float
    ranks: list[int] | None = None
    sessions: list[int] | None = None
    slow_logger: SlowWaitLogger | None = None


class BarrierRequest(NamedTuple):
    """A call of `fscoord.Store.barrier`, which a store may have in a way of its own. The answer is None."""

    key: bytes
    world_size: int
    timeout: float


WaitSteps = Generator["WaitRequest | BarrierRequest", Any, T]
"""Code that yields what it waits for, is sent the answer, or raises, and ends with a `T`."""


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
