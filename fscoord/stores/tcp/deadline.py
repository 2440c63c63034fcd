"""`Deadline`: how long a call at a server of torch's `TCPStore` may take, whatever it waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from fscoord._runtime import system
from fscoord._waiting.slow_wait import SlowWaitLogger

__all__ = ["GRACE_S", "LEAST_ANSWER_S", "Deadline", "Unanswered"]

T = TypeVar("T")

LEAST_ANSWER_S: Final = 2.0
"""How long the server has for its answer, however short the timeout: torch's server asks the resolver for the name of
each client that connects, and does nothing else until that answers."""

GRACE_S: Final = 0.1
"""How long the server has, at the end of a wait, to say that it has ended it."""

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 1e6


class Unanswered(Exception):
    """The deadline has come before what was waited for."""


class Deadline:
    """The moment, `limit` seconds from now, by which a call must be over.

    Until then the log says, now and then, that what `waiting_for` returns is waited for.

    Attributes:
        started: when the call began.
        ends: by when it must be over.
    """

    def __init__(self, limit: float, waiting_for: Callable[[], str]) -> None:
        self.started = system.time.monotonic()
        self.ends = self.started + limit
        self._waiting_for = waiting_for
        self._slow_logger: SlowWaitLogger | None = None

    def waited(self) -> float:
        """Return for how many seconds the call has gone on."""
        return system.time.monotonic() - self.started

    def left(self) -> float:
        """Return how many seconds remain; none is 0."""
        return max(0.0, self.ends - system.time.monotonic())

    def pause(self, ends: float) -> float:
        """Return how long to sleep at once, until `ends` at most, before `remind` is called."""
        longest = FIRST_PAUSE_S if self._slow_logger is None else self._slow_logger.until_next()
        return min(max(0.0, ends - system.time.monotonic()), longest, LONGEST_PAUSE_S)

    def remind(self) -> None:
        """Warn in the log, if it is time."""
        if self._slow_logger is None:  # most calls end before they need one
            self._slow_logger = SlowWaitLogger(__name__, self._waiting_for)
        self._slow_logger.warn_if_due()

    def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, which a thread does, because no signal ends it and no deadline.

        Args:
            work: what to do. When it is over too late it is not known to anybody, and its result is dropped.

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
        except RuntimeError:  # no thread is left
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
        return result  # type: ignore[return-value]  # it is None only where `work` returns that
