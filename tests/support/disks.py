"""Disks without room."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def fill(disk: Path) -> None:
    """Write zeros to a file ``ballast`` in the directory `disk`, until no page is free."""
    with (disk / "ballast").open("wb", buffering=0) as ballast, suppress(OSError):
        while ballast.write(bytes(4096)):
            pass
