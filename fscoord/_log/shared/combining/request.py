"""`Request` and `Answer`: the messages of a follower to a leader and of the leader to the follower, as bytes. Pure.

Both stay on one host, in a directory that is private to one user, and exist only during one call. So their format may
change with the name of that directory, which contains a version (`station.VERSION`).
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

Token = tuple[int, int]
"""Identifies one operation in the log: the session that writes its record, and the time of the record. No two records
of a session have the same time, except for those of a snapshot."""

REQUEST_MAX: Final = 16 * 1024
"""The longest request, in bytes. The author of a longer operation writes alone."""

_CRC = Struct("<I")
_REQUEST = Struct("<IIQ16sH")  # run, session, time, liveness id, size of the address
_ANSWER = Struct("<QB")
_SEAT = Struct("<BQ")

DONE, ALONE, UNKNOWN, LEAD = 1, 2, 3, 4
"""What an answer says. `DONE`: the operation took effect, or was decided without a record; its result follows. `ALONE`:
nothing was appended for it, and its author must write alone. `UNKNOWN`: the leader failed. `LEAD`: the seat is free."""

WAITING, HOLDING = 1, 2
"""The phases of a leader: it waits for the log's lock, or it has the lock."""


class Author(NamedTuple):
    """The session that makes a request. The leader's session table must hold the same facts about it.

    Attributes:
        session: its number.
        alive_id: the id of the liveness file in which it holds a byte.
        run: the number of the run that it has joined.
    """

    session: int
    alive_id: bytes
    run: int


class Request(NamedTuple):
    """A request, as a leader reads it.

    Attributes:
        author: the session that makes the request, and in whose name the record is appended.
        time: the time of the record, which the author has chosen.
        address: the name of the socket at which the author waits.
        operation: the encoded operation.
    """

    author: Author
    time: int
    address: str
    operation: bytes


def encode_request(author: Author, time: int, address: str, operation: bytes) -> bytes:
    """Return the bytes of a request."""
    name = address.encode()
    head = _REQUEST.pack(author.run, author.session, time, author.alive_id, len(name))
    body = head + name + operation
    return _CRC.pack(crc32(body)) + body


def decode_request(data: bytes) -> Request | None:
    """Return the request in `data`, the bytes of a request; None if `data` is not a request."""
    start = _CRC.size + _REQUEST.size
    if len(data) < start or _CRC.unpack_from(data)[0] != crc32(data[_CRC.size :]):
        return None
    run, session, time, alive_id, size = _REQUEST.unpack_from(data, _CRC.size)
    name, operation = data[start : start + size], data[start + size :]
    return Request(Author(session, alive_id, run), time, name.decode("ascii", "replace"), operation)


class Answer(NamedTuple):
    """The answer of a leader to a follower.

    Attributes:
        time: the time of the requested record. An answer to an earlier request has another time.
        verdict: `DONE`, `ALONE`, `UNKNOWN` or `LEAD`.
        result: the encoded result, for `DONE`.
    """

    time: int
    verdict: int
    result: bytes = b""

    def encode(self) -> bytes:
        """Return the answer as bytes."""
        return _ANSWER.pack(self.time, self.verdict) + self.result

    @classmethod
    def decode(cls, data: bytes) -> Answer | None:
        """Return the answer in `data`, or None if `data` is not an answer."""
        if len(data) < _ANSWER.size:
            return None
        time, verdict = _ANSWER.unpack_from(data)
        return cls(time, verdict, data[_ANSWER.size :])


SEAT_SIZE: Final = _SEAT.size


def encode_seat(phase: int, count: int) -> bytes:
    """Return the bytes that a leader writes into the seat: its phase, and a number that differs after each change."""
    return _SEAT.pack(phase, count & 0xFFFFFFFFFFFFFFFF)


def decode_seat(data: bytes) -> tuple[int, int]:
    """Return the phase and the number in `data`; zeros if no leader has written them yet."""
    phase, count = _SEAT.unpack(data[:SEAT_SIZE].ljust(SEAT_SIZE, b"\0"))
    return phase, count
