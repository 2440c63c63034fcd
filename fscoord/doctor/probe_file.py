"""`ProbeFile`: a file to which two agents append numbered records under a lock, to test the lock.

The file is a small model of a log. An agent reads the last record under the lock, and appends the next number. So two
records with the same number prove that two agents held the lock at once, or that one agent read old data.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from fscoord._log.files import safe_files
from fscoord._log.locking.log_lock import KINDS, LogLock
from fscoord._runtime import system
from fscoord.doctor.mailbox import OWN_MODE

CHUNK: Final = 1 << 16
NAP_S: Final = 0.0005
TAKE_S: Final = 60.0
"""How many seconds an agent tries to get a lock. No caller waits that long. The limit ends an agent whose caller was
killed."""
O_DIRECT: Final = getattr(system.os, "O_DIRECT", 0)

RECORD_SIZE: Final = 64


class ProbeRecord(NamedTuple):
    """A record whose checksum matches. `number` begins at 1; `writer` names the agent."""

    number: int
    writer: str


class Summary(NamedTuple):
    """Counts the records of a whole file.

    Attributes:
        sound: how many records have a matching checksum.
        garbled: how many records contain bytes that no agent wrote.
        twice: how many sound records repeat the number of another record.
        turns: how often a record follows a record of another writer.
        by: how many sound records each writer has.
    """

    sound: int
    garbled: int
    twice: int
    turns: int
    by: dict[str, int]


def encode(number: int, writer: str) -> bytes:
    """Return the record `number` of `writer`, a word of at most 20 ASCII characters."""
    text = f"{number:012d} {writer:<20}"
    return f"{text} {zlib.crc32(text.encode()):08x}".ljust(RECORD_SIZE - 1).encode() + b"\n"


def decode(data: bytes) -> list[ProbeRecord | None]:
    """Return the complete records in `data`, with None for each damaged record. Ignore a partial record at the end."""
    return [_decode(data[start : start + RECORD_SIZE]) for start in range(0, len(data) - RECORD_SIZE + 1, RECORD_SIZE)]


def _decode(line: bytes) -> ProbeRecord | None:
    try:
        number, writer, _ = line.decode("ascii").split()
        return ProbeRecord(int(number), writer) if encode(int(number), writer) == line else None
    except ValueError:
        return None


def summarize(data: bytes) -> Summary:
    """Count the records of `data`, the whole file. A partial record at the end counts as garbled."""
    lines = decode(data)
    sound = [line for line in lines if line is not None]
    writers = [line.writer for line in sound]
    turns = sum(one != other for one, other in itertools.pairwise(writers))
    return Summary(
        sound=len(sound),
        garbled=len(lines) - len(sound) + (len(data) % RECORD_SIZE > 0),
        twice=len(sound) - len({line.number for line in sound}),
        turns=turns,
        by={writer: writers.count(writer) for writer in sorted(set(writers))},
    )


class ProbeFile:
    """A file with two descriptors, as for a store's log: one appends and locks, and the other reads forward."""

    def __init__(self, path: str, *, is_nfs: bool = False, mode: int = OWN_MODE) -> None:
        self.path = path
        self._is_nfs = is_nfs
        self.writer = safe_files.open_descriptor(path, system.os.O_RDWR | system.os.O_APPEND | system.os.O_CREAT, mode)
        self.reader = safe_files.open_descriptor(path, system.os.O_RDONLY)
        self._mutex = system.recursive_mutex()
        self._locks: dict[tuple[str, bool], LogLock] = {}
        self._direct = -1
        self._pending: dict[int, bytes] = {}

    def lock(self, kind: str, *, shared: bool = False) -> LogLock:
        """Return the lock of this kind on the file, exclusive or `shared`."""
        if (kind, shared) not in self._locks:
            fd = self.reader if shared else self.writer
            self._locks[kind, shared] = LogLock(self.path, fd, KINDS[kind], self._mutex, set(), shared=shared)
        return self._locks[kind, shared]

    def take(self, kind: str, *, shared: bool = False) -> bool:
        """Try to acquire the lock, without waiting. Return whether the lock was acquired."""
        lock = self.lock(kind, shared=shared)
        try:
            lock.try_lock()
        except OSError as error:
            if not lock.is_taken(error):
                raise
            return False
        return True

    def await_lock(self, kind: str, *, shared: bool = False) -> None:
        """Acquire the lock. Poll while another process holds it.

        Raises:
            TimeoutError: another process held the lock for `TAKE_S` seconds.
        """
        deadline = system.time.monotonic() + TAKE_S
        while not self.take(kind, shared=shared):
            if system.time.monotonic() >= deadline:
                raise TimeoutError(system.errno.ETIMEDOUT, f"another process held its lock for {TAKE_S:g} s", self.path)
            system.time.sleep(random.uniform(0.1, 1) * NAP_S)

    @contextmanager
    def locked(self, kind: str, *, shared: bool = False) -> Iterator[None]:
        """Hold the lock inside the ``with``; see `await_lock`."""
        self.await_lock(kind, shared=shared)
        try:
            yield
        finally:
            self.lock(kind, shared=shared).unlock()

    def append(self, kind: str, data: bytes) -> None:
        """Append `data` as a store does under a lock of this kind. Under a soft lock on NFS, bypass the cache."""
        if self.way(kind) != "direct":
            system.os.fstat(self.writer)  # as a store: the kernel of a ceph-fuse mount appends at the size it knows
            safe_files.write_all(self.writer, data)
            return
        fd = safe_files.open_descriptor(self.path, system.os.O_WRONLY | O_DIRECT)
        try:
            system.os.lseek(fd, 0, system.os.SEEK_END)
            safe_files.write_all(fd, data)
        finally:
            system.close_quietly(fd)

    def way(self, kind: str) -> str:
        """Return how a store reads under a lock of this kind.

        Returns ``"direct"`` for a soft lock on NFS, because the NFS client keeps its cache when a soft lock is taken.
        Returns ``"plain"`` otherwise.
        """
        return "direct" if kind == "soft" and self._is_nfs else "plain"

    def read(self, how: str, kind: str) -> list[ProbeRecord | None]:
        """Return the records since the previous read of this kind, None for a damaged record.

        Args:
            how: ``"plain"``, ``"locked"`` (under the shared lock) or ``"direct"`` (O_DIRECT, without a lock).
            kind: the kind of the shared lock.
        """
        if kind == "soft" and how != "direct":
            self._forget()
        if how == "locked":
            with self.locked(kind, shared=True):
                return self._forward(self.reader)
        if how == "direct":
            if self._direct < 0:
                self._direct = safe_files.open_descriptor(self.path, system.os.O_RDONLY | O_DIRECT)
            return self._forward(self._direct)
        return self._forward(self.reader)

    def _forget(self) -> None:
        """Reopen the file and drop its cached pages, as a store with a soft lock does."""
        fd = safe_files.open_descriptor(self.path, system.os.O_RDONLY)
        system.drop_cached_pages(fd)
        system.os.lseek(fd, system.os.lseek(self.reader, 0, system.os.SEEK_CUR), system.os.SEEK_SET)
        self._pending[fd] = self._pending.pop(self.reader, b"")
        system.close_quietly(self.reader)
        self.reader = fd

    def _forward(self, fd: int) -> list[ProbeRecord | None]:
        """Return the next records, up to the first damaged record. The next call reads that record again.

        A damaged record may be damaged only in the cache.
        """
        data = self._pending.get(fd, b"") + system.os.read(fd, CHUNK)
        found = decode(data)
        sound = next((index for index, line in enumerate(found) if line is None), len(found))
        if sound < len(found):
            rest = len(data) - sound * RECORD_SIZE
            system.os.lseek(fd, -rest, system.os.SEEK_CUR)
            self._pending[fd] = b""
            return found[: sound + 1]
        self._pending[fd] = data[len(found) * RECORD_SIZE :]
        return found

    def close(self) -> None:
        """Close every descriptor, which releases the kernel's locks."""
        for lock in self._locks.values():
            with suppress(OSError):  # closing the descriptor unlocks it as well
                lock.unlock()
            lock.close()
        system.close_quietly(self.writer, self.reader, self._direct)
