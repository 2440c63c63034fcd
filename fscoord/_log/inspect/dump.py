"""Read a log record by record, for people: without the lock, without following it, up to the damage if there is any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.format.record import MalformedRecord
from fscoord._log.io import safe_files, torn_tail
from fscoord._log.io.opening import read_header
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError

__all__ = ["Entry", "dump_log"]

_CHUNK = 1 << 18


class Entry(NamedTuple):
    """A record of a log.

    Attributes:
        offset: where it begins, in bytes from the start of the file.
        kind: what it does, by the name of the operation.
        writer: the number of the session that wrote it.
        time: when, in seconds since the epoch by the writer's wall clock: for people only.
        key: the key, empty where there is none.
        value: the value; of a ``void`` record the offset that it skips, of a ``session`` its description, of a ``seal``
            and a ``forward`` the name of the file in which the log goes on, as text.
        generation: which file of the log it is in: 0 has the log's own name.
    """

    offset: int
    kind: str
    writer: int
    time: float
    key: bytes
    value: bytes
    generation: int = 0


def dump_log(path: str) -> Iterator[Entry]:
    """Yield the records of the log at `path`, and those of its newest generation if it has later ones.

    What was in generations between the two is gone; what it amounted to is at the beginning of the newest.

    Raises:
        StoreUnavailableError: it can't be opened or read.
        InsecurePathError: it is a link, or no regular file.
        CorruptLogError: it is damaged; what comes before the damage was yielded.
    """
    fd = -1
    try:
        fd = safe_files.open_descriptor(path, system.os.O_RDONLY)
        safe_files.check(path, fd, 0, read_only=True)
        try:
            header, offset, chain = Header.decode(read_header(fd))
        except MalformedRecord as error:
            raise safe_files.damaged(path, path, 0, str(error)) from None
        way = _Way(path)
        yield from _records(path, fd, offset, chain, header, way)
        while way.successor is not None:
            successor, way.successor = way.successor, None
            file = system.os.path.join(system.os.path.dirname(path), system.os.fsdecode(successor.name))
            system.close_quietly(fd)
            fd = -1  # its number may be that of another by now
            fd, header, offset, chain = _open_generation(path, file, successor)
            yield from _records(file, fd, offset, chain, header, way)
    except FscoordError:
        raise
    except OSError as error:
        raise_if_foreign(error)
        raise safe_files.unavailable(error, path, "reading the log") from error
    finally:
        system.close_quietly(fd)


class _Way:
    """Where the log goes on, as far as was read."""

    successor: GenerationRef | None = None

    def __init__(self, log: str) -> None:
        self.log = log

    def note(self, path: str, offset: int, kind: int, value: bytes, generation: int) -> bytes:
        """Take in a seal or a forward record of `generation`; return the name that it says."""
        try:
            named = (
                GenerationRef.from_seal(value, generation) if kind == record.SEAL else GenerationRef.from_forward(value)
            )
            if named.generation <= generation:
                raise MalformedRecord(f"it leads from generation {generation} back to {named.generation}")
        except MalformedRecord as error:
            raise safe_files.damaged(self.log, path, offset, str(error)) from None
        self.successor = named
        return named.name


def _open_generation(path: str, file: str, successor: GenerationRef) -> tuple[int, Header, int, int]:
    fd = safe_files.open_descriptor(file, system.os.O_RDONLY)
    try:
        safe_files.check(file, fd, 0, read_only=True)
        try:
            header, offset, chain = Header.decode(read_header(fd))
        except MalformedRecord as error:
            raise safe_files.damaged(path, file, 0, str(error)) from None
        if header.log_id != successor.log_id:
            raise safe_files.damaged(path, file, 0, "it is not the generation that was to follow")
    except BaseException:
        system.close_quietly(fd)
        raise
    return fd, header, offset, chain


def _records(path: str, fd: int, offset: int, chain: int, header: Header, way: _Way) -> Iterator[Entry]:
    system.os.lseek(fd, offset, 0)
    data, position = b"", 0  # what was read and not yet yielded: data[position:] begins at offset
    durable = header.durable
    zeros = torn_tail.Zeros()
    while True:
        size = max(record.PREFIX_SIZE, record.record_length(data, chain, position))
        if len(data) - position < size:
            if system.os.fstat(fd).st_size < offset + size:
                return  # torn, or still being written
            data, position = data[position:] + system.os.read(fd, max(_CHUNK, size)), 0
            continue
        found, others, used, following, _ = record.decode(data[position : position + size], chain)
        if used:
            yield _entry(path, offset, (found or others)[0], header.generation, way)
            offset, position, chain = offset + used, position + used, following
            durable |= bool(others) and others[0][0] == record.SEAL  # see `signpost`
            continue
        verdict = torn_tail.examine(fd, offset, chain, zeros, durable=durable)
        if isinstance(verdict, torn_tail.Torn):
            return
        if isinstance(verdict, torn_tail.Damage):
            raise safe_files.damaged(way.log, path, verdict.offset, verdict.reason)
        yield _void(fd, verdict.offset - record.VOID_SIZE, chain, header.generation)
        offset, chain, data, position = verdict.offset, verdict.chain, b"", 0
        system.os.lseek(fd, offset, 0)


def _void(fd: int, start: int, chain: int, generation: int) -> Entry:
    void = record.decode_void(torn_tail.read_at(fd, start, record.VOID_SIZE), chain)
    assert void is not None, "it was there a moment before, and nothing is overwritten"
    skipped, _, writer, time_ns = void
    return Entry(start, "void", writer, time_ns / 1e9, b"", str(skipped).encode(), generation)


def _entry(path: str, offset: int, found: record.Record, generation: int, way: _Way) -> Entry:
    kind, key, value, writer, time_ns = found
    if kind == record.SESSION:
        try:
            value = str(Session.decode(value)).encode("utf-8", "surrogateescape")
        except MalformedRecord as error:
            raise safe_files.damaged(way.log, path, offset, str(error)) from None
    elif kind in (record.SEAL, record.FORWARD):
        value = way.note(path, offset, kind, value, generation)
    return Entry(offset, record.NAMES.get(kind, f"kind {kind}"), writer, time_ns / 1e9, key, value, generation)
