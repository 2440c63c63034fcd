"""`Backoff`, the pauses of an operation that is retried, and `SlowWaitLogger`, the warnings about a long wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger

__all__ = ["FIRST_S", "FREE_TRIES", "Backoff", "SlowWaitLogger"]

FREE_TRIES: Final = 16
"""How many tries may fail before there are pauses and the time counts: each failure means another's success."""

FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.05

FIRST_S: Final = 30.0
"""How long a wait lasts before the first warning; the next one comes when it has lasted twice as long, and so on."""


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


class SlowWaitLogger:
    """The warnings about one wait.

    Args:
        name: the name of the logger.
        describe: returns what is waited for, where no call of `warn_if_due` gives it. It is called for a warning only,
            and never under a lock of the store, so it may ask the store.
        started: when the wait began, by the monotonic clock; now, unless it is given.
    """

    def __init__(self, name: str, describe: Callable[[], str] = str, started: float | None = None) -> None:
        self.started = system.time.monotonic() if started is None else started
        self._name = name
        self._describe = describe
        self._next = self.started + FIRST_S

    def until_next(self) -> float:
        """Return in how many seconds the next warning is due."""
        return max(0.0, self._next - system.time.monotonic())

    def warn_if_due(self, describe: Callable[[], str] | None = None) -> None:
        """Warn, if it is time, that what `describe` returns is still waited for."""
        now = system.time.monotonic()
        if now >= self._next:
            waited = now - self.started
            self._next = self.started + max(2 * waited, FIRST_S)
            logger(self._name).warning("still waiting for %s, after %.0f s", (describe or self._describe)(), waited)
