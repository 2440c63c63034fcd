"""The reader of traces, on whole, torn, damaged and foreign files."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.traces import MS, Clock, WrittenProcess, meet, write_job

from fscoord import FscoordError
from fscoord.trace import reading
from fscoord.trace.chrome import chrome_events
from fscoord.trace.page import make_page
from fscoord.trace.reading import Span, assign_lanes, read
from fscoord.trace.report import make_report


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return tmp_path / "traces"


def one_process(spans: int = 3) -> WrittenProcess:
    process = WrittenProcess("node0", 100, 0)
    for number in range(spans):
        process.span("wait", f"k{number}", number * MS, number * MS + 500)
    return process


def test_processes_spans_and_barriers_are_read(traces: Path, seed: int) -> None:
    write_job(traces, seed, ranks=4, hosts=2, barriers=3)
    trace = read(traces)
    assert [(process.host, process.rank) for process in trace.processes] == [
        ("node0", 0),
        ("node0", 1),
        ("node1", 2),
        ("node1", 3),
    ]
    assert [crossing.name for crossing in trace.crossings] == ["epoch/0", "epoch/1", "epoch/2"]
    assert all(crossing.is_sound for crossing in trace.crossings)


def test_file_may_end_anywhere(traces: Path) -> None:
    path = one_process().write(traces)
    whole = path.read_bytes()
    header = whole.index(b"\n") + 1
    for end in range(header, len(whole)):
        path.write_bytes(whole[:end])
        assert len(read(traces).spans) == (3 if end >= len(whole) - 1 else 0)
    for end in range(header):
        path.write_bytes(whole[:end])
        with pytest.raises(FscoordError, match="holds no trace"):
            read(traces)


@pytest.mark.parametrize(
    "line",
    [
        "null",
        "7",
        '"text"',
        "{}",
        "[7]",
        "[[]]",
        '[["wait",1,1,1,2,"k","s",null]]',
        '[["wait",1,1,1,2,"k","s",null,"passed","odd"]]',
        '[["wait","1",1,1,2,"k","s",null,"passed"]]',
        f'[["wait",1,1,{10**400},2,"k","s",null,"passed"]]',
        f'[["wait",1,1,1,2,"k","s",{1 << 63},"passed"]]',
        "[" * 100_000,
        "\x00\x01\x02",
        "not JSON",
    ],
)
def test_damaged_line_is_skipped_and_counted(traces: Path, line: str) -> None:
    one_process().write(traces, tail=line + "\n" + '[["put",9,1,9000000,9000001,"q","s",null,"done"]]\n')
    trace = read(traces)
    assert [span.name for span in trace.spans] == ["k0", "k1", "k2", "q"]
    assert trace.processes[0].skipped == 1


@pytest.mark.parametrize("value", ["text", None, -1, 10**400, 1.5, [], {}, [None], {"a": 1}, True])
def test_facts_of_a_wrong_type_raise_nothing(traces: Path, value: object) -> None:
    first, second = WrittenProcess("node0", 100, 0), WrittenProcess("node0", 101, 1)
    names = ("world_size", "waited_ns", "token", "dead", "by", "by_rank", "key", "operation", "repeated", "address")
    for process in (first, second):
        for kind in ("barrier", "exchange", "wait", "lock", "election", "worker", "death", "open", "take"):
            for outcome in ("passed", "death", "released"):
                facts = [each for name in names for each in (name, value)]
                process.span(kind, "n", 10 * MS, 20 * MS, outcome, *facts, rank=process.rank)
        process.write(traces)
    trace = read(traces)
    json.dumps(make_report(trace))
    json.dumps(chrome_events(trace))
    make_page(trace)


def test_flipped_bits_raise_nothing(traces: Path, rng: random.Random) -> None:
    path = one_process(20).write(traces)
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[rng.randrange(len(whole))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            read(traces)
        except FscoordError as error:
            assert "holds no trace" in str(error)


def test_files_of_others_are_left_alone(traces: Path) -> None:
    one_process().write(traces)
    (traces / "report.html").write_text("<html>")
    (traces / "other.trace").write_text("hello")
    (traces / "empty.trace").write_text("")
    (traces / "old.trace").write_text(json.dumps({"fscoord_trace": 99}) + "\n")
    assert len(read(traces).processes) == 1


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_link(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (make_fifo, "it is not a regular file"),
        (make_link, "it is a symbolic link"),
        (make_link_to_nothing, "it is a symbolic link"),
        (Path.mkdir, "it is not a regular file"),
    ],
)
def test_name_that_can_not_be_read_is_left_out_and_reported(
    make: Callable[[Path], None], reason: str, traces: Path
) -> None:
    """Another user may put it there. A FIFO would stop the reader for ever, and a device would fill its memory."""
    before = os.listdir("/proc/self/fd")
    one_process().write(traces)
    make(traces / "x.trace")
    trace = read(traces)
    assert len(trace.processes) == 1
    assert trace.unreadable == [f"{traces}/x.trace is left out of the trace: {reason}"]
    (traces / next(name for name in os.listdir(traces) if name != "x.trace")).unlink()
    with pytest.raises(FscoordError, match=rf"holds no trace.*; .*x\.trace is left out of the trace: {reason}"):
        read(traces)
    assert os.listdir("/proc/self/fd") == before


def test_endless_line_is_read_to_a_limit(traces: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file has no size on the disk."""
    monkeypatch.setattr(reading, "FILE_MAX", 1 << 20)
    path = one_process().write(traces)
    os.truncate(path, 1 << 40)
    sparse = traces / "sparse.trace"
    sparse.touch()
    os.truncate(sparse, 1 << 40)
    trace = read(traces)
    assert [span.name for span in trace.spans] == ["k0", "k1", "k2"]
    assert trace.processes[0].skipped == 1


def test_directory_without_a_trace_is_an_error_that_says_what_to_do(traces: Path) -> None:
    traces.mkdir()
    with pytest.raises(FscoordError, match=r"traces holds no trace.*Set FSCOORD_TRACE to a directory"):
        read(traces)


def test_segments_of_one_process_are_joined_and_ends_count(traces: Path) -> None:
    process = WrittenProcess("node0", 100, 0)
    process.span("wait", "open, then ended", 10, None)
    older = process.write(traces)
    process.rows[0][4], process.rows[0][8] = 50, "passed"
    process.span("wait", "newer", 60, 70)
    newer = older.with_name(older.name.replace(".0.", ".1."))
    newer.write_text("\n".join([json.dumps(process.header(2)), json.dumps(process.rows)]) + "\n")
    trace = read(traces)
    assert [(span.name, span.outcome) for span in trace.spans] == [("open, then ended", "passed"), ("newer", "passed")]
    assert not trace.processes[0].overwritten


def test_process_number_that_is_used_again_is_another_process(traces: Path) -> None:
    for token in ("one", "two"):
        process = one_process()
        process.write(traces)
        (path,) = traces.glob("node0-*")
        path.write_text(path.read_text().replace("00000064", token))
        path.rename(traces / f"{token}.trace")
    assert len(read(traces).processes) == 2


def test_open_span_lasts_until_the_death_of_its_process_was_recorded(traces: Path) -> None:
    dead, alive = WrittenProcess("node0", 100, 0), WrittenProcess("node0", 101, 1)
    dead.span("wait", "never", 10 * MS, None)
    alive.span("death", "node0:100", 30 * MS, 31 * MS, "recorded", "session", 1, store="")
    alive.span("wait", "k", 40 * MS, 90 * MS)
    for process in (dead, alive):
        process.write(traces)
    (span,) = [span for span in read(traces).spans if span.is_open]
    assert (span.begin, span.end) == (10 * MS, 31 * MS)


def test_process_that_told_no_rank_has_the_one_of_its_death_record_or_of_its_agent(traces: Path) -> None:
    dead, worker, agent = (WrittenProcess("node0", pid) for pid in (100, 101, 50))
    for process in (dead, worker):
        process.span("put", "q", MS, 2 * MS, "done")
    agent.span("worker", "worker 7", 0, 5 * MS, "exit", "worker_rank", 7, "address", "node0:101", store="")
    agent.span("death", "node0:100", 6 * MS, 7 * MS, "recorded", "session", 1, "dead_rank", 4, store="")
    for process in (dead, worker, agent):
        process.write(traces)
    assert {process.pid: process.rank for process in read(traces).processes} == {100: 4, 101: 7, 50: None}


def test_open_span_of_a_process_that_may_still_run_lasts_to_the_end_of_the_trace(traces: Path) -> None:
    hung, other = WrittenProcess("node0", 100, 0), WrittenProcess("node0", 101, 1)
    hung.span("wait", "never", 10 * MS, None)
    other.span("wait", "k", 40 * MS, 90 * MS)
    for process in (hung, other):
        process.write(traces)
    (span,) = [span for span in read(traces).spans if span.is_open]
    assert span.end == 90 * MS


def test_times_of_all_hosts_are_those_of_one_clock(traces: Path, seed: int) -> None:
    rng = random.Random(seed)
    crew = [WrittenProcess(f"node{rank}", 100, rank, Clock(rng.randrange(10**15))) for rank in range(3)]
    now = MS
    for turn in range(30):
        now = meet(
            crew, f"b{turn}", [now + rng.randrange(MS) for _ in crew], [rng.randrange(1000, 50_000) for _ in crew]
        )
    for process in crew:
        process.write(traces)
    trace = read(traces)
    assert len(trace.alignment.groups) == 1
    for crossing in trace.crossings:
        assert max(span.begin for span in crossing.spans) <= min(span.end for span in crossing.spans) + 20_000


def test_hosts_that_never_met_are_not_comparable(traces: Path) -> None:
    for rank in range(2):
        process = WrittenProcess(f"node{rank}", 100, rank, Clock(rank * 10**12))
        process.span("wait", "k", MS, 2 * MS)
        process.write(traces)
    trace = read(traces)
    assert len(trace.alignment.groups) == 2
    assert trace.bound(0, 0) == 0


def test_barrier_of_which_a_rank_came_twice_bounds_no_clock(traces: Path) -> None:
    first, second = WrittenProcess("node0", 100, 0), WrittenProcess("node1", 100, 0, Clock(10**12))
    first.span("barrier", "b", MS, 2 * MS, "passed", "world_size", 1, rank=0)
    second.span("barrier", "b", 5 * MS, 6 * MS, "passed", "world_size", 1, rank=0)
    for process in (first, second):
        process.write(traces)
    trace = read(traces)
    (crossing,) = trace.crossings
    assert not crossing.is_sound
    assert len(trace.alignment.groups) == 2


def test_lanes_hold_spans_that_are_nested_or_apart(rng: random.Random) -> None:
    spans = []
    for _ in range(300):
        begin = rng.randrange(1000)
        spans.append(Span(0, "wait", "", "", None, begin, begin + rng.randrange(1, 100), "passed", 0, {}))
    spans.sort(key=lambda span: (span.begin, -span.end))
    lanes = assign_lanes(spans)
    for number in set(lanes):
        stack: list[Span] = []
        for span in [span for span, lane in zip(spans, lanes, strict=True) if lane == number]:
            while stack and stack[-1].end <= span.begin:
                stack.pop()
            assert not stack or span.end <= stack[-1].end
            stack.append(span)
