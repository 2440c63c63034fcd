"""Encode and decode records: framing, checksums and limits of the format in docs/contributors/format.md. Pure.

The *chain* is one CRC-32 over the bytes of a file in their order, from the end of the header on. Each record ends with
the chain of all bytes before that checksum. One call of `crc32` therefore verifies any number of consecutive records:
only the last checksum is compared, because it depends on every byte before it.

The CRC-32 of ``data + crc32(data)`` is a constant, so a checksum directly after the data that it covers would reset the
chain. One byte between the data and the checksum prevents this reset. (LevelDB masks its checksums for the same reason,
see its doc/log_format.md.)

To distinguish a torn record from a damaged record, a reader must know the length of the record before it verifies the
checksum. So the length has a check of its own, which depends on the chain. The last byte of a record differs from zero
in at least two bits. So zeros after a torn record can't complete it, even if one bit is flipped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple, cast
from zlib import crc32

from fscoord.errors import LimitExceededError

KEY_MAX: Final = 1024
VALUE_MAX: Final = 64 * 1024 * 1024
WRITER_MAX: Final = (1 << 32) - 1

# A record whose kind is a capital letter changes the state of the log: a reader that does not know the kind must stop.
# A reader may ignore a record whose kind is a small letter that it does not know.
SET: Final = ord("S")
DELETE: Final = ord("D")
APPEND: Final = ord("A")
MULTI_SET: Final = ord("M")
TRANSACTION: Final = ord("T")
ADD: Final = ord("I")
COMPARE_SET: Final = ord("C")
PUSH: Final = ord("P")
POP: Final = ord("O")
VOID: Final = ord("V")
SEAL: Final = ord("Z")  # ends a generation and names the next
FORWARD: Final = ord("f")  # names the newest generation, as a hint
FINISHED: Final = ord("E")  # ends a run, because all participants have left it
FAILURE: Final = ord("F")  # a participant has failed, in this run or in the run before
DEATH: Final = ord("X")  # a session is dead
SESSION: Final = ord("s")
BELL: Final = ord("b")
LEAVE: Final = ord("l")  # a participant has left in good order
LAST_TIME: Final = ord("t")  # in a snapshot: the time of the last data record of its writer

NAMES: Final = {
    SET: "set",
    DELETE: "delete",
    APPEND: "append",
    MULTI_SET: "multi_set",
    TRANSACTION: "transaction",
    ADD: "add",
    COMPARE_SET: "compare_set",
    PUSH: "queue_push",
    POP: "queue_pop",
    VOID: "void",
    SEAL: "seal",
    FORWARD: "forward",
    FINISHED: "finished",
    FAILURE: "failure",
    DEATH: "death",
    SESSION: "session",
    BELL: "bell",
    LEAVE: "leave",
    LAST_TIME: "last_time",
}
DATA_KINDS: Final = frozenset({SET, DELETE, APPEND, MULTI_SET, TRANSACTION, ADD, COMPARE_SET, PUSH, POP})
OF_SEVERAL_KEYS: Final = frozenset({MULTI_SET, TRANSACTION})
"""The kinds of records without a key. `decode_changes` decodes their values."""
_NEVER_MET: Final = frozenset({0, VOID})
"""`decode` stops at records of these kinds. `torn_tail.examine` decodes the VOID records."""

LIKELY: Final = re.compile(rb"(?!\0{4})(?=...[\0-\x08].{4}...\0.{9}[\0-\x04][A-Za-z])", re.DOTALL)
"""Matches each offset at which a record may begin: length below 2^28, writer below 2^24, key size below 1,280, a letter
as kind."""

_PREFIX = Struct("<II")  # length of the record, check
_HEAD = Struct("<IIIQHB")  # as _PREFIX; then writer, wall time in ns, length of the key, kind
_TAIL = Struct("<BIB")  # a newline, the chain before it, a newline
_U64 = Struct("<Q")
_PAIR = Struct("<HI")
_REMOVED: Final = 0xFFFFFFFF  # the length of the value in a change that removes its key
PREFIX_SIZE: Final = _PREFIX.size
HEAD_SIZE: Final = _HEAD.size
TAIL_SIZE: Final = _TAIL.size
RECORD_MIN: Final = HEAD_SIZE + TAIL_SIZE
RECORD_MAX: Final = RECORD_MIN + KEY_MAX + 2 * VALUE_MAX
KIND_AT: Final = HEAD_SIZE - 1
NEWLINE: Final = 10

SECTOR: Final = 512
VOID_SIZE: Final = RECORD_MIN + 8

Record = tuple[int, bytes, bytes, int, int]
"""``(kind, key, value, writer, time)``. The writer is a session number, the time is in nanoseconds since the epoch."""


class MalformedRecord(Exception):
    """Raised if the format does not allow a header or record although its checksum is right. The text is the reason.

    This class is not a `ValueError`, because a signal handler may raise a ValueError while a record is decoded.
    """


class LogPosition(NamedTuple):
    """The end of a header or of a sound record: the ``offset`` in the file, and the ``chain`` at this offset."""

    offset: int
    chain: int


_MULTIPLIER: Final = 2654435761  # Knuth, The Art of Computer Programming 6.4: one bit of a length changes many bits
_MASK: Final = 0xFFFFFFFF

_pack_head, _pack_tail = _HEAD.pack, _TAIL.pack
unpack_prefix, unpack_head, _unpack_tail = _PREFIX.unpack_from, _HEAD.unpack_from, _TAIL.unpack_from
_unpack_pair, _PAIR_SIZE = _PAIR.unpack_from, _PAIR.size


def encode(kind: int, key: bytes, value: bytes, writer: int, time_ns: int, chain: int) -> tuple[bytes, int]:
    """Return a record as bytes, and the chain after it.

    `chain` is the chain before the record: the chain that `encode` returned for the previous record, or the
    header's checksum.
    """
    size = len(key)
    length = RECORD_MIN + size + len(value)
    front = _pack_head(length, (length * _MULTIPLIER + chain) & _MASK, writer, time_ns, size, kind) + key + value
    checksum = crc32(front, chain)
    end = _pack_tail(10, checksum, 10)
    return front + end, crc32(end, checksum)


def decode(data: bytes, chain: int) -> tuple[list[Record], list[Record], int, int, int]:
    """Return ``(data records, other records, used, chain, missing)`` for the records at the beginning of `data`.

    ``used`` is the size of the returned records in bytes, and ``chain`` the chain after the last. ``missing`` is 0 if
    `data` ends with the last record, positive if the next record needs that many bytes more, and -1 if the bytes after
    the last record are not a record.
    """
    records: list[Record] = []
    others: list[Record] = []
    position, size, missing = 0, len(data), 0
    while position < size:  # split by lengths that are not verified yet
        start = position + 23
        if start > size:
            missing = start - size
            break
        length, _, writer, time_ns, key_size, kind = unpack_head(data, position)
        end = position + length
        split, stop = start + key_size, end - 6
        if end > size:
            missing = end - size
            break
        if split > stop or key_size > 1024:
            missing = -1
            break
        if kind in DATA_KINDS:
            records.append((kind, data[start:split], data[split:stop], writer, time_ns))
        elif kind in _NEVER_MET:
            missing = -1
            break
        else:
            others.append((kind, data[start:split], data[split:stop], writer, time_ns))
        position = end
    if position:  # one comparison verifies all records, because the last checksum depends on every byte
        stop = position - 6
        checksum = crc32(data[:stop], chain)
        last = data[stop:position]
        if last != _pack_tail(10, checksum, 10):
            return _decode_each(data, chain)
        chain = crc32(last, checksum)
    if missing > 0 and size - position >= 8:  # an unverified length counts only if its check is right
        length = record_length(data, chain, position)
        is_bad = length < 0 or _has_no_writer(data, position)
        missing = -1 if is_bad else position + length - size
    return records, others, position, chain, missing


def _decode_each(data: bytes, chain: int) -> tuple[list[Record], list[Record], int, int, int]:
    """Return what `decode` returns, for data with a bad record. Verify each record separately, up to the bad record."""
    records: list[Record] = []
    others: list[Record] = []
    position = 0
    while True:
        left = len(data) - position
        if left < PREFIX_SIZE:
            return records, others, position, chain, HEAD_SIZE - left if left else 0
        length = record_length(data, chain, position)
        if length > left:
            return records, others, position, chain, length - left
        found = _decode_one(data[position : position + length], chain) if length > 0 else None
        if found is None:
            return records, others, position, chain, -1
        records += found[0]
        others += found[1]
        position, chain = position + length, found[3]


def _decode_one(data: bytes, chain: int) -> tuple[list[Record], list[Record], int, int, int] | None:
    """Return what `decode` returns for `data`, which has the length of one record; None if `data` is not a record."""
    stop = len(data) - TAIL_SIZE
    if data[stop:] != _pack_tail(10, crc32(data[:stop], chain), 10):
        return None
    found = decode(data, chain)
    return found if found[2] == len(data) else None


def _has_no_writer(data: bytes, position: int) -> bool:
    """Return whether the writer of the record at `position` in `data` is 0. Such a record is torn.

    The prefix of a torn record may look sound because of a flipped bit. Without this check, a reader would then wait
    for the rest of the record, which no process will write.
    """
    return data[position + PREFIX_SIZE : position + PREFIX_SIZE + 4] == b"\0\0\0\0"


def end_of_first(data: bytes, kind: int) -> int:
    """Return the end of the first record of `kind` in `data`. All records up to that end are sound."""
    position = 0
    while True:
        found = data[position + KIND_AT]
        position += int(unpack_prefix(data, position)[0])
        if found == kind:
            return position


def record_length(data: bytes, chain: int, position: int = 0) -> int:
    """Return the length of the record at `position` in `data`, or -1 if the check of the length is wrong.

    Bytes after the end of `data` count as zeros.
    """
    prefix = data[position : position + PREFIX_SIZE].ljust(PREFIX_SIZE, b"\0")
    length, check = unpack_prefix(prefix)
    if (length * _MULTIPLIER + chain) & _MASK != check or not RECORD_MIN <= length <= RECORD_MAX:
        return -1
    return int(length)


def chain_if_sound(data: bytes, start: int) -> int | None:
    """Return the checksum chain before the record at `start` in `data`; None if no sound record begins there.

    The prefix of a record contains the length of the record, and a check of the length and the chain. So the function
    computes the chain from the length and the check, and needs no earlier record.
    """
    if len(data) - start < RECORD_MIN:
        return None
    length, check = unpack_prefix(data, start)
    end = start + length
    if not RECORD_MIN <= length <= RECORD_MAX or end > len(data) or not chr(data[start + KIND_AT]).isalpha():
        return None
    chain, stop = int((check - length * _MULTIPLIER) & _MASK), end - TAIL_SIZE
    return chain if data[stop:end] == _pack_tail(10, crc32(data[start:stop], chain), 10) else None


def chain_at_end(data: bytes) -> int:
    """Return the chain after the sound record at the end of `data`."""
    found = data[-TAIL_SIZE:]
    return crc32(found, _unpack_tail(found)[1])


def encode_void(skipped: int, writer: int, time_ns: int, chain: int) -> tuple[bytes, int]:
    """Encode a VOID record, which skips the torn record at offset `skipped`. Return the record and its chain value."""
    return encode(VOID, b"", _U64.pack(skipped), writer, time_ns, chain)


def decode_void(data: bytes, chain: int) -> tuple[int, int, int, int] | None:
    """Return ``(skipped, chain, writer, time in ns)`` of the VOID at the beginning of `data`; None if there is none."""
    if len(data) < VOID_SIZE or record_length(data, chain) != VOID_SIZE:
        return None
    stop = VOID_SIZE - TAIL_SIZE
    checksum, last = crc32(data[:stop], chain), data[stop:VOID_SIZE]
    _, _, writer, time_ns, key_size, kind = unpack_head(data)
    if last != _pack_tail(10, checksum, 10) or key_size or kind != VOID:
        return None
    return _U64.unpack_from(data, HEAD_SIZE)[0], crc32(last, checksum), writer, time_ns


def is_torn_void(data: bytes) -> bool:
    """Return whether `data`, which is not longer than a VOID, may be a VOID whose last bytes were never written."""
    return data[:4].ljust(4, b"\0") == VOID_SIZE.to_bytes(4, "little") and not any(data[VOID_SIZE - 1 :])


def decode_unverified(data: bytes) -> tuple[int, bytes, int, int, int]:
    """Return ``(kind, key, size of the value, writer, time)`` of `data`, a record whose checksum is wrong."""
    _, _, writer, time_ns, key_size, kind = unpack_head(data)
    key = data[HEAD_SIZE:-TAIL_SIZE][:key_size]
    return kind, key, len(data) - RECORD_MIN - len(key), writer, time_ns


def encode_pairs(pairs: Sequence[tuple[bytes, bytes | None]]) -> bytes:
    """Return the value of a MULTI_SET record that sets `pairs`.

    A TRANSACTION may also have pairs with None as the value. Such a pair removes its key.
    """
    parts: list[bytes] = []
    for key, value in pairs:
        if value is None:
            parts += (_PAIR.pack(len(key), _REMOVED), key)
        else:
            parts += (_PAIR.pack(len(key), len(value)), key, value)
    data = b"".join(parts)
    if len(data) > RECORD_MAX - RECORD_MIN:
        raise LimitExceededError(
            f"{len(pairs)} keys and values are too many for one record; nothing was written: use several calls"
        )
    return data


def decode_pairs(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each (key, value) in `data`, the value of a MULTI_SET record.

    This is a generator, because a list of short pairs would take up to 12 times the memory of `data`.

    Raises:
        MalformedRecord: `data` is not the value of a MULTI_SET record, or a key or value in it exceeds its limit.
    """
    return cast("Iterator[tuple[bytes, bytes]]", _decode(data, -1))


def decode_changes(data: bytes) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield each (key, value) in `data`, the value of a MULTI_SET or TRANSACTION record. None: the key is removed.

    Raises:
        MalformedRecord: `data` is not such a value, or a key or value in it exceeds its limit.
    """
    return _decode(data, _REMOVED)


def _decode(data: bytes, removed: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield each (key, value) in `data`. `removed` is the length of a value that stands for no value."""
    position, size = 0, len(data)
    while (start := position + _PAIR_SIZE) <= size:
        key_size, value_size = _unpack_pair(data, position)
        end = middle = start + key_size
        if value_size != removed:
            end += value_size
        if key_size > KEY_MAX or end - middle > VALUE_MAX:
            raise MalformedRecord(f"it sets a key of {middle - start} bytes to {value_size} bytes, which is too long")
        if end > size:
            break
        yield data[start:middle], None if value_size == removed else data[middle:end]
        position = end
    if position != size:
        raise MalformedRecord("a list of keys and values is cut short")


def changed_keys(kind: int, key: bytes, value: object) -> Sequence[bytes]:
    """Return the keys that a data record changes."""
    if kind in OF_SEVERAL_KEYS and isinstance(value, bytes):
        return [name for name, _ in decode_changes(value)]
    return (key,)
