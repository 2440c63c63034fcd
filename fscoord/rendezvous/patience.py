"""`Patience`: how long one call of ``next_rendezvous`` waits for what, on this node's own clock."""

from __future__ import annotations

from fscoord._arguments import to_seconds
from fscoord._runtime import system
from fscoord.rendezvous.settings import RendezvousTimeout
from fscoord.rendezvous.state import Limits, State

__all__ = ["SLOW_LOOK_S", "Patience"]

SLOW_LOOK_S = 1.0
"""How often a waiting node looks though nobody woke it: whoever changed the state may have died before it could."""


class Patience:
    """The time limits of one call of `next_rendezvous`, on this node's own clock."""

    def __init__(self, limits: Limits, timeout: RendezvousTimeout) -> None:
        self._limits = limits
        self._join = to_seconds(timeout.join)
        self._last_call = to_seconds(timeout.last_call)
        self._deadline = system.time.monotonic() + self._join
        self._forming: tuple[int, float] | None = None
        self._enough: tuple[int, float] | None = None

    def look(self, state: State) -> tuple[bool, bool]:
        """Return whether the last call is over, and whether places have been kept for long enough."""
        now = system.time.monotonic()
        is_forming = not state.complete
        self._forming = _mark(self._forming, state.round, now, is_forming)
        self._enough = _mark(self._enough, state.round, now, is_forming and self._has_enough(state))
        return self._is_past(self._enough, now), self._is_past(self._forming, now)

    def is_over(self, state: State, node: str) -> bool:
        """Return whether it is time to give up; as long as `node` is spare it is not."""
        now = system.time.monotonic()
        if state.complete and node in state.waiting and len(state.participants) >= self._limits.most:
            self._deadline = now + self._join
        return now >= self._deadline

    def left(self) -> float:
        """Return how many seconds it is, at most, until something has to be done."""
        now = system.time.monotonic()
        marks = [mark[1] + self._last_call for mark in (self._forming, self._enough) if mark is not None]
        ends = [end - now for end in (*marks, self._deadline) if end > now]
        return max(0.0, min([SLOW_LOOK_S, *ends]))

    def _has_enough(self, state: State) -> bool:
        return len(state.participants) >= self._limits.least

    def _is_past(self, mark: tuple[int, float] | None, now: float) -> bool:
        return mark is not None and now >= mark[1] + self._last_call


def _mark(mark: tuple[int, float] | None, number: int, now: float, holds: bool) -> tuple[int, float] | None:
    """Return since when the condition `holds` in round `number`, or None."""
    if not holds:
        return None
    return mark if mark is not None and mark[0] == number else (number, now)
