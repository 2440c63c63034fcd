"""Waits: `WaitRequest`, the request to wait; `Wait`, one wait; `block_on` and `next_look`, the drivers.

A recipe or a collective is written once, as a generator that yields a `WaitRequest` wherever it would wait
(`WaitSteps`). `fscoord.store.run_blocking` runs such a generator in a thread, and `fscoord.aio` runs it in a task of an
event loop. For each request, the store makes a `Wait`. A driver runs the wait, and the answer is sent into the
generator.

A `Wait` decides nothing about how it is driven. It returns for how long to sleep, and has a waker that ends a sleep
early. There are two drivers: `block_on` for threads, which calls ``sleep``, and `next_look` for event loops, which
sleep by themselves. Code that leaves its blocking to a driver is known as "sans-I/O".

The order of the calls makes sure that no change is missed::

    arm     from here on a change wakes this wait
    look    finds every change from before
    sleep   until woken, and for `max_sleep` seconds at most

The look finds a change that came before `arm`. A change that comes after `arm` ends the sleep. In the other order, a
change could come between the look and `arm`. Then the look would not find it, no writer would end the sleep, and the
sleep would last until the next poll.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from fscoord._runtime import system
from fscoord._waiting.timing import SlowWaitLogger

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


COUNT: Final = "count"
APPEND: Final = "append"
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
        keys: the keys, checked; for `ITEM`, the name of the queue.
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


class BarrierRequest(NamedTuple):
    """A request to call `fscoord.Store.barrier`, which a store may implement in its own way. The answer is None."""

    key: bytes
    world_size: int
    timeout: float


class LastOfCount:
    """Decides by a counter whether an arrival is the last of `world_size` arrivals; see `ArrivalRequest.judge`."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __call__(self, count: bytes) -> bool | None:
        """Return whether the arrival that made the counter `count` is the last; None if there are too many arrivals."""
        arrived = int(count)
        return arrived == self.world_size if arrived <= self.world_size else None


class LastOfRanks:
    """Decides by the tokens of ranks whether an arrival is the last; see `ArrivalRequest.judge`.

    Args:
        own: the token of the arrival: ``RANK/WORLD_SIZE`` and a space.
        world_size: how many ranks there are.
    """

    def __init__(self, own: bytes, world_size: int) -> None:
        self.own = own
        self.world_size = world_size

    def __call__(self, text: bytes) -> bool | None:
        """Return whether the arrival at the end of `text` is the last; None if every token must be examined.

        The two usual cases are decided without a loop over all tokens, because the other ranks wait for this call.
        """
        own, world_size = self.own, self.world_size
        count, end = text.count(b" "), own[own.index(b"/") :]
        if count == text.count(end) and b"-" not in text:
            if count < world_size:
                return False
            if count == world_size and _are_all(text.split(end)[:-1], world_size):
                return True if text.endswith(b" " + own) or text == own else None
        return None


def _are_all(names: list[bytes], world_size: int) -> bool:
    if not all(names) or len(max(names, key=len)) > 19 or not b"".join(names).isdigit():  # not an arrival
        return False
    return set(map(int, names)) == set(range(world_size))


class ArrivalRequest(NamedTuple):
    """A request to record an arrival under one key, and to wait for another key, which the last arrival sets.

    A store may make one operation of it: the arrival is recorded, and the wait armed, under one hold of its lock. So no
    look is needed between the two.

    Attributes:
        kind: how the arrival is recorded. `COUNT`: 1 is added to the counter `key`. `APPEND`: `piece` is appended.
        key: the key of the arrivals, checked.
        piece: the arrival, for `APPEND`.
        done: the key to wait for, checked.
        judge: returns, for the new value of `key`, whether this arrival is the last, which sets `done`; None if the
            caller must decide. It is called under the lock of the store, so it must not use the store. A
            `LastOfCount` or a `LastOfRanks` can be evaluated in another process.
        timeout: the longest time from `started` until `done` is set, in seconds. The write itself is limited by the
            timeout of the store, which counts from the write.
        new_slow_logger: returns the logger of the warnings about a long wait, given the time when the wait began. None:
            the store logs its own warnings.
        started: when the call began, by the monotonic clock; None: now.

    The answer is the new value of `key` if `judge` returned None. Otherwise the answer is None, when `done` is set.
    """

    kind: str
    key: bytes
    piece: bytes
    done: bytes
    judge: Callable[[bytes], bool | None]
    timeout: float
    new_slow_logger: Callable[[float], SlowWaitLogger] | None = None
    started: float | None = None


new_tuple: Final = tuple.__new__
"""Makes a named tuple from its class and all its values, in half of the time that the class itself takes."""

Request = WaitRequest | BarrierRequest | ArrivalRequest

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

    def arm(self) -> None:
        """Make every later change end the next sleep. The driver must call this method before the look."""

    def look(self) -> T_co | NotYet:
        """Return the answer to the request, or `NOT_YET` if the condition does not hold.

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
            wait.arm()
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
            wait.arm()
            found = wait.look()
            if not isinstance(found, NotYet):
                return found, 0.0
        is_over = False
        return NOT_YET, seconds
    finally:
        if is_over:
            wait.close()
