"""`Fenced`: a value that only whoever holds a lock now can write."""

from __future__ import annotations

from fscoord._arguments import Key, MalformedText, Value, check_positive, key_bytes, key_text, parse_uint63, value_bytes
from fscoord.errors import StaleTokenError
from fscoord.recipes._keys import Refusals, foreign_value_error
from fscoord.store import Store

__all__ = ["Fenced"]


class Fenced:
    """A value in the store that is written under a fencing token, and refuses tokens lower than one that it has seen.

    A lock can't hold back one who was stopped, lost it and wakes up to write. What it writes to can: each hold has a
    higher token than those before it (`fscoord.recipes.Lock.token`, `fscoord.recipes.Election.term`). Token and value
    stand under one key, as ``token value``, and change in one step, on every store. The idea is Martin Kleppmann's,
    "How to do distributed locking" (2016).

    Args:
        store: where the value is.
        key: its key. What else is written under it is no value of this kind; deleting it forgets the token.
    """

    def __init__(self, store: Store, key: Key) -> None:
        self._store = store
        self._key = key_bytes(key)

    def set(self, value: Value, token: int) -> None:
        """Give it the value `value`, in the name of who holds, or held, the lock with `token`.

        Raises:
            StaleTokenError: it was written with a higher token; it is left as it is.
            StoreTimeoutError: others changed it before each try, for the store's timeout.
            FscoordError: under its key is something else; that is left as it is.
        """
        token, data = check_positive("token", token), value_bytes(value)
        text = self._store.get(self._key) if self._store.check([self._key]) else b""
        new = b"%d " % token + data
        refusals = Refusals(self._store, self._key)
        while True:
            seen = self._split(text)[0] if text else 0
            if seen > token:
                raise StaleTokenError(
                    f"key {key_text(self._key)!r} was written with token {seen}, so {token} is over: somebody else has"
                    " got what it stood for; nothing was written"
                )
            found = self._store.compare_set(self._key, text, new)
            if found == new:
                return
            refusals.add()
            text = found if found != text else b""  # as expected and not changed: the key was deleted

    def get(self) -> bytes:
        """Return the value, waiting up to the store's timeout for the first.

        Raises:
            StoreTimeoutError: there was none.
            FscoordError: under its key is something else.
        """
        return self._split(self._store.get(self._key))[1]

    def token(self) -> int:
        """Return the highest token that it has seen; 0 before the first value."""
        return self._split(self._store.get(self._key))[0] if self._store.check([self._key]) else 0

    def _split(self, text: bytes) -> tuple[int, bytes]:
        token, space, value = text.partition(b" ")
        try:
            return parse_uint63(token if space else b""), value
        except MalformedText as error:
            raise foreign_value_error(self._key, text, "value with a token") from error
