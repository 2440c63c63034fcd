"""`wait_visible` for tasks."""

from __future__ import annotations

import asyncio

from fscoord._arguments import DEFAULT_TIMEOUT, Timeout
from fscoord._runtime import system
from fscoord.visibility import pauses


async def wait_visible(
    path: str | system.os.PathLike[str],
    *,
    size: int | None = None,
    sha256: str | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> None:
    """Wait until this host sees `path`; see `fscoord.visibility.wait_visible`. Each look runs in a thread."""
    looks = pauses(path, size, sha256, timeout)
    while (pause := await asyncio.to_thread(next, looks, None)) is not None:
        await asyncio.sleep(pause)
