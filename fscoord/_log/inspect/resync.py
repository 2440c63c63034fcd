"""Find where a log can be read again after damage: the next record that is sound with the chain that it implies.

The chain after the damaged bytes is lost. But the check of a record's length depends on the chain before the record,
so the length and the check give that chain. A record can therefore be found and verified without the record before it,
and the records after it follow as always.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from fscoord._log.format import record
from fscoord._log.format.record import LogPosition
from fscoord._log.io.torn_tail import read_at
from fscoord._runtime import system

__all__ = ["find_next"]

_WINDOW: Final = 1 << 20
_WORK_FACTOR: Final = 16
_WORK_MIN: Final = 1 << 28
"""The search for one record may checksum ``_WORK_FACTOR`` bytes for each byte of the file, or ``_WORK_MIN`` if that is
more. To verify a candidate takes as many bytes as it claims to be long, so without a bound a file made for that purpose
could take days."""

_LIKELY: Final = re.compile(  # lengths below 2^28, sessions below 2^24, times before the year 2262, a letter
    rb"(?!\0{4})(?=...[\0-\x08].{4}...\0.{7}[\0-\x7f].[\0-\x04][A-Za-z])", re.DOTALL
)


def find_next(fd: int, bad: LogPosition) -> LogPosition | None:
    """Return the position of the next sound record after the bad one at `bad`, or None if there is none.

    If the length of the bad record is still known, its contents are not searched: a value may hold anything, such as
    another log. Only if the length is lost as well can the search find a record inside of a value.
    """
    size = system.os.fstat(fd).st_size
    prefix = read_at(fd, bad.offset, record.PREFIX_SIZE)
    start = bad.offset + 1
    if len(prefix) == record.PREFIX_SIZE:
        end = bad.offset + record.unpack_prefix(prefix)[0]
        if bad.offset + record.RECORD_MIN <= end < size and _leads_to(fd, end, _chain_at(fd, end, size)):
            return LogPosition(end, record.chain_at_end(read_at(fd, end - record.TAIL_SIZE, record.TAIL_SIZE)))
        if record.record_length(prefix, bad.chain) >= 0:
            start = end
    budget = max(_WORK_MIN, _WORK_FACTOR * (size - start))
    for offset, promised in _candidates(fd, start, size):
        budget -= promised
        if budget < 0:
            return None
        chain = _chain_at(fd, offset, size)
        if chain is not None:
            return LogPosition(offset, chain)
    return None


def _leads_to(fd: int, end: int, chain: int | None) -> bool:
    """Return whether `chain` is the chain after the record whose checksum lies before `end`."""
    return record.chain_at_end(read_at(fd, end - record.TAIL_SIZE, record.TAIL_SIZE)) == chain


def _candidates(fd: int, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the offset of everything that looks like a record, and the length that it claims."""
    while start <= size - record.RECORD_MIN:
        data = read_at(fd, start, _WINDOW + record.RECORD_MIN)
        for match in _LIKELY.finditer(data):
            position = match.start()
            promised = int.from_bytes(data[position : position + 4], "little")
            if record.RECORD_MIN <= promised <= size - start - position and position < _WINDOW:
                yield start + position, promised
        start += _WINDOW


def _chain_at(fd: int, offset: int, size: int) -> int | None:
    """Return the chain before the record at `offset`, or None if no sound record begins there."""
    prefix = read_at(fd, offset, record.PREFIX_SIZE)
    if len(prefix) < record.PREFIX_SIZE:
        return None
    length = record.unpack_prefix(prefix)[0]
    if not record.RECORD_MIN <= length <= min(record.RECORD_MAX, size - offset):
        return None
    end = read_at(fd, offset + length - record.TAIL_SIZE, record.TAIL_SIZE)
    if end[:1] + end[-1:] != b"\n\n":  # checked first, so that a long candidate is not read in vain
        return None
    return record.chain_if_sound(read_at(fd, offset, length), 0)
