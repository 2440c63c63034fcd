"""Interrupt a call at every point at which CPython lets a signal in, one point after another.

CPython looks for signals when it enters a Python function and after it has called a C function, which is when a
profiler is called. It also does when it jumps backwards, which `tests/faults/test_signals.py` reaches with real
signals.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class At:
    """Call `act` at the `number`-th point of whatever runs in the ``with``, if it has so many.

    No garbage is collected meanwhile: what an object's end calls would be points, too, and Python drops what is raised
    there.
    """

    def __init__(self, number: int, act: Callable[[], None]) -> None:
        self._left = number
        self._act = act
        self.reached = False
        self.where = ""
        self._hook = self._event  # kept: CPython only borrows what it calls

    def _event(self, frame: FrameType, event: str, function: Any) -> None:
        if self.reached or event not in ("call", "c_return") or "fscoord" not in frame.f_code.co_filename:
            return
        self._left -= 1
        if self._left == 0:  # what `act` calls is not profiled, and after it nothing is counted
            self.reached = True
            what = frame.f_code.co_name if event == "call" else f"{frame.f_code.co_name} after {function.__name__}"
            self.where = f"{frame.f_code.co_filename.rpartition('fscoord/')[2]}:{frame.f_lineno} {what}"
            self._act()

    def __enter__(self) -> At:
        gc.disable()
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()


def interrupt() -> None:
    """What Ctrl-C does."""
    raise KeyboardInterrupt
