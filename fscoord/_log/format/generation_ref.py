"""`GenerationRef`: the reference to a later generation in a record. Functions that build and parse file names.

A generation is one file of a log. When a log is compacted, it continues in the next generation.

A seal is the last record of a generation. A forward record in generation 0 names a later generation, as a hint. This
module does no I/O.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from fscoord._log.format.record import SEAL, MalformedRecord

_SEAL = Struct("<I16sQIH")
_FORWARD = Struct("<I16sH")
RANDOM_BYTES = 6
NAME_MAX = 255
"""The longest file name, in bytes, that a file system may allow on Linux."""


class GenerationRef(NamedTuple):
    """A reference to a later generation of a log.

    Attributes:
        generation: the number of the generation, from 1 on.
        log_id: the ``log_id`` in its header.
        size: the offset of the end of its snapshot, in bytes; 0 in a forward record, which does not contain the offset.
        chain: the chain at the end of the snapshot; 0 in a forward record.
        name: the name of its file in the directory of the log.
    """

    generation: int
    log_id: bytes
    size: int
    chain: int
    name: bytes

    def seal(self) -> bytes:
        """Return the value of a SEAL record with this reference."""
        fixed = _SEAL.pack(self.generation, self.log_id, self.size, self.chain, len(self.name))
        return fixed + self.name

    def forward(self) -> bytes:
        """Return the value of a FORWARD record with this reference."""
        return _FORWARD.pack(self.generation, self.log_id, len(self.name)) + self.name

    @classmethod
    def decode(cls, kind: int, value: bytes, sealed: int | None = None) -> GenerationRef:
        """Return the reference in `value`, the value of a SEAL or a FORWARD record. Bytes after the name are ignored.

        If `sealed` is given, a SEAL must name generation `sealed` + 1, so that seals can't form a cycle.

        Raises:
            MalformedRecord: `value` is not the value of a record of this kind, or the SEAL names a wrong generation.
        """
        form, what = (_SEAL, "seal") if kind == SEAL else (_FORWARD, "forward record")
        if len(value) < form.size:
            raise MalformedRecord(f"a {what} is cut short")
        generation, log_id, *end, length = form.unpack_from(value)
        if kind == SEAL and sealed is not None and generation != sealed + 1:
            raise MalformedRecord(
                f"the seal of generation {sealed} names generation {generation}, which is not the next"
            )
        size, chain = end or (0, 0)
        return cls(generation, log_id, size, chain, _name(value, form.size, length, generation))


def _name(data: bytes, start: int, length: int, generation: int) -> bytes:
    name = data[start : start + length]
    number = parse_generation_name(name)
    if len(name) < length or number != generation or length > NAME_MAX or b"\0" in name:
        raise MalformedRecord(f"{name!r} is not a name for generation {generation}")
    return name


def generation_name(base: bytes, generation: int, random: bytes) -> bytes:
    """Return the file name of `generation` of the log whose own name is `base`."""
    return b"%s.%d.%s" % (base, generation, random.hex().encode())


def parse_generation_name(name: bytes, base: bytes | None = None) -> int | None:
    """Return the generation's number from its file name `name`; None if `name` is not the file name of a generation.

    If `base` is given, the file must belong to the log whose own name is `base`.
    """
    parts = name.rsplit(b".", 2)
    if b"/" in name or len(parts) < 3 or (base is not None and parts[0] != base):
        return None
    number, random = parts[1:]
    if not number.isdigit() or number[:1] == b"0" or len(number) > 10:
        return None
    if len(random) != 2 * RANDOM_BYTES or random.strip(b"0123456789abcdef"):
        return None
    return int(number)
