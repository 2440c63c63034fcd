"""The contract of all stores: `Store`, the base class; `Capabilities`, optional features; `Member`, a session.

`StoreView` is the base class of stores that keep their data in another store, such as `PrefixStore`.

The operations have the names and the semantics of torch's c10d ``Store``. Where the stores of c10d differ from each
other, the docstring of the operation specifies the semantics here. This module does not depend on any particular store.

A *hook* is a private method or attribute of `Store` that stores override and other modules of this package use.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial, wraps
from itertools import islice
from types import EllipsisType, MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, TypeVar, cast

from fscoord._arguments import (
    DEFAULT_TIMEOUT,
    KEY_MAX,
    VALUE_MAX,
    AddedKey,
    ComparedKey,
    CounterRangeError,
    Key,
    NotACounterError,
    SetKey,
    Timeout,
    Transaction,
    Value,
    check_positive,
    key_bytes,
    key_text,
    keys_bytes,
    pairs_bytes,
    to_seconds,
    to_timedelta,
    transaction_of,
    value_bytes,
)
from fscoord._runtime import system, tracing
from fscoord._waiting.awaited import ShownWait
from fscoord._waiting.changes import Position, Watch
from fscoord._waiting.rounds import is_last
from fscoord._waiting.wait import (
    CHANGES,
    ITEM,
    KEYS,
    VALUES,
    ArrivalRequest,
    NeededRanks,
    Request,
    Wait,
    WaitBackend,
    WaitRequest,
    WaitSteps,
    new_tuple,
)
from fscoord.errors import BarrierError, StoreError, StoreTimeoutError, UsedBeforeError

D = TypeVar("D")
F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound="Store")
T = TypeVar("T")

NOTHING: Final[MappingProxyType[Any, Any]] = MappingProxyType({})

DEATH_POLL_S: Final = 0.02
"""The interval in seconds at which a wait checks for dead sessions, on a store that can't report deaths."""


class Capabilities(NamedTuple):
    """The optional features and the limits of one kind of store.

    The defaults describe a store without any optional feature. The test suite in ``fscoord.testing`` checks that a
    store has the capabilities that it claims. The table "Stores compared" in the documentation shows the capabilities.

    Attributes:
        processes: several processes can share one store.
        hosts: several hosts can share one store.
        durable: an option makes acknowledged writes survive a power failure.
        survives_handles: the data remains after all handles are closed, and a new handle finds the data.
        survives_first_handle: the store continues after its first handle is closed. If False, the process of the first
            handle runs the server.
        sessions: the store lists its sessions. If `Store.has_liveness` is true, the store also reports which sessions
            are dead.
        knows_write_outcome: after a failed write, the store always knows whether the write took effect. The errors of
            such a store never have ``maybe_applied`` set.
        lists_any_key: `Store.list_keys` lists keys that are not UTF-8. If False, `Store.list_keys` raises an error if a
            key is not UTF-8.
        deletes_at_once: `Store.delete_key` removes the value and the queue of a key in one step.
        changes_conditionally: `Store.create`, `Store.pop` and `Store.delete_key` with ``expected`` work, each in one
            step. If False, these operations raise `StoreError`.
        transacts: `Store.transact` works. If False, it raises `StoreError`.
        reports_changes: `Store.watch` works. If False, it raises `StoreError`.
        value_max: the longest value, in bytes. This number may also limit the size of one `Store.multi_set`.
    """

    processes: bool = False
    hosts: bool = False
    durable: bool = False
    survives_handles: bool = False
    survives_first_handle: bool = True
    sessions: bool = False
    knows_write_outcome: bool = False
    lists_any_key: bool = True
    deletes_at_once: bool = True
    changes_conditionally: bool = False
    transacts: bool = False
    reports_changes: bool = False
    value_max: int = VALUE_MAX


class Member(NamedTuple):
    """One session of a store: a handle that has registered.

    Attributes:
        number: the number of the session. No number is used twice in one run of the store.
        host: the name of the session's host.
        pid: the id of the session's process.
        rank: the last rank that the session announced, or None.
        label: the label with which the handle was opened, or ``""``.
        since: the time of the registration, in seconds since the epoch by the clock of the session's host. Don't
            compare the times of two hosts: their clocks may differ.
        alive: ``"yes"``, ``"no"`` (the process has ended or the handle was closed) or ``"unknown"``.
        found_dead: when the store recorded the death of the session, in seconds since the epoch by the clock of the
            host that recorded it. None: the death is not recorded.
    """

    number: int
    host: str
    pid: int
    rank: int | None
    label: str
    since: float
    alive: str
    found_dead: float | None = None


Choose = Callable[[Callable[[bytes], bytes | None]], Transaction | None]
"""A function that decides a transaction. Its argument returns the value of a key; None: the key has no value. Its
result has no comparisons. None: change nothing."""

NUM_MEMBERS: Final = b"/num_members"
"""The suffix of the key in which `Store.barrier` counts the arrivals."""

CALL_MAX_S: Final = 20.0
"""The longest single call of a wait whose request has a `SlowWaitLogger`, in seconds.

The wait is split into calls of at most this length. A store logs only calls that are longer, so the wait is logged
once, by its `SlowWaitLogger`.
"""


class Store(ABC):
    """Named values, counters and queues that several processes share.

    The operations are those of torch's c10d ``Store`` and some others. A key is a ``str`` or ``bytes``. A ``str``
    stands for its UTF-8 bytes (with ``surrogateescape``), so ``"k"`` and ``b"k"`` are the same key. A value is given as
    a ``str`` or any bytes-like object, and returned as ``bytes``. A timeout is a number of seconds or a `timedelta`.
    ``None`` means the store's timeout. ``0`` means that the operation does not wait. ``math.inf`` and
    ``timedelta.max`` mean no limit.

    Every operation takes effect once, between its call and its return. Several threads may use one handle. An operation
    with a bad argument changes nothing. Such an operation raises `TypeError` for a wrong type, `ValueError` for a wrong
    value, and `~fscoord.LimitExceededError` for a key over 1 KiB or a value over 64 MiB.

    Any operation may raise `~fscoord.StoreTimeoutError` if it can't reach or lock the store within the store's
    timeout. If the store fails, the operation raises `~fscoord.StoreError` or a subclass. The attribute
    ``maybe_applied`` of the error says whether a failed write may have taken effect.
    """

    capabilities: Capabilities = Capabilities()
    """The optional features of this kind of store."""

    _timeout: float = DEFAULT_TIMEOUT

    _typical_call_s: float = math.inf
    """The longest usual duration, in seconds, of a call that waits for no other process. 0: the store is in memory."""

    @abstractmethod
    def set(self, key: Key, value: Value) -> None:
        """Set the value of `key` to `value`."""

    @abstractmethod
    def get(self, key: Key, *, default: D | EllipsisType = ..., timeout: Timeout | None = None) -> bytes | D:
        """Return the value of `key`. If the key has no value, return `default`, or wait if there is no `default`.

        Args:
            key: the key.
            default: the result if the key has no value. With a default the call does not wait.
            timeout: the longest wait, in seconds or as a `timedelta`.

        Raises:
            StoreTimeoutError: the key did not appear.
            TypeError: both `default` and `timeout` are given.
        """
        name, limit = key_bytes(key), self._seconds(timeout, default)
        if isinstance(default, EllipsisType):
            values: list[bytes] = self._wait(WaitRequest(VALUES, [name], limit))
            return values[0]
        value = self._peek(name)
        return default if value is None else value

    @abstractmethod
    def add(self, key: Key, amount: int) -> int:
        """Add `amount` to the integer in `key` and return the sum; a missing key counts as 0.

        The sum is kept as decimal text, so `get` returns e.g. ``b"-2"``.

        Raises:
            ValueError: the value is not an integer in decimal text. The value is unchanged. (c10d accepts ``"12abc"``.)
            OverflowError: the sum does not fit in 64 bits. The value is unchanged. (c10d wraps.)
        """

    @abstractmethod
    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        """Set `key` to `desired` if its value is `expected`; return the value that the key has afterwards.

        If the key is missing and `expected` is empty, the key is created. If the key is missing and `expected` is not
        empty, nothing is written and `expected` is returned, as in c10d.
        """

    @abstractmethod
    def check(self, keys: Iterable[Key]) -> bool:
        """Return at once whether every one of `keys` has a value or a non-empty queue."""

    @abstractmethod
    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """Wait until every one of `keys` has a value or a non-empty queue. `timeout` limits the whole wait.

        Raises:
            StoreTimeoutError: a key is still missing at the deadline. The ``keys`` of the error are all missing keys.
        """

    @abstractmethod
    def delete_key(self, key: Key, *, expected: Value | None = None) -> bool:
        """Remove the value and the queue of `key`; return whether anything was removed.

        Args:
            key: the key.
            expected: if given, remove the key only if its value equals `expected`.

        Raises:
            StoreError: `expected` is given, and the store lacks the capability ``changes_conditionally``.
        """
        raise self._not_in_one_step("delete_key(expected=)", key, b"" if expected is None else expected)

    def create(self, key: Key, value: Value) -> bool:
        """Set `key` to `value` if the key has no value; return whether this call has set it.

        If several callers create the same key with equal values, exactly one caller gets True. The result of
        `compare_set` would be the same for all these callers. A key with an empty value is not created again.

        Raises:
            StoreError: the store lacks the capability ``changes_conditionally``.
        """
        raise self._not_in_one_step("create", key, value)

    def pop(self, key: Key) -> bytes | None:
        """Remove the value and the queue of `key`, and return the value.

        If the key has no value, return None at once and change nothing.

        Raises:
            StoreError: the store lacks the capability ``changes_conditionally``.
        """
        raise self._not_in_one_step("pop", key)

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys with a value. As in c10d, queues and internal keys do not count."""

    @abstractmethod
    def list_keys(self, prefix: Key = "") -> list[str]:
        """Return the keys that have a value and begin with `prefix`, as ``str``, sorted by their bytes."""

    @abstractmethod
    def append(self, key: Key, value: Value) -> None:
        """Append `value` to the value of `key`, atomically; a missing key counts as empty."""

    @abstractmethod
    def multi_get(self, keys: Iterable[Key], *, timeout: Timeout | None = None) -> list[bytes]:
        """Return the values of `keys`, in the order of `keys`.

        If values are missing, wait until all keys have values. `timeout` limits the whole wait.

        Raises:
            StoreTimeoutError: a value is still missing at the deadline. The ``keys`` of the error are all missing keys.
        """
        values: list[bytes] = self._wait(WaitRequest(VALUES, keys_bytes(keys), self._seconds(timeout)))
        return values

    @abstractmethod
    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        """Set the first of `keys` to the first of `values`, the second to the second, and so on, all in one step.

        Raises:
            ValueError: the numbers of keys and values differ; nothing is written.
        """
        pairs = dict(pairs_bytes(keys, values))
        if pairs:
            self._transact(Transaction({}, pairs, {}, []))

    def transact(
        self,
        *,
        compare: Mapping[ComparedKey, Value | None] = NOTHING,
        set: Mapping[SetKey, Value] = NOTHING,  # noqa: A002 - the names of the operations
        add: Mapping[AddedKey, int] = NOTHING,
        delete: Iterable[Key] = (),
    ) -> bool:
        """Compare some keys, and if all comparisons hold, change keys; all in one step.

        Other callers see all changes or none, even if the process dies in the call. The call wakes the waiters of each
        key that it sets.

        Args:
            compare: the value that each of these keys must have. None: the key must have no value.
            set: the keys to set, with their values.
            add: the counters to change, with the amounts to add, as by `add`.
            delete: the keys whose values and queues to remove. A missing key is ignored.

        Returns:
            Whether the comparisons held. If False, nothing was changed.

        Raises:
            ValueError: a key occurs twice in `compare`, or in `set`, `add` and `delete` together; or the value of a key
                in `add` is not an integer. Nothing was changed.
            OverflowError: a sum does not fit in 64 bits. Nothing was changed.
            StoreError: the store lacks the capability ``transacts``.
        """
        return self._transact(transaction_of(compare, set, add, delete))

    def _transact(self, transaction: Transaction) -> bool:  # noqa: ARG002 - see there
        """Perform `transact`. A store with the capability ``transacts`` overrides this method."""
        raise StoreError(
            f"{type(self).__name__} has no transact, so nothing was changed: the store can't change several keys in one"
            " step (capabilities.transacts). Use a FileStore, HashStore or EtcdStore"
        )

    _decides: bool = False
    """Whether the store has `_transact_by`."""

    _transact_by: Callable[[Choose], bool]
    """Perform the transaction that a function returns, in one step with its reads. Return whether it returned one.

    The keys and values are not checked. The function must not use the store. It may be called again if nothing was
    written.
    """

    @abstractmethod
    def queue_push(self, key: Key, value: Value) -> None:
        """Append `value` to the queue `key`. A key may have both a queue and a value."""

    @abstractmethod
    def queue_pop(self, key: Key, block: bool = True, *, timeout: Timeout | None = None) -> bytes:
        """Remove the oldest value from the queue `key` and return it. Each value is returned to only one caller.

        If the queue is empty, wait for a value. With ``block=False`` the call does not wait and ignores `timeout`.

        Raises:
            QueueEmptyError: with ``block=False``, the queue is empty.
            StoreTimeoutError: with ``block=True``, the queue stayed empty until the deadline.
        """
        limit = self._seconds(timeout)
        if not block:
            return self.queue_pop(key, False)  # without the added argument
        item: bytes = self._wait(WaitRequest(ITEM, [key_bytes(key)], limit))
        return item

    @abstractmethod
    def queue_len(self, key: Key) -> int:
        """Return the number of values in the queue `key`."""

    def watch(
        self, prefix: Key = "", *, after: Position | str | None = None, timeout: Timeout | None = math.inf
    ) -> Watch:
        """Return an iterator over the changes of the values of all keys that begin with `prefix`.

        The iterator yields each change once, in the order in which all processes see the changes. It misses none that
        comes between two reads. A `multi_set` yields a change for each key. Queues are not watched. The watch keeps in
        memory the changes that the program has not taken, and on a `~fscoord.FileStore` also the values of the watched
        keys.

        Args:
            prefix: the beginning of the keys.
            after: begin with the first change after this position: the `Change.position` of a change, or its text.
                None: begin now. A change that takes effect after the call has returned is never missed, and a change
                that took effect before the call is not yielded. On an `EtcdStore`, give the position to a watch of the
                same prefix: the position of a change in a transaction depends on the prefix there.
            timeout: how long to wait for each change, in seconds or as a `timedelta`; by default without limit. None
                means the store's timeout.

        Raises:
            CompactedError: a compaction has removed changes after `after`, or that the iterator has not read yet. The
                iterator raises it, too. Its ``position`` is one after which a watch can begin.
            StoreError: the store lacks the capability ``reports_changes``, or has never had the position `after`.
            StoreTimeoutError: no change came within `timeout` (from the iterator).
        """
        place = Position.parse(after) if isinstance(after, str) else after
        limit = self._seconds(timeout)
        return self._watch(key_bytes(prefix), place, limit)

    @abstractmethod
    def clone(self: S) -> S:
        """Return a new, independent handle on the same store, with the timeout of this handle."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of this handle.

        Closing a handle again does nothing. Any other use of a closed handle raises `~fscoord.StoreClosedError`.
        """

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        """Wait until `world_size` callers have called this method with `key`. Use each key for one barrier only.

        Processes that use torch and processes that use fscoord can take part in the same barrier. The barrier uses the
        keys ``{key}/num_members`` and ``{key}/last_member``, as do the barriers of most stores of c10d. Only a
        `TCPStore` does not use these keys: it sends a barrier request with the key `key` to torch's server.

        Raises:
            UsedBeforeError: more than `world_size` callers arrived.
            BarrierError: the counter of the barrier has a value that is not a number of arrivals.
            StoreTimeoutError: fewer than `world_size` callers arrived before the deadline.
        """
        run_blocking(self, barrier_steps(self, key, world_size, self._seconds(timeout)))

    @property
    def has_liveness(self) -> bool:
        """Whether this store can detect dead sessions. If False, the store reports no session as dead."""
        return False

    def register(self) -> int:
        """Register this handle as a session, and return the number of the session.

        The first call writes to the store. Later calls return the same number. On a store without sessions the call
        does nothing and returns 0.

        Raises:
            StoreError: the handle can't write, because it is read-only.
            SessionDeadError: the store has recorded this handle's session as dead.
        """
        return 0

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:  # noqa: ARG002 - see `has_liveness`
        """Return all sessions, in the order of their numbers. On a store without sessions the list is empty.

        Unless the handle is read-only, the call also registers the handle and records the deaths that it detects.

        Args:
            ranks: if given, return only the sessions that have announced one of these ranks.
        """
        return []

    def announce_rank(self, rank: int) -> None:  # noqa: B027 - a store without sessions does nothing
        """Record that this handle is rank `rank`.

        A handle may announce several ranks, and several handles the same rank. A read-only handle records nothing.

        Raises:
            SessionDeadError: the store has recorded this handle's session as dead.
        """

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:  # noqa: ARG002 - see `has_liveness`
        """Return the ranks among `ranks` that are known dead.

        A rank is known dead if at least one session has announced it, and all sessions that have announced it are dead.
        A session in an unknown state does not count as dead. Each death is recorded before it is returned, unless the
        handle is read-only. So all handles agree on the dead ranks.
        """
        return []

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:  # noqa: ARG002 - see `has_liveness`
        """Return the sessions among `numbers` that are known dead.

        A death is recorded before it is returned, unless the handle is read-only.
        """
        return []

    def _session_states(self, numbers: Iterable[int]) -> dict[int, str]:
        """Return {session number: `Member.alive`} for each of `numbers` that is a session of the store.

        This default calls `members`. A store that overrides this method probes only the sessions `numbers`, and does
        not register the handle. Detected deaths are recorded, as by `members`.
        """
        wanted = set(numbers)
        return {member.number: member.alive for member in self.members() if member.number in wanted}

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Wait for `keys` as `wait` does, but end the wait as soon as one of `ranks` is known dead.

        Returns:
            An empty list if all keys are present. Otherwise the ranks that are known dead.

        Raises:
            StoreTimeoutError: at the deadline a key is missing and no rank is known dead.
        """
        limit = self._seconds(timeout)
        names = list(keys_bytes(keys))
        if isinstance(ranks, NeededRanks):
            with suppress(_NoRankNeeded):
                return self._wait_beside(names, limit, partial(self._dead_of_needed, ranks))
            return []
        needed = list(ranks)
        return self._wait_beside(names, limit, lambda: self.dead_ranks(needed))

    def _dead_of_needed(self, ranks: NeededRanks) -> list[int]:
        """Return the ranks among `ranks` that are still needed and known dead.

        Raises:
            _NoRankNeeded: no rank is needed any more.
        """
        text = self.get(ranks.key, default=None)
        needed = list(ranks) if text is None else ranks.judge(text)
        if not needed:
            raise _NoRankNeeded
        return self.dead_ranks(needed)

    def wait_sessions(self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Wait for `keys`, but end the wait as soon as one of the sessions `numbers` is known dead.

        The result and the errors are those of `wait_alive`, with sessions instead of ranks.
        """
        needed = list(numbers)
        limit = self._seconds(timeout)
        return self._wait_beside(list(keys_bytes(keys)), limit, lambda: self.dead_sessions(needed))

    def _wait_beside(self, names: list[bytes], limit: float, find: Callable[[], list[int]]) -> list[int]:
        """Wait for the keys `names`, or until `find` returns dead ranks or sessions. Return the result of `find`."""
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
                    with suppress(StoreTimeoutError):  # a dead process may have set the keys after the last check
                        self.wait(names, 0.0)
                        return []
                    return dead
                if left <= DEATH_POLL_S:
                    raise

    def _wait(self, request: WaitRequest) -> Any:
        """Wait in this thread as `request` says, and return the answer described in `WaitRequest`.

        A store that creates `Wait` objects overrides this method. The default calls `wait`, `multi_get` and the like.
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

    def _wait_in_call(self, request: WaitRequest, timeout: float) -> Any:
        if request.kind == CHANGES:
            return cast("Watch", request.watch)._wait(timeout)
        if request.kind != KEYS:
            with self.clone() as handle:  # the timeout of this handle holds for all its threads
                handle.set_timeout(timeout)
                return handle.multi_get(request.keys) if request.kind == VALUES else handle.queue_pop(request.keys[0])
        if request.sessions is not None:
            return self.wait_sessions(request.keys, request.sessions, timeout)
        if request.ranks is not None:
            return self.wait_alive(request.keys, request.ranks, timeout)
        self.wait(request.keys, timeout)
        return []

    def _peek(self, key: bytes) -> bytes | None:
        """Return the value of `key`, or None if the key has no value. The call does not wait for a value.

        The default calls `compare_set` and expects a random text, which no key has as its value. So `compare_set`
        writes nothing, and returns the value of the key, or the random text if the key has no value.
        """
        nonce = system.random_bytes(16)
        value = self.compare_set(key, nonce, nonce)
        return None if value == nonce else value

    def _peek_all(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return {key: value} for those of `keys` that have a value. The call does not wait for a value."""
        found = {key: self.get(key, default=None) for key in keys}
        return {key: value for key, value in found.items() if value is not None}

    def _recall(self, key: bytes) -> bytes | None:  # noqa: ARG002 - see there
        """Return the value of `key` as this handle knows it, without a request for newer writes; None: it is unknown.

        The value is that of some moment before the call returns. It may lack an operation of this handle that another
        process has written for it.
        """
        return None

    def _seconds(self, timeout: Timeout | None, default: object = ...) -> float:
        """Return the timeout of a call in seconds, from its arguments `timeout` and `default`."""
        if timeout is None:
            return self._timeout
        if default is not ...:
            raise TypeError("get takes default or timeout, not both: with a default it does not wait for a value")
        return to_seconds(timeout)

    def _not_in_one_step(self, operation: str, key: Key, value: Value = b"") -> StoreError:
        """Check the arguments of `operation`, and return the error of a store that does not support it."""
        value_bytes(value)
        return StoreError(
            f"{type(self).__name__} has no {operation}, so key {key_text(key_bytes(key))!r} is unchanged: the store"
            " can't test a key and change it in one step (capabilities.changes_conditionally). Use a FileStore,"
            " HashStore or EtcdStore"
        )

    def __init_subclass__(cls, **given: Any) -> None:
        """Make a subclass that was written for an earlier version of `Store` accept the arguments added since."""
        super().__init_subclass__(**given)
        for name, added in ADDED_ARGUMENTS.items():
            method = cls.__dict__.get(name)
            if method is not None and not _accepts(method, added):
                setattr(cls, name, _accepting(method, added))

    def _meet(self, prefix: bytes, rank: int, world_size: int, timeout: float | None) -> object:  # noqa: ARG002 - see there
        """Arrive at the barrier `prefix` in this thread, if this store has a fast path for `fscoord.barrier`.

        `timeout` is in seconds; None: the timeout of this store.

        Returns:
            True if the rank has passed the barrier. None if the fast path can't be used. Otherwise the unfinished
            arrival, for ``ArrivalRequest.begun``.
        """
        return None

    def _arrive(self, request: ArrivalRequest) -> bytes | None:
        """Arrive and wait in this thread as `request` says, and return the answer described in `ArrivalRequest`."""
        return run_blocking(self, self._arrival_steps(request))

    def _arrival_steps(self, request: ArrivalRequest) -> WaitSteps[bytes | None]:
        start = system.time.monotonic() if request.started is None else request.started
        token = request.token
        if token:
            self.append(request.key, token)
            value = self.get(request.key)
        else:
            value = b"%d" % self.add(request.key, 1)
        last = is_last(value, token, request.world_size)
        if last is None:
            return value
        if last:
            self.set(request.done, b"1")
        elif request.waits:
            make, now = request.new_slow_logger, system.time.monotonic()
            left = max(0.0, request.timeout - (now - start))
            slow_logger = None if make is None else make(now)
            try:
                yield WaitRequest(KEYS, [request.done], left, slow_logger=slow_logger)
            finally:
                if slow_logger is not None:
                    slow_logger.end()
        return None

    def _new_arrival_wait(self, request: ArrivalRequest, notifier: Any) -> Wait[Any] | None:  # noqa: ARG002 - see there
        """Return the `Wait` for `request`, or None if the caller must use `_arrival_steps`."""
        return None

    def _watch(self, prefix: bytes, after: Position | None, limit: float) -> Watch:  # noqa: ARG002 - see there
        """Implement `watch`. `limit` is the timeout in seconds.

        A task waits for a change with a `WaitRequest` of the kind `CHANGES`.
        """
        raise StoreError(
            f"{type(self).__name__} can't report changes (capabilities.reports_changes). Use a FileStore, HashStore or"
            " EtcdStore"
        )

    def _write_within(self, limit: float, key: bytes, value: bytes, *, appends: bool) -> None:
        """Set `key` to `value`, or append `value` to it, with a timeout of `limit` seconds.

        The timeout of this handle is not changed, because other threads may use the handle. This default writes through
        a clone with its own timeout.
        """
        with self.clone() as handle:
            handle.set_timeout(limit)
            (handle.append if appends else handle.set)(key, value)

    def _observe(self) -> tuple[list[Member], dict[int, ShownWait]]:
        """Return all sessions, and {session number: its wait} for the waiting sessions. Nothing is written.

        Both results are empty on a store whose sessions can't be listed without a write.
        """
        return [], {}

    @property
    def _shows_waits(self) -> bool:
        """Whether the store shows its waits to other processes.

        If the result is true, a view must pass the whole `WaitRequest` to the store.
        """
        return False

    def _stopped_sessions(self, numbers: Iterable[int]) -> frozenset[int]:  # noqa: ARG002 - see there
        """Return the sessions among `numbers` whose processes are stopped, for example by SIGSTOP.

        A stopped process on another host is not detected.
        """
        return frozenset()

    def _closer_look(self) -> str:
        """Return the end of a time-out message: advice to run the command that shows the waits on the store.

        Return "" if no command can show the waits on this kind of store.
        """
        return ""

    _has_participants = False
    """Whether the store was opened with `world_size`, so that the store can distinguish the runs of a program."""

    _records_waits = False
    """Whether the store itself records its waits as spans when the process records a trace."""

    def _trace_place(self, key: bytes) -> tuple[str, str]:
        """Return the place of a span in a trace: a text that names the store on all hosts, and the full key."""
        return type(self).__name__, key_text(key)

    def _notifier_for(self, backend: WaitBackend) -> Any:  # noqa: ARG002 - see there
        """Return the notifier that wakes the waits of `backend`, for the argument `notifier` of `_new_wait`.

        Return None if this store has no `Wait` objects. Then each wait is one blocking call.
        """
        return None

    def _new_wait(self, request: WaitRequest, notifier: Any) -> Wait[Any]:
        """Return the `Wait` for `request`, which `notifier` wakes. `notifier` is a result of `_notifier_for`."""
        raise TypeError(
            f"{type(self).__name__} has no Wait objects, so notifier {notifier!r} can't wake a wait for {request}"
        )

    @property
    def timeout(self) -> timedelta:
        """The default timeout of operations; ``timedelta.max`` means no limit."""
        return to_timedelta(self._timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of this handle's operations, in seconds or as a `timedelta`.

        Raises:
            TypeError: `timeout` is neither a number nor a `timedelta`.
            ValueError: `timeout` is negative or NaN.
        """
        self._timeout = to_seconds(timeout)

    def has_extended_api(self) -> bool:
        """Return whether the store has `append`, `multi_get` and `multi_set`. Every store of fscoord has these."""
        return True

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


ADDED_ARGUMENTS: Final[dict[str, dict[str, Any]]] = {
    "get": {"default": ..., "timeout": None},
    "multi_get": {"timeout": None},
    "queue_pop": {"timeout": None},
    "delete_key": {"expected": None},
}
"""Arguments that were added to methods of `Store`, with their defaults. Older stores of other packages lack these."""


def _accepts(method: Any, added: dict[str, Any]) -> Any:
    while hasattr(method, "__wrapped__"):  # a decorator passes all arguments on
        method = method.__wrapped__
    code: Any = getattr(method, "__code__", None)  # none: not a function of Python
    takes_any = code is None or code.co_flags & 8  # inspect.CO_VARKEYWORDS
    return takes_any or added.keys() <= set(code.co_varnames)


def _accepting(method: Callable[..., Any], added: dict[str, Any]) -> Callable[..., Any]:
    """Return a wrapper of `method` that accepts the arguments `added`.

    A call that uses one of these arguments goes to the implementation of `Store` instead of `method`.
    """

    @wraps(method)
    def call(self: Store, *args: Any, **named: Any) -> Any:
        used = {name: named.pop(name) for name in added if name in named}
        if all(value is added[name] for name, value in used.items()):
            return method(self, *args, **named)
        return getattr(Store, method.__name__)(self, *args, **named, **used)

    return call


class _NoRankNeeded(Exception):
    """Raised to end a wait when the wait needs no rank any more."""


def kept(method: F) -> F:
    """Return the abstract `method` of `Store` as a concrete method, for a store that inherits the implementation."""

    @wraps(method, updated=())  # without the mark of an abstract method
    def call(self: Store, *args: Any, **named: Any) -> Any:
        return method(self, *args, **named)

    return cast(F, call)


def forwarded(method: F) -> F:
    """Return a method of a `StoreView` that calls `method` of the underlying store."""
    name = method.__name__

    @wraps(method)
    def call(self: StoreView, *args: Any, **named: Any) -> Any:
        return getattr(self._open(), name)(*args, **named)

    return cast(F, call)


def on_key(method: F) -> F:
    """Return a method of a `StoreView` that calls `method` of the underlying store on one key, through `_do`."""
    name = method.__name__

    @wraps(method, updated=())  # as in `kept`
    def call(self: StoreView, key: Key, *args: Any, **named: Any) -> Any:
        return self._do(name, [key_bytes(key)], lambda keys: getattr(self._open(), name)(keys[0], *args, **named))

    return cast(F, call)


def on_keys(method: F) -> F:
    """Return a method of a `StoreView` that calls `method` of the underlying store on several keys, through `_do`."""
    name = method.__name__

    @wraps(method, updated=())
    def call(self: StoreView, keys: Iterable[Key], *args: Any, **named: Any) -> Any:
        return self._do(name, keys_bytes(keys), lambda names: getattr(self._open(), name)(names, *args, **named))

    return cast(F, call)


class StoreView(Store):
    """A store that passes its operations to the underlying store `store`. A subclass may change the keys.

    A subclass defines `_do`, which performs every operation on given keys, and the operations that this class does not
    define. A view has no sessions of its own.
    """

    def __init__(self, store: Store) -> None:
        self._inner = needed_store(store)
        self.capabilities: Capabilities = store.capabilities
        if (type(self)._transact, type(self).transact) == (Store._transact, Store.transact):  # see `PrefixStore`
            self.capabilities = store.capabilities._replace(transacts=False)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"

    def _open(self) -> Store:
        """Return the underlying store. Raise `StoreClosedError` if this view has been closed separately."""
        return self._inner

    @abstractmethod
    def _do(self, operation: str, keys: list[bytes], call: Callable[[list[bytes]], T]) -> T:
        """Perform `operation` on `keys`, and return its result.

        `call` performs the operation on the underlying store. The argument of `call` is the list of the keys in the
        underlying store.
        """

    set = on_key(Store.set)
    get = on_key(Store.get)
    add = on_key(Store.add)
    compare_set = on_key(Store.compare_set)
    delete_key = on_key(Store.delete_key)
    create = on_key(Store.create)
    pop = on_key(Store.pop)
    append = on_key(Store.append)
    queue_push = on_key(Store.queue_push)
    queue_pop = on_key(Store.queue_pop)
    queue_len = on_key(Store.queue_len)
    check = on_keys(Store.check)
    wait = on_keys(Store.wait)
    multi_get = on_keys(Store.multi_get)
    multi_set = on_keys(Store.multi_set)

    def _transact(self, transaction: Transaction) -> bool:
        compared, present, added, deleted = transaction

        def transact(names: list[bytes]) -> bool:
            full = iter(names)
            return self._open().transact(
                compare=dict(zip(islice(full, len(compared)), compared.values(), strict=True)),
                set=dict(zip(islice(full, len(present)), present.values(), strict=True)),
                add=dict(zip(islice(full, len(added)), added.values(), strict=True)),
                delete=full,
            )

        return self._do("transact", [*compared, *present, *added, *deleted], transact)

    wait_alive = on_keys(Store.wait_alive)
    wait_sessions = on_keys(Store.wait_sessions)

    @property
    def timeout(self) -> timedelta:
        """The timeout of the underlying store."""
        return self._inner.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self._open().set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return self._inner.has_extended_api()

    @property
    def has_liveness(self) -> bool:
        return self._inner.has_liveness

    register = forwarded(Store.register)
    members = forwarded(Store.members)
    announce_rank = forwarded(Store.announce_rank)
    dead_ranks = forwarded(Store.dead_ranks)
    dead_sessions = forwarded(Store.dead_sessions)
    _session_states = forwarded(Store._session_states)
    _stopped_sessions = forwarded(Store._stopped_sessions)
    _observe = forwarded(Store._observe)
    _watch = forwarded(Store._watch)

    def _closer_look(self) -> str:
        return self._inner._closer_look()

    @property
    def _records_waits(self) -> bool:  # type: ignore[override]
        return self._inner._records_waits

    def _trace_place(self, key: bytes) -> tuple[str, str]:
        return self._inner._trace_place(key)


# Functions with which other modules of this package use any store.


def needed_store(store: T, *methods: str) -> T:
    """Return `store` if it is a `Store`, or if it has one of `methods`, as a store of torch has.

    Every function and class that takes a store calls this function.

    Raises:
        TypeError: `store` is not a store. The message says what to pass instead.
    """
    is_for_tasks = isinstance(getattr(store, "store", None), Store)  # its methods are coroutines
    if isinstance(store, Store) or (not is_for_tasks and any(hasattr(store, name) for name in methods)):
        return store
    given: object = store
    instead = "pass a store of fscoord, such as FileStore(path)"
    if isinstance(given, (str, system.os.PathLike)):
        address = system.os.fspath(given)
        instead = f"{'open_store' if ':' in str(address) else 'FileStore'}({address!r})"
    elif is_for_tasks:
        instead = "pass its .store, or use fscoord.aio"
    raise TypeError(f"a store is needed, got {type(given).__name__}: {instead}")


def shown(thing: object, store: object, name: bytes, state: str = "") -> str:
    """Return the `repr` of `thing`, which uses the name `name` in `store`. Makes no request to the store."""
    return f"<{type(thing).__name__} {key_text(name)!r} of {store!r}{state and ', '}{state}>"


def shown_handle(text: str, *, is_closed: bool) -> str:
    """Return the `repr` of a store that `text` describes."""
    return f"<closed {text}>" if is_closed else text


def run_blocking(store: Store, steps: WaitSteps[T]) -> T:
    """Run the generator `steps` to its end, and return its result. This thread blocks for each request."""
    try:
        request = next(steps)
        while True:
            try:
                if isinstance(request, ArrivalRequest):  # a barrier is short: without a further call
                    answer = store._arrive(request)
                else:
                    answer = wait_on(store, request) if tracing.recorder is None else _wait_traced(store, request)
            except BaseException as error:  # noqa: BLE001 - raised in `steps`, which may catch it
                request = steps.throw(error)
            else:
                request = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        # Close the generator now, because its `finally` blocks release resources. It may not be collected for long: an
        # exception that the caller keeps refers to this frame, and the frame refers to the generator.
        steps.close()


def _wait_traced(store: Store, request: WaitRequest) -> Any:
    """Wait as `wait_on` does, and record the wait as a span if the store does not record its waits itself."""
    if store._records_waits:
        return wait_on(store, request)
    span = begin_span("wait", store, request.keys[0])
    if tracing.recorder is not None and span is not None:
        tracing.recorder.before_sleep(span, request.timeout)  # how long the call will block is not known
    try:
        answer = wait_on(store, request)
    except BaseException as error:
        tracing.end(span, tracing.outcome_of(error))
        raise
    tracing.end(span, "passed")
    return answer


def wait_on(store: Store, request: Request) -> Any:
    """Wait in this thread as `request` says, and return the answer."""
    return store._arrive(request) if isinstance(request, ArrivalRequest) else store._wait(request)


def barrier_steps(store: Store, key: Key, world_size: int, timeout: float) -> WaitSteps[None]:
    """Yield the requests of `Store.barrier`, as a generator for `run_blocking` or an event loop."""
    world_size, name = check_positive("world_size", world_size), key_bytes(key)
    counter, last = name + NUM_MEMBERS, name + b"/last_member"  # of one length
    if len(counter) > KEY_MAX:
        key_bytes(counter)  # raises the error
    try:
        arrived = yield new_tuple(
            ArrivalRequest, (counter, b"", last, world_size, timeout, None, None, True, True, None)
        )
    except (NotACounterError, CounterRangeError) as error:
        raise BarrierError(
            f"{error}. So the key is not the counter of a barrier; give every barrier its own key"
        ) from error
    if arrived is not None:
        raise UsedBeforeError(
            f"barrier {key_text(name)!r} got arrival {int(arrived)} of {world_size}: its key was used before, or"
            f" by too many callers; {how_to_run_again(store)}"
        )


def begin_span(kind: str, store: Store, key: bytes, rank: int | None = None, *facts: Any) -> tracing.Span | None:
    """Return a new span of this process on `key` of `store`, or None if the process records no spans."""
    if tracing.recorder is None:
        return None
    place, name = store._trace_place(key)
    return tracing.recorder.begin(kind, name, place, rank, *facts)


def how_to_run_again(store: Store) -> str:
    """Return advice for the message of a `UsedBeforeError`: how to run the program again on `store`."""
    while isinstance(store, StoreView):
        store = store._inner
    advice = "give every barrier and exchange a key of its own"
    if type(store).__repr__ is object.__repr__ or not store.capabilities.processes:  # no path and no address
        return advice
    path = getattr(store, "path", None)
    if path is None:
        return f"{advice}, and every run of a program its own keys in {store!r}"
    is_bounded = store._has_participants
    how = "give each start a run_id= of its own" if is_bounded else "open the store with run_id= or world_size="
    return f"{advice}; to run a program again, {how}, or remove the old one: {path} and {path}.*"
