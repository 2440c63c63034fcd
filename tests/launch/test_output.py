"""Which streams go where, in the words of torchrun; and consoles that go away."""

from __future__ import annotations

import io
import os
import threading
import time
from contextlib import suppress

import pytest
from support.places import HANG_S, start_thread, until

from fscoord.launch import Console, Streams, parse_streams, worker


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("0", {None: 0}),
        ("3", {None: 3}),
        ("0:3,1:1", {None: 0, 0: 3, 1: 1}),
        (" 12:2 ", {None: 0, 12: 2}),
    ],
)
def test_streams_are_read_from_text(text, streams):
    assert parse_streams(text) == streams


@pytest.mark.parametrize("text", ["", "4", "x", "-1", "0:", ":1", "0:4", "0:1,", "0:1,0:2", "a:1", "0:1:1", "²:1"])
def test_text_that_names_no_streams_is_refused(text):
    with pytest.raises(ValueError):
        parse_streams(text)


def test_redirects_take_a_stream_from_the_console_and_tee_gives_it_back():
    streams = Streams(parse_streams("0:1,1:3"), parse_streams("1:2,2:1"))
    shown = {(rank, stream): streams.is_shown(rank, stream) for rank in range(3) for stream in (1, 2)}
    files = {(rank, stream): streams.is_file(rank, stream) for rank in range(3) for stream in (1, 2)}
    assert [key for key, value in shown.items() if not value] == [(0, 1), (1, 1)]
    assert [key for key, value in files.items() if value] == [(0, 1), (1, 1), (1, 2), (2, 1)]


def test_lines_are_whole_long_ones_cut_and_the_last_kept(tmp_path):
    out = io.BytesIO()
    tail: list[bytes] = []
    text = b"".join(b"%d\n" % n for n in range(30)) + b"x" * 70_000
    with Console(out, out) as console:
        console.follow(io.BytesIO(text), 1, b"[0] ", (tmp_path / "file").open("wb"), tail)
    lines = out.getvalue().splitlines()
    assert lines[:2] == [b"[0] 0", b"[0] 1"]
    assert [len(line) for line in lines[-2:]] == [65536 + 4, 70_000 - 65536 + 4]
    assert len(tail) == 20
    assert (tmp_path / "file").read_bytes() == text


@pytest.fixture
def worker_output():
    """Give `follow(file, prefix, tail)`: a pipe of which the console that writes to `file` copies each byte."""
    threads, pipes = [], []

    def follow(file, tail, copy=None):
        ours, theirs = os.pipe()
        console = Console(file, io.BytesIO())

        def run():
            with console:
                console.follow(os.fdopen(ours, "rb"), 1, b"[7] ", copy, tail)

        threads.append(start_thread(run))
        pipes.append(os.fdopen(theirs, "wb", buffering=0))
        return pipes[-1]

    yield follow
    for pipe in pipes:
        pipe.close()
    for thread in threads:
        thread.join()


def test_state_of_a_progress_bar_is_shown_before_its_line_ends(worker_output, tmp_path, monkeypatch):
    """The first state is shown at once, the newest one when `BAR_S` is over, and the last one is not repeated."""
    out, tail = io.BytesIO(), []
    delays = iter([worker.BAR_S, 10 * HANG_S])

    class Delay:
        def __radd__(self, now):
            return now + next(delays)

    monkeypatch.setattr(worker, "BAR_S", Delay())
    pipe = worker_output(out, tail, (tmp_path / "file").open("wb"))
    pipe.write(b"\r 1%")
    until(lambda: out.getvalue() == b"[7]  1%\n")
    for percent in (b"2", b"3", b"4"):
        pipe.write(b"\r " + percent + b"%")
    until(lambda: out.getvalue().endswith(b"%\n") and out.getvalue().count(b"\n") == 2)
    seen = out.getvalue()
    assert seen in {b"[7]  1%%\n[7]  %d%%\n" % number for number in (2, 3, 4)}
    pipe.write(b"\r 5%\r 6%\nend\n")
    until(lambda: out.getvalue() == seen + b"[7]  6%\n[7] end\n")
    until(lambda: tail == [b" 6%\n", b"end\n"])
    assert (tmp_path / "file").read_bytes() == b"\r 1%\r 2%\r 3%\r 4%\r 5%\r 6%\nend\n"


def test_last_state_is_shown_once_although_its_line_ends_later(worker_output):
    out = io.BytesIO()
    pipe = worker_output(out, [])
    pipe.write(b"100%\r")
    until(lambda: out.getvalue() == b"[7] 100%\n")
    pipe.write(b"\n\nend\n")
    until(lambda: out.getvalue() == b"[7] 100%\n[7] \n[7] end\n")


def test_console_that_is_a_file_gets_the_last_state_of_each_line(worker_output, tmp_path):
    path = tmp_path / "console"
    with path.open("wb", buffering=0) as file:
        pipe = worker_output(file, [])
        for number in range(1000):
            pipe.write(b"\r%d" % number)
        pipe.write(b"\r\nof Windows\r\n\rlast")
        pipe.close()
        until(lambda: path.read_bytes() == b"[7] 999\n[7] of Windows\n[7] last\n")


def test_bar_without_an_end_takes_little_memory():
    """A state that is not the last one is not kept. Otherwise this bar would become several lines."""
    out, tail = io.BytesIO(), list[bytes]()
    with Console(out, io.BytesIO()) as console:
        console.follow(io.BytesIO(b"\r".join(b"%d" % number for number in range(worker.LINE_MAX))), 1, None, None, tail)
    assert tail == [b"%d\n" % (worker.LINE_MAX - 1)]


def test_file_on_a_full_disk_ends_and_the_output_is_read_on():
    """/dev/full refuses each write as a full disk does. A pipe without a reader would kill the worker."""
    out, err = io.BytesIO(), io.BytesIO()
    tail: list[bytes] = []
    with open("/dev/full", "wb") as file, Console(out, err) as console:
        console.follow(io.BytesIO(b"one\ntwo\n"), 1, b"[0] ", file, tail)
    assert out.getvalue() == b"[0] one\n[0] two\n"
    assert tail == [b"one\n", b"two\n"]
    words = b"fscoord: /dev/full: No space left on device; the file ends here, and the worker goes on\n"
    assert err.getvalue() == words


def test_console_that_nobody_can_read_any_more_is_given_up_and_counts():
    reader, writer = os.pipe()
    os.close(reader)
    err = io.BytesIO()
    with os.fdopen(writer, "wb", buffering=0) as sink, Console(sink, err) as console:
        console.write(1, b"x\n")
        console.write(1, b"x\n")
        console.write(2, b"y\n")
    assert err.getvalue() == b"y\nfscoord: standard output: Broken pipe; 2 lines of output were dropped\n"


@pytest.fixture
def full_pipe():
    """A pipe that takes no more data, as that of a pager that waits for a key: its reading and its writing end."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with suppress(BlockingIOError):
        while os.write(writer, b"." * 4096):
            pass
    os.set_blocking(writer, True)
    with os.fdopen(reader, "rb", buffering=0) as pager, os.fdopen(writer, "wb", buffering=0) as sink:
        yield pager, sink


def read_all(pager):
    """Read up to the end in another thread, which returns the text after the filling of the pipe."""
    return start_thread(lambda: b"".join(iter(lambda: pager.read(1 << 16), b"")).lstrip(b"."))


def test_console_whose_reader_pauses_holds_up_nothing_else_and_loses_nothing(full_pipe):
    pager, sink = full_pipe
    err = io.BytesIO()
    with Console(sink, err) as console:
        for number in range(worker.LINES_MAX):
            console.write(1, b"%d\n" % number)
        console.write(2, b"said\n")
        until(lambda: err.getvalue() == b"said\n")
        reading = read_all(pager)
    sink.close()
    assert reading.join() == b"".join(b"%d\n" % number for number in range(worker.LINES_MAX))
    assert err.getvalue() == b"said\n"


def test_worker_waits_for_the_reader_of_its_output_but_its_end_does_not(full_pipe):
    """After the end of a worker its pipe has little left. So its end is known although the console takes nothing."""
    pager, sink = full_pipe
    ours, theirs = os.pipe()
    os.set_blocking(theirs, False)
    has_ended = threading.Event()
    with Console(sink, io.BytesIO()) as console:
        following = start_thread(lambda: console.follow(os.fdopen(ours, "rb"), 1, b"[0] ", None, [], has_ended.is_set))
        with os.fdopen(theirs, "wb", buffering=0) as pipe:
            until(lambda: is_full(pipe))
        has_ended.set()
        following.join()
        reading = read_all(pager)
    sink.close()
    reading.join()


def is_full(pipe):
    """Write to `pipe`; return whether it takes nothing although it had time to be read."""
    time.sleep(0.05)
    return pipe.write(b"x\n" * 2000) is None


def test_console_that_is_given_up_counts_the_lines_that_were_not_read(full_pipe, monkeypatch):
    monkeypatch.setattr(worker, "STUCK_S", 0.05)
    _, sink = full_pipe
    err = io.BytesIO()
    with suppress(KeyboardInterrupt), Console(sink, err) as console:
        for _ in range(worker.LINES_MAX + 1):
            console.write(1, b"x\n")
        console.hurry()
        console.follow(io.BytesIO(b"y\n" * 100), 1, b"[0] ", None, [])
        raise KeyboardInterrupt
    lost = worker.LINES_MAX + 101
    text = f"fscoord: standard output: its reader takes no data; {lost} lines of output were dropped\n"
    assert err.getvalue() == text.encode()
    sink.write(b"this goes nowhere, and does not block")


def test_streams_that_are_one_file_keep_their_lines_in_order(tmp_path):
    with (
        open(tmp_path / "both", "ab", buffering=0) as file,
        open(tmp_path / "both", "ab", buffering=0) as same,
        Console(file, same) as console,
    ):
        for number in range(1000):
            console.write(1 + number % 2, b"%d\n" % number)
    assert (tmp_path / "both").read_bytes() == b"".join(b"%d\n" % number for number in range(1000))


def test_file_that_another_process_has_made_non_blocking_loses_nothing(full_pipe):
    """Blocking is a property of the open file, which processes share: a shell or ssh may change it."""
    pager, sink = full_pipe
    os.set_blocking(sink.fileno(), False)
    with Console(sink, io.BytesIO()) as console:
        console.write(1, b"x\n")
        reading = read_all(pager)
    sink.close()
    assert reading.join() == b"x\n"


def test_streams_for_all_ranks_are_not_mixed_with_those_of_single_ranks():
    for text in ("1,2", "0:1,3", "3,0:1"):
        with pytest.raises(ValueError, match="0, 1, 2 or 3 for all, or 0:3,1:1"):
            parse_streams(text)


def test_console_shows_only_the_local_ranks_of_the_filter():
    streams = Streams(parse_streams("0:1"), parse_streams("1:1"), frozenset({0}))
    shown = [(rank, stream) for rank in range(2) for stream in (1, 2) if streams.is_shown(rank, stream)]
    assert shown == [(0, 2)]
    assert streams.is_file(1, 1)
