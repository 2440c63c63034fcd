"""What the records of sessions and deaths carry, as bytes and back. Pure."""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from fscoord._log.format.record import MalformedRecord
from fscoord._runtime.escaping import escape_word

__all__ = ["Session", "decode_death", "encode_death"]

# pid, start time, boot id, liveness id, rank, pid and time namespaces, sizes of host and label
_SESSION = Struct("<IQ16s16sqQQHH")
_DEATH = Struct("<I16s")


class Session(NamedTuple):
    """Who writes: the value of a SESSION record. A record names its writer by the session's number.

    ``pid_space`` and ``time_space`` are the numbers of the namespaces in which the pid and the start time count, 0 if
    not known. ``since_ns`` is the time of the record, not a part of its value.
    """

    host: str
    pid: int
    start_time: int = 0
    boot_id: bytes = bytes(16)
    alive_id: bytes = bytes(16)
    rank: int | None = None
    label: str = ""
    pid_space: int = 0
    time_space: int = 0
    since_ns: int = 0

    def encode(self) -> bytes:
        """Return the value of the SESSION record."""
        host, label = (text.encode("utf-8", "surrogateescape")[:255] for text in (self.host, self.label))
        rank = -1 if self.rank is None else self.rank
        spaces = (self.pid_space, self.time_space)
        fixed = (self.pid, self.start_time, self.boot_id, self.alive_id, rank, *spaces, len(host), len(label))
        return _SESSION.pack(*fixed) + host + label

    @classmethod
    def decode(cls, data: bytes, since_ns: int = 0) -> Session:
        """Return the session in `data`; bytes after what this version knows are ignored.

        Raises:
            MalformedRecord: `data` does not describe a session.
        """
        if len(data) < _SESSION.size:
            raise MalformedRecord("the description of a session is cut short")
        pid, start_time, boot_id, alive_id, rank, *spaces, host_size, label_size = _SESSION.unpack_from(data)
        end = _SESSION.size + host_size
        if end + label_size > len(data):
            raise MalformedRecord("the name of a session's host, or its label, is cut short")
        host, label = data[_SESSION.size : end], data[end : end + label_size]
        return cls(
            host=host.decode("utf-8", "surrogateescape"),
            pid=pid,
            start_time=start_time,
            boot_id=boot_id,
            alive_id=alive_id,
            rank=None if rank < 0 else rank,
            label=label.decode("utf-8", "surrogateescape"),
            pid_space=spaces[0],
            time_space=spaces[1],
            since_ns=since_ns,
        )

    def __str__(self) -> str:
        return f"{escape_word(self.host)}:{self.pid}"


def encode_death(number: int, alive_id: bytes) -> bytes:
    """Return the value of a DEATH record: session `number`, which named the liveness file `alive_id`, is dead."""
    return _DEATH.pack(number, alive_id)


def decode_death(data: bytes) -> int:
    """Return the number of the session that a DEATH record's value names.

    Raises:
        MalformedRecord: `data` is not such a value.
    """
    if len(data) < _DEATH.size:
        raise MalformedRecord("the record of a death is cut short")
    number = int(_DEATH.unpack_from(data)[0])
    if not number:
        raise MalformedRecord("the record of a death names session 0, and sessions are numbered from 1 on")
    return number
