"""`Ephemeral`: a key that vanishes with the process that has created it, by proof of its death and not by a clock."""

from __future__ import annotations

from typing import TypeVar

from fscoord._arguments import (
    Key,
    MalformedText,
    Value,
    key_text,
    parse_uint63,
    value_bytes,
    words_in,
)
from fscoord._runtime import system
from fscoord.errors import FscoordError, StoreError
from fscoord.recipes._cleanup import undone_by
from fscoord.recipes._group import Presence
from fscoord.recipes._keys import foreign_value_error
from fscoord.store import Store, shown

E = TypeVar("E", bound="Ephemeral")


class Ephemeral(Presence):
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

    def __init__(self, store: Store, name: Key, value: Value = b"") -> None:
        super().__init__(store, name)
        self._value = value_bytes(value)
        if store.capabilities.processes and not store.has_liveness:
            raise StoreError(f"{store!r} can't detect deaths; use a FileStore with kernel locks, or an EtcdStore")

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, "created" if self._own() else "not created")

    @undone_by(lambda key, made, _: key._unjoin(made))
    def create(self, made: list[bytes], _: object) -> bool:
        """Create the key. Return False if the key exists already, and its creator is not known dead."""
        # The random number distinguishes the keys of two objects of one process.
        head = f"{self._store.register()} {system.process_name()} {system.random_bytes(8).hex()}\n"
        made.append(head.encode() + self._value)
        while not self._store.create(self._name, made[0]):
            if self._find() is not None:
                return False
        self._joined = system.process_epoch(), made[0]
        return True

    def get(self) -> bytes | None:
        """Return the value of the key, or None if there is none. First delete the key of a creator that is dead."""
        found = self._find()
        return found and found[1]

    @undone_by(lambda key, *_: key._leave_quietly(), FscoordError)
    def delete(self, _: list[object], __: object) -> bool:
        """Delete the key. Return False if this object has not created it, or if it is gone already."""
        return self._leave()

    @undone_by(lambda key, *_: key._leave_quietly(), FscoordError)
    def __enter__(self: E, _: list[object], __: object) -> E:  # noqa: PLE0302 - they are not given
        if not self.create():
            by = (self._find() or ("an ended process",))[0]
            raise FscoordError(
                f"key {key_text(self._name)!r} exists already, created by {by}: await its end, or use another"
            )
        return self

    def _find(self) -> tuple[str, bytes] | None:
        """Return the creator, ``host:pid``, and the value, or None if there is no key; see `get`."""
        while True:
            text = self._store.get(self._name, default=None)
            if text is None:
                return None
            head, _, value = text.partition(b"\n")
            try:
                session, creator, _number = words_in(head, " ", 3)
                if not self._store.dead_sessions({parse_uint63(session)} - {0}):
                    return creator, value
            except MalformedText as error:
                raise foreign_value_error(self._name, text, "ephemeral key") from error
            self._store.delete_key(self._name, expected=text)

    def _remove(self, own: bytes) -> bool:
        return self._store.delete_key(self._name, expected=own)
