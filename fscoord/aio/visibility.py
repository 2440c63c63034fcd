"""`wait_visible` for tasks."""

from __future__ import annotations

import asyncio

from fscoord import visibility
from fscoord._arguments import DEFAULT_TIMEOUT, Timeout
from fscoord._runtime import system
from fscoord.aio._docstrings import explained_by


@explained_by(visibility.wait_visible)
async def wait_visible(
    path: str | system.os.PathLike[str],
    *,
    size: int | None = None,
    sha256: str | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """Wait until this host sees the file or directory `path`. Each look runs in a thread."""
    looks = visibility.pauses(path, size, sha256, timeout)
    while (pause := await asyncio.to_thread(next, looks, None)) is not None:
        await asyncio.sleep(pause)
