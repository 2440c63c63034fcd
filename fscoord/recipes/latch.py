"""`Latch`: wait until something has happened so many times."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from fscoord._arguments import Key, Timeout, check_positive, key_bytes, key_text, to_seconds
from fscoord._runtime import system
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.errors import StoreTimeoutError
from fscoord.recipes._keys import add_checked, parse_count
from fscoord.store import Store, run_blocking

__all__ = ["Latch"]

LOOK_S: Final = 1.0
"""How often one who waits looks at the count: who counted the last may have died before it opened the latch."""


class Latch:
    """A door that opens when `count` times `count_down` was called, by whomever, and stays open.

    Unlike a barrier it is not the same people who count and who wait, and nobody needs a rank. Each call counts; a
    caller that does not know whether its call took effect, and calls again, may count twice.

    Args:
        store: where they meet.
        name: the latch's name there; keys that begin with it and a slash belong to it. It opens once.
        count: how many calls open it; the same for all.
    """

    def __init__(self, store: Store, name: Key, count: int) -> None:
        self._store = store
        self._name = key_bytes(name)
        self._count = check_positive("count", count)
        self._counted, self._open = self._name + b"/counted", self._name + b"/open"
        key_bytes(self._counted)

    def count_down(self) -> int:
        """Count one, and return how many are still missing."""
        missing = self._count - add_checked(self._store, self._counted)
        if missing <= 0:
            self._store.set(self._open, b"1")
        return max(0, missing)

    def missing(self) -> int:
        """Return how many calls are still missing; 0: it is open."""
        text = self._store.get(self._counted) if self._store.check([self._counted]) else b"0"
        return max(0, self._count - parse_count(self._counted, text))

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the latch is open.

        Args:
            timeout: seconds or a `timedelta`; None means the store's.

        Raises:
            StoreTimeoutError: it did not open; the message says how many are missing.
        """
        run_blocking(self._store, self._waiting(timeout))

    def _waiting(self, timeout: Timeout | None) -> WaitSteps[None]:
        limit = to_seconds(self._store.timeout if timeout is None else timeout)
        start, slow_logger = system.time.monotonic(), SlowWaitLogger(__name__, self._progress)
        while True:
            left = limit - (system.time.monotonic() - start)
            with suppress(StoreTimeoutError):
                yield WaitRequest(KEYS, [self._open], max(0.0, min(LOOK_S, left)), slow_logger=slow_logger)
                return None
            missing = self.missing()
            if not missing:
                return self._store.set(self._open, b"1")
            if left <= LOOK_S:
                raise StoreTimeoutError(
                    f"the latch {key_text(self._name)!r} did not open within {limit:g} s: {missing} of {self._count}"
                    " calls are missing",
                    keys=[key_text(self._open)],
                    waited=limit,
                )

    def _progress(self) -> str:
        return f"the latch {key_text(self._name)!r} ({self.missing()} of {self._count} calls missing)"
