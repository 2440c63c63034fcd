"""Locks, semaphores and elections for tasks. Tasks and processes wait in one line for each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import AsyncContextDecorator
from functools import partial
from typing import Any, TypeVar

from fscoord import recipes
from fscoord._arguments import Key, Timeout, Value, refuse_copies, to_seconds
from fscoord.aio._executor import CALL_WAS_MADE
from fscoord.aio.store import AsyncStore, core_repr, driver_of
from fscoord.recipes._cleanup import await_end, go_on_in_thread
from fscoord.recipes._hold import Exclusive

__all__ = ["Election", "Hold", "Lock", "RLock", "ReadWriteLock", "Semaphore", "force_release"]

H = TypeVar("H", bound="Hold")


class Hold(AsyncContextDecorator):
    """A lock that a limited number of tasks or processes hold. The other contenders wait in the order of their arrival.

    The object is an asynchronous context manager, and a decorator of coroutine functions. When the cancellation of a
    task that acquires the lock is raised, the task does not hold the lock and does not wait in line. A cancelled
    release is completed before the cancellation is raised. With a ``ttl``, a thread renews the lease of each hold, also
    while the loop is busy.
    """

    __reduce__ = refuse_copies

    def __init__(self, store: AsyncStore, core: Exclusive) -> None:
        self._driver = driver_of(store)
        self._core = core

    __repr__ = core_repr

    @property
    def name(self) -> str:
        """The name of the lock in the store."""
        return self._core.name

    @property
    def token(self) -> int:
        """The fencing token of the last acquisition; see `fscoord.recipes.Lock.token`."""
        return self._core.token

    async def acquire(self, blocking: bool = True, timeout: Timeout | None = -1) -> bool:
        """Acquire the lock, and return whether it was acquired.

        Args:
            blocking: whether to wait for the lock.
            timeout: how long to wait, in seconds or as a `timedelta`; -1 is no limit. See
                `fscoord.recipes.Lock.acquire`.

        Raises:
            LockLostError: another process removed this contender from the line.
        """
        got: list[str] = []
        over: list[object] = []
        try:
            return await self._driver.drive(self._core._acquire_steps(blocking, timeout, got, asyncio.current_task()))
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
        """Release the lock. The first waiter in line acquires it, and no other waiter is woken.

        Raises:
            RuntimeError: this object does not hold the lock.
            LockLostError: the lock was lost before. Another process may have held it at the same time.
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
        raise self._not_held()

    async def _release(self, gone: list[Any]) -> bool:
        """Release the last acquisition, after recording it in `gone`; return False if there is none."""
        return await self._driver.run(partial(self._core._release, gone, None))

    def _finish(self, gone: list[Any]) -> None:
        """Complete an interrupted `_release` without the loop. It may be called twice."""
        self._core._finish(gone, None)

    def _not_held(self) -> Exception:
        return self._core._not_held()

    async def check(self) -> None:
        """Check that this object still holds the lock.

        Raises:
            LockLostError: this object does not hold the lock any more.
        """
        await self._driver.run(self._core.check)

    async def holders(self) -> list[recipes.Contender]:
        """Return the holders, in the order of their tokens."""
        return await self._driver.run(self._core.holders)

    async def waiters(self) -> list[recipes.Contender]:
        """Return the waiters, in the order of their arrival."""
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
        raise self._not_held()


class Lock(Hold):
    """A lock that at most one task, thread or process holds. See `fscoord.recipes.Lock` for the arguments.

    Tasks that share the object wait in the same line as all other contenders.
    """

    def __init__(
        self, store: AsyncStore, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        super().__init__(store, recipes.Lock(driver_of(store).store, name, timeout, ttl))

    async def locked(self) -> bool:
        """Return whether any contender holds the lock."""
        return bool(await self.holders())


class RLock(Lock):
    """A `Lock` that its holder may acquire again. The task must release it as often as it has acquired it."""

    def __init__(
        self, store: AsyncStore, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        super().__init__(store, name, timeout, ttl)
        self._owner: asyncio.Task[Any] | None = None
        self._depth = 0

    async def acquire(self, blocking: bool = True, timeout: Timeout | None = -1) -> bool:
        """Acquire the lock, or acquire it once more if this task holds it; see `Hold.acquire`."""
        task = asyncio.current_task()
        if self._owner is None or self._owner is not task:
            if not await super().acquire(blocking, timeout):
                return False
            self._owner, self._depth = task, 0
        self._depth += 1
        return True

    async def release(self) -> None:
        """Count one release. The lock is released when `release` was called as often as `acquire`.

        Raises:
            RuntimeError: this task does not hold the lock.
            LockLostError: the lock was lost before.
        """
        await super().release()

    async def _release(self, gone: list[Any]) -> bool:
        if self._owner is None or self._owner is not asyncio.current_task():
            return False
        return await super()._release(gone) if self._is_freed(gone) else True

    def _not_held(self) -> Exception:
        return RuntimeError(f"the lock {self.name!r} is not held by this object, in this task")

    def _is_freed(self, gone: list[Any]) -> bool:
        """Decrease the count of acquisitions, and return whether it is 0. This calls no function: see `_cleanup`."""
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
    """A semaphore that at most `value` contenders hold. See `fscoord.recipes.Semaphore` for the arguments."""

    def __init__(
        self, store: AsyncStore, name: Key, value: int = 1, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        self._semaphore = recipes.Semaphore(driver_of(store).store, name, value, timeout, ttl)
        super().__init__(store, self._semaphore)

    async def release(self, n: int = 1) -> None:
        """Release the latest `n` acquisitions of this object; see `fscoord.recipes.Semaphore.release`."""
        if n == 1:
            return await super().release()
        return await self._driver.run(partial(self._semaphore.release, n))


class ReadWriteLock:
    """A lock that many readers or one writer hold. See `fscoord.recipes.ReadWriteLock` for the arguments.

    Attributes:
        reader: the lock for readers: ``async with lock.reader:``, or ``acquire`` and ``release``.
        writer: the lock for writers, used in the same way.
    """

    __reduce__ = refuse_copies

    def __init__(
        self, store: AsyncStore, name: Key, timeout: Timeout | None = None, ttl: Timeout | None = None
    ) -> None:
        self._store = store
        self._core = recipes.ReadWriteLock(driver_of(store).store, name, timeout, ttl)
        self.reader: Hold = Hold(store, self._core.reader)
        self.writer: Hold = Hold(store, self._core.writer)

    __repr__ = core_repr

    async def held_side(self) -> str | None:
        """Return the side that contenders hold, ``"reader"`` or ``"writer"``; None if the lock is free."""
        return await driver_of(self._store).run(self._core.held_side)

    async def holders(self) -> list[recipes.Contender]:
        """Return the holders, the readers or the writer, in the order of their tokens."""
        return await self.reader.holders()

    async def waiters(self) -> list[recipes.Contender]:
        """Return the waiters, in the order of their arrival."""
        return await self.reader.waiters()


class Election(Hold):
    """An election of one leader among candidates. See `fscoord.recipes.Election` for the arguments."""

    def __init__(
        self,
        store: AsyncStore,
        name: Key,
        data: Value = b"",
        timeout: Timeout | None = None,
        ttl: Timeout | None = None,
    ) -> None:
        self._election = recipes.Election(driver_of(store).store, name, data, timeout, ttl)
        super().__init__(store, self._election)

    async def campaign(self, timeout: Timeout | None = math.inf) -> bool:
        """Wait in line until this candidate leads; see `fscoord.recipes.Election.campaign`."""
        return await self.acquire(timeout=None if timeout is None else to_seconds(timeout))

    async def resign(self) -> None:
        """End the term, so that the next candidate in line leads; see `Hold.release` for the errors."""
        await self.release()

    @property
    def term(self) -> int:
        """The number of the term in which this candidate leads. It is the fencing token; see `token`."""
        return self.token

    async def leader(self) -> recipes.Leader | None:
        """Return the present leader, or None if no living leader has announced itself."""
        return await self._driver.run(self._election.leader)

    async def observe(self, after: int = 0, timeout: Timeout | None = None) -> recipes.Leader:
        """Wait for a leader of a later term than `after`, and return it.

        Args:
            after: the last term that the caller has seen; 0 before the first.
            timeout: how long to wait, in seconds or as a `timedelta`; None means the store's timeout.

        Raises:
            StoreTimeoutError: no such leader came in time.
        """
        return await self._driver.drive(self._election._observing(after, timeout))

    async def watch(self, timeout: Timeout | None = math.inf) -> AsyncGenerator[recipes.Leader, None]:
        """Yield each leader, without end.

        Args:
            timeout: how long to wait for each leader, in seconds or as a `timedelta`; by default without limit. None
                means the store's timeout.

        Raises:
            StoreTimeoutError: the next leader did not come in time.
        """
        term = 0
        while True:
            leader = await self.observe(term, timeout)
            term = leader.term
            yield leader


async def force_release(store: AsyncStore, name: Key, token: int) -> bool:
    """Release the hold with the fencing token `token` of any holder; see `fscoord.recipes.force_release`.

    A task that is cancelled meanwhile has released the hold when the cancellation is raised.
    """
    return await driver_of(store).run(partial(recipes.force_release, store.store, name, token))
