"""`Holder`: what all recipes share in which somebody holds something for a while and others wait in line for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, TypeVar

from fscoord import _system as system
from fscoord.arguments import Key, Timeout, seconds
from fscoord.errors import HoldLostError
from fscoord.recipes._line import Entry, Line
from fscoord.store import Store

__all__ = ["Exclusive", "Holder", "Waiter"]

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
        self, store: Store, name: Key, policy: Callable[[list[Entry]], int], timeout: Timeout | None = None
    ) -> None:
        self._store = store
        self._line = Line(store, name, policy)
        self._timeout = None if timeout is None else seconds(timeout)
        self._held: list[tuple[int, Entry]] = []  # each with the process that holds it

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

    def _acquire(self, mode: str, blocking: bool, timeout: Timeout) -> bool:
        """Do what `acquire` of `threading` does."""
        if not blocking and timeout != -1:
            raise ValueError("a call that does not block takes no timeout")
        limit = math.inf if timeout == -1 else seconds(timeout)
        new = self._line.newcomer(mode)
        try:
            if not blocking:
                served = self._line.join_if_served(new)
            else:
                served = self._line.join(new)
                if not served.token:
                    served = self._line.await_turn(new, limit)
            if served:
                self._held.append((system.os.getpid(), served))
        except BaseException:
            self._line.leave_quietly(new)  # nobody may know yet whether it stands there
            raise
        return served is not None

    def _enter(self, mode: str) -> None:
        """Acquire, or raise `StoreTimeoutError`."""
        limit = seconds(self._store.timeout) if self._timeout is None else self._timeout
        if not self._acquire(mode, True, limit):
            raise self._line.timed_out(self._what, limit)

    def _release(self) -> None:
        """Give back what was acquired last.

        Raises:
            RuntimeError: this object holds nothing.
            HoldLostError: it was taken away meanwhile.
        """
        self._current()
        try:
            entry = self._held.pop()[1]  # in one step: threads may share the object
        except IndexError:
            raise RuntimeError(f"{self._what} {self.name!r} is not held by this object, in this process") from None
        if not self._line.leave(entry):
            raise self._line.lost(entry)

    def _current(self) -> Entry | None:
        """Return the last of the holds of this process."""
        if self._held and self._held[-1][0] != system.os.getpid():
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
        return self._acquire(self._mode, blocking, timeout)

    def release(self) -> None:
        """Give it back; who is first in line gets it, and nobody else is woken.

        Raises:
            RuntimeError: this object does not hold it, or did so in the process that this one was forked from.
            HoldLostError: it was taken away meanwhile. What was done under it may have been done beside another.
        """
        self._release()

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
        self._enter(self._mode)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._release()


def _shown(entry: Entry) -> Waiter:
    return Waiter(entry.owner, entry.session, entry.token)
