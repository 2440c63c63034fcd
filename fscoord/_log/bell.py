"""`Bell`: a side-car of 4 KiB through which a waiter says what it waits for, and a writer wakes only those concerned.

Each byte stands for a bucket of keys. A waiter marks its keys' bytes, looks at the log once more, and sleeps on inotify
of the bell; a writer, after its append, looks at its key's byte and, if that is marked, clears it and rings. So a write
that nobody waits for wakes nobody: if all waited on the log itself, a barrier of N would cost N^2 wake-ups.

A mark is written with pwrite(2), which raises IN_MODIFY; the ring is a utimensat(2), which raises IN_ATTRIB. Waiters
watch for IN_ATTRIB alone, so marks wake nobody. Marks are read and written by positional I/O (the bell is never used
under pyfakefs) and not through mmap(2), which kills the process when the disk is full.

A bell is only ever a hint: a lost mark costs one slow poll.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Final
from zlib import crc32

from fscoord import _system as system
from fscoord._log import path as paths

__all__ = ["Bell", "bucket"]

SIZE: Final = 4096
MARKED: Final = b"\x01"
CLEAR: Final = b"\x00"


def bucket(key: bytes) -> int:
    """Return the number of the byte that stands for `key`."""
    return crc32(key) & (SIZE - 1)


class Bell:
    """The bell at `path`, open; it is created, whole, if it is not there.

    Raises:
        OSError: it can't be opened or created.
        InsecurePathError: what is there is not a file of ours.
    """

    def __init__(self, path: str, mode: int) -> None:
        self.path = path
        self.is_new = False
        try:
            fd = paths.open_descriptor(path, system.os.O_RDWR)
        except FileNotFoundError:
            paths.create(path, bytes(SIZE), mode, durable=False)
            fd = paths.open_descriptor(path, system.os.O_RDWR)
            self.is_new = True
        try:
            paths.check(path, fd, mode, read_only=False)
        except BaseException:
            system.close_quietly(fd)
            raise
        self.fd = fd
        self._finalizer = weakref.finalize(self, system.close_quietly, fd)
        self._finalizer.atexit = False
        _bells.add(self)

    def close(self) -> None:
        """Give the descriptor back."""
        self.fd = -1
        self._finalizer()

    def mark(self, buckets: Iterable[int]) -> None:
        """Ask to be woken when one of `buckets` is written to."""
        for number in buckets:
            system.os.pwrite(self.fd, MARKED, number)

    def is_cleared(self, buckets: Iterable[int]) -> bool:
        """Return whether somebody has written to one of `buckets` since it was marked."""
        return any(system.os.pread(self.fd, 1, number) != MARKED for number in buckets)

    def ring(self, number: int) -> None:
        """Wake those who wait for bucket `number`, if anybody does."""
        if system.os.pread(self.fd, 1, number) == MARKED:
            system.os.pwrite(self.fd, CLEAR, number)
            system.os.utime(self.fd)

    @property
    def is_lost(self) -> bool:
        """Whether the file has no name any more, or is not open, so that a ring won't be heard."""
        return self.fd < 0 or system.os.fstat(self.fd).st_nlink == 0


_bells: weakref.WeakSet[Bell] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for bell in list(_bells):
        bell.close()


system.after_fork_in_child(_after_fork_in_child)
