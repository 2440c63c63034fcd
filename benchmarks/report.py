"""Report the progress and the results, and write the results as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measure import Row

COLUMNS = ("work", "store", "figure", "", "ratio", "budget", "met")


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that shows progress on standard error: on a terminal in one line, by rich, else line by line."""
    try:
        from rich.console import Console
    except ImportError:
        console = None
    else:
        console = Console(stderr=True)
    if console is None or not console.is_terminal:
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    with console.status("starting", refresh_per_second=1) as status:  # its thread counts as TCPStore's server
        yield lambda text: status.update(text)


def table(rows: Iterable[Row]) -> str:
    """Return the figures as text, a line per store."""
    lines = [line for row in rows for line in _lines(row)]
    widths = [max(len(line[column]) for line in [COLUMNS, *lines]) for column in range(len(COLUMNS))]
    rule = tuple("-" * width for width in widths)
    return "\n".join(_aligned(line, widths) for line in [COLUMNS, rule, *lines])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> str:
    numbers = ("figure", "ratio")
    texts = [
        text.rjust(width) if name in numbers else text.ljust(width)
        for name, text, width in zip(COLUMNS, line, widths, strict=True)
    ]
    return "  ".join(texts).rstrip()


def _lines(row: Row) -> Iterator[tuple[str, ...]]:
    work = row.work
    for number, (store, value) in enumerate(row.values.items()):
        details = [f"{name} {_figure(found)}" for name, found in row.details.get(store, {}).items()]
        budgets = [budget for budget in row.budgets if budget.peer == (store if number else "")]
        yield (
            work,
            store,
            f"{_figure(value)} {row.unit}",
            ", ".join(details),
            f"{row.ratio(store):.2f}" if number else "",
            ", ".join(budget.text for budget in budgets),
            ", ".join(row.verdict(budget) for budget in budgets),
        )
        work = ""
    for store, reason in row.missing.items():
        budgets = [budget for budget in row.budgets if budget.peer == store]
        verdicts = ", ".join(row.verdict(budget) for budget in budgets)
        yield (work, store, "-", reason, "", ", ".join(budget.text for budget in budgets), verdicts)
        work = ""


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def write_json(path: str, machine: dict[str, Any], arguments: dict[str, Any], rows: Iterable[Row]) -> None:
    """Write all results to the file `path`."""
    found = {"machine": machine, "arguments": arguments, "results": [_as_json(row) for row in rows]}
    Path(path).write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "work": row.work,
        "unit": row.unit,
        "statistic": row.statistic,
        "more_is_better": row.more_is_better,
        "values": {store: round(value, 4) for store, value in row.values.items()},
        "ratios": {store: round(row.ratio(store), 3) for store in list(row.values)[1:]},
        "details": {
            store: {name: round(value, 4) for name, value in details.items()} for store, details in row.details.items()
        },
        "missing": row.missing,
        "budgets": [
            {
                "text": budget.text,
                "of": budget.of or next(iter(row.values)),
                "peer": budget.peer,
                "factor": budget.factor,
                "limit": budget.limit,
                "met": row.is_met(budget),
                "verdict": row.verdict(budget),
            }
            for budget in row.budgets
        ],
    }
