"""`Watch`, the base class of iterators over the changes of a store's keys; `Change`, and its `Position`."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NamedTuple

from fscoord._arguments import key_text
from fscoord._waiting.awaited import CHANGE_OF, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import CHANGES, WaitRequest
from fscoord.errors import CompactedError, StoreError


class Position(NamedTuple):
    """The place of a change in the order of all changes of a store.

    Positions of one store can be compared: the later change has the greater position. ``str(position)`` is a text that
    `Store.watch` accepts. The attributes have a meaning for the store alone.
    """

    generation: int
    offset: int
    log: str = ""

    def __str__(self) -> str:
        return f"{self.generation}.{self.offset}{self.log and '.'}{self.log}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return the position whose text is `text`.

        Raises:
            ValueError: `text` is not the text of a position.
        """
        generation, _, rest = text.partition(".")
        offset, _, log = rest.partition(".")
        if generation.isdecimal() and offset.removeprefix("-").isdecimal():
            return cls(int(generation), int(offset), log)
        raise ValueError(f"{text!r} is not a position: give the position of a change, such as 0.4711.5d1c08f2")


class Change(NamedTuple):
    """One change of the value of a key.

    Attributes:
        key: the key.
        kind: ``"set"`` if the key has got a value, ``"delete"`` if it has lost its value.
        value: the whole new value, also after an `add` or an `append`; None for ``"delete"``.
        position: the place of the change in the order of all changes.
    """

    key: str
    kind: str
    value: bytes | None
    position: Position


def change_of(key: bytes, value: bytes | None, position: Position) -> Change:
    """Return the change that has set `key` to `value`, or has deleted `key` if `value` is None."""
    return Change(key_text(key), "delete" if value is None else "set", value, position)


def compacted(place: object, after: Position, first: Position) -> CompactedError:
    """Return the error that says that the store `place` has no longer all changes after `after`."""
    how = f"read the keys, and watch after position {first}"
    return CompactedError(
        f"{place}: changes after position {after} were removed by a compaction; {how}", position=first
    )


def refuse_later(place: object, after: Position | None, now: Position) -> Position:
    """Return `after`, or `now`, the newest position of the store `place`, if `after` is None.

    Raises:
        StoreError: `after` is later than `now`.
    """
    if after is not None and after > now:
        raise StoreError(f"{place}: position {after} is after the newest change, {now}, so it is of another store")
    return now if after is None else after


class Watch(Iterator[Change], AbstractContextManager["Watch"]):
    """An iterator over the changes of a store's keys; see `Store.watch`. Only one thread at a time may use it.

    `close`, or the end of a ``with`` statement, ends the watch. Each kind of store has a subclass, which finds changes.
    """

    def __init__(self, prefix: bytes, position: Position, longest: float) -> None:
        self._prefix = prefix  # the beginning of the watched keys in the store
        self._cut = 0  # the length, in characters, of the beginning of the keys that a view removes
        self._limit = longest
        self._position = position
        self._pending: deque[Change] = deque()  # the changes that were found, and not returned yet
        self._is_closed = False

    @property
    def position(self) -> Position:
        """The position up to which the iterator has returned all changes: that of the last change, or a later one."""
        return self._position

    @property
    def _found(self) -> Position:
        """The position up to which changes were found, also after an interruption: that of the last one, or later."""
        return self._pending[-1].position if self._pending else self._position

    def _add(self, key: bytes, value: bytes | None, position: Position) -> None:
        """Add a change to `_pending` if `key` is watched. `value` is None if the key was deleted."""
        if key.startswith(self._prefix):
            self._pending.append(change_of(key, value, position))

    @abstractmethod
    def _wait(self, limit: float) -> bool:
        """Wait in this thread until a change is pending, for at most `limit` seconds. Return True.

        Raises:
            StoreTimeoutError: no change came.
            CompactedError: see `Store.watch`.
        """

    def _request(self) -> WaitRequest | None:
        """Return the request to wait for the next change in a task; None if the next call of `__next__` is quick."""
        if self._is_closed or self._pending:
            return None
        return WaitRequest(CHANGES, [], self._limit, slow_logger=self._new_slow_logger(), watch=self)

    def _new_slow_logger(self, started: float | None = None) -> SlowWaitLogger:
        """Return the logger of a wait for the next change, which may last: it logs no warning, and shows the wait."""
        awaited = Awaited(CHANGE_OF, key_text(self._prefix))
        return SlowWaitLogger(__name__, started=started, awaited=awaited, warns=False)

    def __next__(self) -> Change:
        if self._is_closed:
            raise StopIteration
        if not self._pending:
            self._wait(self._limit)
        change = self._pending[0]
        self._position = change.position  # before the change is removed: an interrupted call may be repeated
        self._pending.popleft()
        return change._replace(key=change.key[self._cut :]) if self._cut else change

    def close(self) -> None:
        """End the watch. Closing it again does nothing."""
        self._is_closed = True

    def __exit__(self, *_: object) -> None:
        self.close()
