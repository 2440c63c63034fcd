"""`Backoff`, the pauses of an operation that is retried, and `SlowWaitLogger`, the warnings about a long wait."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord._waiting.awaited import Awaited

FREE_TRIES: Final = 16
"""How many tries are made without pauses, even if the time limit has passed. A try fails only if another caller has
succeeded."""

FIRST_PAUSE_S: Final = 0.001
LONGEST_PAUSE_S: Final = 0.05

FIRST_S: Final = 30.0
"""How long a wait lasts before the first warning, in seconds. A further warning comes each time when the duration of
the wait has doubled since the last warning."""

SHOW_S: Final = 1.0
"""How long a wait lasts before a store shows it to other processes, in seconds. A shorter wait writes nothing."""


STILL_WAITING: Final = "still waiting for %s, after %.0f s"
"""The text of the warning. A logging filter can recognise the warning by this text."""


class Backoff:
    """Counts the tries of one operation, and pauses between them.

    Args:
        limit: the time limit for all tries, in seconds.
    """

    def __init__(self, limit: float) -> None:
        self.tries = 0
        self._started = system.time.monotonic()
        self._limit = limit
        self._pause = FIRST_PAUSE_S

    def waited(self) -> float:
        """Return the number of seconds since the first try."""
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
    """Logs warnings about one long wait, and says when the store must show the wait to other processes.

    A wait may consist of several requests to the store. For example, a process that waits for a lock sends a request
    every second. All requests of one wait share one `SlowWaitLogger`. The code that creates it calls `end` when the
    wait is over.

    Args:
        name: the name of the logger.
        describe: returns a text that says for what the caller waits. `warn_if_due` calls this function by default. No
            caller holds a lock of the store, so the function may use the store.
        started: when the wait began, by the monotonic clock; None: now.
        awaited: the object for which the caller waits; None: the store names the missing keys.
        warns: whether a long wait is logged. False: the wait may last, and is only shown.

    Attributes:
        due: when the store must next show the wait or log a warning, by the monotonic clock.
        shown: the published wait (`shown_waits.Shown`); None while the wait is not shown.
    """

    def __init__(
        self,
        name: str,
        describe: Callable[[], str] = str,
        started: float | None = None,
        awaited: Awaited | None = None,
        *,
        warns: bool = True,
    ) -> None:
        self.started = system.time.monotonic() if started is None else started
        self.awaited = awaited
        self.shown: Any = None
        self._name = name
        self._describe = describe
        self._next = self.started + FIRST_S if warns else math.inf
        self.due = self.started + min(SHOW_S, FIRST_S)

    def until_next(self) -> float:
        """Return the number of seconds until the next warning is due."""
        return max(0.0, self._next - system.time.monotonic())

    def is_long(self, now: float) -> bool:
        """Return whether the wait has lasted for `SHOW_S` seconds at the time `now` of the monotonic clock."""
        return now >= self.started + SHOW_S

    def next_due(self, now: float) -> float:
        """Set and return `due`, the next time after `now` at which the store must show the wait or log a warning."""
        is_next_shown = self.shown is not None
        self.due = self._next if is_next_shown else min(self._next, max(now, self.started) + SHOW_S)
        return self.due

    def warn_if_due(self, describe: Callable[[], str] | None = None) -> None:
        """Log that the wait continues, if a warning is due.

        Args:
            describe: returns a text that says for what the caller waits. None: the function of the constructor.
        """
        now = system.time.monotonic()
        if now >= self._next:
            waited = now - self.started
            self._next = self.started + max(2 * waited, FIRST_S)
            logger(self._name).warning(STILL_WAITING, (describe or self._describe)(), waited)

    def end(self) -> None:
        """End the wait: the store stops showing it to other processes. This method may be called twice."""
        shown = self.shown
        if shown is not None:
            self.shown = None
            shown.withdraw()
