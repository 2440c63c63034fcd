"""`C10dRendezvousBackend` keeps the state of a rendezvous under one key of a store, and changes it by compare-and-set.

The nodes read and change the state through `SharedState`, which also wakes the other nodes after a change.

**How a node learns whether its write succeeded.** The compare-and-set of a store returns the new value of the key.
torch's c10d backend compares decoded states. So if a node writes a state that equals the present state, torch reports
success. A state that was replaced and restored looks unchanged (the ABA problem). Here every write has a nonce of 96
random bits, so no two writes are equal. The compare-and-set returns the written value if and only if the write
succeeded, and a token matches only one write.

A nonce consists of characters outside the alphabet of base64. torch's decoder skips these characters, so torch's
backend can read a state with a nonce. This backend can also read a state without a nonce. Writes by torch have no
nonce, so two writes of the same state by torch can't be distinguished.
"""

from __future__ import annotations

import binascii
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

from fscoord import errors
from fscoord._arguments import key_bytes, to_seconds
from fscoord._runtime import system
from fscoord._waiting.timing import Backoff, SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest
from fscoord.rendezvous.state import State
from fscoord.store import Store, needed_store, shown, wait_on

Token = Any
"""A token identifies one write of the state. Only the backend that returned the token can interpret it."""

_NONCE_SIGNS = b"!#$%&*.,:;?@^_|~"
_NONCE_SIZE = 12
_SIGN_OF = bytes(_NONCE_SIGNS[n % 16] for n in range(256))


class RendezvousBackend(ABC):
    """The storage of the state that the nodes of a rendezvous share."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the backend."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if no state exists yet.

        Raises:
            RendezvousConnectionError: the store failed.
            RendezvousStateError: the stored value is not a state.
        """

    @abstractmethod
    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write `state` if the present state has this `token`. If `token` is None, write `state` if there is no state.

        A token that the backend did not return matches no state. Then nothing is written.

        Returns:
            The present state, its token, and whether this call wrote the present state. None means that the outcome is
            unknown, for example because no state exists. After a None, call `get_state`.

        Raises:
            RendezvousConnectionError: the store failed, before or after the write.
            RendezvousStateError: the stored value is not a state.
        """


class StateStore(Protocol):
    """A store in which `C10dRendezvousBackend` can keep its state: any `~fscoord.Store`, or any store of torch.

    A store of another package may return text. All stores of fscoord and of torch also have ``check``. With ``check``
    the backend can distinguish a removed key from a store that failed.
    """

    def get(self, key: str, /) -> bytes | str:
        """Return the value of `key`. If the key has no value, wait for one up to the store's timeout."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes | str:
        """Set `key` to `desired` if its value is `expected`. Return the new value of the key.

        An empty `expected` also matches a missing key.
        """


class C10dRendezvousBackend(RendezvousBackend):
    """A rendezvous backend on any `~fscoord.Store`, compatible with torch's backend of the same name.

    Args:
        store: the store that keeps the state, under the key ``torch.rendezvous.{run_id}``. It may also be one of
            torch's stores, or another object with ``get`` and ``compare_set``; see `StateStore`.
        run_id: the name of the rendezvous.

    Raises:
        ValueError: `run_id` is empty.
        RendezvousConnectionError: the store failed.
    """

    _NULL_SENTINEL = "Y2FuaW1hZGFt"

    def __init__(self, store: StateStore, run_id: str) -> None:
        if not run_id:
            raise ValueError("the run id is empty; give the rendezvous a name")
        self._store = needed_store(store, "get", "compare_set")
        self._key = "torch.rendezvous." + run_id
        # `get` waits for a missing key. So the key gets a value at once, which means "no state".
        with store_errors_as_rendezvous():
            store.compare_set(self._key, "", self._NULL_SENTINEL)

    def __repr__(self) -> str:
        return shown(self, self._store, key_bytes(self._key))

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        with store_errors_as_rendezvous():
            # Without a default, `get` would wait for a removed key, which no node writes any more.
            if isinstance(self._store, Store):
                found = self._store.get(self._key, default=None)
            elif hasattr(self._store, "check") and not self._store.check([self._key]):
                found = None
            else:
                found = _as_bytes(self._store.get(self._key))
            if found is None:
                raise self._removed()
            return self._decode(found)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        if token is None:
            expected = self._NULL_SENTINEL
        elif isinstance(token, bytes) and token and token.isascii():
            expected = token.decode()
        else:
            current = self.get_state()
            return None if current is None else (*current, False)
        written = (b64encode(state) + _nonce()).decode()  # a store of another package may accept only text
        with store_errors_as_rendezvous():
            found = _as_bytes(self._store.compare_set(self._key, expected, written))
        if found == expected.encode():  # a store returns the expected value if the key is missing
            raise self._removed()
        decoded = self._decode(found)
        return None if decoded is None else (*decoded, found == written.encode())

    def _decode(self, found: bytes) -> tuple[bytes, Token] | None:
        if found == self._NULL_SENTINEL.encode():
            return None
        text = found.translate(None, _NONCE_SIGNS)
        try:
            state = b64decode(text, validate=True)
        except binascii.Error as error:
            raise self._damaged(str(error)) from error
        if b64encode(state) != text:  # Python 3.10 ignores a lone padding character
            raise self._damaged("no encoder of base64 writes this text")
        return state, found

    def _removed(self) -> errors.RendezvousStateError:
        return errors.RendezvousStateError(
            f"the key {self._key!r}, which holds the state of the rendezvous, has been removed from the store: end all"
            " nodes of this rendezvous, and start them with another id or another store"
        )

    def _damaged(self, reason: str) -> errors.RendezvousStateError:
        return errors.RendezvousStateError(
            f"the key {self._key!r} does not hold the state of a rendezvous ({reason}):"
            " another program wrote it, so use another id or another store"
        )


def _as_bytes(value: bytes | str) -> bytes:
    """Return `value` as bytes. A store of another package may have returned text."""
    return value.encode() if isinstance(value, str) else value


def _nonce() -> bytes:
    """Return 96 random bits as 24 characters outside the alphabet of base64."""
    bits = system.random_bytes(_NONCE_SIZE)
    return bits.translate(_SIGN_OF) + bytes(byte >> 4 for byte in bits).translate(_SIGN_OF)


POLL_INTERVAL_S = 1.0
"""A waiting node reads the state again after this many seconds, because a node that changed the state may have died
before it woke the waiting nodes."""

KEPT_RINGS = 64
"""How many ``changed`` keys and how many ``settled`` keys of `SharedState` are kept. A node that begins to wait for a
key after the key was deleted learns of the change by its next poll."""


class SharedState:
    """Reads and changes the state of a rendezvous, waits for changes, and wakes other nodes.

    Each change sets the key ``changed/{sequence}``. A change that completes the round or closes the rendezvous also
    sets ``settled/{round}``.

    Args:
        backend: holds the state.
        store: a view of the store, with a prefix for the keys ``changed`` and ``settled``.

    Attributes:
        slow_logger: logs a warning if successive calls of `wait` together take long. None: a warning is logged only if
            one call takes long.
    """

    slow_logger: SlowWaitLogger | None = None

    def __init__(self, backend: RendezvousBackend, store: Store) -> None:
        self._backend = backend
        self._store = store
        self._has_been_there = False

    def read(self) -> tuple[State, Token | None]:
        """Return the state and its token. If no state was written yet, return the initial state and None.

        Raises:
            RendezvousStateError: this object has read or written a state before, and now the backend has none.
        """
        was_there = self._has_been_there  # read first, because another thread may write the first state meanwhile
        found = self._backend.get_state()
        if found is not None:
            self._has_been_there = True
            return State.decode(found[0]), found[1]
        if was_there:
            raise errors.RendezvousStateError(
                f"the state of the rendezvous has been removed from the backend {self._backend.name!r}: end all nodes"
                " of this rendezvous, and start them with another id or another store"
            )
        return State(), None

    def write(self, state: State, token: Token | None) -> tuple[State, Token | None, bool]:
        """Write `state` if the present state has this `token`.

        Returns:
            The present state, its token, and whether this call wrote `state`. If the backend does not know whether this
            call wrote `state`, the third value is whether the present state equals `state`.
        """
        found = self._backend.set_state(state.encode(), token)
        if found is None:  # the backend does not know whether it wrote
            now, token = self.read()
            is_written = now == state
        else:
            now, token, is_written = State.decode(found[0]), found[1], found[2]
            self._has_been_there = True
        if is_written:
            self._ring(state)
        return now, token, is_written

    def change(self, rule: Callable[[State], State], limit: float | None = None) -> State:
        """Replace the state by ``rule(state)``, and return the new state. Retry if another node has changed the state.

        Args:
            rule: computes the new state; called again after each failed write.
            limit: how many seconds to try; None means the store's timeout.

        Raises:
            RendezvousTimeoutError: no write succeeded within the limit.
        """
        state, token = self.read()
        backoff = Backoff(to_seconds(self._store.timeout) if limit is None else limit)
        while (wanted := rule(state)) != state:
            state, token, is_written = self.write(replace(wanted, sequence=state.sequence + 1), token)
            if is_written:
                return state
            if not backoff.pause():
                raise errors.RendezvousTimeoutError(
                    f"the state of the rendezvous could not be changed within {backoff.waited():.3g} s: the backend"
                    f" {self._backend.name!r} refused each of {backoff.tries} writes, because other"
                    " nodes kept changing it; find out why these nodes write so often"
                )
        return state

    def wait(self, state: State, timeout: float) -> None:
        """Wait until another state has replaced `state`, for at most `timeout` seconds. The call may return earlier."""
        self._wait_for(f"changed/{state.sequence + 1}", timeout)

    def wait_until_settled(self, state: State, timeout: float) -> None:
        """Wait until the round of `state` is complete or the rendezvous is closed, for at most `timeout` seconds."""
        self._wait_for(f"settled/{state.round}", timeout)

    def _wait_for(self, key: str, timeout: float) -> None:
        try:
            with store_errors_as_rendezvous():
                if self.slow_logger is None:
                    self._store.wait([key], timeout)
                else:
                    wait_on(self._store, WaitRequest(KEYS, [key_bytes(key)], timeout, slow_logger=self.slow_logger))
        except errors.RendezvousConnectionError as error:
            if not isinstance(error.__cause__, errors.StoreTimeoutError):
                raise

    def _ring(self, state: State) -> None:
        names = [f"changed/{state.sequence}"]
        old = [f"changed/{state.sequence - KEPT_RINGS}"] if state.sequence > KEPT_RINGS else []
        if state.complete or state.closed:
            names.append(f"settled/{state.round}")
            old += [f"settled/{state.round - KEPT_RINGS}"] if state.round >= KEPT_RINGS else []
        with store_errors_as_rendezvous():
            self._store.multi_set(names, [b""] * len(names))
            for name in old:
                self._store.delete_key(name)


def latest_change(store: Store) -> int:
    """Return the sequence number of the latest ``changed`` key in `store`; 0 if there is none."""
    numbers = [name.removeprefix("changed/") for name in store.list_keys("changed/")]
    return max((int(number) for number in numbers if number.isascii() and number.isdecimal()), default=0)


@contextmanager
def store_errors_as_rendezvous() -> Iterator[None]:
    """Raise `~fscoord.RendezvousConnectionError` if the body of the ``with`` raises an error of a store."""
    try:
        yield
    except errors.RendezvousError:  # already an error of the rendezvous
        raise
    # FscoordError is a RuntimeError. The stores of c10d also raise LookupError and ValueError.
    except (RuntimeError, OSError, LookupError, ValueError) as error:
        raise errors.RendezvousConnectionError(f"the store of the rendezvous failed: {error}") from error
