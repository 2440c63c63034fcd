"""Faults for an agent at one of its writes: it stops in the middle, with the lock, or the disk is full."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import signal
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from histories.worker import KeepingOs, bear_witness, make_calls
from linear.witness import read_generations
from support.internals import system
from support.plain_reader import read_newest

if TYPE_CHECKING:
    from mounts.agents import Worker

HOLDING, SEALING, FULL = "holding", "sealing", "full"
"""What is reported: one stops with the lock; it does so at the seal of a compaction; the disk is full."""


class Trap(types.ModuleType):
    """`os`, but at the first write something happens.

    With `seal` it is the first write after an fsync: that of the seal, when a new generation has been written.
    """

    def __init__(self, worker: Worker, seal: bool = False) -> None:
        super().__init__("os")
        self._worker, self._waits = worker, seal
        self.is_sprung = False

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)
        self._waits = False

    def write(self, fd: int, data: bytes) -> int:
        if self.is_sprung or self._waits:
            return os.write(fd, data)
        self.is_sprung = True
        return self.spring(fd, data)

    def spring(self, fd: int, data: bytes) -> int:
        """Do the write at which it happens."""
        raise AssertionError("a trap without anything in it")


class StoppingOs(Trap):
    """`os`, but the first write is reported after `share` of it, and stops the process."""

    def __init__(self, worker: Worker, share: float, seal: bool = False) -> None:
        super().__init__(worker, seal)
        self._share, self._word = share, SEALING if seal else HOLDING

    def spring(self, fd: int, data: bytes) -> int:
        part = int(len(data) * self._share)
        if part:
            os.write(fd, data[:part])
        self._worker.report(self._word)
        os.kill(os.getpid(), signal.SIGSTOP)
        if part < len(data):
            os.write(fd, data[part:])
        return len(data)


class FillingOs(Trap):
    """`os`, but at the first write the disk is full: no file gets longer than that one with `share` of the data."""

    def __init__(self, worker: Worker, share: float) -> None:
        super().__init__(worker)
        self._share = share

    def spring(self, fd: int, data: bytes) -> int:
        self._worker.report(FULL)
        limit_files(os.fstat(fd).st_size + int(len(data) * self._share))
        return os.write(fd, data)


def limit_files(size: int | None) -> None:
    """Let this process write no file beyond `size` bytes; None: as it was."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def hold(worker: Worker, share: float) -> None:
    """Set "held", and stop with the lock when `share` of the record is written."""
    worker.stores["store"].set("introduced", "1")
    system.os = StoppingOs(worker, share)
    worker.stores["store"].set("held", "1")


def hold_seal(worker: Worker, share: float) -> None:
    """Compact, and stop with the lock when `share` of the seal is written."""
    worker.stores["store"].set("introduced", "1")
    system.os = StoppingOs(worker, share, seal=True)
    worker.stores["store"].compact()


class Troubles:
    """A hook for `make_calls`: one trap of `plan` after the other, each some calls after the one before has sprung.

    A plan has, for each trap, which of the three words it is, the share of the write, and how many calls later the next
    may come.
    """

    def __init__(self, worker: Worker, plan: list[tuple[str, float, int]]) -> None:
        self._worker, self._plan = worker, plan
        self._trap = Trap(worker)
        self._trap.is_sprung, self._left = True, 1

    def __call__(self, _: int) -> None:
        if not self._trap.is_sprung:
            return
        self._left -= 1
        if self._left == 0:
            limit_files(None)
            self._set()

    def _set(self) -> None:
        if not self._plan:
            return
        word, share, self._left = self._plan.pop(0)
        if word == FULL:
            self._trap = FillingOs(self._worker, share)
        else:
            self._trap = StoppingOs(self._worker, share, seal=word == SEALING)
        system.os = self._trap
        if word == SEALING:
            self._worker.stores["store"].compact()


def history(
    worker: Worker,
    path: str,
    options: dict[str, Any],
    name: int,
    seed: int,
    keys: list[str],
    forks: int,
    plan: list[tuple[str, float, int]],
) -> None:
    """Make random calls until killed, reporting as `make_calls` tells; go on as two, or meet the traps of `plan`."""
    assert not (forks and plan), "who forks has children that nobody could wake"
    fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 4096)  # so that nobody runs far ahead of what was heard
    worker.open(path, **options)
    troubles = Troubles(worker, plan)
    make_calls(worker.stores["store"], worker.tell, name, seed, keys, forks=forks, before=troubles)


# Those who bear witness


def read_past_cache(path: str | Path, start: int = 0) -> bytes:
    """Return what the file at `path` holds from `start` on, and not what this host's cache may have of it: an end of
    zeros, say.
    """
    try:
        return _read(path, start, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    # A file system without such reads, and so without other hosts; or a Lustre that takes none within a block, whose
    # caches are coherent.
    return _read(path, start, 0)


def _read(path: str | Path, start: int, flags: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.lseek(fd, start, os.SEEK_SET)
        with mmap.mmap(-1, 1 << 20) as buffer:  # a local disk wants whole pages
            data, size = b"", len(buffer)
            while size == len(buffer):  # behind its end the file must not be read: that would be within a page
                size = os.readv(fd, [buffer])
                data += buffer[:size]
            return data
    finally:
        os.close(fd)


class SharedKeepingOs(KeepingOs):
    """`KeepingOs` on a shared mount: what it copies may have been written by another host."""

    def copy(self, path: str, copy: str) -> None:
        Path(copy).write_bytes(read_past_cache(path))


def testify(
    worker: Worker, path: str, kept: str, options: dict[str, Any], name: int, seed: int, count: int, keys: int
) -> None:
    """Bear witness by reports, and let the generations of the log be kept."""
    system.os = SharedKeepingOs(path, kept)
    worker.open(path, **options)
    bear_witness(worker.stores["store"], worker.report, name, seed, count, keys)


def read_records(path: str, kept: str) -> list[tuple[str, bytes, bytes]]:
    return read_generations(Path(path), Path(kept), read_past_cache)


def how_it_ends(path: str) -> str:
    return read_newest(Path(path), read_past_cache).ends
