"""Runs: whether a handle joins the run of a log, begins a new run, or belongs to one that was superseded. Pure."""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["Run", "classify_run", "parse_run_id", "supersede"]

Run = tuple[bytes, int]
"""The id of a job and its restart count. A count of -1 marks an id without an order."""

OPAQUE: Final = -1
JOB_MAX: Final = 255
KEPT: Final = 100
"""How many superseded runs a header names. A handle of an older run is not refused, but begins a new run."""


def parse_run_id(run_id: object) -> Run | None:
    """Return the run that `run_id` names: an id without an order, or a pair of a job and its restart count, or None.

    Raises:
        TypeError: `run_id` is something else.
        ValueError: the name is empty or longer than 255 bytes, or the count is negative.
    """
    if run_id is None:
        return None
    job, count = run_id if isinstance(run_id, tuple) and len(run_id) == 2 else (run_id, OPAQUE)
    if not isinstance(job, str) or not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"run_id is a str, or a pair of a str and an int, not {run_id!r}")
    name = job.encode("utf-8", "surrogateescape")
    if not 0 < len(name) <= JOB_MAX:
        raise ValueError(f"a run's id has 1 to {JOB_MAX} bytes, not {len(name)}")
    if isinstance(run_id, tuple) and not 0 <= count < 1 << 63:
        raise ValueError(f"a restart count is from 0 to 2**63 - 1, not {count}")
    return name, count


def classify_run(runs: tuple[Run, ...], wanted: Run) -> Literal["join", "stale", "new"]:
    """Return whether a handle of run `wanted` joins the log, is stale, or begins a new run.

    `runs` are those of the header: the present run, then the runs that it superseded.
    """
    if runs[:1] == (wanted,):
        return "join"
    job, count = wanted
    for known, number in runs:
        if known == job and (number == count or (number > count >= 0)):
            return "stale"
    return "new"


def supersede(runs: tuple[Run, ...], run: Run) -> tuple[Run, ...]:
    """Return the runs of the next header, in which `run` supersedes all of `runs`."""
    older = [(job, count) for job, count in runs if job != run[0] or (count < 0) != (run[1] < 0)]
    return run, *older[:KEPT]
