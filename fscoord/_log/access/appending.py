"""`FileAppender`: write bytes at the end of the log, and sync them if the log is durable."""

from __future__ import annotations

from typing import Final

from fscoord._log.handle import HandleState
from fscoord._log.io import safe_files
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreUnavailableError

__all__ = ["FileAppender"]

_NOT_APPLIED: Final = frozenset(
    getattr(system.errno, name, -1) for name in ("ENOSPC", "EDQUOT", "EROFS", "EFBIG", "EBADF")
)


class FileAppender:
    """The writes of one handle. The caller holds the log's lock, and the descriptor is open with O_APPEND."""

    def __init__(self, handle: HandleState) -> None:
        self._handle = handle
        self._is_directory_synced = False

    def write(self, data: bytes) -> None:
        """Write `data` at the end of the log, and sync it if the log is durable.

        Raises:
            StoreUnavailableError: ``maybe_applied`` says whether all of it may be there.
        """
        handle = self._handle
        fd = handle.lock.fd
        try:
            written = system.os.write(fd, data)
            if written != len(data):
                safe_files.write_all(fd, data[written:])
        except OSError as error:
            raise_if_foreign(error)
            applied = error.errno not in _NOT_APPLIED
            raise safe_files.unavailable(error, handle.path, "appending to the log", maybe_applied=applied) from error
        if handle.root.header.durable:
            self._sync(fd)

    def _sync(self, fd: int) -> None:
        """Make what was written survive a power loss. The kernel may drop pages that it failed to write: no retry."""
        handle = self._handle
        try:
            system.os.fdatasync(fd)
            if not self._is_directory_synced:
                safe_files.sync_directory(handle.path, handle.owned_fds)
                self._is_directory_synced = True
        except OSError as error:
            raise_if_foreign(error)
            handle.finish(StoreUnavailableError, "could not be synced, so nothing is certain; open the store again")
            raise safe_files.unavailable(error, handle.path, "syncing the log", maybe_applied=True) from error
