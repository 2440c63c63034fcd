"""`CallExecutor`: threads that make a store's calls for a loop, and the loop's drivers of waits and of steps.

A call may have to wait, for a server or for the log's lock while another process holds it. So all calls are made in
threads, unless the store only uses memory. A thread that reports its result through the loop takes longer than a short
call. So where calls usually take microseconds, the loop first blocks until the thread is done, for a millisecond at
most.
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
"""The exceptions of `CallExecutor.run` after which the call has certainly been made. After any other exception, such as
that of a Ctrl-C or of the end of the loop, the call may not have been made."""

IDLE_S: Final = 1.0
"""How long a thread waits for the next call before it ends, in seconds."""

T = TypeVar("T")


class PendingCall(Generic[T]):
    """One call, and its outcome.

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
        """Wait in this thread for the end of the call, at most `seconds`; return whether the call is over."""
        return self.is_over or self._wakeup.wait(seconds) or self.is_over

    def result(self) -> T:
        """Return the result of the call.

        Raises:
            CancelledError: the task was cancelled while it waited for the call.
            BaseException: the exception of the call, if the task was not cancelled.
        """
        error, self.error = self.cancelled or self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which keeps this frame
        return cast(T, self.value)


class CallExecutor:
    """A bounded number of threads, which exist only while there are calls to make. A forked child starts its own.

    Args:
        threads_max: the most threads. With 0 the calls are made in the loop.
        typical_call_s: for how many seconds the loop blocks until a call is over, before it runs other tasks.
    """

    def __init__(self, threads_max: int, typical_call_s: float) -> None:
        self._threads_max = threads_max
        self._typical_call_s = typical_call_s
        self._idle_s = IDLE_S
        self.begin()
        _all.add(self)

    def begin(self) -> None:
        """Set the state without threads and calls: at the beginning, and in a forked child."""
        self._mutex = system.threading.Lock()  # guards the calls, the count of the threads, and the idle ones
        self._calls: deque[PendingCall[Any]] = deque()
        self._threads = 0
        self._idle: list[system.AutoResetEvent] = []

    async def run(self, function: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Call `function` in a thread, and return its result.

        The call is never abandoned. If this task is cancelled meanwhile, it waits for the end of the call, and calls
        `undo` with the result of the call, if there is one. Then it raises the cancellation.
        """
        call = await self.complete(function)
        if call.cancelled is not None and call.error is None and undo is not None:
            await self.complete(partial(undo, call.value))
        return call.result()

    async def complete(self, function: Callable[[], T]) -> PendingCall[T]:
        """Call `function` and return the outcome. A cancellation of this task does not end the call."""
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
        except BaseException:  # the loop is closed, or was interrupted: nothing can be awaited any more
            if not self._withdraw(call):
                call.wait_briefly(math.inf)
            raise
        return call

    async def run_cleanup(self, error: BaseException, function: Callable[[], object]) -> None:
        """Call `function` to clean up, while `error` is being raised. An `Exception` of `function` is dropped."""
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
        """Carry out `wait` and return its answer. The task sleeps in the loop, and each look is made in a thread.

        If this task is cancelled, it closes the wait. If a look has found an answer meanwhile, the task calls `undo`
        with this answer. Then it raises the cancellation.
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
                assert isinstance(waker, AsyncioWaker), "`AsyncioBackend` made it"
                await waker.sleep(seconds)
        except BaseException as error:
            if not is_closed:
                await self.run_cleanup(error, wait.close)
            raise

    async def drive(self, steps: WaitSteps[T], answer: Callable[[Request], Awaitable[Any]]) -> T:
        """Run the generator `steps`, await `answer` for each of its requests, and return its result.

        A cancellation is raised inside `steps`, at the point where the generator waits. There the generator undoes its
        unfinished steps, and raises the cancellation again.
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
            # Close the generator now, and not when it is collected: its `finally` blocks release its resources.
            # An exception that the caller keeps also keeps this frame, and the frame keeps the generator.
            steps.close()

    def dismiss(self) -> None:
        """Make each thread end as soon as there is no call to make."""
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
        """Remove `call` from the calls to make, unless a thread has begun it; return whether it was removed."""
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
                call = None  # only the task that waits for it keeps its outcome
            elif not wakeup.wait(self._idle_s):
                with self._mutex:
                    if wakeup in self._idle:
                        self._idle.remove(wakeup)
                        self._threads -= 1
                        return


_all = system.reset_in_child("executors", CallExecutor.begin)


def _next_request(steps: WaitSteps[T], value: Any, error: BaseException | None) -> tuple[bool, Request | T]:
    """Send the answer `value` to the generator `steps`, or raise `error` in it.

    Returns:
        Whether the generator has ended, and its result if it has, or else its next request.
    """
    try:
        return False, steps.send(value) if error is None else steps.throw(error)
    except StopIteration as end:
        return True, end.value
