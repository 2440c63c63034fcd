"""`repair`: what is sound of a store's damaged file, in another file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fscoord._log.inspect.repair import Dropped, Repair, repair_log
from fscoord._log.io import safe_files
from fscoord.arguments import Timeout, seconds

__all__ = ["Dropped", "Repair", "repair"]


def _ignore(*_: object) -> None:
    """Progress, and what is left out, are for people."""


def repair(
    path: Any,
    output: Any,
    *,
    salvage: bool = False,
    write: bool = False,
    timeout: Timeout = 10.0,
    on_progress: Callable[[str, int, int], object] = _ignore,
    on_skipped: Callable[[Dropped], object] = _ignore,
) -> Repair:
    """Copy what is sound of the log at `path` to a new log at `output`. The log itself is only read.

    What counts is in its newest generation: that is copied record by record, with the writers and times that they have.
    End all processes that use the log before; who writes to it waits for the copy. Whoever opens the copy begins as
    with any log.

    Args:
        path: the path of a file store.
        output: where the copy appears, whole; nothing may be there.
        salvage: copy the sound records behind a damage, too, and make do without a header, or without a generation
            that is missing. What is copied may then be a state that the store never was in.
        write: write the copy; by default only what would be left out is told.
        timeout: how long to wait for the log's lock, in seconds or as a `timedelta`; ``math.inf`` is no limit.
        on_progress: is called with the path of a file, how many bytes of it were read, and how many there are.
        on_skipped: is called with everything that is left out, in order.

    Raises:
        ValueError: there is something at `output`.
        CorruptLogError: nothing can be copied, or only by salvage.
        StoreUnavailableError: something can't be opened, read or written.
        InsecurePathError: it is a link, or no regular file.
        StoreTimeoutError: the log's lock did not come; the error names the holder.
        UnsupportedFilesystemError: this file system has no locks of the log's kind.
    """
    source, target = safe_files.resolve(path), safe_files.resolve(output)
    limit = seconds(timeout)
    return repair_log(source, target, salvage=salvage, write=write, limit=limit, tell=on_progress, drop=on_skipped)
