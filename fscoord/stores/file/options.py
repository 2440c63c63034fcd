"""The arguments of `~fscoord.FileStore` that say what its log must be like."""

from __future__ import annotations

from typing import Any

from fscoord._log.access.mount import COHERENCES
from fscoord._log.format.runs import parse_run_id
from fscoord._log.io.opening import COMPACT_BYTES, SPILL_BYTES, LogOptions
from fscoord._log.locking.log_lock import KINDS
from fscoord._runtime import system
from fscoord.arguments import one_of, positive
from fscoord.errors import UnsupportedFilesystemError

__all__ = ["COMPACT_BYTES", "SPILL_BYTES", "check_platform", "chosen_path", "wanted_log"]


def check_platform() -> None:
    """Make sure that there are locks at all.

    Raises:
        UnsupportedFilesystemError: there are none.
    """
    if system.fcntl is None:
        raise UnsupportedFilesystemError(
            f"FileStore needs the advisory locks of a POSIX system, which {system.platform()} does not have; use"
            " HashStore in one process"
        )


def chosen_path(path: Any, file_name: Any, *, read_only: bool) -> Any:
    """Return the one of `path` and `file_name` that was given, or None for a temporary file.

    Raises:
        TypeError: both were given.
        ValueError: there is to be something to read.
    """
    if path is not None and file_name is not None:
        raise TypeError("path and file_name are two names for one argument; pass one")
    if read_only and path is None and file_name is None:
        raise ValueError("a read-only store needs a path")
    return file_name if path is None else path


def wanted_log(
    *,
    lock: str,
    durable: bool,
    read_only: bool,
    mode: int,
    limit: float,
    coherence: str | None,
    compact_bytes: int | None,
    run_id: str | tuple[str, int] | None,
    spill_bytes: int | None,
) -> LogOptions:
    """Return what these arguments ask of a log. Under pyfakefs all values stay in memory.

    Raises:
        ValueError: one of them is none of those there are.
        TypeError: a number is none.
    """
    one_of("lock", lock, KINDS)
    if coherence is not None:
        one_of("coherence", coherence, COHERENCES)
    compact = 0 if compact_bytes in (None, 0) else positive("compact_bytes", compact_bytes)
    spill = 0 if spill_bytes in (None, 0) else positive("spill_bytes", spill_bytes)
    spill = 0 if system.is_faked() else spill
    return LogOptions(KINDS[lock], durable, read_only, mode, limit, coherence, compact, parse_run_id(run_id), spill)
