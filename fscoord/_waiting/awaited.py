"""`Awaited`: what a wait is for, in words that a person understands, for the tools that show who waits for what."""

from __future__ import annotations

from typing import Final, NamedTuple

BARRIER: Final = "barrier"
EXCHANGE: Final = "exchange"
KEY: Final = "key"
LATCH: Final = "latch"
LEADER: Final = "a leader of"
LOCK: Final = "lock"
MEMBERS: Final = "a change of the group"
OFFICE: Final = "office"
QUEUE: Final = "queue"
RENDEZVOUS: Final = "rendezvous"
SEMAPHORE: Final = "semaphore"
WORK: Final = "work"


class Awaited(NamedTuple):
    """What a wait is for. Its text is `kind` and the quoted `name`, such as ``barrier 'epoch 7'``.

    Attributes:
        kind: the kind of thing, as a noun that stands before a name: one of the constants of this module.
        name: the name that the caller gave to the thing.
        size: how many ranks or nodes must come; 0 if that is unknown, or does not apply.
    """

    kind: str
    name: str
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"
