"""What tasks hold for a while, and wait for in line: locks, semaphores and elections."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from functools import partial
from typing import Any, TypeVar

from fscoord import recipes
from fscoord._arguments import Key, Timeout, Value, to_seconds
from fscoord.aio._executor import CALL_WAS_MADE
from fscoord.aio.store import AsyncStore, driver_of
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes._hold import Exclusive

__all__ = ["Election", "Hold", "Lock", "RLock", "ReadWriteLock", "Semaphore", "force_release"]

H = TypeVar("H", bound="Hold")


class Hold:
    """A lock that a limited number of tasks or processes hold. The others wait in the order in which they came.

    An asynchronous context manager. A task that is cancelled while it acquires holds nothing, and is in no queue, when
    the cancellation is raised. A release that is cancelled is completed all the same. With a ``ttl`` each hold has a
    thread, which renews the lease also while the loop is busy.
    """

    def __init__(self, store: AsyncStore, core: Exclusive) -> None:
        self._driver = driver_of(store)
        self._core = core

    @property
    def name(self) -> str:
        """What it is called in the store."""
        return self._core.name

    @property
    def token(self) -> int:
        """The fencing token; see `fscoord.recipes.Lock.token`."""
        return self._core.token

    async def acquire(self, blocking: bool = True, timeout: Timeout | None = -1) -> bool:
        """Acquire it, and return whether that was done.

        Args:
            blocking: whether to wait.
            timeout: how long, in seconds or as a `timedelta`; -1 is no limit. See `fscoord.recipes.Lock.acquire`.

        Raises:
            LockLostError: somebody took this one out of the line.
        """
        got: list[str] = []
        over: list[object] = []
        try:
            turns = self._core._acquire_steps(self._core._mode, blocking, timeout, got)
            return await self._driver.drive(turns)
        except BaseException as error:  # see `fscoord.recipes._cleanup`
            try:
                await self._driver.run_cleanup(error, partial(self._core._undo, got))
            except CALL_WAS_MADE:
                raise
            except BaseException:
                go_on_in_thread((over, self._core._undo, got))
                await_end(over)
                raise
            raise

    async def release(self) -> None:
        """Release it. The first waiter in the queue gets it; no other waiter is woken.

        Raises:
            RuntimeError: this object does not hold it.
            LockLostError: it was taken away meanwhile. What was done under it may have been done beside another.
        """
        gone: list[Any] = []
        over: list[object] = []
        try:
            if await self._release(gone):
                return
        except CALL_WAS_MADE:
            raise
        except BaseException:
            try:
                self._finish(gone)
            except BaseException:
                go_on_in_thread((over, self._finish, gone))
                await_end(over)
                raise
            raise
        raise RuntimeError(self._not_held())

    async def _release(self, gone: list[Any]) -> bool:
        """Give back what was acquired last, and put it into `gone` first; return False if there is nothing."""
        return await self._driver.run(partial(self._core._release, gone, None))

    def _finish(self, gone: list[Any]) -> None:
        """Do what `_release` was interrupted in, without the loop. It may be called twice."""
        self._core._finish(gone, None)

    def _not_held(self) -> str:
        return self._core._not_held()

    async def check(self) -> None:
        """Look whether this object still holds it.

        Raises:
            LockLostError: it does not.
        """
        await self._driver.run(self._core.check)

    async def holders(self) -> list[recipes.Contender]:
        """Return the holders, in the order of their tokens."""
        return await self._driver.run(self._core.holders)

    async def waiters(self) -> list[recipes.Contender]:
        """Return the waiters, in the order in which they came."""
        return await self._driver.run(self._core.waiters)

    async def __aenter__(self: H) -> H:
        limit = self._core._patience()
        if not await self.acquire(timeout=limit):
            raise await self._driver.run(partial(self._core._line.timed_out, self._core._what, limit))
        return self

    async def __aexit__(self, *_: object) -> None:
        gone: list[Any] = []
        over: list[object] = []
        try:
            if await self._release(gone):
                return
        except CALL_WAS_MADE:
            raise
        except BaseException:
            try:
                self._finish(gone)
            except BaseException:
                go_on_in_thread((over, self._finish, gone))
                await_end(over)
                raise
            raise
        raise RuntimeError(self._not_held())


class Lock(Hold):
    """A lock that at most one task, thread or process holds; see `fscoord.recipes.Lock`, also for the arguments.

    Tasks that share the object wait in the same line as everybody else.
    """

    def __init__(
        self, store: AsyncStore, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        super().__init__(store, recipes.Lock(store.store, name, timeout, ttl))

    async def locked(self) -> bool:
        """Return whether anybody holds it."""
        return bool(await self.holders())


class RLock(Lock):
    """A `Lock` that the task which holds it may acquire again, and then releases as often."""

    def __init__(
        self, store: AsyncStore, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        super().__init__(store, name, timeout, ttl)
        self._owner: asyncio.Task[Any] | None = None
        self._depth = 0

    async def acquire(self, blocking: bool = True, timeout: Timeout | None = -1) -> bool:
        """Acquire it, once more if this task holds it; see `Hold.acquire`."""
        task = asyncio.current_task()
        if self._owner is None or self._owner is not task:
            if not await super().acquire(blocking, timeout):
                return False
            self._owner, self._depth = task, 0
        self._depth += 1
        return True

    async def release(self) -> None:
        """Give it back, when this was called as often as `acquire`.

        Raises:
            RuntimeError: this task does not hold it.
            LockLostError: it was taken away meanwhile.
        """
        await super().release()

    async def _release(self, gone: list[Any]) -> bool:
        if self._owner is None or self._owner is not asyncio.current_task():
            return False
        return await super()._release(gone) if self._is_freed(gone) else True

    def _not_held(self) -> str:
        return f"the lock {self.name!r} is not held by this object, in this task"

    def _is_freed(self, gone: list[Any]) -> bool:
        """Count one less, and return whether that was the last one. Nothing is called here: see `_cleanup`."""
        if self._depth > 1:
            self._depth -= 1
            gone += [""]
            return False
        self._owner = None
        return True

    def _finish(self, gone: list[Any]) -> None:
        if gone or self._owner is None or self._is_freed(gone):  # the owner is the task that was interrupted
            super()._finish(gone)


class Semaphore(Hold):
    """What at most `value` hold at a time; see `fscoord.recipes.Semaphore`, also for the arguments."""

    def __init__(
        self, store: AsyncStore, name: Key, value: int = 1, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        super().__init__(store, recipes.Semaphore(store.store, name, value, timeout, ttl))


class ReadWriteLock:
    """A lock that many hold for reading or one for writing; see `fscoord.recipes.ReadWriteLock`, also for arguments.

    Attributes:
        reader: the side for reading: ``async with lock.reader:``, or ``acquire`` and ``release``.
        writer: the side for writing.
    """

    def __init__(
        self, store: AsyncStore, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        core = recipes.ReadWriteLock(store.store, name, timeout, ttl)
        self.reader = Hold(store, core.reader)
        self.writer = Hold(store, core.writer)

    async def holders(self) -> list[recipes.Contender]:
        """Return the holders, the readers or the writer, in the order of their tokens."""
        return await self.reader.holders()

    async def waiters(self) -> list[recipes.Contender]:
        """Return the waiters, in the order in which they came."""
        return await self.reader.waiters()


class Election(Hold):
    """The candidates for one office; see `fscoord.recipes.Election`, also for the arguments."""

    def __init__(
        self,
        store: AsyncStore,
        name: Key,
        data: Value = b"",
        timeout: Timeout | None = None,
        ttl: Timeout | None = None,
    ) -> None:
        self._election = recipes.Election(store.store, name, data, timeout, ttl)
        super().__init__(store, self._election)

    async def campaign(self, timeout: Timeout | None = math.inf) -> bool:
        """Wait in line until this candidate leads; see `fscoord.recipes.Election.campaign`."""
        return await self.acquire(timeout=None if timeout is None else to_seconds(timeout))

    async def resign(self) -> None:
        """Let the next one lead; see `Hold.release` for errors."""
        await self.release()

    @property
    def term(self) -> int:
        """The term in which this candidate leads; see `token`."""
        return self.token

    async def leader(self) -> recipes.Leader | None:
        """Return the leader that has announced itself, or None."""
        return await self._driver.run(self._election.leader)

    async def observe(self, after: int = 0, timeout: Timeout | None = None) -> recipes.Leader:
        """Wait for a leader of a later term than `after`, and return it.

        Args:
            after: the last term that is known; 0 is none.
            timeout: seconds or a `timedelta`; None means the store's.

        Raises:
            StoreTimeoutError: there was none.
        """
        return await self._driver.drive(self._election._observing(after, timeout))

    async def watch(self, timeout: Timeout | None = math.inf) -> AsyncIterator[recipes.Leader]:
        """Yield each leader, for ever.

        Args:
            timeout: how long to wait for each, in seconds or as a `timedelta`; without limit, unless it is given. None
                means the store's.

        Raises:
            StoreTimeoutError: there was no other for that long.
        """
        term = 0
        while True:
            leader = await self.observe(term, timeout)
            term = leader.term
            yield leader


async def force_release(store: AsyncStore, name: Key, token: int) -> bool:
    """Release the hold with the fencing token `token`, whoever has it; see `fscoord.recipes.force_release`.

    A task that is cancelled meanwhile has released it all the same.
    """
    return await driver_of(store).run(partial(recipes.force_release, store.store, name, token))
