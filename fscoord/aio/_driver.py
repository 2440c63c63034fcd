"""`StoreDriver` runs the calls and waits of asyncio tasks on one store. `for_tasks` makes a coroutine of a method.

On most stores, a waiting task sleeps in the loop. On some stores a wait is a blocking call, which needs a thread. For
these stores, `SlicedWaits` divides each wait into calls of a fraction of a second. The waits of all tasks take turns in
a bounded number of threads.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Coroutine, Iterator, MappingView
from functools import partial, wraps
from types import GeneratorType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast, overload

from fscoord._arguments import key_names, keys_bytes, missing_error, missing_message
from fscoord._runtime import system
from fscoord._waiting.awaited import CHANGE_OF
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import CHANGES, ITEM, KEYS, VALUES, ArrivalRequest, Request, WaitRequest, WaitSteps
from fscoord.aio._asyncio_backend import AsyncioBackend
from fscoord.aio._executor import CALL_WAS_MADE, CallExecutor
from fscoord.errors import QueueEmptyError, StoreTimeoutError
from fscoord.recipes._cleanup import PARTS, await_end, go_on_in_thread
from fscoord.store import Store, needed_store, wait_on

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")
V = TypeVar("V")

CALL_THREADS_MAX: Final = 4
"""The most threads that make calls on one store, whatever the number of tasks."""

WAIT_THREADS_MAX: Final = 16
"""The most threads that wait on one store."""

SLICE_S: Final = 0.2
"""The longest call of `SlicedWaits`, in seconds. A cancelled wait ends after this time at the latest."""

PAUSE_S: Final = 0.02
"""How many seconds `SlicedWaits` pauses after a call that found the keys, but no answer; see `SlicedWaits._look`."""

WORDS: Final = {KEYS: "key", VALUES: "the value of key", ITEM: "a value in queue", CHANGES: CHANGE_OF}


class StoreDriver:
    """Runs calls on `store` in threads, and runs waits and the steps of recipes in the running loop.

    Attributes:
        store: the store.
        run: makes a call in a thread; see `CallExecutor.run`.
        run_cleanup: makes a call that cleans up; see `CallExecutor.run_cleanup`.
    """

    def __init__(self, store: Store) -> None:
        self.store = needed_store(store)
        usual_s = store._typical_call_s
        self._executor = CallExecutor(CALL_THREADS_MAX if usual_s else 0, usual_s if usual_s < math.inf else 0.0)
        self.run = self._executor.run
        self.run_cleanup = self._executor.run_cleanup
        self._backend: AsyncioBackend | None = None
        self._notifier: Any = None
        self._sliced_waits: SlicedWaits | None = None

    async def drive(self, steps: WaitSteps[T]) -> T:
        """Run `steps` in the running loop and return their result; see `CallExecutor.drive`."""
        return await self._executor.drive(steps, self._answer)

    async def _answer(self, request: Request) -> Any:
        if isinstance(request, ArrivalRequest):
            return await self._arrive(request)
        return await self.wait(request)

    async def _arrive(self, request: ArrivalRequest) -> bytes | None:
        self._bind_loop(asyncio.get_running_loop())
        wait = self.store._new_arrival_wait(request, self._notifier)
        if wait is not None:
            return cast("bytes | None", await self._executor.wait(wait))
        return await self.drive(self.store._arrival_steps(request))

    async def wait(self, request: WaitRequest) -> Any:
        """Wait for `request` in the running loop, and return its answer; see `WaitRequest`."""
        self._bind_loop(asyncio.get_running_loop())
        if self._sliced_waits is not None:
            return await self._sliced_waits.wait(request)
        undo = partial(self.store.queue_push, request.keys[0]) if request.kind == ITEM else None
        return await self._executor.wait(self.store._new_wait(request, self._notifier), undo)

    def _bind_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use `loop` for all waits that begin from now on."""
        if self._backend is None or not self._backend.is_of(loop):
            self._backend = AsyncioBackend(loop)
            self._notifier = self.store._notifier_for(self._backend)
            self._sliced_waits = SlicedWaits(self.store) if self._notifier is None else None

    async def close(self) -> None:
        """Close the store. Tasks that wait raise `~fscoord.StoreClosedError`."""
        try:
            if self._sliced_waits is not None:
                await self.run(self._sliced_waits.executor.dismiss)
        finally:
            await self.run(partial(_close_amid, self.store, sys.exc_info()[1]))
            self._executor.dismiss()


def _close_amid(store: Store, error: BaseException | None) -> None:
    """Close `store` in this thread, while this thread handles `error`, the exception that the task handles.

    `FileStore.close` reads `sys.exc_info` to find out whether the store is closed because of an error.
    """
    if error is None:
        store.close()
        return
    traceback = error.__traceback__
    try:
        raise error
    except type(error):
        store.close()
    finally:
        error.__traceback__ = traceback


class SlicedWaits:
    """Carries out the waits of tasks on a `store` that can't wake an event loop.

    Each wait is a series of blocking calls in threads. Each call takes at most `SLICE_S` seconds.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.executor = CallExecutor(WAIT_THREADS_MAX, 0.0)

    async def wait(self, request: WaitRequest) -> Any:
        """Wait for `request` in calls of at most `SLICE_S` seconds, and return its answer; see `WaitRequest`."""
        slow_logger = request.slow_logger
        if slow_logger is None:
            words = f"{WORDS[request.kind]} {key_names(request.keys)} in {self._store!r}"
            slow_logger = SlowWaitLogger(__name__, lambda: words)
        start = system.time.monotonic()
        while True:
            left = max(0.0, request.timeout - (system.time.monotonic() - start))
            piece = request._replace(timeout=min(left, SLICE_S), slow_logger=None)
            call = await self.executor.complete(partial(self._look, piece, slow_logger))
            if call.cancelled is not None and request.kind == ITEM and isinstance(call.value, bytes):
                await self.executor.complete(partial(self._store.queue_push, request.keys[0], call.value))
            try:
                found = call.result()
            except StoreTimeoutError as error:
                if left <= SLICE_S:
                    waited = system.time.monotonic() - start
                    message = missing_message(WORDS[request.kind], keys_bytes(error.keys), waited)
                    raise StoreTimeoutError(message, keys=error.keys, holder=error.holder, waited=waited) from error
                continue
            if found is not None:
                return found
            if left <= 0:
                missing = list(dict.fromkeys(request.keys))
                raise missing_error("", WORDS[request.kind], missing, system.time.monotonic() - start)
            await asyncio.sleep(min(left, PAUSE_S))

    def _look(self, request: WaitRequest, slow_logger: SlowWaitLogger) -> Any:
        """Make one call that waits for `request`. Runs in a thread.

        Returns:
            The answer to `request`. None if the keys exist, but the call could not read an answer: for example, a key
            has a queue instead of a value, or another consumer has taken the item.
        """
        slow_logger.warn_if_due()  # in this thread and not in the loop, because the text may need a call on the store
        if request.kind in (KEYS, CHANGES):
            return wait_on(self._store, request)
        found = self._read_now(request)
        if found is None:
            self._store.wait(request.keys, request.timeout)
            found = self._read_now(request)
        return found

    def _read_now(self, request: WaitRequest) -> Any:
        if request.kind == ITEM:
            try:
                return self._store.queue_pop(request.keys[0], block=False)
            except QueueEmptyError:
                return None
        if not self._store.check(request.keys):  # a check costs less than a read that times out
            return None
        try:
            return self._store.multi_get(request.keys, timeout=0)
        except StoreTimeoutError:
            return None


@overload
def for_tasks(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]: ...


@overload
def for_tasks(
    method: Callable[Concatenate[Any, P], T], wrap: Callable[[S, T], V]
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, V]]: ...


def for_tasks(method: Any, wrap: Callable[[Any, Any], Any] | None = None) -> Any:
    """Return a coroutine method, for a subclass of `ForTasks`, that calls the blocking `method` of ``self._core``.

    If `undone_by` or `in_steps` decorates `method`, its steps run in the event loop. Otherwise `method` runs in a
    thread, so it must not wait. If the task is cancelled, the current call is completed, the generator of the steps is
    closed, and the undo of `undone_by` is called. With `wrap`, the coroutine returns ``wrap(self, result)``.
    """
    name = method.__name__
    do, undo, passes = PARTS.get(method, (None, None, ()))

    async def call(self: Any, /, *arguments: Any, **named: Any) -> Any:
        return await self._driver.run(bound(getattr(self._core, name), arguments, named))

    async def call_in_steps(self: Any, /, *arguments: Any, **named: Any) -> Any:
        record: list[Any] = []
        over: list[object] = []
        here = None
        try:
            here = asyncio.current_task()
            hidden = (self._core,) if undo is None else (self._core, record, here)
            found = await self._driver.drive(all_steps(bound(do, arguments, named, *hidden)))
            return found if wrap is None else wrap(self, found)
        except passes:
            raise
        except BaseException as error:  # see `fscoord.recipes._cleanup`
            if undo is not None:
                try:
                    await self._driver.run_cleanup(error, partial(undo, self._core, record, here))
                except CALL_WAS_MADE:
                    raise
                except BaseException:
                    go_on_in_thread((over, undo, self._core, record, here))
                    await_end(over)
                    raise
            raise

    made: Any = wraps(method, updated=())(call if do is None else call_in_steps)
    made.__name__ = name.replace("__e", "__ae")  # `__aenter__` and `__aexit__`
    made.__code__ = made.__code__.replace(co_name=made.__name__)  # for tracebacks
    return made


def overriding(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[[object], Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]]:
    """Decorate a method: replace it by ``for_tasks(method)``.

    If a subclass assigned ``for_tasks(method)`` to a name, mypy would use the type of the base class's method instead.
    """
    return lambda _: for_tasks(method)


def bound(do: Any, arguments: tuple[Any, ...], named: dict[str, Any], *hidden: Any) -> Callable[[], Any]:
    """Return a function that calls `do` with `hidden` and the arguments. Copy arguments that other tasks may change."""
    kept = {name: _copied(value) for name, value in named.items()}
    return partial(do, *hidden, *map(_copied, arguments), **kept)


def _copied(value: Any) -> Any:
    """Copy a list, set or dict. Make a list of a view or an iterator. Return any other `value` itself."""
    if type(value) in (list, set, dict):
        return value.copy()
    is_read_later = isinstance(value, (Iterator, MappingView))
    return list(value) if is_read_later else value


def all_steps(call: Callable[[], Any]) -> WaitSteps[Any]:
    """Return steps that make `call`. If `call` returns a generator of steps, the steps of the generator follow.

    `CallExecutor.drive` runs steps in its threads, so `call` is made in a thread too.
    """
    found = call()
    return (yield from found) if type(found) is GeneratorType else found
