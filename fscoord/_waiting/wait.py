"""Waits: `WaitRequest`, the request to wait; `Wait`, one wait; `block_on` and `next_look`, the drivers.

A recipe or a collective is written once, as a generator that yields a `WaitRequest` wherever it would wait
(`WaitSteps`). `fscoord.store.run_blocking` runs such a generator in a thread, and `fscoord.aio` runs it in a task of an
event loop. For each request, the store makes a `Wait`. A driver runs the wait, and the answer is sent into the
generator.

A `Wait` decides nothing about how it is driven. It returns for how long to sleep, and has a waker that ends a sleep
early. There are two drivers: `block_on` for threads, which calls ``sleep``, and `next_look` for event loops, which
sleep by themselves. Code that leaves its blocking to a driver is known as "sans-I/O".

A look first arms the wait, so that every later change ends the next sleep, and then tests the condition. So no change
is missed: the test finds a change that came before the arming, and a later change ends the sleep. In the other order, a
change could come between the test and the arming. Then the test would not find it, no writer would end the sleep, and
the sleep would last until the next poll.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from fscoord._runtime import system
from fscoord._waiting.timing import SlowWaitLogger

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


KEYS: Final = "keys"
VALUES: Final = "values"
ITEM: Final = "item"


class NeededRanks:
    """The ranks on which a wait depends, if the value of one key shows which of these ranks are still needed.

    An iteration yields the ranks that were needed at the beginning. A store that does not read the key watches all
    these ranks, so it may report the death of a rank that is not needed any more.

    Args:
        ranks: the ranks that are needed at the beginning.
        key: the key whose value decides, checked.
        judge: returns the ranks that are needed when the key has the given value. If no rank is needed, the wait ends.
            A store may call it under its lock, so it must neither use the store nor raise.
    """

    def __init__(self, ranks: list[int], key: bytes, judge: Callable[[bytes], list[int]]) -> None:
        self._ranks = ranks
        self.key = key
        self.judge = judge

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def with_prefix(self, prefix: bytes) -> NeededRanks:
        """Return the same ranks for a store in which the key has `prefix` before it."""
        return NeededRanks(self._ranks, prefix + self.key, self.judge)


class WaitRequest(NamedTuple):
    """A request to wait for keys of a store.

    Attributes:
        kind: the condition that ends the wait. `KEYS`: each key has a value or a non-empty queue. `VALUES`: each key
            has a value. `ITEM`: a queue has a value.
        keys: the keys, checked, of which the wait needs all; for `ITEM`, the name of the queue. A wait for one of two
            outcomes is a wait for one key, whose value is the outcome.
        timeout: the longest wait, in seconds.
        ranks: for `KEYS`: the wait also ends when one of these ranks is known dead. With `NeededRanks` it also ends
            when no rank is needed any more.
        sessions: for `KEYS`: the wait also ends when one of these sessions is known dead.
        slow_logger: logs warnings if the wait is long. None: the store logs its own warnings.

    The answer for `KEYS` is the list of the dead ranks or sessions. It is empty when all keys are there, or no rank is
    needed any more. The answer for `VALUES` is the list of the values. The answer for `ITEM` is the value that was
    taken from the queue.
    """

    kind: str
    keys: list[bytes]
    timeout: float
    ranks: list[int] | NeededRanks | None = None
    sessions: list[int] | None = None
    slow_logger: SlowWaitLogger | None = None


class ArrivalRequest(NamedTuple):
    """A request to record an arrival under one key, and to wait for another key, which the last arrival sets.

    A store may make one operation of it: the arrival is recorded, and the wait armed, under one hold of its lock. So no
    look is needed between the two. `fscoord._waiting.rounds.is_last` decides which arrival is the last.

    Attributes:
        key: the key of the arrivals, checked.
        token: the token of a rank, which is appended to the value of `key`. Empty: the value is a counter, to which 1
            is added.
        done: the key to wait for, checked.
        world_size: how many must arrive.
        timeout: the longest time from `started` until `done` is set, in seconds. The write itself is limited by the
            timeout of the store, which counts from the write.
        new_slow_logger: returns the logger of the warnings about a long wait, given the time when the wait began. None:
            the store logs its own warnings.
        started: when the call began, by the monotonic clock; None: now.
        waits: whether the request includes the wait. Otherwise it ends with the arrival.
        all_wait: whether every rank waits until all have arrived. Then a store may record their arrivals only at the
            end of the barrier.
        begun: the arrival that `Store._meet` has begun; None: none.

    The answer is the new value of `key` if the caller must decide whether the arrival is the last. Otherwise the answer
    is None, when `done` is set.
    """

    key: bytes
    token: bytes
    done: bytes
    world_size: int
    timeout: float
    new_slow_logger: Callable[[float], SlowWaitLogger] | None = None
    started: float | None = None
    waits: bool = True
    all_wait: bool = True
    begun: object = None


new_tuple: Final = tuple.__new__
"""Makes a named tuple from its class and all its values, in half of the time that the class itself takes."""

Request = WaitRequest | ArrivalRequest

WaitSteps = Generator[Request, Any, T]
"""A generator that yields its requests and returns a `T`. The driver sends it each answer, or raises an error in it."""


class NotYet:
    """The type of `NOT_YET`."""


NOT_YET: Final = NotYet()
"""The result of a look while the condition of the wait does not hold."""


class Waker(Protocol):
    """The object that ends the sleep of one wait."""

    def set(self) -> bool:
        """Wake the waiter, or end its next sleep at once; return False if the waker was set already.

        Any thread may call this method.
        """


class WaitBackend:
    """The way in which waits sleep and receive file events. This class is the backend for threads."""

    new_waker: Callable[[], Waker] = system.AutoResetEvent
    """Returns the waker of a new wait."""

    def subscribe(self, events: Any, on_readable: Callable[[], None]) -> bool:  # noqa: ARG002 - see there
        """Make an event loop call `on_readable` whenever `events` is readable.

        Returns:
            False if there is no event loop, so that a waiting thread must read `events` itself.
        """
        return False

    def release(self, events: Any) -> None:
        """End the subscription to `events`, and close `events`."""
        events.close()


THREAD_BACKEND: Final = WaitBackend()


class Wait(Protocol[T_co]):
    """One wait, from its first look to its last. One thread at a time may use it.

    An operation that changes the store may arm a wait while it still holds the store's lock. Then the read that the
    operation makes under this lock is the first look of the wait.
    """

    def look(self) -> T_co | NotYet:
        """Return the answer to the request, or `NOT_YET` if the condition does not hold.

        Unless the driver must look again at once, every change after this look ends the next sleep.

        Raises:
            StoreTimeoutError: the condition does not hold at the deadline.
        """

    def max_sleep(self) -> float:
        """Return the longest time to sleep, in seconds; 0.0 when the next look is due.

        The driver calls this method again after each sleep, because a sleep may end early although no look is due.
        """

    def sleep(self) -> object:
        """Sleep in this thread until the next look is due, as `max_sleep` says."""

    @property
    def waker(self) -> Waker:
        """The waker that ends a sleep. An event loop sleeps on it and does not call `sleep`."""

    def close(self) -> None:
        """End the wait, and disarm it. This method may be called twice."""


def block_on(wait: Wait[T]) -> T:
    """Carry out `wait`, sleeping in this thread, and return its answer."""
    try:
        while True:
            found = wait.look()
            if not isinstance(found, NotYet):
                return found
            wait.sleep()
    finally:
        wait.close()


def next_look(wait: Wait[T]) -> tuple[T | NotYet, float]:
    """Carry out the part of `wait` between two sleeps, and close the wait if it has ended.

    An event loop makes this call in another thread, because arming and looking may block for a moment.

    Returns:
        The answer and 0.0; or `NOT_YET` and the longest time to sleep before the next call, in seconds.
    """
    is_over = True
    try:
        while (seconds := wait.max_sleep()) <= 0:
            found = wait.look()
            if not isinstance(found, NotYet):
                return found, 0.0
        is_over = False
        return NOT_YET, seconds
    finally:
        if is_over:
            wait.close()
