"""Logs to be torn and damaged, and what is left to see of them: by fscoord, and by the plain reader."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from support.plain_reader import read_log

from fscoord._log.files.opening import LogOptions
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.format.record import Record
from fscoord._log.locking.log_lock import OFD
from fscoord._log.log import Log

SECTOR = 512
VOID_SIZE = 37
HEADER_SIZE = 114
LIMIT_S = 60
"""How long a test's handles wait for the lock: nobody holds it so long, so that this is a hang."""

DATA_KINDS = "SICAMDPO"


class Collector:
    """The state machine of a log that keeps every data record that it was given."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def apply(self, records: Sequence[Record]) -> None:
        self.records.extend(records)

    def reset(self) -> None:
        self.records.clear()


class Handle:
    """A handle on a log that remembers every record."""

    def __init__(self, path: str, *, durable: bool = False, read_only: bool = False) -> None:
        self._collector = Collector()
        wanted = LogOptions(OFD, durable, read_only, limit=LIMIT_S)
        self.log = Log(path, self._collector, wanted, lambda: Session("host", 1))

    def look(self) -> list[Record]:
        """Every data record that is complete by now."""
        self.log.refresh(LIMIT_S)
        return list(self._collector.records)

    def write(self, key: bytes, value: bytes, kind: int = record.SET) -> None:
        self.log.update(kind, key, value, None, LIMIT_S)

    def close(self) -> None:
        self.log.close()


@contextmanager
def opened(path: str, *, durable: bool = False, read_only: bool = False) -> Iterator[Handle]:
    handle = Handle(path, durable=durable, read_only=read_only)
    try:
        yield handle
    finally:
        handle.close()


def look_at(path: str) -> list[Record]:
    """The content of the log for a new handle, which writes nothing."""
    with opened(path, read_only=True) as handle:
        return handle.look()


def put(path: str, data: bytes) -> None:
    """Let the file be `data`, under the same inode."""
    with open(path, "r+b" if os.path.exists(path) else "w+b") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(data)
        file.truncate()


def grow(path: str, data: bytes, size: int) -> None:
    """Let a file that is the beginning of `data` grow to `size` bytes of it."""
    with open(path, "ab") as file:
        file.write(data[file.tell() : size])


class Step(NamedTuple):
    """A record of a log: where it begins and ends, and what a state machine gets of it, None if it is not data."""

    start: int
    end: int
    record: Record | None


def steps(data: bytes) -> list[Step]:
    """The records of the log `data`, as the plain reader finds them; the log must end with a complete one."""
    log = read_log(data)
    assert log.ends == "whole"
    found = []
    for start, kind, key, value, writer, time in log.records:
        end = start + int.from_bytes(data[start : start + 4], "little")
        found.append(Step(start, end, (ord(kind), key, value, writer, time) if kind in DATA_KINDS else None))
    return found


def is_open(path: str) -> bool:
    """Whether this process has the file at `path` open."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # it was closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == path:
                return True
    return False


def moments(data: bytes, start: int, *, all_of_them: bool) -> list[int]:
    """The sizes at which to cut a log: every byte, or every byte but most of those inside a run of one value."""
    if all_of_them:
        return list(range(start, len(data)))
    return [size for size in range(start, len(data)) if size % 61 == 0 or len(set(data[size - 3 : size + 3])) > 1]


def complete(found: Sequence[Step], size: int) -> list[Record]:
    """The data records of `found` that a file of `size` bytes holds."""
    return [step.record for step in found if step.record is not None and step.end <= size]


# -- logs --------------------------------------------------------------------------------------------------------------

Written = Callable[[Handle], None]


def write_every_kind(handle: Handle) -> None:
    """One record of each kind, with an empty value, one that ends in zeros, and one that is only zeros."""
    for kind, key, value in (
        (record.SET, b"key", b"value"),
        (record.SET, b"", b""),
        (record.ADD, b"number", b"41"),
        (record.COMPARE_SET, b"\xff\0", b"ends in zeros" + bytes(40)),
        (record.APPEND, b"key", b" and more"),
        (record.MULTI_SET, b"", record.encode_pairs([(b"a", b"1"), (b"b", bytes(3))])),
        (record.PUSH, b"queue", bytes(64)),
        (record.POP, b"queue", b""),
        (record.DELETE, b"a", b""),
        (record.BELL, b"", b""),
        (record.LEAVE, b"", b""),
        (record.SET, b"last", b"x"),
    ):
        handle.write(key, value, kind)


def make(path: str, write: Written, *, durable: bool = False) -> bytes:
    """Make a log at `path`, let `write` write to it, and return its bytes."""
    with opened(path, durable=durable) as handle:
        write(handle)
    with open(path, "rb") as file:
        return file.read()


def tear(path: str, kept: int, key: bytes, value: bytes) -> int:
    """Let a writer die after `kept` bytes of its record; return where that begins."""
    with opened(path) as handle:
        handle.write(b"before", b"the tear")
        start = os.path.getsize(path)
        handle.write(key, value)
    assert start + kept < os.path.getsize(path)
    os.truncate(path, start + kept)
    return start
