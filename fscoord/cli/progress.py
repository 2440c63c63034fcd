"""Progress of what may take long, on standard error if that is a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from fscoord._runtime import system
from fscoord.cli.output import printable

if TYPE_CHECKING:
    from rich.progress import Progress as Bar, TaskID

__all__ = ["Progress"]

BEGIN_S = 1.0
"""What takes less needs no bar, nor the time that it takes to load one."""


class Progress:
    """A bar for the bytes of each file in turn, gone at the end: ``with Progress("reading") as progress``."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._is_shown = sys.stderr is not None and sys.stderr.isatty()
        self._begin = system.time.monotonic() + BEGIN_S
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, file: str, done: int, size: int) -> None:
        """Show that `done` of the `size` bytes of `file` are dealt with."""
        if not self._is_shown or (self._bar is None and system.time.monotonic() < self._begin):
            return
        if self._bar is None or self._task is None:
            self._bar = _make_bar()
            self._task = self._bar.add_task("")
            self._bar.start()
        name = printable(system.os.fsencode(system.os.path.basename(file)))
        self._bar.update(self._task, description=f"{self._doing} {name}", completed=done, total=size)


def _make_bar() -> Bar:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress as Bar, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Bar(*columns, console=Console(stderr=True), transient=True)
