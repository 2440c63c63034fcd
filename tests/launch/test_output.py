"""Which streams go where, in the words of torchrun; and consoles that go away."""

from __future__ import annotations

import io
import os

import pytest

from fscoord.launch import Console, Streams, parse_streams


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
    Console(out, out).follow(io.BytesIO(text), 1, b"[0] ", (tmp_path / "file").open("wb"), tail)
    lines = out.getvalue().splitlines()
    assert lines[:2] == [b"[0] 0", b"[0] 1"]
    assert [len(line) for line in lines[-2:]] == [65536 + 4, 70_000 - 65536 + 4]
    assert len(tail) == 20
    assert (tmp_path / "file").read_bytes() == text


def test_file_on_a_full_disk_ends_and_the_output_is_read_on():
    """/dev/full refuses each write as a full disk does. A pipe without a reader would kill the worker."""
    out, err = io.BytesIO(), io.BytesIO()
    tail: list[bytes] = []
    with open("/dev/full", "wb") as file:
        Console(out, err).follow(io.BytesIO(b"one\ntwo\n"), 1, b"[0] ", file, tail)
    assert out.getvalue() == b"[0] one\n[0] two\n"
    assert tail == [b"one\n", b"two\n"]
    words = b"fscoord: /dev/full: No space left on device; the file ends here, and the worker goes on\n"
    assert err.getvalue() == words


def test_console_that_nobody_reads_any_more_is_given_up():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as sink:
        console = Console(sink, io.BytesIO())
        console.write(1, b"x\n")
        console.write(1, b"x\n")
    console.write(2, b"x\n")


def test_streams_for_all_ranks_are_not_mixed_with_those_of_single_ranks():
    for text in ("1,2", "0:1,3", "3,0:1"):
        with pytest.raises(ValueError, match="0, 1, 2 or 3 for all, or 0:3,1:1"):
            parse_streams(text)


def test_console_shows_only_the_local_ranks_of_the_filter():
    streams = Streams(parse_streams("0:1"), parse_streams("1:1"), frozenset({0}))
    shown = [(rank, stream) for rank in range(2) for stream in (1, 2) if streams.is_shown(rank, stream)]
    assert shown == [(0, 2)]
    assert streams.is_file(1, 1)
