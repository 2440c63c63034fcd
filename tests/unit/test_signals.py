"""Ctrl-C and SIGTERM: a signal that Python loses is repeated, and the process ends."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import FrameType

import pytest
from support.interrupts import At, interrupt

from fscoord._runtime import system
from fscoord._runtime.signals import Terminated, defer_signals, raise_on_termination, resend_lost_signals

HANG_S = 60


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """Python loses an exception in a callback of the collector, and libraries of the tests install such callbacks."""
    gc.disable()
    yield
    gc.enable()


class Thing:
    """Something that a weak reference can refer to."""


def interrupt_where_it_is_lost(number: int) -> None:
    """Let a signal arrive in the callback of a weak reference, as happens at the end of every import."""
    thing = Thing()
    kept = weakref.ref(thing, lambda _: signal.raise_signal(number))
    del thing
    assert kept() is None


def lose_then_wait(number: int) -> None:
    interrupt_where_it_is_lost(number)
    threading.Event().wait(HANG_S)


@contextmanager
def seen_unraisable(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    seen: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr(sys, "unraisablehook", lambda lost: seen.append(lost.exc_value))
        yield seen


def test_exception_in_a_weak_reference_callback_is_lost_by_python(monkeypatch):
    """If this fails, Python has changed, and `resend_lost_signals` may go."""
    with seen_unraisable(monkeypatch) as seen:
        interrupt_where_it_is_lost(signal.SIGINT)
    assert [type(error) for error in seen] == [KeyboardInterrupt]


def test_ctrl_c_that_was_lost_is_resent_and_ends_a_wait(monkeypatch):
    with seen_unraisable(monkeypatch) as seen, resend_lost_signals():
        with pytest.raises(KeyboardInterrupt):
            lose_then_wait(signal.SIGINT)
        assert seen == []


def test_ctrl_c_that_is_lost_twice_is_resent_again(monkeypatch):
    """Whatever comes first is lost, and so is what comes for it, wherever the thread is then."""
    left = 3

    def handler(number, frame):
        nonlocal left
        left -= 1
        if left:
            interrupt_where_it_is_lost(signal.SIGUSR1)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler), signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with seen_unraisable(monkeypatch) as seen, resend_lost_signals():
            with pytest.raises(KeyboardInterrupt):
                lose_then_wait(signal.SIGUSR1)
            assert (left, seen) == (0, [])
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGUSR1, before[1])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_signal_that_was_lost_is_resent(monkeypatch, number):
    with seen_unraisable(monkeypatch) as seen, resend_lost_signals(), raise_on_termination():
        with pytest.raises(Terminated) as caught:
            lose_then_wait(number)
        assert (caught.value.number, caught.value.code, seen) == (number, 128 + number, [])


def test_unraisable_errors_other_than_signals_reach_the_previous_hook(monkeypatch):
    def fail(_: object) -> None:
        raise error

    error = SystemExit(3)
    with seen_unraisable(monkeypatch) as seen:
        with resend_lost_signals():
            thing = Thing()
            kept = weakref.ref(thing, fail)
            del thing
            assert kept() is None
            assert seen == [error]
        interrupt_where_it_is_lost(signal.SIGINT)
        assert len(seen) == 2, "what resend_lost_signals has put there must not stay"


def test_keyboard_interrupt_raised_by_another_thread_is_not_resent(monkeypatch):
    with seen_unraisable(monkeypatch) as seen, resend_lost_signals():

        def call() -> None:
            thing = Thing()
            weakref.finalize(thing, _raise, KeyboardInterrupt())
            del thing

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert [type(error) for error in seen] == [KeyboardInterrupt]


def _raise(error: BaseException) -> None:
    raise error


def test_signals_that_are_ignored_stay_ignored_and_handlers_are_restored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        handler = signal.getsignal(signal.SIGTERM)
        with raise_on_termination():
            signal.raise_signal(signal.SIGHUP)
            with pytest.raises(SystemExit) as caught:
                signal.raise_signal(signal.SIGTERM)
        assert caught.value.code == 143
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) == handler
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_is_deferred_until_the_block_is_done(number):
    done = []

    def call() -> None:
        with defer_signals():
            signal.raise_signal(number)
            done.append(number)

    with raise_on_termination(), pytest.raises((KeyboardInterrupt, Terminated)) as caught:
        call()
    assert done == [number]
    assert caught.type is (KeyboardInterrupt if number == signal.SIGINT else Terminated)


def test_deferred_signal_is_raised_after_an_error_with_it_as_context():
    def call() -> None:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
            raise LookupError("enough")

    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    assert isinstance(caught.value.__context__, LookupError)


def test_deferred_signals_are_both_handled_at_the_end():
    def handle(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    seen: list[int] = []
    usual, numbers = handlers(), [signal.SIGINT, signal.SIGTERM]
    for number in numbers:
        signal.signal(number, handle)
    try:
        with suppress(KeyboardInterrupt):
            with suppress(KeyboardInterrupt), defer_signals():
                for number in numbers:
                    signal.raise_signal(number)
                assert seen == []
            time.sleep(0)  # a point at which the second one raises, if it has not yet
    finally:
        restore(usual)
    assert sorted(seen) == numbers


class AtAnyPoint:
    """Send the signal `number` at the `point`-th point after `begin`, also in the modules of Python."""

    def __init__(self, point: int, number: int) -> None:
        self._left = point
        self._number = number
        self.where = ""
        self.begin = partial(sys.setprofile, self._event)

    def _event(self, frame: FrameType, event: str, _: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            self._left -= 1
            if self._left == 0:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {event}"
                signal.raise_signal(self._number)


@pytest.mark.parametrize("later", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_after_an_interrupted_end_of_a_deferral_is_not_lost(first, later):
    """The end is interrupted at each of its points. The block is over then, so nothing would send what is deferred."""
    usual = handlers()
    for point in count(1):
        at = AtAnyPoint(point, first)
        try:
            with raise_on_termination():
                try:
                    with defer_signals():
                        at.begin()
                except (KeyboardInterrupt, Terminated):
                    pass
                finally:
                    sys.setprofile(None)
                with pytest.raises((KeyboardInterrupt, Terminated)) as caught:
                    signal.raise_signal(later)
        finally:
            restore(usual)
        error = caught.value
        assert (error.number if isinstance(error, Terminated) else signal.SIGINT) == later, at.where
        if not at.where:
            break
    assert point > 10


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_deferred_signal_survives_another_one_at_the_end(first):
    """Whichever of the two raises first, the other one follows."""

    def note(number: int, _: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    usual, second = handlers(), signal.SIGHUP
    for point in count(1):
        seen: list[int] = []
        at = AtAnyPoint(point, second)
        signal.signal(first, note)
        signal.signal(second, note)
        try:
            with suppress(KeyboardInterrupt):
                try:
                    with defer_signals():
                        signal.raise_signal(first)
                        at.begin()
                finally:
                    sys.setprofile(None)
            with suppress(KeyboardInterrupt):
                time.sleep(0)  # a point at which the second one raises, if it has not yet
        finally:
            restore(usual)
        assert sorted(seen) == sorted([first, second] if at.where else [first]), at.where
        if not at.where:
            break
    assert point > 10


def handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}


def restore(usual: dict[int, object]) -> None:
    for number, handler in usual.items():
        signal.signal(number, handler)


def test_ignored_signal_is_not_deferred():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with defer_signals():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_signal_handlers_are_not_changed_outside_the_main_thread():
    seen: list[object] = []

    def call() -> None:
        with raise_on_termination():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGTERM)]


def test_import_of_the_library_installs_no_signal_handler_or_hook():
    code = (
        "import signal, sys; hook, handlers = sys.unraisablehook, [signal.getsignal(n) for n in range(1, 32)]\n"
        "import fscoord, fscoord.demo, fscoord.cli.app\n"
        "assert sys.unraisablehook is hook\n"
        "assert [signal.getsignal(n) for n in range(1, 32)] == handlers\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


def test_interrupted_read_of_a_file_of_proc_leaves_no_open_file() -> None:
    for number in count(1):
        at = At(number, interrupt)
        with warnings.catch_warnings(record=True) as seen, suppress(KeyboardInterrupt), at:
            warnings.simplefilter("always")
            system.start_time()
        assert not seen, f"{at.where}: {seen[0].message}"
        if not at.reached:
            break
    assert number > 2
