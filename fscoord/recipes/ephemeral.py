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
        self._created: tuple[int, bytes] | None = None  # the pid of the creator, and the text in the store
        if store.capabilities.processes and not store.has_liveness:
            raise StoreError(
                f"{store!r} can't detect deaths, so no key vanishes there; use a FileStore or an EtcdStore"
            )

    def __repr__(self) -> str:
        return shown(self, self._store, self._key, "created" if self._text() else "not created")

    @undone_by(lambda key, made, _: key._undo(made))
    def create(self, made: list[bytes], _: object) -> bool:
        """Create the key. Return False if the key exists already, and its creator is not known dead."""
        return self._create(made) is None

    def get(self) -> bytes | None:
        """Return the value of the key, or None if there is none. First delete the key of a creator that is dead."""
        found = self._read()
        return found and found[1]

    def _read(self) -> tuple[str, bytes] | None:
        """Return the creator, ``host:pid``, and the value, or None if there is no key; see `get`."""
        while True:
            text = self._store.get(self._key, default=None)
            if text is None:
                return None
            head, _, value = text.partition(b"\n")
            try:
                number, creator, _ = words_in(head, " ", 3)
                session = parse_uint63(number)
            except MalformedText as error:
                raise foreign_value_error(self._key, text, "ephemeral key") from error
            if not (session and self._store.dead_sessions([session])):
                return creator, value
            self._store.delete_key(self._key, expected=text)

    @undone_by(lambda key, *_: key._delete_quietly(), FscoordError)
    def delete(self, _: list[object], __: object) -> bool:
        """Delete the key. Return False if this object has not created it, or if it is gone already."""
        return self._delete()

    @undone_by(lambda key, made, _: key._undo(made))
    def __enter__(self: E, made: list[bytes], _: object) -> E:  # noqa: PLE0302 - they are not given
        creator = self._create(made)
        if creator is not None:
            raise FscoordError(
                f"key {key_text(self._key)!r} exists already: {creator} has created it, and is not known dead; use"
                " another key, or wait until that process has ended"
            )
        return self

    @undone_by(lambda key, *_: key._delete_quietly(), FscoordError)
    def __exit__(self, _: list[object], __: object, *error: object) -> None:  # noqa: PYI036 - as above
        self._delete()

    def _create(self, made: list[bytes]) -> str | None:
        """Create the key, and return None; or return the creator of the key that exists."""
        # The random number distinguishes the keys of two objects of one process.
        head = f"{self._store.register()} {system.process_name()} {system.random_bytes(8).hex()}\n"
        made.append(head.encode() + self._value)
        while not self._store.create(self._key, made[0]):
            found = self._read()
            if found is not None:
                return found[0]
        self._created = system.os.getpid(), made[0]
        return None

    def _undo(self, made: list[bytes]) -> None:
        """Undo `_create`. This method may be called twice."""
        for text in made:
            if self._created and self._created[1] == text:
                self._created = None
            with suppress(FscoordError):
                self._store.delete_key(self._key, expected=text)

    def _delete(self) -> bool:
        text = self._text()
        was_there = text is not None and self._store.delete_key(self._key, expected=text)
        self._created = None
        return was_there

    def _delete_quietly(self) -> None:
        """Complete an interrupted `_delete`. This method may be called twice."""
        with suppress(FscoordError):
            self._delete()

    def _text(self) -> bytes | None:
        if self._created and self._created[0] != system.os.getpid():
            self._created = None  # this is a forked child, and only its parent has created the key
        return self._created[1] if self._created else None
