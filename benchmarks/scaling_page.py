"""`python -m benchmarks.scaling_page RESULTS`: write the figures of scaling.

RESULTS are those of `benchmarks.scaling`.

The tables stand between marks of docs/how-to/many-nodes.md and docs/contributors/scaling.md. The pictures are drawn
anew, and the terms are written into the doctor's module that predicts with them. With `--check` the program writes
nothing, and the exit status says whether the pages, the pictures and the terms agree with the results.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.page import figure, filled, table
from benchmarks.picture import draw
from benchmarks.scaling_fit import (
    CHECKS,
    FIGURES,
    Row,
    Run,
    errors,
    fastest_s,
    fit,
    job_of,
    leader_s,
    load,
    model,
    ranks,
    record_bytes,
    rows_of,
)
from benchmarks.scaling_simulation import simulated
from benchmarks.stores import TORCH_FILE
from fscoord.doctor.prediction import SHOW_S, Job, readers

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "docs" / "how-to" / "many-nodes.md", ROOT / "docs" / "contributors" / "scaling.md"]
PICTURES = ROOT / "docs" / "pictures"
MODULE = ROOT / "fscoord" / "doctor" / "prediction.py"

AXIS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
FAR_MS = 5
PEER_MS = (0, 25)
"""The delays of the table that compares stores."""


def module(run: Run, text: str) -> str:
    """Return the source `text` of the doctor's module with the terms of `run` that it has."""
    found = model(run)
    assert found.keys() >= set(re.findall(r"^(\w+): Final = Terms", text, re.MULTILINE))
    for name, terms in found.items():
        parts = ", ".join(f"{field}={value:g}" for field, value in terms._asdict().items() if value)
        text = re.sub(rf"^{name}: Final = .*$", f"{name}: Final = Terms({parts})", text, flags=re.MULTILINE)
    for name, value in (("RECORD_BYTES", record_bytes(run)), ("LEADER_S", leader_s(run))):
        text = re.sub(rf"^{name}: Final = .*$", f"{name}: Final = {value}", text, flags=re.MULTILINE)
    return text


# The page


def machine(run: Run) -> str:
    """Return the place and the time of the measurement."""
    on = run.machine
    added = ", ".join(f"{run.round_trip_s(rtt) * 1e3:.2g}" for rtt in run.delays())
    words = (
        f"Measured on {on['date']} in the laboratory of `tests/mounts/lab` (User Mode Linux, {on['system']}, NFS 4.2,"
        f" one CPU for the server and all hosts), with {on['python']}, torch {on['torch']}, etcd {on['etcd']}. Where 0,"
        f" 1, 5 and 25 ms were added, a round trip took {added} ms: a quarter of an `add` by one rank alone, the middle"
        " of all runs."
    )
    return textwrap.fill(words, 120, break_on_hyphens=False) + "\n"


def shapes(run: Run, work: str) -> list[Job]:
    """Return the jobs for which there are results of the given kinds of work."""
    return sorted({job_of(row) for row in run.of(work)})


def _time_and_requests(row: Row) -> str:
    return f"{figure(row['seconds'] * 1e3)}, {figure(row['requests'])}"


def _fastest_too(row: Row) -> str:
    return f"{figure(fastest_s(row) * 1e3)}, {_time_and_requests(row)}"


def nfs(_: Run) -> str:
    """Return the simulated costs on NFS."""
    return simulated("NFS 4.2")


def lustre(_: Run) -> str:
    """Return the simulated costs on Lustre."""
    return simulated("Lustre")


def _order(row: Row) -> tuple[Job, float]:
    return job_of(row), row["rtt_ms"]


def peers(run: Run) -> str:
    """Return the comparison with torch's FileStore."""
    lines = []
    for row in sorted(run.of("barrier", TORCH_FILE), key=_order):
        if row["rtt_ms"] not in PEER_MS:
            continue
        ours = run.one("barrier", job_of(row), row["rtt_ms"])
        if ours is None:
            continue
        ratio = row["seconds"] / ours["seconds"]
        lines.append(
            (
                f"barrier, N = {ranks(row)}: fastest, p50 ms, requests",
                f"{row['rtt_ms']:g} ms",
                _fastest_too(ours),
                _fastest_too(row),
                f"{figure(fastest_s(row) / fastest_s(ours))}, {figure(ratio)}",
                "twice as fast",
                "yes" if ratio >= 2 else "**no**",
            )
        )
    for row in sorted(run.of("add", TORCH_FILE), key=_order):
        if row["rtt_ms"] not in PEER_MS:
            continue
        ours = run.one("add", job_of(row), row["rtt_ms"])
        if ours is None:
            continue
        ratio = ours["per_s"] / row["per_s"]
        lines.append(
            (
                f"`add` by 2 x {row['ranks_per_node']} ranks at once: per s, requests",
                f"{row['rtt_ms']:g} ms",
                f"{figure(ours['per_s'])}, {figure(ours['requests'])}",
                f"{figure(row['per_s'])}, {figure(row['requests'])}",
                figure(ratio),
                "5 times as many",
                "yes" if ratio >= 5 else "**no**",
            )
        )
    return table(("work", "added", "fscoord", "torch FileStore", "ratio", "budget", "met?"), lines)


def checks(run: Run) -> str:
    """Return the errors of the model. With a short added delay, most of a time is processor time."""
    lines = []
    for each in FIGURES:
        found = fit(each, run)
        for title, is_far in ((", 5 and 25 ms", True), (", 0 and 1 ms", False)) if each.rest else (("", None),):
            cells = []
            for chosen in CHECKS.values():
                rows = [row for row in rows_of(each, run) if chosen(each, row)]
                rows = [row for row in rows if is_far is None or is_far == (row["rtt_ms"] >= FAR_MS)]
                off = sorted(abs(error) for error in errors(each, found, rows, run))
                cells.append(f"{statistics.median(off):.0%}, {off[-1]:.0%} ({len(off)})" if off else "")
            lines.append((each.title + title, *cells))
    return table(("figure", *CHECKS), lines)


def barrier_requests(job: Job, run: Run, round_trip_s: float) -> float:
    """Return the requests of a barrier.

    If the barrier takes long, they include the requests by which ranks show their waits.
    """
    is_long = model(run)["BARRIER_ROUND_TRIPS"].of(job) * round_trip_s + leader_s(run) * job.ranks > SHOW_S
    found = model(run)["BARRIER_REQUESTS"].of(job, job.ranks if is_long else 0)
    return found + readers(job, record_bytes(run)) - job.nodes


PARTS: dict[str, Callable[[Run], str]] = {each.__name__: each for each in (machine, nfs, lustre, peers, checks)}


# The pictures


def line(terms_of: Callable[[Job], float], per_node: int) -> dict[int, float]:
    """Return the predicted figure for each number of nodes."""
    return {nodes: terms_of(Job(nodes, per_node)) for nodes in AXIS}


def points(run: Run, work: str, per_node: int, rtt_ms: float, value: Callable[[Row], float]) -> dict[int, float]:
    """Return the measured figures, by the number of nodes."""
    rows = [row for row in run.of(work) if (row["ranks_per_node"], row["rtt_ms"]) == (per_node, rtt_ms)]
    return {row["nodes"]: value(row) for row in sorted(rows, key=lambda row: int(row["nodes"]))}


def pictures(run: Run) -> dict[str, str]:
    """Return the pictures by name."""
    trip = run.round_trip_s(FAR_MS)
    lines = {}
    for per in (8, 1):
        lines[f"{per} ranks, model"] = line(lambda job: barrier_requests(job, run, trip), per)
        lines[f"{per} ranks, measured"] = points(run, "barrier", per, FAR_MS, lambda row: row["requests"])
    drawn = draw(
        "Requests of a barrier, by ranks per node", "nodes", lines, [name for name in lines if "model" in name]
    )
    return {"scaling_barrier_requests": drawn}


def joined(paths: Sequence[Path]) -> str:
    """Return the results of several runs as one file, with a line for each figure.

    A later run replaces an earlier one.
    """
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    facts = found[0]["machine"] | {"load_1_min_at_the_end": found[-1]["machine"]["load_1_min_at_the_end"]}
    rows: dict[tuple[str, str, Job, float], Row] = {}
    for row in (row for run in found for row in run["results"]):
        short = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}
        again = len([key for key in rows if key[0] == "leading"]) if row["work"] == "leading" else row["rtt_ms"]
        rows[row["work"], row["kind"], job_of(row), again] = short  # each round of `benchmarks.leading` is a row
    lines = ",\n".join("  " + json.dumps(row) for row in rows.values())
    return f'{{\n "machine": {json.dumps(facts)},\n "results": [\n{lines}\n ]\n}}\n'


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, the pictures and the terms, or compare them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling_page", description=__doc__)
    parser.add_argument("results", type=Path, help="a file that `--join` wrote")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page does not agree with the results"
    )
    parser.add_argument(
        "--join", type=Path, nargs="+", metavar="FOUND", help="write RESULTS from files that `benchmarks.scaling` wrote"
    )
    options = parser.parse_args(arguments)
    if options.join:
        options.results.write_text(joined(options.join), encoding="utf-8")
        return
    run = load(options.results)
    new = {page: filled(page, PARTS, run) for page in PAGES}
    new |= {MODULE: module(run, MODULE.read_text(encoding="utf-8"))}
    new |= {PICTURES / f"{name}.svg": text for name, text in pictures(run).items()}
    for path, text in new.items():
        if options.check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                sys.exit(
                    f"{path} is not what {options.results} makes of it: run python -m benchmarks.scaling_page on it"
                )
        else:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
