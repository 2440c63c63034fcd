"""`Watch` yields the changes of a store's keys, one `Change` after the other. `Changes` is what a store gives to it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Final, NamedTuple

from fscoord._arguments import key_text
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import CHANGES, WaitRequest
from fscoord.errors import CompactedError, StoreError

CHANGE_OF: Final = "a change of a key that begins with"
"""The noun for a change in messages. The prefix of the watched keys follows."""


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


class Changes(ABC):
    """The changes that one watch has found, and the place from which it looks for more. Each store has a subclass.

    Attributes:
        prefix: the beginning of the watched keys in the store.
        cut: the length, in characters, of the beginning of the keys that a view removes.
        position: the position up to which all changes were taken. None: the watch begins with the next change.
        pending: the changes that were found and not taken yet.
    """

    def __init__(self, prefix: bytes, position: Position | None) -> None:
        self.prefix = prefix
        self.cut = 0
        self.position = position
        self.pending: deque[Change] = deque()

    def add(self, key: bytes, value: bytes | None, position: Position) -> None:
        """Add a change to `pending` if `key` is watched. `value` is None if the key was deleted."""
        if key.startswith(self.prefix):
            kind = "delete" if value is None else "set"
            self.pending.append(Change(key_text(key), kind, value, position))

    @property
    def found(self) -> Position:
        """The position up to which changes were found, also after an interruption: that of the last one, or later."""
        place = self.pending[-1].position if self.pending else self.position
        assert place is not None, "a store sets it"
        return place

    def take(self) -> Change:
        """Remove the first change from `pending`, and return it. An interrupted call may be repeated."""
        change = self.pending[0]
        self.position = change.position
        self.pending.popleft()
        return change._replace(key=change.key[self.cut :]) if self.cut else change

    def request(self, limit: float) -> WaitRequest:
        """Return the request to wait for at most `limit` seconds until a change is pending. No warning is logged."""
        quiet = SlowWaitLogger(__name__, started=math.inf)
        return WaitRequest(CHANGES, [], limit, slow_logger=quiet, changes=self)

    @abstractmethod
    def wait(self, limit: float) -> bool:
        """Wait in this thread until a change is pending, for at most `limit` seconds. Return True.

        Raises:
            StoreTimeoutError: no change came.
            CompactedError: see `Store.watch`.
        """

    def close(self) -> None:  # noqa: B027 - most stores have nothing to release
        """Release the resources. This method may be called twice."""


def compacted(place: object, after: Position, first: Position) -> CompactedError:
    """Return the error that says that the store `place` has no longer all changes after `after`."""
    return CompactedError(
        f"{place}: changes after position {after} were removed by a compaction; read the keys, and watch after position"
        f" {first}",
        position=first,
    )


def foreign(place: object, after: Position, now: Position) -> StoreError:
    """Return the error that says that the store `place`, whose last position is `now`, never had position `after`."""
    return StoreError(f"{place}: position {after} is after the newest change, {now}, so it is of another store")


class Watch:
    """An iterator over the changes of a store's keys; see `Store.watch`. Only one thread at a time may use it.

    ``close``, or the end of a ``with`` statement, ends the watch.
    """

    def __init__(self, changes: Changes, limit: float) -> None:
        self._changes = changes
        self._limit = limit
        self._is_closed = False

    @property
    def position(self) -> Position:
        """The position up to which the iterator has returned all changes: that of the last change, or a later one."""
        position = self._changes.position
        assert position is not None, "the store has set it"
        return position

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> Change:
        if self._is_closed:
            raise StopIteration
        if not self._changes.pending:
            self._changes.wait(self._limit)
        return self._changes.take()

    def _request(self) -> WaitRequest | None:
        """Return the request to wait for the next change in a task; None if the next call of `__next__` is quick."""
        return None if self._is_closed or self._changes.pending else self._changes.request(self._limit)

    def close(self) -> None:
        """End the watch. Closing it again does nothing."""
        self._is_closed = True
        self._changes.close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
