"""`CallExecutor` makes blocking calls in threads for the tasks of a loop, and runs waits and generators of waits.

Any call may block: the call may wait for a server, or for the log's lock that another process holds. So all calls are
made in threads, unless the store only uses memory. A call of a store on a local file system usually takes microseconds,
less time than a thread needs to wake the loop. So for such a store, the loop first blocks until the call is over, for
at most a millisecond.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_unless_absent
from fscoord._waiting.wait import NotYet, Request, Wait, WaitSteps, next_look
from fscoord.aio._asyncio_backend import AsyncioWaker, call_soon, finish

CALL_WAS_MADE: Final = (Exception, asyncio.CancelledError)
"""If `CallExecutor.run` raises one of these exceptions, the call was certainly made. After any other exception, for
example `KeyboardInterrupt`, the call may not have been made."""

IDLE_S: Final = 1.0
"""How many seconds a thread waits for another call before it ends."""

T = TypeVar("T")


class PendingCall(Generic[T]):
    """A call to be made in a thread, and its outcome.

    Attributes:
        is_over: whether the call has returned or raised.
        value: the result of the call.
        error: the exception that the call raised, or None.
        cancelled: the cancellation of the task that waits for the call, or None.
        on_end: called when the call is over, in the thread that made the call.
    """

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self.value: Any = None
        self._wakeup = system.AutoResetEvent()
        self.is_over = False
        self.error: BaseException | None = None
        self.cancelled: asyncio.CancelledError | None = None
        self.on_end: Callable[[], object] | None = None

    def run(self) -> None:
        """Make the call in this thread, and record its outcome."""
        try:
            self.value = self._call()
        except BaseException as error:  # noqa: BLE001 - the task that waits for it gets it
            self.error = error
        self.is_over = True
        self._wakeup.set()
        on_end = self.on_end
        if on_end is not None:
            on_end()

    def wait_briefly(self, seconds: float) -> bool:
        """Block this thread until the call is over, for at most `seconds`. Return whether the call is over."""
        return self.is_over or self._wakeup.wait(seconds) or self.is_over

    def result(self) -> T:
        """Return the result of the call.

        Raises:
            CancelledError: the task was cancelled while the task waited for the call.
            BaseException: the call raised this exception, and the task was not cancelled.
        """
        error, self.error = self.cancelled or self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # breaks a reference cycle: its traceback refers to this frame
        return cast(T, self.value)


class CallExecutor:
    """Makes calls in up to `threads_max` threads. A thread ends soon after its last call.

    Args:
        threads_max: the maximal number of threads. With 0, calls are made in the loop.
        typical_call_s: how many seconds the loop blocks at most to wait for a call, before it runs other tasks.
    """

    def __init__(self, threads_max: int, typical_call_s: float) -> None:
        self._threads_max = threads_max
        self._typical_call_s = typical_call_s
        self._idle_s = IDLE_S
        self.begin()
        _all.add(self)

    def begin(self) -> None:
        """Reset to a state without threads and calls.

        A forked child calls this method, because fork(2) copies no other thread.
        """
        self._mutex = system.mutex()  # guards the three attributes below
        self._calls: deque[PendingCall[Any]] = deque()
        self._threads = 0
        self._idle: list[system.AutoResetEvent] = []

    async def run(self, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Call `function` in a thread, and return its result.

        The call is never abandoned. If this task is cancelled during the call, the task waits until the call is over.
        If the call succeeded, the task then calls `undo` with the result. At the end the task raises the cancellation.
        """
        call = await self.complete(function)
        if call.cancelled is not None and call.error is None and undo is not None:
            await self.complete(partial(undo, call.value))
        return call.result()

    async def complete(self, function: Callable[[], T]) -> PendingCall[T]:
        """Call `function` in a thread, wait until the call is over, and return the call.

        If the task that awaits this method is cancelled meanwhile, the result records the cancellation.
        """
        call = PendingCall(function)
        if not self._threads_max:
            call.run()
            return call
        try:
            self._submit(call)
            call.wait_briefly(self._typical_call_s)
            while not call.is_over:
                await self._wait_in_loop(call)
            if call.error is not None and system.is_ended_by_exit():
                system.time.sleep(system.EXIT_MAX_S)
        except BaseException:  # the loop was closed or interrupted, so this task can await nothing any more
            if not self._withdraw(call):
                call.wait_briefly(math.inf)
            raise
        return call

    async def run_cleanup(self, error: BaseException, function: Callable[[], object]) -> None:
        """Call `function` to clean up while `error` propagates. If `function` raises an `Exception`, suppress it."""
        if isinstance(error, (Exception, asyncio.CancelledError)):
            call = await self.complete(function)
            if call.error is not None and not isinstance(call.error, Exception):
                raise call.error
            if call.cancelled is not None:
                raise call.cancelled from error
        else:  # as in `complete`, nothing can be awaited
            with suppress(Exception):
                function()

    @staticmethod
    async def _wait_in_loop(call: PendingCall[Any]) -> None:
        loop = asyncio.get_running_loop()
        over = loop.create_future()
        call.on_end = partial(call_soon, loop, finish, over)
        if call.is_over:  # perhaps before `on_end` was set
            return
        try:
            await over
        except asyncio.CancelledError as error:
            call.cancelled = error

    # -- drivers: see `block_on` and `run_blocking` for those of threads -------------------------------------------

    async def wait(self, wait: Wait[T], undo: Callable[[T], object] | None = None) -> T:
        """Run `wait` and return its answer. The task sleeps in the loop; a thread checks whether there is an answer.

        If this task is cancelled, the task closes `wait` and raises the cancellation. If the cancellation comes during
        a check that finds an answer, the task first calls `undo` with this answer.
        """
        is_closed = False
        try:
            while True:
                call = await self.complete(partial(next_look, wait))
                is_closed = call.error is not None or not isinstance(call.value[0], NotYet)
                if is_closed and call.error is None and call.cancelled is not None and undo is not None:
                    await self.complete(partial(undo, call.value[0]))
                found, seconds = call.result()
                if not isinstance(found, NotYet):
                    return found
                waker = wait.waker
                assert isinstance(waker, AsyncioWaker), "`AsyncioBackend` makes the wakers of tasks"
                await waker.sleep(seconds)
        except BaseException as error:
            if not is_closed:
                await self.run_cleanup(error, wait.close)
            raise

    async def drive(self, steps: WaitSteps[T], answer: Callable[[Request], Awaitable[Any]]) -> T:
        """Run the generator `steps`, await `answer` for each of its requests, and return its result.

        If this task is cancelled, the cancellation is raised inside `steps`, where the generator waits. The generator
        undoes its unfinished steps and raises the cancellation again.
        """
        value: Any = None
        error: BaseException | None = None
        try:
            while True:
                call = await self.complete(partial(_next_request, steps, value, error))
                value = error = None
                if call.error is not None:
                    call.result()
                is_end, found = call.value
                if is_end:
                    call.result()
                    return cast(T, found)
                if call.cancelled is not None:
                    error = call.cancelled
                    continue
                try:
                    value = await answer(found)
                except (asyncio.CancelledError, Exception) as failure:  # noqa: BLE001 - raised in `steps`
                    error = failure
        finally:
            # Close the generator now, because its `finally` blocks release resources. It may be collected only much
            # later: an exception that the caller keeps refers to this frame, and so to the generator.
            steps.close()

    def dismiss(self) -> None:
        """Make each thread end as soon as there is no call left to make."""
        system.process_epoch()  # in a child of a fork(2) in C this calls `begin`
        with self._mutex:
            self._idle_s = 0.0
            while self._idle:
                self._idle.pop().set()

    def _submit(self, call: PendingCall[Any]) -> None:
        system.process_epoch()
        with self._mutex:
            self._calls.append(call)
            if self._idle:
                self._idle.pop().set()
                return
            if self._threads >= self._threads_max:
                return
            self._threads += 1
        thread = system.try_thread("fscoord-aio", self._work)
        if isinstance(thread, RuntimeError):  # no thread is left
            with self._mutex:
                self._threads -= 1
                are_others = self._threads > 0
            if not are_others:
                raise system.thread_refused("fscoord-aio", thread)

    def _withdraw(self, call: PendingCall[Any]) -> bool:
        """Remove `call` from the queue of calls. Return False if a thread has already taken `call`."""
        with self._mutex:
            try:
                self._calls.remove(call)
            except ValueError as error:
                raise_unless_absent(error)
                return False
            return True

    def _work(self) -> None:
        while True:
            # A new event for each wait of the thread: an event is removed from `_idle` before it is set.
            wakeup = system.AutoResetEvent()
            with self._mutex:
                call = self._calls.popleft() if self._calls else None
                if call is None:
                    self._idle.append(wakeup)
            if call is not None:
                call.run()
                call = None  # so that this idle thread does not keep the outcome alive
            elif not wakeup.wait(self._idle_s):
                with self._mutex:
                    if wakeup in self._idle:
                        self._idle.remove(wakeup)
                        self._threads -= 1
                        return


_all = system.reset_in_child("executors", CallExecutor.begin)


def _next_request(steps: WaitSteps[T], value: Any, error: BaseException | None) -> tuple[bool, Request | T]:
    """Send the answer `value` to the generator `steps`, or raise `error` in the generator.

    Returns:
        (True, the generator's result) if the generator has ended, or else (False, its next request).
    """
    try:
        return False, steps.send(value) if error is None else steps.throw(error)
    except StopIteration as end:
        return True, end.value
