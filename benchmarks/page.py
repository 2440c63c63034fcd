"""`python -m benchmarks.page RESULTS`: put the results of `--only meet --json RESULTS` on the pages of performance.

The tables stand between marks of docs/performance.md and docs/contributors/performance.md. The picture is drawn anew.
With `--check` the program writes nothing, and the exit status says whether the page agrees with the results.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks import barriers, uncontended
from benchmarks.locks import FILELOCK, OURS as OUR_LOCK, WRITES
from benchmarks.picture import draw
from benchmarks.stores import OURS, TORCH_FILE, TORCH_TCP
from benchmarks.uncontended import OPERATIONS
from benchmarks.wakeup import BARE

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [DOCS / "performance.md", DOCS / "contributors" / "performance.md"]
PICTURE = DOCS / "pictures" / "barrier_time.svg"
R = TypeVar("R")
MARKED = re.compile(r"(<!-- (\w+): from the results -->\n).*?(<!-- end -->)", re.DOTALL)

AFTER_A_PAUSE = "wake-up, one way, after a pause of 5 ms"
LOCKED = "lock and unlock, one process"
HANDED_OVER = "lock, from a release to the next of 2 processes"
RECORD = "a record of another process"
SINGLE = [f"{operation}, one process" for operation in OPERATIONS]


class Run(NamedTuple):
    """The results: facts of the machine, and the rows by their work."""

    machine: dict[str, Any]
    rows: dict[str, dict[str, Any]]


class Line(NamedTuple):
    """A line of the table of budgets: the goal of one or several rows of a run.

    Attributes:
        of: the store whose figures count.
        peer: the store with which `of` is compared; empty for a fixed limit.
        longer: whether the ratio is the cost of fscoord divided by that of the peer, and not the reverse.
    """

    title: str
    works: Sequence[str]
    of: str
    peer: str
    budget: str
    longer: bool = False


def _barriers(*sizes: int, spent: bool = False) -> list[str]:
    return [f"barrier of {size} processes" + (f", {barriers.SPENT}" if spent else "") for size in sizes]


def _added(of_what: str = "") -> list[str]:
    return [f"add, {size} processes at once{of_what}" for size in (8, 16)]


def _meeting(of: str, peer: str, factors: dict[int, float]) -> Line:
    sizes, least = (" / ".join(map("{:g}".format, part)) for part in (factors, factors.values()))
    return Line(f"{of}, N = {sizes}", _barriers(*factors), of, peer, f"{least} times as fast")


LINES = [
    *(_meeting(*each) for each in barriers.FACTORS),
    Line(
        f"{barriers.RANKS}: processor time per rank, N = 8 / 16 / 32 / 64",
        _barriers(8, 16, 32, 64, spent=True),
        barriers.RANKS,
        barriers.FLOOR,
        "at most the floor",
        longer=True,
    ),
    Line("the same, N = 128", _barriers(128, spent=True), barriers.RANKS, "", "at most 1.3 times that of 8:"),
    Line("the same, N = 200", _barriers(200, spent=True), barriers.RANKS, "", "at most 1.56 times that of 128:"),
    Line("wake-up after a pause of 5 ms, p50", [AFTER_A_PAUSE], OURS, TORCH_TCP, "1.5 times as fast"),
    Line("`add` by 8 / 16 processes at once", _added(), OURS, TORCH_TCP, "1.3 / 1.2 times as many"),
    Line("the same: the longest wait", _added(", longest wait"), OURS, "", "at most"),
    Line("the same: waits of at most 50 ms", _added(", waits of at most 50 ms"), OURS, "", "at least"),
    Line("lock and unlock, no other process", [LOCKED], OUR_LOCK, WRITES, "at most 1.15 times", longer=True),
    Line("lock handed over between 2 processes, p50", [HANDED_OVER], OUR_LOCK, BARE, "at most 3 times", longer=True),
    Line(
        f"`{'` / `'.join(OPERATIONS)}`",
        SINGLE,
        OURS,
        TORCH_FILE,
        f"{' / '.join(map('{:g}'.format, uncontended.FACTORS.values()))} times as fast",
    ),
]


def figure(value: float) -> str:
    """Return a figure with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def machine(run: Run) -> str:
    """Return the place and the time of the measurement."""
    on = run.machine
    return (
        f"Measured on {on['date']}: {on['cores']} cores of an {on['processor']}, {on['system']}, {on['file_system']},"
        f" {on['python']}, torch {on['torch']},\nwatchdog {on['watchdog']}; load {on['load_1_min']} before the run and"
        f" {on['load_1_min_at_the_end']} at its end, its own processes among it.\n"
    )


def budgets(run: Run) -> str:
    """Return the table of budgets."""
    return table(
        ("work", "fscoord", "peer", "ratio", "budget", "met?"),
        [_budget(line, run) for line in LINES],
    )


def _budget(line: Line, run: Run) -> tuple[str, ...]:
    ours: list[str] = []
    theirs: list[str] = []
    ratios: list[str] = []
    verdicts: list[bool] = []
    unit = ""
    for work in line.works:
        row = run.rows.get(work, {"values": {}, "budgets": []})
        found = [each for each in row["budgets"] if each["of"] == line.of and each["peer"] == line.peer]
        if line.of not in row["values"] or not found or found[0]["met"] is None:
            for cell in (ours, theirs, ratios):
                cell.append("-")
            continue
        unit = row["unit"]
        mine = row["values"][line.of]
        other = row["values"][line.peer] if line.peer else found[0]["limit"]
        ours.append(figure(mine))
        theirs.append(figure(other))
        ratios.append(figure(mine / other if line.longer or row["more_is_better"] else other / mine))
        verdicts.append(found[0]["met"])
    met = "yes" if all(verdicts) else "**no**" if not any(verdicts) else f"{sum(verdicts)} of {len(verdicts)}"
    met = met if verdicts else "not measured"
    if not line.peer:
        limits = " / ".join(dict.fromkeys(theirs))
        return (line.title, f"{' / '.join(ours)} {unit}", "", "", f"{line.budget} {limits} {unit}", met)
    peer = f"{line.peer}: {' / '.join(theirs)}"
    return (line.title, f"{' / '.join(ours)} {unit}", peer, " / ".join(ratios), line.budget, met)


def first(run: Run) -> str:
    """Return what a user pays for each kind of work, beside what the user would use instead."""
    kinds = ((OURS, barriers.RANKS, OUR_LOCK), (TORCH_TCP, barriers.TCP_KEYS), (TORCH_FILE, barriers.FILE_KEYS))

    def line(title: str, *works: str) -> tuple[str, ...]:
        rows = [run.rows.get(work, {"values": {}, "unit": ""}) for work in works]
        cells = []
        for names in (*kinds, (FILELOCK,)):
            values = [next((row["values"][name] for name in names if name in row["values"]), None) for row in rows]
            cells.append(" / ".join("-" if value is None else figure(value) for value in values) if any(values) else "")
        return (title.format(rows[0]["unit"]), *cells)

    return table(
        ("what it costs", "fscoord", "torch TCPStore, a server", "torch FileStore", "filelock"),
        [
            line("a barrier of 2 / 8 / 64 ranks, {}", *_barriers(2, 8, 64)),
            line("wake a process that waits for a key, {}", AFTER_A_PAUSE),
            line("`set` / `get` / `add`, one process, {}", *(f"{name}, one process" for name in ("set", "get", "add"))),
            line("`add` by 8 processes at once, thousands a second", _added()[0]),
            line("lock and unlock, one process, {}", LOCKED),
        ],
    )


PARTS: dict[str, Callable[[Run], str]] = {each.__name__: each for each in (machine, first, budgets)}


def filled(page: Path, parts: Mapping[str, Callable[[R], str]], run: R) -> str:
    """Return the text of a page with the parts that stand between its marks made from the results of `run`."""
    before = page.read_text(encoding="utf-8")
    return MARKED.sub(lambda match: f"{match[1]}\n{parts[match[2]](run)}\n{match[3]}", before)


def picture(run: Run) -> str:
    """Return the drawing of the time of a barrier."""
    names = {
        barriers.RANKS: "fscoord",
        barriers.STORE: "fscoord, no ranks",
        barriers.FILE_KEYS: "torch FileStore",
        barriers.TCP_KEYS: "torch TCPStore",
        barriers.TCP_OWN: "TCPStore, its own",
    }
    lines: dict[str, dict[int, float]] = {}
    for kind, name in names.items():
        for size in barriers.PROCESSES:
            values = run.rows.get(_barriers(size)[0], {"values": {}})["values"]
            if kind in values:
                lines.setdefault(name, {})[size] = values[kind]
    return draw("A barrier: time on the clock, ms", "processes that meet, on one machine", lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page and the picture, or compare them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=__doc__)
    parser.add_argument("results", help="a file that `python -m benchmarks --only meet --json` wrote")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the page does not agree with the results"
    )
    options = parser.parse_args(arguments)
    found = json.loads(Path(options.results).read_text(encoding="utf-8"))
    run = Run(found["machine"], {row["work"]: row for row in found["results"]})
    new = {page: filled(page, PARTS, run) for page in PAGES} | {PICTURE: picture(run)}
    for path, text in new.items():
        if options.check:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                sys.exit(f"{path} is not what {options.results} makes of it: run python -m benchmarks.page on it")
        else:
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
