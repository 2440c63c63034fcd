"""An `os` as on a mount that hosts share: direct reads, caches that lie, and a server that forgets descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.faulty import FaultyOs
from support.internals import system


class SharedOs(FaultyOs):
    """`FaultyOs`, and every file system takes O_DIRECT, as NFS does.

    Attributes:
        direct: the descriptors that were opened for direct reads.
        opened: path and flags of every open(2).
        refuses_direct: ``"open"`` or ``"read"``: the call that fails with EINVAL for direct reads; or ``"unaligned"``:
            only direct reads that do not begin at a block fail.
        zeros: so many reads that are not direct give zeros for the data.
        hidden: so many bytes at the end of a file fstat(2) does not know of yet,
        hides: so many times.
    """

    def __init__(self) -> None:
        super().__init__()
        self.direct: set[int] = set()
        self.opened: list[tuple[str, int]] = []
        self.refuses_direct = ""
        self.zeros = self.hidden = self.hides = 0
        counted_open, counted_read, counted_fstat = self.open, self.read, self.fstat
        counted_pread = self.pread

        def open_(path: str, flags: int, *mode: int) -> int:
            self.opened.append((path, flags))
            if flags & os.O_DIRECT and flags & os.O_APPEND:
                raise OSError(system.errno.EINVAL, "NFS takes no two of these")
            if flags & os.O_DIRECT and self.refuses_direct == "open":
                raise OSError(system.errno.EINVAL, "no direct reads")
            fd: int = counted_open(path, flags & ~os.O_DIRECT, *mode)
            (self.direct.add if flags & os.O_DIRECT else self.direct.discard)(fd)
            return fd

        def read(fd: int, size: int) -> bytes:
            is_refused = self.refuses_direct == "read"
            if self.refuses_direct == "unaligned":
                is_refused = os.lseek(fd, 0, os.SEEK_CUR) % 512 != 0
            if fd in self.direct and is_refused:
                raise OSError(system.errno.EINVAL, "no direct reads")
            data: bytes = counted_read(fd, size)
            if data and self.zeros and fd not in self.direct:
                self.zeros -= 1
                return bytes(len(data))
            return data

        def pread(fd: int, size: int, offset: int) -> bytes:
            data: bytes = counted_pread(fd, size, offset)
            if data and self.zeros and fd not in self.direct:
                self.zeros -= 1
                return bytes(len(data))
            return data

        def fstat(fd: int) -> Any:
            found = counted_fstat(fd)
            if self.hides and found.st_size > self.hidden:
                self.hides -= 1
                fields = list(found)
                fields[6] -= self.hidden
                return os.stat_result(fields)
            return found

        self.open, self.read, self.pread, self.fstat = open_, read, pread, fstat


@contextmanager
def shared_os() -> Iterator[SharedOs]:
    """Put a `SharedOs` under the package."""
    shared, real = SharedOs(), system.os
    system.os = shared  # type: ignore[assignment]
    try:
        yield shared
    finally:
        system.os = real
