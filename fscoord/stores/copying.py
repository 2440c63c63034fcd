"""`copy`: a new store that holds what another file store holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fscoord._log.inspect.repair import Repair, copy_log
from fscoord._log.io import safe_files
from fscoord.arguments import Timeout, seconds

__all__ = ["copy"]


def _ignore(*_: object) -> None:
    """Progress is for people."""


def copy(
    path: Any, output: Any, *, timeout: Timeout = 10.0, on_progress: Callable[[str, int, int], object] = _ignore
) -> Repair:
    """Make a new file store at `output` that holds what the one at `path` holds at this moment.

    The store at `path` is only read, and may be in use: its writers wait for the copy. A copy made by cp(1) is one of
    a single file, and a store may have several; this makes one that is complete, and a store of its own.

    Args:
        path: the path of a file store.
        output: where the copy appears, whole; nothing may be there.
        timeout: how long to wait for the store's lock, in seconds or as a `timedelta`; ``math.inf`` is no limit.
        on_progress: is called with the path of a file, how many bytes of it were read, and how many there are.

    Raises:
        ValueError: there is something at `output`.
        CorruptLogError: the store is damaged: see `fscoord.stores.repair.repair`.
        StoreUnavailableError: something can't be opened, read or written.
        InsecurePathError: it is a link, or not a regular file.
        StoreTimeoutError: the lock did not come; the error names its holder.
        UnsupportedFilesystemError: this file system has no locks of the store's kind.
    """
    source, target = safe_files.resolve(path), safe_files.resolve(output)
    return copy_log(source, target, limit=seconds(timeout), tell=on_progress)
