"""`repair_log`: write what is sound of a damaged log to another file, and tell of every record that is left out.

The damaged files are only read. What stands behind a damage is left out, too, unless it is asked for: without it the
copy holds a state that the store has really been in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from fscoord._log.format import record
from fscoord._log.format.control_records import Session, decode_control
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.format.record import MalformedRecord, Record
from fscoord._log.inspect.copying import Copy
from fscoord._log.inspect.salvage import Source, open_newest
from fscoord._log.inspect.scan import Damaged, Scan, Sound, Torn, each
from fscoord._log.inspect.verify import Tell
from fscoord._log.io import safe_files, torn_tail
from fscoord._log.locking.log_lock import OFD
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError

__all__ = ["Dropped", "Repair", "copy_log", "repair_log"]

_OF_THIS_FILE: Final = frozenset((record.BELL, record.SEAL, record.FORWARD))
"""Kinds that speak of the files of a log, and mean nothing in another."""


NEVER_FINISHED: Final = "it was never finished, and nobody was told that it counts"


class Dropped(NamedTuple):
    """A record, or what can't be read as one, that is not in the copy.

    Attributes:
        file: the path of the file that it is in.
        offset: where it begins there, in bytes.
        size: how long it is.
        why: why it is left out.
        kind: what it did, by the name of the operation; ``""`` if that can't be known.
        key: its key.
        writer: the number of the session that wrote it, 0 if not known.
        time: when, in seconds since the epoch by the writer's wall clock.
        value_size: how long its value is, in bytes.
        is_certain: whether its checksum says that these are what was written; otherwise they are what stands there now.
    """

    file: str
    offset: int
    size: int
    why: str
    kind: str = ""
    key: bytes = b""
    writer: int = 0
    time: float = 0.0
    value_size: int = 0
    is_certain: bool = False


class Repair(NamedTuple):
    """What `repair_log` did, or would do.

    Attributes:
        path: the path of the damaged log.
        output: that of the copy.
        is_written: whether it was written.
        source: the file of the log that was copied: its newest generation, which holds all that counts.
        generation: the number of that.
        kept: how many records were copied.
        dropped: how many records, or places that can't be read, were not.
        dropped_bytes: how long these are together.
        notes: what else is to be known.
    """

    path: str
    output: str
    is_written: bool
    source: str
    generation: int
    kept: int
    dropped: int
    dropped_bytes: int
    notes: tuple[str, ...]


Drop = Callable[[Dropped], object]


def repair_log(path: str, output: str, *, salvage: bool, write: bool, limit: float, tell: Tell, drop: Drop) -> Repair:
    """Copy what is sound of the log at `path` to a new one at `output`.

    Args:
        path: the damaged log's own name. Whoever writes to it waits meanwhile.
        output: where the copy appears, whole, at the end; nothing may be there.
        salvage: copy the sound records behind a damage, too, and make do without a header or a generation.
        write: write the copy; otherwise only tell what would be left out.
        limit: how many seconds to wait for the log's lock.
        tell: is told how far it has got.
        drop: is called with everything that is left out, in order.

    Raises:
        ValueError: there is something at `output`.
        CorruptLogError: nothing can be copied, or only by salvage.
        StoreUnavailableError: something can't be opened, read or written.
        InsecurePathError: it is a link, or no regular file.
        StoreTimeoutError: the log's lock did not come.
    """
    _refuse_to_overwrite(output)
    try:
        with open_newest(path, limit, tell, salvage=salvage) as (source, root, notes):
            copying = _Copying(source, root, notes, tell, drop, salvage=salvage)
            if write:
                mode = system.stat.S_IMODE(system.os.fstat(source.fd).st_mode)
                with Copy(output, copying.header, mode) as copy:
                    copying.run(copy.add)
                    copy.finish()
            else:
                copying.run(_forget)
            counts = (copying.kept, copying.dropped, copying.dropped_bytes)
            return Repair(path, output, write, source.file, source.generation, *counts, tuple(notes))
    except FscoordError:
        raise
    except OSError as error:
        raise_if_foreign(error)
        raise safe_files.unavailable(error, path, "copying the log") from error


def copy_log(path: str, output: str, *, limit: float, tell: Tell) -> Repair:
    """Make a new log at `output` that holds what the sound log at `path` does. Arguments and errors as `repair_log`.

    Raises:
        CorruptLogError: the log is damaged; nothing was written.
    """
    torn: list[Dropped] = []

    def drop(found: Dropped) -> None:
        if found.why is not NEVER_FINISHED:
            raise safe_files.damaged(path, found.file, found.offset, found.why)
        torn.append(found)

    return repair_log(path, output, salvage=False, write=True, limit=limit, tell=tell, drop=drop)


def _refuse_to_overwrite(output: str) -> None:
    if system.os.path.lexists(output):
        raise ValueError(f"{output} is there already, and nothing is overwritten; name another file for the copy")


def _forget(found: Record) -> None:
    """Keep nothing: what would be kept is only counted."""


class _Copying:
    """The copying of one file."""

    def __init__(
        self, source: Source, root: Header | None, notes: list[str], tell: Tell, drop: Drop, *, salvage: bool
    ) -> None:
        self._source, self._notes, self._tell, self._drop, self._salvage = source, notes, tell, drop, salvage
        self.kept = self.dropped = self.dropped_bytes = 0
        self._is_broken = source.header is None
        self._is_sealed = False
        self._introduced: set[int] = set()
        known = source.header or root
        if known is None:
            known = Header(b"", OFD)
            notes.append('no header could be read: the copy has "ofd" locks, is not durable, and belongs to no run')
        now = system.time.time_ns()
        self.header = known._replace(log_id=system.random_bytes(16), generation=0, life=0, created_ns=now)

    def run(self, owned_fds: Callable[[Record], object]) -> None:
        source = self._source
        scan = Scan(source.quiet, source.place, durable=self.header.durable)
        if source.header is None:
            self._leave(Dropped(source.file, 0, source.place.offset, "the header is damaged"))
        chain = source.place.chain
        for piece in scan.pieces():
            if isinstance(piece, Sound):
                for start, end, found in each(piece):
                    self._copy(start, end, found, owned_fds)
            elif isinstance(piece, Damaged):
                self._leave(self._unread(piece, chain))
                self._is_broken = True
            elif isinstance(piece, Torn):
                self._leave(Dropped(source.file, piece.offset, piece.end - piece.offset, NEVER_FINISHED))
            chain = scan.place.chain
            self._tell(source.file, piece.end, scan.size())

    def _copy(self, start: int, end: int, found: Record, owned_fds: Callable[[Record], object]) -> None:
        kind, key, value, writer, time_ns = found
        why = self._objection(found)
        if why is not None:
            name = record.NAMES.get(kind, f"kind {kind}")
            about = (name, key, writer, time_ns / 1e9, len(value), True)
            self._leave(Dropped(self._source.file, start, end - start, why, *about))
            return
        if kind in _OF_THIS_FILE:
            return
        if kind == record.SESSION:
            self._introduced.add(writer)
        elif writer and writer not in self._introduced:
            self._introduced.add(writer)
            self._notes.append(f"who session {writer} was is lost")
            unknown = Session("unknown", 0).encode()
            owned_fds((record.SESSION, b"", unknown, writer, time_ns))  # or the next to come would be given this number
        owned_fds(found)
        self.kept += 1

    def _objection(self, found: Record) -> str | None:
        try:
            meaning = decode_control(found, self._source.generation, is_sealed=self._is_sealed)
        except MalformedRecord as error:
            self._is_broken = True
            return str(error)
        self._is_sealed |= found[0] == record.SEAL and isinstance(meaning, GenerationRef)
        if self._is_broken and not self._salvage:
            return "it stands after the damage"
        return None

    def _leave(self, dropped: Dropped) -> None:
        self.dropped += 1
        self.dropped_bytes += dropped.size
        self._drop(dropped)

    def _unread(self, piece: Damaged, chain: int) -> Dropped:
        """Say what stands where no record can be read: if its length is known, what it says of itself."""
        source, size = self._source, piece.end - piece.offset
        dropped = Dropped(source.file, piece.offset, size, piece.reason)
        if record.record_length(torn_tail.read_at(source.fd, piece.offset, record.PREFIX_SIZE), chain) != size:
            return dropped
        kind, key, value_size, writer, time_ns = record.decode_unverified(
            torn_tail.read_at(source.fd, piece.offset, size)
        )
        return dropped._replace(
            kind=record.NAMES.get(kind, ""), key=key, writer=writer, time=time_ns / 1e9, value_size=value_size
        )
