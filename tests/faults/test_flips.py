"""Damage: readers distinguish every flipped bit of a log, and other faults of disks, from a torn tail.

The criterion, for every bit of the file: a fresh handle either finds exactly the records that were written or raises
CorruptLogError, which names the offset where the bad record begins, and then nothing can be written and the file stays
as it is. It may find the records only if the bit lies in what a void skips, where there are none. So no acknowledged
record is ever lost in silence, nor changed, nor is one made up.
"""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.internals import Record, chain_at_end
from support.logs import (
    HEADER_SIZE,
    SECTOR,
    VOID_SIZE,
    Handle,
    Step,
    complete,
    look_at,
    make,
    opened,
    put,
    steps,
    tear,
    write_every_kind,
)
from support.plain_reader import Refused, read_log

from fscoord import CorruptLogError
from fscoord.inspect import dump

pytestmark = [pytest.mark.exhaustive, pytest.mark.once]

ALL = float(os.environ.get("FSCOORD_SCALE", "1")) > 1


@pytest.fixture
def path(memory: Path, mounts_stay: None) -> str:
    return str(memory / "log")


def contents(path: str) -> bytes:
    return Path(path).read_bytes()


# -- the logs ----------------------------------------------------------------------------------------------------------


def make_complete(path: str, durable: bool) -> None:
    make(path, write_every_kind, durable=durable)


def make_voided(path: str, durable: bool) -> None:
    """Torn in the prefix, at its end, further on, and so that the void itself is torn."""
    make(path, lambda handle: handle.write(b"first", b"1"), durable=durable)
    tear(path, 7, b"in the prefix", b"x")
    tear(path, 8, b"after the prefix", b"x" * 30)
    torn = tear(path, 60, b"in the body", b"x" * 80)
    with opened(path) as handle:
        handle.write(b"second", b"2")
    os.truncate(path, contents(path).index(b"\x25\0\0\0", torn + 100) + 20)
    with opened(path) as handle:
        handle.write(b"second", b"2")
        handle.write(b"third", b"3")


def make_zeros(path: str, durable: bool) -> None:
    """Values that are what a lost sector looks like, and behind them records that are not."""

    def write(handle: Handle) -> None:
        for number in range(3):
            handle.write(b"zeros", bytes(1100))
            handle.write(b"plain", b"%d" % number)

    make(path, write, durable=durable)


def lose_sector(path: str, start: int, number: int) -> None:
    """Zero sector `number` of those that hold a record which begins at `start`, as far as it is the record's."""
    sector = start - start % SECTOR + number * SECTOR
    with open(path, "r+b") as file:
        first = max(start, sector)
        file.seek(first)
        file.write(bytes(min(sector + SECTOR, os.path.getsize(path)) - first))


def make_unsynced(path: str, durable: bool) -> None:
    """Two power failures: one took the middle of the last record, one its prefix."""
    for lost in (1, 0):
        with opened(path, durable=durable) as handle:
            handle.write(b"before", b"%d" % lost)
            start = os.path.getsize(path)
            handle.write(b"unsynced", b"x" * 900)
        lose_sector(path, start, lost)
    with opened(path) as handle:
        handle.write(b"last", b"value")


def is_ambiguous(length: int, bit: int | None, chain: int) -> bool:
    """Whether the flip of `bit` of this length, or of a bit of its check, makes a check right that ends in 0."""
    if bit is None:
        return (length * 2_654_435_761 + chain) % 2**32 >> 24 in (1, 2, 4, 8)
    return ((length | 1 << bit) * 2_654_435_761 + chain) % 2**32 < 1 << 24


def make_ambiguous(path: str, durable: bool) -> None:
    """Torn after seven bytes, so that the check of the length has a zero at its end.

    The length is such that one flipped bit makes the check right: the bit of another length, or that of the check. The
    record then seems to be longer than the rest of the file.
    """
    make(path, lambda handle: handle.write(b"first", b"1"), durable=durable)
    for bit in (24, 25, 26, None):
        with opened(path) as handle:
            handle.write(b"before", b"the tear")
            data = contents(path)
            length = next(length for length in range(3000, 20000) if is_ambiguous(length, bit, chain_at_end(data)))
            handle.write(b"torn", bytes(length - 33))
        os.truncate(path, len(data) + 7)
    with opened(path) as handle:
        handle.write(b"last", b"value")


Make = Callable[[str, bool], None]
LOGS: dict[str, tuple[Make, bool]] = {
    "complete": (make_complete, False),
    "voided": (make_voided, False),
    "zeros": (make_zeros, False),
    "complete, durable": (make_complete, True),
    "voided, durable": (make_voided, True),
    "zeros, durable": (make_zeros, True),
    "unsynced, durable": (make_unsynced, True),
    "ambiguous": (make_ambiguous, False),
    "ambiguous, durable": (make_ambiguous, True),
}


# -- the criterion -----------------------------------------------------------------------------------------------------


def start_of_bad(found: list[Step], offset: int) -> int | None:
    """Where the record that byte `offset` belongs to begins (of a void: what it skips), None in what is skipped."""
    for before, step in zip([Step(0, HEADER_SIZE, None), *found], found, strict=False):
        if before.end <= offset < step.start:
            return None
        if step.start <= offset < step.end:
            return before.end
    return 0


def judge_flipped(path: str, data: bytes, bit: int, found: list[Step]) -> str:
    """Return "damage" or "same", what fresh handles say of the log `data` in which `bit` is flipped.

    Of each byte's bits one is also met by a writer, and every one if FSCOORD_SCALE is above 1.
    """
    return judge(path, flip(data, bit), bit // 8, found, writing=ALL or bit % 8 == bit // 8 % 8)


def judge(path: str, data: bytes, offset: int, found: list[Step], *, writing: bool = True) -> str:
    """Return "damage" or "same", what fresh handles say of the log `data`, damaged at byte `offset`."""
    put(path, data)
    bad = start_of_bad(found, offset)
    got, reported = look_at_damaged(path)
    if reported is None:
        assert got == complete(found, found[-1].end), f"byte {offset}: other records than were written"
        assert bad is None, f"byte {offset}: damage to a record goes unnoticed"
        return "same"
    assert reported == bad or bad is None
    if not writing:
        return "damage"
    with pytest.raises(CorruptLogError) as caught, opened(path) as handle:
        handle.write(b"new", b"value")
    assert caught.value.offset == reported
    assert contents(path) == data, "the file was changed"
    return "damage"


def look_at_damaged(path: str) -> tuple[list[Record], int | None]:
    """Return what a fresh handle finds, and the offset of the damage that it reports."""
    try:
        return look_at(path), None
    except CorruptLogError as error:
        return [], error.offset


def bits_to_flip(data: bytes) -> Iterator[int]:
    """Every bit; inside runs of one value one of each byte, and of eight bytes one, unless FSCOORD_SCALE is above 1."""
    for offset in range(len(data)):
        run = not ALL and len(set(data[max(0, offset - 4) : offset + 5])) == 1
        if not run:
            yield from range(8 * offset, 8 * offset + 8)
        elif offset % 8 == 0:
            yield 8 * offset + offset // 8 % 8


def flip(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


@pytest.mark.parametrize("name", LOGS)
def test_bit_flipped_anywhere_in_a_log_is_damage_or_changes_nothing(name: str, path: str) -> None:
    write, durable = LOGS[name]
    write(path, durable)
    data = contents(path)
    found = steps(data)
    verdicts = Counter(judge_flipped(path, data, bit, found) for bit in bits_to_flip(data))
    assert verdicts["damage"] > 8 * HEADER_SIZE
    assert (verdicts["same"] > 0) == (not name.startswith(("complete", "zeros")))


@pytest.mark.parametrize("kept", [5, 8, 23, 60])
def test_bit_flipped_in_a_log_with_a_torn_tail_is_damage_or_changes_nothing(kept: int, path: str) -> None:
    make(path, lambda handle: handle.write(b"first", b"1"))
    torn = tear(path, kept, b"torn", b"x" * 80)
    data = contents(path)
    found = steps(data[:torn])
    for bit in range(8 * len(data)):
        put(path, flip(data, bit))
        got, reported = look_at_damaged(path)
        if reported is None:
            assert got == complete(found, torn)
            assert bit // 8 >= torn
        else:
            assert reported <= torn


def test_dump_and_the_plain_reader_judge_every_flipped_bit_alike(path: str) -> None:
    make_voided(path, False)
    data = contents(path)
    for offset in range(0, len(data), 3):
        flipped = flip(data, 8 * offset + offset % 8)
        put(path, flipped)
        try:
            log = read_log(flipped)
            plain = [record[0] for record in log.records], log.ends, log.offset
        except Refused:
            plain = [], "damaged", 0
        entries = []
        try:
            for entry in dump(path):
                entries.append(entry.offset)
            ours = entries, "whole", len(data)
        except CorruptLogError as error:
            ours = entries, "damaged", error.offset
        assert ours == plain


# -- what else disks and people do -------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("size", [SECTOR, 4096])
def test_zeros_in_the_middle_are_damage(size: int, durable: bool, path: str) -> None:
    """A sector or a page that was never written, with records behind it, is no tail."""

    def write(handle: Handle) -> None:
        for number in range(120):
            handle.write(b"key %d" % number, b"x" * random.Random(number).choice([1, 50, 300, 2000]))

    data = make(path, write, durable=durable)
    found = steps(data)
    last = found[-2].start
    for start in range(0, last - size, SECTOR):
        put(path, data[:start] + bytes(size) + data[start + size :])
        with pytest.raises(CorruptLogError) as caught:
            look_at(path)
        assert caught.value.offset in {0, *(step.start for step in found if step.start < start + size < last + size)}


def test_record_moved_repeated_or_taken_out_is_damage(path: str) -> None:
    data = make(path, lambda handle: [handle.write(b"k", b"%d" % number) for number in range(4)])
    first, *rest = [data[step.start : step.end] for step in steps(data)]
    before = data[:HEADER_SIZE] + first
    a, b, c, d = rest
    for records in ([b, a, c, d], [a, c, d], [a, b, b, c, d], [a, b, d, c], [b, c, d]):
        put(path, before + b"".join(records))
        with pytest.raises(CorruptLogError):
            look_at(path)


def test_logs_concatenated_in_one_file_are_damage(path: str) -> None:
    put(path, make(path, write_every_kind) + make(path + "2", write_every_kind))
    with pytest.raises(CorruptLogError):
        look_at(path)


@pytest.mark.parametrize("size", [1, 60, 400])
def test_late_write_of_a_writer_that_had_lost_the_lock_is_damage(size: int, path: str) -> None:
    """As on a server that had been cut off from its host: others have written meanwhile."""
    before = make(path, lambda handle: handle.write(b"k", b"first"))
    with opened(path) as zombie:
        zombie.write(b"k", b"z" * size)
    late = contents(path)[len(before) :]
    put(path, before)
    with opened(path) as other:
        other.write(b"k", b"x" * 2000)
    after = contents(path)
    assert len(look_at(path)) == 2
    for landed in (after + late, before + late + after[len(before) + len(late) :]):
        put(path, landed)
        with pytest.raises(CorruptLogError):
            look_at(path)


def test_late_write_into_a_torn_record_changes_nothing_or_is_damage(path: str) -> None:
    """The rest of it, when others have stepped over it."""
    make(path, lambda handle: handle.write(b"k", b"first"))
    with opened(path) as zombie:
        zombie.write(b"k", b"z" * 2000)
    whole = contents(path)
    cut = len(whole) - 1000
    put(path, whole[:cut])
    with opened(path) as other:
        other.write(b"k", b"second")
    voided, expected = contents(path), look_at(path)
    assert [found[2] for found in expected] == [b"first", b"second"]
    for size in (1, 500, 999, 1000):
        put(path, voided[:cut] + whole[cut : cut + size] + voided[cut + size :])
        found, offset = look_at_damaged(path)
        assert (found == expected) if size < 1000 else (offset is not None), size


def test_random_damage_never_changes_a_record(path: str, rng: random.Random, scale) -> None:
    """Bursts may by chance look like a tear of the last record; no other may go, and none may change."""
    make_voided(path, False)
    data = contents(path)
    found = steps(data)
    expected = complete(found, len(data))
    for _ in range(scale(1500)):
        damaged = bytearray(data)
        start, size = rng.randrange(len(data)), rng.choice([2, 4, 16, 64, 600])
        for offset in range(start, min(start + size, len(data))):
            damaged[offset] = rng.choice([0, 255, rng.randrange(256)])
        put(path, bytes(damaged))
        got, reported = look_at_damaged(path)
        assert reported is not None or got in (expected, expected[:-1])


def test_flip_in_a_durable_log_that_ends_in_zeros_may_look_like_a_lost_sector(path: str) -> None:
    """The one exception, which docs/contributors/format.md admits: and it is the last record only."""
    data = make(path, lambda handle: [handle.write(b"k", bytes(1500)) for _ in range(2)], durable=True)
    found = steps(data)
    put(path, flip(data, 8 * (found[-1].end - 20)))
    assert look_at(path) == complete(found, found[-2].end)
    put(path, flip(data, 8 * (found[-2].end - 20)))
    with pytest.raises(CorruptLogError, match=re.escape(str(found[-2].start))):
        look_at(path)


def test_criterion_fails_a_handle_that_finds_too_little_or_false_damage(path: str) -> None:
    """Handles that find too little, or take damage for nothing, fail it."""
    make_voided(path, False)
    data = contents(path)
    found = steps(data)
    assert VOID_SIZE in {step.end - step.start for step in found}
    with pytest.raises(AssertionError, match="other records"):
        judge(path, data[: found[-1].start], 0, found)
    with pytest.raises(AssertionError, match="unnoticed"):
        judge(path, data, found[-1].start, found)
