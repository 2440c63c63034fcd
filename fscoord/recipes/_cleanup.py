"""Cleanup that is carried out to its end, however often Ctrl-C interrupts it.

A signal handler may raise in the main thread, at nearly any point, also in a block that undoes what an earlier one
interrupted: a terminal and a launcher both send SIGINT. So a method that must leave nothing behind ends like this::

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
returned, and nowhere else. `go_on_in_thread` is a C function, and the first call of its block: the call is made,
whatever signals are pending by then. In the thread that it starts no signal handler ever runs. For the same reason
nothing is called between ``def`` and ``try``, where nobody would catch what a handler raises. What undoes may begin
twice, so it must do no harm when there is nothing left to undo.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from fscoord._runtime import system

__all__ = ["HERE", "await_end", "go_on_in_thread"]

END: Final = "end"

LINGER_S: Final = 1.0
"""How long to wait for the thread. Its work takes microseconds, unless another process is stuck with the store."""

HERE: Final = system.threading.local()
"""``HERE.__dict__`` is another object in each thread, and to get it is no call, unlike `threading.get_ident`."""


def _run(over: list[object], undo: Callable[..., object], *arguments: Any) -> None:
    with suppress(Exception):  # nobody is left to be told
        undo(*arguments)
    over.append(END)
    for wakeup in list(over):
        if isinstance(wakeup, system.AutoResetEvent):
            wakeup.set()


go_on_in_thread: Final = partial(system.start_bare_thread, _run)
"""Call `undo` in a thread: ``go_on_in_thread((over, undo, *arguments))``, where `over` is an empty list."""


def await_end(over: list[object]) -> None:
    """Wait a moment for the thread that was given `over`: as a rule all is undone when the interruption comes out."""
    wakeup = system.AutoResetEvent()
    over.append(wakeup)  # in this order: the thread looks for it after it has said that it is over
    if END not in over:
        wakeup.wait(LINGER_S)
