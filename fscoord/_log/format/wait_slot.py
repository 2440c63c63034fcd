"""`WaitSlot`: encode and decode the slot in which a session shows what it waits for. Pure: no I/O, no clock.

A slot is a hint for people. A slot may be partly written. It may also be stale, because a killed process does not clear
its slot. So each slot has a checksum, and contains the identity of its session. A reader ignores a slot whose checksum
or session is wrong. ``docs/contributors/format.md`` specifies the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

from fscoord._log.format.control_records import Session

SLOT_SIZE: Final = 4096
MAGIC: Final = b"fswaits\n"
FILE_HEADER: Final = MAGIC.ljust(SLOT_SIZE, b"\0")
EMPTY: Final = bytes(SLOT_SIZE)

# checksum, session, pid, start time, boot id, since, further waits, begin by the wall and by the monotonic clock, size,
# number of keys, lengths of kind and name, number of keys that follow
_HEAD = Struct("<IIIQ16sQIQQQIHHH")
_LENGTH = Struct("<H")
_SUM: Final = 4
NAME_MAX: Final = 1200


class WaitSlot(NamedTuple):
    """The content of a slot: the oldest wait of one session.

    Attributes:
        number: the number of the session.
        pid, start_time, boot_id, since_ns: the same as in the session's record (`Session`).
        more: how many further waits the session has.
        began_ns: when the wait began, by the wall clock of its host.
        began_monotonic_ns: when the wait began, by the monotonic clock of its host.
        kind: the kind of object for which the session waits, such as ``barrier``.
        name: the name of the object; empty if only the keys are known.
        size: how many ranks must arrive at the object; 0 if unknown.
        keys: the keys for which the session waits, as many as fit into the slot.
        key_count: for how many keys the session waits.
    """

    number: int
    pid: int
    start_time: int
    boot_id: bytes
    since_ns: int
    more: int
    began_ns: int
    began_monotonic_ns: int
    kind: str
    name: str
    size: int
    keys: tuple[bytes, ...]
    key_count: int

    def encode(self) -> bytes:
        """Return the `SLOT_SIZE` bytes of the slot. Keys that do not fit are left out, and a long name is cut."""
        kind, name = (text.encode("utf-8", "surrogateescape")[:NAME_MAX] for text in (self.kind, self.name))
        keys = self._that_fit(SLOT_SIZE - _HEAD.size - len(kind) - len(name))
        body = bytearray(
            _HEAD.pack(
                0, self.number, self.pid, self.start_time, self.boot_id, self.since_ns, min(self.more, 0xFFFFFFFF),
                self.began_ns, self.began_monotonic_ns, self.size, min(self.key_count, 0xFFFFFFFF),
                len(kind), len(name), len(keys),
            )
        )  # fmt: skip
        body += kind + name + b"".join(_LENGTH.pack(len(key)) + key for key in keys)
        body += bytes(SLOT_SIZE - len(body))
        body[:_SUM] = crc32(body[_SUM:]).to_bytes(_SUM, "little")
        return bytes(body)

    def _that_fit(self, room: int) -> Sequence[bytes]:
        for place, key in enumerate(self.keys):
            room -= _LENGTH.size + len(key)
            if room < 0:
                return self.keys[:place]
        return self.keys

    @classmethod
    def decode(cls, data: bytes) -> WaitSlot | None:
        """Return the slot in `data`; None if `data` is empty or torn, or another program wrote it."""
        if len(data) != SLOT_SIZE or crc32(data[_SUM:]) != int.from_bytes(data[:_SUM], "little"):
            return None
        fields = _HEAD.unpack_from(data)
        _, number, pid, start_time, boot_id, since_ns, more, wall, monotonic, size, count, *lengths = fields
        kind_size, name_size, key_count = lengths
        position = _HEAD.size
        texts = []
        for length in (kind_size, name_size):
            texts.append(data[position : position + length].decode("utf-8", "surrogateescape"))
            position += length
        keys = []
        for _ in range(key_count):
            if position + _LENGTH.size > SLOT_SIZE:
                return None
            (length,) = _LENGTH.unpack_from(data, position)
            position += _LENGTH.size
            keys.append(data[position : position + length])
            position += length
        if position > SLOT_SIZE:
            return None
        kind, name = texts
        return cls(
            number, pid, start_time, boot_id, since_ns, more, wall, monotonic, kind, name, size, tuple(keys), count
        )

    def is_of(self, number: int, session: Session) -> bool:
        """Return whether session `number` wrote this slot. If not, a session of an earlier run wrote the slot."""
        mine = (self.number, self.pid, self.start_time, self.boot_id, self.since_ns)
        return mine == (number, session.pid, session.start_time, session.boot_id, session.since_ns)


def is_blank(data: bytes) -> bool:
    """Return whether `data` is a slot that was never written, or was cleared."""
    return not any(data)
