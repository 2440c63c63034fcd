"""`python -m benchmarks`: measure, show the table, write the JSON."""

from __future__ import annotations

import argparse
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
    process_groups,
    rendezvous,
    report,
    start,
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
    "deaths": deaths.measure,
    "locks": locks.measure,
    "rendezvous": rendezvous.measure,
    "groups": process_groups.measure,
    "history": history.measure,
    "start": start.measure,
    "etcd": etcd.measure,
}
ON_REQUEST = {"etcd"}
"""What needs a server, and is measured only when it is asked for."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure fscoord beside torch's stores, and its lock beside others. All take turns in one run, so"
        " that whatever else the machine does hits them alike; only ratios are comparable between machines. Without"
        " torch only fscoord is measured, and no process groups, which are torch's.",
    )
    parser.add_argument("--only", action="append", choices=BENCHMARKS, metavar="NAME", help=", ".join(BENCHMARKS))
    parser.add_argument("--json", metavar="FILE", help="write everything that was found there as well")
    parser.add_argument("--quick", action="store_true", help="only see that everything runs; the figures mean nothing")
    parser.add_argument("--repeat", type=int, metavar="N", help="rounds of each benchmark (default: its own number)")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where files go (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.repeat is not None and options.repeat < 1:
        parser.error("--repeat must be at least 1")
    found = machine.facts(options.directory)
    rows: list[Row] = []
    with report.progress() as show:
        settings = Settings(options.quick, options.repeat, options.directory, show)
        for name in options.only or [name for name in BENCHMARKS if name not in ON_REQUEST]:
            rows += BENCHMARKS[name](settings)
    found["load_1_min_at_the_end"] = machine.load()
    print("; ".join(f"{name.replace('_', ' ')}: {fact}" for name, fact in found.items()), end="\n\n")
    print(report.table(rows))
    if options.json:
        asked = {"quick": options.quick, "repeat": options.repeat, "only": options.only}
        report.write_json(options.json, found, asked, rows)


if __name__ == "__main__":
    main()
