"""`WaitRequest`, a request to wait; `Wait`, one wait; `block_on` and `next_look`, the drivers of waits.

A recipe or a collective is written once, as a generator that yields a `WaitRequest` wherever it must wait
(`WaitSteps`). `fscoord.store.run_blocking` runs this generator in a thread, and `fscoord.aio` runs it in a task of an
event loop. For each request, the store creates a `Wait`. A driver runs the wait, and sends the answer into the
generator.

A `Wait` does not block ("sans-I/O"). A `Wait` returns how long to sleep, and has a waker that ends a sleep early. There
are two drivers. `block_on` blocks a thread, by `Wait.sleep`. `next_look` serves an event loop, which sleeps by itself.

`Wait.look` first arms the wait, and then tests the condition. To *arm* a wait is to request a wake-up at the next
change. So no change is missed: the test finds an earlier change, and a later change ends the next sleep. In the reverse
order, a change between the test and the arming would be missed. Then the sleep would last until the next poll.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from fscoord._runtime import system
from fscoord._waiting.timing import SlowWaitLogger

if TYPE_CHECKING:
    from fscoord._waiting.changes import Watch

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


KEYS: Final = "keys"
VALUES: Final = "values"
ITEM: Final = "item"
CHANGES: Final = "changes"


class NeededRanks:
    """Ranks whose death ends a wait. The value of `key` shows which of these ranks the wait still needs.

    Iteration yields the ranks that were needed at the beginning. A store that ignores `key` watches all of these ranks,
    so the store may report the death of a rank that is not needed any more.

    Args:
        ranks: the ranks that are needed at the beginning.
        key: the key, as returned by `key_bytes`.
        judge: returns the ranks that are still needed, given the value of `key`. If no rank is needed, the wait ends. A
            store may call this function under the store's lock, so the function must neither use the store nor raise an
            exception.
    """

    def __init__(self, ranks: list[int], key: bytes, judge: Callable[[bytes], list[int]]) -> None:
        self._ranks = ranks
        self.key = key
        self.judge = judge

    def __iter__(self) -> Iterator[int]:
        return iter(self._ranks)

    def with_prefix(self, prefix: bytes) -> NeededRanks:
        """Return a copy of this object with `prefix` prepended to the key."""
        return NeededRanks(self._ranks, prefix + self.key, self.judge)


class WaitRequest(NamedTuple):
    """A request to wait for keys of a store.

    Attributes:
        kind: the condition that ends the wait. `KEYS`: each key has a value or a non-empty queue. `VALUES`: each key
            has a value. `ITEM`: a queue has a value. `CHANGES`: a watch has found a change.
        keys: the keys, as returned by `key_bytes`. The wait ends when all keys fulfil the condition. For `ITEM`: the
            name of the queue. For `CHANGES`: no keys.
        timeout: the longest wait, in seconds.
        ranks: for `KEYS`: the wait also ends when one of these ranks is known dead. With `NeededRanks` it also ends
            when no rank is needed any more.
        sessions: for `KEYS`: the wait also ends when one of these sessions is known dead.
        slow_logger: logs warnings if the wait is long. None: the store logs its own warnings.
        watch: for `CHANGES`: the `~fscoord.Watch`.

    The answer for `KEYS` is the list of the dead ranks or sessions. This list is empty if all keys are present, or if
    no rank is needed any more. The answer for `VALUES` is the list of the values. The answer for `ITEM` is the value
    that was removed from the queue. The answer for `CHANGES` is True.
    """

    kind: str
    keys: list[bytes]
    timeout: float
    ranks: list[int] | NeededRanks | None = None
    sessions: list[int] | None = None
    slow_logger: SlowWaitLogger | None = None
    watch: Watch | None = None


class ArrivalRequest(NamedTuple):
    """A request to arrive at a barrier: record an arrival in `key`, and wait for `done`. The last rank sets `done`.

    A store may record the arrival and begin the wait in one operation, under one hold of its lock.
    `fscoord._waiting.rounds.is_last` tells which arrival is the last.

    Attributes:
        key: the key of the arrivals, as returned by `key_bytes`.
        token: the token of the rank, to be appended to the value of `key`. Empty: the value is a counter, to which 1 is
            added.
        done: the key to wait for, as returned by `key_bytes`.
        world_size: how many ranks must arrive.
        timeout: the longest time from `started` until `done` is set, in seconds. The write has a separate limit: the
            timeout of the store, from the beginning of the write.
        new_slow_logger: returns the logger of warnings about a long wait, given the time when the wait began. None: the
            store logs its own warnings.
        started: when the call began, by the monotonic clock; None: now.
        waits: whether to wait for `done`. If False, the request ends when the arrival is recorded.
        all_wait: whether every rank waits for `done`. If True, a store may postpone the records of all arrivals to the
            end of the barrier.
        begun: the unfinished arrival that `Store._meet` has returned; None: a new arrival.

    The answer is the new value of `key` if `is_last` returns None for this value. Then the caller must parse the value,
    to find out whether its arrival is the last. In all other cases the answer is None.
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
"""Creates a named tuple from its class and a tuple of all values, in half the time of a call of the class."""

Request = WaitRequest | ArrivalRequest

WaitSteps = Generator[Request, Any, T]
"""A generator that yields requests and returns a `T`. The driver sends each answer into the generator, or throws an
error into it."""


class NotYet:
    """The type of `NOT_YET`."""


NOT_YET: Final = NotYet()
"""The result of `Wait.look` if the condition does not hold."""


class Waker(Protocol):
    """Ends the sleep of one wait."""

    def set(self) -> bool:
        """Wake the waiter, or end the next sleep of an awake waiter at once. Return False if the waker was set already.

        Any thread may call this method.
        """


class WaitBackend:
    """Defines how waits sleep and receive file events. This class is the backend for threads."""

    new_waker: Callable[[], Waker] = system.AutoResetEvent
    """Returns the waker of a new wait."""

    def subscribe(self, events: Any, on_readable: Callable[[], None]) -> bool:  # noqa: ARG002 - see there
        """Make an event loop call `on_readable` whenever `events` is readable.

        Returns:
            False if there is no event loop. Then a waiting thread must read `events`.
        """
        return False

    def release(self, events: Any) -> None:
        """End the subscription to `events`, and close `events`."""
        events.close()


THREAD_BACKEND: Final = WaitBackend()


class Wait(Protocol[T_co]):
    """One wait. Only one thread at a time may use it.

    To arm a wait is to request its wake-up at the next change of the store. An operation that changes the store may arm
    a wait while the operation still holds the store's lock. Then the operation has tested the condition under this
    lock, and the wait needs no `look` before its first sleep.
    """

    def look(self) -> T_co | NotYet:
        """Test the condition. Return the result of the wait, or `NOT_YET` if the condition does not hold.

        A change that comes after this call ends the next sleep. If `max_sleep` is 0.0, there is no next sleep.

        Raises:
            StoreTimeoutError: the condition does not hold at the deadline.
        """

    def max_sleep(self) -> float:
        """Return the longest time to sleep before the next call of `look`, in seconds. 0.0: call `look` now.

        The driver calls this method again after each sleep, because a sleep may end too early.
        """

    def sleep(self) -> object:
        """Sleep in this thread for `max_sleep` seconds, or until the waker is set."""

    @property
    def waker(self) -> Waker:
        """The waker that ends a sleep. An event loop waits for the waker, and does not call `sleep`."""

    def close(self) -> None:
        """End the wait, so that no change of the store wakes it any more. This method may be called twice."""


def block_on(wait: Wait[T]) -> T:
    """Run `wait` to its end in this thread, and return its answer."""
    try:
        while True:
            found = wait.look()
            if not isinstance(found, NotYet):
                return found
            wait.sleep()
    finally:
        wait.close()


def next_look(wait: Wait[T]) -> tuple[T | NotYet, float]:
    """Run `wait` until it must sleep, and close the wait if it has ended.

    An event loop makes this call in another thread, because `Wait.look` may block for a moment.

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
