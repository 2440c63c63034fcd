"""A reader of logs, written from docs/contributors/format.md alone. It shares no code with fscoord, and is slow."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECTOR = 512
LONGEST = 29 + 1024 + 2 * 67_108_864
KNOWN = "SICAMTDPOVXZEFsblft"


def crc(data: bytes, seed: int = 0) -> int:
    return zlib.crc32(data, seed)


class Refused(Exception):
    """The file is not for this reader."""


@dataclass
class Log:
    """What a log holds: its header, its records up to the end, and how it ends: "whole", "torn" or "damaged"."""

    header: dict[str, Any]
    records: list[tuple[int, str, bytes, bytes, int, int]] = field(default_factory=list)
    ends: str = "whole"
    offset: int = 0
    values: dict[bytes, bytes] = field(default_factory=dict)
    queues: dict[bytes, list[bytes]] = field(default_factory=dict)
    sessions: dict[int, dict[str, Any]] = field(default_factory=dict)
    deaths: list[int] = field(default_factory=list)
    successor: tuple[int, bytes, str] | None = None
    snapshot: tuple[int, int] | None = None
    bells: int = 0
    left: set[int] = field(default_factory=set)
    failures: list[dict[str, Any]] = field(default_factory=list)
    finished: bool = False


def read_log(data: bytes) -> Log:
    """Read the log whose bytes are `data`."""
    log = Log(read_header(data))
    offset, chain = log.header["size"], log.header["checksum"]
    while True:
        record = read_record(data, offset, chain)
        if record == "bad":
            durable = log.header["durable"] or any(kind == "Z" for _, kind, *_ in log.records)
            verdict, offset_after, chain_after = after_bad(data, offset, chain, durable)
            if verdict == "void":
                void = data[offset_after - 37 : offset_after]
                writer, time = struct.unpack_from("<IQ", void, 8)
                log.records.append((offset_after - 37, "V", b"", void[23:31], writer, time))
                offset, chain = offset_after, chain_after
                continue
            log.ends = verdict
        elif isinstance(record, str):
            log.ends = record
        else:
            end, chain, kind, key, value, writer, time = record
            log.records.append((offset, kind, key, value, writer, time))
            if not apply(log, kind, key, value, writer):
                log.records.pop()
                log.ends = "unknown"
            else:
                offset = end
                continue
        log.offset = offset
        return log


def read_newest(path: Path, read: Callable[[Path], bytes] = lambda file: file.read_bytes()) -> Log:
    """Read the log at `path` in its newest generation, by the forward records and then along the seals."""
    log = read_log(read(path))
    while log.successor is not None:
        generation, name, file = log.successor
        log = read_log(read(path.with_name(file)))
        if (log.header["generation"], log.header["id"]) != (generation, name):
            raise Refused("not the next generation")
    return log


def read_header(data: bytes) -> dict[str, Any]:
    if data[:8] != b"fscoord\n":
        raise Refused("no log")
    if data[8:10] != b"\3\0":
        raise Refused("another version")
    if len(data) < 114:
        raise Refused("no whole header")
    flags, size = struct.unpack_from("<HI", data, 10)
    if not 114 <= size <= min(65536, len(data)) or crc(data[: size - 4]) != int.from_bytes(
        data[size - 4 : size], "little"
    ):
        raise Refused("damaged header")
    root_inode, inode, created, longest_key, longest_value = struct.unpack_from("<QQQII", data, 60)
    if flags > 1 or (longest_key, longest_value) != (1024, 67_108_864) or any(data[17:20] + data[92:108]):
        raise Refused("unknown flags, limits or fields")
    run_ids, position = [], 110
    for _ in range(int.from_bytes(data[108:110], "little")):
        length, count = struct.unpack_from("<Hq", data, position)
        run_ids.append((data[position + 10 : position + 10 + length], count))
        position += 10 + length
    return {
        "durable": bool(flags & 1),
        "size": size,
        "lock": data[16],
        "generation": int.from_bytes(data[20:24], "little"),
        "run": int.from_bytes(data[24:28], "little"),
        "id": data[28:44],
        "lineage": data[44:60],
        "root inode": root_inode,
        "inode": inode,
        "created": created,
        "run ids": run_ids,
        "checksum": int.from_bytes(data[size - 4 : size], "little"),
    }


def sound_length(prefix: bytes, chain: int) -> int:
    """The length of the record that the 8 bytes `prefix` promise, or 0."""
    length, check = struct.unpack("<II", prefix)
    return length if (length * 2_654_435_761 + chain) % 2**32 == check and 29 <= length <= LONGEST else 0


def read_record(data: bytes, offset: int, chain: int) -> Any:
    """The record at `offset`, or "whole", "torn" (unfinished) or "bad"."""
    if offset == len(data):
        return "whole"
    prefix = data[offset : offset + 8]
    if len(prefix) < 8:
        return "torn"
    length = sound_length(prefix, chain)
    if not length:
        return "bad"
    end = offset + length
    if end > len(data):
        return "bad" if data[offset + 8 : offset + 12] == bytes(4) else "torn"
    writer, time, key_length, kind = struct.unpack_from("<IQHB", data, offset + 8)
    key_end = offset + 23 + key_length
    if not is_sound(data[offset:end], chain) or key_end > end - 6 or key_length > 1024 or kind in b"\0V":
        return "bad"
    key, value = data[offset + 23 : key_end], data[key_end : end - 6]
    return end, crc(data[offset:end], chain), chr(kind), key, value, writer, time


def is_sound(record: bytes, chain: int) -> bool:
    """Whether the checksum and the newlines of `record`, whose length is right, are as they should be."""
    checksum = crc(record[:-6], chain)
    return record[-6:] == b"\n" + checksum.to_bytes(4, "little") + b"\n"


def only_zeros(data: bytes, start: int, end: int) -> bool:
    return not any(data[start:end])


def after_bad(data: bytes, offset: int, chain: int, durable: bool) -> tuple[str, int, int]:
    """What follows a bad record: ("void", where to go on, chain), ("torn", 0, 0) or ("damaged", 0, 0)."""
    length = sound_length(data[offset : offset + 8].ljust(8, b"\0"), chain)
    if length and only_zeros(data, offset + 8, next_place(offset + 8)):
        verdict = after_torn(data, offset, chain, next_place(offset + 8))
        if verdict[0] == "void":
            return verdict
    end = offset + (length or 8)
    place = next_place(end)
    torn = data[end - 1 : end] in (b"", b"\0")
    if durable and length and not torn:
        starts = range((offset // SECTOR + 1) * SECTOR, min(end, len(data)), SECTOR)
        torn = any(only_zeros(data, start, start + SECTOR) for start in starts)
    verdict = "damaged", 0, 0
    if torn and only_zeros(data, end, place):
        verdict = after_torn(data, offset, chain, place)
    if verdict[0] == "damaged" and durable and not length and prefix_is_lost(data, offset):
        verdict = after_lost(data, offset, chain, place)
    return verdict


def next_place(end: int) -> int:
    """Where the void goes after a record that ends at `end`."""
    return -(-(end + SECTOR) // SECTOR) * SECTOR


def is_void(data: bytes, start: int, offset: int, chain: int) -> bool:
    void = data[start : start + 37]
    if len(void) < 37 or sound_length(void[:8], chain) != 37 or not is_sound(void, chain):
        return False
    return void[20:31] == b"\0\0V" + offset.to_bytes(8, "little")


def after_torn(data: bytes, offset: int, chain: int, place: int) -> tuple[str, int, int]:
    while True:
        found = next((index for index in range(place, len(data)) if data[index]), None)
        if found is None:
            return "torn", 0, 0
        start = found - found % SECTOR
        if is_void(data, start, offset, chain):
            return "void", start + 37, crc(data[start : start + 37], chain)
        begins = data[start : start + 4].ljust(4, b"\0") == b"\x25\0\0\0"
        if not begins or data[start + 36 : start + 37] not in (b"", b"\0"):
            return "damaged", 0, 0
        if not only_zeros(data, start + 37, start + 1024):
            return "damaged", 0, 0
        place = start + 1024


def prefix_is_lost(data: bytes, offset: int) -> bool:
    start = offset
    while start < min(offset + 8, len(data)):
        end = (start // SECTOR + 1) * SECTOR
        if only_zeros(data, start, end):
            return True
        start = end
    return False


def after_lost(data: bytes, offset: int, chain: int, place: int) -> tuple[str, int, int]:
    for start in range(place, len(data), SECTOR):
        if is_void(data, start, offset, chain):
            return "void", start + 37, crc(data[start : start + 37], chain)
    if len(data) - offset > LONGEST or any(sound_in_itself(data, at) for at in range(offset + 29, len(data))):
        return "damaged", 0, 0
    return "torn", 0, 0


def sound_in_itself(data: bytes, start: int) -> bool:
    if start + 29 > len(data):
        return False
    length, check = struct.unpack_from("<II", data, start)
    record = data[start : start + length]
    if not 29 <= length <= LONGEST or len(record) < length or not chr(record[22]).isalpha():
        return False
    return is_sound(record, (check - length * 2_654_435_761) % 2**32)


def apply(log: Log, kind: str, key: bytes, value: bytes, writer: int) -> bool:
    """Apply this record to the log's values and queues; return False if it is invalid."""
    if kind in "SIC":
        log.values[key] = value
    elif kind == "A":
        log.values[key] = log.values.get(key, b"") + value
    elif kind == "M":
        log.values.update(read_pairs(value))
    elif kind == "T":
        for name, new in read_pairs(value):
            if new is None:
                log.values.pop(name, None)
                log.queues.pop(name, None)
            else:
                log.values[name] = new
    elif kind == "D":
        log.values.pop(key, None)
        log.queues.pop(key, None)
    elif kind == "P":
        log.queues.setdefault(key, []).append(value)
    elif kind == "O":
        log.queues[key].pop(0)
        if not log.queues[key]:
            del log.queues[key]
    elif kind == "s":
        log.sessions[writer] = read_session(value)
    elif kind == "X":
        log.deaths.append(int.from_bytes(value[:4], "little"))
    elif kind == "b":
        log.bells += 1
    elif kind == "l":
        log.left.add(writer)
    elif kind == "E":
        log.finished = True
    elif kind == "F":
        previous, length = struct.unpack_from("<BH", value)
        reason = value[3 : 3 + length]
        log.failures.append(read_session(value[3 + length :]) | {"previous": bool(previous), "reason": reason})
    elif kind == "Z":
        if len(value) < 34:
            return False
        generation, name, *snapshot, length = struct.unpack_from("<I16sQIH", value)
        log.successor = generation, name, value[34 : 34 + length].decode()
        log.snapshot = snapshot[0], snapshot[1]
    elif kind == "f":
        generation, name, length = struct.unpack_from("<I16sH", value)
        log.successor = generation, name, value[22 : 22 + length].decode()
    return kind in KNOWN or "a" <= kind <= "z"


def read_pairs(value: bytes) -> list[tuple[bytes, Any]]:
    """The pairs of an `M` or a `T`, in their order; None for a key that a `T` removes."""
    pairs: list[tuple[bytes, Any]] = []
    position = 0
    while position < len(value):
        key_length, value_length = struct.unpack_from("<HI", value, position)
        middle = position + 6 + key_length
        is_removed = value_length == 4_294_967_295
        end = middle if is_removed else middle + value_length
        pairs.append((value[position + 6 : middle], None if is_removed else value[middle:end]))
        position = end
    return pairs


def read_session(value: bytes) -> dict[str, Any]:
    pid, start = struct.unpack_from("<IQ", value)
    rank, pid_space, time_space, world_size, replaces, host, label = struct.unpack_from("<qQQIIHH", value, 44)
    return {
        "pid": pid,
        "start": start,
        "boot": value[12:28],
        "rank": rank,
        "pid space": pid_space,
        "time space": time_space,
        "world size": world_size,
        "replaces": replaces,
        "host": value[80 : 80 + host],
        "label": value[80 + host : 80 + host + label],
    }
