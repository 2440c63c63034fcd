"""The decorators of a recipe's methods: `in_steps`, for a method that waits, and `undone_by`, for one that cleans up.

`as_one_wait` makes one wait of several requests.

A method is written once, and `fscoord.aio` makes a coroutine of it. The decorated method does its work in this thread.

A signal handler may raise in the main thread at nearly any point. It may also raise in a block that cleans up after an
earlier signal, for example if a terminal and a launcher both send SIGINT. `undone_by` makes a method that leaves
nothing behind.

CPython runs signal handlers when it enters a Python function, when it jumps backwards, and after a C function has
returned, and at no other point. So the public method is the wrapper itself, and makes no call between its ``def`` and
its ``try``: an exception of a handler there would not be caught. `go_on_in_thread` is a C function, and it is the
first call of its block, so it is called even if signals are pending. Signal handlers never run in the thread that it
starts.
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
"""How long to wait for the thread. Its work takes microseconds, unless another process blocks the store."""

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
"""Call `undo` in a thread: ``go_on_in_thread((over, undo, *arguments))``, where `over` is an empty list."""


def await_end(over: list[object]) -> None:
    """Wait up to `WAIT_MAX_S` for the end of the thread that was given `over`.

    So the undo is normally complete before the caller raises.
    """
    wakeup = system.AutoResetEvent()
    over.append(wakeup)  # before the test: the thread appends END first, and then sets what it finds
    if END not in over:
        wakeup.wait(WAIT_MAX_S)


class Undoable:
    """The base class of a class with methods that are `undone_by` a function."""

    # Its ``__dict__`` is another object in each thread, and to get it is not a call, unlike `threading.get_ident`.
    _here: Any = system.threading.local()


class Decorator(Protocol):
    """The decorator that `undone_by` returns: it hides two arguments, and the generator if there is one."""

    @overload
    def __call__(self, do: Do[U, P, bool | WaitSteps[bool]], /) -> Callable[Concatenate[U, P], bool]: ...

    @overload
    def __call__(self, do: Do[U, P, WaitSteps[T]], /) -> Callable[Concatenate[U, P], T]: ...

    @overload
    def __call__(self, do: Do[U, P, T], /) -> Callable[Concatenate[U, P], T]: ...


def undone_by(undo: Undo, *passes: type[BaseException]) -> Decorator:
    """Decorate a method: if it raises an exception that is not in `passes`, ``undo(self, record, here)`` is called.

    The method gets two more arguments, which are not in the signature of the result. `record` is a new list, to which
    the method adds each step that it is about to take. `here` is an object that identifies the thread or the task. If
    the method returns a generator of `WaitSteps`, these are carried out, and their result is returned. `undo` gets the
    same two arguments, perhaps in another thread. It may be begun twice, so it must do no harm if there is nothing left
    to undo.
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
    """Decorate a method that returns a generator of `WaitSteps`. The result carries them out in its caller's thread."""

    def method(self: Any, /, *arguments: P.args, **named: P.kwargs) -> T:
        return run_blocking(self._store, do(self, *arguments, **named))

    PARTS[method] = do, None, ()
    return _named_as(do, method, 0)


def as_one_wait(
    awaited: Awaited, describe: Callable[[], str], steps: Callable[[SlowWaitLogger], WaitSteps[T]]
) -> WaitSteps[T]:
    """Carry out `steps` as one wait, which is logged, and shown to other processes as `awaited`.

    Args:
        awaited: the purpose of the wait.
        describe: returns the text that a warning has for the object of the wait.
        steps: makes the steps, whose requests have the given logger.
    """
    slow_logger = SlowWaitLogger(__name__, describe, awaited=awaited)
    try:
        return (yield from steps(slow_logger))
    finally:
        slow_logger.end()


PARTS: Final[dict[Any, tuple[Callable[..., Any], Undo | None, tuple[type[BaseException], ...]]]] = {}
"""The parts of each decorated method: the given method, its `undo` and its `passes`. `fscoord.aio` uses them."""


def _named_as(do: Any, method: T, hidden: int) -> T:
    """Give `method` the name, the documentation and the signature of `do`, and return it.

    The signature lacks the first `hidden` arguments after `self`, and has the result of the steps.
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
