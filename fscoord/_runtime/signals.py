"""Signal handling for programs: no signal is lost, and a termination signal lets the program clean up.

Only programs use this module, such as the command line and the demonstration. The library does not change its caller's
signal handlers.
"""

from __future__ import annotations

import _thread
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from fscoord._runtime import system

__all__ = ["Terminated", "defer_signals", "forward_signals", "raise_on_termination", "resend_lost_signals"]

RESEND_AFTER_S = 0.01
"""The delay in seconds before a lost signal is sent again. This is repeated until the signal arrives."""


class Terminated(SystemExit):
    """Raised when a signal asks this process to end. The exit code is 128 plus the signal's number, as in shells.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def resend_lost_signals() -> Iterator[None]:
    """Within the ``with``, send a Ctrl-C or a termination signal again if Python drops its exception.

    A signal handler may run in the main thread during a weak reference's callback, a ``__del__`` or a finalizer. An
    exception that it raises there cannot be caught: Python passes it to `sys.unraisablehook` and continues. This is not
    rare, because each import ends with such a callback (``_get_module_lock`` in importlib).
    """
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        number = _number(lost.exc_value)
        if number is None or system.threading.current_thread() is not system.threading.main_thread():
            before(lost)
            return
        # An exception raised here would be lost again, so another thread sends the signal. It is a bare thread, because
        # the interrupted code may hold the lock that starting a `threading.Thread` needs.
        _thread.start_new_thread(_resend, (number,))

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


@contextmanager
def raise_on_termination() -> Iterator[None]:
    """Within the ``with``, SIGTERM and SIGHUP raise `Terminated`, so that the process cleans up before it ends.

    An ignored signal stays ignored (``nohup``). In any thread but the main one this does nothing, because Python sets
    handlers in the main thread only.
    """

    def terminate(number: int, _: FrameType | None) -> NoReturn:
        raise Terminated(number)

    with _handling(terminate, "SIGTERM", "SIGHUP"):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Defer Ctrl-C, SIGTERM and SIGHUP to the end of the ``with``, whose body must be short.

    They are not blocked in the kernel, because a process that is started meanwhile would inherit that.
    """
    deferred: list[int] = []
    try:
        with _handling(lambda number, _: deferred.append(number), "SIGINT", "SIGTERM", "SIGHUP"):
            yield
    finally:
        for number in deferred:
            signal.raise_signal(number)


@contextmanager
def forward_signals(call: Callable[[int], object], names: Iterable[str]) -> Iterator[None]:
    """Within the ``with``, each of the signals `names` calls `call` with its number and has no other effect.

    `call` runs in the main thread, at any point of the body. An ignored signal stays ignored. In any thread but the
    main one this does nothing.
    """
    with _handling(lambda number, _: call(number), *names):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object], *names: str) -> Iterator[None]:
    """Set `handler` for the signals `names` that exist here and are not ignored; in the main thread only."""
    if system.threading.current_thread() is not system.threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (getattr(signal, name, None) for name in names) if number}
    try:
        for number, usual in before.items():
            if usual not in (signal.SIG_IGN, None):
                signal.signal(number, handler)
        yield
    finally:
        for number, usual in before.items():
            if usual is not None:
                signal.signal(number, usual)
