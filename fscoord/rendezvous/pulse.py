"""`Pulse`: who lives, judged by keep-alives that change or do not, on this node's own clock; no input or output.

A remote clock says nothing here: a node lives because its counter was seen to change, and is dead when a number of
looks, an interval apart, found it as it was. Looks count, not time alone, so that a node that was stopped itself and
goes on later does not take all others for dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["Pulse"]


class _Patient:
    def __init__(self, now: float, beat: object) -> None:
        self.beat = beat
        self.since = now
        self.misses = 0


class Pulse:
    """What one node knows of the lives of others.

    Args:
        interval: how far looks that count are apart, in seconds.
        attempts: how many of them without a change mean death.
    """

    def __init__(self, interval: float, attempts: int) -> None:
        self._interval = interval
        self._attempts = attempts
        self._known: frozenset[str] | None = None
        self._patients: dict[str, _Patient] = {}
        self._alive: set[str] = set()

    @property
    def alive(self) -> frozenset[str]:
        """The nodes that were seen coming, or whose counter was seen to change, and that did not die since."""
        return frozenset(self._alive)

    def meet(self, present: frozenset[str]) -> None:
        """Take note of who is there: who was not there at the look before has just come, so it lives."""
        if self._known is not None:
            self._alive |= present - self._known
            self._alive &= present
        self._known = present

    def know(self, nodes: Iterable[str]) -> None:
        """Take note that `nodes` live: somebody who knows has said so."""
        self._alive.update(nodes)

    def look(self, now: float, nodes: Iterable[str], beats: Mapping[str, object]) -> frozenset[str]:
        """Return those of `nodes` that are dead.

        Args:
            now: the time, in seconds, on a clock that never goes back.
            nodes: who is to live.
            beats: their counters, as far as they have one; all that counts is whether they change.
        """
        wanted = frozenset(nodes)
        dead = set()
        for node in wanted:
            patient = self._patients.setdefault(node, _Patient(now, beats.get(node)))
            if beats.get(node) != patient.beat:
                self._patients[node] = _Patient(now, beats.get(node))
                self._alive.add(node)
            elif now - patient.since >= self._interval:
                patient.since = now
                patient.misses += 1
            if self._patients[node].misses >= self._attempts:
                dead.add(node)
        self._alive -= dead
        self._patients = {node: patient for node, patient in self._patients.items() if node in wanted}
        return frozenset(dead)
