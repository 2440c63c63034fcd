"""`SharedState`: the state of a rendezvous in its store, read and changed by several nodes, who wake each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from fscoord.errors import RendezvousConnectionError, RendezvousError, StoreTimeoutError
from fscoord.rendezvous.backend import RendezvousBackend, Token
from fscoord.rendezvous.state import State
from fscoord.store import Store

__all__ = ["SharedState", "connection"]

KEPT_RINGS = 64
"""How many changes may pass between a look and the wait that follows it, before that wait has to poll."""


class SharedState:
    """The state, and a key for each change of it, which wakes those who wait for that change.

    Args:
        backend: where the state is.
        store: where the keys are that wake others; a view of its own.
    """

    def __init__(self, backend: RendezvousBackend, store: Store) -> None:
        self._backend = backend
        self._store = store

    def read(self) -> tuple[State, Token | None]:
        """Return the state, and its token; the first state of all, and None, if there is none yet."""
        found = self._backend.get_state()
        return (State(), None) if found is None else (State.decode(found[0]), found[1])

    def write(self, state: State, token: Token | None) -> tuple[State, Token | None]:
        """Write `state` if the state is still the one that `token` stands for; return what is there now."""
        found = self._backend.set_state(state.encode(), token)
        if found is None:
            return State(), None
        if found[2]:
            self._ring(state.sequence)
        return State.decode(found[0]), found[1]

    def change(self, rule: Callable[[State], State]) -> State:
        """Replace the state by what `rule` makes of it, whoever else changes it meanwhile; return the new state."""
        state, token = self.read()
        while (wanted := rule(state)) != state:
            wanted = replace(wanted, sequence=state.sequence + 1)
            found = self._backend.set_state(wanted.encode(), token)
            if found is not None and found[2]:
                self._ring(wanted.sequence)
                return wanted
            state, token = (State(), None) if found is None else (State.decode(found[0]), found[1])
        return state

    def wait(self, state: State, timeout: float) -> None:
        """Return when `state` has been changed, or after `timeout` seconds, or, now and then, earlier."""
        try:
            with connection():
                self._store.wait([f"changed/{state.sequence + 1}"], timeout)
        except RendezvousConnectionError as error:
            if not isinstance(error.__cause__, StoreTimeoutError):
                raise

    def _ring(self, sequence: int) -> None:
        with connection():
            self._store.set(f"changed/{sequence}", b"")
            if sequence > KEPT_RINGS:
                self._store.delete_key(f"changed/{sequence - KEPT_RINGS}")


@contextmanager
def connection() -> Iterator[None]:
    """Turn whatever a store raises into a `~fscoord.RendezvousConnectionError`."""
    try:
        yield
    except RendezvousError:  # it says already what it has to say
        raise
    except (RuntimeError, OSError, LookupError, ValueError) as error:
        raise RendezvousConnectionError(f"the store of the rendezvous failed: {error}") from error
