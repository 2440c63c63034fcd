"""`ProcessMutex`: the mutex of one log, which all threads of this process share, also if they use different handles."""

from __future__ import annotations

from fscoord._runtime import system


class ProcessMutex:
    """The mutex of one log in this process.

    Attributes:
        mutex: the re-entrant lock itself. If a signal handler calls the store in the middle of an operation of its own
            thread, a plain lock would deadlock. With a re-entrant lock, the handler finds ``is_inside`` set and gets an
            error.
        is_inside: whether the thread that holds ``mutex`` is inside an operation. Only this thread reads or writes
            ``is_inside``.
        leader: the id of the thread that leads combined writes of this log; 0 if there is none. A signal handler in
            that thread must not wait for the leader. Every other thread only compares ``leader`` with its own id.
    """

    def __init__(self, key: LogKey) -> None:
        self.key = key
        self.renew()

    def renew(self) -> None:
        """Create a new mutex. A forked child needs one, because the thread that held the old mutex does not exist."""
        self.mutex = system.fake_fs_mutex if system.is_fake_fs() else system.recursive_mutex()
        self.is_inside = False
        self.leader = 0


_mutexes: system.WeakObjects[ProcessMutex] = system.WeakObjects()
_guard = [system.recursive_mutex()]
"""Protects `_mutexes`: two threads that open one log at once must get the same mutex."""


LogKey = tuple[bytes, int, int]
"""Identifies a log on this host: (id, device of generation 0, its inode number). A copy of the log has the
same id, but another device or inode number."""


def process_mutex_for(key: LogKey) -> ProcessMutex:
    """Return the mutex that all handles of this process on the log `key` share."""
    with _guard[0]:
        for shared in _mutexes:
            if shared.key == key:
                return shared
        made = ProcessMutex(key)
        _mutexes.add(made)
        return made


def _after_fork_in_child() -> None:
    _guard[0] = system.recursive_mutex()
    for shared in _mutexes:
        shared.renew()


system.after_fork_in_child("mutexes", _after_fork_in_child)
