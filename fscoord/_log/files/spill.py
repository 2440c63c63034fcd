"""Spilled values: long values that stay in the file and not in memory. Find long values, and read spilled values.

A `Spilled` represents a spilled value. It holds the offset of the value in the generation in use, and a checksum. Each
read verifies the checksum. Bytes of a log never change, so a spilled value can be read without the log's lock.

Only pread(2) is used, because it does not move the position of the descriptor. pyfakefs has no pread(2), so under
pyfakefs no value is spilled.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from fscoord._log.files import safe_files
from fscoord._log.format import record
from fscoord._log.format.record import LogPosition, Record
from fscoord._runtime import system

NEVER: Final = 1 << 62
"""A size in bytes that no value reaches. As `spill_at` it means that no value is spilled."""

ENDS: Final = -1
"""As `spill_at` it means that the state machine gets each record with the offset of its end, and no value is spilled.
"""

_WINDOW: Final = 4096
_ZEROS: Final = bytes(1 << 16)
_PAIR: Final = Struct("<HI")


class Spilled:
    """A value that stays in the file of the generation in use: `size` bytes at `offset`, with the CRC-32 `crc`."""

    __slots__ = ("crc", "offset", "size")

    def __init__(self, offset: int, size: int, crc: int) -> None:
        self.offset = offset
        self.size = size
        self.crc = crc

    def __len__(self) -> int:
        return self.size


Fetch = Callable[[Spilled], bytes]
"""A function that reads a spilled value from the file, and returns its bytes."""

SpilledRecord = tuple[int, bytes, bytes | Spilled, int, int]
"""A `Record` whose value may be spilled."""


class Spot(NamedTuple):
    """The location of a long value: the ``kind`` of its record, its ``key``, its ``offset`` and ``size`` in bytes."""

    kind: int
    key: bytes
    offset: int
    size: int


def leave_long(
    records: Sequence[Record], data: bytes, offset: int, least: int
) -> tuple[Sequence[SpilledRecord], set[bytes]]:
    """Replace each value of `least` bytes or more in `records` by a `Spilled`. Return (records, keys of these values).

    `data` holds the bytes of the file from `offset` on: the records, and perhaps control records between them. A
    record of several keys with a long value is split into a SET record for each long value, and records of its kind for
    the pairs between them.
    """
    kept: list[SpilledRecord] = []
    keys: set[bytes] = set()
    start = 0
    for entry in records:
        start, following = _next_data(data, start)
        kind, key, value, writer, time_ns = entry
        if len(value) < least:
            kept.append(entry)
        elif kind in record.OF_SEVERAL_KEYS:
            position = offset + start + record.HEAD_SIZE + len(key)
            done = end = 0
            for name, one in record.decode_changes(value):
                begin, end = end, end + _PAIR.size + len(name) + len(one or b"")
                if one is not None and len(one) >= least:
                    if done < begin:
                        kept.append((kind, key, value[done:begin], writer, time_ns))
                    kept.append((record.SET, name, _spill(one, position + end - len(one), least), writer, time_ns))
                    keys.add(name)
                    done = end
            if done < end:
                kept.append((kind, key, value[done:], writer, time_ns))
        else:
            place = offset + following - record.TAIL_SIZE - len(value)
            kept.append((kind, key, _spill(value, place, least), writer, time_ns))
            keys.add(key)
        start = following
    return kept, keys


def with_ends(records: Sequence[Record], data: bytes, offset: int) -> list[Record]:
    """Return `records` with the offset of the end of the record in place of its time. See `leave_long` for `data`."""
    found: list[Record] = []
    following = 0
    for kind, key, value, writer, _ in records:
        _, following = _next_data(data, following)
        found.append((kind, key, value, writer, offset + following))
    return found


def _next_data(data: bytes, start: int) -> tuple[int, int]:
    """Return the start and end of the first data record at or after `start`."""
    while True:
        end = start + record.unpack_prefix(data, start)[0]
        if data[start + record.KIND_AT] in record.DATA_KINDS:
            return start, end
        start = end


def _spill(value: bytes, offset: int, least: int) -> bytes | Spilled:
    return value if len(value) < least else Spilled(offset, len(value), crc32(value))


def checksum_of_both(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of two concatenated byte strings from their CRC-32s, `first` and `second`.

    `size` is the length of the second string. CRC is linear: a prefix changes the checksum of any `size` bytes by the
    same XOR. This function computes the XOR for `size` zeros, and applies it to `second`.
    """
    seeded, plain = first, 0
    while size > 0:
        zeros = _ZEROS[:size]
        seeded, plain = crc32(zeros, seeded), crc32(zeros, plain)
        size -= len(zeros)
    return seeded ^ plain ^ second


def read(fd: int, spilled: Spilled) -> bytes | None:
    """Return the bytes of `spilled`, or None if they are missing or their checksum is wrong."""
    value = safe_files.read_all(fd, spilled.size, spilled.offset)
    return value if len(value) == spilled.size and crc32(value) == spilled.crc else None


def find_long(fd: int, start: LogPosition, end: LogPosition, least: int) -> Generator[Spot]:
    """Yield the location of each value of `least` bytes or more in the generation `fd`, from `start` to `end`.

    The values themselves are not read. The search stops at a record whose length is damaged.
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
    """A read buffer for a file. It holds the bytes around the last offset that was requested."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._start, self._data = 0, b""

    def bytes_at(self, offset: int, size: int) -> bytes:
        """Return the `size` bytes at `offset`, padded with zeros if the file ends earlier."""
        if not self._start <= offset <= offset + size <= self._start + len(self._data):
            self._data = system.os.pread(self._fd, max(size, _WINDOW), offset)
            self._start = offset
        begin = offset - self._start
        return self._data[begin : begin + size].ljust(size, b"\0")
