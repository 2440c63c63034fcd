"""`Awaited`, the object for which a caller waits, and `ShownWait`, the description of a wait for other processes."""

from __future__ import annotations

from typing import Final, NamedTuple

BARRIER: Final = "barrier"
CHANGE_OF: Final = "a change of a key that begins with"
CONDITION: Final = "condition"
CYCLIC_BARRIER: Final = "cyclic barrier"
EVENT: Final = "event"
EXCHANGE: Final = "exchange"
KEY: Final = "key"
LATCH: Final = "latch"
LEADER: Final = "a leader of"
LOCK: Final = "lock"
MEMBERS: Final = "a change of the group"
PARTITIONS: Final = "a change of the partitions of"
ELECTION: Final = "election"
QUEUE: Final = "queue"
RATE: Final = "rate limiter"
RENDEZVOUS: Final = "rendezvous"
SEMAPHORE: Final = "semaphore"
WORK: Final = "work"

KEYS_SHOWN: Final = 2
"""How many keys `ShownWait.words` lists. The other keys are only counted."""


class Awaited(NamedTuple):
    """The object for which a caller waits. Its `str` is the kind and the quoted name, such as ``barrier 'epoch 7'``.

    Attributes:
        kind: the kind of the object: one of the constants of this module.
        name: the name that the caller gave to the object.
        size: how many ranks or nodes must arrive; 0 if the number is unknown, or if nothing arrives at this kind of
            object.
    """

    kind: str
    name: str
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


class ShownWait(NamedTuple):
    """The longest wait of one session (one open handle of the store), as the store shows the wait to other processes.

    Attributes:
        kind: the kind of object that the session waits for, such as ``barrier`` or ``lock``. The kind is ``key`` or
            ``queue`` if the program itself waits for a key or a queue.
        name: the name that the caller gave to the object; empty if only the keys are known.
        keys: the first of the missing keys.
        key_count: how many keys are missing in all.
        size: how many ranks must arrive; 0 if unknown.
        seconds: how long the session has waited.
        more: how many other waits the session has.
    """

    kind: str
    name: str
    keys: tuple[str, ...]
    key_count: int
    size: int
    seconds: float
    more: int

    def words(self) -> str:
        """Return a description of the wait, such as ``barrier 'epoch 7'`` or ``keys 'a', 'b' and 3 more``."""
        if self.name or not self.keys:
            return f"{self.kind} {self.name!r}"
        shown = ", ".join(map(repr, self.keys[:KEYS_SHOWN]))
        more = self.key_count - min(len(self.keys), KEYS_SHOWN)
        plural = "s" if self.key_count > 1 and self.kind in (KEY, QUEUE) else ""
        return f"{self.kind}{plural} {shown}" + (f" and {more} more" if more > 0 else "")
