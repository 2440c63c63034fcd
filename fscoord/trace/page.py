"""`make_page` makes one HTML page of a trace: a time line that can be zoomed, and the tables of the report.

The page needs no network. The page is the template ``page.html`` of this package with the data of `page_data`. A script
in the page draws the time line from this data.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import Any, Final

from fscoord._runtime.escaping import printable
from fscoord._runtime.tracing import WAITS
from fscoord.trace.reading import Trace, assign_lanes
from fscoord.trace.report import (
    Bar,
    Holds,
    Seconds,
    Table,
    arrivals_of,
    ended_by,
    make_report,
    outer_waits,
    tables,
    waited,
)

SPANS_MAX: Final = 40_000
"""The most spans in a page. If a trace has more spans, the page has only the longest spans. So a page is smaller than 5
MB."""

ROWS_MAX: Final = 200
"""The most rows of a table in a page."""

SHORT: Final = 24
"""If no text of a column is longer than this, the texts of the column are not wrapped."""

NOT_SHOWN: Final = ("open", "process")

Document = dict[str, Any]


class _Texts:
    """A list of printable texts without repetitions. The spans of the page have indices instead of texts."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self._indices: dict[str, int] = {}

    def index(self, text: str) -> int:
        found = self._indices.setdefault(text, len(self.all))
        if found == len(self.all):
            self.all.append(printable(text))
        return found


def page_data(trace: Trace) -> Document:
    """Return the data that the page draws. Times are in microseconds since the first span of the group of clocks.

    A wait that is a part of a barrier, a lock or another operation is left out, because the wait would cover the
    operation. A span is an array of row, lane, kind, name, begin, length, the time that the process waited, outcome,
    the event that ended the wait, the row of the process that caused the event, and the number of the crossing. The row
    is -1 if no process caused an event, and the number is -1 if the span has no crossing. Kind, name, outcome and event
    are indices of ``texts``.
    """
    outer = set(map(id, outer_waits(trace)))
    whole = [span for span in trace.spans if span.kind not in (*NOT_SHOWN, *WAITS) or id(span) in outer]
    longest = sorted(whole, key=lambda span: -span.length)[:SPANS_MAX]
    shown = sorted(longest, key=lambda span: (span.begin, -span.end))
    texts, holds = _Texts(), Holds(trace)
    begins = trace.begins()
    crossings = {id(crossing): number for number, crossing in enumerate(trace.crossings)}
    lasts = [0] * len(trace.processes)
    for arrivals in filter(None, (arrivals_of(trace, crossing) for crossing in trace.crossings)):
        lasts[arrivals.last.process] += 1
    spans = []
    lanes: list[int] = [1] * len(trace.processes)
    for span, lane in zip(shown, assign_lanes(shown), strict=True):
        number = span.process
        lanes[number] = max(lanes[number], lane + 1)
        ended = ended_by(trace, span, holds)
        crossing = holds.crossings.get((number, span.begin))
        spans.append(
            [
                number,
                lane,
                texts.index(span.kind),
                texts.index(span.name),
                _us(span.begin - begins[trace.processes[number].group]),
                _us(span.length),
                _us(waited(span)),
                texts.index(span.outcome or ("held" if span.is_held else "open")),
                texts.index(ended.words),
                -1 if ended.process is None else ended.process,
                -1 if crossing is None else crossings[id(crossing)],
            ]
        )
    return {
        "texts": texts.all,
        "rows": [
            {
                "title": printable(process.title),
                "address": process.address,
                "host": process.host,
                "group": process.group,
                "lanes": lanes[number],
                "end": _us(process.last - begins[process.group]),
                "exited": process.has_exited,
                "last": lasts[number],
            }
            for number, process in enumerate(trace.processes)
        ],
        "spans": spans,
        "crossings": [_crossing(trace, crossing, begins, texts) for crossing in trace.crossings],
        "left_out": len(whole) - len(shown),
    }


def _crossing(trace: Trace, crossing: Any, begins: list[int], texts: _Texts) -> list[Any]:
    """Return the crossing as an array: name, row of the last process, its arrival, and whether the order is certain."""
    last = crossing.spans[-1]
    found = arrivals_of(trace, crossing)
    begin = begins[trace.processes[last.process].group]
    is_certain = bool(found and found.is_certain)
    return [texts.index(crossing.name), last.process if found else -1, _us(last.begin - begin), int(is_certain)]


def _us(nanoseconds: int) -> float:
    return round(nanoseconds / 1000, 1)


def make_page(trace: Trace) -> str:
    """Return the HTML page for `trace`."""
    report, data = make_report(trace), page_data(trace)
    template = files("fscoord.trace").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # so that no name of a key ends the script
    parts = {
        "title": escape(f"Trace of {len(trace.processes)} processes"),
        "headline": _headline(report),
        "facts": _facts(report),
        "tables": "\n".join(map(_table, tables(report))),
    }
    for name, part in parts.items():
        template = template.replace(f"<!--{name}-->", part)
    return template.replace("/*data*/", text)


def _headline(report: Document) -> str:
    """Return a sentence about the process for which the other processes waited longest in barriers."""
    rows = report["last_to_come"]
    if not rows:
        return "No barrier of two ranks or more was passed."
    first, total = rows[0], sum(row["last"] for row in rows)
    title = escape(printable(first["title"]))
    return (
        f"<strong>{title}</strong> came last to {first['last']} of {total} barriers, for which the"
        f" others waited <strong>{_time(first['cost_rank_s'])}</strong> (in rank-seconds)."
    )


def _facts(report: Document) -> str:
    processes = report["processes"]
    facts = [
        (len(processes), "process", "processes"),
        (len({process["host"] for process in processes}), "host", "hosts"),
        (sum(process["spans"] for process in processes), "span", "spans"),
        (len(report["deaths"]), "death", "deaths"),
        (len(report["time_outs"]), "time-out", "time-outs"),
        (len(report["open"]), "wait without an end", "waits without an end"),
    ]
    return "".join(f"<li><b>{count:,}</b> {one if count == 1 else more}</li>" for count, one, more in facts if count)


def _table(table: Table) -> str:
    columns = list(zip(*table.rows, strict=True))
    most = [max((value for value in column if isinstance(value, Bar)), default=0.0) for column in columns]
    classes = [
        " class=n" if is_number else " class=w" if any(len(str(value)) > SHORT for value in column) else ""
        for is_number, column in zip(table.numeric(), columns, strict=True)
    ]
    head = "".join(f"<th{kind}>{escape(text)}</th>" for text, kind in zip(table.headings, classes, strict=True))
    body = "".join(
        f"<tr>{''.join(_cell(value, classes[place], most[place]) for place, value in enumerate(row))}</tr>"
        for row in table.rows[:ROWS_MAX]
    )
    rest = len(table.rows) - ROWS_MAX
    more = f"<p>{rest} more rows are in the output of fscoord trace report --json.</p>" if rest > 0 else ""
    note = f"<p>{escape(table.note)}</p>" if table.note else ""
    return (
        f"<section><h2>{escape(table.title)}</h2>{note}<div class=scroll><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>{more}</section>"
    )


def _cell(value: object, kind: str, most: float) -> str:
    if isinstance(value, Bar):
        width = 100 * value / most if most else 0
        return f'<td class="n bar" style="--w:{width:.1f}%">{_time(value)}</td>'
    text = _time(value) if isinstance(value, Seconds) else str(value)
    return f"<td{kind}>{escape(printable(text))}</td>"


def _time(seconds: float) -> str:
    size = abs(seconds)
    unit, factor = ("s", 1.0) if size >= 1 else ("ms", 1e3) if size * 1e3 >= 1 else ("µs", 1e6)
    shown = seconds * factor
    return f"{shown:.3g} {unit}" if abs(shown) < 1000 else f"{shown:,.0f} {unit}"
