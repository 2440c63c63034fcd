"""Is a history of overlapping calls linearizable? Wing and Gong's search, with Lowe's memory of what was tried.

J. M. Wing and C. Gong, "Testing and verifying concurrent objects" (1993): take any call that nothing finished before it
forbids, let it have its effect, go on; take it back when its result is not what the object would have said. G. Lowe,
"Testing for linearizability" (2017): never enter a pair of (calls done, state) twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

LINEARIZABLE, BROKEN, UNDECIDED = "linearizable", "not linearizable", "undecided"
BUDGET = 10_000_000
"""How many steps are tried before a history is given up as undecided, which a test must count as a failure."""


class Unknown:
    """The result of a call that never returned."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = Unknown()


class Call(NamedTuple):
    """One operation: when it was called, when it returned (`math.inf`: never, it may have had its effect or not)."""

    start: float
    end: float
    operation: tuple[Any, ...]
    result: Any


Model = Callable[[Any, tuple[Any, ...]], tuple[Hashable, Any]]
"""``model(state, operation)`` is what the object does alone: its next state and the result."""


class _Entry:
    """A call or a return, in a list that is ordered by time and doubly linked, so that a call can be taken out and put
    back in constant time.
    """

    __slots__ = ("after", "before", "bit", "call", "partner")

    def __init__(self, call: Call | None, bit: int) -> None:
        self.call, self.bit = call, bit
        self.before: _Entry | None = None
        self.after: _Entry | None = None
        self.partner: _Entry | None = None  # of a call: its return

    def take_out(self) -> None:
        self.before.after = self.after
        if self.after:
            self.after.before = self.before

    def put_back(self) -> None:
        self.before.after = self
        if self.after:
            self.after.before = self


def check(calls: Iterable[Call], model: Model, state: Hashable, budget: int = BUDGET) -> str:
    """Return whether `calls` could have been made one after the other on an object that began in `state`.

    A call takes effect between its start and its end; of two at the same instant either may come first.
    """
    calls = list(calls)
    head = _linked(calls)
    unreturned = sum(call.end != math.inf for call in calls)
    done = 0
    tried: set[tuple[int, Hashable]] = set()
    path: list[tuple[_Entry, Hashable]] = []
    entry = head.after
    while unreturned:
        budget -= 1
        if budget < 0:
            return UNDECIDED
        if entry is not None and entry.call is not None:
            following, result = model(state, entry.call.operation)
            fits = entry.call.result is UNKNOWN or entry.call.result == result
            if fits and (done | entry.bit, following) not in tried:
                tried.add((done | entry.bit, following))
                path.append((entry, state))
                state, done = following, done | entry.bit
                entry.take_out()
                if entry.partner is not None:
                    entry.partner.take_out()
                    unreturned -= 1
                entry = head.after
            else:
                entry = entry.after
            continue
        # A return whose call has had no effect yet: one of those before it must be another.
        if not path:
            return BROKEN
        entry, state = path.pop()
        done &= ~entry.bit
        if entry.partner is not None:
            entry.partner.put_back()
            unreturned += 1
        entry.put_back()
        entry = entry.after
    return LINEARIZABLE


def _linked(calls: list[Call]) -> _Entry:
    timed = []
    for number, call in enumerate(calls):
        assert call.start <= call.end
        entry = _Entry(call, 1 << number)
        timed.append((call.start, 0, number, entry))
        if call.end != math.inf:
            entry.partner = _Entry(None, 0)
            timed.append((call.end, 1, number, entry.partner))
    head = last = _Entry(None, 0)
    for *_, entry in sorted(timed, key=lambda item: item[:3]):
        last.after, entry.before = entry, last
        last = entry
    return head


def check_each(calls: Iterable[tuple[str, Call]], models: Callable[[str], tuple[Model, Hashable]]) -> dict[str, str]:
    """Check the calls of each key by itself: a history is linearizable if and only if each object's part of it is
    (Herlihy and Wing, 1990). Return the verdict of each.
    """
    parts: dict[str, list[Call]] = {}
    for key, call in calls:
        parts.setdefault(key, []).append(call)
    return {key: check(part, *models(key)) for key, part in parts.items()}
