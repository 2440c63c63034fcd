"""Ctrl-C: it ends every wait at once, and nothing is lost by it."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from fscoord._runtime import system
from fscoord._runtime.signals import lose_none
from fscoord.store import Store
from fscoord.testing.contract.base import ContractTests
from fscoord.testing.contract.place import HANG_S, Place, start_thread, until

__all__ = ["CtrlC", "Interrupts"]


class CtrlC:
    """A Ctrl-C that raises in one call alone: one that comes after that call would end the whole run of pytest.

    In the ``with`` it is this object that handles SIGINT.
    """

    def __init__(self) -> None:
        self._is_armed = self._has_begun = self._has_come = False
        self._raised = 0
        self._before: object = None
        self._again = lose_none()

    def __enter__(self) -> CtrlC:
        self._before = signal.signal(signal.SIGINT, self._handle)
        self._again.__enter__()
        self._hook, sys.unraisablehook = sys.unraisablehook, self._lost
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook
        self._again.__exit__(None, None, None)
        signal.signal(signal.SIGINT, self._before)  # type: ignore[arg-type]

    def press(self) -> None:
        """Have the signal come to the main thread, from another thread, once that has begun the call in `ends`."""
        main = system.threading.main_thread().ident
        assert main is not None
        until(lambda: self._has_begun)
        self._has_begun = False
        signal.pthread_kill(main, signal.SIGINT)

    def ends(self, call: Callable[[], object]) -> bool:
        """Make `call`, during which it is pressed; return whether it ended that call, or came too late for it."""
        self._has_come, self._raised = False, 0
        try:
            try:
                self._is_armed = self._has_begun = True
                call()
            finally:
                self._is_armed = False
        except KeyboardInterrupt:
            self._is_armed = False  # it may have come just before the same line above
            return True
        until(lambda: self._has_come)
        assert not self._raised, "the store caught a KeyboardInterrupt and went on"
        return False

    def _handle(self, *_: object) -> None:
        self._has_come = True
        if self._is_armed:
            self._raised += 1
            raise KeyboardInterrupt

    def _lost(self, lost: sys.UnraisableHookArgs) -> None:
        if isinstance(lost.exc_value, KeyboardInterrupt):
            self._raised -= 1  # raised in a finalizer, where Python drops it: it comes again
        self._hook(lost)


class Interrupts(ContractTests):
    """Waits that are interrupted."""

    @pytest.fixture
    def ctrl_c(self) -> Iterator[CtrlC]:
        """Give a Ctrl-C; none is lost, whatever this process was told to do about it."""
        with CtrlC() as ctrl_c:
            yield ctrl_c

    @pytest.mark.parametrize("how", ["get", "wait", "multi_get", "queue_pop", "barrier"])
    def test_ctrl_c_ends_a_wait_at_once_and_leaves_the_store_usable(
        self, place: Place, store: Store, ctrl_c: CtrlC, how: str
    ) -> None:
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: store.get("k"),
            "wait": lambda: store.wait(["k"], math.inf),
            "multi_get": lambda: store.multi_get(["k"]),
            "queue_pop": lambda: store.queue_pop("k"),
            "barrier": lambda: store.barrier("k", 2),
        }
        rescuer = place.open()

        def rescue() -> None:
            with suppress(Exception):  # whatever the store does, what it does wrong is what is told
                rescuer.set("k", "1")
                rescuer.queue_push("k", "2")
                rescuer.barrier("k", 2)

        ring = system.threading.Timer(0.05, ctrl_c.press)
        end = system.threading.Timer(HANG_S / 2, rescue)
        ring.daemon = end.daemon = True
        ring.start()
        end.start()
        try:
            is_ended = ctrl_c.ends(calls[how])
        finally:
            end.cancel()
            ring.join()
        assert is_ended, f"{how} did not wait until Ctrl-C came"
        other = place.open()
        store.set("after", "1")
        assert other.get("after") == b"1"
        other.set("k", "1")
        other.queue_push("k", "2")
        assert store.get("k") == b"1"
        assert store.queue_pop("k") == b"2"

    # The signal may come in the end of an object, such as a file, where Python reports it and drops it. It comes again.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_a_value_pushed_while_a_pop_is_interrupted_reaches_another_pop(
        self, place: Place, store: Store, ctrl_c: CtrlC
    ) -> None:
        pushing = place.open()

        def push_and_interrupt() -> None:
            pushing.queue_push("q", "1")
            ctrl_c.press()

        for _ in range(10):
            ring = system.threading.Timer(0.005, push_and_interrupt)
            popper = start_thread(place.open().queue_pop, "q")
            ring.start()
            try:
                ctrl_c.ends(lambda: store.queue_pop("q"))
            finally:
                ring.join()
            if store.queue_len("q") == 0:  # the interrupted pop has taken it, or the other one
                pushing.queue_push("q", "2")
            assert popper.join() in (b"1", b"2")
            for _ in range(store.queue_len("q")):
                store.queue_pop("q", block=False)
            assert store.queue_len("q") == 0
