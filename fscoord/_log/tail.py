"""Tell a torn tail from damage, and find the VOID behind it.

The writer of a torn record died, or its disk was full. Nothing is ever cut: the next writer extends the file with zeros
up to `record.void_place` and appends a VOID there. See docs/format.md, "A torn tail".
"""

from __future__ import annotations

from typing import NamedTuple

from fscoord import _system as system
from fscoord._log import record

__all__ = ["Damage", "Skip", "Torn", "examine"]

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


def examine(fd: int, offset: int, chain: int, *, durable: bool) -> Skip | Torn | Damage:
    """Say what follows the last good record, which ends at `offset` with checksum `chain`.

    `fd` is a descriptor of its own: it is moved about. A verdict of `Damage` may be wrong while somebody writes; it holds
    when the log is locked.
    """
    size = system.os.fstat(fd).st_size
    frame = _read(fd, offset, record.FRAME_SIZE)
    place = record.void_place(offset, frame, chain)
    verdict: Skip | Torn | Damage = Damage(offset, "the record's checksum does not match")
    if not _is_complete(fd, offset, size, frame, chain):
        verdict = _follow(fd, offset, place, size, chain)
    if durable and isinstance(verdict, Damage) and _is_unsynced(fd, offset, size, frame, chain):
        verdict = _scan(fd, offset, place, size, chain)
    return verdict


def _is_complete(fd: int, offset: int, size: int, frame: bytes, chain: int) -> bool:
    """Whether the bad record at `offset` is neither cut short by the end of the file nor followed by a VOID's zeros."""
    if size - offset < record.FRAME_SIZE:
        return False
    length = record.frame_length(frame, chain)
    end = offset + record.FRAME_SIZE + max(0, length)
    if size < end or _first_data(fd, offset, size) is None:
        return False
    place = record.void_place(offset, frame, chain)
    return size < place or _first_data(fd, end, place) is not None or (length > 0 and _read(fd, end - 1, 1) != b"\0")


def _follow(fd: int, offset: int, place: int, size: int, chain: int) -> Skip | Torn | Damage:
    """Look for the VOID at `place` and, while what is there is a torn VOID, where the VOID for that one belongs."""
    while True:
        found = _first_data(fd, place, size)
        if found is None:
            return Torn(max(place, -(-size // record.SECTOR) * record.SECTOR))
        found -= found % record.SECTOR
        data = _read(fd, found, record.VOID_SIZE)
        checksum = record.is_void(data, offset, chain)
        if checksum is not None:
            return Skip(found + record.VOID_SIZE, checksum)
        if len(data) == record.VOID_SIZE and data[-1]:
            return Damage(offset, f"a torn record is not followed by its VOID at {found}")
        place = record.void_place(found, data, chain)


def _is_unsynced(fd: int, offset: int, size: int, frame: bytes, chain: int) -> bool:
    """Whether a power loss may have left the bad record at `offset` half-written.

    A durable log's writer syncs each record before the next is written, so only the last can lack sectors, and a lost
    sector reads as zeros.
    """
    length = record.frame_length(frame, chain)
    end = min(size, offset + record.FRAME_SIZE + length) if length > 0 else size
    if not _has_zero_sector(fd, offset, end):
        return False
    checksum = int.from_bytes(frame[4:8], "little")
    followed = length > 0 and record.decode(_read(fd, end, min(size - end, _CHUNK)), checksum)[2] > 0
    return not followed


def _scan(fd: int, offset: int, place: int, size: int, chain: int) -> Skip | Torn | Damage:
    """Look for the VOID at every sector from `place` on: what a power loss left may lie between."""
    start = -(-offset // record.SECTOR) * record.SECTOR
    for found in range(start, size, record.SECTOR):
        checksum = record.is_void(_read(fd, found, record.VOID_SIZE), offset, chain)
        if checksum is not None:
            return Skip(found + record.VOID_SIZE, checksum)
    return Torn(max(place, -(-size // record.SECTOR) * record.SECTOR))


def _has_zero_sector(fd: int, start: int, end: int) -> bool:
    position = start
    while position < end:
        boundary = min(end, (position // record.SECTOR + 1) * record.SECTOR)
        if not _read(fd, position, boundary - position).strip(b"\0"):
            return True
        position = boundary
    return False


def _first_data(fd: int, start: int, end: int) -> int | None:
    """Return the first offset in [start, end) whose byte is not zero, or None."""
    while start < end:
        data = _read(fd, start, min(_CHUNK, end - start))
        if not data:
            return None
        rest = data.lstrip(b"\0")
        if rest:
            return start + len(data) - len(rest)
        start += len(data)
    return None


def _read(fd: int, offset: int, size: int) -> bytes:
    """Return up to `size` bytes from `offset`. No pread(2): under pyfakefs it reads another file."""
    system.os.lseek(fd, offset, 0)
    parts = []
    while size > 0:
        data = system.os.read(fd, size)
        if not data:
            break
        parts.append(data)
        size -= len(data)
    return b"".join(parts)
