"""`Fenced`: a value that only the present holder of a lock can write."""

from __future__ import annotations

from fscoord._arguments import Key, MalformedText, Value, check_positive, key_bytes, key_text, parse_uint63, value_bytes
from fscoord.errors import StaleTokenError
from fscoord.recipes._keys import Refusals, foreign_value_error
from fscoord.store import Store

__all__ = ["Fenced"]


class Fenced:
    """A value in the store that is written with a fencing token, and refuses a token below the highest so far.

    A process may be stopped while it holds a lock, lose the lock, wake up and write. The lock can't prevent that write,
    but its target can: each hold has a higher token than the holds before it (`fscoord.recipes.Lock.token`,
    `fscoord.recipes.Election.term`). Token and value are stored under one key, as ``token value``, and change in one
    step, on every store. The idea is Martin Kleppmann's, "How to do distributed locking" (2016).

    Args:
        store: the store that holds the value.
        key: the key of the value. Nothing else may be written under it. Deleting it also deletes the token.
    """

    def __init__(self, store: Store, key: Key) -> None:
        self._store = store
        self._key = key_bytes(key)

    def set(self, value: Value, token: int) -> None:
        """Set the value to `value` for the holder of the lock with `token`.

        Raises:
            StaleTokenError: the value was written with a higher token before. It is unchanged.
            StoreTimeoutError: other processes changed the value before each try, for the store's timeout.
            FscoordError: the key holds text of another kind. It is unchanged.
        """
        token, data = check_positive("token", token), value_bytes(value)
        text = self._store.get(self._key) if self._store.check([self._key]) else b""
        new = b"%d " % token + data
        refusals = Refusals(self._store, self._key)
        while True:
            seen = self._split(text)[0] if text else 0
            if seen > token:
                raise StaleTokenError(
                    f"key {key_text(self._key)!r} was written with token {seen}, so token {token} is stale: another"
                    " process has acquired the lock since; nothing was written"
                )
            found = self._store.compare_set(self._key, text, new)
            if found == new:
                return
            refusals.add()
            text = found if found != text else b""  # the expected text, but nothing was set: the key was deleted

    def get(self) -> bytes:
        """Return the value. If there is none yet, wait for the first.

        Raises:
            StoreTimeoutError: there was no value within the store's timeout.
            FscoordError: the key holds text of another kind.
        """
        return self._split(self._store.get(self._key))[1]

    def token(self) -> int:
        """Return the highest token with which the value was written; 0 before the first value."""
        return self._split(self._store.get(self._key))[0] if self._store.check([self._key]) else 0

    def _split(self, text: bytes) -> tuple[int, bytes]:
        token, space, value = text.partition(b" ")
        try:
            return parse_uint63(token if space else b""), value
        except MalformedText as error:
            raise foreign_value_error(self._key, text, "value with a token") from error
