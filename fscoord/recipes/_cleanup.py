"""Cleanup that completes, however often Ctrl-C interrupts it: `undone_by`.

A signal handler may raise in the main thread at nearly any point. It may also raise in a block that cleans up after an
earlier signal, for example if a terminal and a launcher both send SIGINT. `undone_by` makes a method that leaves
nothing behind.

CPython runs signal handlers when it enters a Python function, when it jumps backwards, and after a C function has
returned, and at no other point. So the public method is the wrapper itself, and there is no call between its ``def``
and its ``try``: an exception of a handler there would not be caught. `go_on_in_thread` is a C function, and it is the
first call of its block, so it is called even if signals are pending. Signal handlers never run in the thread that it
starts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from types import FunctionType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from fscoord._runtime import system

__all__ = ["Undoable", "await_end", "go_on_in_thread", "undone_by"]

END: Final = "end"

WAIT_MAX_S: Final = 1.0
"""How long to wait for the thread. Its work takes microseconds, unless another process blocks the store."""

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U", bound="Undoable")
Undo = Callable[[Any, list[Any], Any], object]


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


def undone_by(
    undo: Undo, *passes: type[BaseException]
) -> Callable[[Callable[Concatenate[U, list[Any], Any, P], T]], Callable[Concatenate[U, P], T]]:
    """Decorate a method so that ``undo(self, record, here)`` is called if it raises, with an exception not in `passes`.

    The method gets two more arguments, which are not in the signature of the result: `record`, a new list, in which it
    notes what it is about to do, and `here`, an object that identifies the thread. `undo` gets the same two, perhaps in
    another thread. It may be begun twice, so it must do no harm if there is nothing left to undo.
    """

    def decorate(do: Callable[Concatenate[U, list[Any], Any, P], T]) -> Callable[Concatenate[U, P], T]:
        def method(self: U, /, *arguments: P.args, **named: P.kwargs) -> T:
            record: list[Any] = []
            over: list[object] = []
            here = self._here.__dict__
            try:
                return do(self, record, here, *arguments, **named)
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

        return _named_as(do, method)

    return decorate


def _named_as(do: Any, method: T) -> T:
    """Give `method` the name, the documentation and the signature of `do`, without the two arguments; return it."""
    code, hidden = do.__code__, do.__code__.co_varnames[1:3]
    names = (*[name for name in code.co_varnames if name not in hidden], *hidden)
    # Only `inspect.signature` looks at this function. To make a signature here would import `inspect`: 5 ms.
    shown: Any = FunctionType(code.replace(co_argcount=code.co_argcount - 2, co_varnames=names), do.__globals__)
    shown.__defaults__, shown.__kwdefaults__ = do.__defaults__, do.__kwdefaults__
    shown.__annotations__ = {name: kind for name, kind in do.__annotations__.items() if name not in hidden}
    public: Any = wraps(do)(method)  # type: ignore[arg-type]
    public.__wrapped__, public.__annotations__ = shown, shown.__annotations__
    public.__code__ = public.__code__.replace(co_name=do.__name__)  # for tracebacks
    do.__code__ = code.replace(co_name=f"do_{do.__name__}")
    return method
