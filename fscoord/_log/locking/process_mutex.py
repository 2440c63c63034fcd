"""What the handles of this process on one log share: the mutex, and whether its owner is inside an operation."""

from __future__ import annotations

import weakref

from fscoord._runtime import system

__all__ = ["LogKey", "ProcessMutex", "process_mutex_for"]


class ProcessMutex:
    """What all handles of this process on one log share: the mutex, and whether its owner is inside an operation.

    The mutex is re-entrant so that a signal handler that calls in gets an error instead of a deadlock.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Begin anew: in a forked child the thread that held the mutex does not exist."""
        self.mutex = system.fake_fs_mutex if system.is_fake_fs() else system.threading.RLock()
        self.busy = False


_shared: weakref.WeakValueDictionary[tuple[bytes, int, int], ProcessMutex] = weakref.WeakValueDictionary()
_guard = [system.threading.RLock()]


LogKey = tuple[bytes, int, int]
"""What tells logs apart: the id of a log, and device and inode number of its first file. A copy has the same id."""


def process_mutex_for(key: LogKey) -> ProcessMutex:
    """Return what all handles of this process on the log `key` share."""
    with _guard[0]:
        return _shared.setdefault(key, ProcessMutex())


def _after_fork_in_child() -> None:
    _guard[0] = system.threading.RLock()
    for shared in list(_shared.values()):
        shared.renew()


system.after_fork_in_child("mutexes", _after_fork_in_child)
