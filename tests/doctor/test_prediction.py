"""The model by which the doctor predicts what a job will cost: it fits what was measured, and grows as it must."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from support.internals import SHOW_S

from fscoord.doctor.prediction import (
    ADDS_REQUESTS,
    BARRIER_REQUESTS,
    RENDEZVOUS_REQUESTS,
    WAITING_REQUESTS_PER_S,
    Job,
    Terms,
    predict,
    round_trip_of,
)

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "scaling.json"
OURS = "fscoord FileStore"
UNKNOWN_RTT_MS = 5
"""The model was fitted without the measurements at this round-trip time."""


def latency(between: str, lock: str = "ofd", **measured: float) -> dict[str, Any]:
    return {"name": "latency", "between": between, "lock": lock, "outcome": "info", "says": "", "measured": measured}


def measured(work: str) -> list[dict[str, Any]]:
    """Return what was measured at the round-trip time that the fit did not know.

    With 32 ranks on a node the laboratory's one processor was too slow for combined writes to work as they should.
    """
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]
    found = [row for row in rows if (row["work"], row["kind"], row["rtt_ms"]) == (work, OURS, UNKNOWN_RTT_MS)]
    return [row for row in found if row["nodes"] <= 8 and row["ranks_per_node"] <= 16]


def job(row: dict[str, Any]) -> Job:
    return Job(row["nodes"], row["ranks_per_node"])


def shown(row: dict[str, Any]) -> float:
    """Return how many ranks showed for what they waited, on average."""
    took = row.get("all_seconds", [0.0])
    return job(row).ranks * sum(each > SHOW_S for each in took) / len(took)


def test_terms_count_nodes_pairs_of_nodes_and_ranks() -> None:
    terms = Terms(base=1, node=10, pair=100, rank=1000)
    assert terms.of(Job(4, 8)) == 1 + 40 + 600 + 32_000
    assert terms.of(Job(1, 1)) == 1 + 10 + 1000


@pytest.mark.parametrize(
    ("work", "terms", "each"),
    [
        ("barrier", BARRIER_REQUESTS, 1),
        ("add", ADDS_REQUESTS, 0),
        ("idle second", WAITING_REQUESTS_PER_S, 1),
    ],
)
def test_requests_are_predicted_where_they_were_not_fitted(work: str, terms: Terms, each: int) -> None:
    """The error that docs/contributors/scaling.md states: three of four predictions are off by less than a quarter."""
    rows = measured(work)
    assert len(rows) >= 8
    off = [terms.of(job(row), shown(row)) / (row["requests"] * (1 if each else job(row).ranks)) - 1 for row in rows]
    assert sorted(map(abs, off))[3 * len(off) // 4] <= 0.25
    assert max(map(abs, off)) <= 0.5


def test_requests_of_a_rendezvous_are_predicted_where_they_were_not_fitted() -> None:
    """Each agent counts as a node, because agents do not share writes."""
    off = [RENDEZVOUS_REQUESTS.of(Job(job(row).ranks, 1)) / row["requests"] - 1 for row in measured("rendezvous")]
    assert len(off) >= 5
    assert statistics.median(map(abs, off)) <= 0.25


def test_bytes_of_a_barrier_grow_with_the_nodes_and_with_the_ranks() -> None:
    """A node reads once what all ranks wrote, and more often if its ranks arrive at different times."""
    off = [
        row["bytes_read"] / predict(job(row), 0.001)["barrier_bytes"]
        for row in measured("barrier")
        if max(row["all_seconds"]) < SHOW_S
    ]
    assert len(off) >= 8
    assert 0.5 < min(off) <= max(off) < 2
    found = [predict(Job(*each), 0.001)["barrier_bytes"] for each in ((16, 8), (32, 8), (16, 16))]
    assert found[1] / found[0] == pytest.approx(4, rel=0.05)
    assert found[2] / found[0] == pytest.approx(2, rel=0.05)


def test_times_grow_with_the_round_trip_and_costs_do_not() -> None:
    near, far = predict(Job(16, 8), 0.001), predict(Job(16, 8), 0.005)
    for name in ("barrier_s", "lone_add_s", "rendezvous_s"):
        assert near[name] < far[name] <= 5.001 * near[name]
    assert near["adds_per_s"] > far["adds_per_s"]
    assert far["lone_add_s"] == pytest.approx(5 * near["lone_add_s"])
    for name in ("barrier_requests", "barrier_bytes", "rendezvous_requests", "waiting_requests_per_s"):
        assert far[name] == near[name]


def test_ranks_of_a_long_barrier_show_their_waits_which_costs_requests() -> None:
    short, long = (predict(Job(16, 8), seconds) for seconds in (0.001, 0.1))
    assert short["barrier_s"] < SHOW_S < long["barrier_s"]
    more = long["barrier_requests"] - short["barrier_requests"]
    assert more == pytest.approx(BARRIER_REQUESTS.shown * 128, abs=1)


def test_larger_job_costs_more() -> None:
    small, more_ranks, more_nodes = (predict(Job(*shape), 0.001) for shape in ((16, 8), (16, 128), (128, 8)))
    for name in ("barrier_requests", "barrier_bytes", "barrier_s"):
        assert small[name] < more_ranks[name]
        assert small[name] < more_nodes[name]


def test_round_trip_is_half_the_time_of_a_lock_between_hosts() -> None:
    checks = [latency("processes", seconds=0.1), latency("hosts", "flock", seconds=0.2), latency("hosts", seconds=0.01)]
    assert round_trip_of(checks, "ofd") == 0.005
    assert round_trip_of(checks, "flock") == 0.1


@pytest.mark.parametrize("checks", [[], [latency("processes", seconds=0.1)], [latency("hosts")]])
def test_round_trip_is_unknown_without_a_measurement_between_hosts(checks: list[dict[str, Any]]) -> None:
    assert round_trip_of(checks, "ofd") is None
