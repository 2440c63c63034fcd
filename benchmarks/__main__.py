"""`python -m benchmarks`: measure, show the table, write the JSON."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence

from benchmarks import (
    barriers,
    contended,
    deadline,
    deaths,
    etcd,
    history,
    locks,
    machine,
    optuna_journal,
    process_groups,
    queue,
    reading,
    rendezvous,
    report,
    start,
    tracing,
    uncontended,
    wakeup,
)
from benchmarks.measure import Row, Settings

BENCHMARKS: dict[str, Callable[[Settings], Iterator[Row]]] = {
    "uncontended": uncontended.measure,
    "wakeup": wakeup.measure,
    "deadline": deadline.measure,
    "contended": contended.measure,
    "barrier": barriers.measure,
    "reading": reading.measure,
    "handover": locks.measure_ours,
    "deaths": deaths.measure,
    "locks": locks.measure,
    "rendezvous": rendezvous.measure,
    "groups": process_groups.measure,
    "history": history.measure,
    "start": start.measure,
    "trace": tracing.measure,
    "etcd": etcd.measure,
    "optuna": optuna_journal.measure,
    "queue": queue.measure,
}
ON_REQUEST = {"etcd", "handover", "optuna", "queue"}
"""What needs a server or another package, or is a part of another one, and is measured only when it is asked for."""

GROUPS = {"meet": ("barrier", "contended", "wakeup", "handover", "reading", "uncontended")}
"""Several by one name. ``meet`` is all that docs/contributors/performance.md has a budget for where processes meet."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the measurements that the command line names."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure fscoord beside torch's stores, and its lock beside others. All take turns in one run, so"
        " that whatever else the machine does hits them alike; only ratios are comparable between machines. Without"
        " torch only fscoord is measured, and no process groups, which are torch's.",
    )
    known = ", ".join([*BENCHMARKS, *(f"{name} ({', '.join(parts)})" for name, parts in GROUPS.items())])
    parser.add_argument("--only", action="append", choices=[*GROUPS, *BENCHMARKS], metavar="NAME", help=known)
    parser.add_argument("--json", metavar="FILE", help="also write all results to this file")
    parser.add_argument(
        "--quick", action="store_true", help="only check that everything runs; the figures mean nothing"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds of each benchmark (default: its own number)")
    parser.add_argument("--items", type=int, metavar="N", help="items of the benchmark queue (default: 20000)")
    parser.add_argument(
        "--directory", default=tempfile.gettempdir(), help="the directory of the files (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.repeat is not None and options.repeat < 1:
        parser.error("--repeat must be at least 1")
    found = machine.facts(options.directory)
    print(f"load when it begins: {found['load_1_min']}", file=sys.stderr)
    asked = {"quick": options.quick, "repeat": options.repeat, "only": options.only}
    rows: list[Row] = []

    def save() -> None:
        found["load_1_min_at_the_end"] = machine.load()
        if options.json:
            report.write_json(options.json, found, asked, rows)

    with report.progress() as show:
        settings = Settings(options.quick, options.repeat, options.directory, show, options.items)
        asked_for = [part for name in options.only or () for part in GROUPS.get(name, (name,))]
        for name in asked_for or [name for name in BENCHMARKS if name not in ON_REQUEST]:
            for row in BENCHMARKS[name](settings):
                rows.append(row)
                save()  # each time, so that it is there if the next benchmark fails
        save()
    print("; ".join(f"{name.replace('_', ' ')}: {fact}" for name, fact in found.items()), end="\n\n")
    print(report.table(rows))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
