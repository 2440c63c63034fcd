"""`Patience`: say in the log, now and then and ever more rarely, that something is still being waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger

__all__ = ["FIRST_S", "Patience"]

FIRST_S: Final = 30.0
"""How long a wait lasts before it is spoken of; then twice as long, and so on."""


class Patience:
    """One wait, from now on."""

    def __init__(self) -> None:
        self.started = system.time.monotonic()
        self._next = self.started + FIRST_S

    def left(self) -> float:
        """Return in how many seconds there will be something to say."""
        return max(0.0, self._next - system.time.monotonic())

    def speak(self, name: str, what: Callable[[], str]) -> None:
        """If it is time, warn on the logger `name` that what `what` returns is still waited for."""
        now = system.time.monotonic()
        if now >= self._next:
            waited = now - self.started
            self._next = self.started + max(2 * waited, FIRST_S)
            logger(name).warning("still waiting for %s, after %.0f s", what(), waited)
