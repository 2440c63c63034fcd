"""`WaitRequest`: what is waited for, and `WaitSteps`: code that yields requests instead of waiting.

A recipe or a collective is written once, as a generator that yields a `WaitRequest` wherever it would wait. The drivers
are `fscoord.store.run_blocking` for threads and `fscoord.aio` for the tasks of an event loop: each has the store carry
out the request, and sends the answer into the generator.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, NamedTuple, TypeVar

from fscoord._waiting.slow_wait import SlowWaitLogger

__all__ = ["ITEM", "KEYS", "VALUES", "BarrierRequest", "WaitRequest", "WaitSteps"]

T = TypeVar("T")

KEYS: Final = "keys"
VALUES: Final = "values"
ITEM: Final = "item"


class WaitRequest(NamedTuple):
    """What is waited for.

    Attributes:
        kind: `KEYS`, until each has a value or a non-empty queue; `VALUES` of the keys; or one `ITEM` of a queue.
        keys: the keys, checked; for an item, the name of the queue.
        timeout: the most seconds to wait.
        ranks: for `KEYS`: the wait also ends when one of these ranks is known dead.
        sessions: likewise for sessions.
        slow_logger: says in the log that this still waits, in the place of the store's own words.

    The answer is the list of the dead ranks or sessions for `KEYS` (empty when all keys are there), the list of the
    values for `VALUES`, and the value for `ITEM`.
    """

    kind: str
    keys: list[bytes]
    timeout: float
    ranks: list[int] | None = None
    sessions: list[int] | None = None
    slow_logger: SlowWaitLogger | None = None


class BarrierRequest(NamedTuple):
    """A call of `fscoord.Store.barrier`, which a store may have in a way of its own. The answer is None."""

    key: bytes
    world_size: int
    timeout: float


WaitSteps = Generator["WaitRequest | BarrierRequest", Any, T]
"""Code that yields what it waits for, is sent the answer, or raises, and ends with a `T`."""
