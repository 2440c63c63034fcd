"""Long values that stay in the file: which of a log's records hold them, where they are, and to read them from there.

What a log tells of a value that is not kept in memory is a `Spilled`: where its bytes are in the generation that is
read, and their checksum, so that whatever happens to them since is seen. Bytes of a log never change, so that they can
be read without its lock.

Only pread(2) is used, which leaves the descriptor where it stands. pyfakefs has none: under it nothing is spilled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from fscoord._log.format import record
from fscoord._log.format.record import LogPosition, Record
from fscoord._runtime import system

__all__ = ["NEVER", "Fetch", "Spilled", "SpilledRecord", "Spot", "checksum_of_both", "find_long", "leave_long", "read"]

NEVER: Final = 1 << 62
"""A length that no value has."""

_WINDOW: Final = 4096
_ZEROS: Final = bytes(1 << 16)
_PAIR: Final = Struct("<HI")


class Spilled:
    """A value whose `size` bytes are at `offset` in the generation in use; ``crc`` is their CRC-32."""

    __slots__ = ("crc", "offset", "size")

    def __init__(self, offset: int, size: int, crc: int) -> None:
        self.offset = offset
        self.size = size
        self.crc = crc

    def __len__(self) -> int:
        return self.size


Fetch = Callable[[Spilled], bytes]
"""Reads a value from the file."""

SpilledRecord = tuple[int, bytes, bytes | Spilled, int, int]
"""A record whose value may be left in the file."""


class Spot(NamedTuple):
    """Where a long value is: the ``kind`` of its record, its ``key``, ``offset`` and ``size``."""

    kind: int
    key: bytes
    offset: int
    size: int


def leave_long(
    records: Sequence[Record], data: bytes, offset: int, least: int
) -> tuple[Sequence[SpilledRecord], set[bytes]]:
    """Return `records`, with a `Spilled` for each value of `least` bytes or more, and the keys of those.

    `data` begins with the records as they stand in the file from `offset` on, and may hold others between them. One
    that sets several keys, a long value among them, becomes one for each.
    """
    kept: list[SpilledRecord] = []
    keys: set[bytes] = set()
    start = 0
    for entry in records:
        start, following = _next_data(data, start)
        kind, key, value, writer, time_ns = entry
        if len(value) < least:
            kept.append(entry)
        elif kind == record.MULTI_SET:
            position = offset + start + record.HEAD_SIZE + len(key)
            for name, one in record.decode_pairs(value):
                position += _PAIR.size + len(name)
                kept.append((record.SET, name, _spill(one, position, least), writer, time_ns))
                if len(one) >= least:
                    keys.add(name)
                position += len(one)
        else:
            place = offset + following - record.TAIL_SIZE - len(value)
            kept.append((kind, key, _spill(value, place, least), writer, time_ns))
            keys.add(key)
        start = following
    return kept, keys


def _next_data(data: bytes, start: int) -> tuple[int, int]:
    """Return where the first data record at or behind `start` begins and ends."""
    while True:
        end = start + record.unpack_prefix(data, start)[0]
        if data[start + record.KIND_AT] in record.DATA_KINDS:
            return start, end
        start = end


def _spill(value: bytes, offset: int, least: int) -> bytes | Spilled:
    return value if len(value) < least else Spilled(offset, len(value), crc32(value))


def checksum_of_both(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two strings, one behind the other, from the CRC-32 of each and the `size` of the second.

    CRC is linear: what `first` adds to the checksum of `size` bytes it adds to that of as many zeros.
    """
    seeded, plain = first, 0
    while size > 0:
        zeros = _ZEROS[:size]
        seeded, plain = crc32(zeros, seeded), crc32(zeros, plain)
        size -= len(zeros)
    return seeded ^ plain ^ second


def read(fd: int, spilled: Spilled) -> bytes | None:
    """Return the bytes of `spilled`, or None if they are not, or not any more, those that were read before."""
    parts, missing = [], spilled.size
    while missing > 0:
        data = system.os.pread(fd, missing, spilled.offset + spilled.size - missing)
        if not data:
            return None
        parts.append(data)
        missing -= len(data)
    value = parts[0] if len(parts) == 1 else b"".join(parts)
    return value if crc32(value) == spilled.crc else None


def find_long(fd: int, start: LogPosition, end: LogPosition, least: int) -> Generator[Spot]:
    """Yield where the values of `least` bytes or more are in the generation `fd` from `start` to `end`, in their order.

    Their bytes are not read. The checks of the lengths are verified; after one that is wrong nothing is found.
    """
    window = _Window(fd)
    offset, chain = start
    while offset < end.offset:
        length = record.record_length(window.bytes_at(offset, record.PREFIX_SIZE), chain)
        if length < 0:
            return
        if length > least:
            yield from _spots(window, offset, length, least)
        offset += length
        chain = record.chain_at_end(window.bytes_at(offset - record.TAIL_SIZE, record.TAIL_SIZE))


def _spots(window: _Window, start: int, length: int, least: int) -> Iterator[Spot]:
    _, _, _, _, key_size, kind = record.unpack_head(window.bytes_at(start, record.HEAD_SIZE))
    position, end = start + record.HEAD_SIZE + key_size, start + length - record.TAIL_SIZE
    if kind != record.MULTI_SET:
        if kind in record.DATA_KINDS and end - position >= least:
            yield Spot(kind, window.bytes_at(position - key_size, key_size), position, end - position)
        return
    while position < end:
        name_size, size = _PAIR.unpack(window.bytes_at(position, _PAIR.size))
        position += _PAIR.size
        if size >= least:
            yield Spot(record.SET, window.bytes_at(position, name_size), position + name_size, size)
        position += name_size + size


class _Window:
    """A small piece of a file, read where it is asked for."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start, self._data = 0, b""

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes at `offset`; the rest is zeros if the file ends before."""
        if not self._start <= offset <= offset + size <= self._start + len(self._data):
            self._data = system.os.pread(self._fd, max(size, _WINDOW), offset)
            self._start = offset
        begin = offset - self._start
        return self._data[begin : begin + size].ljust(size, b"\0")
