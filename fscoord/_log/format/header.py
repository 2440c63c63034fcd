"""`Header`: the first bytes of every file of a log. They identify the log that the file belongs to. Pure.

Users rename, copy, archive and restore logs, so the name of a file does not prove that the file belongs to a log. An
inode number alone does not prove it either, because file systems reuse inode numbers. The header therefore holds the
lineage (the id of the log's first file), and the inode numbers of the file and of generation 0. See
docs/contributors/format.md, "Identity".

The header also holds the number of the run that the file belongs to, and the ids of this run and of earlier runs. They
determine whether a handle joins the present run, begins a new run, or belongs to a superseded run.
"""

from __future__ import annotations

from enum import Enum
from struct import Struct
from typing import Final, Literal, NamedTuple
from zlib import crc32

from fscoord._log.format.record import KEY_MAX, VALUE_MAX, LogPosition, MalformedRecord

RunId = tuple[bytes, int]
"""``(job, restart count)``. If the user has given no count, the count is -1 (`OPAQUE`), and the runs have no order."""

OPAQUE: Final = -1
UNNAMED: Final[RunId] = (b"", OPAQUE)
"""A header records this id if the present run was started without a run id, and an earlier run of the log had one."""

JOB_MAX: Final = 255
KEPT: Final = 100
"""How many superseded run ids a header keeps. A handle with an id that is not kept begins a new run, and gets no error.
"""


def parse_run_id(run_id: object) -> RunId | None:
    """Convert a user's `run_id`: a str, a pair of a job's name and its restart count, or None.

    Raises:
        TypeError: `run_id` has another type.
        ValueError: the name is empty or longer than 255 bytes, or the count is negative or too large.
    """
    if run_id is None:
        return None
    job, count = run_id if isinstance(run_id, tuple) and len(run_id) == 2 else (run_id, OPAQUE)
    if not isinstance(job, str) or not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"run_id is a str, or a pair of a str and an int, not {run_id!r}")
    name = job.encode("utf-8", "surrogateescape")
    if not 0 < len(name) <= JOB_MAX:
        raise ValueError(f"run_id must have 1 to {JOB_MAX} bytes, not {len(name)}")
    if isinstance(run_id, tuple) and not 0 <= count < 1 << 63:
        raise ValueError(f"a restart count is from 0 to 2**63 - 1, not {count}")
    return name, count


def classify_run(run_ids: tuple[RunId, ...], wanted: RunId) -> Literal["join", "stale", "new"]:
    """Return whether a handle with the run id `wanted` joins the present run, is stale, or begins a new run.

    `run_ids` come from the header: the id of the present run, then the ids of runs that were superseded.
    """
    if run_ids[:1] == (wanted,):
        return "join"
    job, count = wanted
    for known, number in run_ids:
        if known == job and (number == count or (number > count >= 0)):
            return "stale"
    return "new"


def supersede(run_ids: tuple[RunId, ...], run_id: RunId | None) -> tuple[RunId, ...]:
    """Return the run ids for the header of a new run, which has `run_id` (None: no id) and supersedes `run_ids`."""
    new = run_id or UNNAMED
    older = [known for known in run_ids if known != UNNAMED and (known[0], known[1] < 0) != (new[0], new[1] < 0)]
    return (new, *older[:KEPT]) if run_id or older else ()


MAGIC: Final = b"fscoord\n"
VERSION: Final = 3
HEADER_MAX: Final = 64 * 1024

# magic, version, flags, size, lock kind, reserved, generation, run, id, lineage, inode numbers of generation 0 and of
# the file, time, limits, reserved, number of run ids
_HEADER = Struct("<8sHHIB3sII16s16sQQQII16sH")
_RUN_ID = Struct("<Hq")
_U32 = Struct("<I")
_DURABLE: Final = 1
_START: Final = MAGIC + VERSION.to_bytes(2, "little")
HEADER_SIZE: Final = _HEADER.size
"""The size of a header in bytes, without run ids and checksum."""


class Header(NamedTuple):
    """The header of one file of a log.

    Attributes:
        log_id: the id of this generation. The id of generation 0 is also the id of the log.
        lock_kind: a value of `log_lock.KINDS`.
        durable: whether every record is synced.
        generation: the number of this file.
        lineage: the id of the generation with which the log's lineage began.
        root_inode: the inode number of generation 0 when this file was created; 0 on a file system that does not keep
            inode numbers.
        inode: the inode number of this file; 0 on a file system that does not keep inode numbers.
        created_ns: when the file was created (wall time in nanoseconds).
        key_max, value_max: the longest key and value, in bytes.
        run_ids: the id of the run, or `UNNAMED`, and then the ids of superseded runs. Empty if no run had an id.
        run: how many runs of the log came before this one.
    """

    log_id: bytes
    lock_kind: int
    durable: bool = False
    generation: int = 0
    lineage: bytes = bytes(16)
    root_inode: int = 0
    inode: int = 0
    created_ns: int = 0
    key_max: int = KEY_MAX
    value_max: int = VALUE_MAX
    run_ids: tuple[RunId, ...] = ()
    run: int = 0

    def encode(self) -> bytes:
        """Return the header as bytes, with its checksum."""
        run_ids = b"".join(_RUN_ID.pack(len(job), count) + job for job, count in self.run_ids)
        size = HEADER_SIZE + len(run_ids) + 4
        agreed = (self.lock_kind, bytes(3), self.generation, self.run, self.log_id, self.lineage)
        made = (self.root_inode, self.inode, self.created_ns)
        limits = (self.key_max, self.value_max, bytes(16), len(self.run_ids))
        fixed = _HEADER.pack(MAGIC, VERSION, _DURABLE if self.durable else 0, size, *agreed, *made, *limits)
        return fixed + run_ids + _U32.pack(crc32(fixed + run_ids))

    @staticmethod
    def is_partial(data: bytes) -> bool:
        """Return whether a file is empty or holds only a part of a header. `data` are all bytes of the file."""
        if len(data) >= HEADER_SIZE + 4:
            return False
        return not data or (data.startswith(MAGIC) and _START.startswith(data[: len(_START)]))

    @staticmethod
    def missing(data: bytes) -> int:
        """Return how many bytes of the header to read after `data`, the first bytes of a file.

        The number is 0 or less if `data` contains the whole header.
        """
        if len(data) < HEADER_SIZE:
            return HEADER_SIZE + 4 - len(data)
        size = int(_HEADER.unpack_from(data)[3])
        return min(size, HEADER_MAX) - len(data)

    @classmethod
    def decode(cls, data: bytes) -> tuple[Header, LogPosition]:
        """Return the header at the beginning of `data`, and the position after the header.

        The chain at that position is the checksum of the header.

        Raises:
            MalformedRecord: `data` does not begin with a sound header; the text says why.
        """
        _check_version(data)
        if len(data) < HEADER_SIZE:
            raise MalformedRecord("the header is incomplete")
        _, _, flags, size, lock_kind, unused, generation, run, *fields = _HEADER.unpack_from(data)
        if not HEADER_SIZE + 4 <= size <= min(HEADER_MAX, len(data)):
            raise MalformedRecord("the header is incomplete or its size is damaged")
        checksum = crc32(data[: size - 4])
        if checksum != _U32.unpack_from(data, size - 4)[0]:
            raise MalformedRecord("the header's checksum does not match")
        log_id, lineage, root_inode, inode, created_ns, *limits, unused_too, count = fields
        if flags & ~_DURABLE or limits != [KEY_MAX, VALUE_MAX] or any(unused + unused_too):
            raise MalformedRecord(
                f"its flags {flags:#x}, limits {tuple(limits)} or new fields need a newer fscoord: upgrade it"
            )
        run_ids = _decode_run_ids(data[HEADER_SIZE : size - 4], count)
        durable = bool(flags & _DURABLE)
        header = cls(
            log_id, lock_kind, durable, generation, lineage, root_inode, inode, created_ns, run_ids=run_ids, run=run
        )
        return header, LogPosition(size, checksum)


class ForeignFile(MalformedRecord):
    """Raised if a file does not begin like a log: another program wrote it, or its first bytes were overwritten."""


def _check_version(data: bytes) -> None:
    if not data.startswith(MAGIC):
        raise ForeignFile(f"not a log of fscoord: it begins with {data[:8]!r}, not with {MAGIC!r}")
    if len(data) < 10:
        raise MalformedRecord("the header is incomplete")
    version = data[8] | data[9] << 8
    if version < VERSION:
        raise MalformedRecord(f"it has format version {version} and was written by a pre-release: remove it")
    if version > VERSION:
        raise MalformedRecord(f"it has format version {version}, and this fscoord reads version {VERSION}: upgrade it")


def _decode_run_ids(data: bytes, count: int) -> tuple[RunId, ...]:
    run_ids: list[RunId] = []
    position = 0
    while len(run_ids) < count and position + _RUN_ID.size <= len(data):
        size, number = _RUN_ID.unpack_from(data, position)
        position += _RUN_ID.size + size
        run_ids.append((data[position - size : position], number))
    if len(run_ids) < count or position > len(data):
        raise MalformedRecord("the header's list of run ids is cut short")
    return tuple(run_ids)


class Provenance(Enum):
    """The result of `provenance_of`: whether the newest file of a log and its generation 0 are originals or copies."""

    OWN = "both are where they were made, or were moved together"
    COPY = "they were copied, or restored"
    OTHER_ROOT = "this file was made for another generation 0: a copy, if that other one still exists"


def provenance_of(header: Header, root_inode: int, inode: int) -> Provenance:
    """Compare the inode numbers in `header` with the present ones: `inode` of the file, `root_inode` of generation 0.

    The number 0 means that the file system does not keep inode numbers. This number is not compared.
    """
    if 0 not in (header.root_inode, root_inode) and header.root_inode != root_inode:
        return Provenance.OTHER_ROOT if header.generation else Provenance.COPY
    return Provenance.OWN if 0 in (header.inode, inode) or header.inode == inode else Provenance.COPY


class LogIdentity(NamedTuple):
    """The ``lineage`` and ``root_inode`` of a log. The headers of all its files contain the same two values."""

    lineage: bytes
    root_inode: int

    def owns(self, header: Header, inode: int) -> bool:
        """Return whether the file with `header` and inode number `inode` provably belongs to the log.

        Only such a file may be removed. The result is False if the file system does not keep inode numbers.
        """
        claimed = (header.lineage, header.root_inode, header.inode)
        return claimed == (self.lineage, self.root_inode, inode) and 0 not in (self.root_inode, inode)
