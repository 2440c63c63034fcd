"""A plugin of pytest, with which fasteners' own tests run on `fscoord.recipes.ReadWriteLock`.

The lock of threads is in a store of this process, and that of processes in a store at the path of the lock file.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fasteners
import fasteners.process_lock

from fscoord import FileStore, HashStore, Store
from fscoord.recipes import ReadWriteLock

memory = HashStore(timeout=30)


class ReaderWriterLock:
    """A `ReadWriteLock` with the methods of fasteners' class."""

    READER, WRITER = "r", "w"

    def __init__(self, *_: object, store: Store = memory, name: str = "") -> None:
        self._lock = ReadWriteLock(store, name or uuid.uuid4().hex)
        self.acquire_read_lock = self._lock.reader.acquire
        self.acquire_write_lock = self._lock.writer.acquire
        self.release_read_lock = self._lock.reader.release
        self.release_write_lock = self._lock.writer.release

    @property
    def owner(self) -> str | None:
        held = self._lock.held_side()
        return None if held is None else held[0]

    @property
    def has_pending_writers(self) -> bool:
        return any(each.mode == "w" and not each.token for each in self._lock.writer._line.entries())

    def is_reader(self) -> bool:
        return self._lock.own_side() is not None and self._lock.reader.is_acquired

    def is_writer(self, check_pending: bool = True) -> bool:
        return self._lock.own_side() == "writer" or (check_pending and bool(self._lock.writer._pending))

    @contextmanager
    def read_lock(self) -> Iterator[Any]:
        with self._lock.reader:
            yield self

    @contextmanager
    def write_lock(self) -> Iterator[Any]:
        with self._lock.writer:
            yield self


class InterProcessReaderWriterLock(ReaderWriterLock):
    """The same for processes. As in fasteners, a call without a timeout waits without limit."""

    def __init__(self, path: str | Path, *_: object) -> None:
        super().__init__(store=FileStore(path, timeout=30), name="lock")
        for name in ("acquire_read_lock", "acquire_write_lock"):
            setattr(self, name, without_none(getattr(self, name)))


def without_none(acquire: Callable[..., bool]) -> Callable[..., bool]:
    return lambda blocking=True, timeout=None: acquire(blocking, -1 if timeout is None else timeout)


fasteners.ReaderWriterLock = ReaderWriterLock
fasteners.process_lock.InterProcessReaderWriterLock = InterProcessReaderWriterLock
