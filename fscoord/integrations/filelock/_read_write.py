"""`FsReadWriteLock`: filelock's `ReadWriteLock`, with a fair lock in a store before it."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, Literal

import filelock

from fscoord._runtime import system
from fscoord.errors import FscoordError
from fscoord.integrations.filelock._store import forgetting, limit_of, place_of
from fscoord.recipes.lock import PlainReadWriteLock, PlainSide

_Base: Any = filelock.ReadWriteLock  # None in a Python without sqlite3
if _Base is None:
    raise ImportError("FsReadWriteLock needs the module sqlite3, which this Python lacks: use another Python")


class FsReadWriteLock(_Base):
    """A `filelock.ReadWriteLock` in which no side starves, and that is free at once after the death of its holder.

    The arguments, methods and errors are those of `filelock.ReadWriteLock`: an acquisition of the same side by the same
    thread is nested, and a thread that holds one side can't acquire the other. An acquisition also raises the errors of
    a `fscoord.FileStore`. The store is beside the lock file, with ``.fscoord`` at the end of its name.
    """

    def __init__(
        self,
        lock_file: str | system.os.PathLike[str],
        timeout: float = -1,
        *,
        blocking: bool = True,
        is_singleton: bool = True,
    ) -> None:
        self._guard = system.mutex()  # of the two attributes below
        self._levels = 0
        self._epoch = system.process_epoch()
        # The sides that this object holds in the store: one, or a reader for each thread.
        self._sides: list[PlainSide] = []
        super().__init__(lock_file, timeout, blocking=blocking, is_singleton=is_singleton)

    def acquire_read(self, timeout: float | None = None, *, blocking: bool | None = None) -> Any:
        return self._acquire_in_order("read", timeout, blocking)

    def acquire_write(self, timeout: float | None = None, *, blocking: bool | None = None) -> Any:
        return self._acquire_in_order("write", timeout, blocking)

    def _acquire_in_order(self, mode: Literal["read", "write"], timeout: float | None, blocking: bool | None) -> Any:
        timeout = self.timeout if timeout is None else timeout
        blocking = self.blocking if blocking is None else blocking
        limit, begun = limit_of(timeout, blocking=blocking, refuses_negative=True), system.time.monotonic()
        acquire = super().acquire_read if mode == "read" else super().acquire_write
        if self._levels or self._epoch != system.process_epoch():  # filelock counts it, or refuses it
            proxy = acquire(timeout, blocking=blocking)
            with self._guard:
                self._levels += 1
            return proxy
        self._place = place_of(self.lock_file, None, None)  # keeps the store open from one acquisition to the next
        both = PlainReadWriteLock(*self._place)
        side = both.reader if mode == "read" else both.writer
        is_kept = False
        try:
            with forgetting(self.lock_file):
                is_granted = side.acquire(limit > 0, -1 if limit in (0.0, math.inf) else limit)
            if not is_granted:
                raise filelock.Timeout(self.lock_file) from side._line.timed_out(side._what, limit)
            left = timeout if limit in (0.0, math.inf) else max(0.0, begun + limit - system.time.monotonic())
            proxy = acquire(left, blocking=blocking)
            with self._guard:
                self._levels += 1
                self._sides.append(side)
                is_kept = True
            return proxy
        finally:
            if not is_kept and side._current() is not None:
                with suppress(FscoordError):  # another error is propagating
                    side.release()

    def release(self, *, force: bool = False) -> None:
        super().release(force=force)
        self._leave(force=force)

    def _leave(self, *, force: bool) -> None:
        if self._epoch != system.process_epoch():  # a forked child holds nothing
            return
        with self._guard:
            self._levels = 0 if force else self._levels - 1
            over = [] if self._levels else self._sides[:]
            del self._sides[: len(over)]
        for side in over:
            with forgetting(self.lock_file):
                side.release()

    def __del__(self) -> None:
        # filelock's lock is free when its object is dropped. After a failed constructor there may be no attributes.
        if getattr(self, "_epoch", None) == system.process_epoch():
            for side in getattr(self, "_sides", ()):
                with suppress(FscoordError):
                    side.release()
        with suppress(AttributeError):  # newer versions of filelock have no such method
            super().__del__()

    def close(self) -> None:
        super().close()
        self._leave(force=True)
