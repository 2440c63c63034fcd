"""`Holder`: what all recipes share in which somebody holds something for a while and others wait in line for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

from fscoord._arguments import Key, Timeout, to_seconds
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord._waiting.wait import WaitSteps
from fscoord.errors import FscoordError, LockLostError
from fscoord.recipes._cleanup import HERE, await_end, go_on_in_thread
from fscoord.recipes._entry import Entry
from fscoord.recipes._lease import LeaseRenewer
from fscoord.recipes._line import Line
from fscoord.store import Store, run_blocking

__all__ = ["Contender", "Exclusive", "HeldEntry", "Holder"]

HeldEntry = tuple[int, Entry, "LeaseRenewer | None"]
"""What is held: the `system.process_epoch` of the process that holds it, its entry, and what renews its lease."""
_POP: Final = list[HeldEntry].pop
H = TypeVar("H", bound="Exclusive")


class Contender(NamedTuple):
    """A process that holds a lock, semaphore or office, or waits in line for one.

    Attributes:
        owner: its process, ``host:pid``.
        session: the number of its handle among the members of the store; 0 where the store keeps none.
        token: its fencing token; 0 while it waits.
    """

    owner: str
    session: int
    token: int


class Holder:
    """Something that at most so many hold, and for which the others wait in the order in which they came.

    An object may be shared by threads. In a forked child it holds nothing.
    """

    _what = "the hold on"
    _whose = "process"

    def __init__(
        self,
        store: Store,
        name: Key,
        policy: Callable[[list[Entry]], int],
        timeout: Timeout | None = None,
        ttl: Timeout | None = None,
    ) -> None:
        self._store = store
        self._ttl = 0.0 if ttl is None else to_seconds(ttl)
        if ttl is not None and not 0 < self._ttl < math.inf:
            raise ValueError(f"ttl must be a time above zero, not {ttl!r}; without it a hold has no end")
        self._line = Line(store, name, policy, self._ttl)
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._held: list[HeldEntry] = []

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return self._line.name

    def holders(self) -> list[Contender]:
        """Return who holds it, in the order of their tokens; who is known dead holds nothing."""
        return [_shown(entry) for entry in self._line.living() if entry.token]

    def waiters(self) -> list[Contender]:
        """Return who waits for it, first come first; who is known dead waits for nothing."""
        return [_shown(entry) for entry in self._line.living() if not entry.token]

    def _acquire(self, mode: str, blocking: bool, timeout: Timeout | None, got: list[str]) -> bool:
        """Carry out `_acquire_steps` in this thread."""
        return run_blocking(self._store, self._acquire_steps(mode, blocking, timeout, got))

    def _acquire_steps(self, mode: str, blocking: bool, timeout: Timeout | None, got: list[str]) -> WaitSteps[bool]:
        """Like `acquire` of `threading`. Puts the id of the entry into `got` first, for `_undo` to take back."""
        limit = self._limit(blocking, timeout)
        name = self._line.new_id()
        got.append(name)
        served = self._line.take_free(name, mode)
        if served is None:
            served = yield from self._standing_in_line(name, mode, blocking, limit)
        return self._keep(served)

    def _standing_in_line(self, name: str, mode: str, blocking: bool, limit: float) -> WaitSteps[Entry | None]:
        """Enter the line as `name` and return the entry when it is served, or None if that did not come about."""
        end = system.time.monotonic() + limit
        entry = self._line.join(name, mode, only_if_served=not blocking, limit=limit)
        if entry is None or entry.token:
            return entry
        return (yield from self._line.await_turn(entry, max(0.0, end - system.time.monotonic())))

    def _keep(self, served: Entry | None) -> bool:
        """Begin the hold that was served, if one was; return whether."""
        if served is None:
            return False
        renewal = LeaseRenewer(self._line, served) if self._ttl else None
        self._held.append((system.process_epoch(), served, renewal))
        if renewal is not None:
            renewal.start()
        self._begin(served)
        return True

    def _begin(self, served: Entry) -> None:
        """What else belongs to an acquisition that has just been done; should it fail, it is undone."""

    def _end(self, served: Entry) -> None:
        """What belongs to a release, before the line is left. It may be called twice."""

    def _undo(self, got: list[str]) -> None:
        """After an error in an acquisition that put this into `got`: nobody may know yet how far that came.

        It may be called twice, the first time not to the end.
        """
        for name in got:
            for held in [held for held in list(self._held) if held[1].id == name]:
                self._end(held[1])
                self._stop(held)
                try:
                    self._held.remove(held)
                except ValueError as error:  # another thread has released it
                    raise_unless_absent(error)
            self._line.leave_quietly(name)

    def _stop(self, held: HeldEntry) -> None:
        if held[2] is not None:
            held[2].end()

    def _limit(self, blocking: bool, timeout: Timeout | None) -> float:
        """Return for how many seconds an acquisition with these arguments of `threading` waits."""
        if timeout == -1:
            return math.inf
        if not blocking and timeout is not None:
            raise ValueError("a call that does not block takes no timeout")
        return self._patience() if timeout is None else to_seconds(timeout)

    def _patience(self) -> float:
        """Return for how many seconds a ``with`` waits."""
        return to_seconds(self._store.timeout) if self._timeout is None else self._timeout

    def _enter(self, mode: str, got: list[str]) -> None:
        """Acquire, or raise `StoreTimeoutError`."""
        limit = self._patience()
        if not self._acquire(mode, True, limit, got):
            raise self._line.timed_out(self._what, limit)

    def _release(self, gone: list[HeldEntry | str], here: object) -> bool:  # noqa: ARG002 - see `RLock`
        """Give back what was acquired last, and put it into `gone` first; `here` stands for the calling thread.

        Returns:
            False if this object holds nothing.

        Raises:
            LockLostError: it was taken away meanwhile.
        """
        self._current()
        try:
            # In one step: threads may share the object, and between two steps a Ctrl-C may come.
            gone.extend(map(_POP, (self._held,)))
        except IndexError as error:
            raise_unless_absent(error)
            return False
        held = gone[0]
        assert not isinstance(held, str)
        self._end(held[1])
        self._stop(held)
        if not self._line.leave(held[1].id):
            raise self._line.lost(held[1])
        return True

    def _finish(self, gone: list[HeldEntry | str], here: object) -> None:
        """Do what `_release`, which put what it gave back into `gone`, was interrupted in. It may be called twice."""
        if not gone:
            with suppress(FscoordError):
                self._release(gone, here)
        for held in gone:
            if not isinstance(held, str):
                self._end(held[1])
                self._stop(held)
                self._line.leave_quietly(held[1].id)

    def _not_held(self) -> str:
        return f"{self._what} {self.name!r} is not held by this object, in this {self._whose}"

    def _current(self) -> Entry | None:
        """Return the last of the holds of this process."""
        if self._held and self._held[-1][0] != system.process_epoch():
            self._held.clear()  # it was forked: its parent has them
        return self._held[-1][1] if self._held else None

    def _check(self) -> None:
        entry = self._current()
        if entry is None:
            raise LockLostError(self._not_held())
        if not self._line.still_holds(entry):
            raise self._line.lost(entry)


class Exclusive(Holder):
    """A `Holder` that is acquired in one way only, and a context manager."""

    _mode = "x"

    def acquire(self, blocking: bool = True, timeout: Timeout | None = -1) -> bool:
        """Acquire it, as `threading.Lock.acquire` does, and return whether that was done.

        As there, a call without a timeout waits without limit; all other waits of this package have one by default.

        Args:
            blocking: whether to wait.
            timeout: how long, in seconds or as a `timedelta`. None means the `timeout` that this object was made with,
                or else the store's; 0 looks once. ``math.inf`` is no limit, and so is -1, as in `threading`.

        Raises:
            LockLostError: somebody took this one out of the line.
        """
        got: list[str] = []
        over: list[object] = []
        try:
            return self._acquire(self._mode, blocking, timeout, got)
        except BaseException:  # each line of this is explained in `_cleanup`
            try:
                self._undo(got)
            except BaseException:
                go_on_in_thread((over, self._undo, got))
                await_end(over)
                raise
            raise

    def release(self) -> None:
        """Give it back; who is first in line gets it, and nobody else is woken.

        Raises:
            RuntimeError: this object does not hold it, or did so in the process that this one was forked from.
            LockLostError: it was taken away meanwhile. What was done under it may have been done beside another.
        """
        gone: list[HeldEntry | str] = []
        over: list[object] = []
        here = HERE.__dict__
        try:
            if self._release(gone, here):
                return
        except FscoordError:
            raise
        except BaseException:
            try:
                self._finish(gone, here)
            except BaseException:
                go_on_in_thread((over, self._finish, gone, here))
                await_end(over)
                raise
            raise
        raise RuntimeError(self._not_held())

    def check(self) -> None:
        """Look whether this object still holds it.

        Raises:
            LockLostError: it does not.
        """
        self._check()

    @property
    def token(self) -> int:
        """The fencing token: a number that rises with each hold, whoever has it.

        Whoever was stopped for long and wakes up still believes that it holds the lock. Give the token along with what
        you write, and have the receiver refuse a token lower than one it has seen.

        Raises:
            RuntimeError: this object does not hold it.
        """
        entry = self._current()
        if entry is None:
            raise RuntimeError(self._not_held())
        return entry.token

    def __enter__(self: H) -> H:
        got: list[str] = []
        over: list[object] = []
        try:
            self._enter(self._mode, got)
            return self
        except BaseException:
            try:
                self._undo(got)
            except BaseException:
                go_on_in_thread((over, self._undo, got))
                await_end(over)
                raise
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gone: list[HeldEntry | str] = []
        over: list[object] = []
        here = HERE.__dict__
        try:
            if self._release(gone, here):
                return
        except FscoordError:
            raise
        except BaseException:
            try:
                self._finish(gone, here)
            except BaseException:
                go_on_in_thread((over, self._finish, gone, here))
                await_end(over)
                raise
            raise
        raise RuntimeError(self._not_held())


def _shown(entry: Entry) -> Contender:
    return Contender(entry.owner, entry.session, entry.token)
