"""`Doorbell`: a side-car of 4 KiB through which a waiter says what it waits for, and a writer wakes only those concerned.

Each byte stands for a bucket of keys, and counts: odd, it is marked. A waiter marks its key's byte, looks at the log
once more, and sleeps on inotify of the bell; a writer, after its append, looks at its key's byte and, if that is odd,
counts on and rings; a waiter that is woken looks at the log if its byte is not what it was. (To set and clear a mark
won't do: the first of two waiters that wakes marks again before the other looks.) So a write that nobody waits
for wakes nobody: if all waited on the log itself, a barrier of N would cost N^2 wake-ups.

A mark is written with pwrite(2), which raises IN_MODIFY; the ring is a utimensat(2), which raises IN_ATTRIB. Waiters
watch for IN_ATTRIB alone, so marks wake nobody. Marks are read and written by positional I/O (the bell is never used
under pyfakefs) and not through mmap(2), which kills the process when the disk is full.

Who waits for as long as a session lives marks a byte for its end, too, and whoever closes a session rings that one.

A bell is only ever a hint: a lost mark costs one slow poll.
"""

from __future__ import annotations

import weakref
from typing import Final
from zlib import crc32

from fscoord._log.io import safe_files
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

__all__ = ["Doorbell", "bucket", "session_end_bucket"]

SIZE: Final = 4096


def bucket(key: bytes) -> int:
    """Return the number of the byte that stands for `key`."""
    return crc32(key) & (SIZE - 1)


def session_end_bucket(session: int) -> int:
    """Return the number of the byte that stands for the end of `session`."""
    return bucket(b"\0end %d" % session)


class Doorbell:
    """The bell at `path`, open; it is created, whole, if it is not there, unless told not to `create` it.

    A new one gets the group and the access control list of the file `like`, the log's.

    Raises:
        OSError: it can't be opened or created.
        InsecurePathError: what is there is not a file of ours.
    """

    def __init__(self, path: str, mode: int, *, create: bool = True, like: str | None = None) -> None:
        self.path = path
        self.is_new = False
        descriptors = system.Descriptors()
        self._finalizer = weakref.finalize(self, system.close_all, system.os.close, descriptors)
        self._finalizer.atexit = False
        self.fd = -1
        _bells.add(self)
        try:
            fd = safe_files.open_descriptor(path, system.os.O_RDWR, owned_fds=descriptors)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            if not create:
                raise
            safe_files.create(path, lambda _: bytes(SIZE), mode, durable=False, like=like)
            fd = safe_files.open_descriptor(path, system.os.O_RDWR, owned_fds=descriptors)
            self.is_new = True
        try:
            safe_files.check(path, fd, mode, read_only=False)
        except BaseException:
            self._finalizer()
            raise
        self.fd = fd

    def close(self) -> None:
        """Give the descriptor back."""
        self.fd = -1
        self._finalizer()

    def mark(self, number: int) -> bytes:
        """Ask to be woken when bucket `number` is written to; return what `is_rung` wants to know."""
        seen = int.from_bytes(system.os.pread(self.fd, 1, number), "little")  # of a truncated bell: 0
        mark = bytes([seen | 1])
        if not seen & 1:
            system.os.pwrite(self.fd, mark, number)
        return mark

    def is_rung(self, number: int, mark: bytes) -> bool:
        """Return whether somebody has written to bucket `number` since `mark` returned `mark`."""
        return system.os.pread(self.fd, 1, number) != mark

    def ring(self, number: int) -> None:
        """Wake those who wait for bucket `number`, if anybody does."""
        seen = system.os.pread(self.fd, 1, number)  # and no call more: each write comes here
        if seen and seen[0] & 1:
            system.os.pwrite(self.fd, bytes([(seen[0] + 1) & 0xFF]), number)
            system.os.utime(self.fd)

    @property
    def is_lost(self) -> bool:
        """Whether the file has no name any more, or is not open, so that a ring won't be heard."""
        try:
            return self.fd < 0 or system.os.fstat(self.fd).st_nlink == 0
        except OSError as error:
            raise_if_foreign(error)
            return True


_bells: weakref.WeakSet[Doorbell] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for bell in list(_bells):
        bell.fd = -1


system.after_fork_in_child("bells", _after_fork_in_child)
