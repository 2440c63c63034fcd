"""`StoreDriver`: the calls and waits of the tasks of a loop on one store; all of `fscoord.aio` goes through it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from fscoord._waiting.request import ITEM, BarrierRequest, WaitRequest, WaitSteps
from fscoord.aio._asyncio_backend import AsyncioBackend
from fscoord.aio._executor import CallExecutor
from fscoord.aio._sliced_waits import SlicedWaits
from fscoord.store import Store, barrier_steps, new_wait, notifier_for, typical_call_s

__all__ = ["StoreDriver"]

T = TypeVar("T")

THREADS_MAX: Final = 4
"""How many threads make a store's calls at most, however many tasks there are."""


class StoreDriver:
    """Makes calls on `store` in threads, and drives its waits and the steps of recipes in the running loop."""

    def __init__(self, store: Store) -> None:
        self.store = store
        usual_s = typical_call_s(store)
        self._executor = CallExecutor(THREADS_MAX if usual_s else 0, usual_s if usual_s < math.inf else 0.0)
        self._backend: AsyncioBackend | None = None
        self._notifier: Any = None
        self._sliced_waits: SlicedWaits | None = None

    async def run(self, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Call `function` in a thread; see `CallExecutor.run`."""
        return await self._executor.run(function, undo)

    async def run_cleanup(self, error: BaseException, function: Callable[[], object]) -> None:
        """Call `function` on the way out with `error`; see `CallExecutor.run_cleanup`."""
        await self._executor.run_cleanup(error, function)

    async def drive(self, steps: WaitSteps[T], undo: Callable[[T], object] | None = None) -> T:
        """Return what `steps` ends with; see `CallExecutor.drive`."""
        return await self._executor.drive(steps, self._answer, undo)

    async def _answer(self, request: WaitRequest | BarrierRequest) -> Any:
        if isinstance(request, BarrierRequest):
            return await self.barrier(request)
        return await self.wait(request)

    async def barrier(self, request: BarrierRequest) -> None:
        """Carry out `request`."""
        await self.drive(barrier_steps(self.store, request))

    async def wait(self, request: WaitRequest) -> Any:
        """Carry out `request`, and return its answer."""
        self._bind_loop(asyncio.get_running_loop())
        if self._sliced_waits is not None:
            return await self._sliced_waits.wait(request)
        undo = partial(self.store.queue_push, request.keys[0]) if request.kind == ITEM else None
        return await self._executor.wait(new_wait(self.store, request, self._notifier), undo)

    def _bind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have the waits that begin from now on woken by `loop`."""
        if self._backend is None or not self._backend.is_of(loop):
            self._backend = AsyncioBackend(loop)
            self._notifier = notifier_for(self.store, self._backend)
            self._sliced_waits = SlicedWaits(self.store) if self._notifier is None else None

    async def close(self) -> None:
        """Close the store; tasks that wait get a `~fscoord.StoreClosedError`."""
        try:
            if self._sliced_waits is not None:
                await self.run(self._sliced_waits.close)
        finally:
            await self.run(self.store.close)
            self._executor.dismiss()
