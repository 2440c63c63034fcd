"""`Request` and `Answer`: encode and decode the messages between a follower and its leader. Pure.

Requests and answers stay on one host, in a directory that is private to one user, and exist only during one call. The
name of the directory contains a version (`station.VERSION`). A new version may have another format.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

Token = tuple[int, int]
"""Identifies the record of an operation: (session number, time of the record). No two records of a session have the
same time, except in a snapshot."""

REQUEST_MAX: Final = 16 * 1024
"""The largest request, in bytes. The author of a larger operation takes the log's lock itself."""

_CRC = Struct("<I")
_REQUEST = Struct("<IIQ16sH")  # run, session, time, liveness id, size of the address
_ANSWER = Struct("<QB")
_SEAT = Struct("<BQ")

DONE, ALONE, UNKNOWN, LEAD = 1, 2, 3, 4
"""The verdict of an answer. `DONE`: the operation took effect, or needed no record; its result follows. `ALONE`: no
record was appended; the author must take the log's lock itself. `UNKNOWN`: the leader failed. `LEAD`: the seat is
free."""

WAITING, HOLDING = 1, 2
"""The phases of a leader: it waits for the log's lock, or it holds the lock."""


class Author(NamedTuple):
    """Identifies the session that makes a request. The leader compares the three values with its session table.

    Attributes:
        session: the number of the session.
        alive_id: the id of the liveness file in which the session has locked a byte.
        run: the number of the run that the session has joined.
    """

    session: int
    alive_id: bytes
    run: int


class Request(NamedTuple):
    """A request, as a leader reads it.

    Attributes:
        author: the session that makes the request. The record names this session as its writer.
        time: the time of the record, which the author has chosen.
        address: the name of the socket on which the author receives the answer.
        operation: the encoded operation.
    """

    author: Author
    time: int
    address: str
    operation: bytes


def encode_request(author: Author, time: int, address: str, operation: bytes) -> bytes:
    """Encode a `Request` with these fields."""
    name = address.encode()
    head = _REQUEST.pack(author.run, author.session, time, author.alive_id, len(name))
    body = head + name + operation
    return _CRC.pack(crc32(body)) + body


def decode_request(data: bytes) -> Request | None:
    """Decode `data`. Return None if it is not a request."""
    start = _CRC.size + _REQUEST.size
    if len(data) < start or _CRC.unpack_from(data)[0] != crc32(data[_CRC.size :]):
        return None
    run, session, time, alive_id, size = _REQUEST.unpack_from(data, _CRC.size)
    name, operation = data[start : start + size], data[start + size :]
    return Request(Author(session, alive_id, run), time, name.decode("ascii", "replace"), operation)


class Answer(NamedTuple):
    """The answer of a leader to a follower.

    Attributes:
        time: the time of the requested record. It distinguishes this answer from late answers to earlier requests.
        verdict: `DONE`, `ALONE`, `UNKNOWN` or `LEAD`.
        result: the encoded result if the verdict is `DONE`; otherwise empty.
    """

    time: int
    verdict: int
    result: bytes = b""

    def encode(self) -> bytes:
        """Return the answer as bytes."""
        return _ANSWER.pack(self.time, self.verdict) + self.result

    @classmethod
    def decode(cls, data: bytes) -> Answer | None:
        """Decode `data`. Return None if it is not an answer."""
        if len(data) < _ANSWER.size:
            return None
        time, verdict = _ANSWER.unpack_from(data)
        return cls(time, verdict, data[_ANSWER.size :])


SEAT_SIZE: Final = _SEAT.size


def encode_seat(phase: int, count: int) -> bytes:
    """Return the bytes that a leader writes into the seat file: its phase, and a `count` that changes each time."""
    return _SEAT.pack(phase, count & 0xFFFFFFFFFFFFFFFF)


def decode_seat(data: bytes) -> tuple[int, int]:
    """Return (phase, count) from the bytes of the seat file; zeros if no leader has written them yet."""
    phase, count = _SEAT.unpack(data[:SEAT_SIZE].ljust(SEAT_SIZE, b"\0"))
    return phase, count
