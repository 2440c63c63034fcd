"""Say that a call is stuck in the kernel, which is not ours to end: a hard NFS mount whose server is gone.

Such a call can't be interrupted and meets no deadline. So a thread, there only while a log on a mount that hosts share
is open, tells the logger its path and how long it has taken: after some seconds, and then ever more rarely.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger

__all__ = ["KernelCall"]

FIRST_S = 10.0
"""How long a call may take before it is told of; the next time after twice as long, and so on."""


class KernelCall:
    """What one handle is doing in the kernel, if anything.

    Args:
        path: the log.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._since = 0.0
        self._told_at = 0.0
        _open.add(self)

    def begin(self) -> None:
        """A call begins that may be stuck."""
        self._told_at = FIRST_S
        self._since = system.time.monotonic()
        _watcher[0].ensure_running()

    def end(self) -> None:
        """It is over."""
        self._since = 0.0

    def close(self) -> None:
        """The handle makes no more calls."""
        self._since = 0.0
        _open.discard(self)
        if not _open:
            _watcher[0].wake.set()

    def look(self, now: float) -> None:
        """Tell of the call if it takes too long."""
        since = self._since
        if since and now - since >= self._told_at:
            self._told_at *= 2
            logger(__name__).warning(
                "%s: a call to the file system has been stuck for %.0f s; does its server answer? It can't be"
                " interrupted, and goes on when the server comes back",
                self._path,
                now - since,
            )


class HangWatchdog:
    """The thread that looks at all calls."""

    def __init__(self) -> None:
        self.wake = system.AutoResetEvent()
        self._thread: Any = None

    def ensure_running(self) -> None:
        """Have a thread look at the calls, if none does."""
        if self._thread is None:
            try:
                self._thread = system.start_thread("fscoord-stuck", self._run)
            except RuntimeError as error:  # the next call tries again
                raise_if_foreign(error)

    def _run(self) -> None:
        while True:
            self.wake.wait(FIRST_S / 2)
            if not _open:
                self._thread = None
                if not _open:
                    return
            now = system.time.monotonic()
            for call in list(_open):
                call.look(now)


_open: weakref.WeakSet[KernelCall] = weakref.WeakSet()
_watcher: Final = [HangWatchdog()]


def _after_fork_in_child() -> None:
    _watcher[0] = HangWatchdog()
    for call in list(_open):
        call.end()  # it was made by a thread of the parent


system.after_fork_in_child("calls", _after_fork_in_child)
