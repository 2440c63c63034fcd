"""`SlowWaitLogger`: warn in the log, ever more rarely, that something is still being waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger

__all__ = ["FIRST_S", "SlowWaitLogger"]

FIRST_S: Final = 30.0
"""How long a wait lasts before the first warning; the next one comes when it has lasted twice as long, and so on."""


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
