"""`examine`: distinguish a torn (incomplete) record from damage, and find the VOID after a torn record.

A torn record was not written completely, because its writer died or the disk was full. It is never truncated. The next
writer extends the file with zeros up to `void_place`, and appends a VOID there: a record after which readers continue.
See docs/contributors/format.md, "Torn tails".
"""

from __future__ import annotations

from typing import NamedTuple

from fscoord._log.files import safe_files
from fscoord._log.format import record
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

_CHUNK = 1 << 20


class Skip(NamedTuple):
    """A verdict: the record is torn, and a VOID follows the record. The log continues at ``offset`` with ``chain``."""

    offset: int
    chain: int


class Torn(NamedTuple):
    """A verdict: the log ends with a torn record. The next writer appends a VOID at offset ``place``."""

    place: int


class Damage(NamedTuple):
    """A verdict: the bytes at ``offset`` are neither a complete nor a torn record. ``reason`` says what is wrong."""

    offset: int
    reason: str


Verdict = Skip | Torn | Damage


def void_place(end: int) -> int:
    """Return the offset of the VOID for a torn record: the first sector boundary at least one sector after `end`.

    `end` is the end of the record according to its length. If the length is torn as well, `end` is the end of the
    record's prefix.
    """
    return _next_sector(end + record.SECTOR)


class DeadlineReached(Exception):
    """Raised if the deadline passes before all bytes after a bad record were read."""


class Zeros:
    """Searches a file for bytes that are not zero. Reads no zeros twice, because it stores the range of zeros.

    Args:
        is_sparse: whether to skip holes of the file (SEEK_DATA of lseek(2)). Some file systems report a hole where the
            file has data, and a search that skips the hole would miss records. So `is_sparse` is true only on file
            systems that report holes correctly: see `mount.Mount.reports_holes`.
    """

    __slots__ = ("_end", "_start", "deadline", "is_sparse")

    def __init__(self, *, is_sparse: bool = False) -> None:
        self.is_sparse = is_sparse
        self.deadline = float("inf")
        """The time at which `first_data` stops reading (monotonic, in seconds)."""
        self._start = self._end = 0

    def forget(self) -> None:
        """Forget the known range of zeros. The caller changes to another file, or may have read from a stale cache."""
        self._start = self._end = 0

    def first_data(self, fd: int, start: int, end: int) -> int | None:
        """Return the first offset in [start, end) whose byte is not zero; None if all these bytes are zero.

        Raises:
            DeadlineReached: the deadline passed. The next call continues where this call stopped.
        """
        if not self._start <= start <= self._end:
            self._start = self._end = start
        start = max(start, self._end)
        while start < end:
            if self.is_sparse and end - start > _CHUNK:
                start = min(_next_extent(fd, start, end), end)
                self._end = start
            data = read_at(fd, start, min(_CHUNK, end - start))
            if not data:
                return None
            rest = data.lstrip(b"\0")
            start += len(data) - len(rest)
            self._end = start
            if rest:
                return start
            if start < end and system.time.monotonic() > self.deadline:
                raise DeadlineReached
        return None


def _next_extent(fd: int, start: int, end: int) -> int:
    """Return the first offset from `start` on that is not in a hole; `end` if the rest of the file is a hole."""
    try:
        return int(system.os.lseek(fd, start, system.os.SEEK_DATA))
    except OSError as error:
        raise_if_foreign(error)
        if error.errno == system.errno.ENXIO:  # a hole reaches to the end of the file
            return end
        raise


def examine(fd: int, offset: int, chain: int, zeros: Zeros, *, durable: bool) -> Verdict:
    """Classify the bytes at `offset`, where the last good record ends and no good record begins.

    `chain` is the chain after the last good record. The position of `fd` changes, so no other code may use `fd`
    meanwhile. Without the log's lock, the verdict `Damage` may be wrong, because a writer may be appending.

    Raises:
        DeadlineReached: the deadline of `zeros` passed.
    """
    size = system.os.fstat(fd).st_size
    prefix = read_at(fd, offset, record.PREFIX_SIZE)
    length = record.record_length(prefix, chain)
    if length > 0:
        # The check of a partly written prefix ends in zeros, and a single flipped bit may have made it right. The VOID
        # then stands where it was put for an unsound prefix, with zeros before it. This look does not use `zeros`,
        # which remembers one range: a range that begins here would replace the range after the record.
        first = void_place(offset + record.PREFIX_SIZE)
        if not _holds_data(fd, offset + record.PREFIX_SIZE, min(first, size)):
            found = _follow(fd, offset, first, size, chain, zeros)
            if isinstance(found, Skip):
                return found
    end = offset + (length if length > 0 else record.PREFIX_SIZE)
    place = void_place(end)
    # A bad record is torn if its writer never wrote the end of it. Otherwise it was complete once, and is damaged. Two
    # facts decide. The next record begins directly after a complete record, but only zeros and then a VOID come after a
    # torn record. And a complete record ends with a newline. In a torn record that byte is zero, or the file ends
    # before it.
    verdict: Verdict = Damage(offset, "the record's checksum does not match")
    if zeros.first_data(fd, end, min(place, size)) is None:
        torn = read_at(fd, end - 1, 1) in (b"", b"\0")
        # In a durable log, a power failure may also lose a sector in the middle of the last record, the only one that
        # was not synced. In another log it may lose sectors of any record, so a lost sector counts as damage there. A
        # sound prefix shows that the first sector is not lost.
        second = _next_sector(offset + 1)
        if torn or (durable and length > 0 and _lost_sector(fd, second, end, size)):
            verdict = _follow(fd, offset, place, size, chain, zeros)
    # If the sector with the length is lost, `end` is a guess, and the VOID may be at any sector boundary after it.
    if durable and length < 0 and isinstance(verdict, Damage) and _lost_sector(fd, offset, end, size):
        verdict = _search(fd, offset, place, size, chain, zeros)
    return verdict


def _follow(fd: int, offset: int, place: int, size: int, chain: int, zeros: Zeros) -> Verdict:
    """Look for the VOID at `place`. If this VOID is torn as well, look for the VOID after it, and so on."""
    while True:
        found = zeros.first_data(fd, place, size)
        if found is None:
            return Torn(max(place, _next_sector(size)))
        found -= found % record.SECTOR
        data = read_at(fd, found, record.VOID_SIZE)
        void = record.decode_void(data, chain)
        if void is not None and void[0] == offset:
            return Skip(found + record.VOID_SIZE, void[1])
        place = void_place(found + record.VOID_SIZE)
        if not record.is_torn_void(data) or _holds_data(fd, found + len(data), min(place, size)):
            return Damage(offset, f"a torn record is not followed by its VOID at {found}")


def _lost_sector(fd: int, start: int, end: int, size: int) -> bool:
    """Return whether a sector between `start` and `end` holds only zeros.

    A power failure may lose a sector of the last record of a durable log, but not of earlier records, which were
    synced.
    """
    while start < min(end, size):
        boundary = _next_sector(start + 1)
        if not _holds_data(fd, start, min(boundary, size)):
            return True
        start = boundary
    return False


def _search(fd: int, offset: int, place: int, size: int, chain: int, zeros: Zeros) -> Verdict:
    """Search for the VOID after a record whose end is unknown, because a power failure has destroyed its prefix."""
    found = zeros.first_data(fd, place, size)
    while found is not None:
        found -= found % record.SECTOR
        void = record.decode_void(read_at(fd, found, record.VOID_SIZE), chain)
        if void is not None and void[0] == offset:
            return Skip(found + record.VOID_SIZE, void[1])
        found = zeros.first_data(fd, found + record.SECTOR, size)
        if system.time.monotonic() > zeros.deadline:
            raise DeadlineReached
    start = offset + record.RECORD_MIN
    if size - offset > record.RECORD_MAX or _holds_record(read_at(fd, start, size - start)):
        return Damage(offset, "the beginning of the record is lost, and other records follow")
    return Torn(max(place, _next_sector(size)))


def _holds_record(data: bytes) -> bool:
    """Return whether `data` contains a sound record with any chain."""
    return any(record.chain_if_sound(data, match.start()) is not None for match in record.LIKELY.finditer(data))


def _next_sector(offset: int) -> int:
    """Return the first sector boundary at or after `offset`."""
    return -(-offset // record.SECTOR) * record.SECTOR


def _holds_data(fd: int, start: int, end: int) -> bool:
    """Return whether one of the bytes from `start` to `end` is not zero."""
    return start < end and any(read_at(fd, start, end - start))


def read_at(fd: int, offset: int, size: int) -> bytes:
    """Return up to `size` bytes from `offset`, fewer only at the end of the file. The position of `fd` changes.

    pread(2) is not used: under pyfakefs it would read a real file instead of the fake file.
    """
    system.os.lseek(fd, offset, 0)
    return safe_files.read_all(fd, size)
