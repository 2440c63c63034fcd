"""`KernelCall`: registers a system call that may hang in the kernel. A watchdog thread reports a call that hangs.

A call hangs, for example, while the server of a hard NFS mount does not answer. Such a call can't be interrupted, so no
deadline can end it. While a log on a shared mount is open, the watchdog thread checks the calls of its handles. After
`FIRST_S` seconds it logs a warning with the path and the duration, and again each time the duration has doubled.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from fscoord._runtime import system
from fscoord._runtime.logging import logger

FIRST_S = 10.0
"""How long a call may take before the first warning, in seconds. This time doubles for each further warning."""


class KernelCall:
    """Records whether one handle is inside a system call, and since when. Used as a context manager around the call.

    Args:
        path: the path of the log.
        cause: the likely cause of a hang and the remedy, as sentences.
    """

    def __init__(self, path: str, cause: str = "Does its server answer?") -> None:
        self._path = path
        self._cause = cause
        self._since = 0.0
        self._warn_after = 0.0
        _open.add(self)

    def begin(self) -> None:
        """Record the beginning of a call that may hang."""
        self._warn_after = FIRST_S
        self._since = system.time.monotonic()
        _watchdog.ensure_running()

    def end(self, *_: object) -> None:
        """Record that the call has returned."""
        self._since = 0.0

    __enter__, __exit__ = begin, end

    def close(self) -> None:
        """Record that the handle makes no more calls."""
        self._since = 0.0
        _open.discard(self)
        if not _open:
            _watchdog.wake.set()

    def warn_if_stuck(self, now: float) -> None:
        """Log a warning if the call has taken too long at time `now` (monotonic). The watchdog thread calls this.

        No lock is held, so the handle's thread may end the call, or begin another, between any two lines. At worst,
        there is one warning too many or too few.
        """
        since = self._since
        if since and now - since >= self._warn_after:
            self._warn_after *= 2
            logger(__name__).warning(
                "%s: a call to the file system has been stuck for %.0f s. %s The call can't be interrupted, and"
                " continues when the server answers again",
                self._path,
                now - since,
                self._cause,
            )


class HangWatchdog:
    """Runs the thread that checks the calls of all handles."""

    def __init__(self) -> None:
        self.reset()
        _watchdogs.add(self)

    def reset(self) -> None:
        """Set the initial state, without a thread and a call. A forked child calls this as well."""
        self.wake = system.AutoResetEvent()
        self._thread: Any = None
        for call in list(_open):
            call.end()

    def ensure_running(self) -> None:
        """Start the thread if it is not running."""
        if self._thread is None:
            thread = system.try_thread("fscoord-stuck", self._run)
            if not isinstance(thread, RuntimeError):  # no thread is left; the next call tries again
                self._thread = thread

    def _run(self) -> None:
        while True:
            self.wake.wait(FIRST_S / 2)
            if not _open:
                self._thread = None
                if not _open:  # a handle opened before that assignment found a thread, and started none
                    return
            now = system.time.monotonic()
            for call in list(_open):
                call.warn_if_stuck(now)


_open: weakref.WeakSet[KernelCall] = weakref.WeakSet()
_watchdogs = system.reset_in_child("calls", HangWatchdog.reset)
_watchdog: Final = HangWatchdog()
