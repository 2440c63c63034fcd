"""A bare wake-up by inotify, the lower bound: one process touches a file, and another sleeps in poll(2)."""

from __future__ import annotations

import ctypes
import os
import select

_libc = ctypes.CDLL(None, use_errno=True)
IN_ATTRIB = 4
MANY = 1024


class Bell:
    """Two files. Each of two processes touches its own file and sleeps until the other file is touched."""

    def __init__(self, path: str, rank: int) -> None:
        own, other = (os.open(f"{path}.{number}", os.O_RDWR | os.O_CREAT, 0o600) for number in (rank, 1 - rank))
        os.close(other)
        self._own = own
        self._events = _new_inotify()
        if _libc.inotify_add_watch(self._events, f"{path}.{1 - rank}".encode(), IN_ATTRIB) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")
        self._poll = select.poll()
        self._poll.register(self._events, select.POLLIN)

    def set(self, key: str, value: str) -> None:  # noqa: ARG002 - called as a store is
        """Wake the other process."""
        os.utime(self._own)

    def get(self, key: str) -> None:  # noqa: ARG002 - called as a store is
        """Sleep until the other process has called `set`, once for each call."""
        self._poll.poll()
        os.read(self._events, 4096)


def _new_inotify() -> int:
    descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "inotify_init1")
    return int(descriptor)


def lacks(size: int) -> str:
    """Return why `size` processes can't each have an inotify instance now, or an empty text."""
    made: list[int] = []
    try:
        while len(made) < min(size, MANY):
            made.append(_new_inotify())
    except OSError:
        return f"each process needs an inotify instance, and this user can have {len(made)} more"
    finally:
        for descriptor in made:
            os.close(descriptor)
    return ""
