"""Ctrl-C and SIGTERM in a whole program: none is lost, and both end it in good order.

For programs alone, such as the command and the demonstration: a library leaves its caller's signals alone.
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

AGAIN_AFTER_S = 0.01
"""How long until a lost interruption comes again: by then, as a rule, what lost it is over; if not, it comes again."""


class Terminated(SystemExit):
    """A signal is to end this process; ``number`` is the signal's, and the exit code 128 more, as shells have it."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def resend_lost_signals() -> Iterator[None]:
    """Have an interruption that Python loses come again, until something takes it; in the main thread.

    A signal handler runs wherever the main thread is, also in a weak reference's callback, in ``__del__`` or in a
    finalizer. Nobody can catch what it raises there: Python reports it to `sys.unraisablehook` and goes on. That is not
    rare: each import ends with such a callback (``_get_module_lock`` in importlib), and a wait's first moments import.
    """
    before = sys.unraisablehook

    def hook(lost: sys.UnraisableHookArgs) -> None:
        number = _number(lost.exc_value)
        if number is None or system.threading.current_thread() is not system.threading.main_thread():
            before(lost)
            return
        # Raised right here it would be lost again. A bare thread: whatever has been interrupted may hold a lock that
        # it takes to start one of `threading`.
        _thread.start_new_thread(_come_again, (number,))

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _number(error: BaseException | None) -> int | None:
    if isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    return error.number if isinstance(error, Terminated) else None


def _come_again(number: int) -> None:
    system.time.sleep(AGAIN_AFTER_S)
    main = system.threading.main_thread().ident
    if main is not None and hasattr(signal, "pthread_kill"):
        signal.pthread_kill(main, number)  # the main thread, which may be asleep in the kernel, and no other
    else:
        signal.raise_signal(number)


@contextmanager
def raise_on_termination() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, which would end this process on the spot, raise `Ended`, so that it can clean up first.

    One that is ignored, as ``nohup`` does, stays ignored. Outside of the main thread, where no handler can be set, this
    does nothing.
    """

    def leave(number: int, _: FrameType | None) -> NoReturn:
        raise Terminated(number)

    with _handling(leave, "SIGTERM", "SIGHUP"):
        yield


@contextmanager
def defer_signals() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait until what must not be left half done is done, and come then.

    For what is over soon. Blocked in the kernel, they would stay blocked in a process that is started meanwhile.
    """
    came: list[int] = []
    try:
        with _handling(lambda number, _: came.append(number), "SIGINT", "SIGTERM", "SIGHUP"):
            yield
    finally:
        for number in came:
            signal.raise_signal(number)


@contextmanager
def forward_signals(call: Callable[[int], object], names: Iterable[str]) -> Iterator[None]:
    """Have `call` called with the number of each of these signals that comes, and let it do nothing else.

    `call` runs in the main thread between any two of its steps. One that is ignored stays ignored; outside of the main
    thread this does nothing.
    """
    with _handling(lambda number, _: call(number), *names):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], object], *names: str) -> Iterator[None]:
    """Handle these signals, as far as there are such here and this is the main thread, but none that is ignored."""
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
