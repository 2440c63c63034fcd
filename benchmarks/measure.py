"""A measurement: the values of each store, the budget between them, and rounds in which all stores take turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from benchmarks.stores import is_missing


@dataclass(frozen=True)
class Settings:
    """The settings of a run: how much to measure, and in which directory.

    Attributes:
        quick: only check that everything runs; the figures mean nothing.
        repeat: rounds, or None for each benchmark's own number.
        directory: where the stores' files go.
        report: called with the name of the present measurement.
        items: how many items the benchmark of queues passes, or None for its own number.
    """

    quick: bool
    repeat: int | None
    directory: str
    report: Callable[[str], None]
    items: int | None = None

    def rounds(self, usual: int) -> int:
        """Return the number of rounds: `usual`, unless the command line gives another number."""
        return self.repeat or (1 if self.quick else usual)


@dataclass(frozen=True)
class Budget:
    """The goal: to be `factor` times as good as `peer`, or `limit`, in the row's unit.

    Attributes:
        of: the store whose figure counts; the first one by default.
    """

    text: str
    peer: str = ""
    factor: float = 1.0
    limit: float = 0.0
    of: str = ""


@dataclass
class Row:
    """One kind of work, and the figure of each store.

    Attributes:
        values: the figure of each store; fscoord's is first.
        missing: why a store has no figure.
        details: more figures, by store.
        statistic: how the figures follow from the rounds, and how many rounds there were.
    """

    work: str
    unit: str
    statistic: str
    values: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    details: dict[str, dict[str, float]] = field(default_factory=dict)
    budgets: list[Budget] = field(default_factory=list)
    more_is_better: bool = False

    @property
    def ours(self) -> float:
        """The figure of fscoord."""
        return next(iter(self.values.values()))

    def ratio(self, store: str, of: str = "") -> float:
        """Return how many times as good as `store` the store `of` is; by default `of` is fscoord."""
        ours, theirs = self.values[of] if of else self.ours, self.values[store]
        return ours / theirs if self.more_is_better else theirs / ours

    def is_met(self, budget: Budget) -> bool | None:
        """Return whether `budget` is met; None if a figure is missing."""
        if budget.peer:
            return None if budget.peer not in self.values else self.ratio(budget.peer, budget.of) >= budget.factor
        value = self.values[budget.of] if budget.of else self.ours
        return value >= budget.limit if self.more_is_better else value <= budget.limit

    def verdict(self, budget: Budget) -> str:
        """Return whether `budget` is met, in a word or two."""
        met = self.is_met(budget)
        if met is None:
            return "unknown"
        return "yes" if met else "NO"


def take_turns(
    settings: Settings,
    stores: Iterable[str],
    rounds: int,
    measure: Callable[[str], Any],
    what: str,
    absent: Mapping[str, str] | None = None,
) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Return the result of `measure` for each store in each round, and why some stores were not measured.

    All stores are measured once before any is measured again, so that other work on the machine affects them alike.
    `absent` returns why a store can't be measured in this round.
    """
    missing = {store: (absent or {}).get(store, "") or is_missing(store) for store in stores}
    present = [store for store, reason in missing.items() if not reason]
    found: dict[str, list[Any]] = {store: [] for store in present}
    for number in range(rounds):
        settings.report(f"{what}, round {number + 1} of {rounds}")
        for store in present:
            found[store].append(measure(store))
    return found, {store: reason for store, reason in missing.items() if reason}


class ServerTime:
    """The processor time of TCPStore's server, in seconds: of all threads of this process except the caller."""

    spent = 0.0

    def __enter__(self) -> ServerTime:
        self.spent = self._now()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.spent = self._now() - self.spent

    @staticmethod
    def _now() -> float:
        return time.process_time() - time.thread_time()


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def percentile(values: Sequence[float], part: float) -> float:
    """Return the value below which `part` (0 to 1) of `values` lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
