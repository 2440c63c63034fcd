"""`Plan`: what is to go wrong, how often, and what has gone wrong already; the same each time it is asked."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakSet

from fscoord._runtime import system

__all__ = ["Fault", "Plan", "Rule", "counted", "drawn"]


class Fault(NamedTuple):
    """One thing that goes wrong.

    Attributes:
        kind: what it is, in a word.
        detail: whatever belongs to it.
    """

    kind: str
    detail: Any = None


Rule = Callable[[str], "Fault | None"]
"""Told the name of a call, it says what is to go wrong with it, if anything."""


def counted(names: Collection[str], fault: Fault, after: int, times: int | None) -> Rule:
    """Return the rule that lets `after` of the calls `names` pass, and then `times` of them (None: all) go wrong.

    Raises:
        ValueError: a number is negative.
    """
    if after < 0 or (times is not None and times < 0):
        raise ValueError(f"after={after} and times={times}: neither can be negative")
    seen = 0

    def rule(name: str) -> Fault | None:
        nonlocal seen
        if name not in names:
            return None
        seen += 1
        return fault if seen > after and (times is None or seen <= after + times) else None

    return rule


def drawn(seed: int, rate: float, faults: Callable[[str], list[Fault]]) -> Rule:
    """Return the rule by which each call goes wrong with probability `rate`, in one of the ways that `faults` names.

    Raises:
        ValueError: `rate` is not between 0 and 1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"rate={rate}: a probability lies between 0 and 1")
    rng = random.Random(seed)

    def rule(name: str) -> Fault | None:
        chance, choice = rng.random(), rng.random()  # both each time, so that a draw depends on its number alone
        possible = faults(name)
        return possible[int(choice * len(possible))] if chance < rate and possible else None

    return rule


class Plan:
    """The rules in force. Threads may ask at once; with one thread the answers are the same in every run."""

    def __init__(self) -> None:
        self._rules: list[tuple[Rule, list[str]]] = []
        self.renew()
        _all.add(self)

    def renew(self) -> None:
        """Have a mutex that nobody holds; in a forked child too."""
        self._mutex = system.threading.Lock()

    @contextmanager
    def having(self, rule: Rule) -> Iterator[list[str]]:
        """Have `rule` in force in the block; yield the list of the calls that have gone wrong by it so far."""
        hit: list[str] = []
        entry = (rule, hit)
        with self._mutex:
            self._rules.append(entry)
        try:
            yield hit
        finally:
            with self._mutex:
                self._rules.remove(entry)

    def faults(self, name: str) -> list[Fault]:
        """Return what goes wrong with this call of `name`, in the order in which the rules came."""
        if not self._rules:
            return []
        system.process_epoch()  # after a fork in C it renews the mutex
        found = []
        with self._mutex:
            for rule, hit in self._rules:
                fault = rule(name)
                if fault:
                    hit.append(name)
                    found.append(fault)
        return found


_all: WeakSet[Plan] = WeakSet()


def _after_fork_in_child() -> None:
    for plan in list(_all):
        plan.renew()


system.after_fork_in_child("faults", _after_fork_in_child)
