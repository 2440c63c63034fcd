"""`Sought`: what somebody waits for in a store, and code that says so instead of waiting.

A recipe tries what needs no waiting, and else waits until some keys are there. Written as a generator that yields a
`Sought` where it would wait, it serves threads and tasks of an event loop alike.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple, Protocol, TypeVar, cast

__all__ = ["ITEM", "KEYS", "VALUES", "Request", "Sought", "Turns", "take_turns"]

T = TypeVar("T")

KEYS, VALUES, ITEM = "keys", "values", "item"


class BlockingStore(Protocol):
    """The waits of `~fscoord.Store`."""

    def wait(self, keys: Iterable[bytes], timeout: float | None = None) -> None:
        """See `Store.wait`."""

    def wait_alive(self, keys: Iterable[bytes], ranks: Iterable[int], timeout: float | None = None) -> list[int]:
        """See `Store.wait_alive`."""

    def wait_sessions(self, keys: Iterable[bytes], numbers: Iterable[int], timeout: float | None = None) -> list[int]:
        """See `Store.wait_sessions`."""


class Sought(NamedTuple):
    """What somebody waits for.

    Attributes:
        what: `KEYS`, each with a value or a non-empty queue; their `VALUES`; or one `ITEM` of a queue.
        names: the keys.
        limit: for how many seconds at most.
        ranks: for keys: who must live for them to come.
        sessions: likewise, as sessions.
    """

    what: str
    names: list[bytes]
    limit: float
    ranks: list[int] | None = None
    sessions: list[int] | None = None

    def on(self, store: BlockingStore) -> list[int]:
        """Wait in this thread until the keys are there, or somebody of those who must live is known dead.

        Returns:
            Who is dead; nobody if the keys are there.

        Raises:
            StoreTimeoutError: neither happened.
        """
        if self.sessions is not None:
            return store.wait_sessions(self.names, self.sessions, self.limit)
        if self.ranks is not None:
            return store.wait_alive(self.names, self.ranks, self.limit)
        store.wait(self.names, self.limit)
        return []


class Request(Protocol):
    """What is to be waited for: as a rule a `Sought`."""

    def on(self, store: Any) -> Any:
        """Wait for it in this thread."""


Turns = Generator[Request, Any, T]
"""Code that yields what it would wait for, is sent what `Request.on` returns, or raises, and ends with a `T`."""


def take_turns(store: BlockingStore, turns: Turns[T]) -> T:
    """Return what `turns` ends with, waiting in this thread."""
    try:
        request = next(turns)
        while True:
            try:
                answer = request.on(store)
            except BaseException as error:  # noqa: BLE001 - whatever it is, it comes out there
                request = turns.throw(error)
            else:
                request = turns.send(answer)
    except StopIteration as end:
        return cast(T, end.value)
    finally:
        turns.close()  # at once: whoever keeps the error of an interrupted wait keeps this frame
