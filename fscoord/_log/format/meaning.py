"""`decode_control`: what a sound record says, or that it says nothing that the format allows. Pure.

Whoever reads a log decodes it here, so that the handles that open a log and `fscoord verify` cannot disagree about it.
"""

from __future__ import annotations

from fscoord._log.format import record
from fscoord._log.format.control_records import Session, decode_death
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.record import MalformedRecord, Record

__all__ = ["ControlRecord", "decode_control"]

ControlRecord = Session | int | GenerationRef | None
"""A session that is introduced, the number of one that is dead, the file in which the log goes on, or none of these."""


def decode_control(found: Record, generation: int, *, is_sealed: bool) -> ControlRecord:
    """Return what the record `found` says, if it is not data.

    Args:
        found: a record whose checksum is right.
        generation: the file of the log in which it stands.
        is_sealed: whether a seal stands before it in that file.

    Raises:
        MalformedRecord: no reader of this version can go on after it.
    """
    kind, _, value, writer, time_ns = found
    if is_sealed and kind != record.FORWARD:
        raise MalformedRecord(
            f"a record of kind {chr(kind)!r} was written after the seal, where no reader goes on: its writer was told"
            " that it counts"
        )
    if kind == record.SESSION:
        if not writer:
            raise MalformedRecord("a session introduces itself under the number 0, and sessions are numbered from 1 on")
        return Session.decode(value, time_ns)
    if kind == record.DEATH:
        return decode_death(value)
    if kind == record.SEAL:
        return GenerationRef.from_seal(value, generation)
    if kind == record.FORWARD:
        if generation:
            raise MalformedRecord("only generation 0 may say where the log goes on without being sealed")
        if not is_sealed:
            raise MalformedRecord("it says where the log goes on, and there is no seal before it")
        return GenerationRef.from_forward(value)
    if kind == record.MULTI_SET:
        record.decode_pairs(value)
    elif kind not in record.NAMES and not ord("a") <= kind <= ord("z"):
        raise MalformedRecord(f"a record of kind {chr(kind)!r} needs a newer fscoord; upgrade it")
    return None
