"""`ShownWaits` publishes the long waits of one handle, so that other processes can see them.

The store passes a function that writes the longest wait and the number of other waits to a place where other processes
read them. No lock guards the write. If two threads write at the same moment, the older state may be written last. So
after each write, a thread checks whether another thread has changed the waits since. If so, it writes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fscoord._runtime import system
from fscoord._waiting.awaited import Awaited
from fscoord._waiting.timing import SlowWaitLogger

__all__ = ["Shown", "ShownWaits"]


class Shown:
    """One published wait: the value of `SlowWaitLogger.shown`.

    Args:
        waits: the published waits of the handle.
        awaited: the object for which the caller waits.
        keys: the missing keys.
        started: when the wait began, by the monotonic clock.
    """

    def __init__(self, waits: ShownWaits, awaited: Awaited, keys: Sequence[bytes], started: float) -> None:
        self.awaited = awaited
        self.keys = keys
        self.started = started
        self._waits = waits

    def withdraw(self) -> None:
        """Stop publishing the wait."""
        self._waits.withdraw(self)


class ShownWaits:
    """The published waits of one handle.

    Args:
        write: called with the longest wait, or None if there is none, and the number of other waits. This function must
            not raise an error when it can't write, because the wait itself must not fail.
    """

    def __init__(self, write: Callable[[Shown | None, int], object]) -> None:
        self._write = write
        self._waits: list[Shown] = []
        self._epoch = system.process_epoch()
        self._changes = 0

    def show(self, slow_logger: SlowWaitLogger, kind: str, keys: Sequence[bytes]) -> None:
        """Publish the wait of `slow_logger`, unless this wait is published already.

        Args:
            slow_logger: the logger of the wait.
            kind: ``key`` or ``queue``, for a wait whose `SlowWaitLogger.awaited` is None.
            keys: the missing keys.
        """
        if slow_logger.shown is not None:
            return
        epoch = system.process_epoch()
        if self._epoch != epoch:  # a forked child: the waits are those of its parent, whose threads are not here
            self._waits, self._epoch = [], epoch
        shown = Shown(self, slow_logger.awaited or Awaited(kind, ""), tuple(keys), slow_logger.started)
        slow_logger.shown = shown  # before it is added: `SlowWaitLogger.end` must find what was added
        self._waits.append(shown)
        self._changes += 1
        self._write_present()

    def withdraw(self, shown: Shown) -> None:
        """Stop publishing the wait `shown`."""
        if shown in self._waits and self._epoch == system.process_epoch():
            self._waits.remove(shown)
            self._changes += 1
            self._write_present()

    def _write_present(self) -> None:
        while True:
            changes, waits = self._changes, list(self._waits)
            longest = min(waits, key=lambda shown: shown.started, default=None)
            self._write(longest, max(len(waits) - 1, 0))
            if changes == self._changes:
                return
