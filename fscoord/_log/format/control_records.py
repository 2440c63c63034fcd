"""Control records, which carry no data of users: sessions, deaths, failures, and references to later generations.

This module does no I/O.

All readers of a log decode these records with `decode_control`, so that handles and `fscoord.inspect.verify` agree on
which records are malformed.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from fscoord._log.format import record
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.record import MalformedRecord, Record
from fscoord._runtime.escaping import escape_word

# The fields: pid, start time, boot id, liveness id, rank, pid and time namespaces, world size, replaced session, sizes
# of host and label.
_SESSION = Struct("<IQ16s16sqQQIIHH")
_FAILURE = Struct("<BH")  # whether it ended the run before, size of the reason
_DEATH = Struct("<I16s")


class Session(NamedTuple):
    """A registered handle: the value of a SESSION record. Other records name their writer by the session's number.

    Attributes:
        host: the name of its host.
        pid: the id of its process.
        start_time: when the process began, in clock ticks since boot; 0 if not known.
        boot_id: the id of the host's boot.
        alive_id: the id of the liveness file in which the session has locked a byte; zeros if it has locked none.
        rank: the rank of the session, or None.
        label: a text for people.
        pid_space, time_space: the ids of the namespaces to which ``pid`` and ``start_time`` refer; 0 if not known.
        world_size: the number of participants of the run, if the session is a participant; otherwise 0.
        replaces: the number of an earlier session of the same handle, which this session replaces as a participant; 0
            if there is none.
        since_ns: the time of the SESSION record. The encoded value does not contain this time.
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
    world_size: int = 0
    replaces: int = 0
    since_ns: int = 0

    def encode(self) -> bytes:
        """Return the value of a SESSION record."""
        host, label = (text.encode("utf-8", "surrogateescape")[:255] for text in (self.host, self.label))
        rank = -1 if self.rank is None else self.rank
        spaces = (self.pid_space, self.time_space)
        fixed = (self.pid, self.start_time, self.boot_id, self.alive_id, rank, *spaces, self.world_size, self.replaces)
        return _SESSION.pack(*fixed, len(host), len(label)) + host + label

    @classmethod
    def decode(cls, data: bytes, since_ns: int = 0) -> Session:
        """Return the session in `data`, the value of a SESSION record. Bytes that later versions append are ignored.

        Raises:
            MalformedRecord: `data` does not describe a session.
        """
        if len(data) < _SESSION.size:
            raise MalformedRecord("the description of a session is cut short")
        fields = _SESSION.unpack_from(data)
        pid, start_time, boot_id, alive_id, rank, pid_space, time_space, world_size, replaces, *sizes = fields
        host_size, label_size = sizes
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
            pid_space=pid_space,
            time_space=time_space,
            world_size=world_size,
            replaces=replaces,
            since_ns=since_ns,
        )

    def __str__(self) -> str:
        return f"{escape_word(self.host)}:{self.pid}"

    @property
    def name(self) -> str:
        """The name of the session in messages: its host and pid, and its rank if it has one."""
        return str(self) if self.rank is None else f"rank {self.rank} ({self})"


class Failure(NamedTuple):
    """The failure of a participant: the value of a FAILURE record.

    Attributes:
        session: the participant.
        reason: the name of the exception with which the participant left the run; empty if the participant died.
        is_previous: whether the failure happened in the previous run, and ended that run.
        time_ns: the time of the FAILURE record. The encoded value does not contain this time.
    """

    session: Session
    reason: str = ""
    is_previous: bool = False
    time_ns: int = 0

    def encode(self) -> bytes:
        """Return the value of a FAILURE record."""
        reason = self.reason.encode("utf-8", "replace")[:255]
        return _FAILURE.pack(self.is_previous, len(reason)) + reason + self.session.encode()

    @classmethod
    def decode(cls, data: bytes, time_ns: int = 0) -> Failure:
        """Return the failure in `data`, the value of a FAILURE record.

        Raises:
            MalformedRecord: `data` does not describe a failure.
        """
        if len(data) < _FAILURE.size:
            raise MalformedRecord("the record of a failure is cut short")
        is_previous, size = _FAILURE.unpack_from(data)
        end = _FAILURE.size + size
        reason = data[_FAILURE.size : end].decode("utf-8", "replace")
        return cls(Session.decode(data[end:]), reason, bool(is_previous), time_ns)

    def __str__(self) -> str:
        seconds = self.time_ns // 10**9 % 86400
        how = f"left by {escape_word(self.reason)}" if self.reason else "was found dead"
        return f"{self.session.name} {how} at {seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02} UTC"


def encode_death(number: int, alive_id: bytes) -> bytes:
    """Return the value of a DEATH record for session `number`. `alive_id` is the id of the session's liveness file."""
    return _DEATH.pack(number, alive_id)


def decode_death(data: bytes) -> int:
    """Return the number of the dead session in `data`, the value of a DEATH record.

    Raises:
        MalformedRecord: `data` is not the value of a DEATH record.
    """
    if len(data) < _DEATH.size:
        raise MalformedRecord("the record of a death is cut short")
    number = int(_DEATH.unpack_from(data)[0])
    if not number:
        raise MalformedRecord("the record of a death names session 0, and sessions are numbered from 1 on")
    return number


ControlRecord = Session | int | GenerationRef | Failure | None
"""The content of a record that `decode_control` returns: a session that registers (SESSION), the number of a dead
session (DEATH), a later generation (SEAL, FORWARD), or a participant's failure (FAILURE). None for any other kind."""


def decode_control(found: Record, generation: int, *, is_sealed: bool) -> ControlRecord:
    """Return the content of `found` if `found` is a control record, else None.

    Args:
        found: a record whose checksum is right.
        generation: the generation that holds the record.
        is_sealed: whether a seal precedes the record in that generation.

    Raises:
        MalformedRecord: the format does not allow the record. A reader of this version must stop here.
    """
    kind, _, value, writer, time_ns = found
    if is_sealed and kind != record.FORWARD:
        raise MalformedRecord(
            f"a record of kind {chr(kind)!r} was written after the seal, where no reader looks: an acknowledged write"
            " is lost"
        )
    if kind == record.SESSION:
        if not writer:
            raise MalformedRecord("a session registers with the number 0, and sessions are numbered from 1 on")
        return Session.decode(value, time_ns)
    if kind == record.DEATH:
        return decode_death(value)
    if kind == record.FAILURE:
        return Failure.decode(value, time_ns)
    if kind == record.FORWARD and generation:
        raise MalformedRecord("only generation 0 may hold forward records")
    if kind == record.FORWARD and not is_sealed:
        raise MalformedRecord("a forward record has no seal before it")
    if kind in (record.SEAL, record.FORWARD):
        return GenerationRef.decode(kind, value, generation)
    if kind in record.OF_SEVERAL_KEYS:
        for _ in record.decode_pairs(value) if kind == record.MULTI_SET else record.decode_changes(value):
            pass
    elif kind not in record.NAMES and not ord("a") <= kind <= ord("z"):
        raise MalformedRecord(f"a record of kind {chr(kind)!r} needs a newer fscoord; upgrade it")
    return None
