"""`MalformedRecord`: the bytes of a log, whose checksums are right, do not mean anything. Pure."""

from __future__ import annotations

__all__ = ["MalformedRecord"]


class MalformedRecord(Exception):
    """A header, or a record's key or value, is not what the format allows; the text says why, as a clause.

    It is not a `ValueError`, because a signal handler may raise one in the middle of decoding, and that is not damage.
    """
