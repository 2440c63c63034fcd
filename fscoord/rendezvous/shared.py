"""`SharedState`: the state of a rendezvous in its store; several nodes read and change it, and wake each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from fscoord._arguments import to_seconds
from fscoord._waiting.timing import Backoff
from fscoord.errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
    StoreTimeoutError,
)
from fscoord.rendezvous.backend import RendezvousBackend, Token
from fscoord.rendezvous.state import State
from fscoord.store import Store

__all__ = ["POLL_INTERVAL_S", "SharedState", "store_errors_as_rendezvous"]

POLL_INTERVAL_S = 1.0
"""How often a waiting node reads the state unasked: a node that changes it may die before it wakes the others."""

KEPT_RINGS = 64
"""How many changes may pass between a look and the wait that follows it, before that wait has to poll."""


class SharedState:
    """The state, and a key for each change of it, which wakes the nodes that wait for that change.

    Args:
        backend: holds the state.
        store: holds the keys that wake other nodes; a view for this purpose alone.
    """

    def __init__(self, backend: RendezvousBackend, store: Store) -> None:
        self._backend = backend
        self._store = store
        self._has_been_there = False

    def read(self) -> tuple[State, Token | None]:
        """Return the state, and its token; the first state of all, and None, if there is none yet.

        Raises:
            RendezvousStateError: there was a state before, and now there is none.
        """
        found = self._backend.get_state()
        if found is not None:
            self._has_been_there = True
            return State.decode(found[0]), found[1]
        if self._has_been_there:
            raise RendezvousStateError(
                f"the state of the rendezvous has been removed from the backend {self._backend.name!r}: end all nodes"
                " of this rendezvous, and start them with another id or another store"
            )
        return State(), None

    def write(self, state: State, token: Token | None) -> tuple[State, Token | None, bool]:
        """Write `state` if the state is still the one that `token` stands for.

        Returns:
            The state that is there now, its token, and whether that state is `state`.
        """
        found = self._backend.set_state(state.encode(), token)
        if found is None:  # the backend does not say what became of the write
            now, token = self.read()
            is_written = now == state
        else:
            now, token, is_written = State.decode(found[0]), found[1], found[2]
            self._has_been_there = True
        if is_written:
            self._ring(state.sequence)
        return now, token, is_written

    def change(self, rule: Callable[[State], State], limit: float | None = None) -> State:
        """Replace the state by ``rule(state)``, and retry while other nodes change it; return the new state.

        Args:
            rule: computes the new state; called again whenever another node was faster.
            limit: how many seconds to try; None means the store's timeout.

        Raises:
            RendezvousTimeoutError: each try failed.
        """
        state, token = self.read()
        backoff = Backoff(to_seconds(self._store.timeout) if limit is None else limit)
        while (wanted := rule(state)) != state:
            state, token, is_written = self.write(replace(wanted, sequence=state.sequence + 1), token)
            if is_written:
                return state
            if not backoff.pause():
                raise RendezvousTimeoutError(
                    f"the state of the rendezvous could not be changed within {backoff.waited():.3g} s: the backend"
                    f" {self._backend.name!r} refused each of {backoff.tries} writes; look at what the other nodes do"
                )
        return state

    def wait(self, state: State, timeout: float) -> None:
        """Return when `state` has been changed, or after `timeout` seconds, or, now and then, earlier."""
        try:
            with store_errors_as_rendezvous():
                self._store.wait([f"changed/{state.sequence + 1}"], timeout)
        except RendezvousConnectionError as error:
            if not isinstance(error.__cause__, StoreTimeoutError):
                raise

    def _ring(self, sequence: int) -> None:
        with store_errors_as_rendezvous():
            self._store.set(f"changed/{sequence}", b"")
            if sequence > KEPT_RINGS:
                self._store.delete_key(f"changed/{sequence - KEPT_RINGS}")


@contextmanager
def store_errors_as_rendezvous() -> Iterator[None]:
    """Turn the errors of a store into `~fscoord.RendezvousConnectionError`."""
    try:
        yield
    except RendezvousError:  # it already has the right type
        raise
    except (RuntimeError, OSError, LookupError, ValueError) as error:
        raise RendezvousConnectionError(f"the store of the rendezvous failed: {error}") from error
