"""`Claim`: who has an item of a queue, and the text that says so in the store."""

from __future__ import annotations

from typing import NamedTuple

from fscoord._arguments import MalformedText, parse_uint63, words_in
from fscoord._runtime import system
from fscoord.recipes._keys import foreign

__all__ = ["Claim", "new_claim", "read_claim"]


class Claim(NamedTuple):
    """Who has an item.

    Attributes:
        text: what says so in the store: the other two, and a random word, so that no two claims are alike.
        session: the number of its handle among the members of the store; 0 where the store keeps none.
        owner: its process, ``host:pid``.
    """

    text: bytes
    session: int
    owner: str


def new_claim(session: int) -> Claim:
    """Return a claim of this process."""
    owner = system.process_name()
    return Claim(f"{session} {owner} {system.random_bytes(8).hex()}".encode(), session, owner)


def read_claim(key: bytes, text: bytes) -> Claim:
    """Return the claim that `key` holds as `text`.

    Raises:
        FscoordError: it is none.
    """
    try:
        session, owner, _ = words_in(text, " ", 3)
        return Claim(text, parse_uint63(session), owner)
    except MalformedText as error:
        raise foreign(key, text, "claim on an item") from error
