"""Torn tails at every byte: complete records stay, torn ones never count, and writers go on behind them.

Inside runs of one value most bytes are left out, unless FSCOORD_SCALE is above 1.
"""

from __future__ import annotations

import os
from itertools import chain
from pathlib import Path

import pytest
from support.logs import (
    HEADER_SIZE,
    SECTOR,
    VOID_SIZE,
    Handle,
    complete,
    grow,
    look_at,
    make,
    moments,
    opened,
    put,
    steps,
    tear,
    write_every_kind,
)
from support.plain_reader import read_log

from fscoord import CorruptLogError

pytestmark = [pytest.mark.exhaustive, pytest.mark.once]

ALL = float(os.environ.get("FSCOORD_SCALE", "1")) > 1


@pytest.fixture
def path(memory: Path, mounts_stay: None) -> str:
    return str(memory / "log")


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


def write_sizes(handle: Handle) -> None:
    """Records that begin and end at, before and behind the edges of sectors and pages, and hold zeros there."""
    handle.write(b"zeros", bytes(700))
    handle.write(b"mixed", (b"x" * 100 + bytes(412)) * 3)
    here = os.path.getsize(handle.log.path)
    handle.write(b"to the edge", b"x" * (-(here + 29 + 11) % SECTOR))
    assert os.path.getsize(handle.log.path) % SECTOR == 0
    handle.write(b"length 256", bytes(256 - 29 - 10))  # the first byte of its prefix is zero
    handle.write(b"last", b"\0x\0")


# -- a cut at every byte, and what comes after -------------------------------------------------------------------------


@pytest.mark.parametrize("write", [write_every_kind, write_sizes])
@pytest.mark.parametrize("durable", [False, True])
def test_log_cut_at_any_byte_can_be_read_appended_to_and_opened_again(write, durable: bool, path: str) -> None:
    data = make(path, write, durable=durable)
    found = steps(data)
    for size in moments(data, HEADER_SIZE, all_of_them=ALL):
        put(path, data[:size])
        kept = complete(found, size)
        assert look_at(path) == kept
        with opened(path) as first:
            assert first.look() == kept
            first.write(b"new", b"1")
            new = first.look()
            with opened(path) as second:
                assert second.look() == new
                second.write(b"new", b"2")
            assert first.look()[:-1] == new
        after = contents(path)
        assert after[:size] == data[:size], "something was overwritten"
        log = read_log(after)
        assert log.ends == "whole"
        everything = look_at(path)
        assert everything[: len(kept)] == kept
        assert [(record[1], record[2]) for record in everything[len(kept) :]] == [(b"new", b"1"), (b"new", b"2")]
        assert log.values[b"new"] == b"2"


@pytest.mark.parametrize("write", [write_every_kind, write_sizes])
def test_handle_that_was_open_before_the_tear_reads_and_appends_after_it(write, path: str) -> None:
    """Whether it has seen nothing of the torn record, half of it, or all that there is."""
    data = make(path, write)
    found = steps(data)
    edges = [HEADER_SIZE, *(step.end for step in found)]
    for size in moments(data, HEADER_SIZE + 1, all_of_them=ALL):
        start = max(edge for edge in edges if edge <= size)
        for seen in sorted({start, (start + size) // 2, size}):
            put(path, data[:start])
            with opened(path) as writer, opened(path, read_only=True) as reader:
                assert writer.look() == reader.look() == complete(found, start)
                for here in (seen, size):
                    grow(path, data, here)
                    assert writer.look() == reader.look() == complete(found, here)
                writer.write(b"new", b"value")
                assert writer.look() == reader.look() == look_at(path)
                assert writer.look()[:-1] == complete(found, size)
            assert contents(path)[:size] == data[:size]


# -- readers beside tears and voids ------------------------------------------------------------------------------------


@pytest.fixture
def battered(path: str) -> bytes:
    """A log with tears in and after prefixes, tears in a row, torn voids, and values that look like nothing at all."""
    with opened(path) as handle:
        handle.write(b"first", b"value")
    tear(path, 5, b"in the prefix", b"x")
    tear(path, 1, b"one byte, which is zero", bytes(256 - 29 - 23))
    tear(path, 300, b"in zeros", bytes(700))
    torn = tear(path, 8, b"prefix only", b"x" * 2000)
    for kept in (20, 3):  # the void of that one is torn, and the void of the void as well
        before = os.path.getsize(path)
        with opened(path) as handle:
            handle.write(b"second", bytes(600))
        os.truncate(path, contents(path).index(b"\x25\0\0\0", max(before, torn + 2000)) + kept)
    tear(path, 1500, b"ends in zeros", b"y" * 1400 + bytes(200))
    os.truncate(path, os.path.getsize(path) + 1)
    with opened(path) as handle:
        handle.write(b"last", b"z" * 1100)
    data = contents(path)
    assert [kind for _, kind, *_ in read_log(data).records].count("V") == 5
    return data


def test_reader_that_looks_at_each_new_byte_sees_each_record_once_and_whole(battered: bytes, path: str) -> None:
    found = steps(battered)
    put(path, battered[:HEADER_SIZE])
    with opened(path, read_only=True) as reader, opened(path) as writer:
        for size in range(HEADER_SIZE, len(battered) + 1):
            grow(path, battered, size)
            assert reader.look() == complete(found, size)
            assert writer.look() == complete(found, size)


def test_reader_that_looked_at_any_earlier_moment_finds_all_records_afterwards(battered: bytes, path: str) -> None:
    found = steps(battered)
    for size in moments(battered, HEADER_SIZE, all_of_them=ALL):
        put(path, battered[:size])
        with opened(path, read_only=True) as reader:
            assert reader.look() == complete(found, size)
            grow(path, battered, len(battered))
            assert reader.look() == complete(found, len(battered))


def test_writer_goes_on_behind_any_moment_of_a_battered_log(battered: bytes, path: str) -> None:
    found = steps(battered)
    for size in moments(battered, HEADER_SIZE, all_of_them=ALL):
        put(path, battered[:size])
        with opened(path) as writer:
            writer.write(b"new", b"value")
        data = contents(path)
        assert data[:size] == battered[:size]
        assert look_at(path)[:-1] == complete(found, size)
        assert read_log(data).ends == "whole"


# -- tears of tears ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 7, 8, 9, 22, 24, 400, 823, 824, 825, 829])
def test_void_torn_at_any_byte_is_voided_itself(kept: int, path: str) -> None:
    torn = tear(path, kept, b"k", b"v" * 799 + b"\0")
    before = contents(path)
    with opened(path) as handle:
        handle.write(b"new", b"value")
    data = contents(path)
    place = next(step.start for step in steps(data) if data[step.start + 22] == ord("V") and step.start >= torn)
    assert place % SECTOR == 0
    assert place - len(before) >= SECTOR
    assert not any(data[len(before) : place])
    for size in chain(range(len(before), place, 61), range(place, place + VOID_SIZE)):
        put(path, data[:size])
        with opened(path) as handle:
            handle.write(b"second", b"value")
        twice = contents(path)
        assert twice[:size] == data[:size]
        for again in range(size, len(twice), 151):  # and whatever that one leaves when it is torn
            put(path, twice[:again])
            with opened(path) as handle:
                handle.write(b"third", b"value")
            assert look_at(path)[0][1] == b"before"
            assert look_at(path)[-1][1:3] == (b"third", b"value")
            assert read_log(contents(path)).ends == "whole"


def test_tear_behind_a_tear_at_any_byte_is_voided(path: str) -> None:
    tear(path, 30, b"first", b"x" * 40)
    once = contents(path)
    with opened(path) as handle:
        handle.write(b"second", b"y" * 20)
        handle.write(b"third", b"z")
    data = contents(path)
    found = steps(data)
    for size in range(len(once), len(data)):
        put(path, data[:size])
        with opened(path) as handle:
            assert handle.look() == complete(found, size)
            handle.write(b"new", b"value")
            assert handle.look()[:-1] == complete(found, size)
        assert look_at(path)[:-1] == complete(found, size)


# -- bounds ------------------------------------------------------------------------------------------------------------


def test_torn_record_that_announces_a_long_body_is_not_read_in_full(path: str) -> None:
    """Looking at the tail of a killed writer of a huge value must not cost the size of the value each time."""
    size = 48 << 20
    tear(path, size - 1, b"huge", b"x" * size)
    with opened(path, read_only=True) as reader:
        for _ in range(200):
            assert [record[1] for record in reader.look()] == [b"before"]
        assert len(reader.log.handle.pending) <= 1 << 16
        with opened(path) as writer:
            writer.write(b"new", b"value")
        assert [record[1] for record in reader.look()] == [b"before", b"new"]


def test_log_cut_and_written_on_is_damaged_for_a_reader_that_had_read_more(path: str) -> None:
    data = make(path, write_every_kind)
    with opened(path, read_only=True) as reader:
        assert reader.look()
        put(path, data[:-40])
        with opened(path) as writer:
            writer.write(b"longer than what was cut", b"x" * 100)
        with pytest.raises(CorruptLogError):
            reader.look()
        assert look_at(path)[-1][1] == b"longer than what was cut"
