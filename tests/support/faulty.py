"""An `os`, or all calls of `_runtime.system`, that fails on demand, put under the whole package.

`fscoord.testing.FaultyFiles` is for those who use stores: it has the faults of disks and mounts that their programs may
meet. This one counts every call, whatever it is, fails the n-th, and lets a test do anything before one; closing and
unlocking fail here, too, after the fact. Neither could be made of the other without losing what it is for.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from support.internals import system

COUNTED = (
    "open", "read", "write", "fstat", "stat", "ftruncate", "fdatasync", "fsync", "link", "unlink", "fchmod",
    "listdir", "pread", "preadv", "pwrite", "utime",
)  # fmt: skip
"""What fscoord does to files, but for locks, which are not `os`, and close(2) and lseek(2), which no disk lets fail."""

LOCKS = ("fcntl", "flock")
EVERY = (
    *COUNTED,
    "close",
    "lseek",
    "mkdir",
    "mkfifo",
    "rmdir",
    "rename",
    "truncate",
    "symlink",
    "readlink",
    "posix_fadvise",
    "scandir",
    "fchown",
    "getxattr",
    "setxattr",
    "removexattr",
    *LOCKS,
)
"""Every call that may reach a file system."""


class FaultyOs(ModuleType):
    """`os`, but for the calls that it is told to do otherwise.

    Attributes:
        calls: the name and first argument of every counted call so far.
    """

    def __init__(self, counted: tuple[str, ...] = COUNTED) -> None:
        super().__init__("os")
        self.counted = counted
        self.calls: list[tuple[str, Any]] = []
        self._instead: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any] | None = None
        for name in counted:
            if name not in LOCKS:
                setattr(self, name, self._counted(name, getattr(os, name)))
        self.fcntl = ModuleType("fcntl")
        self.fcntl.__getattr__ = lambda name: getattr(fcntl, name)  # type: ignore[method-assign]
        for name in set(LOCKS).intersection(counted):
            setattr(self.fcntl, name, self._counted(name, getattr(fcntl, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments[0] if arguments else None))
            if self._instead is not None:
                self._instead(name, real, arguments)
            return real(*arguments, **named)

        return call

    @contextmanager
    def instead(self, does: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
        """Before each counted call, call ``does(name, real, arguments)``; what that raises, the call raises."""
        self._instead = does
        try:
            yield
        finally:
            self._instead = None

    @contextmanager
    def fail(self, number: int, error: int, *, names: tuple[str, ...] = EVERY, for_good: bool = False) -> Iterator[Any]:
        """Let the call of one of `names` with this number, counted from 0, fail, and all later ones if `for_good`.

        To close a descriptor fails after the fact, as close(2) says; a lock that is given back, likewise.

        Yields a list that is empty as long as nothing has failed.
        """
        left = [number]
        failed: list[str] = []

        def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            if name in names:
                left[0] -= 1
                if left[0] == -1 or (for_good and left[0] < 0):
                    failed.append(name)
                    if name == "close" or is_unlock(name, arguments):
                        real(*arguments)
                    raise OSError(error, os.strerror(error))

        with self.instead(does):
            yield failed


def is_unlock(name: str, arguments: tuple[Any, ...]) -> bool:
    """Return whether a call with these arguments gives a lock back."""
    if name == "fcntl":
        return arguments[1] == fcntl.F_OFD_SETLK and struct.unpack_from("h", arguments[2])[0] == fcntl.F_UNLCK
    return name == "flock" and arguments[1] == fcntl.LOCK_UN


@contextmanager
def faulty_os() -> Iterator[FaultyOs]:
    """Put a `FaultyOs` under the package. What is open then, stays open: descriptors are the real ones."""
    faulty, real = FaultyOs(), system.os
    system.os = faulty  # type: ignore[assignment]
    try:
        yield faulty
    finally:
        system.os = real


@contextmanager
def faulty_system() -> Iterator[FaultyOs]:
    """Put under the package what counts, and may fail, all that reaches a file system, its locks too."""
    faulty = FaultyOs(EVERY)
    reals = system.os, system.fcntl
    system.os, system.fcntl = faulty, faulty.fcntl  # type: ignore[assignment]
    try:
        yield faulty
    finally:
        system.os, system.fcntl = reals
