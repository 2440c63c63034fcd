"""Decorators for the methods of recipes: `in_steps` for a method that waits, `undone_by` for a method that cleans up.

Each method is written once, and `fscoord.aio` makes a coroutine of the method. A method that waits is a generator of
waits. The decorated method runs the generator in the calling thread.

A signal handler may raise an exception in the main thread at nearly any point. A second signal may interrupt the
cleanup after the first, for example if a terminal and a launcher both send SIGINT. A method that `undone_by` decorates
cleans up even then.

CPython runs signal handlers at three points only: on entry to a Python function, at a backward jump, and after a C
function has returned. So the wrapper makes no call between its ``def`` and its ``try``: an exception raised there would
not be caught. `go_on_in_thread` is a C function and the first call of its block, so it is called even if signals are
pending. Signal handlers never run in the thread that it starts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from types import FunctionType, GeneratorType
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast, overload

from fscoord._runtime import system
from fscoord._waiting.awaited import Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import WaitSteps
from fscoord.store import run_blocking

END: Final = "end"

WAIT_MAX_S: Final = 1.0
"""The longest wait of `await_end`, in seconds. An undo takes microseconds, unless another process blocks the store."""

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
Undo = Callable[[Any, list[Any], Any], object]
Do = Callable[Concatenate[U, list[Any], Any, P], T]


def _run(over: list[object], undo: Callable[..., object], *arguments: Any) -> None:
    with suppress(Exception):  # the caller raises the exception that it began with
        undo(*arguments)
    over.append(END)
    for wakeup in list(over):
        if isinstance(wakeup, system.AutoResetEvent):
            wakeup.set()


go_on_in_thread: Final = partial(system.start_bare_thread, _run)
"""Call ``undo(*arguments)`` in a new thread: ``go_on_in_thread((over, undo, *arguments))``.

`over` is an empty list, to which the thread appends `END` when the call is over.
"""


def await_end(over: list[object]) -> None:
    """Wait for the end of a thread of `go_on_in_thread`, for at most `WAIT_MAX_S`.

    Args:
        over: the list that was passed to `go_on_in_thread`.
    """
    wakeup = system.AutoResetEvent()
    over.append(wakeup)  # before the test: the thread appends END first, and then sets what it finds
    if END not in over:
        wakeup.wait(WAIT_MAX_S)


class Undoable:
    """The base class of classes whose methods `undone_by` decorates."""

    # The ``__dict__`` of a `threading.local` identifies the thread. Reading it is not a call, unlike
    # `threading.get_ident`.
    _here: Any = system.threading.local()


class Decorator(Protocol):
    """The type of the decorator that `undone_by` returns.

    The decorated method lacks the two arguments after `self`. If the method returns steps, the decorated method returns
    the result of the steps.
    """

    @overload
    def __call__(self, do: Do[U, P, bool | WaitSteps[bool]], /) -> Callable[Concatenate[U, P], bool]: ...

    @overload
    def __call__(self, do: Do[U, P, WaitSteps[T]], /) -> Callable[Concatenate[U, P], T]: ...

    @overload
    def __call__(self, do: Do[U, P, T], /) -> Callable[Concatenate[U, P], T]: ...


def undone_by(undo: Undo, *passes: type[BaseException]) -> Decorator:
    """Decorate a method: if it raises an exception that is not in `passes`, call ``undo(self, record, here)``.

    The method itself gets `record` and `here` as its first arguments after `self`; a caller does not pass these
    arguments. `record` is a new list, to which the method appends each step before it takes the step. `here` identifies
    the calling thread or task. If the method returns a generator of `WaitSteps`, the decorated method runs the
    generator and returns the generator's result. `undo` may run in another thread. `undo` may also run twice, so it
    must be idempotent.
    """

    def decorate(do: Any) -> Any:
        def method(self: Any, /, *arguments: Any, **named: Any) -> Any:
            record: list[Any] = []
            over: list[object] = []
            here = self._here.__dict__
            try:
                found = do(self, record, here, *arguments, **named)
                return run_blocking(self._store, found) if type(found) is GeneratorType else found
            except passes:
                raise
            except BaseException:
                try:
                    undo(self, record, here)
                except BaseException:
                    go_on_in_thread((over, undo, self, record, here))
                    await_end(over)
                    raise
                raise

        PARTS[method] = do, undo, passes
        return _named_as(do, method, 2)

    return cast("Decorator", decorate)


def in_steps(do: Callable[Concatenate[U, P], WaitSteps[T]]) -> Callable[Concatenate[U, P], T]:
    """Decorate a method that returns a generator of `WaitSteps`: run the generator in the calling thread."""

    def method(self: Any, /, *arguments: P.args, **named: P.kwargs) -> T:
        return run_blocking(self._store, do(self, *arguments, **named))

    PARTS[method] = do, None, ()
    return _named_as(do, method, 0)


def as_one_wait(
    awaited: Awaited, describe: Callable[[], str], steps: Callable[[SlowWaitLogger], WaitSteps[T]]
) -> WaitSteps[T]:
    """Run several requests to wait as one wait, which is logged once and shown to other processes as `awaited`.

    Args:
        awaited: the purpose of the wait.
        describe: returns a text for the warning about a slow wait, which names the awaited object.
        steps: called with a logger; returns the steps. All requests of the steps must use this logger.
    """
    slow_logger = SlowWaitLogger(__name__, describe, awaited=awaited)
    try:
        return (yield from steps(slow_logger))
    finally:
        slow_logger.end()


PARTS: Final[dict[Any, tuple[Callable[..., Any], Undo | None, tuple[type[BaseException], ...]]]] = {}
"""Maps each decorated method to the undecorated method, its `undo` and its `passes`. `fscoord.aio` needs these."""


def _named_as(do: Any, method: T, hidden: int) -> T:
    """Give `method` the name, the documentation and the signature of `do`, and return `method`.

    The signature omits the first `hidden` arguments after `self`. The return type is the type of the result of the
    steps.
    """
    code, given = do.__code__, do.__code__.co_varnames[1 : 1 + hidden]
    names = (*[name for name in code.co_varnames if name not in given], *given)
    # Only `inspect.signature` looks at this function. To make a signature here would import `inspect`: 5 ms.
    shown: Any = FunctionType(code.replace(co_argcount=code.co_argcount - hidden, co_varnames=names), do.__globals__)
    shown.__defaults__, shown.__kwdefaults__ = do.__defaults__, do.__kwdefaults__
    shown.__annotations__ = {name: kind for name, kind in do.__annotations__.items() if name not in given}
    result = do.__annotations__["return"]
    shown.__annotations__["return"] = result.partition("WaitSteps[")[2][:-1] or result
    public: Any = wraps(do)(method)  # type: ignore[arg-type]
    public.__wrapped__, public.__annotations__ = shown, shown.__annotations__
    public.__code__ = public.__code__.replace(co_name=do.__name__)  # for tracebacks
    do.__code__ = code.replace(co_name=f"do_{do.__name__}")
    return method
