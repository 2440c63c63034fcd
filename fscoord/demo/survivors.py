"""`Survivors`: a store as some of its ranks see it, who count themselves from 0 and have keys of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fscoord._arguments import Key, Timeout
from fscoord.store import Member, Store
from fscoord.stores.prefix import PrefixStore

__all__ = ["Survivors"]


class Survivors(PrefixStore):
    """A view in which rank i is rank ``ranks[i]`` of `store`, so that they can meet at barriers without the others.

    Args:
        ranks: who is left, in order. Others see other keys, so only those meet who agree about it.
        store: the underlying store, which knows them by the ranks that they had at first.
    """

    def __init__(self, ranks: Sequence[int], store: Store) -> None:
        super().__init__(f"survivors/{','.join(map(str, ranks))}", store)
        self._ranks = tuple(ranks)

    def announce_rank(self, rank: int) -> None:
        """Say to be the rank of the underlying store that `rank` is here."""
        super().announce_rank(self._ranks[rank])

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that are known dead."""
        return self._own(super().dead_ranks(self._theirs(ranks)))

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Wait for `keys`, or until some of `ranks` are known dead, and return those."""
        return self._own(super().wait_alive(keys, self._theirs(ranks), timeout))

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:
        """Return the sessions of `ranks`, or of all who are left."""
        theirs = self._ranks if ranks is None else self._theirs(ranks)
        return [
            member if member.rank is None else member._replace(rank=self._ranks.index(member.rank))
            for member in super().members(theirs)
        ]

    def _theirs(self, ranks: Iterable[int]) -> list[int]:
        return [self._ranks[rank] for rank in ranks]

    def _own(self, ranks: Iterable[int]) -> list[int]:
        return [self._ranks.index(rank) for rank in ranks]
