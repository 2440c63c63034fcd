"""Open the files of a log again, and check that each is still the file that the handle has used so far."""

from __future__ import annotations

from typing import Final

from fscoord._log.handle import GenerationUnlinked, HandleState
from fscoord._log.io import safe_files
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

__all__ = ["FILE_GONE", "open_root", "reopen"]

FILE_GONE: Final = frozenset((system.errno.ENOENT, getattr(system.errno, "ESTALE", -1)))


def reopen(handle: HandleState, flags: int) -> int:
    """Return another descriptor of the generation in use, owned by the handle.

    Raises:
        GenerationUnlinked: the file has no name any more, or only one that another host has removed (NFS).
        StoreGoneError: another file has the name, or the log was deleted.
    """
    fd = -1
    try:
        fd = safe_files.open_descriptor(handle.file, flags, owned_fds=handle.owned_fds)
        found = system.os.fstat(fd)
    except FileNotFoundError as error:
        raise_if_foreign(error)
        raise handle.unlinked() from None
    except OSError as error:
        raise_if_foreign(error)
        handle.close_fd(fd)
        # The NFS client caches the name of a file that another host has removed. If this host has the file open,
        # open(2) may succeed by that name; then fstat(2) is the first call that the server refuses.
        if handle.header.generation and error.errno in FILE_GONE:
            raise GenerationUnlinked from None
        raise
    if (found.st_dev, found.st_ino) != handle.file_identity:
        handle.close_fd(fd)
        raise handle.gone("was replaced by another file")
    return fd


def open_root(handle: HandleState) -> int:
    """Return another descriptor of generation 0, owned by the handle.

    Raises:
        StoreGoneError: generation 0 does not have the log's name any more.
    """
    try:
        fd = safe_files.open_descriptor(handle.path, handle.read_flags, owned_fds=handle.owned_fds)
    except FileNotFoundError as error:
        raise_if_foreign(error)
        raise handle.gone("was deleted") from None
    found = system.os.fstat(fd)
    if (found.st_dev, found.st_ino) != handle.root.identity:
        handle.close_fd(fd)
        raise handle.gone("was replaced by another file")
    return fd
