"""Cancel a coroutine at one await after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from typing import Any

__all__ = ["Cancelled", "at_each_await", "outcome", "seen"]

SUSPENSIONS_MAX = 10_000
"""So often a task gives way before what it waits for counts as hung."""


class Cancelled:
    """Await `work`, and cancel the task that does so at its await number `at`; if it `persists`, at each later one too.

    Attributes:
        reached: whether there were so many.
    """

    def __init__(self, work: Coroutine[Any, Any, Any], at: int, *, persists: bool = False) -> None:
        self._work = work
        self._left = at
        self._persists = persists
        self.reached = False

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        while True:
            try:
                awaited = self._work.send(None) if error is None else self._work.throw(error)
            except StopIteration as end:
                return end.value
            self._left -= 1
            if self._left == 0 or (self._left < 0 and self._persists):
                self.reached = True
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            error = None
            try:
                yield awaited
            except BaseException as failure:
                error = failure


async def at_each_await(act: Callable[[Callable[..., Cancelled]], Awaitable[None]]) -> int:
    """Have `act` cancel something at its first await, then at its second, until it has no more; return how many.

    `act` is given a function that makes a `Cancelled` of a coroutine.
    """
    for at in range(1, SUSPENSIONS_MAX):
        made: list[Cancelled] = []

        def cancelled(work: Coroutine[Any, Any, Any], **how: Any) -> Cancelled:
            made.append(Cancelled(work, at, **how))  # noqa: B023 - it is called in this turn of the loop
            return made[-1]  # noqa: B023

        await act(cancelled)
        if not made[0].reached:
            return at - 1
    raise AssertionError("there is no end of awaits")


async def outcome(work: Awaitable[Any]) -> Any:
    """Return what `work` returns, or `asyncio.CancelledError` if it was cancelled."""
    task = asyncio.ensure_future(_awaited(work))
    with suppress(asyncio.CancelledError):
        return await task
    return asyncio.CancelledError


async def _awaited(work: Awaitable[Any]) -> Any:
    return await work


async def seen(look: Callable[[], Any], unless: Callable[[], bool] = lambda: False) -> None:
    """Give way to other tasks until `look` returns something, or `unless` does."""
    while not look() and not unless():
        await asyncio.sleep(0)
