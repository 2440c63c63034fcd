"""Locks with the interface of the package filelock, for files on NFS, Lustre and other mounts that hosts share.

A program changes one import: ``from fscoord.integrations.filelock import FsFileLock as FileLock``. The classes are
subclasses of filelock's, so `isinstance`, `filelock.Timeout`, nested acquisitions and singletons are as before.

An acquisition takes two locks, one after the other:

- The *first lock* is a lock of `fscoord.recipes` in a store. The path of the store is the path of the lock file with
  ``.fscoord`` at its end. The store can't be in the lock file itself, because filelock empties that file. The first
  lock is granted in the order of the requests. The first lock is free as soon as its holder is proved dead, and has a
  fencing token.
- The *second lock* is filelock's own lock on the lock file. The second lock also excludes programs that use filelock
  alone, if filelock's lock works on the mount.

This module needs the extra ``fscoord[filelock]``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from fscoord.errors import needed_extra

with needed_extra("fscoord.integrations.filelock", "filelock", "filelock"):
    from fscoord.integrations.filelock._file_lock import FsFileLock

if TYPE_CHECKING:
    from fscoord.integrations.filelock._async_file_lock import AsyncFsFileLock
    from fscoord.integrations.filelock._async_read_write import AsyncFsReadWriteLock
    from fscoord.integrations.filelock._read_write import FsReadWriteLock

__all__ = ["AsyncFsFileLock", "AsyncFsReadWriteLock", "FsFileLock", "FsReadWriteLock"]


_MODULES = {
    "AsyncFsFileLock": "_async_file_lock",
    "AsyncFsReadWriteLock": "_async_read_write",
    "FsReadWriteLock": "_read_write",
}


def __getattr__(name: str) -> object:
    """Import a class that needs asyncio or sqlite3 at the first use of that class, as filelock does."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
