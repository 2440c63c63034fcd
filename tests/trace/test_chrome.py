"""The Chrome trace events, against the published format: "Trace Event Format" by the Chromium authors.

Perfetto's own parser would be the better judge. The package `perfetto` downloads it, which needs a network.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from support.traces import MS, Clock, WrittenProcess, meet, write_job

from fscoord.trace.chrome import chrome_events
from fscoord.trace.reading import read

NUMBER = (int, float)
REQUIRED: dict[str, dict[str, Any]] = {
    "X": {"name": str, "cat": str, "ts": NUMBER, "dur": NUMBER, "pid": int, "tid": int, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
    "s": {"name": str, "cat": str, "id": int, "ts": NUMBER, "pid": int, "tid": int},
    "f": {"name": str, "cat": str, "id": int, "ts": NUMBER, "pid": int, "tid": int, "bp": str},
}
OPTIONAL = {"M": {"tid": int}}
METADATA = {"process_name": ("name", str), "thread_name": ("name", str), "process_sort_index": ("sort_index", int)}
METADATA["thread_sort_index"] = METADATA["process_sort_index"]


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return tmp_path / "traces"


def events_of(traces: Path) -> list[dict[str, Any]]:
    document = json.loads(json.dumps(chrome_events(read(traces))))
    assert document["displayTimeUnit"] in {"ms", "ns"}
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def check(events: list[dict[str, Any]]) -> None:
    """Check what the format asks of each event, that the spans of a row nest, and that arrows lie in spans."""
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events:
        kind = event["ph"]
        fields = REQUIRED[kind]
        assert event.keys() - {"ph"} - OPTIONAL.get(kind, {}).keys() == fields.keys()
        for name, shape in (fields | OPTIONAL.get(kind, {})).items():
            assert isinstance(event.get(name, 0), shape), (name, event)
        if kind == "M":
            name, shape = METADATA[event["name"]]
            assert isinstance(event["args"][name], shape)
        else:
            assert event["ts"] >= 0
        if kind == "X":
            assert event["dur"] >= 0
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in rows.values():
        stack: list[float] = []
        for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
            while stack and stack[-1] <= begin + 1e-6:
                stack.pop()
            assert not stack or end <= stack[-1] + 1e-6
            stack.append(end)
    arrows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            arrows[event["id"]].append(event)
            around = rows[event["pid"], event["tid"]]
            assert any(begin - 1e-6 <= event["ts"] <= end + 1e-6 for begin, end in around)
    for source, target in arrows.values():
        assert (source["ph"], target["ph"]) == ("s", "f")
        assert source["ts"] <= target["ts"]


@pytest.mark.parametrize("ranks", [2, 16])
def test_events_of_a_job_are_those_of_the_format(traces: Path, seed: int, ranks: int) -> None:
    write_job(traces, seed, ranks=ranks, hosts=2, barriers=10)
    check(events_of(traces))


def test_rows_are_ranks_grouped_by_host(traces: Path, seed: int) -> None:
    write_job(traces, seed, ranks=4, hosts=2, barriers=2)
    events = events_of(traces)
    hosts = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = [(hosts[event["pid"]], event["args"]["name"]) for event in events if event["name"] == "thread_name"]
    assert rows == [
        ("node0", "rank 0 (node0:1000)"),
        ("node0", "rank 1 (node0:1001)"),
        ("node1", "rank 2 (node1:1002)"),
        ("node1", "rank 3 (node1:1003)"),
    ]


def test_arrow_leads_from_the_last_to_come_to_those_who_waited(traces: Path) -> None:
    crew = [WrittenProcess("node0", 100 + rank, rank) for rank in range(3)]
    meet(crew, "b", [MS, 2 * MS, 9 * MS], [1000, 2000, 3000])
    for process in crew:
        process.write(traces)
    events = events_of(traces)
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    starts = [rows[event["tid"]] for event in events if event["ph"] == "s"]
    ends = [rows[event["tid"]] for event in events if event["ph"] == "f"]
    assert starts == ["rank 2 (node0:102)"] * 2
    assert sorted(ends) == ["rank 0 (node0:100)", "rank 1 (node0:101)"]


def test_arrow_to_a_lock_ends_where_its_wait_does(traces: Path) -> None:
    first, second = WrittenProcess("node0", 100, 0), WrittenProcess("node0", 101, 1)
    first.span("lock", "l", 0, 30 * MS, "released", "waited_ns", 0, "token", 1)
    second.span("lock", "l", 10 * MS, 70 * MS, "released", "waited_ns", 20 * MS, "token", 2)
    for process in (first, second):
        process.write(traces)
    events = events_of(traces)
    check(events)
    (target,) = [event for event in events if event["ph"] == "f"]
    assert target["ts"] == pytest.approx(30_000)


def test_spans_of_threads_that_overlap_have_rows_of_their_own(traces: Path) -> None:
    process = WrittenProcess("node0", 100, 0)
    process.span("wait", "a", 0, 10 * MS, thread=1)
    process.span("wait", "b", 5 * MS, 15 * MS, thread=2)
    process.write(traces)
    events = events_of(traces)
    check(events)
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 2


def test_hosts_that_are_not_comparable_say_so(traces: Path) -> None:
    for rank in range(2):
        process = WrittenProcess(f"node{rank}", 100, rank, Clock(rank * 10**12))
        process.span("wait", "k", 0, MS)
        process.write(traces)
    events = events_of(traces)
    check(events)
    titles = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert all("not comparable" in title for title in titles)
