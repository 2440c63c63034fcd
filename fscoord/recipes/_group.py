"""`Presence` and `Group`: the base classes of recipes by which a process shows that it is there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, TypeVar

from fscoord._arguments import Key, key_bytes, key_text, refuse_copies
from fscoord._runtime import system
from fscoord.errors import FscoordError
from fscoord.recipes._cleanup import Undoable, undone_by
from fscoord.recipes._keys import parse_count
from fscoord.recipes._look import Unchanged
from fscoord.store import Store, needed_store

KEPT: Final = 64
"""How many *change keys* are kept. Each change of the group sets a new change key, and then deletes the oldest key.

An observer reads the group, and then waits for the next change key. If more than `KEPT` changes come between the read
and the wait, this key is deleted already. The observer then notices the changes after `LOOK_S`.
"""

G = TypeVar("G", bound="Group")


class Presence(Undoable, ABC):
    """The base class of recipes by which a process writes a key or an entry, and removes it when it leaves.

    Each key or entry that an object has written has an id. The object remembers one id at a time. A forked child
    remembers none.

    Args:
        store: the store that all processes share.
        name: the name in the store.
    """

    __reduce__ = refuse_copies

    def __init__(self, store: Store, name: Key) -> None:
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._joined: tuple[int, bytes] | None = None  # the `system.process_epoch` of the write, and the id

    @undone_by(lambda presence, *_: presence._leave_quietly(), FscoordError)
    def __exit__(self, _: list[object], __: object, *error: object) -> None:  # noqa: PYI036 - they are not given
        self._leave()

    @abstractmethod
    def _remove(self, own: bytes) -> bool:
        """Remove what has the id `own`, and return whether it was there."""

    def _unjoin(self, made: list[bytes]) -> None:
        """Remove what an interrupted call has written. This method may be called twice.

        `made` has the ids, which the call noted before it wrote.
        """
        for own in made:
            if self._joined and self._joined[1] == own:
                self._joined = None
            with suppress(FscoordError):
                self._remove(own)

    def _leave(self) -> bool:
        own = self._own()
        if not own:
            return False
        was_there = self._remove(own)
        self._joined = None
        return was_there

    def _leave_quietly(self) -> None:
        """Complete an interrupted `_leave`. This method may be called twice."""
        with suppress(FscoordError):
            self._leave()

    def _own(self) -> bytes:
        """Return the id of what this process has written by this object; empty if there is nothing."""
        if self._joined and self._joined[0] != system.process_epoch():
            self._joined = None  # this is a forked child, and only its parent is present
        return self._joined[1] if self._joined else b""


class Group(Presence):
    """A group of processes. Each member has an id."""

    def __init__(self, store: Store, name: Key) -> None:
        super().__init__(store, name)
        self._changed = self._name + b"/changed/"
        key_bytes(self._changed + b"%016x" % 0)  # raises an error for a name that is too long

    @property
    def name(self) -> str:
        """The group's name in the store."""
        return key_text(self._name)

    @undone_by(lambda group, made, _: group._unjoin(made))
    def join(self, made: list[bytes], _: object) -> None:
        """Join the group.

        Raises:
            RuntimeError: this object has joined already.
        """
        self._join(made)

    @undone_by(lambda group, *_: group._leave_quietly(), FscoordError)
    def leave(self, _: list[object], __: object) -> bool:
        """Leave the group. Return False if this object was not in the group."""
        return self._leave()

    @undone_by(lambda group, made, _: group._unjoin(made))
    def __enter__(self: G, made: list[bytes], _: object) -> G:  # noqa: PLE0302 - as above
        self._join(made)
        return self

    def _join(self, made: list[bytes]) -> None:
        """Join the group. The new id is appended to `made` before it is written, so that `_unjoin` can remove it."""
        if self._own():
            raise RuntimeError(f"this object has already joined the group {self.name!r}")
        self._enroll(made)

    @abstractmethod
    def _enroll(self, made: list[bytes]) -> None:
        """Write the new member, and set `_joined`."""

    def _announce(self, count: int) -> None:
        """Set the change key `count`, for which observers wait, and delete all but the last `KEPT` keys."""
        self._store.set(self._changed + b"%d" % count, b"1")
        if count > KEPT:
            self._store.delete_key(self._changed + b"%d" % (count - KEPT))
        if count % KEPT == 0:  # also delete keys of processes that died before they deleted them
            for key in map(key_bytes, self._store.list_keys(self._changed)):
                if parse_count(key, key[len(self._changed) :]) <= count - KEPT:
                    self._store.delete_key(key)

    def _unchanged(self, count: int, late: str, sessions: Sequence[int]) -> Unchanged:
        """Return the result of a look at the group after its change `count`."""
        return Unchanged([self._changed + b"%d" % (count + 1)], late, [each for each in sessions if each])
