"""`Backoff`, the pauses of an operation that is retried, and `SlowWaitLogger`, the warnings about a long wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger

FREE_TRIES: Final = 16
"""The number of tries that may fail before the pauses begin and the limit applies. A try fails only if another caller
has succeeded."""

FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.05

FIRST_S: Final = 30.0
"""How long a wait lasts before the first warning, in seconds. This time doubles before each further warning."""


class Backoff:
    """Counts the tries of one operation, and pauses between them.

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
        """Count a failed try, and pause before the next try. Return False if the time for all tries is over."""
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
    """Logs the warnings about one wait.

    Args:
        name: the name of the logger.
        describe: returns the text that names the object of the wait, for calls of `warn_if_due` without an argument. It
            is called only when a warning is logged. It is never called under a lock of the store, so it may use the
            store.
        started: when the wait began, by the monotonic clock; None: now.
    """

    def __init__(self, name: str, describe: Callable[[], str] = str, started: float | None = None) -> None:
        self.started = system.time.monotonic() if started is None else started
        self._name = name
        self._describe = describe
        self._next = self.started + FIRST_S

    def until_next(self) -> float:
        """Return the number of seconds until the next warning is due."""
        return max(0.0, self._next - system.time.monotonic())

    def warn_if_due(self, describe: Callable[[], str] | None = None) -> None:
        """Log that the wait continues, if a warning is due. The message has the text that `describe` returns."""
        now = system.time.monotonic()
        if now >= self._next:
            waited = now - self.started
            self._next = self.started + max(2 * waited, FIRST_S)
            logger(self._name).warning("still waiting for %s, after %.0f s", (describe or self._describe)(), waited)
