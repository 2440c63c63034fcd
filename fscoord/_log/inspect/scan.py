"""`Scan`: divide one file of a log into sound, voided, torn and damaged segments, from its first byte to its last.

A scan takes no lock until it finds bytes that look unfinished or damaged. A writer may be writing them at that moment.
So the scan locks writers out and reads the same bytes again. Only the result of the second read is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from fscoord._log.files import safe_files, torn_tail
from fscoord._log.files.torn_tail import read_at
from fscoord._log.format import record
from fscoord._log.format.record import LogPosition, Record
from fscoord._log.locking.log_lock import SOFT, LogLock
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreTimeoutError

_WINDOW: Final = 1 << 20
_WORK_FACTOR: Final = 16
_WORK_MIN: Final = 1 << 28
"""How many bytes the search for one record may checksum in a small file. In a large file, the limit is `_WORK_FACTOR`
times the size of the file. Without a limit, the search takes days if a long record seems to begin at each offset."""


def find_next(fd: int, bad: LogPosition) -> LogPosition | None:
    """Return the position of the next sound record after the bad record at `bad`; None if there is none.

    If the length of the bad record is still readable, the search begins after the record, because its value may contain
    another log. If the length is lost as well, the search may find a record inside the value.
    """
    size = system.os.fstat(fd).st_size
    prefix = read_at(fd, bad.offset, record.PREFIX_SIZE)
    start = bad.offset + 1
    if len(prefix) == record.PREFIX_SIZE:
        end = bad.offset + record.unpack_prefix(prefix)[0]
        if bad.offset + record.RECORD_MIN <= end < size:
            chain = record.chain_at_end(read_at(fd, end - record.TAIL_SIZE, record.TAIL_SIZE))
            if chain == _chain_at(fd, end, size):
                return LogPosition(end, chain)
        if record.record_length(prefix, bad.chain) >= 0:
            start = end
    budget = max(_WORK_MIN, _WORK_FACTOR * (size - start))
    for offset, promised in _candidates(fd, start, size):
        budget -= promised
        if budget < 0:
            return None
        before = _chain_at(fd, offset, size)
        if before is not None:
            return LogPosition(offset, before)
    return None


def _candidates(fd: int, start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) for each offset at which a record may begin. The length is not verified."""
    while start <= size - record.RECORD_MIN:
        data = read_at(fd, start, _WINDOW + record.RECORD_MIN)
        for match in record.LIKELY.finditer(data):
            position = match.start()
            promised = int.from_bytes(data[position : position + 4], "little")
            if record.RECORD_MIN <= promised <= size - start - position and position < _WINDOW:
                yield start + position, promised
        start += _WINDOW


def _chain_at(fd: int, offset: int, size: int) -> int | None:
    """Return the chain before the record at `offset`; None if no sound record begins there."""
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


CHUNK: Final = 1 << 20
RETRY_S: Final = 0.0005
SOFT_LOCK_CHECKS: Final = 20
SOFT_LOCK_CHECK_S: Final = 0.05
"""The pause between two checks whether a soft lock is free, in seconds. A soft lock has no shared mode, so a scan can't
take it. The scan checks the lock up to `SOFT_LOCK_CHECKS` times, for about a second, and then reads. Within a second, a
writer that is not stopped has appended its record."""

ProgressCallback = Callable[[str, int, int], object]
"""A function that is called with the path of a file, how many of its bytes were read, and its size in bytes."""


class Sound(NamedTuple):
    """Consecutive sound records. ``data`` holds their bytes. The first record begins at ``offset``, after ``chain``."""

    offset: int
    chain: int
    data: bytes
    records: list[Record]
    others: list[Record]

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self.offset + len(self.data)


class Voided(NamedTuple):
    """A torn record at ``offset``, and the VOID after it. Readers continue at ``end``, after the VOID."""

    offset: int
    end: int


class Torn(NamedTuple):
    """An unfinished record, from ``offset`` to ``end``, where the file ends."""

    offset: int
    end: int


class Damaged(NamedTuple):
    """Unreadable bytes from ``offset`` to ``end``. At ``end``, the next sound record begins, or the file ends."""

    offset: int
    end: int
    reason: str


Segment = Sound | Voided | Torn | Damaged


class WriterLockout:
    """A shared lock that keeps writers from appending to one file of a log. To take the lock does not change the file.

    Args:
        path: the path of the log.
        fd: a descriptor of the file, open for reading.
        kind: the log's kind of lock.
        limit: how long `acquire` may wait, in seconds.
    """

    def __init__(self, path: str, fd: int, kind: int, limit: float) -> None:
        self._path, self._limit = path, limit
        self._lock = LogLock(path, fd, kind, system.recursive_mutex(), set(), shared=True)
        self.is_held = False

    def acquire(self) -> None:
        """Wait for the lock. Until `release`, no process can append. If the lock is already held, return at once.

        Raises:
            StoreTimeoutError: another process held the lock for longer than `limit` seconds.
            UnsupportedFilesystemError: the file system has no locks of this kind.
            StoreUnavailableError: the lock call failed for another reason.
        """
        if self._lock.kind == SOFT:
            self._wait_for_marker()
        started = system.time.monotonic()
        while not self.is_held:
            try:
                self._lock.try_lock()
                self.is_held = True
            except OSError as error:
                raise_if_foreign(error)
                if not self._lock.is_taken(error):
                    refused = self._lock.refuse(error)
                    raise refused or safe_files.unavailable(error, self._path, "locking the log") from error
                waited = system.time.monotonic() - started
                if waited >= self._limit:
                    raise self._timeout(waited) from None
                system.time.sleep(RETRY_S)

    def release(self) -> None:
        """Release the lock, so that writers can append again. Do nothing if `acquire` has not taken the lock."""
        if self.is_held:
            self.is_held = False
            self._lock.unlock()

    def _wait_for_marker(self) -> None:
        for _ in range(SOFT_LOCK_CHECKS):
            if not system.os.path.lexists(self._path + ".lock"):
                return
            system.time.sleep(SOFT_LOCK_CHECK_S)

    def _timeout(self, waited: float) -> StoreTimeoutError:
        holder = self._lock.holder()
        name = holder or "a process that has not written yet"
        if isinstance(name, int):
            name = f"session {name}"
        return StoreTimeoutError(
            f"{self._path}: the log's lock was not released within {waited:.3g} s: {name} holds it (is it stopped, or"
            " blocked in the kernel?). Without the lock, an unfinished record can't be told from damage: try again, or"
            " end that process",
            holder=name,
            waited=waited,
        )


class Scan:
    """Reads the file `fd` from `place` on. No other code may change the position of `fd` meanwhile.

    Args:
        fd: the descriptor of the file.
        place: where the scan begins.
        durable: whether the log is durable.
        lockout: the lock that keeps writers from the file. None: the scan takes no lock, and ends at the first bytes
            that look damaged. They may be a record that is being written.

    Attributes:
        place: the position after the last segment that was yielded.
    """

    def __init__(self, fd: int, place: LogPosition, *, durable: bool, lockout: WriterLockout | None = None) -> None:
        self.fd, self.place, self._durable, self._lockout = fd, place, durable, lockout
        self._zeros = torn_tail.Zeros()

    def segments(self) -> Iterator[Segment]:
        """Yield the segments of the file in order, without a gap, up to its end.

        Each record is read as a whole, so a scan needs a few times as much memory as the longest record.
        """
        data, wanted = b"", CHUNK
        self._seek()
        while True:
            more = system.os.read(self.fd, wanted)
            data += more
            records, others, used, chain, missing = record.decode(data, self.place.chain)
            if used:
                sound = Sound(*self.place, data[:used], records, others)
                self.place, data = LogPosition(self.place.offset + used, chain), data[used:]
                # Forward records, which come after a seal, are synced like the records of a durable log.
                self._durable |= any(found[0] == record.SEAL for found in others)
                yield sound
            wanted = max(missing, CHUNK)
            if missing >= 0 and more and (missing <= CHUNK or self._has(len(data) + missing)):
                continue
            if missing >= 0 and (self._is_final or not data):
                if data:
                    yield Torn(self.place.offset, self.size())
                return
            segment = self._classify() if missing < 0 else None
            if segment is None and self._lockout is not None:
                self._lockout.acquire()
            elif segment is not None:
                yield segment
                if isinstance(segment, Torn) or not self._goes_on(segment):
                    return
            data, wanted = b"", CHUNK
            self._seek()

    @property
    def _is_final(self) -> bool:
        """Whether the scan may report bytes that look damaged. If not, it must lock writers out and read again."""
        return self._lockout is None or self._lockout.is_held

    def size(self) -> int:
        """Return the present size of the file, in bytes."""
        return int(system.os.fstat(self.fd).st_size)

    def _seek(self) -> None:
        system.os.lseek(self.fd, self.place.offset, 0)

    def _has(self, size: int) -> bool:
        return self.size() >= self.place.offset + size

    def _classify(self) -> Segment | None:
        """Return a segment for the unreadable bytes that begin at the attribute ``place``.

        Return None if the classification needs the log's lock, and the scan does not hold the lock yet.
        """
        start, chain = self.place
        verdict = torn_tail.examine(self.fd, start, chain, self._zeros, durable=self._durable)
        if isinstance(verdict, torn_tail.Skip):
            self.place = LogPosition(verdict.offset, verdict.chain)
            return Voided(start, verdict.offset)
        if not self._is_final:
            return None
        size = self.size()
        if isinstance(verdict, torn_tail.Torn):
            return Torn(start, size)
        found = None if self._lockout is None else find_next(self.fd, self.place)
        self.place = found or LogPosition(size, chain)
        return Damaged(start, self.place.offset, verdict.reason)

    def _goes_on(self, segment: Segment) -> bool:
        return isinstance(segment, Voided) or self.size() > self.place.offset


def iter_records(segment: Sound) -> Iterator[tuple[int, int, Record]]:
    """Yield (offset, end, record) for each record of `segment`, in the order of the file."""
    position, chain = 0, segment.chain
    while position < len(segment.data):
        end = position + record.unpack_prefix(segment.data, position)[0]
        records, others, _, chain, _ = record.decode(segment.data[position:end], chain)
        yield segment.offset + position, segment.offset + end, (records or others)[0]
        position = end
