"""Cleanup that completes, however often Ctrl-C interrupts it.

A signal handler may raise in the main thread at nearly any point. It may also raise in a block that cleans up after an
earlier signal, for example if a terminal and a launcher both send SIGINT. So a method that must leave nothing behind
ends like this::

    over: list[object] = []
    try:
        return self._do(record)
    except BaseException:
        try:
            self._undo(record)
        except BaseException:
            go_on_in_thread((over, self._undo, record))
            await_end(over)
            raise
        raise

CPython runs signal handlers when it enters a Python function, when it jumps backwards, and after a C function has
returned, and at no other point. `go_on_in_thread` is a C function, and it is the first call of its block, so it is
called even if signals are pending. Signal handlers never run in the thread that it starts. For the same reason there is
no call between ``def`` and ``try``: an exception of a handler there would not be caught. `_undo` may be begun twice, so
it must do no harm when there is nothing left to undo.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from fscoord._runtime import system

__all__ = ["await_end", "go_on_in_thread"]

END: Final = "end"

WAIT_MAX_S: Final = 1.0
"""How long to wait for the thread. Its work takes microseconds, unless another process blocks the store."""


def _run(over: list[object], undo: Callable[..., object], *arguments: Any) -> None:
    with suppress(Exception):  # the caller raises the exception that it began with
        undo(*arguments)
    over.append(END)
    for wakeup in list(over):
        if isinstance(wakeup, system.AutoResetEvent):
            wakeup.set()


go_on_in_thread: Final = partial(system.start_bare_thread, _run)
"""Call `undo` in a thread: ``go_on_in_thread((over, undo, *arguments))``, where `over` is an empty list."""


def await_end(over: list[object]) -> None:
    """Wait up to `WAIT_MAX_S` for the end of the thread that was given `over`.

    So the undo is normally complete before the caller raises.
    """
    wakeup = system.AutoResetEvent()
    over.append(wakeup)  # before the test: the thread appends END first, and then sets what it finds
    if END not in over:
        wakeup.wait(WAIT_MAX_S)
