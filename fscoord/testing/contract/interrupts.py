"""Ctrl-C: it ends every wait at once, and nothing is lost by it."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator

import pytest

from fscoord import _system as system
from fscoord._interruptions import lose_none
from fscoord.store import Store
from fscoord.testing.contract.base import ContractTests
from fscoord.testing.contract.place import HANG_S, Place, start_thread

__all__ = ["Interrupts"]


class Interrupts(ContractTests):
    """Waits that are interrupted."""

    @pytest.fixture
    def ctrl_c(self) -> Iterator[Callable[[], None]]:
        """Give a function that presses Ctrl-C; none is lost, whatever this process was told to do about it."""
        main = system.threading.main_thread().ident
        assert main is not None
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        with lose_none():
            yield lambda: signal.pthread_kill(main, signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    @pytest.mark.parametrize("how", ["get", "wait", "multi_get", "queue_pop", "barrier"])
    def test_ctrl_c_ends_a_wait_at_once_and_leaves_the_store_usable(
        self, place: Place, store: Store, ctrl_c: Callable[[], None], how: str
    ) -> None:
        calls: dict[str, Callable[[], object]] = {
            "get": lambda: store.get("k"),
            "wait": lambda: store.wait(["k"], math.inf),
            "multi_get": lambda: store.multi_get(["k"]),
            "queue_pop": lambda: store.queue_pop("k"),
            "barrier": lambda: store.barrier("k", 2),
        }
        ring = system.threading.Timer(0.05, ctrl_c)

        def interrupted() -> None:
            ring.start()
            calls[how]()

        start = system.time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        ring.join()
        assert system.time.monotonic() - start < HANG_S / 2
        other = place.open()
        store.set("after", "1")
        assert other.get("after") == b"1"
        other.set("k", "1")
        other.queue_push("k", "2")
        assert store.get("k") == b"1"
        assert store.queue_pop("k") == b"2"

    def test_a_value_pushed_while_a_pop_is_interrupted_reaches_another_pop(
        self, place: Place, store: Store, ctrl_c: Callable[[], None]
    ) -> None:
        pushing = place.open()

        def push_and_interrupt() -> None:
            pushing.queue_push("q", "1")
            ctrl_c()

        for _ in range(10):
            ring = system.threading.Timer(0.005, push_and_interrupt)
            popper = start_thread(place.open().queue_pop, "q")
            try:
                ring.start()
                store.queue_pop("q")
                ring.join()
                system.time.sleep(HANG_S)  # the signal may be handled only now
            except KeyboardInterrupt:
                pass
            ring.join()
            if store.queue_len("q") == 0:  # the interrupted pop has taken it, or the other one
                pushing.queue_push("q", "2")
            assert popper.join() in (b"1", b"2")
            while store.queue_len("q"):
                store.queue_pop("q")
