"""The first lock of an acquisition: `Turn`, a lock in the store beside the lock file."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import filelock

from fscoord._runtime import system
from fscoord.errors import StoreGoneError
from fscoord.recipes import Lock
from fscoord.recipes._entry import Entry
from fscoord.recipes._line import caller_of
from fscoord.store import Store
from fscoord.stores.file import FileStore

SUFFIX: Final = ".fscoord"
"""The path of a store is the path of the lock file with this text at its end."""

_stores: weakref.WeakValueDictionary[str, FileStore] = weakref.WeakValueDictionary()
"""The open stores of this process, by their paths. The locks that use a store keep the store open."""


class Turn(Lock):
    """One acquisition of the first lock, the lock in the store.

    Args:
        store: the store.
        name: the lock's name in the store.
        limit: how long the acquisition may wait, in seconds; math.inf: without limit. As in filelock, a wait without
            limit raises an error if the same thread or task holds the lock by another object.
    """

    def __init__(self, store: Store, name: str, limit: float) -> None:
        super().__init__(store, name)
        self.limit = limit

    def _check_wait(self, entry: Entry) -> None:
        if self.limit < math.inf:
            return
        caller = caller_of(entry)
        others = [each for each in self._line.entries() if each.id != entry.id]
        if any(each.token and caller_of(each) is caller for each in others):
            raise RuntimeError(
                f"Deadlock: {self.name!r} is already held by another lock object of this thread or task; pass"
                " is_singleton=True for both objects, so that the second acquisition is a nested one"
            )

    def timeout_error(self, lock_file: str) -> filelock.Timeout:
        """Return filelock's error for a wait that was not granted. The cause of the error names the holders."""
        error = filelock.Timeout(lock_file)
        error.__cause__ = self._line.timed_out(self._what, self.limit)
        return error


def limit_of(timeout: float, *, blocking: bool, refuses_negative: bool = False) -> float:
    """Return how many seconds an acquisition may wait: 0 if it does not wait, math.inf without limit.

    Raises:
        ValueError: the acquisition waits, and `timeout` is NaN, or negative and not -1 with `refuses_negative`.
        TypeError: `blocking` is not a bool.
    """
    if not isinstance(blocking, bool):
        raise TypeError(f"blocking must be a bool, not {type(blocking).__name__}")
    if not blocking:
        return 0.0
    try:
        is_nan = math.isnan(timeout)
    except ValueError:  # a signaling NaN of `decimal`
        is_nan = True
    if is_nan:
        raise ValueError("timeout must be a number of seconds, not nan")
    if refuses_negative and timeout < 0 and timeout != -1:
        raise ValueError(f"timeout must be a non-negative number or -1, not {timeout!r}")
    return math.inf if timeout < 0 else timeout


def place_of(lock_file: str, store: Store | None, mode: int | None) -> tuple[Store, str]:
    """Return the store for the lock of `lock_file`, and the name of the lock there.

    If `store` is given, the lock is in `store`, and its name is the path of the lock file. Otherwise the lock is in the
    store beside the lock file, and its name is the file name. A missing lock file is created with `mode`, or as
    filelock creates it. The store has the permissions of the lock file, so every user who may lock the file may use the
    store.
    """
    path = system.os.path.realpath(lock_file)
    if store is not None:
        return store, path
    found = _stores.get(path)
    if found is None:
        system.os.makedirs(system.os.path.dirname(path), exist_ok=True)  # as filelock does
        granted = _create(path, mode) & 0o666
        # Another thread may open the same store meanwhile. Then each of the two locks keeps its own open.
        found = _stores[path] = FileStore(path + SUFFIX, mode=granted)
    return found, system.os.path.basename(path)


def _create(path: str, mode: int | None) -> int:
    """Create the lock file unless it exists, as filelock does, and return its permissions."""
    os = system.os
    try:
        fd = system.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode, system.loose)
    except FileExistsError:
        return os.stat(path).st_mode
    try:
        if mode is not None:
            os.fchmod(fd, mode)  # whatever the umask
        return os.fstat(fd).st_mode
    finally:
        system.close_quietly(fd)


@contextmanager
def forgetting(lock_file: str) -> Iterator[None]:
    """Forget the open store if the body raises `StoreGoneError`, because the store's file was deleted or replaced.

    The next acquisition then opens a new store. Every error of the body is raised unchanged.
    """
    try:
        yield
    except StoreGoneError:
        _stores.pop(system.os.path.realpath(lock_file), None)
        raise
