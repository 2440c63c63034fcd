"""`AsyncFsReadWriteLock`: filelock's `AsyncReadWriteLock`, with a fair lock in a store before it."""

from __future__ import annotations

import asyncio
import math
import weakref
from contextlib import suppress
from typing import Any, Final, Literal

import filelock

from fscoord._runtime import system
from fscoord.aio._driver import StoreDriver
from fscoord.aio.recipes import Hold
from fscoord.errors import FscoordError
from fscoord.integrations.filelock._store import forgetting, limit_of, place_of
from fscoord.recipes.lock import PlainReadWriteLock, PlainSide

_Base: Any = filelock.AsyncReadWriteLock  # None in a Python without sqlite3
if _Base is None:
    raise ImportError("AsyncFsReadWriteLock needs the module sqlite3, which this Python lacks: use another Python")


class _TaskHold:
    """The side of the lock in the store that one task holds, and the task's levels by the id of their lock object."""

    def __init__(self, hold: Hold, side: PlainSide) -> None:
        self.hold, self.side = hold, side
        self.levels: dict[int, int] = {}


class _Table:
    """The holds of the tasks of this process. Objects for one path share a table, as filelock's singletons do."""

    def __init__(self) -> None:
        self.holds: dict[asyncio.Task[Any], _TaskHold] = {}
        self.epoch = system.process_epoch()

    def __del__(self) -> None:
        # filelock's lock is free when its last object is dropped.
        for held in self.holds.values() if self.epoch == system.process_epoch() else ():
            with suppress(FscoordError):
                held.side.release()


_tables: Final[weakref.WeakValueDictionary[str, _Table]] = weakref.WeakValueDictionary()


class AsyncFsReadWriteLock(_Base):
    """A `filelock.AsyncReadWriteLock` with the additions of `FsReadWriteLock`.

    The arguments, methods and errors are those of `filelock.AsyncReadWriteLock`. A task that waits for the lock in the
    store uses no thread. A cancelled task withdraws its request.
    """

    def __init__(
        self,
        lock_file: str | system.os.PathLike[str],
        timeout: float = -1,
        *,
        blocking: bool = True,
        is_singleton: bool = True,
        **options: Any,
    ) -> None:
        self._table = _Table()
        self._driver: StoreDriver | None = None
        self._waits: set[asyncio.Task[bool]] = set()  # for the lock in the store
        super().__init__(lock_file, timeout, blocking=blocking, is_singleton=is_singleton, **options)
        if is_singleton:
            key = f"{self._table.epoch} {system.os.path.realpath(self.lock_file)}"
            self._table = _tables.setdefault(key, self._table)

    async def acquire_read(self, timeout: float | None = None, *, blocking: bool | None = None) -> Any:
        return await self._acquire_in_order("read", timeout, blocking)

    async def acquire_write(self, timeout: float | None = None, *, blocking: bool | None = None) -> Any:
        return await self._acquire_in_order("write", timeout, blocking)

    async def _acquire_in_order(
        self, mode: Literal["read", "write"], timeout: float | None, blocking: bool | None
    ) -> Any:
        timeout = self.timeout if timeout is None else timeout
        blocking = self.blocking if blocking is None else blocking
        limit, begun = limit_of(timeout, blocking=blocking, refuses_negative=True), system.time.monotonic()
        acquire = super().acquire_read if mode == "read" else super().acquire_write
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError(f"{self.lock_file} must be acquired from inside an asyncio task")
        held = self._table.holds.get(task)
        if held is not None or self._table.epoch != system.process_epoch():  # filelock counts it, or refuses it
            proxy = await acquire(timeout, blocking=blocking)
            if held is not None:
                held.levels[id(self)] = held.levels.get(id(self), 0) + 1
            return proxy
        self._place = place_of(self.lock_file, None, None)  # keeps the store open from one acquisition to the next
        both = PlainReadWriteLock(*self._place)
        side = both.reader if mode == "read" else both.writer
        if self._driver is None or self._driver.store is not self._place[0]:
            self._driver = StoreDriver(self._place[0])
        hold = Hold(self._driver, side)
        is_kept = False
        try:
            with forgetting(self.lock_file):
                is_granted = await self._wait(hold, limit)
            if is_granted is None:
                return await acquire(0.0)  # raises filelock's error for a closed object
            if not is_granted:
                raise filelock.Timeout(self.lock_file) from side._line.timed_out(side._what, limit)
            left = timeout if limit in (0.0, math.inf) else max(0.0, begun + limit - system.time.monotonic())
            proxy = await acquire(left, blocking=blocking)
            held = self._table.holds[task] = _TaskHold(hold, side)
            held.levels[id(self)] = 1
            is_kept = True
            return proxy
        finally:
            if not is_kept and side._current() is not None:
                with suppress(FscoordError):  # another error is propagating
                    side.release()

    async def _wait(self, hold: Hold, limit: float) -> bool | None:
        """Acquire `hold`, and return whether it was granted. Return None if `close` has ended the wait."""
        wait = asyncio.ensure_future(hold.acquire(limit > 0, -1 if limit in (0.0, math.inf) else limit))
        self._waits.add(wait)
        try:
            return await wait
        except asyncio.CancelledError:
            if wait in self._waits:
                raise
            return None
        finally:
            self._waits.discard(wait)

    async def release(self, *, force: bool = False) -> None:
        task = asyncio.current_task()
        try:
            await super().release(force=force)
        except asyncio.CancelledError:  # raised after filelock's lock was released
            await self._leave(task, force=force)
            raise
        except RuntimeError:  # filelock does not hold its lock for this task
            await self._leave(task, force=True)
            raise
        await self._leave(task, force=force)

    async def close(self) -> None:
        await super().close()
        while self._waits:
            wait = self._waits.pop()
            wait.get_loop().call_soon_threadsafe(wait.cancel)
        for task in list(self._table.holds):
            await self._leave(task, force=True)

    async def _leave(self, task: asyncio.Task[Any] | None, *, force: bool) -> None:
        """Forget a level of `task`, or with `force` all its levels by this object. Release the side after the last."""
        held = None if task is None else self._table.holds.get(task)
        if task is None or held is None or id(self) not in held.levels or self._table.epoch != system.process_epoch():
            return
        held.levels[id(self)] -= 1
        if force or not held.levels[id(self)]:
            del held.levels[id(self)]
        if not held.levels:
            del self._table.holds[task]
            with forgetting(self.lock_file):
                await held.hold.release()
