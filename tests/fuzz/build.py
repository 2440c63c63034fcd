"""Logs out of any bytes: most are nearly right, so that what reads them gets past the checksums, and some are not.

The bytes are decisions. They come from a generator with a seed, from Hypothesis, or from a fuzzer that learns which of
them lead to code that none before have reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from support.internals import GenerationRef, Header, Session, encode_death, generation_name, record

T = TypeVar("T")

NAME = "log"
LOCKS = (1, 1, 1, 1, 1, 1, 2, 7)
KINDS = b"SICAMDPOSICAMDPOsblXZfEqQV\0"
INTERESTING = (
    *(0, 1, 2, 7, 8, 9, 22, 23, 28, 29, 30, 37, 255, 511, 512, 1024, 1025, 65535),
    *(1 << 26, 1 << 31, (1 << 32) - 1),
)


class Source:
    """Decisions read from bytes, one after the other; when these are used up, always the first choice."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def bytes(self, count: int) -> bytes:
        found = self._data[self._position : self._position + count]
        self._position += count
        return found.ljust(count, b"\0")

    def below(self, limit: int) -> int:
        return int.from_bytes(self.bytes(1 if limit <= 256 else 3), "little") % limit

    def choice(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def chance(self, one_in: int) -> bool:
        return self.below(one_in) == one_in - 1


def build(source: Source) -> dict[str, bytes]:
    """Return the files of a log, by name: generation 0, and perhaps some others, right or not."""
    count = source.choice((1, 1, 2, 3))
    names = [NAME, *(generation_name(NAME.encode(), n, bytes([n]) * 6).decode() for n in range(1, count))]
    headers = [_header(source, number) for number in range(count)]
    files: dict[str, bytes] = {}
    following: GenerationRef | None = None
    for number in reversed(range(count)):
        data, chain, size = _file(source, headers[number], following)
        following = GenerationRef(number, headers[number].log_id, size, chain, names[number].encode())
        files[names[number]] = _mutated(source, data)
    return files


def _header(source: Source, number: int) -> Header:
    runs = ((b"job", source.below(3)),) if source.chance(4) else ()
    return Header(
        log_id=bytes([number]) * 16,
        lock_kind=1 if not source.chance(16) else source.choice(LOCKS),
        durable=source.chance(16),
        lineage=bytes(16),
        root_inode=source.choice((0, 0, 0, 0, 5)),  # of a copy, if it is not 0
        inode=source.choice((0, 0, 0, 0, 6)),
        generation=number if not source.chance(16) else source.below(4),
        run_ids=runs,
        run=0 if not source.chance(16) else source.choice(INTERESTING),
    )


def _file(source: Source, header: Header, following: GenerationRef | None) -> tuple[bytes, int, int]:
    """Return a file's bytes, and where its snapshot may be said to end: the chain there, and the size."""
    data = header.encode()
    _, (size, chain) = Header.decode(data)
    place = (chain, size)
    for _ in range(source.below(12)):
        kind = source.choice(KINDS)
        torn = source.chance(24)
        one, following_chain = _record(source, kind, following, chain)
        if torn:
            data += one[: source.below(len(one))]
            offset = len(data)
            data = data.ljust(-(-(offset + 512) // 512) * 512, b"\0")
            one, following_chain = record.encode_void(offset, 0, 0, chain)
        data, chain = data + one, following_chain
        if source.chance(3):
            place = (chain, len(data))
    if following is not None and not source.chance(8):
        one, chain = record.encode(record.SEAL, b"", following.seal(), 1, 0, chain)
        data += one
    return data, *place


def _record(source: Source, kind: int, following: GenerationRef | None, chain: int) -> tuple[bytes, int]:
    writer = source.choice((1, 1, 1, 2, 3, 0, (1 << 24) - 1, (1 << 32) - 1))
    time_ns = source.choice((0, 1, 1_800_000_000_000_000_000, (1 << 64) - 1))
    key = source.choice((b"k", b"a", b"n", b"", b"\xff\0", b"k" * 1024))
    if source.chance(48):  # too long for any record
        key = source.choice((b"k" * 1025, b"k" * 65535))
    value = _value(source, kind, following)
    if kind in b"sblXZfEMV":
        key = b""
    return record.encode(kind, key, value, writer, time_ns, chain)


def _value(source: Source, kind: int, following: GenerationRef | None) -> bytes:
    if source.chance(12):
        return source.bytes(source.below(64))
    if kind == record.MULTI_SET:
        pairs = [(source.choice((b"k", b"a", b"")), source.bytes(source.below(5))) for _ in range(source.below(4))]
        return record.encode_pairs(pairs)
    if kind == record.SESSION:
        alive = source.choice((bytes(16), b"a" * 16))
        return Session(
            "host", source.choice((0, 1, 1 << 22)), alive_id=alive, rank=source.choice((None, 0, 5))
        ).encode()
    if kind == record.DEATH:
        return encode_death(source.choice((1, 2, 3, 99, (1 << 32) - 1)), bytes(16))
    if kind in (record.SEAL, record.FORWARD):
        successor = _successor(source, following)
        return successor.seal() if kind == record.SEAL else successor.forward()
    if kind == record.ADD:
        return source.choice((b"1", b"-7", b"9" * 30, b"x", b""))
    return source.bytes(source.below(9)) * source.choice((1, 1, 1, 100, 9000))


def _successor(source: Source, following: GenerationRef | None) -> GenerationRef:
    if following is not None and source.chance(2):
        return following
    number = source.choice((1, 2, 3, 0, (1 << 32) - 1))
    random = bytes([number % 256]) * 6
    base = source.choice((b"log", b"other", b"", b"a\0b", b"x" * 300, b".."))
    return GenerationRef(
        number, bytes([number % 256]) * 16, source.choice(INTERESTING), 0, generation_name(base, number, random)
    )


def _mutated(source: Source, data: bytes) -> bytes:
    """Return the bytes, in most cases unchanged."""
    changed = bytearray(data)
    if source.chance(4):
        for _ in range(1 + source.below(3)):
            start = source.below(len(changed) + 1)
            how = source.below(5)
            if how == 0 and start < len(changed):
                changed[start] ^= 1 << source.below(8)
            elif how == 1:
                changed[start : start + source.below(40)] = source.bytes(source.below(40))
            elif how == 2:
                del changed[start:]
            elif how == 3:
                changed[start : start + 4] = source.choice(INTERESTING).to_bytes(4, "little")
            else:
                changed += bytes(source.below(2000)) + source.bytes(source.below(20))
    return bytes(changed)
