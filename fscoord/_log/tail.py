"""Tell a torn tail from damage, and find the VOID behind it.

The writer of a torn record died, or its disk was full. Nothing is ever cut: the next writer extends the file with zeros
up to `void_place` and appends a VOID there. See docs/format.md, "Torn tails".
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

from fscoord import _system as system
from fscoord._log import record

__all__ = ["Damage", "Skip", "Torn", "examine", "is_sound_alone", "read_at", "void_place"]

_CHUNK = 1 << 20


class Skip(NamedTuple):
    """A VOID was found: go on at ``offset`` with ``chain``."""

    offset: int
    chain: int


class Torn(NamedTuple):
    """The log ends in a torn record; the next writer's VOID belongs at ``place``."""

    place: int


class Damage(NamedTuple):
    """No writer leaves this behind: ``reason`` says what is wrong at ``offset``."""

    offset: int
    reason: str


Verdict = Skip | Torn | Damage


def void_place(end: int) -> int:
    """Return where the VOID for a torn record belongs: the first sector boundary at least one sector past `end`.

    `end` is where the record promises to end, or where its frame ends if that is torn as well.
    """
    return _next_sector(end + record.SECTOR)


def examine(fd: int, offset: int, chain: int, *, durable: bool) -> Verdict:
    """Say what follows the last good record, which ends at `offset` with checksum `chain`, when no good one does.

    `fd` is a descriptor of its own: it is moved about. A verdict of `Damage` may be wrong while somebody writes; it
    holds when the log is locked.
    """
    size = system.os.fstat(fd).st_size
    frame = read_at(fd, offset, record.FRAME_SIZE)
    length = record.frame_length(frame, chain)
    end = offset + record.FRAME_SIZE + max(0, length)
    place = void_place(end)
    verdict: Verdict = Damage(offset, "the record's checksum does not match")
    if _first_data(fd, end, min(place, size)) is None:  # after a complete record the next one begins at once
        torn = read_at(fd, end - 1, 1) in (b"", b"\0")  # a complete one ends in its kind
        second = _next_sector(offset + 1)  # of a sound frame nothing is lost in the sector where it begins
        if torn or (durable and length > 0 and _lost_sector(fd, second, end, size)):
            verdict = _follow(fd, offset, place, size, chain)
    if durable and length < 0 and isinstance(verdict, Damage) and _lost_sector(fd, offset, end, size):
        verdict = _search(fd, offset, place, size, chain)
    return verdict


def _follow(fd: int, offset: int, place: int, size: int, chain: int) -> Verdict:
    """Look for the VOID at `place` and, while what is there is a torn VOID, where the VOID for that one belongs."""
    while True:
        found = _first_data(fd, place, size)
        if found is None:
            return Torn(max(place, _next_sector(size)))
        found -= found % record.SECTOR
        data = read_at(fd, found, record.VOID_SIZE)
        void = record.decode_void(data, chain)
        if void is not None and void[0] == offset:
            return Skip(found + record.VOID_SIZE, void[1])
        place = void_place(found + record.VOID_SIZE)
        if not record.is_torn_void(data) or _first_data(fd, found + len(data), min(place, size)) is not None:
            return Damage(offset, f"a torn record is not followed by its VOID at {found}")


def _lost_sector(fd: int, start: int, end: int, size: int) -> bool:
    """Return whether one of the sectors that hold the bytes from `start` to `end` is all zeros from `start` on.

    A power loss may leave that of the last record of a durable log. The others were synced before the next was written.
    """
    while start < min(end, size):
        boundary = _next_sector(start + 1)
        if _first_data(fd, start, min(boundary, size)) is None:
            return True
        start = boundary
    return False


def _search(fd: int, offset: int, place: int, size: int, chain: int) -> Verdict:
    """Look for what follows a record whose frame a power loss has taken, so that its end is not known."""
    for found in range(place, size, record.SECTOR):
        void = record.decode_void(read_at(fd, found, record.VOID_SIZE), chain)
        if void is not None and void[0] == offset:
            return Skip(found + record.VOID_SIZE, void[1])
    start = offset + record.FRAME_SIZE + record.BODY_MIN
    if size - offset > record.FRAME_SIZE + record.BODY_MAX or _holds_record(read_at(fd, start, size - start)):
        return Damage(offset, "the record's frame is lost, and other records follow")
    return Torn(max(place, _next_sector(size)))


def _holds_record(data: bytes) -> bool:
    """Return whether there is a sound record anywhere in `data`, whatever it is chained over."""
    import re

    likely = re.compile(rb"(?!\0{4})(?=...[\0-\x08].{11}\0.{9}[\0-\x04])", re.DOTALL)  # writers are below 2^24
    return any(is_sound_alone(data, match.start()) for match in likely.finditer(data))


def is_sound_alone(data: bytes, start: int) -> bool:
    """Return whether a record begins at `start`, whatever it is chained over.

    CRC is linear: the frame's checksum tells what the chain adds to that of 8 bytes, and zeros appended to it tell
    what it adds to the checksum of the body.
    """
    length, checksum, frame_checksum = record.unpack_frame(data, start)
    behind_frame = start + record.FRAME_SIZE
    body = data[behind_frame : behind_frame + length]
    if not len(body) == length >= record.BODY_MIN or not chr(body[-1]).isalpha():
        return False
    zeros = bytes(length - 8)
    added = frame_checksum ^ crc32(data[start : start + 8])
    return bool(crc32(body) ^ crc32(zeros, added) ^ crc32(zeros) == checksum)


def _next_sector(offset: int) -> int:
    """Return the first sector boundary that is not below `offset`."""
    return -(-offset // record.SECTOR) * record.SECTOR


def _first_data(fd: int, start: int, end: int) -> int | None:
    """Return the first offset in [start, end) whose byte is not zero, or None."""
    while start < end:
        data = read_at(fd, start, min(_CHUNK, end - start))
        if not data:
            return None
        rest = data.lstrip(b"\0")
        if rest:
            return start + len(data) - len(rest)
        start += len(data)
    return None


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Return up to `size` bytes from `offset`, fewer only at the end of the file; this moves the descriptor.

    No pread(2): under pyfakefs it reads another file.
    """
    system.os.lseek(fd, offset, 0)
    parts = []
    while size > 0:
        data = system.os.read(fd, size)
        if not data:
            break
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
