"""`AsyncFsFileLock`: filelock's `AsyncFileLock`, with a fair lock in a store before it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import filelock
import filelock.asyncio

from fscoord._runtime import system
from fscoord.aio._driver import StoreDriver
from fscoord.aio.recipes import Hold
from fscoord.integrations.filelock._file_lock import TurnHolder
from fscoord.integrations.filelock._store import forgetting


class AsyncFsFileLock(TurnHolder, filelock.AsyncUnixFileLock):
    """A `filelock.AsyncFileLock` with the additions of `FsFileLock`. `FsFileLock` describes the arguments and errors.

    Tasks, threads and processes acquire the lock in the order of their requests. A waiting task uses no thread. A
    cancelled task withdraws its request.
    """

    _driver: StoreDriver | None = None

    async def acquire(  # type: ignore[override]  # as in filelock
        self,
        timeout: float | None = None,
        poll_interval: float | None = None,
        *,
        blocking: bool | None = None,
        cancel_check: Callable[[], bool] | None = None,
    ) -> Any:
        """Acquire as `filelock.asyncio.BaseAsyncFileLock.acquire` does, in the order of the requests.

        With `cancel_check`, the task asks for the lock again after each `poll_interval`, and comes after all other
        contenders each time.
        """
        rest: dict[str, Any] = {"poll_interval": poll_interval, "cancel_check": cancel_check}
        if self._is_foreign or self.is_locked:  # filelock refuses it, or only counts it
            return await super().acquire(timeout, blocking=blocking, **rest)
        begun = system.time.monotonic()
        turn, limit = self._turn(timeout, blocking)
        if self._driver is None or self._driver.store is not turn._store:
            self._driver = StoreDriver(turn._store)
        hold = Hold(self._driver, turn)
        try:
            pause = math.inf if cancel_check is None else self.poll_interval if poll_interval is None else poll_interval
            while True:
                left = max(0.0, begun + limit - system.time.monotonic())
                with forgetting(self.lock_file):
                    is_granted = await hold.acquire(limit > 0, -1 if limit == 0 else min(pause, left))
                if is_granted:
                    break
                if cancel_check is None or cancel_check() or system.time.monotonic() >= begun + limit:
                    raise turn.timeout_error(self.lock_file)
            self._granted = turn
            left_s = timeout if limit in (0.0, math.inf) else max(0.0, begun + limit - system.time.monotonic())
            return await super().acquire(left_s, blocking=blocking, **rest)
        finally:
            self._withdraw(turn)
