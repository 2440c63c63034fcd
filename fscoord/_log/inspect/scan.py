"""`Scan`: read one file of a log from end to end, whatever is in it: what is sound, skipped, torn or damaged.

It takes no lock until something looks unfinished or bad. Then it asks for quiet, and looks again: what still looks so
while no writer can write, is so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from fscoord._log.format import record
from fscoord._log.format.record import LogPosition, Record
from fscoord._log.inspect import resync
from fscoord._log.io import safe_files, torn_tail
from fscoord._log.locking.log_lock import SOFT, LogLock
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreTimeoutError

__all__ = ["Damaged", "Piece", "Quiet", "Scan", "Skipped", "Sound", "Torn", "each"]

CHUNK: Final = 1 << 20
NAP_S: Final = 0.0005
SOFT_NAPS: Final = 20
SOFT_NAP_S: Final = 0.05
"""A soft lock can't be shared. So one waits until its marker is gone, but not for longer than a second: no writer that
is not stopped needs that for one record."""


class Sound(NamedTuple):
    """Good records that follow each other: ``data`` is what stands in the file from ``offset`` on."""

    offset: int
    chain: int
    data: bytes
    records: list[Record]
    others: list[Record]

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.offset + len(self.data)


class Skipped(NamedTuple):
    """A torn record at ``offset``, and the VOID that says so and ends at ``end``."""

    offset: int
    end: int


class Torn(NamedTuple):
    """The file ends, at ``end``, in a record that was never finished; it begins at ``offset``."""

    offset: int
    end: int


class Damaged(NamedTuple):
    """Nothing can be read from ``offset`` to ``end``, where a sound record begins, or the file ends."""

    offset: int
    end: int
    reason: str


Piece = Sound | Skipped | Torn | Damaged


class Quiet:
    """Keeps the writers of one file of a log away, once it was asked to: by a shared lock, which changes nothing.

    Args:
        path: the path of the log.
        fd: a descriptor of the file, open for reading.
        kind: the log's kind of lock.
        limit: how many seconds to wait for the lock.
    """

    def __init__(self, path: str, fd: int, kind: int, limit: float) -> None:
        self._path, self._limit = path, limit
        self._lock = LogLock(path, fd, kind, system.threading.RLock(), set(), shared=True)
        self.is_kept = False

    def owned_fds(self) -> None:
        """Return when no writer can write any more.

        Raises:
            StoreTimeoutError: somebody else has the lock, and keeps it.
            UnsupportedFilesystemError: there are no such locks here.
            StoreUnavailableError: the lock call failed otherwise.
        """
        if self._lock.kind == SOFT:
            self._wait_for_marker()
        started = system.time.monotonic()
        while not self.is_kept:
            try:
                self._lock.try_lock()
                self.is_kept = True
            except OSError as error:
                raise_if_foreign(error)
                if not self._lock.is_taken(error):
                    refused = self._lock.refuse(error)
                    raise refused or safe_files.unavailable(error, self._path, "locking the log") from error
                waited = system.time.monotonic() - started
                if waited >= self._limit:
                    raise self._timeout(waited) from None
                system.time.sleep(NAP_S)

    @property
    def fd(self) -> int:
        """The descriptor of the file."""
        return self._lock.fd

    def end(self) -> None:
        """Let writers write again."""
        if self.is_kept:
            self.is_kept = False
            self._lock.unlock()

    def _wait_for_marker(self) -> None:
        for _ in range(SOFT_NAPS):
            if not system.os.path.lexists(self._path + ".lock"):
                return
            system.time.sleep(SOFT_NAP_S)

    def _timeout(self, waited: float) -> StoreTimeoutError:
        holder = self._lock.holder()
        who = holder or "a process that has not written yet"
        if isinstance(who, int):
            who = f"session {who}"
        return StoreTimeoutError(
            f"{self._path}: the log's lock did not come within {waited:.3g} s, so that what is being written could not"
            f" be told from damage; {who} holds it and is stopped, or stuck in a call",
            holder=who,
            waited=waited,
        )


class Scan:
    """Reads the file that `quiet` is for, whose descriptor nothing else may move, from `place` on.

    Attributes:
        fd: that descriptor.
        place: behind the last piece that was given.
    """

    def __init__(self, quiet: Quiet, place: LogPosition, *, durable: bool) -> None:
        self.place = place
        self.fd, self._quiet, self._durable = quiet.fd, quiet, durable
        self._zeros = torn_tail.Zeros()

    def pieces(self) -> Iterator[Piece]:
        """Yield what is in the file, piece by piece, without a gap, up to its end.

        A record is read whole: the memory taken is a few times the longest one's.
        """
        data, wanted = b"", CHUNK
        self._stand()
        while True:
            more = system.os.read(self.fd, wanted)
            data += more
            records, others, used, chain, missing = record.decode(data, self.place.chain)
            if used:
                sound = Sound(*self.place, data[:used], records, others)
                self.place, data = LogPosition(self.place.offset + used, chain), data[used:]
                self._durable |= any(found[0] == record.SEAL for found in others)  # see `signpost`
                yield sound
            wanted = max(missing, CHUNK)
            if missing >= 0 and more and (missing <= CHUNK or self._has(len(data) + missing)):
                continue
            if missing >= 0 and (self._quiet.is_kept or not data):
                if data:
                    yield Torn(self.place.offset, self.size())
                return
            piece = self._judge() if missing < 0 else None
            if piece is None:
                self._quiet.owned_fds()
            else:
                yield piece
                if isinstance(piece, Torn) or not self._goes_on(piece):
                    return
            data, wanted = b"", CHUNK
            self._stand()

    def size(self) -> int:
        """Return how long the file is by now, in bytes."""
        return int(system.os.fstat(self.fd).st_size)

    def _stand(self) -> None:
        system.os.lseek(self.fd, self.place.offset, 0)

    def _has(self, size: int) -> bool:
        return self.size() >= self.place.offset + size

    def _judge(self) -> Piece | None:
        """Say what the bad bytes are at the place; None if that can't be said while others write."""
        start, chain = self.place
        verdict = torn_tail.examine(self.fd, start, chain, self._zeros, durable=self._durable)
        if isinstance(verdict, torn_tail.Skip):
            self.place = LogPosition(verdict.offset, verdict.chain)
            return Skipped(start, verdict.offset)
        if not self._quiet.is_kept:
            return None
        size = self.size()
        if isinstance(verdict, torn_tail.Torn):
            return Torn(start, size)
        found = resync.find_next(self.fd, self.place)
        self.place = found or LogPosition(size, chain)
        return Damaged(start, self.place.offset, verdict.reason)

    def _goes_on(self, piece: Piece) -> bool:
        return isinstance(piece, Skipped) or self.size() > self.place.offset


def each(piece: Sound) -> Iterator[tuple[int, int, Record]]:
    """Yield where each record of `piece` begins and ends in the file, and the record, in the order of the file."""
    position, chain = 0, piece.chain
    while position < len(piece.data):
        end = position + record.unpack_prefix(piece.data, position)[0]
        records, others, _, chain, _ = record.decode(piece.data[position:end], chain)
        yield piece.offset + position, piece.offset + end, (records or others)[0]
        position = end
