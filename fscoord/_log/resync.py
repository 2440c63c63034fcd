"""Find where a log can be read again behind damage: the next record that is sound over the chain that it implies.

What the damaged bytes would have chained over is lost, but CRC-32 is linear and can be run backwards: the checksum of
a frame tells which chain it was made with. So a record can be found, and checked, without knowing the one before it;
and those behind it follow from it as always.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from zlib import crc32

from fscoord import _system as system
from fscoord._log import record
from fscoord._log.successor import Place
from fscoord._log.tail import read_at

__all__ = ["find_next", "implied_chain"]

_POLYNOMIAL: Final = 0xEDB88320  # of CRC-32, as zlib has it, least significant bit first
_WINDOW: Final = 1 << 20
_WORK_FACTOR: Final = 16
_WORK_MIN: Final = 1 << 28
"""How many bytes may be checksummed in search of one record: so many for each byte searched, and so many anyway. What
looks like a record costs as much as the length that it promises, so a file made for that could cost days."""

_SMALLEST: Final = record.FRAME_SIZE + record.BODY_MIN
_LIKELY: Final = re.compile(  # lengths below 2^28, sessions below 2^24, times before the year 2262
    rb"(?!\0{4})(?=...[\0-\x08].{11}\0.{7}[\0-\x7f].[\0-\x04])", re.DOTALL
)


def _table() -> list[int]:
    table = []
    for index in range(256):
        value = index
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return table


_TABLE: Final = _table()
_BY_TOP: Final = {value >> 24: index for index, value in enumerate(_TABLE)}


def implied_chain(frame: bytes) -> int:
    """Return the chain over which the frame that begins `frame`, 12 bytes at least, has a right checksum.

    Every frame has exactly one: the checksum of a given text and the seed determine each other.
    """
    state = int(record.unpack_frame(frame)[2]) ^ crc32(frame[:8])  # what the seed has become behind 8 bytes
    for _ in range(8):
        index = _BY_TOP[state >> 24]
        state = (state ^ _TABLE[index]) << 8 & 0xFFFFFFFF | index
    return state


def find_next(fd: int, bad: Place) -> Place | None:
    """Return where the next sound record behind the bad one at `bad` begins, and the chain before it, if there is one.

    If the bad record's frame still tells its length, what it holds is passed over: it may hold anything, another log,
    for one. A record that was found by searching could be such a one, but only if the length is lost as well.
    """
    size = system.os.fstat(fd).st_size
    frame = read_at(fd, bad.offset, record.FRAME_SIZE)
    start = bad.offset + 1
    if len(frame) == record.FRAME_SIZE:
        length, checksum, _ = record.unpack_frame(frame)
        end = bad.offset + record.FRAME_SIZE + length
        if end < size and _chain_at(fd, end, size) == checksum:
            return Place(end, checksum)
        if record.frame_length(frame, bad.chain) >= 0:
            start = end
    budget = max(_WORK_MIN, _WORK_FACTOR * (size - start))
    for offset, promised in _candidates(fd, start, size):
        budget -= promised
        if budget < 0:
            return None
        chain = _chain_at(fd, offset, size)
        if chain is not None:
            return Place(offset, chain)
    return None


def _candidates(fd: int, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield where something begins that looks like a record, and how long it would be."""
    while start <= size - _SMALLEST:
        data = read_at(fd, start, _WINDOW + _SMALLEST)
        for match in _LIKELY.finditer(data):
            position = match.start()
            promised = record.FRAME_SIZE + int.from_bytes(data[position : position + 4], "little")
            if _SMALLEST <= promised <= size - start - position and position < _WINDOW:
                yield start + position, promised
        start += _WINDOW


def _chain_at(fd: int, offset: int, size: int) -> int | None:
    """Return the chain that the record at `offset` was made with, or None if none that is sound begins there."""
    frame = read_at(fd, offset, record.FRAME_SIZE)
    if len(frame) < record.FRAME_SIZE:
        return None
    chain = implied_chain(frame)
    length = record.frame_length(frame, chain)
    end = offset + record.FRAME_SIZE + length
    if length < 0 or end > size or not read_at(fd, end - 1, 1).isalpha():
        return None
    return chain if record.decode(frame + read_at(fd, offset + record.FRAME_SIZE, length), chain)[2] else None
