"""Every benchmark runs, in tiny sizes; the figures of such a run mean nothing, and nothing here looks at them."""

from __future__ import annotations

import json
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).parent.parent
HIDE_TORCH = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module('benchmarks', run_name='__main__')"
NO_TORCH = "torch is not installed: pip install 'fscoord[torch]'"

WORKS = [
    "set, one process",
    "get, one process",
    "add, one process",
    "check, one process",
    "compare_set, one process",
    "wake-up, one way, ping-pong",
    "wake-up, one way, after a pause of 5 ms",
    "a wait's deadline, late by",
    "a write's deadline while the lock is held, late by",
    *(
        f"add, {size} processes at once{figure}"
        for size in (2, 4, 8, 16)
        for figure in ("", ", processor time", ", longest wait", ", waits of at most 50 ms")
    ),
    *(f"barrier of {size} processes{figure}" for size in (2, 8) for figure in ("", ", processor time per rank")),
    "a record of another process",
    "death of one of 2 ranks known to the others after",
    "lock and unlock, one process",
    "lock, from a release to the next of 2 processes",
    "lock, 2 processes want it, the longest that one waits",
    "lock whose holder is killed, until the next has it",
    "lock whose holder closes its store, until the next has it",
    "rendezvous of 2 nodes",
    "replay",
    "open after 2000 operations on 1000 keys",
    "files after 2000 operations on 1000 keys",
    "import fscoord",
    "a whole process: import, open, set",
    "a span, processor time",
    "no span: the test of the global name",
    "barrier of one process, processor time",
]

LIMIT_S = 400
"""It only bounds a hang: with torch they take half a minute on an idle machine."""

FLOOR = "1587636093a8e658365258cf4ece2948cd43a79465b60d4896aec6510d20111e"

THROUGH_TORCH = ["init_process_group, 2 processes", "monitored_barrier, 2 processes"]


def run_benchmarks(directory: Path, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Run them on the fscoord that the tests use, which need not be the one of the checkout."""
    (directory / "benchmarks").symlink_to(REPOSITORY / "benchmarks")
    done = subprocess.run(
        [sys.executable, *arguments, "--quick", "--json", "found.json", "--directory", str(directory)],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    for work in WORKS:
        assert work in done.stdout
    return done.stdout, json.loads((directory / "found.json").read_text(encoding="utf-8"))


@pytest.mark.timeout(LIMIT_S + 10)
def test_benchmarks_run_without_torch_and_report_the_missing_part(tmp_path: Path) -> None:
    shown, found = run_benchmarks(tmp_path, "-c", HIDE_TORCH)
    assert [row["work"] for row in found["results"]] == WORKS
    for row in found["results"]:
        assert row["values"], row
        assert all(value > 0 for value in row["values"].values()), row
        assert not any(store.startswith("torch") for store in row["values"])
        assert set(row["missing"].values()) <= {NO_TORCH}
        assert all(budget["met"] is None for budget in row["budgets"] if budget["peer"] in row["missing"])
    missing = {store for row in found["results"] for store in row["missing"]}
    assert {"torch FileStore", "torch TCPStore", "torch HashStore"} <= missing
    assert not any(work in shown for work in THROUGH_TORCH)
    assert shown.count(NO_TORCH) == sum(len(row["missing"]) for row in found["results"])
    assert not [path for path in tmp_path.iterdir() if path.name not in ("benchmarks", "found.json")]


@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.torch
def test_benchmarks_measure_torch_where_it_is_installed(tmp_path: Path) -> None:
    _, found = run_benchmarks(tmp_path, "-m", "benchmarks")
    assert [row["work"] for row in found["results"] if row["work"] not in WORKS] == THROUGH_TORCH
    for row in found["results"]:
        assert row["missing"] == {}
        assert all(budget["met"] is not None for budget in row["budgets"])
    peers = {store for row in found["results"] for store in row["values"]}
    assert {"torch FileStore", "torch TCPStore", "torch HashStore"} <= peers


@pytest.mark.parametrize(("module", "results"), [("page", "meet"), ("scaling_page", "scaling")])
def test_page_and_pictures_have_what_the_benchmark_found(module: str, results: str) -> None:
    """The terms with which the doctor predicts are those that the results give, too."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{module}", "--check", f"benchmarks/results/{results}.json"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


SIMULATED = """
import json
from benchmarks.scaling_simulation import COSTS, RESULTS, simulate

found = json.loads(RESULTS.read_text(encoding="utf-8"))
for name, costs in COSTS.items():
    for nodes in (10, 32):
        assert simulate(costs, nodes) == found[name][str(nodes)], (name, nodes)
"""


def test_simulation_of_many_nodes_has_the_results_of_its_seeds() -> None:
    done = subprocess.run([sys.executable, "-c", SIMULATED], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


SOLVED = """
from benchmarks.scaling_fit import ALL, job_of, least_squares
from fscoord.doctor.prediction import Terms

terms = Terms(base=5, node=3, pair=0.5, rank=0)
rows = [{"work": "barrier", "nodes": n, "ranks_per_node": r} for n in (2, 4, 8) for r in (1, 4, 16)]
found = least_squares(ALL, [(row, terms.of(job_of(row)), terms.of(job_of(row))) for row in rows])
assert all(abs(a - b) < 1e-6 for a, b in zip(found, terms)), found
worse = least_squares(ALL, [(row, 100 - row["nodes"], 100 - row["nodes"]) for row in rows])
assert min(worse) >= 0, worse
"""


def test_fit_of_scaling_finds_the_terms_of_exact_figures_and_none_below_zero() -> None:
    done = subprocess.run([sys.executable, "-c", SOLVED], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_bare_floor_is_the_prototype_that_the_budgets_name() -> None:
    """It is excluded from the checks of style, and a change in it would change what all others are compared with."""
    found = (REPOSITORY / "benchmarks" / "barrier_floor.py").read_bytes()
    assert sha256(found).hexdigest() == FLOOR


def test_benchmark_that_is_unknown_is_refused_with_the_names_of_all() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "--only", "nothing"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    for name in (
        "uncontended",
        "wakeup",
        "deadline",
        "contended",
        "barrier",
        "meet",
        "rendezvous",
        "groups",
        "history",
        "start",
    ):
        assert name in done.stderr
