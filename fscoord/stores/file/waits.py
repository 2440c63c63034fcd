"""`FileWait`, one wait of a `~fscoord.FileStore`, and the conditions that end such waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast
from zlib import crc32

from fscoord._arguments import called, key_text, missing_error
from fscoord._log.files.spill import Fetch
from fscoord._log.format import record
from fscoord._log.handle import NeedsLock
from fscoord._log.log import Log
from fscoord._log.wakeup.doorbell import LAST_BUCKET
from fscoord._log.wakeup.waiter import Waiter
from fscoord._runtime import system, tracing
from fscoord._waiting import timing
from fscoord._waiting.awaited import BARRIER, KEY, QUEUE, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import (
    ITEM,
    NOT_YET,
    VALUES,
    ArrivalRequest,
    NeededRanks,
    NotYet,
    WaitRequest,
    Waker,
    new_tuple,
)
from fscoord.stores.file.death_watch import DeathWatch, RankNeeds, SessionNeeds
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.operations import COUNTS, RANKS, Operation
from fscoord.stores.file.replay import KeyValueState
from fscoord.stores.file.traced_wait import TracedWait

__all__ = [
    "AnyChange",
    "Arrival",
    "Condition",
    "FileWait",
    "condition_of",
    "pop_item",
    "read_consistent",
]

T = TypeVar("T")

Write = Callable[..., Any]
"""`FileStore._write`: carries out an operation, and returns its result."""

WITNESSED_MAX: Final = 64
"""The most keys of a traced wait whose writers are observed."""


class Condition(ABC, Generic[T]):
    """The condition that ends a wait.

    Attributes:
        missing: the keys that the last look did not find.
        death_watch: the death watch that ends the wait at a death, or None.
    """

    what = "key"
    """The text by which errors and warnings call the missing keys."""

    kind = KEY
    """What the missing keys are, for the tools that show waits; see `Awaited`."""

    is_logged = True
    """Whether a long wait is logged, and shown to other processes."""

    arms_wait = False
    """Whether the first look changes the store, and arms the wait itself; see `Arrival`."""

    arms_under_lock = True
    """Whether such a look calls `arm` while it holds the log's lock."""

    has_read = False
    """Whether the wait has just read on in the shared extent of its node, so that the look need not read from the
    server. Such a look usually finds the key. It can't show that a key does not exist."""

    death_watch: DeathWatch | None = None
    missing: Sequence[bytes] = ()
    span_kind = "wait"
    """The kind of the span that a trace has for the wait."""

    other_key = b""
    """A further key whose change may end the wait, or empty."""

    _log: Log

    @abstractmethod
    def look(self, timeout: float, arm: Callable[[], None]) -> T | NotYet:
        """Return the answer, or `NOT_YET`.

        Args:
            timeout: the longest wait for the log's lock, in seconds.
            arm: arms the wait. Only a look that changes the store calls it; see `arms_wait`.
        """

    def give_up(self, waited: float) -> T:
        """End the wait at its deadline, after `waited` seconds: raise `StoreTimeoutError`, or return an answer."""
        look = self._log.closer_look() if waited >= 0.001 else ""
        raise missing_error(self._log.path, self.what, self.missing, waited, look)

    def new_slow_logger(self, started: float) -> SlowWaitLogger:
        """Return the logger of the warnings about a wait that began at `started`, by the monotonic clock."""
        return SlowWaitLogger(__name__, self._describe, started)

    def _describe(self) -> str:
        """Return the text that names the missing keys in warnings."""
        return f"{called(self.what, self.missing)} in {self._log.path}"

    def new_traced_wait(self, started: float) -> TracedWait:
        """Return the span of a wait that began at `started`, by the monotonic clock."""
        keys = [*self.missing[:WITNESSED_MAX], *filter(None, [self.other_key])]
        state = getattr(self, "_state", None)  # a wait for any change has none
        return TracedWait(self._log, state, self.span_kind, keys, len(self.missing), started)


class FileWait(Generic[T]):
    """One wait; see `Wait`.

    Most waits end with their first look, so nothing is armed before the first look. From the second look on the order
    is that of `Wait`: first `arm` makes the byte of a missing key in the bell odd, and then `look` reads the log. The
    read finds each record that was appended before the read. The writer of a later record finds the odd byte, and
    rings. In the other order, a record could be appended between the read and `arm`. Then the read would not find the
    record, and the writer would find an even byte and not ring.

    An event, the bell, and the process that polls for the node may all fail. `Waiter.max_sleep` limits each sleep, so a
    lost wake-up delays the answer by at most one poll interval.
    """

    _waiter: Waiter | None = None
    _traced: TracedWait | None = None
    _has_looked = False
    _is_in_loop = False  # whether an event loop drives the wait: its first look may have to wait for a thread
    _armed_for: bytes | None = None  # the key whose ring ends the next sleep
    _was_rung = False
    _own_logger: SlowWaitLogger | None = None  # made here, so `close` ends it

    def __init__(
        self,
        notifier: ChangeNotifier,
        condition: Condition[T],
        timeout: float,
        slow_logger: SlowWaitLogger | None = None,
        started: float | None = None,
    ) -> None:
        self._notifier = notifier
        self._condition = condition
        self._started = now = system.time.monotonic() if started is None else started
        self._deadline = now + timeout
        self._slow_logger = slow_logger
        self._due = slow_logger.due if slow_logger is not None else now + timing.SHOW_S

    def arm(self) -> None:
        """See `Wait.arm`."""
        if self._was_rung:  # the next look usually finds the key; otherwise `max_sleep` returns 0, to arm again
            return
        if self._waiter is None:
            is_early = not self._has_looked
            if is_early and not self._condition.arms_wait:
                return  # too early to say whether there will be a sleep
            is_fresh = is_early and not self._is_in_loop
            if (self._started if is_fresh else system.time.monotonic()) >= self._deadline:
                return  # there will be no sleep
            notifier, death_watch = self._notifier, self._condition.death_watch
            if death_watch is not None:
                longest, sessions = death_watch.max_sleep_s, death_watch.known_sessions
                waiter = notifier.new_waiter(self._deadline, longest, sessions, self._is_check_due)
            elif notifier.passes_on_changes:
                waiter = notifier.new_waiter(self._deadline, is_check_due=self._is_check_due)
            else:
                waiter = notifier.new_waiter(self._deadline)
            if waiter is None:
                return  # the next look raises
            # Recorded before `add_waiter`, so that `close` finds the waiter: a signal handler may raise at any point.
            self._waiter = waiter
            notifier.add_waiter(waiter)
            if is_early:
                if self._condition.arms_under_lock and notifier.passes_on_changes:  # only there is an election
                    waiter.stand_for_election()
                return
        self._arm()

    def _arm(self) -> None:
        waiter = self._waiter
        if waiter is None:
            return
        # Arming for one missing key is enough: while this key is missing, no look can end the wait.
        self._armed_for = name = self._condition.missing[0]
        stands = not (self._has_looked or self._condition.arms_under_lock)
        waiter.arm(crc32(name) & LAST_BUCKET, stands=stands)  # as `bucket`, without a call

    def look(self) -> T | NotYet:
        """See `Wait.look`."""
        now = system.time.monotonic() if self._has_looked or self._is_in_loop else self._started
        left = self._deadline - now
        if self._was_rung and self._notifier.passes_on_changes:
            found = self._look_in_extent(left)
        else:
            found = self._condition.look(left if left > 0 else 0.0, self._arm)
        self._has_looked = True
        # Not by a local variable: the traceback of a time-out keeps this frame, which would keep the waiter.
        if self._waiter is not None and (self._waiter.watcher.bell is None or self._notifier.passes_on_changes):
            self._notifier.after_look(self._waiter)
        if not isinstance(found, NotYet):
            if self._traced is not None:
                self._traced.end(found)
            return found
        if left <= 0:
            if tracing.recorder is not None and self._deadline > self._started:
                self._record_time_out()
            # Close the waiter before the error is made. If a signal handler raised in `close` later, the traceback of
            # the error would keep the waiter.
            self.close()
            return self._condition.give_up(system.time.monotonic() - self._started)
        if now >= self._due and self._condition.is_logged:
            self._make_known(now)
        return NOT_YET

    def _look_in_extent(self, left: float) -> T | NotYet:
        """Look after a ring of the node's bell, if possible without a request to the server; see `shared_extent`.

        This wait was not armed after the ring. So if the look does not find the answer, `sleep` returns at once, and
        the wait arms and looks once more, on the server.
        """
        condition, waiter = self._condition, self._waiter
        condition.has_read = left > 0 and waiter is not None and self._notifier.read_shared_extent(waiter)
        try:
            return condition.look(left if left > 0 else 0.0, self._arm)
        finally:
            condition.has_read = False

    def _make_known(self, now: float) -> None:
        """Show the wait to other processes, once it has lasted for `timing.SHOW_S`, and log the warnings that are due.

        The common path only compares the time of the look with `_due`.
        """
        slow_logger = self._slow_logger
        if slow_logger is None:
            slow_logger = self._slow_logger = self._own_logger = self._condition.new_slow_logger(self._started)
        slots = self._notifier.slots
        if slots is not None and slow_logger.is_long(now):
            slots.show(slow_logger, self._condition.kind, self._condition.missing)
        slow_logger.warn_if_due()
        self._due = slow_logger.next_due(now)

    def _is_check_due(self) -> bool:
        """See `Waiter`.

        If another process polls for the node, this wait looks rarely. So this method also shows the wait to other
        processes.
        """
        now = system.time.monotonic()
        if now >= self._due and self._condition.is_logged:
            self._make_known(now)
        death_watch = self._condition.death_watch
        return death_watch is not None and death_watch.is_check_due()

    def max_sleep(self) -> float:
        """See `Wait.max_sleep`."""
        self._is_in_loop = True
        return self.sleep(in_loop=True)

    def sleep(self, *, in_loop: bool = False) -> float:
        """See `Wait.sleep`. If an event loop sleeps for this wait, return what `max_sleep` returns."""
        waiter = self._waiter
        if waiter is None or self._armed_for != self._condition.missing[0]:
            # Nothing is armed yet, or the armed key has come meanwhile: arm and look once more.
            self._was_rung = False
            return 0.0
        watcher = waiter.watcher
        while not watcher.is_outdated:
            seconds = waiter.max_sleep(self._deadline)
            if seconds <= 0:
                break
            if tracing.recorder is not None:
                self._record_sleep(seconds)
            if in_loop:
                return seconds
            waiter.block(seconds)
        self._armed_for = None
        self._was_rung = waiter.was_rung and not watcher.is_outdated
        if not self._was_rung and self._notifier.remove_stale(waiter):
            self._waiter = None
        return 0.0

    def _record_time_out(self) -> None:
        """End the span of this wait.

        A wait that has not slept, because its looks took all its time, gets a span, too.
        """
        if self._traced is None:
            self._traced = self._condition.new_traced_wait(self._started)
        self._traced.time_out()

    def _record_sleep(self, seconds: float) -> None:
        """Begin the span of this wait at its first sleep. A wait that does not sleep has no span."""
        if self._traced is None:
            self._traced = self._condition.new_traced_wait(self._started)
        self._traced.before_sleep(seconds)

    @property
    def waker(self) -> Waker:
        """See `Wait.waker`."""
        assert self._waiter is not None, "`max_sleep` returned more than 0"
        return self._waiter.waker

    def close(self) -> None:
        """See `Wait.close`."""
        waiter = self._waiter
        if waiter is not None:
            try:
                waiter.close()
            finally:
                self._notifier.discard_waiter(waiter)
            self._waiter = None
            # Not before `_waiter` is None: a second `close`, after a signal handler has interrupted the first, must not
            # close a waiter that another wait uses by then.
            self._notifier.keep_spare(waiter)
        own_logger = self._own_logger
        if own_logger is not None:
            own_logger.end()
        if self._traced is not None:
            self._traced.close()


# -- conditions --------------------------------------------------------------------------------------------------------


def condition_of(
    request: WaitRequest,
    log: Log,
    state: KeyValueState,
    notifier: ChangeNotifier,
    write: Write,
) -> Condition[list[int]] | Condition[list[bytes]] | Condition[bytes]:
    """Return the condition that ends the wait of `request`."""
    if request.kind == VALUES:
        return _Values(log, state, request.keys)
    if request.kind == ITEM:
        return _Item(log, state, request.keys[0], write)
    condition = _Keys(log, state, request.keys)
    ranks, sessions = request.ranks, request.sessions
    if sessions is not None:
        condition.death_watch = DeathWatch(log, notifier, SessionNeeds(log, sessions), known_sessions=sessions)
    elif ranks is not None:
        condition.other_key = ranks.key if isinstance(ranks, NeededRanks) else b""
        condition.death_watch = DeathWatch(log, notifier, RankNeeds(log, state, ranks))
    return condition


class _KeyCondition(Condition[T]):
    """A condition on several keys."""

    def __init__(self, log: Log, state: KeyValueState, keys: list[bytes]) -> None:
        self._log = log
        self._state = state
        self._keys = keys
        self._single = keys[0] if len(keys) == 1 else None
        """The key if there is only one. After a ring it has a value, as a rule, and a single lookup finds the value
        without the mutex; see `KeyValueState.reset` for what keeps that safe. Only several keys, and a key without a
        value, are looked up under the mutex."""


class _Keys(_KeyCondition["list[int]"]):
    """The condition that each key has a value or a non-empty queue, or that a needed session or rank is dead.

    The answer is the list of the dead sessions or ranks. It is also empty if the wait needs no rank any more.
    """

    def look(self, timeout: float, arm: Callable[[], None]) -> list[int] | NotYet:  # noqa: ARG002 - see there
        values = self._state.values
        if not self.has_read:
            self._log.refresh(timeout)
        if self._single in values and values is self._state.values:
            return []
        self.missing = self._log.inspect(lambda: self._state.missing(self._keys))
        if not self.missing:
            return []
        dead = self.death_watch.find_dead(timeout) if self.death_watch else NOT_YET
        if dead and dead is not NOT_YET:  # a process may have set the keys, and died, after the look for them
            self.missing = self._log.inspect(lambda: self._state.missing(self._keys))
        return dead if self.missing else []


class _Values(_KeyCondition["list[bytes]"]):
    """The condition that each key has a value. The answer is the list of the values."""

    what = "the value of key"

    def look(self, timeout: float, arm: Callable[[], None]) -> list[bytes] | NotYet:  # noqa: ARG002 - see there
        values = self._state.values
        if not self.has_read:
            self._log.refresh(timeout)
        if self._single is not None:
            value = values.get(self._single)
            if value.__class__ is bytes and values is self._state.values:
                return [value]
        self.missing, found = answer_consistent(self._log, timeout, partial(self._state.values_of, self._keys))
        return NOT_YET if self.missing else found


class _Item(Condition[bytes]):
    """The condition that a queue has a value. The look takes the value, which is the answer."""

    what = "a value in queue"
    kind = QUEUE
    span_kind = "queue"

    def __init__(self, log: Log, state: KeyValueState, name: bytes, write: Write) -> None:
        self._log = log
        self._state = state
        self._write = write
        self.missing = [name]

    def look(self, timeout: float, arm: Callable[[], None]) -> bytes | NotYet:  # noqa: ARG002 - see there
        return pop_item(self._log, self._state, self.missing[0], timeout, self._write)


class Arrival(Condition["bytes | None"]):
    """The condition of an `ArrivalRequest`: the last arrival has set its key.

    The first look is one transaction. It records the arrival, and either sets the key or arms the wait. Both happen
    under the log's lock, so the record of the last arrival can only come after the wait is armed, and no further look
    is needed before the sleep.

    Args:
        log: the log of the store.
        state: its state.
        request: the request.
        write: carries out the arrival.
        arms_under_lock: whether `write` arms the wait under the lock; otherwise it does so before the arrival.
    """

    arms_wait = True

    def __init__(
        self, log: Log, state: KeyValueState, request: ArrivalRequest, write: Write, *, arms_under_lock: bool
    ) -> None:
        self._log = log
        self._state = state
        self._request = request
        self._write = write
        self._has_arrived = False
        self.arms_under_lock = arms_under_lock
        self.missing = [request.done]

    def new_slow_logger(self, started: float) -> SlowWaitLogger:
        make = self._request.new_slow_logger
        if make is not None:
            return make(started)
        name, _, _ = self._request.done.rpartition(b"/")  # of a barrier without ranks, which gives no words itself
        return SlowWaitLogger(__name__, self._describe, started, Awaited(BARRIER, key_text(name)))

    def look(self, timeout: float, arm: Callable[[], None]) -> bytes | NotYet | None:
        request, log = self._request, self._log
        if self._has_arrived:
            values = self._state.values
            if not self.has_read:
                log.refresh(timeout)
            # As for the single key of `_KeyCondition`.
            if request.done in values and values is self._state.values:
                return None
            return None if log.inspect(lambda: self._state.has(request.done)) else NOT_YET
        token = request.token
        kind, rule = (record.APPEND, RANKS) if token else (record.ADD, COUNTS)
        parts = (kind, request.key, token, b"", rule, request.done, request.world_size)
        answer: bytes | NotYet | None
        answer, _ = self._write(new_tuple(Operation, parts), None, request.started, arm)
        self._has_arrived = True
        return answer


class AnyChange(Condition["tuple[int, int]"]):
    """The condition that the log has a record after the position `known`.

    The answer is the position at the end of the wait. After a time-out it is the same as `known`.
    """

    is_logged = False

    def __init__(self, log: Log, known: object) -> None:
        self._log = log
        self._known = known
        self._position = (0, 0)
        self.missing = [b""]

    def look(self, timeout: float, arm: Callable[[], None]) -> tuple[int, int] | NotYet:  # noqa: ARG002 - see there
        self._log.refresh(timeout)
        self._position = self._log.position()
        return NOT_YET if self._position == self._known else self._position

    def give_up(self, waited: float) -> tuple[int, int]:  # noqa: ARG002 - see there
        return self._position


def pop_item(log: Log, state: KeyValueState, name: bytes, timeout: float, write: Write) -> bytes | NotYet:
    """Take the oldest value from the queue `name`, and return it. Return `NOT_YET` if the queue is empty."""
    log.refresh(timeout)
    value = write(Operation(record.POP, name), timeout) if name in state.queues else None
    return NOT_YET if value is None else bytes(value)


def read_consistent(log: Log, timeout: float, answer: Callable[[Fetch], T]) -> T:
    """Read the new records, and return the result of `answer` for one moment; see `answer_consistent`."""
    log.refresh(timeout)
    return answer_consistent(log, timeout, answer)


def answer_consistent(log: Log, timeout: float, answer: Callable[[Fetch], T]) -> T:
    """Return the result of `answer` for one moment.

    If spilled values can't be read without the log's lock, they are read under the lock.
    """
    try:
        return log.inspect(lambda: answer(log.read_unlocked))
    except NeedsLock:
        return cast(T, log.update(0, b"", b"", lambda _, __: (answer(log.read_locked), 0, b""), timeout))
