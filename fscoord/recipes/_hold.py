"""`Exclusive`: the base class of locks, semaphores and elections. Contenders wait in line for such a resource."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import ContextDecorator, suppress
from typing import Any, Final, NamedTuple, TypeVar

from fscoord._arguments import Key, Timeout, key_bytes, refuse_copies, to_seconds
from fscoord._runtime import system, tracing
from fscoord._runtime.escaping import unescape_word
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord._waiting.awaited import LOCK
from fscoord._waiting.wait import WaitSteps
from fscoord.errors import FscoordError, LockLostError
from fscoord.recipes._cleanup import Undoable, undone_by
from fscoord.recipes._entry import Entry
from fscoord.recipes._lease import LeaseRenewer
from fscoord.recipes._line import Line, Policy, callers, one
from fscoord.store import Store, begin_span, needed_store, shown

LABEL_MAX: Final = 100
"""The greatest length of a label, in characters."""

RUNS_LATER: Final = 0x20 | 0x80 | 0x200
"""The code flags of generator functions, coroutine functions and asynchronous generator functions."""

F = TypeVar("F", bound=Callable[..., Any])
H = TypeVar("H", bound="Exclusive")

acquiring: Final = undone_by(lambda hold, got, _: hold._undo(got))
"""Decorates a method that calls `Exclusive._acquire`. If the method raises, nothing is acquired."""
releasing: Final = undone_by(lambda hold, gone, here: hold._finish(gone, here), FscoordError)
"""Decorates a method that calls `Exclusive._release_one`. If a signal interrupts the release, the undo completes it."""


class Contender(NamedTuple):
    """A process that holds a lock or a semaphore, leads in an election, or waits in line for one of these.

    Attributes:
        owner: the process, ``host:pid``.
        session: the session number of the process's handle; 0 on a store without sessions.
        token: the fencing token; 0 while the process waits.
        label: the label that the contender gave itself; ``""`` if it has none.
    """

    owner: str
    session: int
    token: int
    label: str = ""


class HeldEntry:
    """One hold.

    Attributes:
        entry: the entry in line.
        renewal: the renewer of the entry's lease, or None.
        here: identifies the thread or task.
        epoch: the `system.process_epoch` at the acquisition.
        levels: an id for each acquisition that was not released yet, and the mode of the object that acquired. Only a
            `Reentrant` has more than one.
    """

    __slots__ = ("entry", "epoch", "here", "levels", "renewal")

    def __init__(self, entry: Entry, renewal: LeaseRenewer | None, here: object) -> None:
        self.entry, self.renewal, self.here, self.epoch = entry, renewal, here, system.process_epoch()
        self.levels: list[tuple[str, str]] = [(entry.id, entry.mode)]


_POP: Final = list[HeldEntry].pop


class Exclusive(Undoable, ContextDecorator):
    """A resource for which contenders wait in line.

    `_policy` decides how many contenders at the head of the line hold the resource.

    Threads may share an object. In a forked child the object holds nothing. An object is also a context manager, and a
    decorator of functions.
    """

    _policy: Policy = staticmethod(one)
    _mode = "x"
    _span_kind = "lock"
    _what = "the hold on"
    _kind = LOCK
    _whose = "process"

    __reduce__ = refuse_copies

    def __init__(
        self,
        store: Store,
        name: Key,
        timeout: Timeout | None = None,
        ttl: Timeout | None = None,
        *,
        label: str = "",
        auto_renew: bool = True,
    ) -> None:
        self._store = needed_store(store)
        self._ttl = 0.0 if ttl is None else to_seconds(ttl, "ttl")
        if ttl is not None and not 0 < self._ttl < math.inf:
            raise ValueError(
                f"ttl must be a finite time above zero, not {ttl!r}; omit it for a hold that does not expire"
            )
        if ttl is None and not auto_renew:
            raise ValueError("auto_renew=False is for a hold with a lease: give its length as ttl")
        if len(label) > LABEL_MAX:
            raise ValueError(f"a label may have {LABEL_MAX} characters, and {label[:20]!r}... has {len(label)}")
        self._auto_renew = auto_renew
        self._pending: dict[str, int] = {}  # by the entry's id: the `system.process_epoch` of each wait in line
        self._line = Line(store, name, self._policy, self._ttl, label)
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._held: list[HeldEntry] = []
        # Made here, and not at the import, because gevent and eventlet may replace `threading.local` after the import.
        self._here = system.threading.local()
        self._spans: dict[str, tracing.Span] = {}  # by the entry's id; empty unless this process records a trace

    def __repr__(self) -> str:
        return shown(self, self._store, key_bytes(self.name), self._state())

    def _state(self) -> str:
        """Return "held" with the tokens of this process, or "not held", for `repr`."""
        tokens = [str(entry.token) for entry in self._entries()]
        return f"held with token{'s' if len(tokens) > 1 else ''} {', '.join(tokens)}" if tokens else "not held"

    def _entries(self) -> list[Entry]:
        """Return the entries of this object's holds in this process. `_current` returns the last one."""
        return [held.entry for held in list(self._held) if held.epoch == system.process_epoch()]

    @property
    def name(self) -> str:
        """The name of this resource in the store."""
        return self._line.name

    def holders(self) -> list[Contender]:
        """Return the holders that are not known dead, in the order of their tokens."""
        return [contender_of(entry) for entry in self._line.living() if entry.token]

    def waiters(self) -> list[Contender]:
        """Return the waiting contenders that are not known dead, in the order of their requests."""
        return [contender_of(entry) for entry in self._line.living() if not entry.token]

    def _acquire(self, got: list[str], here: object, blocking: bool, timeout: Timeout | None) -> bool | WaitSteps[bool]:
        """Acquire the resource for the thread or task `here`.

        If `Line.take_free` acquires the resource, return True. Otherwise return steps that wait in line. The result of
        the steps is whether the resource was acquired. The id of the new entry is appended to `got` before the entry is
        written, so that `_undo` can remove the entry.
        """
        limit = self._limit(blocking, timeout)
        line = self._line
        name = line.new_id()
        got.append(name)
        callers[name] = weakref.ref(system.threading.current_thread() if type(here) is dict else here)
        if tracing.recorder is not None:
            span = begin_span(self._span_kind, self._store, key_bytes(self.name), None, "what", self._what)
            if span is not None:
                self._spans[name] = span  # until the release
        served = line.take_free(name, self._mode)
        if served is None:
            return self._stand_in_line(name, here, blocking, limit)
        return self._keep(served, name, here)

    def _stand_in_line(self, name: str, here: object, blocking: bool, limit: float) -> WaitSteps[bool]:
        """Enter the line as `name`, and wait for up to `limit` seconds. Return whether the resource was acquired."""
        end = system.time.monotonic() + limit
        self._pending[name] = system.process_epoch()
        try:
            entry = self._line.join(name, self._mode, only_if_served=not blocking, limit=limit)
            if entry is not None and not entry.token:
                if limit > 0:
                    self._check_wait(entry)
                entry = yield from self._line.await_turn(entry, max(0.0, end - system.time.monotonic()), self._kind)
                if entry is None and limit > 0 and self._spans:
                    self._end_span(name, "time-out")
        finally:
            self._pending.pop(name, None)
            self._line.end_wait(name)
        return self._keep(entry, name, here)

    def _check_wait(self, entry: Entry) -> None:
        """Raise `RuntimeError` if the wait of `entry` would be a deadlock. `_undo` then removes the entry."""

    def _keep(self, served: Entry | None, name: str, here: object) -> bool:
        """Record that the entry `served`, with the id `name`, holds the resource. Return False if `served` is None."""
        if self._spans:
            self._note_turn(served, name)
        if served is None:
            callers.pop(name, None)
            return False
        is_renewed = self._ttl and self._auto_renew
        renewal = LeaseRenewer(self.name, self._line.renew, served, self._lost) if is_renewed else None
        self._held.append(HeldEntry(served, renewal, here))
        if renewal is not None:
            renewal.start()
        self._begin(served)
        return True

    def _begin(self, served: Entry) -> None:
        """Do the subclass's part of an acquisition. If this method raises, the acquisition is undone."""

    def _undo(self, got: list[str]) -> None:
        """Undo an acquisition that raised an error at an unknown point. `got` has the ids of the acquisition's entries.

        This method may be called twice, and the first call may be interrupted.
        """
        for name in got:
            for held in [held for held in list(self._held) if held.entry.id == name]:
                self._forget(held)
            callers.pop(name, None)
            self._line.leave_quietly(name)
            if self._spans:
                self._end_span(name, "failed")

    def _note_turn(self, served: Entry | None, name: str) -> None:
        """Record the length of a wait in the trace span of the entry `name`. If `served` is None, end the span."""
        if served is None:
            self._end_span(name, "not acquired")
            return
        span = self._spans.get(name)
        if span is not None and tracing.recorder is not None:
            waited = system.time.monotonic_ns() - span[tracing.BEGIN]
            tracing.recorder.acquired(span, "waited_ns", waited, "token", served.token)

    def _end_span(self, name: str, outcome: str) -> None:
        tracing.end(self._spans.pop(name, None), outcome)

    def _lost(self, entry: Entry) -> LockLostError:
        """Return the error for the lost hold of `entry`, and end its trace span."""
        self._end_span(entry.id, "lost")
        return self._line.lost(entry)

    def _stop(self, held: HeldEntry) -> None:
        callers.pop(held.entry.id, None)
        if held.renewal is not None:
            held.renewal.end()

    def _forget(self, held: HeldEntry) -> None:
        """Do all of a release but the change of the line. This method may be called twice."""
        self._stop(held)
        try:
            self._held.remove(held)
        except ValueError as error:  # another thread has released it, or `_take` has removed it
            raise_unless_absent(error)

    def _limit(self, blocking: bool, timeout: Timeout | None) -> float:
        """Return how many seconds `acquire` waits. The arguments are those of `threading.Lock.acquire`."""
        if timeout == -1:
            return math.inf
        if not blocking and timeout is not None:
            raise ValueError("can't specify a timeout for a non-blocking call; omit one of the two arguments")
        return self._patience() if timeout is None else to_seconds(timeout)

    def _patience(self) -> float:
        """Return how many seconds a ``with`` statement waits to acquire."""
        return to_seconds(self._store.timeout) if self._timeout is None else self._timeout

    def _entering(self: H, found: bool | WaitSteps[bool], limit: float) -> WaitSteps[H]:
        """Complete an acquisition whose `_acquire` returned `found`, and return this object.

        Raises:
            StoreTimeoutError: the resource was not acquired within `limit` seconds.
        """
        if not (found if isinstance(found, bool) else (yield from found)):
            raise self._line.timed_out(self._what, limit)
        return self

    def _release(self, gone: list[HeldEntry | str], here: object) -> bool:
        """Release the latest hold of this object. `here` identifies the calling thread or task.

        The hold is moved to `gone` first, so that `_finish` can complete an interrupted release.

        Returns:
            False if this object holds nothing.

        Raises:
            LockLostError: the hold was lost before.
        """
        if not self._take(gone, here):
            return False
        held = gone[-1]
        assert not isinstance(held, str)
        self._stop(held)
        if not self._line.leave(held.entry.id):
            raise self._lost(held.entry)
        if self._spans:
            self._end_span(held.entry.id, "released")
        return True

    def _take(self, gone: list[HeldEntry | str], here: object) -> bool:  # noqa: ARG002 - see `Reentrant`
        """Move the latest hold of this object to `gone`. Return False if this object holds nothing."""
        self._current()
        try:
            # One C call, because other threads may share the object, and a Ctrl-C may come between two calls.
            gone.extend(map(_POP, (self._held,)))
        except IndexError as error:
            raise_unless_absent(error)
            return False
        return True

    def _release_one(self, gone: list[HeldEntry | str], here: object) -> None:
        """Call `_release`, and raise `RuntimeError` if this object holds nothing."""
        if not self._release(gone, here):
            gone.append("")  # nothing is left for `_finish`
            raise self._not_held()

    def _finish(self, gone: list[HeldEntry | str], here: object) -> None:
        """Complete an interrupted `_release`, which had the same argument `gone`. This method may be called twice."""
        if not gone:
            with suppress(FscoordError):
                self._release(gone, here)
        for held in gone:
            if not isinstance(held, str):
                self._forget(held)
                self._line.leave_quietly(held.entry.id)
                if self._spans:
                    self._end_span(held.entry.id, "released")

    def _not_held(self) -> Exception:
        return RuntimeError(f"{self._what} {self.name!r} is not held by this object, in this {self._whose}")

    def _current(self) -> Entry | None:
        """Return the entry of this process's latest hold, or None."""
        if self._held and self._held[-1].epoch != system.process_epoch():
            self._held.clear()  # this is a forked child, and its parent has the holds
        return self._held[-1].entry if self._held else None

    @acquiring
    def acquire(
        self, _got: list[str], _here: object, blocking: bool = True, timeout: Timeout | None = -1
    ) -> bool | WaitSteps[bool]:
        """Acquire the resource as `threading.Lock.acquire` does. Return whether the resource was acquired.

        Without a timeout the call waits without limit, as in `threading`. All other waits of this package have a limit
        by default.

        Args:
            blocking: whether to wait.
            timeout: how long to wait, in seconds or as a `timedelta`. None means this object's `timeout`, or else the
                store's timeout. With 0 the call tries once. Both ``math.inf`` and -1, as in `threading`, mean no limit.

        Raises:
            LockLostError: another process removed this contender from the line.
            AcquireCancelledError: another thread or task called `cancel` during the wait.
        """
        return self._acquire(_got, _here, blocking, timeout)

    def cancel(self) -> None:
        """End the waits of this object's acquisitions, which other threads or tasks of this process have begun.

        Each of them leaves the line, and raises `~fscoord.AcquireCancelledError`. An acquisition whose turn comes at
        the same moment may still succeed. Later acquisitions are not cancelled.
        """
        for name, epoch in list(self._pending.items()):
            if epoch == system.process_epoch():  # a forked child leaves its parent's waits alone
                try:
                    self._line.cancel(name)
                finally:
                    if name not in self._pending:  # the waiter left before its wake key was set
                        self._line.end_wait(name)
                        self._line.settle()

    @releasing
    def release(self, gone: list[HeldEntry | str], here: object) -> None:
        """Release this object's latest acquisition.

        The next contender in line acquires. No other contender is woken.

        Raises:
            RuntimeError: this object holds nothing, or its acquisition was made in the parent process, before a fork.
            LockLostError: the hold was lost before, so another process may have held the lock at the same time.
        """
        self._release_one(gone, here)

    def check(self) -> None:
        """Check in the store that this object's latest acquisition is still valid.

        Raises:
            LockLostError: the acquisition was lost, or this object holds nothing.
        """
        entry = self._current()
        if entry is None:
            raise LockLostError(str(self._not_held()))
        if not self._line.still_holds(entry):
            raise self._lost(entry)

    def renew(self) -> None:
        """Renew the leases of this object's acquisitions: each lasts for another `ttl`.

        With ``auto_renew=False`` no thread does this.

        Raises:
            LockLostError: an acquisition was lost, or this object holds nothing.
            RuntimeError: this object was made without a `ttl`.
        """
        if not self._ttl:
            raise RuntimeError(f"{self._what} {self.name!r} has no lease to renew: give its length as ttl")
        self._current()
        entries = self._entries()
        if not entries:
            raise LockLostError(str(self._not_held()))
        for entry in entries:
            if not self._line.renew(entry.id):
                raise self._lost(entry)

    @property
    def is_acquired(self) -> bool:
        """Whether this object holds the resource, as far as this process knows. `check` asks the store."""
        return self._current() is not None

    @property
    def token(self) -> int:
        """The fencing token: a number that rises with each acquisition, by any process.

        A process that was stopped for long continues as if it still held the lock. Send the token with each write. The
        receiver must refuse a write whose token is lower than the highest token so far. `fscoord.recipes.Fenced` is
        such a receiver.

        Raises:
            RuntimeError: this object holds nothing.
        """
        entry = self._current()
        if entry is None:
            raise RuntimeError(str(self._not_held()))
        return entry.token

    def __call__(self, function: F) -> F:
        """Decorate `function`: each call runs in a ``with`` block of this object. Example: ``@Lock(store, "report")``.

        Raises:
            TypeError: `function` is a coroutine function or a generator function. The body of `function` would run
                after the call.
        """
        if getattr(getattr(function, "__code__", None), "co_flags", 0) & RUNS_LATER:
            raise TypeError(
                f"the body of {function.__qualname__} runs after the call, when {self._what} {self.name!r} would be"
                " released already: use a `with` in the body, or fscoord.aio for a coroutine function"
            )
        return super().__call__(function)

    @acquiring
    def __enter__(self: H, got: list[str], here: object) -> H:  # noqa: PLE0302 - they are not given
        limit = self._patience()
        found = self._acquire(got, here, True, limit)
        steps: Any = None if found is True else self._entering(found, limit)
        return self if steps is None else steps

    @releasing
    def __exit__(self, gone: list[HeldEntry | str], here: object, *_: object) -> None:  # noqa: PYI036 - as above
        self._release_one(gone, here)


def contender_of(entry: Entry) -> Contender:
    """Return the public description of `entry`."""
    return Contender(entry.owner, entry.session, entry.token, unescape_word(entry.label))
