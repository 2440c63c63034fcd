"""`BarrierSequence`: how many of a sequence of barriers each rank has passed, kept in the store to outlive a process.

The key ``{prefix}/sequence/{rank}`` holds the number of the barrier that the rank joins next; a missing key means 0. It
is written after the rank has passed and before `execute_barrier` returns, so a restarted rank joins the barrier that it
was in. The barrier itself has the prefix ``{prefix}/{number}``.

torch's ``TCPStoreBarrier`` publishes a sequence number per prefix, too. It keeps the number in the object, so that a
restarted rank begins at 0, and has one number per rank for all prefixes.
"""

from __future__ import annotations

from fscoord._arguments import MalformedText, key_text, parse_uint63
from fscoord.errors import BarrierError
from fscoord.store import Store

__all__ = ["BarrierSequence"]


class BarrierSequence:
    """The sequence of barriers under `prefix`, as `rank` executes it."""

    def __init__(self, store: Store, prefix: bytes, rank: int) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank

    def barrier(self, number: int) -> bytes:
        """Return the prefix of one barrier."""
        return b"%s/%d" % (self._prefix, number)

    def next_of(self, rank: int) -> int:
        """Return the number of the barrier that `rank` joins next.

        Raises:
            BarrierError: the key holds something other than a number.
        """
        key = self._key(rank)
        if not self._store.check([key]):
            return 0
        text = self._store.get(key)
        try:
            return parse_uint63(text)
        except MalformedText as error:
            raise BarrierError(
                f"key {key_text(key)!r} holds {text[:40]!r}, which is not a sequence number: another program wrote"
                " it; give every sequence of barriers a prefix of its own"
            ) from error

    def advance(self, passed: int) -> None:
        """Record that this rank has passed barrier number `passed`.

        Rank 0 also removes the keys of the barrier before that. All ranks have arrived at barrier `passed`, so none
        needs the one before.

        Raises:
            BarrierError: the recorded number is not `passed`: two callers have one rank.
        """
        if self._rank == 0 and passed > 0:
            for name in (b"arrivals", b"complete"):
                self._store.delete_key(self.barrier(passed - 1) + b"/" + name)
        key = self._key(self._rank)
        reached = b"%d" % (passed + 1)
        found = self._store.compare_set(key, b"%d" % passed if passed else b"", reached)
        if found != reached:
            raise BarrierError(
                f"rank {self._rank} passed barrier {passed} of {key_text(self._prefix)!r}, but is at sequence"
                f" {found[:40].decode(errors='replace')}: two callers have one rank"
            )

    def _key(self, rank: int) -> bytes:
        return b"%s/sequence/%d" % (self._prefix, rank)
