"""`dump`: yield the records of a log for people, without a lock, up to the first damage."""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from fscoord._log.files import safe_files, torn_tail
from fscoord._log.files.opening import no_header, read_header, refused_header
from fscoord._log.files.safe_files import FilePath
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.inspect.scan import Damaged, Scan, Sound, Voided, iter_records
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError


class Entry(NamedTuple):
    """A record of a log.

    Attributes:
        offset: where the record begins, in bytes from the start of the file.
        kind: the name of the operation.
        writer: the number of the session that wrote the record.
        time: when the record was written, by the writer's wall clock, in seconds since the epoch. It is for people
            only.
        key: the key; empty if the record has none.
        value: the value. For some kinds the value is a text: for ``void`` the offset of the torn record that is
            skipped, for ``session`` the session's ``host:pid``, rank and label, for ``seal`` and ``forward`` the next
            file's name.
        generation: the number of the file that holds the record. Number 0 is the file at the log's own path.
    """

    offset: int
    kind: str
    writer: int
    time: float
    key: bytes
    value: bytes
    generation: int = 0


def dump(path: FilePath) -> Generator[Entry, None, None]:
    """Yield the records of generation 0 of the log at `path`, and then those of its newest generation.

    The generations between these two do not exist any more. The newest generation begins with a snapshot of the state
    at its creation. No lock is taken, and nothing is written.

    Raises:
        StoreUnavailableError: a file can't be opened or read, or no writer has opened the log yet.
        InsecurePathError: `path` is a symbolic link, or not a regular file.
        CorruptLogError: the log is damaged. The records before the damage have been yielded.
    """
    return _dump(safe_files.resolve(path))


def _dump(path: str) -> Generator[Entry, None, None]:
    fd, file, named = -1, path, None
    try:
        while True:
            fd = safe_files.open_descriptor(file, system.os.O_RDONLY)
            header, start = _read_header(path, file, fd, named)
            named = yield from _records(path, file, fd, start, header)
            if named is None:
                return
            file = safe_files.beside(path, named.name)
            system.close_quietly(fd)
            fd = -1  # the number may belong to another file by now
    except FscoordError:
        raise
    except OSError as error:
        raise_if_foreign(error)
        raise safe_files.unavailable(error, path, "reading the log") from error
    finally:
        system.close_quietly(fd)


def _read_header(path: str, file: str, fd: int, named: GenerationRef | None) -> tuple[Header, LogPosition]:
    """Return (header, position after it) of generation 0 if `named` is None, otherwise of generation `named`."""
    safe_files.check(file, fd, 0, read_only=True)
    data = read_header(fd)
    if named is None and Header.is_partial(data):
        raise no_header(path, data)
    try:
        header, start = Header.decode(data)
    except MalformedRecord as error:
        raise refused_header(path, file, error) from None
    if named is not None and header.log_id != named.log_id:
        raise safe_files.damaged(path, file, 0, "it is not the next generation")
    return header, start


def _records(
    path: str, file: str, fd: int, start: LogPosition, header: Header
) -> Generator[Entry, None, GenerationRef | None]:
    """Yield the records of one `file` of the log `path`. Return the newest generation that its records name."""
    scan, chain, newest = Scan(fd, start, durable=header.durable), start.chain, None
    for segment in scan.segments():
        if isinstance(segment, Sound):
            for offset, _, (kind, key, value, writer, time_ns) in iter_records(segment):
                try:
                    meaning = _meaning(kind, value, header.generation)
                except MalformedRecord as error:
                    raise safe_files.damaged(path, file, offset, str(error)) from None
                shown = value
                if isinstance(meaning, GenerationRef):
                    newest, shown = meaning, meaning.name
                elif meaning is not None:
                    shown = _description(meaning)
                name = record.NAMES.get(kind, f"kind {kind}")
                yield Entry(offset, name, writer, time_ns / 1e9, key, shown, header.generation)
        elif isinstance(segment, Voided):
            yield _void(fd, segment.end - record.VOID_SIZE, chain, header.generation)
        elif isinstance(segment, Damaged):
            raise safe_files.damaged(path, file, segment.offset, segment.reason)
        chain = scan.place.chain  # a torn record is the last segment: its writer may still be writing it
    return newest


def _meaning(kind: int, value: bytes, generation: int) -> Session | GenerationRef | None:
    """Return the content of a session record, seal or forward record of `generation`; None for any other record."""
    if kind == record.SESSION:
        return Session.decode(value)
    if kind not in (record.SEAL, record.FORWARD):
        return None
    named = GenerationRef.decode(kind, value, generation)
    if named.generation <= generation:
        raise MalformedRecord(f"it leads from generation {generation} back to {named.generation}")
    return named


def _description(session: Session) -> bytes:
    rank = "" if session.rank is None else f" rank {session.rank}"
    label = f" {session.label}" if session.label else ""
    return f"{session}{rank}{label}".encode("utf-8", "surrogateescape")


def _void(fd: int, start: int, chain: int, generation: int) -> Entry:
    void = record.decode_void(torn_tail.read_at(fd, start, record.VOID_SIZE), chain)
    assert void is not None, "`examine` has just decoded it, and bytes of a log never change"
    skipped, _, writer, time_ns = void
    return Entry(start, "void", writer, time_ns / 1e9, b"", str(skipped).encode(), generation)
