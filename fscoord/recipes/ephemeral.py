"""`Ephemeral`: a key that vanishes with the process that has created it, by proof of its death and not by a clock."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from fscoord._arguments import (
    Key,
    MalformedText,
    Value,
    key_bytes,
    key_text,
    parse_uint63,
    refuse_copies,
    value_bytes,
    words_in,
)
from fscoord._runtime import system
from fscoord.errors import FscoordError, StoreError
from fscoord.recipes._cleanup import Undoable, undone_by
from fscoord.recipes._keys import foreign_value_error
from fscoord.store import Store, needed_store, shown

E = TypeVar("E", bound="Ephemeral")


class Ephemeral(Undoable):
    """A key that exists until its creator deletes it, closes its store, or dies; like an ephemeral node of ZooKeeper.

    After a death the next process that looks, by `get` or `create`, deletes the key, and a watch shows the deletion. No
    process looks by itself. A ``with`` statement creates the key at its beginning and deletes it at its end.

    Args:
        store: the store that all processes share. It must detect deaths (`~fscoord.Store.has_liveness`), unless it is
            in the memory of one process.
        name: the key. Its value in the store begins with a line about the creator.
        value: the value that `create` gives to the key.

    Raises:
        StoreError: the store can't detect deaths.
    """

    __reduce__ = refuse_copies

    def __init__(self, store: Store, name: Key, value: Value = b"") -> None:
        self._store = needed_store(store)
        self._key = key_bytes(name)
        self._value = value_bytes(value)
        self._created: dict[int, bytes] = {}  # {pid of the creator: text of the key in the store}
        if store.capabilities.processes and not store.has_liveness:
            raise StoreError(f"{store!r} can't detect deaths; use a FileStore with kernel locks, or an EtcdStore")

    def __repr__(self) -> str:
        return shown(self, self._store, self._key, "created" if self._own() else "not created")

    @undone_by(lambda key, made, _: key._undo(made))
    def create(self, made: list[bytes], _: object) -> bool:
        """Create the key. Return False if the key exists already, and its creator is not known dead."""
        # The random number distinguishes the keys of two objects of one process.
        head = f"{self._store.register()} {system.process_name()} {system.random_bytes(8).hex()}\n"
        made.append(head.encode() + self._value)
        while not self._store.create(self._key, made[0]):
            if self._find() is not None:
                return False
        self._created[system.os.getpid()] = made[0]
        return True

    def get(self) -> bytes | None:
        """Return the value of the key, or None if there is none. First delete the key of a creator that is dead."""
        found = self._find()
        return found and found[1]

    @undone_by(lambda key, *_: key._undo(key._own()), FscoordError)
    def delete(self, _: list[object], __: object) -> bool:
        """Delete the key. Return False if this object has not created it, or if it is gone already."""
        return self._delete(self._own())

    @undone_by(lambda key, *_: key._undo(key._own()), FscoordError)
    def __enter__(self: E, _: list[object], __: object) -> E:  # noqa: PLE0302 - they are not given
        if not self.create():
            by = (self._find() or ("an ended process",))[0]
            raise FscoordError(
                f"key {key_text(self._key)!r} exists already, created by {by}: await its end, or use another"
            )
        return self

    @undone_by(lambda key, *_: key._undo(key._own()), FscoordError)
    def __exit__(self, _: list[object], __: object, *error: object) -> None:  # noqa: PYI036 - as above
        self._delete(self._own())

    def _find(self) -> tuple[str, bytes] | None:
        """Return the creator, ``host:pid``, and the value, or None if there is no key; see `get`."""
        while True:
            text = self._store.get(self._key, default=None)
            if text is None:
                return None
            head, _, value = text.partition(b"\n")
            try:
                session, creator, _number = words_in(head, " ", 3)
                if not self._store.dead_sessions({parse_uint63(session)} - {0}):
                    return creator, value
            except MalformedText as error:
                raise foreign_value_error(self._key, text, "ephemeral key") from error
            self._store.delete_key(self._key, expected=text)

    def _own(self) -> list[bytes]:
        """Return the text of the key that this process has created, if any. A forked child has created none."""
        return [text for pid, text in self._created.items() if pid == system.os.getpid()]

    def _delete(self, texts: list[bytes]) -> bool:
        """Delete the key if its text is one of `texts`. Return whether it was there. The call may be repeated."""
        was_there = False
        for text in texts:
            was_there = self._store.delete_key(self._key, expected=text)
        self._created = {pid: text for pid, text in self._created.items() if text not in texts}
        return was_there

    def _undo(self, texts: list[bytes]) -> None:
        with suppress(FscoordError):
            self._delete(texts)
