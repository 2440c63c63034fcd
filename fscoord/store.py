"""`Store`: the contract of all stores; `Capabilities`, in which they differ; `Member`, one session of a store.

Names and meanings follow torch's c10d ``Store``. Where c10d's own stores disagree with each other, the docstring of the
operation says which meaning holds here. This module knows no concrete store.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from datetime import timedelta
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar, cast

from fscoord._arguments import (
    DEFAULT_TIMEOUT,
    VALUE_MAX,
    CounterRangeError,
    Key,
    NotACounterError,
    Timeout,
    Value,
    check_positive,
    key_bytes,
    key_text,
    keys_bytes,
    to_seconds,
    to_timedelta,
)
from fscoord._runtime import system
from fscoord._waiting.wait import KEYS, BarrierRequest, Wait, WaitBackend, WaitRequest, WaitSteps
from fscoord.errors import BarrierError, StoreTimeoutError

__all__ = [
    "Capabilities",
    "Member",
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
"""Interval of polls of a store that can't report changes."""

DEATH_POLL_S: Final = 0.02
"""Interval at which a wait asks for deaths, on a store that can't report them."""


class Capabilities(NamedTuple):
    """What a kind of store offers beyond the contract, and where it offers less.

    The defaults describe a store that keeps exactly the contract. The suite in ``fscoord.testing`` tests each store for
    the capabilities that it claims, and the documentation's table "Stores compared" is made from them.

    Attributes:
        processes: several processes can share one store.
        hosts: several hosts can share one store.
        durable: there is an option by which acknowledged writes survive a power failure.
        survives_handles: the data is still there after the last handle was closed and another one is opened.
        survives_first_handle: the store does not end with its first handle, whose process may run its server.
        sessions: the store lists its sessions and, where `Store.has_liveness` is true, tells which are dead.
        certain: it is always known whether a failed write has taken effect. Otherwise its error may have
            ``maybe_applied`` set.
        lists_any_key: `Store.list_keys` lists keys that are not UTF-8. Otherwise it raises if there are any.
        deletes_at_once: `Store.delete_key` removes the value and the queue of a key in one step.
        value_max: the longest value, in bytes. It may also limit the size of one `Store.multi_set`.
    """

    processes: bool = False
    hosts: bool = False
    durable: bool = False
    survives_handles: bool = False
    survives_first_handle: bool = True
    sessions: bool = False
    certain: bool = False
    lists_any_key: bool = True
    deletes_at_once: bool = True
    value_max: int = VALUE_MAX


class Member(NamedTuple):
    """One session of a store: a handle that has registered.

    Attributes:
        number: the number of the session; none is used twice.
        host: the name of its host.
        pid: the id of its process.
        rank: the last rank that it announced, or None.
        label: the label that its handle was opened with, or ``""``.
        since: the time of its registration, in seconds since the epoch by its host's clock; for people only.
        alive: ``"yes"``, ``"no"`` (its process has ended or the handle was closed) or ``"unknown"``.
        found_dead: the time of its death record, in seconds since the epoch by the recording host's clock, or None.
    """

    number: int
    host: str
    pid: int
    rank: int | None
    label: str
    since: float
    alive: str
    found_dead: float | None = None


CALL_MAX_S: Final = 20.0
"""The longest call that waits for a request with a logger of its own: shorter than waits that a store itself logs."""


class Store(ABC):
    """Named values, counters and queues that several processes share.

    Keys are ``str`` or ``bytes``: a ``str`` is its UTF-8 bytes (with ``surrogateescape``), so ``"k"`` and ``b"k"``
    are one key. Values are given as ``str`` or any bytes-like object and returned as ``bytes``. Timeouts are seconds or
    `timedelta`; ``None`` means the store's own, ``0`` look once, ``math.inf`` or ``timedelta.max`` no limit.

    Every operation takes effect once, between its call and its return. Every handle may be used by several threads.
    Bad arguments change nothing: `TypeError` for a wrong type, `ValueError` for a wrong value,
    `~fscoord.LimitExceededError` for a key over 1 KiB or a value over 64 MiB.

    Any operation may raise `~fscoord.StoreTimeoutError` if it can't reach or lock the store within the store's
    timeout, and `~fscoord.StoreError` or one of its kinds if the store fails. The ``maybe_applied`` of a failed write
    tells whether it may have taken effect.
    """

    capabilities: Capabilities = Capabilities()
    """What this kind of store offers; see `Capabilities`."""

    _timeout: float = DEFAULT_TIMEOUT

    _typical_call_s: float = math.inf
    """How many seconds a call that does not wait for others usually takes at most; 0: it only touches memory."""

    @abstractmethod
    def set(self, key: Key, value: Value) -> None:
        """Set the value of `key` to `value`."""

    @abstractmethod
    def get(self, key: Key) -> bytes:
        """Return the value of `key`. If there is none, wait for it up to the store's timeout.

        Raises:
            StoreTimeoutError: the key did not appear.
        """

    @abstractmethod
    def add(self, key: Key, amount: int) -> int:
        """Add `amount` to the integer in `key` and return the sum; a missing key counts as 0.

        The sum is kept as decimal text, so `get` returns e.g. ``b"-2"``.

        Raises:
            ValueError: the value is not an integer in decimal text. It is unchanged. (c10d accepts ``"12abc"``.)
            OverflowError: the sum does not fit in 64 bits. The value is unchanged. (c10d wraps.)
        """

    @abstractmethod
    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` if its value is `expected`; return the value that it has afterwards.

        If the key is missing, an empty `expected` creates it. Any other `expected` writes nothing and is returned, as
        in c10d.
        """

    @abstractmethod
    def check(self, keys: Iterable[Key]) -> bool:
        """Return at once whether every one of `keys` has a value or a non-empty queue."""

    @abstractmethod
    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """Wait until `check` of `keys` is true, under one deadline.

        Raises:
            StoreTimeoutError: its ``keys`` names every key that is still missing.
        """

    @abstractmethod
    def delete_key(self, key: Key) -> bool:
        """Remove the value and the queue of `key`; return whether it had either."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys with a value. Queues and internal keys are not counted, as in c10d."""

    @abstractmethod
    def list_keys(self, prefix: Key = "") -> list[str]:
        """Return the keys with a value that begin with `prefix`, as ``str``, in the order of their bytes."""

    @abstractmethod
    def append(self, key: Key, value: Value) -> None:
        """Append `value` to the value of `key`, atomically; a missing key counts as empty."""

    @abstractmethod
    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        """Return the values of `keys`, in their order. Wait for missing ones under one deadline, the store's timeout.

        Raises:
            StoreTimeoutError: its ``keys`` names every key that is still missing.
        """

    @abstractmethod
    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """Set every key to its value, in one step.

        Raises:
            ValueError: the numbers of keys and values differ; nothing is written.
        """

    @abstractmethod
    def queue_push(self, key: Key, value: Value) -> None:
        """Append `value` to the queue `key`. A queue and a value may have the same name."""

    @abstractmethod
    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        """Remove the oldest value from the queue `key` and return it. Each value is returned to one caller only.

        Raises:
            QueueEmptyError: with ``block=False``, the queue is empty.
            StoreTimeoutError: with ``block=True``, the queue stayed empty for the store's timeout.
        """

    @abstractmethod
    def queue_len(self, key: Key) -> int:
        """Return the number of values in the queue `key`."""

    @abstractmethod
    def clone(self: S) -> S:
        """Return another handle on the same store, with the same timeout and independent of this one."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this handle. Closing it again does nothing; any other use raises
        `~fscoord.StoreClosedError`.
        """

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers have called this with `key`. A key can be used for one barrier only.

        The keys ``{key}/num_members`` and ``{key}/last_member`` are those of c10d, so that processes of both libraries
        can use one barrier.

        Raises:
            BarrierError: more than `world_size` callers arrived, or a key of the barrier has a value of another kind.
            StoreTimeoutError: fewer arrived before the deadline.
        """
        run_blocking(
            self, self._barrier_steps(key, world_size, self._timeout if timeout is None else to_seconds(timeout))
        )

    def _barrier_steps(self, key: Key, world_size: int, timeout: float) -> WaitSteps[None]:
        check_positive("world_size", world_size)
        name = key_bytes(key)
        counter = key_bytes(name + b"/num_members")
        try:
            arrived = self.add(counter, 1)
        except (NotACounterError, CounterRangeError) as error:
            raise BarrierError(f"{error}, so it is not a barrier's counter; give every barrier its own key") from error
        if arrived > world_size:
            raise BarrierError(
                f"barrier {key_text(name)!r} got arrival {arrived} of {world_size}: its key was used before, or by too"
                " many callers; give every barrier its own key"
            )
        if arrived == world_size:
            self.set(name + b"/last_member", b"1")
        else:
            yield WaitRequest(KEYS, [name + b"/last_member"], timeout)

    @property
    def has_liveness(self) -> bool:
        """Whether this store can tell which sessions are dead. If not, it reports none as dead."""
        return False

    def register(self) -> int:
        """Register this handle as a session, unless it is one already, and return the session's number.

        The first call writes to the store. On a store without sessions it does nothing, and the number is 0.

        Raises:
            StoreError: the handle can't write, because it is read-only.
            SessionDeadError: the store has recorded this handle's session as dead.
        """
        return 0

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:  # noqa: ARG002 - see `has_liveness`
        """Return all sessions, in the order of their numbers; none on a store without sessions.

        It registers this handle and records the deaths that it finds, unless the handle is read-only.

        Args:
            ranks: return only sessions that have announced one of these ranks.
        """
        return []

    def announce_rank(self, rank: int) -> None:  # noqa: B027 - a store without sessions does nothing
        """Record that this handle is rank `rank`. A handle may be several ranks, and several handles one rank."""

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:  # noqa: ARG002 - see `has_liveness`
        """Return those of `ranks` that are known dead: some session announced the rank, and all that did are dead.

        A rank that no session announced is not known dead, and neither is one with a session whose state is unknown.
        All handles get the same answer, because a death is recorded before it is returned.
        """
        return []

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:  # noqa: ARG002 - see `has_liveness`
        """Return those of the sessions `numbers` that are known dead, as `dead_ranks` does for ranks."""
        return []

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Wait for `keys` as `wait` does, but end the wait as soon as one of `ranks` is known dead.

        Returns:
            The ranks that are known dead, if keys are missing; an empty list if all keys are there.

        Raises:
            StoreTimeoutError: neither happened before the deadline.
        """
        needed = list(ranks)
        limit = self._timeout if timeout is None else to_seconds(timeout)
        return self._wait_beside(list(keys_bytes(keys)), limit, lambda: self.dead_ranks(needed))

    def wait_sessions(self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Wait as `wait_alive` does, but for the sessions `numbers` instead of ranks, and return those known dead."""
        needed = list(numbers)
        limit = self._timeout if timeout is None else to_seconds(timeout)
        return self._wait_beside(list(keys_bytes(keys)), limit, lambda: self.dead_sessions(needed))

    def _wait_beside(self, names: list[bytes], limit: float, find: Callable[[], list[int]]) -> list[int]:
        """Wait for the keys `names`, or until `find` returns the dead; return those."""
        if not self.has_liveness:
            self.wait(names, limit)
            return []
        started = system.time.monotonic()
        while True:
            left = limit - (system.time.monotonic() - started)
            try:
                self.wait(names, max(0.0, min(left, DEATH_POLL_S)))
                return []
            except StoreTimeoutError:
                dead = find()
                if dead:
                    return dead
                if left <= DEATH_POLL_S:
                    raise

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
        """The time that operations wait by default; ``timedelta.max`` is no limit."""
        return to_timedelta(self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the time that operations of this handle wait by default."""
        self._timeout = to_seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return whether the store has `append`, `multi_get` and `multi_set`; true for every store of fscoord."""
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
        # Closed here, and not when it is collected: its `finally` blocks release what the generator has acquired. An
        # exception that the caller keeps also keeps this frame, and the frame keeps the generator.
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
