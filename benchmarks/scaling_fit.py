"""The model of docs/contributors/scaling.md: terms fitted to results of `benchmarks.scaling`, checked on others."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.stores import OURS
from fscoord.doctor.prediction import SHOW_S, Job, Terms

COUNTS_MS, TIMES_MS = (1, 25), (0, 25)
"""What is added to round trips where the model is fitted. With 25 ms the messages take nearly all of the time."""
FIT_RANKS, FIT_NODES_MAX = (1, 4, 16), 8
"""What is fitted. Other round-trip times, other numbers of ranks per node, and more nodes are for the check."""

Row = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Run:
    """The results of a run: facts of the machine, and the rows."""

    machine: dict[str, Any]
    rows: list[Row]

    def of(self, work: str, kind: str = OURS) -> list[Row]:
        """Return the rows of one kind of work."""
        return [row for row in self.rows if row["work"] == work and row["kind"] == kind]

    def one(self, work: str, job: Job, rtt_ms: float, kind: str = OURS) -> Row | None:
        """Return the only row with these fields, or None if there is none."""
        return next((row for row in self.of(work, kind) if job_of(row) == job and row["rtt_ms"] == rtt_ms), None)

    def delays(self) -> list[float]:
        """Return the delays in ms, added to round trips, with which all work was measured.

        With other delays only the comparison with torch's FileStore was made.
        """
        return sorted({row["rtt_ms"] for row in self.of("lone add")})

    def round_trip_s(self, rtt_ms: float) -> float:
        """Return how long a round trip took where `rtt_ms` were added.

        It is the time of an addition by one rank alone, divided by the number of requests for which the rank waits.
        """
        return statistics.median(
            row["seconds"] / (row["requests"] - row["by_name"]["FREE_STATEID"])
            for row in self.of("lone add")
            if row["rtt_ms"] == rtt_ms
        )


def fastest_s(row: Row) -> float:
    """Return the time of the fastest round, because other work on the machine only adds to the time of a round."""
    return min(row.get("all_seconds", [row["seconds"]]))


def job_of(row: Row) -> Job:
    """Return the job in which `row` was measured."""
    return Job(row["nodes"], row["ranks_per_node"])


def load(path: Path) -> Run:
    """Return the results in the file."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return Run(found["machine"], found["results"])


# The fit


class Figure(NamedTuple):
    """A figure that the model predicts.

    Attributes:
        work: the kind of work whose rows have the figure.
        value: returns the figure of a row.
        fields: the terms that the figure may have. The round trips of a time have no term for each rank: the ranks of a
            node send their requests at the same time, and their writes are combined.
        name: the constant in the doctor's module that holds the terms; for a time, the terms of its round trips.
        rest: the constant that holds the terms of a time that do not depend on the round trip; empty for a count.
        least_rtt_ms: rows with a shorter round trip are left out.
        kind: the kind of store whose rows count.
    """

    title: str
    work: str
    value: Callable[[Row], float]
    fields: tuple[str, ...]
    name: str
    rest: str = ""
    least_rtt_ms: float = 0.0
    kind: str = OURS

    @property
    def rest_fields(self) -> tuple[str, ...]:
        """The terms that the rest of a time may have."""
        return () if not self.rest else ("node",) if self.fields == MET else ALL


def ranks(row: Row) -> int:
    """Return the number of all ranks of `row`."""
    return job_of(row).ranks


ALL = ("base", "node", "pair", "rank")
SHOWN = (*ALL, "shown")
TRIPS = ("base", "node")
MET = ("node", "pair")
"""The terms of a rendezvous, to which each node sends one agent."""

FIGURES = [
    Figure("requests of a barrier", "barrier", lambda row: row["requests"], SHOWN, "BARRIER_REQUESTS", "", 1),
    Figure("time of a barrier", "barrier", fastest_s, TRIPS, "BARRIER_ROUND_TRIPS", "BARRIER_LABORATORY_S"),
    Figure(
        "requests while each rank adds once", "add", lambda row: row["requests"] * ranks(row), ALL, "ADDS_REQUESTS",
        "", 1,
    ),
    Figure(
        "time in which each rank adds once", "add", lambda row: ranks(row) / row["per_s"], TRIPS, "ADDS_ROUND_TRIPS",
        "ADDS_LABORATORY_S",
    ),
    Figure(
        "requests a second while all ranks wait", "idle second", lambda row: row["requests"], ("node", "rank"),
        "WAITING_REQUESTS_PER_S",
    ),
    Figure("requests of a rendezvous", "rendezvous", lambda row: row["requests"], MET, "RENDEZVOUS_REQUESTS"),
    Figure(
        "time of a rendezvous", "rendezvous", lambda row: row["seconds"], MET, "RENDEZVOUS_ROUND_TRIPS",
        "RENDEZVOUS_LABORATORY_S",
    ),
    Figure(
        "requests a second of idle agents", "idle agents", lambda row: row["requests"], MET, "AGENTS_REQUESTS_PER_S"
    ),
]  # fmt: skip


def model_job(row: Row) -> Job:
    """Return the job for the model.

    Each agent of a rendezvous counts as a node, because agents do not combine writes.
    """
    return Job(ranks(row), 1) if row["work"] in {"rendezvous", "idle agents"} else job_of(row)


def is_fitted(each: Figure, row: Row) -> bool:
    """Return whether the model of `each` may be fitted to `row`."""
    is_known = row["rtt_ms"] in (TIMES_MS if each.rest else COUNTS_MS)
    return is_known and row["ranks_per_node"] in FIT_RANKS and row["nodes"] <= FIT_NODES_MAX


def factors(fields: Sequence[str], row: Row) -> list[float]:
    """Return the factor of each term in `row`."""
    return [Terms(**{name: 1.0}).of(model_job(row), shown(row)) for name in fields]


def shown(row: Row) -> float:
    """Return the average number of ranks that showed their wait, because it lasted too long."""
    took = row.get("all_seconds", [0.0])
    return ranks(row) * sum(each > SHOW_S for each in took) / len(took)


def fit(each: Figure, run: Run) -> dict[str, Terms]:
    """Return the terms of a figure by the names of their constants.

    A time is fitted in two steps. Rows without an added delay give the time that the laboratory's processor needs. In
    rows with a long delay, the time beyond that is the time of the round trips.
    """
    rows = [row for row in rows_of(each, run) if is_fitted(each, row)]
    if not each.rest:
        return {each.name: least_squares(each.fields, [(row, each.value(row), each.value(row)) for row in rows])}
    near = [(row, each.value(row), each.value(row)) for row in rows if row["rtt_ms"] == TIMES_MS[0]]
    rest = least_squares(each.rest_fields, near)
    far = []
    for row in rows:
        if row["rtt_ms"] == TIMES_MS[1]:
            trip = run.round_trip_s(TIMES_MS[1])
            far.append((row, (each.value(row) - rest.of(model_job(row))) / trip, each.value(row) / trip))
    return {each.name: least_squares(each.fields, far), each.rest: rest}


def predicted(each: Figure, terms: Mapping[str, Terms], row: Row, run: Run) -> float:
    """Return the figure that the model predicts for `row`."""
    job = model_job(row)
    found = terms[each.name].of(job, shown(row))
    return found * run.round_trip_s(row["rtt_ms"]) + terms[each.rest].of(job) if each.rest else found


def rows_of(each: Figure, run: Run) -> list[Row]:
    """Return the rows that have the figure `each`."""
    delays = [rtt for rtt in run.delays() if rtt >= each.least_rtt_ms]
    return [row for row in run.of(each.work, each.kind) if row["rtt_ms"] in delays]


def least_squares(fields: Sequence[str], rows: Sequence[tuple[Row, float, float]]) -> Terms:
    """Return the terms, none below zero, with the least squares of the errors.

    Each row has the figure to fit, and the figure to which its error is relative. Every subset of the terms is tried,
    with the terms outside it zero.
    """
    best, least = Terms(), float("inf")
    for count in range(1, len(fields) + 1):
        for chosen in itertools.combinations(fields, count):
            lines = [[factor / whole for factor in factors(chosen, row)] for row, _, whole in rows]
            wanted = [value / whole for _, value, whole in rows]
            found = _solve(lines, wanted)
            if found is None or min(found) < 0:
                continue
            sums = (sum(term * factor for term, factor in zip(found, line, strict=True)) for line in lines)
            off = sum((told - value) ** 2 for told, value in zip(sums, wanted, strict=True))
            if off < least * (1 - TINY):
                best, least = Terms(**{name: float(f"{x:.3g}") for name, x in zip(chosen, found, strict=True)}), off
    return best


TINY = 1e-9


def _solve(lines: list[list[float]], wanted: list[float]) -> list[float] | None:
    """Solve the normal equations by elimination; return None if they have no single solution."""
    size = len(lines[0])
    matrix = [
        [sum(line[i] * line[j] for line in lines) for j in range(size)]
        + [sum(line[i] * value for line, value in zip(lines, wanted, strict=True))]
        for i in range(size)
    ]
    for i in range(size):
        largest = max(range(i, size), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[largest] = matrix[largest], matrix[i]
        if abs(matrix[i][i]) < TINY:
            return None
        for j in range(size):
            if j != i:
                share = matrix[j][i] / matrix[i][i]
                matrix[j] = [left - share * right for left, right in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] for i in range(size)]


def errors(each: Figure, terms: Mapping[str, Terms], rows: Iterable[Row], run: Run) -> list[float]:
    """Return the relative error of the model in each of `rows`: 0.1 means that it predicts 10 % too much."""
    return [predicted(each, terms, row, run) / each.value(row) - 1 for row in rows]


CHECKS: dict[str, Callable[[Figure, Row], bool]] = {
    "fitted": is_fitted,
    "other round trips": lambda each, row: (
        row["rtt_ms"] not in (TIMES_MS if each.rest else COUNTS_MS)
        and row["ranks_per_node"] in FIT_RANKS
        and row["nodes"] <= FIT_NODES_MAX
    ),
    "2 and 8 ranks per node": lambda _, row: row["ranks_per_node"] in {2, 8} and row["nodes"] <= FIT_NODES_MAX,
    "32 ranks per node": lambda _, row: row["ranks_per_node"] == 32,
    "16 nodes": lambda _, row: row["nodes"] > FIT_NODES_MAX,
}


@cache
def record_bytes(run: Run) -> float:
    """Return the number of bytes that each node reads for each rank of a barrier."""
    rows = [row for row in run.of("barrier") if not shown(row)]
    found = [row["bytes_read"] / (row["nodes"] * ranks(row)) for row in rows]
    return float(f"{statistics.median(found):.3g}")


@cache
def leader_s(run: Run) -> float:
    """Return the processor time that a leader needs to write for one more rank, as `benchmarks.leading` measured it."""
    rows = run.of("leading")
    middle = statistics.mean(row["claims"] for row in rows), statistics.mean(row["seconds"] for row in rows)
    both = sum((row["claims"] - middle[0]) * (row["seconds"] - middle[1]) for row in rows)
    return float(f"{both / sum((row['claims'] - middle[0]) ** 2 for row in rows):.2g}")


@cache
def model(run: Run) -> dict[str, Terms]:
    """Return all terms of fscoord's store."""
    return {name: terms for each in FIGURES for name, terms in fit(each, run).items()}
