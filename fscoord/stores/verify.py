"""`verify`: whether a store's file is sound, and where not, what is wrong and what is safe to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fscoord._log.inspect.verify import Finding, Generation, Report, verify_log
from fscoord._log.io import safe_files
from fscoord.arguments import Timeout, seconds

__all__ = ["Finding", "Generation", "Report", "verify"]


def _ignore(*_: object) -> None:
    """Progress is for people."""


def verify(path: Any, *, timeout: Timeout = 10.0, on_progress: Callable[[str, int, int], object] = _ignore) -> Report:
    """Read the whole log at `path`, all its generations, and say what is wrong with it. Nothing is changed.

    It may be in use: what looks unfinished is looked at again under a shared lock, which keeps writers out until the
    end of that file is read. As in ``fsck -n``, what is found is for people to act on.

    Args:
        path: the path of a file store.
        timeout: how long to wait for that lock, in seconds or as a `timedelta`; ``math.inf`` is no limit.
        on_progress: is called with the path of a file, how many bytes of it were read, and how many there are.

    Raises:
        StoreUnavailableError: it can't be opened or read.
        InsecurePathError: it is a link, or no regular file.
        StoreTimeoutError: the lock did not come, so that nothing can be said for certain; the error names the holder.
        UnsupportedFilesystemError: this file system has no locks of the log's kind.
    """
    return verify_log(safe_files.resolve(path), limit=seconds(timeout), tell=on_progress)
