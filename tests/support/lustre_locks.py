"""Lustre's lock space over the locks of this kernel: flock(2) and ranges exclude each other, and EDEADLK is reported.

Measured on Lustre 2.17.57: a flock(2) lock excludes a lock on any byte, and the other way round, if they belong to two
open files, also within one host. A wait for an open-file-description lock may end with EDEADLK, which Linux never
reports for such locks on a local file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from portalocker import exceptions
from support.internals import system

KINDS = {fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}


class LustreLocks(ModuleType):
    """`fcntl` whose flock(2) is a lock on all bytes.

    Attributes:
        deadlocks: how many of the next waits fail with EDEADLK.
        waits: how many waits there were.
    """

    def __init__(self) -> None:
        super().__init__("fcntl")
        self.deadlocks = self.waits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def fcntl(self, fd: int, command: int, argument: Any = 0) -> Any:
        if command == fcntl.F_OFD_SETLKW:
            self.waits += 1
            if self.deadlocks:
                self.deadlocks -= 1
                raise OSError(errno.EDEADLK, os.strerror(errno.EDEADLK))
        return fcntl.fcntl(fd, command, argument)

    def flock(self, fd: int, how: int) -> None:
        command = fcntl.F_OFD_SETLK if how & fcntl.LOCK_NB else fcntl.F_OFD_SETLKW
        self.fcntl(fd, command, struct.pack("hhqqi4x", KINDS[how & ~fcntl.LOCK_NB], os.SEEK_SET, 0, 0, 0))

    def lock(self, fd: int, flags: int) -> None:
        """Lock as portalocker's `FlockLocker` does."""
        try:
            self.flock(fd, flags)
        except BlockingIOError as error:
            raise exceptions.AlreadyLocked(error) from error
        except OSError as error:
            raise exceptions.LockException(error) from error


@contextmanager
def lustre_locks() -> Iterator[LustreLocks]:
    """Put `LustreLocks` under the package."""
    locks = LustreLocks()
    with (
        mock.patch.object(system, "fcntl", locks),
        mock.patch.object(system, "load_flock_locker", return_value=(locks, exceptions)),
    ):
        yield locks
