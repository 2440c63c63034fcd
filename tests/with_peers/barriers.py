"""The properties and the error of `threading.Barrier` on a `CyclicBarrier`, for the tests of CPython."""

from __future__ import annotations

import threading

from fscoord import BrokenBarrierError, recipes as ours


class Barrier(ours.CyclicBarrier):
    """A `CyclicBarrier` with the properties and the error of `threading`, because the tests name them."""

    broken = property(ours.CyclicBarrier.is_broken)
    n_waiting = property(ours.CyclicBarrier.n_waiting)  # type: ignore[assignment]

    def wait(self, timeout: float | None = None) -> int:
        try:
            return super().wait(timeout)
        except BrokenBarrierError as error:
            raise threading.BrokenBarrierError from error
