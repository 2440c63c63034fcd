"""`Store`: the contract that every store keeps.

The names and their meaning follow torch's c10d ``Store``; where c10d's own stores disagree with each other, the
meaning chosen is stated here, once. This module knows no concrete store.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, TypeVar, cast

from fscoord._runtime import system
from fscoord._waiting.request import KEYS, BarrierRequest, WaitRequest, WaitSteps
from fscoord._waiting.wait import Wait, WaitBackend
from fscoord.arguments import (
    DEFAULT_TIMEOUT,
    CounterRangeError,
    Key,
    NotACounterError,
    Timeout,
    Value,
    duration,
    key_bytes,
    key_text,
    positive,
    seconds,
)
from fscoord.capabilities import Capabilities
from fscoord.errors import BarrierError, StoreTimeoutError
from fscoord.members import Liveness

__all__ = [
    "Store",
    "barrier_steps",
    "new_wait",
    "notifier_for",
    "run_blocking",
    "typical_call_s",
    "wait_for_change",
    "wait_on",
]

S = TypeVar("S", bound="Store")
T = TypeVar("T")

POLL_INTERVAL_S: Final = 0.1
"""How often to look at a store that does not tell when something changes."""

CALL_MAX_S: Final = 20.0
"""The longest call that waits for a request with a logger of its own: shorter than waits that a store itself logs."""


class Store(Liveness):
    """Named values, counters and queues that several processes share.

    Keys are ``str`` or ``bytes``: a ``str`` is its UTF-8 bytes (with ``surrogateescape``), so ``"k"`` and ``b"k"``
    are one key. Values go in as ``str`` or any bytes-like object and come out as ``bytes``. Timeouts are seconds or
    `timedelta`; ``None`` means the store's own, ``0`` look once, ``math.inf`` or ``timedelta.max`` no limit.

    Every operation takes effect once, between its call and its return. Every handle may be used by several threads.
    Bad arguments change nothing: `TypeError` for a wrong type, `ValueError` for a wrong value,
    `~fscoord.LimitExceededError` for a key over 1 KiB or a value over 64 MiB.

    Any operation may raise `~fscoord.StoreTimeoutError` when the store itself can't be had within the store's
    timeout, and `~fscoord.StoreError` or one of its kinds when the store fails. A failed write's ``maybe_applied``
    says whether it may have taken effect.
    """

    capabilities: Capabilities = Capabilities()
    """In what this kind of store differs from others; see `Capabilities`."""

    _timeout: float = DEFAULT_TIMEOUT

    _typical_call_s: float = math.inf
    """How many seconds a call that does not wait for others usually takes at most; 0: it only touches memory."""

    @abstractmethod
    def set(self, key: Key, value: Value) -> None:
        """Give `key` the value `value`, whatever it had before."""

    @abstractmethod
    def get(self, key: Key) -> bytes:
        """Return the value of `key`, waiting up to the store's timeout for somebody to set it.

        Raises:
            StoreTimeoutError: the key did not appear.
        """

    @abstractmethod
    def add(self, key: Key, amount: int) -> int:
        """Add `amount` to the integer in `key` and return the sum; a missing key counts as 0.

        The sum is kept as decimal text, so `get` returns e.g. ``b"-2"``.

        Raises:
            ValueError: the value is not an integer in decimal text; it is left as it is. (c10d accepts ``"12abc"``.)
            OverflowError: the sum does not fit in 64 bits; the value is left as it is. (c10d wraps.)
        """

    @abstractmethod
    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` if its value is `expected`; return the value it has afterwards.

        On a missing key an empty `expected` creates it; any other `expected` writes nothing and is returned itself,
        as in c10d.
        """

    @abstractmethod
    def check(self, keys: Iterable[Key]) -> bool:
        """Return at once whether every one of `keys` has a value or a non-empty queue."""

    @abstractmethod
    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """Wait until `check` of `keys` is true. One deadline holds for all of them.

        Raises:
            StoreTimeoutError: its ``keys`` names every key that is still missing.
        """

    @abstractmethod
    def delete_key(self, key: Key) -> bool:
        """Remove `key`, its value and its queue; return whether there was anything to remove."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return how many keys have a value. Nothing internal is counted, and queues are not (as in c10d)."""

    @abstractmethod
    def list_keys(self, prefix: Key = "") -> list[str]:
        """Return the keys with a value that begin with `prefix`, as text, in the order of their bytes."""

    @abstractmethod
    def append(self, key: Key, value: Value) -> None:
        """Append `value` to the value of `key`, atomically; a missing key counts as empty."""

    @abstractmethod
    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        """Return the values of `keys`, in their order, waiting for all of them under one deadline.

        Raises:
            StoreTimeoutError: its ``keys`` names every key that is still missing.
        """

    @abstractmethod
    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """Set every key to its value, all at once or not at all.

        Raises:
            ValueError: there are not as many values as keys; nothing is written.
        """

    @abstractmethod
    def queue_push(self, key: Key, value: Value) -> None:
        """Append `value` to the queue `key`. A queue and a value of one name do not touch each other."""

    @abstractmethod
    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Take the oldest value from the queue `key`; each is given out exactly once.

        Raises:
            QueueEmptyError: with ``block=False``, the queue is empty.
            StoreTimeoutError: with ``block=True``, it stayed empty for the store's timeout.
        """

    @abstractmethod
    def queue_len(self, key: Key) -> int:
        """Return how many values the queue `key` holds."""

    @abstractmethod
    def clone(self: S) -> S:
        """Return an independent handle on the same store, with the same timeout, for use from another thread."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the handle holds. Closing twice is harmless; any other use afterwards raises
        `~fscoord.StoreClosedError`.
        """

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers have called this with `key`. A key serves once.

        The keys ``{key}/num_members`` and ``{key}/last_member`` are c10d's, so that both can meet at one barrier.

        Raises:
            BarrierError: more than `world_size` callers came, or under the barrier's keys stands something else.
            StoreTimeoutError: not all came.
        """
        run_blocking(self, self._barrier_steps(key, world_size, self._timeout if timeout is None else seconds(timeout)))

    def _barrier_steps(self, key: Key, world_size: int, timeout: float) -> WaitSteps[None]:
        positive("world_size", world_size)
        name = key_bytes(key)
        counter = key_bytes(name + b"/num_members")
        try:
            arrived = self.add(counter, 1)
        except (NotACounterError, CounterRangeError) as error:
            raise BarrierError(f"{error}; it is no barrier's, so give every barrier a key of its own") from error
        if arrived > world_size:
            raise BarrierError(
                f"barrier {key_text(name)!r} got arrival {arrived} of {world_size}: it was used before, or by too many;"
                " give every barrier a key of its own"
            )
        if arrived == world_size:
            self.set(name + b"/last_member", b"1")
        else:
            yield WaitRequest(KEYS, [name + b"/last_member"], timeout)

    def _wait(self, request: WaitRequest) -> Any:
        """Carry out `request` in this thread, and return its answer; see `WaitRequest`.

        A store with waits of its own overrides this. Here the public methods wait, which know requests for keys only.
        """
        slow_logger = request.slow_logger
        if slow_logger is None:
            return self._wait_in_call(request, request.timeout)
        ends = system.time.monotonic() + request.timeout
        while True:
            left = max(0.0, ends - system.time.monotonic())
            timeout = min(left, slow_logger.until_next(), CALL_MAX_S)
            try:
                return self._wait_in_call(request, timeout)
            except StoreTimeoutError:
                if left <= timeout:
                    raise
                slow_logger.warn_if_due()

    def _wait_in_call(self, request: WaitRequest, timeout: float) -> list[int]:
        if request.sessions is not None:
            return self.wait_sessions(request.keys, request.sessions, timeout)
        if request.ranks is not None:
            return self.wait_alive(request.keys, request.ranks, timeout)
        self.wait(request.keys, timeout)
        return []

    def _wait_for_change(self, known: object, timeout: float) -> object:
        """Wait until something may have changed since the call that returned `known`, or for `timeout` seconds.

        Return the value to pass as `known` the next time; with None return at once. A store that learns of no changes
        sleeps for `POLL_INTERVAL_S`, and may have changed then.
        """
        if known is not None:
            system.time.sleep(min(POLL_INTERVAL_S, timeout))
        return True

    def _notifier_for(self, backend: WaitBackend) -> Any:  # noqa: ARG002 - see there
        """Return what wakes the waits of `backend`, for `_new_wait`; None if this store waits in its calls only."""
        return None

    def _new_wait(self, request: WaitRequest, notifier: Any) -> Wait[Any]:
        """Return the wait that carries out `request`, woken by what `_notifier_for` returned."""
        raise TypeError(
            f"{type(self).__name__} has no notifier {notifier!r}, and waits for {request} in its calls only"
        )

    @property
    def timeout(self) -> timedelta:
        """How long operations wait by default; no limit is ``timedelta.max``."""
        return duration(self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set how long operations of this handle wait when they are not told otherwise."""
        self._timeout = seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return whether `append`, `multi_get` and `multi_set` are there. They are, on every store of fscoord."""
        return True

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


# For the modules of this package. The hooks themselves are for the stores, which override them.


def run_blocking(store: Store, steps: WaitSteps[T]) -> T:
    """Return what `steps` ends with, after waiting in this thread for each of its requests."""
    try:
        request = next(steps)
        while True:
            try:
                answer = wait_on(store, request)
            except BaseException as error:  # noqa: BLE001 - it comes out of `steps`, unless it is caught there
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        return cast(T, end.value)
    finally:
        # At once, and not when it is collected: an exception that is kept also keeps this frame, and with it the
        # generator, whose `finally` blocks give back what it has taken.
        steps.close()


def wait_on(store: Store, request: WaitRequest | BarrierRequest) -> Any:
    """Carry out `request` in this thread, and return its answer."""
    if isinstance(request, WaitRequest):
        return store._wait(request)
    store.barrier(*request)
    return None


def barrier_steps(store: Store, request: BarrierRequest) -> WaitSteps[None]:
    """Return the steps of `Store.barrier`."""
    return store._barrier_steps(*request)


def wait_for_change(store: Store, known: object, timeout: float) -> object:
    """Wait until something may have changed in `store` since the call that returned `known`; None: return at once."""
    return store._wait_for_change(known, timeout)


def notifier_for(store: Store, backend: WaitBackend) -> Any:
    """Return what wakes the waits of `backend` on `store`, for `new_wait`; None if `store` waits in its calls only."""
    return store._notifier_for(backend)


def new_wait(store: Store, request: WaitRequest, notifier: Any) -> Wait[Any]:
    """Return the wait that carries out `request` on `store`, woken by what `notifier_for` returned."""
    return store._new_wait(request, notifier)


def typical_call_s(store: Store) -> float:
    """Return how many seconds a call that does not wait for others usually takes at most; 0: it only touches memory."""
    return store._typical_call_s
