"""`C10dRendezvousBackend`: the state of a rendezvous under one key of a store, changed by compare-and-set.

**How a write knows whether it won.** A store's compare-and-set returns the value that the key has afterwards. torch's
c10d compares decoded states: a node that writes the state that is there already believes that it won, and a state that
was replaced and restored looks untouched (the ABA problem). Here every write carries a nonce of 96 random bits, in
characters outside the alphabet of base64, which decoders skip (also `base64.b64decode` as torch calls it). No two
writes are equal, so the returned value is the written one if and only if this write won, and a token fits only the
write that it came from. torch's backend reads these writes, and this backend reads those of torch. Writes by torch have
no nonce, so two of *its* writes of the same state can't be told apart.
"""

from __future__ import annotations

import binascii
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any, TypeVar

from fscoord._runtime import system
from fscoord.errors import RendezvousConnectionError, RendezvousStateError
from fscoord.store import Store

__all__ = ["C10dRendezvousBackend", "RendezvousBackend", "Token"]

T = TypeVar("T")

Token = Any
"""Stands for one write of the state; opaque to all but the backend that gave it."""

_NONCE_SIGNS = b"!#$%&*.,:;?@^_|~"
_NONCE_SIZE = 12
_SIGN_OF = bytes(_NONCE_SIGNS[n % 16] for n in range(256))


class RendezvousBackend(ABC):
    """Where the nodes of a rendezvous keep their common state."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the backend."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is no state yet.

        Raises:
            RendezvousConnectionError: the store failed.
            RendezvousStateError: what is there is no state.
        """

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write `state` if the state is still the one that `token` stands for; without a token, if there is none yet.

        Returns:
            The state that is there now, its token, and whether this call wrote it; or None if that is not known, as
            where there is no state: then `get_state` says what is there.

        Raises:
            RendezvousConnectionError: the store failed; the state may have been written all the same.
            RendezvousStateError: what is there is no state.
        """


class C10dRendezvousBackend(RendezvousBackend):
    """A rendezvous backend on any `~fscoord.Store`, compatible with torch's of the same name.

    Args:
        store: where the state is kept, under the key ``torch.rendezvous.{run_id}``.
        run_id: names the rendezvous.

    Raises:
        ValueError: `run_id` is empty.
        RendezvousConnectionError: the store failed.
    """

    _NULL_SENTINEL = "Y2FuaW1hZGFt"

    def __init__(self, store: Store, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id is empty; give the rendezvous a name")
        self._store = store
        self._key = "torch.rendezvous." + run_id
        # A get waits for its key, so that there is always a value: one that stands for "no state".
        self._call(store.compare_set, self._key, "", self._NULL_SENTINEL)

    @property
    def name(self) -> str:
        """``c10d``."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is no state yet."""
        if not self._call(self._store.check, [self._key]):  # a get would wait for a key that nobody writes any more
            raise self._removed()
        return self._decode(self._call(self._store.get, self._key))

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write `state` if the state is still the one that `token` stands for; without a token, if there is none yet.

        A token that is not ``bytes`` is nobody's: nothing is written, and the state that is there is returned.
        """
        if token is None:
            expected = self._NULL_SENTINEL.encode()
        elif isinstance(token, bytes) and token:
            expected = token
        else:
            current = self.get_state()
            return None if current is None else (*current, False)
        written = b64encode(state) + _nonce()
        found = self._call(self._store.compare_set, self._key, expected, written)
        if found == expected:  # a store returns the expected value if the key is missing
            raise self._removed()
        decoded = self._decode(found)
        return None if decoded is None else (*decoded, found == written)

    def _call(self, operation: Callable[..., T], *arguments: Any) -> T:
        try:
            return operation(*arguments)
        # FscoordError is a RuntimeError; LookupError and ValueError are what stores of c10d raise besides
        except (RuntimeError, OSError, LookupError, ValueError) as error:
            raise RendezvousConnectionError(f"the store of the rendezvous failed: {error}") from error

    def _decode(self, found: bytes) -> tuple[bytes, Token] | None:
        if found == self._NULL_SENTINEL.encode():
            return None
        text = found.translate(None, _NONCE_SIGNS)
        try:
            state = b64decode(text, validate=True)
        except binascii.Error as error:
            raise self._damaged(str(error)) from error
        if b64encode(state) != text:  # Python 3.10 takes a lone padding sign for nothing
            raise self._damaged("it is not what an encoder writes")
        return state, found

    def _removed(self) -> RendezvousStateError:
        return RendezvousStateError(
            f"the key {self._key!r}, which holds the state of the rendezvous, has been removed from the store: end all"
            " nodes of this rendezvous, and start them with another id or another store"
        )

    def _damaged(self, reason: str) -> RendezvousStateError:
        return RendezvousStateError(
            f"the key {self._key!r} holds no state of a rendezvous ({reason}):"
            " something else wrote it, so use another id or another store"
        )


def _nonce() -> bytes:
    """Return 96 random bits, 4 in each sign."""
    bits = system.random_bytes(_NONCE_SIZE)
    return bits.translate(_SIGN_OF) + bytes(byte >> 4 for byte in bits).translate(_SIGN_OF)
