"""`Backoff`: pauses between the tries of an operation that others make fail, and a limit in time for all of them."""

from __future__ import annotations

from typing import Final

from fscoord._runtime import system

__all__ = ["FREE_TRIES", "Backoff"]

FREE_TRIES: Final = 16
"""How many tries may fail before there are pauses and the time counts: each failure means another's success."""

FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.05


class Backoff:
    """The tries of one operation, from now on.

    Args:
        limit: for how many seconds the operation may be tried.
    """

    def __init__(self, limit: float) -> None:
        self.tries = 0
        self._started = system.time.monotonic()
        self._limit = limit
        self._pause = FIRST_PAUSE_S

    def waited(self) -> float:
        """Return how many seconds the operation has been tried so far."""
        return system.time.monotonic() - self._started

    def pause(self) -> bool:
        """Count a try that failed, and pause before the next one; return False if the time is up."""
        self.tries += 1
        if self.tries < FREE_TRIES:
            return True
        left = self._limit - self.waited()
        if left <= 0:
            return False
        system.time.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        return True
