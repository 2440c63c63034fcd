"""`Hands`: a few threads that make a store's calls for a loop, and code in turns that is driven from there.

A call may have to wait: for the log's lock, which another process holds, or for a server. So none is made in the loop,
but for stores that only touch memory. Where a call is a matter of microseconds the loop waits for the thread itself,
for a millisecond at most: to come back by way of the loop takes longer than the call.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast
from weakref import WeakSet

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord.aio._loop import finish_soon

__all__ = ["MADE", "Hands", "Job"]

MADE: Final = (Exception, asyncio.CancelledError)
"""What comes out of `Hands.do` when the call has been made; after Ctrl-C, or the end of the loop, it may not have."""

IDLE_S: Final = 1.0
"""How long a thread without work stays."""

T = TypeVar("T")
R = TypeVar("R")


class Job(Generic[T]):
    """One call, and what came of it.

    Attributes:
        is_over: whether it was made.
        value: what it returned.
        error: what it raised.
        cancelled: how whoever waited for it was cancelled meanwhile, if that happened.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.value: Any = None
        self._wakeup = system.AutoResetEvent()
        self.is_over = False
        self.error: BaseException | None = None
        self.cancelled: asyncio.CancelledError | None = None
        self.tell: Callable[[], object] | None = None

    def run(self) -> None:
        """Make the call, in whatever thread."""
        try:
            self.value = self._call()
        except BaseException as error:  # noqa: BLE001 - whoever waits for it gets it
            self.error = error
        self.is_over = True
        self._wakeup.set()
        tell = self.tell
        if tell is not None:
            tell()

    def linger(self, seconds: float) -> bool:
        """Wait in this thread, so many seconds at most; return whether it is over."""
        return self.is_over or self._wakeup.wait(seconds) or self.is_over

    def result(self) -> T:
        """Return what it returned, or raise; a cancellation counts for more than what it raised."""
        error, self.error = self.cancelled or self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which keeps this frame
        return cast(T, self.value)


class Hands:
    """So many threads at most, there only while there is something to do. In a forked child there are new ones.

    Args:
        most: how many; 0: calls are made in the loop.
        usual_s: for how many seconds the loop waits for a call itself.
    """

    def __init__(self, most: int, usual_s: float) -> None:
        self._most = most
        self._usual_s = usual_s
        self._idle_s = IDLE_S
        self.begin()
        _all.add(self)

    def begin(self) -> None:
        """Begin without threads, and with nothing to do; in a forked child too."""
        self._guard = system.threading.Lock()
        self._jobs: deque[Job[Any]] = deque()
        self._threads = 0
        self._idle: list[system.AutoResetEvent] = []

    async def do(self, call: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Return what `call` returns. Who is cancelled meanwhile learns it when the call has been made all the same.

        Then, if it did not raise, `undo` is called with what it returned.
        """
        job = await self.finish(call)
        if job.cancelled is not None and job.error is None and undo is not None:
            await self.finish(partial(undo, job.value))
        return job.result()

    async def finish(self, call: Callable[[], T]) -> Job[T]:
        """Make the call, whoever is cancelled meanwhile, and return how it went."""
        job = Job(call)
        if not self._most:
            job.run()
            return job
        try:
            self._submit(job)
            job.linger(self._usual_s)
            while not job.is_over:
                await self._wait(job)
        except BaseException:  # the loop is no more, or is interrupted: nothing can be awaited any more
            if not self._withdraw(job):
                job.linger(math.inf)
            raise
        return job

    async def settle(self, error: BaseException, call: Callable[[], object]) -> None:
        """Make a call that undoes something, on the way out with `error`; an ordinary error that it raises is lost."""
        if isinstance(error, (Exception, asyncio.CancelledError)):
            job = await self.finish(call)
            if job.error is not None and not isinstance(job.error, Exception):
                raise job.error
            if job.cancelled is not None:
                raise job.cancelled from error
        else:  # as in `finish`
            with suppress(Exception):
                call()

    @staticmethod
    async def _wait(job: Job[Any]) -> None:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        job.tell = partial(finish_soon, loop, _set, over)
        if job.is_over:
            return
        try:
            await over
        except asyncio.CancelledError as error:
            job.cancelled = error

    async def drive(
        self,
        steps: Generator[R, Any, T],
        answer: Callable[[R], Awaitable[Any]],
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Return what `steps` ends with, having `answer` awaited for what it yields.

        A cancellation is raised in `steps`, where it waits, and comes out when that has put in order what it had begun.
        Should it have ended meanwhile, `undo` is called with what it ended with.
        """
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                job = await self.finish(partial(_step, steps, value, error))
                value = error = None
                if job.error is not None:
                    job.result()
                is_end, found = job.value
                if is_end:
                    if job.cancelled is not None and undo is not None:
                        await self.finish(partial(undo, found))
                    job.result()
                    return cast(T, found)
                if job.cancelled is not None:
                    error = job.cancelled
                    continue
                try:
                    value = await answer(found)
                except (asyncio.CancelledError, Exception) as failure:  # noqa: BLE001 - it comes out of `steps`
                    error = failure
        finally:
            steps.close()

    def dismiss(self) -> None:
        """There will be little to do: threads end when there is nothing."""
        system.process_epoch()  # after a fork in C it makes the child begin anew
        with self._guard:
            self._idle_s = 0.0
            while self._idle:
                self._idle.pop().set()

    def _submit(self, job: Job[Any]) -> None:
        system.process_epoch()
        with self._guard:
            self._jobs.append(job)
            if self._idle:
                self._idle.pop().set()
                return
            if self._threads >= self._most:
                return
            self._threads += 1
        try:
            system.start_thread("fscoord-aio", self._work)
        except RuntimeError:  # no thread left
            with self._guard:
                self._threads -= 1
                if not self._threads:
                    raise

    def _withdraw(self, job: Job[Any]) -> bool:
        """Return whether the job had not begun; then it does not any more."""
        with self._guard:
            try:
                self._jobs.remove(job)
            except ValueError as error:
                raise_unless_absent(error)
                return False
            return True

    def _work(self) -> None:
        while True:
            wakeup = (
                system.AutoResetEvent()
            )  # a new one each time: whoever sets it takes it out of the list before, for good
            with self._guard:
                job = self._jobs.popleft() if self._jobs else None
                if job is None:
                    self._idle.append(wakeup)
            if job is not None:
                job.run()
                job = None  # nobody but who waits for it keeps what came of it
            elif not wakeup.wait(self._idle_s):
                with self._guard:
                    if wakeup in self._idle:
                        self._idle.remove(wakeup)
                        self._threads -= 1
                        return


_all: WeakSet[Hands] = WeakSet()


def _after_fork_in_child() -> None:
    for hands in list(_all):
        hands.begin()


system.after_fork_in_child("hands", _after_fork_in_child)


def _set(over: asyncio.Future[None]) -> None:
    if not over.done():
        over.set_result(None)


def _step(steps: Generator[R, Any, T], value: Any, error: BaseException | None) -> tuple[bool, R | T]:
    """Have `steps` go on; return whether it has ended, and what with, or what it yielded."""
    try:
        return False, steps.send(value) if error is None else steps.throw(error)
    except StopIteration as end:
        return True, end.value
