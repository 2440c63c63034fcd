"""`chrome_events` converts a trace to Chrome trace events, which Perfetto and chrome://tracing show.

"Trace Event Format" by the Chromium authors describes the format. A host becomes a "process" of the format, and a rank
becomes a "thread", so the viewers group the ranks by host. A span becomes a complete event ("X").

If process A ended the wait of process B, an arrow leads from a span of A to the span of the wait. An arrow is two flow
events, its start ("s") and its end ("f"). A viewer attaches a flow event to the span around the time of the event. So
the export adds a short span ("release") to A at the start of each arrow.
"""

from __future__ import annotations

from typing import Any, Final

from fscoord._runtime.escaping import printable
from fscoord._runtime.tracing import HOLDS, WAITS
from fscoord.trace.reading import Span, Trace, assign_lanes
from fscoord.trace.report import Holds, ended_by, waited

LANES: Final = 1000
"""Each process has fewer lanes than this. The number of a row is `LANES` times the number of the process, plus the
lane."""

MARK_NS: Final = 1000

Event = dict[str, Any]


def chrome_events(trace: Trace) -> dict[str, Any]:
    """Return the JSON document with the events of `trace`."""
    hosts: dict[tuple[int, str], int] = {}
    for process in trace.processes:
        hosts.setdefault((process.group, process.host), len(hosts) + 1)
    begins = trace.begins()
    spans, flows = _with_marks(trace)
    rows = dict(zip(map(id, spans), assign_lanes(spans), strict=True))
    lanes: dict[int, int] = {}
    for span in spans:
        lanes[span.process] = max(lanes.get(span.process, 0), rows[id(span)])
    events = _names(trace, hosts, lanes)

    def place(span: Span) -> Event:
        process = trace.processes[span.process]
        return {"pid": hosts[process.group, process.host], "tid": span.process * LANES + rows[id(span)]}

    def time(span: Span, nanoseconds: int) -> float:
        return (nanoseconds - begins[trace.processes[span.process].group]) / 1000

    for span in spans:
        events.append(
            {
                "ph": "X",
                "cat": span.kind,
                "name": printable(f"{span.kind} {span.name}"),
                "ts": time(span, span.begin),
                "dur": (span.end - span.begin) / 1000,
                **place(span),
                "args": _arguments(span),
            }
        )
    for number, (source, at, target) in enumerate(flows, 1):
        common = {"cat": "release", "name": "release", "id": number}
        events.append({"ph": "s", **common, "ts": time(source, at), **place(source)})
        events.append({"ph": "f", "bp": "e", **common, "ts": time(target, max(at, target.end)), **place(target)})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"source": "fscoord", "format": 1}}


def _with_marks(trace: Trace) -> tuple[list[Span], list[tuple[Span, int, Span]]]:
    """Return the spans and the arrows. A short span is added for each release that ended a wait.

    An arrow is a tuple: the span at its start, its time in ns, and the span of the wait.
    """
    holds = Holds(trace)
    spans = list(trace.spans)
    flows = []
    marks: dict[tuple[int, str, int], Span] = {}
    for span in trace.spans:
        if span.kind not in WAITS or span.is_open:
            continue
        ended = ended_by(trace, span, holds)
        if ended.process is None or ended.time is None or ended.process == span.process:
            continue
        if span.kind in HOLDS:  # the span also covers the hold, so the wait gets a span of its own
            released = span._replace(kind=f"{span.kind} wait", end=span.begin + waited(span))
            spans.append(released)
        else:
            released = span
        at = min(ended.time, released.end)
        key = ended.process, span.name, at
        if key not in marks:
            marks[key] = Span(ended.process, "release", span.name, span.store, None, at, at + MARK_NS, "done", 0, {})
            spans.append(marks[key])
        flows.append((marks[key], at, released))
    spans.sort(key=lambda span: (span.begin, -span.end))
    return spans, flows


def _names(trace: Trace, hosts: dict[tuple[int, str], int], lanes: dict[int, int]) -> list[Event]:
    """Return the events that name and sort the rows."""
    events: list[Event] = []
    for (group, host), number in hosts.items():
        apart = f" (clock {group + 1}, not comparable)" if len(trace.alignment.groups) > 1 else ""
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{host}{apart}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}})
    for number, process in enumerate(trace.processes):
        for lane in range(lanes.get(number, 0) + 1):
            place = {"pid": hosts[process.group, process.host], "tid": number * LANES + lane}
            name = printable(f"{process.title} ({process.address})") + (f" {lane + 1}" if lane else "")
            events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": place["tid"]}})
    return events


def _arguments(span: Span) -> dict[str, Any]:
    named = {"outcome": span.outcome or "open", "store": span.store, "rank": span.rank, **span.facts}
    return {
        name: printable(value) if isinstance(value, str) else value
        for name, value in named.items()
        if value not in (None, "")
    }
