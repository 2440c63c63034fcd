"""`FileWait`, one wait of a `~fscoord.FileStore`, and the conditions that end such waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast
from zlib import crc32

from fscoord._arguments import called, missing_error
from fscoord._log.files.spill import Fetch
from fscoord._log.format import record
from fscoord._log.handle import NeedsLock
from fscoord._log.log import Log
from fscoord._log.wakeup.doorbell import LAST_BUCKET
from fscoord._log.wakeup.watcher import Waiter
from fscoord._runtime import system, tracing
from fscoord._waiting import timing
from fscoord._waiting.awaited import KEY, QUEUE
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import (
    ITEM,
    NOT_YET,
    VALUES,
    NeededRanks,
    NotYet,
    WaitRequest,
    Waker,
)
from fscoord.stores.file.death_watch import DeathWatch, RankNeeds, SessionNeeds
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.operations import Operation
from fscoord.stores.file.replay import KeyValueState
from fscoord.stores.file.traced_wait import TracedWait

__all__ = [
    "Condition",
    "FileWait",
    "Keys",
    "Values",
    "condition_of",
    "pop_item",
    "read_consistent",
]

T = TypeVar("T")

Write = Callable[..., Any]
"""`FileStore._write`, which performs an operation and returns its result."""

WITNESSED_MAX: Final = 64
"""The maximum number of missing keys of a traced wait for which the trace records the writers."""


class Condition(ABC, Generic[T]):
    """The condition that ends a wait.

    Attributes:
        missing: the keys that the last call of `look` did not find.
        death_watch: the death watch that ends the wait when a session dies, or None.
    """

    what = "key"
    """The noun for the missing keys in errors and warnings."""

    kind = KEY
    """The kind of the missing keys, for tools that show waits; see `Awaited`."""

    death_watch: DeathWatch | None = None
    missing: Sequence[bytes] = ()
    span_kind = "wait"
    """The kind of the wait's span in a trace."""

    other_key = b""
    """Another key whose change may end the wait. Empty: there is no other key."""

    arrive: Callable[[Callable[[], None], Waiter | None], T | NotYet] | None = None
    """A function that replaces the first `look` of an arrival; None for all other conditions.

    The function records the arrival, arms the wait, and tests the condition. Its arguments are the function that arms
    the wait, and the waiter.
    """

    _log: Log

    @abstractmethod
    def look(self, timeout: float, *, reads: bool) -> T | NotYet:
        """Test the condition. Return the answer, or `NOT_YET` if the condition does not hold.

        Args:
            timeout: the longest wait for the log's lock, in seconds.
            reads: whether to read new records of the log first. If False, the wait has just read them from the shared
                extent of this host. The extent may be old, so it can't show that a key is missing.
        """

    def close(self) -> None:
        """Release the resources of the condition. This method may be called twice."""

    def give_up(self, waited: float) -> T:
        """Raise `StoreTimeoutError`, or return an answer, at the deadline. The wait has lasted for `waited` seconds."""
        look = self._log.closer_look() if waited >= 0.001 else ""
        raise missing_error(self._log.path, self.what, self.missing, waited, look)

    def new_slow_logger(self, started: float) -> SlowWaitLogger:
        """Return the logger of warnings for a wait that began at `started`, by the monotonic clock."""
        return SlowWaitLogger(__name__, self._describe, started)

    def _describe(self) -> str:
        """Return a text that names the missing keys, for warnings."""
        return f"{called(self.what, self.missing)} in {self._log.path}"

    def new_traced_wait(self, started: float) -> TracedWait:
        """Begin the span of a wait that began at `started`, by the monotonic clock."""
        keys = [*self.missing[:WITNESSED_MAX], *filter(None, [self.other_key])]
        state = getattr(self, "_state", None)  # a watch has none
        return TracedWait(self._log, state, self.span_kind, keys, len(self.missing), started)


NEW, UNARMED, ARMED, RUNG = range(4)
"""The states of a wait. To *arm* a wait is to mark a key in the bell, so that a writer of the key rings and wakes it.

- NEW: `look` was not called yet. Most waits end with the first call, so the first call does not arm the wait, except
  for an arrival.
- UNARMED: the wait must not sleep, and the next `look` arms the wait before it tests the condition.
- ARMED: the wait was armed, and then the condition did not hold. So the wait sleeps.
- RUNG: a ring has ended the sleep. Usually the condition holds after a ring, so the next `look` does not arm the wait.
"""


class FileWait(Generic[T]):
    """Implements `Wait` for one wait of a `~fscoord.FileStore`.

    `look` first arms the wait, by a write to the missing key's cell in the bell. Then `look` reads the log. The read
    finds all records that were appended before the read. The writer of a later record finds the armed cell, and rings.
    In the reverse order, a record could be appended between the read and the arming. The read would miss the record,
    and the writer would find no armed cell and not ring.

    File events, the bell, and the process that polls for its host may all fail. `Waiter.max_sleep` limits each sleep,
    so a lost wake-up delays the answer by at most one poll interval.

    Args:
        notifier: wakes the wait.
        condition: the condition that ends the wait.
        timeout: the longest wait, in seconds.
        slow_logger: logs warnings if the wait is long; None: the wait creates one when it needs one.
        started: when the wait began, by the monotonic clock; None: now.
        has_looked: whether the caller has already found that the condition does not hold.
    """

    _waiter: Waiter | None = None
    _traced: TracedWait | None = None
    _armed_for: bytes | None = None  # the key whose ring ends the next sleep
    _own_logger: SlowWaitLogger | None = None  # the logger that this object has created, and that `close` must end

    def __init__(
        self,
        notifier: ChangeNotifier,
        condition: Condition[T],
        timeout: float,
        slow_logger: SlowWaitLogger | None = None,
        started: float | None = None,
        *,
        has_looked: bool = False,
    ) -> None:
        self._notifier = notifier
        self._condition = condition
        self._started = now = system.time.monotonic() if started is None else started
        self._deadline = now + timeout
        self._slow_logger = slow_logger
        self._due = slow_logger.due if slow_logger is not None else now + timing.SHOW_S
        self._state = UNARMED if has_looked else NEW

    def block(self) -> T:
        """Wait in this thread, and return the answer.

        Most waits end at once or after one sleep. `_look_and_sleep_once` is a fast path for them. Other waits continue
        with `look` and `sleep`.
        """
        try:
            now = system.time.monotonic()
            left = self._deadline - now
            is_usual = left > 0 and now < self._due and tracing.recorder is None
            found = self._look_and_sleep_once(left) if is_usual else NOT_YET
            if not isinstance(found, NotYet):
                return found
            while True:
                found = self.look()
                if not isinstance(found, NotYet):
                    return found
                self.sleep()
        finally:
            self.close()

    def _look_and_sleep_once(self, left: float) -> T | NotYet:
        condition, notifier = self._condition, self._notifier
        arrive = condition.arrive
        found: T | NotYet
        if arrive is None and self._state == NEW:
            found = condition.look(left, reads=True)
            if not isinstance(found, NotYet):
                return found
            self._state = UNARMED
        if condition.death_watch is not None or notifier.passes_on_changes:
            return NOT_YET
        self._waiter = notifier.take_spare()  # not in a local variable: the traceback of an error would keep it alive
        if self._waiter is None:
            return NOT_YET
        notifier.add_waiter(self._waiter)
        if self._waiter.watcher.bell is None:
            return NOT_YET
        if arrive is None:
            self._arm()
            found = condition.look(left, reads=True)
        else:
            self._state = UNARMED
            found = arrive(self._arm, self._waiter)
        if not isinstance(found, NotYet) or self._armed_for != condition.missing[0]:
            return found
        is_rung = self._waiter.sleep_once(left)
        self._armed_for = None
        return condition.look(left, reads=True) if is_rung else NOT_YET

    def look(self) -> T | NotYet:
        state, condition, notifier, now = self._state, self._condition, self._notifier, system.time.monotonic()
        left = self._deadline - now
        arrive = condition.arrive if state == NEW else None
        found: Any
        # Get a waiter before an arrival acquires the lock, because a new bell is announced under the lock.
        if self._waiter is None and (state == UNARMED or arrive is not None) and left > 0:
            watch = condition.death_watch
            longest, sessions = (None, ()) if watch is None else (watch.max_sleep_s, watch.known_sessions)
            waiter = notifier.new_waiter(self._deadline, longest, sessions, self._is_check_due)
            if waiter is not None:  # otherwise the handle is closed, and the read below raises
                # Recorded before `add_waiter`, so that `close` finds it: a signal handler may raise at any point.
                self._waiter = waiter
                notifier.add_waiter(waiter)
                waiter = None  # otherwise the traceback of a time-out would keep the waiter alive
        if arrive is not None:
            if notifier.passes_on_changes:
                notifier.stand_for_election(self._waiter)
            found = arrive(self._arm, self._waiter)
        else:
            reads = True
            if state == UNARMED and left > 0:
                self._arm()
            elif state == RUNG and left > 0 and notifier.passes_on_changes:
                reads = not notifier.read_shared_extent(self._waiter)
            found = condition.look(left if left > 0 else 0.0, reads=reads)
        # Use no local variable for the waiter, as above.
        if self._waiter is not None and (self._waiter.watcher.bell is None or notifier.passes_on_changes):
            notifier.after_look(self._waiter)
        if not isinstance(found, NotYet):
            if self._traced is not None:
                self._traced.end(found)
            answer: T = found
            return answer
        if left <= 0:
            if tracing.recorder is not None and self._deadline > self._started:
                self._trace().time_out()
            # Close the waiter before the error is created. If a signal handler interrupted a later `close`, the
            # traceback of the error would keep the waiter alive.
            self.close()
            return condition.give_up(system.time.monotonic() - self._started)
        # Arming for one missing key is enough, because the wait can't end while this key is missing. If this key exists
        # now, the next look arms for another missing key.
        self._state = ARMED if self._armed_for == condition.missing[0] else UNARMED
        if now >= self._due:
            self._make_known(now)
        return NOT_YET

    def _arm(self) -> None:
        """Arm the wait for the first missing key: every later change of this key ends the next sleep."""
        waiter = self._waiter
        if waiter is not None:
            self._armed_for = name = self._condition.missing[0]
            waiter.arm(crc32(name) & LAST_BUCKET)  # as `bucket`, without a call

    def _make_known(self, now: float) -> None:
        """Show the wait to other processes if it has lasted for `timing.SHOW_S` seconds. Log a warning if one is due.

        The caller must check first that the time `_due` has come. This check keeps short waits fast.
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
        """Return whether the wait must check for deaths now; see `NodeWaiter`.

        This method also shows the wait to other processes, which is otherwise a part of `look`. If another process
        polls for this host, this wait rarely calls `look`.
        """
        now = system.time.monotonic()
        if now >= self._due:
            self._make_known(now)
        death_watch = self._condition.death_watch
        return death_watch is not None and death_watch.is_check_due()

    def max_sleep(self) -> float:
        return self.sleep(in_loop=True)

    def sleep(self, *, in_loop: bool = False) -> float:
        """Implement `Wait.sleep`. With `in_loop`, don't sleep, but return the result of `max_sleep`."""
        waiter = self._waiter
        if self._state != ARMED or waiter is None:
            return 0.0
        watcher = waiter.watcher
        while not watcher.is_outdated:
            seconds = waiter.max_sleep(self._deadline)
            if seconds <= 0:
                break
            if tracing.recorder is not None:
                self._trace().before_sleep(seconds)
            if in_loop:
                return seconds
            watcher.block(waiter, seconds)
        self._armed_for = None
        if waiter.was_rung and not watcher.is_outdated:
            self._state = RUNG
            return 0.0
        self._state = UNARMED
        if self._notifier.remove_stale(waiter):
            self._waiter = None
        return 0.0

    def _trace(self) -> TracedWait:
        """Return the object that records this wait in the trace."""
        if self._traced is None:
            self._traced = self._condition.new_traced_wait(self._started)
        return self._traced

    @property
    def waker(self) -> Waker:
        assert self._waiter is not None, "`max_sleep` returned more than 0"
        return self._waiter.waker

    def close(self) -> None:
        waiter = self._waiter
        if waiter is not None:
            try:
                waiter.close()
            finally:
                self._notifier.discard_waiter(waiter)
            self._waiter = None
            # Only now, when `_waiter` is None: if a signal handler interrupts this call, a second `close` must not
            # close a waiter that another wait already uses.
            self._notifier.keep_spare(waiter)
        if self._condition.arrive is not None:
            self._condition.close()
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
) -> Condition[Any]:
    """Return the condition that `request` describes."""
    if request.kind == VALUES:
        return Values(log, state, request.keys)
    if request.kind == ITEM:
        return _Item(log, state, request.keys[0], write)
    condition = Keys(log, state, request.keys)
    ranks, sessions = request.ranks, request.sessions
    if sessions is not None:
        condition.death_watch = DeathWatch(log, notifier, SessionNeeds(log, sessions), known_sessions=sessions)
    elif ranks is not None:
        condition.other_key = ranks.key if isinstance(ranks, NeededRanks) else b""
        condition.death_watch = DeathWatch(log, notifier, RankNeeds(log, state, ranks))
    return condition


class Keys(Condition["list[int]"]):
    """The condition that each key has a value or a non-empty queue, or that a needed session or rank is dead.

    The answer is the list of the dead sessions or ranks. It is empty if all keys are present, or if the wait needs no
    rank any more.

    The condition reads a single key without the process mutex; see `KeyValueState.reset`. If another thread is applying
    records at the moment of the read, only the first of these records may be visible. The visible records form an
    earlier, valid state of the store.

    Args:
        log: the log of the store.
        state: the state of the store.
        keys: the keys.
    """

    def __init__(self, log: Log, state: KeyValueState, keys: list[bytes]) -> None:
        self._log = log
        self._state = state
        self._keys = self.missing = keys
        self._single = keys[0] if len(keys) == 1 else None

    def look(self, timeout: float, *, reads: bool) -> list[int] | NotYet:
        state, single = self._state, self._single
        values = state.values
        if reads:
            self._log.refresh(timeout)
        if single is not None:
            is_there = single in values or single in state.queues
            if values is state.values:
                if is_there:
                    return []
                if self.death_watch is None:
                    return NOT_YET
        self.missing = self._log.inspect(lambda: state.missing(self._keys))
        if not self.missing:
            return []
        dead = self.death_watch.find_dead(timeout) if self.death_watch else NOT_YET
        if dead and dead is not NOT_YET:  # a process may have set the keys after the last check, and died
            self.missing = self._log.inspect(lambda: self._state.missing(self._keys))
        return dead if self.missing else []


class Values(Condition["list[bytes]"]):
    """The condition that each key has a value. The answer is the list of the values."""

    what = "the value of key"

    def __init__(self, log: Log, state: KeyValueState, keys: list[bytes]) -> None:
        self._log = log
        self._state = state
        self._keys = self.missing = keys
        self._single = keys[0] if len(keys) == 1 else None  # see `Keys`

    def look(self, timeout: float, *, reads: bool) -> list[bytes] | NotYet:
        state, single = self._state, self._single
        values = state.values
        if reads:
            self._log.refresh(timeout)
        if single is not None:
            value = values.get(single)
            if values is state.values:
                if value.__class__ is bytes:
                    return [value]
                if value is None:
                    return NOT_YET
        self.missing, found = answer_consistent(self._log, timeout, partial(state.values_of, self._keys))
        return NOT_YET if self.missing else found


class _Item(Condition[bytes]):
    """The condition that a queue has a value. `look` removes the oldest value and returns it."""

    what = "a value in queue"
    kind = QUEUE
    span_kind = "queue"

    def __init__(self, log: Log, state: KeyValueState, name: bytes, write: Write) -> None:
        self._log = log
        self._state = state
        self._write = write
        self.missing = [name]

    def look(self, timeout: float, *, reads: bool) -> bytes | NotYet:  # noqa: ARG002 - it writes, and so reads
        return pop_item(self._log, self._state, self.missing[0], timeout, self._write)


def pop_item(log: Log, state: KeyValueState, name: bytes, timeout: float, write: Write) -> bytes | NotYet:
    """Remove the oldest value of the queue `name`, and return it. Return `NOT_YET` if the queue is empty."""
    log.refresh(timeout)
    value = write(Operation(record.POP, name), timeout) if name in state.queues else None
    return NOT_YET if value is None else bytes(value)


def read_consistent(log: Log, timeout: float, answer: Callable[[Fetch], T]) -> T:
    """Read the new records of the log, and return the result of `answer_consistent`."""
    log.refresh(timeout)
    return answer_consistent(log, timeout, answer)


def answer_consistent(log: Log, timeout: float, answer: Callable[[Fetch], T]) -> T:
    """Call `answer` while no thread changes the state, and return its result.

    The argument of `answer` is a function that reads spilled values. If a spilled value can't be read without the log's
    lock, `answer` is called again under the lock.
    """
    try:
        return log.inspect(lambda: answer(log.read_unlocked))
    except NeedsLock:
        return cast(T, log.update(0, b"", b"", lambda _, __: (answer(log.read_locked), 0, b""), timeout))
