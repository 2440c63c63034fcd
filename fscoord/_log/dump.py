"""Read a log record by record, for people: without the lock, without following it, up to the damage if there is any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fscoord import _system as system
from fscoord._log import path as paths, record, tail
from fscoord._log.opening import read_header
from fscoord._log.record import Header
from fscoord.errors import CorruptLogError

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
        value: the value; of a ``void`` record the offset that it skips, of a ``session`` its description, as text.
    """

    offset: int
    kind: str
    writer: int
    time: float
    key: bytes
    value: bytes


def dump_log(path: str) -> Iterator[Entry]:
    """Yield the records of the log at `path`.

    Raises:
        StoreUnavailableError: it can't be opened or read.
        CorruptLogError: it is damaged; what comes before the damage was yielded.
    """
    try:
        fd = paths.open_descriptor(path, system.os.O_RDONLY)
    except OSError as error:
        raise paths.unavailable(error, path, "opening the log") from error
    try:
        paths.check(path, fd, 0, read_only=True)
        header, offset, chain = Header.decode(read_header(fd))
        yield from _records(path, fd, offset, chain, header.durable)
    except ValueError as error:
        raise CorruptLogError(f"{path} can't be read: {error}", path=path, offset=0, reason=str(error)) from None
    except OSError as error:
        raise paths.unavailable(error, path, "reading the log") from error
    finally:
        system.close_quietly(fd)


def _records(path: str, fd: int, offset: int, chain: int, durable: bool) -> Iterator[Entry]:
    system.os.lseek(fd, offset, 0)
    data = b""
    while True:
        more = system.os.read(fd, _CHUNK)
        data += more
        position, missing = 0, 1
        while len(data) - position >= record.FRAME_SIZE:
            length = record.frame_length(data[position : position + record.FRAME_SIZE], chain)
            end = position + record.FRAME_SIZE + length
            if length > 0 and end > len(data):
                break
            found, others, used, chain, missing = record.decode(data[position:end], chain)
            if not used:
                break
            yield _entry(offset, (found or others)[0])
            offset, position = offset + used, position + used
        data = data[position:]
        if missing < 0:
            verdict = tail.examine(fd, offset, chain, durable=durable)
            if isinstance(verdict, tail.Damage):
                raise CorruptLogError(
                    f"{path} is damaged at offset {verdict.offset}: {verdict.reason}",
                    path=path,
                    offset=verdict.offset,
                    reason=verdict.reason,
                )
            if isinstance(verdict, tail.Torn):
                return
            start = verdict.offset - record.VOID_SIZE
            yield Entry(start, "void", 0, 0.0, b"", str(offset).encode())
            offset, chain, data = verdict.offset, verdict.chain, b""
            system.os.lseek(fd, offset, 0)
        elif not more:
            return


def _entry(offset: int, found: record.Record) -> Entry:
    kind, key, value, writer, time_ns = found
    if kind == record.SESSION:
        value = str(record.Session.decode(value)).encode("utf-8", "surrogateescape")
    return Entry(offset, record.NAMES.get(kind, f"kind {kind}"), writer, time_ns / 1e9, key, value)
