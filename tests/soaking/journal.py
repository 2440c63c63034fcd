"""The records of the soak's processes outside the store, and the sections that only one process may be in."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from pathlib import Path

NUMBER = struct.Struct("<qq")


class Journal:
    """A file of lines ``MARK TIME WORD...``: B begun, A acknowledged, R read back, E ended without an effect.

    Each line is one write to the end of the file, so a process that is killed leaves whole lines, and forked children
    write beside their parents.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, mark: str, *words: object) -> None:
        """Add a line."""
        os.write(self._fd, " ".join((mark, f"{time.monotonic():.6f}", *map(str, words))).encode() + b"\n")


class Sections:
    """Bytes of a file of which a process may lock each, which proves that no other process is in the same section.

    The locks are those of fcntl(2): the kernel frees them when the process ends, and a forked child does not have its
    parent's. The file must be opened before any store: the kernel closes the descriptors of a killed process in their
    order, so these locks are free before another process can have what the store's locks protect.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._inside: set[int] = set()
        self._mutex = threading.Lock()

    def renew(self) -> None:
        """In a forked child: be in no section."""
        self._inside = set()
        self._mutex = threading.Lock()

    def enter(self, section: int, *, shared: bool = False) -> bool:
        """Enter, and return whether no excluded process is inside."""
        with self._mutex:
            if section in self._inside:
                return False
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            try:
                fcntl.lockf(self._fd, kind | fcntl.LOCK_NB, 1, section)
            except (BlockingIOError, PermissionError):
                return False
            self._inside.add(section)
            return True

    def leave(self, section: int) -> None:
        """Leave a section that was entered."""
        with self._mutex:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, section)
            self._inside.discard(section)

    def numbers(self, row: int) -> tuple[int, int]:
        """Return the two numbers of a row; they are written under a lock of the store alone."""
        return NUMBER.unpack(os.pread(self._fd, NUMBER.size, row * NUMBER.size) or bytes(NUMBER.size))

    def set_numbers(self, row: int, first: int, second: int) -> None:
        """Write the two numbers of a row, in one write."""
        os.pwrite(self._fd, NUMBER.pack(first, second), row * NUMBER.size)
