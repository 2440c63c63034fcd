"""Signal handlers for the command line: no signal is lost, and a command can clean up after a termination signal.

Of the library only `preemption` uses this module, for the signals that its caller names. The library does not change
other signal handlers of its caller.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from fscoord._runtime import system

RESEND_AFTER_S = 0.01
"""The delay, in seconds, before a lost signal is sent again. The signal is sent again and again until it arrives."""


class Terminated(SystemExit):
    """Raised when a signal asks this process to end. The exit code is 128 plus the signal number, as in shells.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def resend_lost_signals() -> Iterator[None]:
    """Context manager that sends a Ctrl-C or a termination signal again if Python drops the exception of its handler.

    A signal handler may run during a callback of a weak reference, a ``__del__`` or a finalizer. If the handler raises
    an exception there, Python passes the exception to `sys.unraisablehook` and continues. Such a loss is not rare,
    because each import ends with a callback (``_get_module_lock`` in importlib).
    """
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        number = _number(lost.exc_value)
        if number is None or system.threading.current_thread() is not system.threading.main_thread():
            before(lost)
            return
        # An exception raised here would be lost again, so another thread sends the signal. It is not a
        # `threading.Thread`, because starting one needs a lock that the interrupted code may hold.
        system.start_bare_thread(_resend, (number,))

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _number(error: BaseException | None) -> int | None:
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    return error.number if isinstance(error, Terminated) else None


def _resend(number: int) -> None:
    system.time.sleep(RESEND_AFTER_S)
    main = system.threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, number)  # to the main thread, which may be blocked in the kernel
    else:
        signal.raise_signal(number)


def parse_signals(text: str) -> tuple[str, ...]:
    """Parse a list of signals such as ``USR1,SIGTERM``. Return their full names: ``SIGUSR1``, ``SIGTERM``.

    Raises:
        ValueError: a name is not the name of a signal that a process can handle.
    """
    names = tuple(f"SIG{name.strip().upper().removeprefix('SIG')}" for name in text.split(",")) if text else ()
    for name in names:
        if name in {"SIGKILL", "SIGSTOP"} or name not in signal.Signals.__members__:
            raise ValueError(f"{name!r} is not the name of a signal that a process can handle")
    return names


def raise_on_termination(names: Iterable[str] = ("SIGTERM", "SIGHUP")) -> AbstractContextManager[None]:
    """Return a context manager in which the signals `names` raise `Terminated`, so that the process can clean up.

    A signal that the process ignores stays ignored (``nohup``). Outside the main thread, the context manager does
    nothing, because Python sets handlers in the main thread only.
    """

    def terminate(number: int, _: FrameType | None) -> NoReturn:
        raise Terminated(number)

    return _handling(terminate, *names)


@contextmanager
def defer_signals() -> Iterator[None]:
    """Context manager that defers each signal that has a Python handler to the end of the body. The body must be short.

    The signal handlers are replaced. The signals are not blocked in the kernel, because a process that the body starts
    would inherit the blocked signals. A signal without a Python handler is not deferred: it is ignored, or it ends this
    process at once.
    """
    deferred: list[int] = []
    # One C call marks all deferred signals as received (rule 1 in `interrupts`), and their handlers run after it. In a
    # loop, the exception of the first handler would end the loop.
    receive: partial[Any] = partial(list, map(system.receive_signal, deferred))
    try:
        with _handling(lambda number, _: deferred.append(number), *signal.Signals.__members__, only_handled=True):
            yield
    finally:
        receive()


def ignore_signals() -> None:
    """Ignore Ctrl-C, SIGTERM and SIGHUP from now on. Programs that this process starts also ignore these signals.

    Call this function only in a program that ends when its parent process ends.
    """
    for number in (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")):
        if number is not None:
            signal.signal(number, signal.SIG_IGN)


def forward_signals(call: Callable[[int], object], names: Iterable[str]) -> AbstractContextManager[None]:
    """Return a context manager in which each signal of `names` calls `call` with its number, and has no other effect.

    `call` runs in the main thread, at any point of the body. A signal that the process ignores stays ignored. Outside
    the main thread, the context manager does nothing.
    """
    return _handling(lambda number, _: call(number), *names)


@contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], object], *names: str, only_handled: bool = False
) -> Iterator[None]:
    """Context manager that makes `handler` the handler of the signals `names`.

    Signals that the process ignores, or that this system does not have, are not changed. With `only_handled`, signals
    without a Python handler are not changed either. Outside the main thread, the context manager does nothing.
    """
    if system.threading.current_thread() is not system.threading.main_thread():
        yield
        return
    before: dict[int, Any] = {}
    for number in (getattr(signal, name, None) for name in names):
        usual = None if number is None else signal.getsignal(number)
        if number is not None and (callable(usual) or (usual == signal.SIG_DFL and not only_handled)):
            before[number] = usual
    is_over = False

    def handle(number: int, frame: FrameType | None) -> None:
        # An exception of another handler may end the ``finally`` before all handlers are restored. Then this function
        # remains the handler, and passes the signal to the earlier handler.
        usual = before[number] if is_over else handler
        if callable(usual):
            usual(number, frame)
        else:
            signal.signal(number, usual)
            signal.raise_signal(number)

    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        is_over = True
        for number, usual in before.items():
            signal.signal(number, usual)
