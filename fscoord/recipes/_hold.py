"""`Holder`: what all recipes share in which somebody holds something for a while and others wait in line for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, TypeVar

from fscoord import _system as system
from fscoord._sought import Turns, take_turns
from fscoord.arguments import Key, Timeout, seconds
from fscoord.errors import HoldLostError
from fscoord.recipes._entry import Entry
from fscoord.recipes._lease import Renewal
from fscoord.recipes._line import Line
from fscoord.store import Store

__all__ = ["Exclusive", "Holder", "Waiter"]

_Held = tuple[int, Entry, "Renewal | None"]  # with the life of the process that holds it, see `_system.life`
_POP: Final = list[_Held].pop
H = TypeVar("H", bound="Exclusive")


class Waiter(NamedTuple):
    """One who holds or waits.

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

    def __init__(
        self,
        store: Store,
        name: Key,
        policy: Callable[[list[Entry]], int],
        timeout: Timeout | None = None,
        ttl: Timeout | None = None,
    ) -> None:
        self._store = store
        self._ttl = 0.0 if ttl is None else seconds(ttl)
        if ttl is not None and not 0 < self._ttl < math.inf:
            raise ValueError(f"ttl must be a time above zero, not {ttl!r}; without it a hold has no end")
        self._line = Line(store, name, policy, self._ttl)
        self._timeout = None if timeout is None else seconds(timeout)
        self._held: list[_Held] = []

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return self._line.name

    def owners(self) -> list[Waiter]:
        """Return who holds it, in the order of their tokens."""
        return [_shown(entry) for entry in self._line.entries() if entry.token]

    def waiters(self) -> list[Waiter]:
        """Return who waits for it, first come first."""
        return [_shown(entry) for entry in self._line.entries() if not entry.token]

    def _acquire(self, mode: str, blocking: bool, timeout: Timeout, got: list[str]) -> bool:
        """Do what `acquire` of `threading` does, and put into `got` what has been got and is to be given back."""
        limit = _limit(blocking, timeout)
        name = self._line.new_id()
        try:
            served = self._line.take_free(name, mode)
            if served is None:
                served = take_turns(self._store, self._standing_in_line(name, mode, blocking, limit))
            return self._keep(name, served, got)
        except BaseException:
            self._undo(name, got)
            raise

    def _acquiring(self, mode: str, blocking: bool, timeout: Timeout, got: list[str]) -> Turns[bool]:
        """Do what `_acquire` does, for tasks of an event loop."""
        limit = _limit(blocking, timeout)
        name = self._line.new_id()
        try:
            served = self._line.take_free(name, mode)
            if served is None:
                served = yield from self._standing_in_line(name, mode, blocking, limit)
            return self._keep(name, served, got)
        except BaseException:
            self._undo(name, got)
            raise

    def _standing_in_line(self, name: str, mode: str, blocking: bool, limit: float) -> Turns[Entry | None]:
        """Enter the line as `name` and return the entry when it is served, or None if that did not come about."""
        entry = self._line.join(name, mode, only_if_served=not blocking)
        return entry if entry is None or entry.token else (yield from self._line.await_turn(entry, limit))

    def _keep(self, name: str, served: Entry | None, got: list[str]) -> bool:
        """Begin the hold that was served, if one was; return whether."""
        if served is None:
            return False
        renewal = Renewal(self._line, served) if self._ttl else None
        self._held.append((system.life(), served, renewal))
        if renewal is not None:
            renewal.start()
        self._begin(served)
        got.append(name)
        return True

    def _begin(self, served: Entry) -> None:
        """What else belongs to an acquisition that has just been done; should it fail, it is undone."""

    def _end(self) -> None:
        """What belongs to a release, before the line is left. It may be called twice."""

    def _undo(self, name: str, got: list[str]) -> None:
        """After an error in an acquisition: nobody may know yet how far that came."""
        for held in [held for held in self._held if held[1].id == name]:
            self._held.remove(held)
            self._stop(held)
        self._line.leave_quietly(name)
        got.clear()

    def _stop(self, held: _Held) -> None:
        if held[2] is not None:
            held[2].end()

    def _patience(self) -> float:
        """Return for how many seconds a ``with`` waits."""
        return seconds(self._store.timeout) if self._timeout is None else self._timeout

    def _enter(self, mode: str, got: list[str]) -> None:
        """Acquire, or raise `StoreTimeoutError`."""
        limit = self._patience()
        if not self._acquire(mode, True, limit, got):
            raise self._line.timed_out(self._what, limit)

    def _give_back(self, got: list[str]) -> None:
        """After a Ctrl-C between an acquisition and the return to whoever asked for it."""
        if got:
            self._release([])

    def _finish(self, gone: list[_Held | None], error: BaseException) -> None:
        """After `error` in `_release`, which put what it gave back into `gone`: if it was a Ctrl-C, do what was not."""
        if isinstance(error, Exception):
            return
        with suppress(Exception):
            if not gone:
                self._release(gone)
        for held in filter(None, gone):
            self._end()
            self._stop(held)
            self._line.leave_quietly(held[1].id)

    def _release(self, gone: list[_Held | None]) -> None:
        """Give back what was acquired last, and put it into `gone` first.

        Raises:
            RuntimeError: this object holds nothing.
            HoldLostError: it was taken away meanwhile.
        """
        self._current()
        try:
            # In one step: threads may share the object, and between two steps a Ctrl-C may come.
            gone.extend(map(_POP, (self._held,)))
        except IndexError:
            raise RuntimeError(f"{self._what} {self.name!r} is not held by this object, in this process") from None
        held = gone[0]
        assert held is not None
        self._end()
        self._stop(held)
        if not self._line.leave(held[1].id):
            raise self._line.lost(held[1])

    def _current(self) -> Entry | None:
        """Return the last of the holds of this process."""
        if self._held and self._held[-1][0] != system.life():
            self._held.clear()  # it was forked: its parent has them
        return self._held[-1][1] if self._held else None

    def _check(self) -> None:
        entry = self._current()
        if entry is None:
            raise HoldLostError(f"{self._what} {self.name!r} is not held by this object, in this process")
        if not self._line.still_holds(entry):
            raise self._line.lost(entry)


class Exclusive(Holder):
    """A `Holder` that is acquired in one way only, and a context manager."""

    _mode = "x"

    def acquire(self, blocking: bool = True, timeout: Timeout = -1) -> bool:
        """Acquire it, as `threading.Lock.acquire` does, and return whether that was done.

        Args:
            blocking: whether to wait.
            timeout: how long, in seconds or as a `timedelta`; -1 is no limit.

        Raises:
            HoldLostError: somebody took this one out of the line.
        """
        got: list[str] = []
        try:
            return self._acquire(self._mode, blocking, timeout, got)
        except BaseException:
            self._give_back(got)
            raise

    def release(self) -> None:
        """Give it back; who is first in line gets it, and nobody else is woken.

        Raises:
            RuntimeError: this object does not hold it, or did so in the process that this one was forked from.
            HoldLostError: it was taken away meanwhile. What was done under it may have been done beside another.
        """
        gone: list[_Held | None] = []
        try:
            self._release(gone)
        except BaseException as failure:
            self._finish(gone, failure)
            raise

    def check(self) -> None:
        """Look whether this object still holds it.

        Raises:
            HoldLostError: it does not.
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
            raise RuntimeError(f"{self._what} {self.name!r} is not held by this object, in this process")
        return entry.token

    def __enter__(self: H) -> H:
        got: list[str] = []
        try:
            self._enter(self._mode, got)
            return self
        except BaseException:
            self._give_back(got)
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gone: list[_Held | None] = []
        try:
            self._release(gone)
        except BaseException as failure:
            self._finish(gone, failure)
            raise


def _limit(blocking: bool, timeout: Timeout) -> float:
    """Return for how many seconds an acquisition with these arguments of `threading` waits."""
    if timeout == -1:
        return math.inf
    if not blocking:
        raise ValueError("a call that does not block takes no timeout")
    return seconds(timeout)


def _shown(entry: Entry) -> Waiter:
    return Waiter(entry.owner, entry.session, entry.token)
