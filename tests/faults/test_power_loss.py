"""Power failures of durable logs: whatever sectors of the last record are lost, it is torn; any other loss is damage.

The model: a writer syncs each record before it, or anybody else, writes the next; so a power failure meets at most one
record that is not on the disk yet. Of that any sector may be missing, which then reads as zeros, and the file may be
as long as before or as it was to become, or end at any edge of a sector between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

import pytest
from support.logs import HEADER_SIZE, SECTOR, complete, look_at, make, opened, put, steps
from support.plain_reader import read_log

from fscoord import CorruptLogError

pytestmark = [pytest.mark.exhaustive, pytest.mark.once]

STARTS = [0, 1, 100, 504, 505, 510, 511]
"""Where in its sector the record begins: its prefix has 8 bytes, and lies in one sector or in two."""
SIZES = [60, 450, 512, 900, 1500]


@pytest.fixture
def path(memory: Path) -> str:
    return str(memory / "log")


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


def make_log(path: str, start: int, size: int, *, durable: bool = True) -> tuple[bytes, int]:
    """A log whose last record has `size` bytes and begins at `start` in its sector; return it, and where that is."""
    with opened(path, durable=durable) as handle:
        handle.write(b"first", b"value")
        here = os.path.getsize(path)
        handle.write(b"padding", b"x" * ((start - here - 29 - 7) % SECTOR))
        begin = os.path.getsize(path)
        assert begin % SECTOR == start
        handle.write(b"last", b"y" * (size - 29 - 4))
        assert os.path.getsize(path) == begin + size
    return contents(path), begin


def sectors(start: int, end: int) -> list[tuple[int, int]]:
    """The parts of [start, end) that lie in one sector each."""
    edges = [start, *range(start - start % SECTOR + SECTOR, end, SECTOR), end]
    return list(pairwise(edges))


def crash_states(data: bytes, begin: int) -> Iterator[bytes]:
    """Every file that a power failure may leave of the log `data`, of which only what is before `begin` was synced."""
    parts = sectors(begin, len(data))
    for lost in product([False, True], repeat=len(parts)):
        state = data
        for (start, end), gone in zip(parts, lost, strict=True):
            if gone:
                state = state[:start] + bytes(end - start) + state[end:]
        for _, size in parts:
            yield state[:size]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("size", SIZES)
def test_record_that_was_not_synced_is_torn_whichever_sectors_are_lost(start: int, size: int, path: str) -> None:
    data, begin = make_log(path, start, size)
    found = steps(data)
    for state in crash_states(data, begin):
        put(path, state)
        kept = complete(found, begin if state != data else len(data))
        assert look_at(path) == kept
        log = read_log(state)
        assert (log.ends, log.offset) == (("whole", len(data)) if state == data else ("torn", begin))
        with opened(path) as handle:
            handle.write(b"new", b"1")
            handle.write(b"new", b"2")
            assert handle.look()[:-2] == kept
        after = contents(path)
        assert after.startswith(state)
        assert read_log(after).ends == "whole"
        assert look_at(path)[:-2] == kept


@pytest.mark.parametrize("start", [0, 100, 505, 511])
def test_power_failure_while_a_tear_is_voided_loses_no_earlier_record(start: int, path: str) -> None:
    """The void is one sector, and was synced before the record behind it was written."""
    data, begin = make_log(path, start, 900)
    kept = complete(steps(data), begin)
    for first in crash_states(data, begin):
        if first == data:
            continue
        put(path, first)
        with opened(path) as handle:
            handle.write(b"new", b"value")
        voided = contents(path)
        void, *others = [step for step in steps(voided) if step.start >= begin]
        for state in [first, voided[: void.start], voided[: void.start] + bytes(37), voided[: void.end]]:
            put(path, state)
            assert look_at(path) == kept
            with opened(path) as handle:
                handle.write(b"second", b"value")
            assert look_at(path)[:-1] == kept
            assert read_log(contents(path)).ends == "whole"
        for state in crash_states(voided[: others[0].end], others[0].start):
            put(path, state)
            assert look_at(path) == kept
            with opened(path) as handle:
                handle.write(b"second", b"value")
            assert look_at(path)[:-1] == kept


@pytest.mark.parametrize("start", STARTS)
def test_sector_lost_of_any_other_record_is_damage(start: int, path: str) -> None:
    """This includes the same record, once another record follows it: then it had been synced."""
    make_log(path, start, 900)
    with opened(path) as handle:
        handle.write(b"behind", b"value")
    data = contents(path)
    found = steps(data)
    for step in found[:-2]:
        for first, end in sectors(step.start, step.end):
            put(path, data[:first] + bytes(end - first) + data[end:])
            with pytest.raises(CorruptLogError) as caught:
                look_at(path)
            assert caught.value.offset == step.start


@pytest.mark.parametrize("start", STARTS)
def test_last_record_changed_otherwise_than_by_power_failure_is_damage(start: int, path: str) -> None:
    data, begin = make_log(path, start, 1500)
    _, (first, second), (third, end), *_ = sectors(begin, len(data))
    states = {
        "a byte changed": flipped(data, begin + 700),
        "a byte of the prefix changed": flipped(data, begin + 5),
        "zeros, but not of a whole sector": data[:first] + bytes(SECTOR - 1) + data[second - 1 :],
        "something else in a sector": data[:first] + b"z" * SECTOR + data[second:],
        "something behind it": data + b"more" * 4,
        "zeros, and something behind it": data[:third] + bytes(end - third) + data[end:] + b"more" * 4,
    }
    for what, state in states.items():
        put(path, state)
        with pytest.raises(CorruptLogError):
            pytest.fail(f"{what}: {look_at(path)}")
        assert read_log(state).ends == "damaged", what


def flipped(data: bytes, offset: int) -> bytes:
    return data[:offset] + bytes([data[offset] ^ 255]) + data[offset + 1 :]


@pytest.mark.parametrize("start", [0, 505])
def test_log_that_is_not_durable_does_not_take_a_lost_sector_for_a_tear(start: int, path: str) -> None:
    data, begin = make_log(path, start, 1500, durable=False)
    (_, first), (middle, end), *_ = sectors(begin, len(data))
    assert first == middle
    put(path, data[:middle] + bytes(end - middle) + data[end:])
    with pytest.raises(CorruptLogError):
        look_at(path)


def test_record_in_a_value_counts_behind_a_lost_prefix_only_if_it_is_whole(path: str) -> None:
    """A record that holds a copy of a log and has lost its prefix can't be told from damage: then it is called that."""
    copy = make(path + "-copy", lambda handle: handle.write(b"k", b"v"))
    for value, damaged in ((copy, True), (copy[HEADER_SIZE:-1], True), (copy[HEADER_SIZE : HEADER_SIZE + 50], False)):
        path += "+"
        with opened(path, durable=True) as handle:
            handle.write(b"first", b"value")
            begin = os.path.getsize(path)
            handle.write(b"log", bytes(600) + value)
        data = contents(path)
        end = begin - begin % SECTOR + SECTOR
        put(path, data[:begin] + bytes(end - begin) + data[end:])
        if damaged:
            with pytest.raises(CorruptLogError, match="other records follow"):
                look_at(path)
        else:
            assert [record[1] for record in look_at(path)] == [b"first"]
