"""Bytes to records and back: framing, checksums and limits of the format that docs/format.md specifies. Pure.

A record's checksums are seeded with the body checksum of the record before it (for the first one, with the header's),
so that a record out of place is as bad as a damaged one. A record's last byte is its kind, which is never zero and
never one bit away from zero: zeros appended to a torn record can't complete it.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from fscoord._log.session import Session
from fscoord.errors import LimitExceededError

__all__ = ["Header", "Record", "Session", "decode", "encode"]

MAGIC: Final = b"fscoord\n"
VERSION: Final = 1
HEADER_MAX: Final = 64 * 1024
KEY_MAX: Final = 1024
VALUE_MAX: Final = 64 * 1024 * 1024
WRITER_MAX: Final = (1 << 32) - 1

# Capital letters change what the log means: a reader that does not know one must stop. Small ones may be ignored.
SET: Final = ord("S")
DELETE: Final = ord("D")
APPEND: Final = ord("A")
MULTI_SET: Final = ord("M")
ADD: Final = ord("I")
COMPARE_SET: Final = ord("C")
PUSH: Final = ord("P")
POP: Final = ord("O")
VOID: Final = ord("V")
SEAL: Final = ord("Z")  # the end of a generation, names the next
FORWARD: Final = ord("f")  # a hint to the newest generation
FINISHED: Final = ord("E")  # the end of a life
DEATH: Final = ord("X")  # a session was found dead
SESSION: Final = ord("s")
BELL: Final = ord("b")
LEAVE: Final = ord("l")

NAMES: Final = {
    SET: "set",
    DELETE: "delete",
    APPEND: "append",
    MULTI_SET: "multi_set",
    ADD: "add",
    COMPARE_SET: "compare_set",
    PUSH: "queue_push",
    POP: "queue_pop",
    VOID: "void",
    SEAL: "seal",
    FORWARD: "forward",
    FINISHED: "finished",
    DEATH: "death",
    SESSION: "session",
    BELL: "bell",
    LEAVE: "leave",
}
DATA_KINDS: Final = frozenset({SET, DELETE, APPEND, MULTI_SET, ADD, COMPARE_SET, PUSH, POP})
_NEVER_MET: Final = frozenset({0, VOID})
"""Zero ends a torn record that zeros were appended to; a VOID is met only where `tail` looks for it."""

_FRAME = Struct("<II")  # length of the body, checksum of the body
_CHECKED_FRAME = Struct("<III")  # and checksum of these two
_BODY = Struct("<IQH")  # writer, wall time in ns, length of the key
_U32 = Struct("<I")
_U64 = Struct("<Q")
_PAIR = Struct("<HI")
FRAME_SIZE: Final = _CHECKED_FRAME.size
_BODY_SIZE = _BODY.size
BODY_MIN: Final = _BODY_SIZE + 1
BODY_MAX: Final = BODY_MIN + KEY_MAX + 2 * VALUE_MAX
_KIND = [bytes([number]) for number in range(256)]

SECTOR: Final = 512
VOID_SIZE: Final = FRAME_SIZE + BODY_MIN + 8

Record = tuple[int, bytes, bytes, int, int]
"""Kind, key, value, writer, wall time in ns since the epoch."""

_frame, _body, _u32 = _FRAME.pack, _BODY.pack, _U32.pack
unpack_frame, _unpack_body = _CHECKED_FRAME.unpack_from, _BODY.unpack_from


def encode(kind: int, key: bytes, value: bytes, writer: int, time_ns: int, chain: int) -> tuple[bytes, int]:
    """Return a record as bytes, and the checksum that the next one is chained over.

    `chain` is the checksum returned for the record before it, or `Header.chain`.
    """
    body = _body(writer, time_ns, len(key)) + key + value + _KIND[kind]
    checksum = crc32(body, chain)
    frame = _frame(len(body), checksum)
    return frame + _u32(crc32(frame, chain)) + body, checksum


def decode(data: bytes, chain: int) -> tuple[list[Record], list[Record], int, int, int]:
    """Return ``(data records, other records, used, chain, missing)`` for what begins `data`.

    ``used`` counts the bytes of the records returned and ``chain`` is the checksum of the last. ``missing`` is 0 if
    nothing follows them, above 0 if that many bytes more than `data` has are needed to go on, and -1 if what follows
    is no record.
    """
    records: list[Record] = []
    others: list[Record] = []
    position, size = 0, len(data)
    while True:
        start = position + 12
        if start > size:
            return records, others, position, chain, (start - size if position < size else 0)
        length, checksum, frame_checksum = unpack_frame(data, position)
        if crc32(data[position : position + 8], chain) != frame_checksum or not BODY_MIN <= length <= BODY_MAX:
            return records, others, position, chain, -1
        end = start + length
        if end > size:
            return records, others, position, chain, end - size
        body = data[start:end]
        if crc32(body, chain) != checksum:
            return records, others, position, chain, -1
        writer, time_ns, key_size = _unpack_body(body)
        split = 14 + key_size
        kind = body[-1]
        if split >= length:
            return records, others, position, chain, -1
        record = (kind, body[14:split], body[split:-1], writer, time_ns)
        if kind in DATA_KINDS:
            records.append(record)
        elif kind in _NEVER_MET:
            return records, others, position, chain, -1
        else:
            others.append(record)
        position, chain = end, checksum


def frame_length(frame: bytes, chain: int) -> int:
    """Return the length of the body that `frame`, padded with zeros, promises, or -1 if it is not a sound frame."""
    padded = frame[:FRAME_SIZE].ljust(FRAME_SIZE, b"\0")
    length, _, checksum = unpack_frame(padded)
    if crc32(padded[:8], chain) != checksum or not BODY_MIN <= length <= BODY_MAX:
        return -1
    return int(length)


def encode_void(skipped: int, writer: int, time_ns: int, chain: int) -> tuple[bytes, int]:
    """Return the VOID record that skips the torn record at `skipped`, and its checksum."""
    return encode(VOID, b"", _U64.pack(skipped), writer, time_ns, chain)


def decode_void(data: bytes, chain: int) -> tuple[int, int, int, int] | None:
    """Return ``(skipped, chain, writer, time in ns)`` of the VOID that begins `data`, or None if there is none."""
    if len(data) < VOID_SIZE:
        return None
    length, checksum, frame_checksum = unpack_frame(data)
    body = data[FRAME_SIZE:VOID_SIZE]
    if length != len(body) or crc32(data[:8], chain) != frame_checksum or crc32(body, chain) != checksum:
        return None
    writer, time_ns, key_size = _unpack_body(body)
    return None if key_size or body[-1] != VOID else (_U64.unpack_from(body, _BODY_SIZE)[0], checksum, writer, time_ns)


def is_torn_void(data: bytes) -> bool:
    """Return whether `data`, as long as a VOID at most, may be the beginning of one, with zeros for the rest."""
    return data[:4].ljust(4, b"\0") == _u32(VOID_SIZE - FRAME_SIZE) and not any(data[VOID_SIZE - 1 :])


def unchecked(body: bytes) -> tuple[int, bytes, int, int, int]:
    """Return kind, key, size of the value, writer and time as `body`, whose checksum is wrong, has them."""
    writer, time_ns, key_size = _unpack_body(body)
    key = body[_BODY_SIZE:-1][:key_size]
    return body[-1], key, len(body) - BODY_MIN - len(key), writer, time_ns


def encode_pairs(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Return the value of a MULTI_SET record."""
    parts: list[bytes] = []
    for key, value in pairs:
        parts += (_PAIR.pack(len(key), len(value)), key, value)
    data = b"".join(parts)
    if len(data) > BODY_MAX - BODY_MIN:
        raise LimitExceededError(f"{len(pairs)} keys and values are too many for one record; nothing was written")
    return data


def decode_pairs(data: bytes) -> list[tuple[bytes, bytes]]:
    """Return the keys and values of a MULTI_SET record's value.

    Raises:
        ValueError: `data` is no such value.
    """
    pairs, position = [], 0
    while position + _PAIR.size <= len(data):
        key_size, value_size = _PAIR.unpack_from(data, position)
        middle = position + _PAIR.size + key_size
        pairs.append((data[position + _PAIR.size : middle], data[middle : middle + value_size]))
        position = middle + value_size
    if position != len(data):
        raise ValueError("a list of keys and values is cut short")
    return pairs


_HEADER = Struct("<8sHHIBBHII16s16sQIIH")  # magic, version, flags, size, lock kind, 2 reserved, ...
_RUN = Struct("<Hq")
_DURABLE: Final = 1
HEADER_SIZE: Final = _HEADER.size
"""The size of a header without runs and checksum."""


class Header(NamedTuple):
    """What all who open a log must agree on: the first bytes of the file.

    ``runs`` holds ``(job, count)`` pairs: the run that the log belongs to first, then those it superseded; a count of
    -1 marks an opaque id. It is empty for a log without runs. ``life`` counts how often the log has begun anew.
    """

    log_id: bytes
    lock_kind: int
    durable: bool = False
    generation: int = 0
    alive_id: bytes = bytes(16)
    created_ns: int = 0
    key_max: int = KEY_MAX
    value_max: int = VALUE_MAX
    runs: tuple[tuple[bytes, int], ...] = ()
    life: int = 0

    def encode(self) -> bytes:
        """Return the header as bytes, checksum included."""
        runs = b"".join(_RUN.pack(len(job), count) + job for job, count in self.runs)
        size = HEADER_SIZE + len(runs) + 4
        flags = _DURABLE if self.durable else 0
        agreed = (self.lock_kind, 0, 0, self.generation, self.life, self.log_id, self.alive_id, self.created_ns)
        limits = (self.key_max, self.value_max, len(self.runs))
        fixed = _HEADER.pack(MAGIC, VERSION, flags, size, *agreed, *limits)
        return fixed + runs + _u32(crc32(fixed + runs))

    @staticmethod
    def is_partial(data: bytes) -> bool:
        """Return whether `data`, a whole file, is nothing, or a part of a header and too short to hold a record."""
        return not data or (data.startswith(MAGIC) and len(data) < HEADER_SIZE + 4)

    @staticmethod
    def missing(data: bytes) -> int:
        """Return how many bytes `data`, which begins a file, needs more to hold all of its header."""
        if len(data) < HEADER_SIZE:
            return HEADER_SIZE + 4 - len(data)
        size = int(_HEADER.unpack_from(data)[3])
        return min(size, HEADER_MAX) - len(data)

    @classmethod
    def decode(cls, data: bytes) -> tuple[Header, int, int]:
        """Return the header that begins `data`, its size, and its checksum, which the first record is chained over.

        Raises:
            ValueError: `data` begins with no sound header; the text says why.
        """
        if not data.startswith(MAGIC):
            raise ValueError(f"it begins with {data[:8]!r}, not with {MAGIC!r}: this is no fscoord log")
        if len(data) < 10:
            raise ValueError("the header is incomplete")
        version = data[8] | data[9] << 8
        if version != VERSION:
            raise ValueError(f"it has format version {version}, and this fscoord reads version {VERSION}: upgrade it")
        if len(data) < HEADER_SIZE:
            raise ValueError("the header is incomplete")
        fields = _HEADER.unpack_from(data)
        size = fields[3]
        if not HEADER_SIZE + 4 <= size <= min(HEADER_MAX, len(data)):
            raise ValueError("the header is incomplete or its size is damaged")
        checksum = crc32(data[: size - 4])
        if checksum != _U32.unpack_from(data, size - 4)[0]:
            raise ValueError("the header's checksum does not match")
        if fields[2] & ~_DURABLE or fields[12:14] != (KEY_MAX, VALUE_MAX):
            raise ValueError(f"its flags {fields[2]:#x} or limits {fields[12:14]} need a newer fscoord: upgrade it")
        header = cls(
            log_id=fields[9],
            lock_kind=fields[4],
            durable=bool(fields[2] & _DURABLE),
            generation=fields[7],
            life=fields[8],
            alive_id=fields[10],
            created_ns=fields[11],
            key_max=fields[12],
            value_max=fields[13],
            runs=cls._decode_runs(data[HEADER_SIZE : size - 4], fields[14]),
        )
        return header, size, checksum

    @classmethod
    def _decode_runs(cls, data: bytes, count: int) -> tuple[tuple[bytes, int], ...]:
        runs: list[tuple[bytes, int]] = []
        position = 0
        while len(runs) < count and position + _RUN.size <= len(data):
            size, number = _RUN.unpack_from(data, position)
            position += _RUN.size + size
            runs.append((data[position - size : position], number))
        if len(runs) < count or position > len(data):
            raise ValueError("the header's list of runs is cut short")
        return tuple(runs)
