"""Interrupt a call at every point at which CPython lets a signal in, one point after another, also several times.

CPython looks for signals when it enters a Python function and after it has called a C function, which is when a
profiler is called. It also does when it jumps backwards, which `tests/faults/test_signals.py` reaches with real
signals.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import fscoord

PACKAGE = f"{Path(fscoord.__file__).parent}/"


class ValueOrLookupError(ValueError, IndexError, KeyError, OverflowError):
    """All of them at once: what catches one of these catches it."""


class TimeoutOrPermissionError(TimeoutError, PermissionError):
    """Both at once, as what a handler raises: errors of the system without a number."""


class At:
    """Call `act` at the `number`-th point of whatever runs in the ``with``, if it has so many.

    With `later`, call it again at points after that, each counted from the one before: what `act` raised is on its way
    out by then, through whatever cleans up after it. Of those only the ones in the part `inside` of the package count,
    and of the first ones only those in the part `first_inside`.

    No garbage is collected meanwhile: what an object's end calls would be points, too, and Python drops what is raised
    there.

    Attributes:
        reached: whether the first point was there.
        where: which point the first one was.
        places: which points the call was interrupted at.
    """

    def __init__(
        self, number: int, act: Callable[[], None], *later: int, inside: str = "", first_inside: str = ""
    ) -> None:
        self._numbers = [number, *later]
        self._left = number
        self._act = act
        self._parts = [PACKAGE + first_inside, *[PACKAGE + inside] * len(later)]
        self._counts = _counting(self._parts[0])
        self.places: list[str] = []
        self._hook = self._event  # kept: CPython only borrows what it calls

    @property
    def reached(self) -> bool:
        return bool(self.places)

    @property
    def where(self) -> str:
        return self.places[0] if self.places else ""

    def _event(self, frame: FrameType, event: str, function: Any) -> None:
        # Some hundred calls of this come before each point, and most of them end here.
        if (event != "call" and event != "c_return") or not self._counts[frame.f_code.co_filename]:
            return
        self._left -= 1
        if self._left == 0:  # what `act` calls is not profiled
            what = frame.f_code.co_name if event == "call" else f"{frame.f_code.co_name} after {function.__name__}"
            self.places.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} {what}")
            if len(self.places) < len(self._numbers):
                self._left = self._numbers[len(self.places)]
                self._counts = _counting(self._parts[len(self.places)])
                self._go_on_after_an_error_of(frame)
            self._act()

    def _go_on_after_an_error_of(self, frame: FrameType | None) -> None:
        """CPython drops a profiler that raises: take it back as soon as the error is on its way."""
        while frame is not None:
            frame.f_trace = self._see_error
            frame = frame.f_back
        sys.settrace(self._see_error)

    def _see_error(self, frame: FrameType | None, event: str, _: Any) -> Any:
        if event != "exception":
            return self._see_error
        sys.settrace(None)
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back
        sys.setprofile(self._hook)
        return None

    def __enter__(self) -> At:
        gc.disable()
        sys.setprofile(self._hook)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)
        gc.enable()


class _Counting(dict[str, bool]):
    """Whether points in a file count."""

    def __init__(self, part: str) -> None:
        self._part = part

    def __missing__(self, file: str) -> bool:
        counts = self[file] = file.startswith(self._part)
        return counts


_counting = functools.cache(_Counting)


def interrupt() -> None:
    """Act as Ctrl-C."""
    raise KeyboardInterrupt
