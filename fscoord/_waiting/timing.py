"""`Backoff`, the pauses of an operation that is retried, and `SlowWaitLogger`, the warnings about a long wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord._waiting.awaited import Awaited

FREE_TRIES: Final = 16
"""The number of tries that may fail before the pauses begin and the limit applies. A try fails only if another caller
has succeeded."""

FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.05

FIRST_S: Final = 30.0
"""How long a wait lasts before the first warning, in seconds. This time doubles before each further warning."""

SHOW_S: Final = 1.0
"""How long a wait lasts before a store shows it to other processes, in seconds. A shorter wait writes nothing."""


STILL_WAITING: Final = "still waiting for %s, after %.0f s"
"""The text of a warning. A program that tells of its waits in its own way finds the warning by it."""


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
    """Logs the warnings about one wait, and keeps the facts by which a store shows the wait to other processes.

    A wait may consist of several requests to the store, one after another: a contender for a lock looks at the line
    once in a second. To a user they are one wait, so they share this object. The code that makes the object calls `end`
    when the wait is over.

    Args:
        name: the name of the logger.
        describe: returns the text that names the object of the wait, for calls of `warn_if_due` without an argument. It
            is called only when a warning is logged. It is never called under a lock of the store, so it may use the
            store.
        started: when the wait began, by the monotonic clock; None: now.
        awaited: the purpose of the wait; None: the keys of the request describe it.

    Attributes:
        due: when the store must next show the wait or log a warning, by the monotonic clock.
        shown: the store's record of the wait, once the store shows it; see `end`.
    """

    def __init__(
        self,
        name: str,
        describe: Callable[[], str] = str,
        started: float | None = None,
        awaited: Awaited | None = None,
    ) -> None:
        self.started = system.time.monotonic() if started is None else started
        self.awaited = awaited
        self.shown: Any = None
        self._name = name
        self._describe = describe
        self._next = self.started + FIRST_S
        self.due = self.started + min(SHOW_S, FIRST_S)

    def until_next(self) -> float:
        """Return the number of seconds until the next warning is due."""
        return max(0.0, self._next - system.time.monotonic())

    def is_long(self, now: float) -> bool:
        """Return whether the wait has lasted for `SHOW_S` at the time `now`, by the monotonic clock."""
        return now >= self.started + SHOW_S

    def next_due(self, now: float) -> float:
        """Return the first time after `now` at which the store must show the wait or log a warning; see `due`."""
        is_next_shown = self.shown is not None
        self.due = self._next if is_next_shown else min(self._next, max(now, self.started) + SHOW_S)
        return self.due

    def warn_if_due(self, describe: Callable[[], str] | None = None) -> None:
        """Log that the wait continues, if a warning is due. The message has the text that `describe` returns."""
        now = system.time.monotonic()
        if now >= self._next:
            waited = now - self.started
            self._next = self.started + max(2 * waited, FIRST_S)
            logger(self._name).warning(STILL_WAITING, (describe or self._describe)(), waited)

    def end(self) -> None:
        """End the wait.

        A store that shows the wait to other processes stops showing it. This method may be called twice.
        """
        shown = self.shown
        if shown is not None:
            self.shown = None
            shown.withdraw()
