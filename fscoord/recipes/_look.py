"""`look_again`: a wait that reads the store, and reads it again at each change of some keys."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, TypeVar

from fscoord._runtime import system
from fscoord._waiting.awaited import Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import StoreTimeoutError
from fscoord.recipes._cleanup import as_one_wait
from fscoord.store import Store

LOOK_S: Final = 1.0
"""A waiter reads the store again after this many seconds: a process may have died before it announced its change."""

T = TypeVar("T")


class Unchanged(NamedTuple):
    """The result of a look that has not found what is awaited.

    Attributes:
        keys: the keys whose change ends the sleep.
        late: the message of the error if the time is over.
        sessions: the sessions whose deaths end the sleep, too.
    """

    keys: list[bytes]
    late: str
    sessions: list[int] | None = None


def look_again(
    store: Store, awaited: Awaited, words: str, limit: float, look: Callable[[], T | Unchanged]
) -> WaitSteps[T]:
    """Call `look` until it finds what is awaited, as one wait, which is logged as `words`.

    `look` is called before each sleep. It reads first what tells the next change, and then what it looks for: otherwise
    a change between the two would be missed.

    Raises:
        StoreTimeoutError: nothing was found within `limit` seconds.
    """
    return as_one_wait(awaited, lambda: words, partial(_looks, store, awaited.name, limit, look))


def _looks(
    store: Store, name: str, limit: float, look: Callable[[], T | Unchanged], slow_logger: SlowWaitLogger
) -> WaitSteps[T]:
    end = system.time.monotonic() + limit
    while True:
        found = look()
        if not isinstance(found, Unchanged):
            return found
        left = end - system.time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(found.late + store._closer_look(), keys=[name], waited=limit)
        with suppress(StoreTimeoutError):
            longest = min(LOOK_S, left)
            yield WaitRequest(KEYS, found.keys, longest, sessions=found.sessions, slow_logger=slow_logger)
