"""The recorder alone: what it writes and when, and that it neither fails nor stops the program."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyfakefs.fake_filesystem_unittest import Patcher
from support.faulty import faulty_os
from support.internals import system, tracing
from support.interrupts import At

import fscoord
from fscoord import FileStore, barrier
from fscoord.trace.reading import Trace, read


def lines(directory: Path) -> list[Any]:
    return [json.loads(line) for path in sorted(directory.iterdir()) for line in path.read_text().splitlines() if line]


def names(trace: Trace) -> list[str]:
    return [span.name for span in trace.spans]


# Spans


def test_span_has_its_kind_name_times_outcome_and_facts(recorder: tracing.Recorder, traces: Path) -> None:
    before = system.time.monotonic_ns()
    span = recorder.begin("wait", "k\udcffé\n", "place", 3, "keys", 2)
    recorder.end(span, "passed", "by", "host:1", "dead", [1, 2])
    recorder.flush()
    (found,) = read(traces).spans
    assert (found.kind, found.name, found.store, found.rank, found.outcome) == (
        "wait",
        "k\udcffé\n",
        "place",
        3,
        "passed",
    )
    assert found.facts == {"keys": 2, "by": "host:1", "dead": [1, 2]}
    assert before <= found.begin <= found.end <= system.time.monotonic_ns()


def test_header_tells_process_clock_and_wall_time(recorder: tracing.Recorder, traces: Path) -> None:
    recorder.event("put", "q")
    recorder.flush()
    header = lines(traces)[0]
    assert (header["fscoord_trace"], header["host"], header["pid"]) == (1, system.hostname(), os.getpid())
    assert header["boot_id"] == system.boot_id().hex()
    assert header["time_namespace"] == system.namespace("time")
    assert header["start_time"] == system.start_time()
    assert abs(header["wall_ns"] - system.time.time_ns()) < 60e9


def test_process_without_spans_makes_no_file(recorder: tracing.Recorder, traces: Path) -> None:
    recorder.flush(with_open=True)
    recorder.close()
    assert not traces.exists()


def test_files_are_for_their_owner_alone(recorder: tracing.Recorder, traces: Path) -> None:
    recorder.event("put", "q")
    recorder.flush()
    assert [path.stat().st_mode & 0o777 for path in traces.iterdir()] == [0o600]


def test_spans_are_written_in_batches(
    recorder: tracing.Recorder, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "LONGEST_DELAY_NS", 10**12)  # nor does the machine make the batch take as long
    recorder.event("put", "first")  # the first is written at once, to make the file
    for number in range(tracing.BATCH - 1):
        recorder.event("put", f"item/{number}")
    assert names(read(traces)) == ["first"]
    recorder.event("put", "last")
    assert len(read(traces).spans) == tracing.BATCH + 1


def test_span_that_ends_long_after_the_last_write_is_written_at_once(
    recorder: tracing.Recorder, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "LONGEST_DELAY_NS", -1)
    recorder.event("put", "first")
    recorder.event("put", "second")
    recorder.event("put", "third")
    assert names(read(traces)) == ["first", "second", "third"]


def test_open_span_is_written_before_a_long_sleep_and_only_then(
    recorder: tracing.Recorder, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "LONG_SLEEP_S", 100.0)  # so that the wait itself is not long on a busy machine
    recorder.event("put", "first")
    span = recorder.begin("wait", "k")
    recorder.before_sleep(span, tracing.LONG_SLEEP_S)
    assert names(read(traces)) == ["first"]
    recorder.before_sleep(span, tracing.LONG_SLEEP_S + 0.01)
    (_, found) = read(traces).spans
    assert found.name == "k"
    assert found.is_open


def test_open_span_is_written_when_its_wait_has_become_long(recorder: tracing.Recorder, traces: Path) -> None:
    span = recorder.begin("wait", "k")
    span[tracing.BEGIN] -= int(tracing.LONG_SLEEP_S * 1e9)
    recorder.before_sleep(span, 0.001)
    assert names(read(traces)) == ["k"]


def test_open_span_is_written_once_and_its_end_counts(recorder: tracing.Recorder, traces: Path) -> None:
    span = recorder.begin("wait", "k")
    for _ in range(3):
        recorder.before_sleep(span, math.inf)
    recorder.end(span, "passed")
    recorder.flush()
    rows = [row for line in lines(traces)[1:] for row in line]
    assert [row[tracing.OUTCOME] for row in rows] == ["", "passed"]
    (found,) = read(traces).spans
    assert not found.is_open


def test_long_sleep_writes_what_else_is_open_too(recorder: tracing.Recorder, traces: Path) -> None:
    recorder.begin("lock", "held")
    recorder.before_sleep(recorder.begin("wait", "k"), math.inf)
    assert names(read(traces)) == ["held", "k"]


def test_span_that_was_written_open_is_written_again_as_soon_as_it_ends(
    recorder: tracing.Recorder, traces: Path
) -> None:
    """So a process that is killed soon after a long wait does not seem to have died in it."""
    span = recorder.begin("wait", "k")
    recorder.before_sleep(span, math.inf)
    recorder.end(span, "passed")
    (found,) = read(traces).spans
    assert found.outcome == "passed"


def test_facts_that_are_added_to_a_written_span_reach_the_file(recorder: tracing.Recorder, traces: Path) -> None:
    span = recorder.begin("lock", "l")
    recorder.before_sleep(span, math.inf)
    recorder.acquired(span, "token", 3)
    recorder.flush(with_open=True)
    (found,) = read(traces).spans
    assert (found.is_held, found.facts) == (True, {"token": 3})


def test_span_ends_once(recorder: tracing.Recorder, traces: Path) -> None:
    span = recorder.begin("wait", "k")
    recorder.end(span, "passed")
    recorder.end(span, "interrupted")
    recorder.flush()
    (found,) = read(traces).spans
    assert found.outcome == "passed"


def test_rank_of_a_foreign_type_is_written_as_text_and_disturbs_nothing(
    recorder: tracing.Recorder, traces: Path
) -> None:
    class Rank(int):
        __repr__ = object.__repr__

    recorder.event("put", "q", "", Rank(3), "odd", object(), "kept", 1)
    recorder.flush()
    assert read(traces).spans or read(traces).processes


# Bounds


def test_segments_alternate_and_hold_the_newest_spans(traces: Path) -> None:
    recorder = tracing.Recorder(str(traces), segment_bytes=4000)
    for number in range(1000):
        recorder.event("put", f"item/{number}")
        recorder.flush()
        assert sum(path.stat().st_size for path in traces.iterdir()) <= 2 * 4000 + 500
    assert len(list(traces.iterdir())) == 2
    trace = read(traces)
    found = [int(name.partition("/")[2]) for name in names(trace)]
    assert found == list(range(found[0], 1000))
    assert len(found) > 4000 / 200
    assert trace.processes[0].overwritten
    recorder.close()


def test_open_span_that_was_written_is_in_the_newest_segment_as_well(traces: Path) -> None:
    recorder = tracing.Recorder(str(traces), segment_bytes=2000)
    recorder.before_sleep(recorder.begin("lock", "held for long"), math.inf)
    for number in range(200):
        recorder.event("put", f"item/{number}")
        recorder.flush()
    assert "held for long" in names(read(traces))
    recorder.close()


def test_spans_that_nobody_ends_take_bounded_memory(
    recorder: tracing.Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "OPEN_MAX", 10)
    spans = [recorder.begin("lock", str(number)) for number in range(20)]
    recorder.flush(with_open=True)
    for span in spans:
        recorder.end(span, "released")
    assert recorder._open == {}


# What must not disturb the program


def test_full_disk_loses_spans_and_no_operation(
    recorder: tracing.Recorder, traces: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(name: str, _: Any, arguments: tuple[Any, ...]) -> None:
        if name == "write" and arguments[0] == recorder._fd:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with caplog.at_level(logging.WARNING, "fscoord"), faulty_os() as faulty, FileStore(tmp_path / "store") as store:
        recorder.event("put", "before")
        recorder.flush()
        with faulty.instead(refuse):
            for number in range(3):
                recorder.event("put", str(number))
                recorder.flush()
                store.set("k", str(number))
        assert store.get("k") == b"2"
    (message,) = [record.getMessage() for record in caplog.records]
    assert str(traces) in message
    assert "No space left on device" in message
    assert names(read(traces))[-1] == "before"


def test_recorder_tries_again_some_time_after_an_error(
    recorder: tracing.Recorder, traces: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_os() as faulty, faulty.fail(0, errno.ENOSPC, names=("write",), for_good=True):
        recorder.event("put", "lost")
        recorder.flush()
        recorder.event("put", "lost too")
        recorder.flush()
    recorder._tries_at = 0.0
    recorder.event("put", "kept")
    recorder.flush()
    assert names(read(traces)) == ["kept"]


def test_line_that_a_full_disk_has_cut_does_not_spoil_the_next(recorder: tracing.Recorder, traces: Path) -> None:
    recorder.event("put", "before")
    recorder.flush()
    real = os.write

    class Short:
        def __getattr__(self, name: str) -> Any:
            return getattr(os, name)

        @staticmethod
        def write(fd: int, data: bytes) -> int:
            return real(fd, data[:20])

    system.os, kept = type("os", (type(os),), {})("os"), system.os  # type: ignore[assignment]
    try:
        system.os.__dict__.update(vars(os) | {"write": Short.write})
        recorder.event("put", "cut")
        recorder.flush()
    finally:
        system.os = kept
    recorder.event("put", "after")
    recorder.flush()
    trace = read(traces)
    assert names(trace) == ["before", "after"]
    assert trace.processes[0].skipped == 1


def test_directory_that_can_not_be_made_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recorder = tracing.Recorder(str(tmp_path / "file" / "traces"))
    with caplog.at_level(logging.WARNING, "fscoord"):
        for _ in range(3):
            recorder._tries_at = 0.0
            recorder.event("put", "q")
            recorder.flush()
    (message,) = [record.getMessage() for record in caplog.records]
    assert "Not a directory" in message
    assert "FSCOORD_TRACE" in message


def test_symbolic_link_in_the_place_of_a_file_is_not_followed(recorder: tracing.Recorder, traces: Path) -> None:
    recorder.event("put", "q")
    recorder.flush()
    (path,) = traces.iterdir()
    other = traces.parent / "precious"
    other.write_text("x")
    path.unlink()
    path.symlink_to(other)
    recorder._serial, recorder._size = 0, 1 << 40  # the next write opens the same name again
    recorder.event("put", "q")
    recorder.flush()
    assert other.read_text() == "x"


def test_segment_takes_the_place_of_whatever_another_user_has_put_there(
    recorder: tracing.Recorder, traces: Path
) -> None:
    """A FIFO of that name, which no process reads, would stop the traced process for ever."""
    recorder.event("put", "q")
    recorder.flush()
    (first,) = traces.iterdir()
    second = Path(str(first).replace(".0.trace", ".1.trace"))
    os.mkfifo(second)
    reader = os.open(second, os.O_RDONLY | os.O_NONBLOCK)
    try:
        recorder._size = 1 << 40  # the segment is full
        recorder.event("put", "next")
        recorder.flush()
        assert os.read(reader, 1) == b""
    finally:
        os.close(reader)
    assert stat.S_ISREG(second.stat().st_mode)
    assert names(read(traces)) == ["q", "next"]


def test_segment_whose_place_can_not_be_had_loses_spans_and_no_operation(
    recorder: tracing.Recorder, traces: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.event("put", "q")
    recorder.flush()
    (first,) = traces.iterdir()
    Path(str(first).replace(".0.trace", ".1.trace")).mkdir()
    recorder._size = 1 << 40
    with caplog.at_level(logging.WARNING, "fscoord"):
        recorder.event("put", "next")
        recorder.flush()
    assert "loses spans" in caplog.text
    assert names(read(traces)) == ["q"]


def test_signal_handler_that_records_in_the_middle_of_a_write_waits_for_nobody(recorder: tracing.Recorder) -> None:
    recorder.event("put", "q")

    calls = []

    def again(name: str, *_: Any) -> None:
        if name == "write" and len(calls) < 3:
            calls.append(name)
            recorder.event("put", "in the handler")
            recorder.flush()

    with faulty_os() as faulty, faulty.instead(again):
        recorder.event("put", "q")
        recorder.flush()
    assert len(calls) == 3
    assert not recorder._pending


def test_ctrl_c_at_any_point_passes_through_and_spans_go_on(traces: Path, seed: int) -> None:
    number = 1
    while True:
        recorder = tracing.Recorder(str(traces / str(number)), segment_bytes=600)

        def interrupt() -> None:
            raise KeyboardInterrupt

        at = At(number, interrupt, first_inside="_runtime/tracing.py")
        try:
            with at:
                for turn in range(4):
                    span = recorder.begin("wait", f"k/{turn}")
                    recorder.before_sleep(span, math.inf)
                    recorder.end(span, "passed")
                    recorder.flush()
        except KeyboardInterrupt:
            pass
        if not at.reached:
            recorder.close()
            break
        recorder._busy = system.threading.Lock()  # an interruption just after the acquisition loses spans, and no more
        recorder.event("put", "afterwards")
        recorder.flush()
        recorder.event("put", "afterwards")  # the first may follow a descriptor that was lost between two calls
        recorder.flush()
        assert "afterwards" in names(read(traces / str(number))), at.where
        recorder.close()
        number += 1
    assert number > 30


def test_threads_lose_no_span_and_write_whole_lines(recorder: tracing.Recorder, traces: Path) -> None:
    def work(number: int) -> None:
        for turn in range(500):
            recorder.end(recorder.begin("wait", f"{number}/{turn}"), "passed")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    recorder.flush()
    trace = read(traces)
    assert sorted(names(trace)) == sorted(f"{number}/{turn}" for number in range(8) for turn in range(500))
    assert trace.processes[0].skipped == 0
    assert {span.thread for span in trace.spans} == set(range(8)) or len({span.thread for span in trace.spans}) <= 8


def test_forked_child_has_a_file_of_its_own_without_the_spans_of_its_parent(
    recorder: tracing.Recorder, traces: Path
) -> None:
    recorder.event("put", "parent, written")
    recorder.flush()
    recorder.event("put", "parent, not written yet")
    inherited = recorder.begin("lock", "held by the parent")
    child = os.fork()
    if child == 0:
        try:
            recorder.end(inherited, "released")
            recorder.event("put", "child")
            recorder.flush()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    recorder.end(inherited, "released")
    recorder.flush()
    trace = read(traces)
    by_pid = {
        process.pid: {s.name for s in trace.spans if trace.processes[s.process] is process}
        for process in trace.processes
    }
    assert by_pid == {
        os.getpid(): {"parent, written", "parent, not written yet", "held by the parent"},
        child: {"child"},
    }


def test_fork_while_another_thread_writes_leaves_the_child_a_free_recorder(
    recorder: tracing.Recorder, traces: Path
) -> None:
    recorder._busy.acquire()
    child = os.fork()
    if child == 0:
        try:
            recorder.event("put", "child")
            recorder.flush()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert names(read(traces)) == ["child"]


def test_faked_files_get_no_bytes_of_a_real_descriptor(recorder: tracing.Recorder, traces: Path) -> None:
    recorder.event("put", "real")
    recorder.flush()
    with Patcher():
        recorder.event("put", "faked")
        recorder.flush()
    assert names(read(traces)) == ["real"]


# The beginning


@pytest.mark.usefixtures("begins_later")
def test_process_has_one_trace(tmp_path: Path) -> None:
    tracing.start(tmp_path / "one")
    tracing.start(str(tmp_path / "one"))
    with pytest.raises(ValueError, match=r"records its trace in .*one already.*unset FSCOORD_TRACE"):
        tracing.start(tmp_path / "two")


@pytest.mark.usefixtures("begins_later")
def test_store_starts_the_trace_that_it_is_given(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", trace=tmp_path / "traces", rank=2, label="worker"):
        pass
    assert tracing.recorder is not None
    tracing.recorder.flush()
    (process,) = read(tmp_path / "traces").processes
    assert (process.rank, process.label) == (2, "worker")


WAITER = """
import sys
import fscoord
from fscoord import FileStore, barrier
with FileStore(sys.argv[1], rank=1) as store:
    print("ready", flush=True)
    store.wait(["never"])
"""


def start_waiter(tmp_path: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"FSCOORD_TRACE": str(tmp_path / "traces")}
    command = [sys.executable, "-c", WAITER, str(tmp_path / "store")]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def until(holds: Callable[[], bool]) -> None:
    """Return when `holds()`. The limit of the test bounds the wait."""
    pause = threading.Event()
    while not holds():
        pause.wait(0.01)


def test_killed_process_leaves_its_last_wait(tmp_path: Path) -> None:
    with start_waiter(tmp_path) as waiter:
        assert waiter.stdout is not None
        assert waiter.stdout.readline() == "ready\n"
        until(
            lambda: (
                (tmp_path / "traces").exists()
                and any('"never"' in p.read_text() for p in (tmp_path / "traces").iterdir())
            )
        )
        waiter.send_signal(signal.SIGKILL)
    trace = read(tmp_path / "traces")
    (span,) = [span for span in trace.spans if span.kind == "wait"]
    assert (span.name, span.is_open) == ("never", True)
    assert not trace.processes[0].has_exited
    assert trace.processes[0].rank == 1


def test_process_that_exits_says_so(tmp_path: Path) -> None:
    program = "import sys; from fscoord import FileStore; FileStore(sys.argv[1], rank=0).set('k', 'v')"
    environment = os.environ | {"FSCOORD_TRACE": str(tmp_path / "traces")}
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "store")], env=environment, check=True)
    (process,) = read(tmp_path / "traces").processes
    assert process.has_exited


def test_child_that_closes_its_store_and_ends_without_a_word_leaves_its_spans(
    recorder: tracing.Recorder, traces: Path, tmp_path: Path
) -> None:
    child = os.fork()
    if child == 0:
        try:
            with FileStore(tmp_path / "store", timeout=30) as store:
                barrier(store, 1, "first", rank=0)
                barrier(store, 1, "second", rank=0)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [span.name for span in read(traces).spans if span.kind == "barrier"] == ["first", "second"]


def test_relative_directory_without_a_working_directory_fails_no_import(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program = f"import os; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r}); import fscoord; print('imported')"
    environment = os.environ | {"FSCOORD_TRACE": "traces", "PYTHONPATH": str(Path(fscoord.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "imported\n", done.stderr
