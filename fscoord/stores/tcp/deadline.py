"""`Deadline`: the time limit of one call to a server of torch's `TCPStore`, whatever the call waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from fscoord._runtime import system
from fscoord._waiting.timing import SlowWaitLogger

__all__ = ["ANSWER_MIN_S", "GRACE_S", "Deadline", "Unanswered"]

T = TypeVar("T")

ANSWER_MIN_S: Final = 2.0
"""How long the server has for its answer, however short the timeout: torch's server asks the resolver for the name of
each client that connects, and does nothing else until the resolver answers."""

GRACE_S: Final = 0.1
"""How long the server has, at the end of a wait, to confirm that it has cancelled the wait."""

FIRST_SLEEP_MAX_S: Final = 1.0
SLEEP_MAX_S: Final = 1e6


class Unanswered(Exception):
    """The deadline passed first."""


class Deadline:
    """The moment, `limit` seconds from now, by which a call must be over.

    Until then, a call that takes long is reported in the log now and then, as a wait for what `waiting_for` returns.

    Attributes:
        started: when the call began.
        ends: when it must be over.
    """

    def __init__(self, limit: float, waiting_for: Callable[[], str]) -> None:
        self.started = system.time.monotonic()
        self.ends = self.started + limit
        self._waiting_for = waiting_for
        self._slow_logger: SlowWaitLogger | None = None

    def waited(self) -> float:
        """Return the seconds since the call began."""
        return system.time.monotonic() - self.started

    def left(self) -> float:
        """Return the seconds until the deadline, at least 0."""
        return max(0.0, self.ends - system.time.monotonic())

    def pause(self, ends: float) -> float:
        """Return how long the caller may sleep, until `ends` at most, before it must call `remind`."""
        longest = FIRST_SLEEP_MAX_S if self._slow_logger is None else self._slow_logger.until_next()
        return min(max(0.0, ends - system.time.monotonic()), longest, SLEEP_MAX_S)

    def remind(self) -> None:
        """Warn in the log that the call still waits, if a warning is due."""
        if self._slow_logger is None:  # most calls end before they need one
            self._slow_logger = SlowWaitLogger(__name__, self._waiting_for)
        self._slow_logger.warn_if_due()

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, which a thread of its own executes: no signal and no deadline interrupts `work`.

        Args:
            work: what to do. If it ends after the deadline, its result is dropped.

        Raises:
            Unanswered: the deadline came first.
        """
        outcome: list[tuple[T | None, BaseException | None]] = []

        def run() -> None:
            try:
                outcome.append((work(), None))
            except BaseException as error:  # noqa: BLE001 - it is raised below
                outcome.append((None, error))

        thread = system.threading.Thread(target=run, name="fscoord-tcp", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system refuses another thread
            run()
        while not outcome:
            pause = self.pause(self.ends)
            thread.join(pause)
            if pause <= 0 and not outcome:
                if not self.left():
                    raise Unanswered
                self.remind()
        result, error = outcome.pop()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]  # it is None only where `work` returns None
