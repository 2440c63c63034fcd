"""`Liveness`: the part of the store contract that says who has a store open and who of them lives, and `Member`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from fscoord._runtime import system
from fscoord.arguments import Key, Timeout, keys_bytes, seconds
from fscoord.errors import StoreTimeoutError

__all__ = ["Liveness", "Member"]

LOOK_S: Final = 0.02
"""How often a wait asks who is dead, on a store that is not told of deaths."""


class Member(NamedTuple):
    """One session of a store: a handle that somebody has, or had, open.

    Attributes:
        number: its number; each is given once.
        host: the name of its host.
        pid: its process.
        rank: the last rank that it said it is, or None.
        label: what it was opened with, or the empty text.
        since: when it registered, in seconds since the epoch by its own clock; for people only.
        alive: ``"yes"``, ``"no"`` (its process is gone, or it was closed) or ``"unknown"``.
        found_dead: when its death was recorded, in seconds since the epoch by the finder's clock, or None.
    """

    number: int
    host: str
    pid: int
    rank: int | None
    label: str
    since: float
    alive: str
    found_dead: float | None = None


class Liveness(ABC):
    """What a store knows of those who have it open. As it stands here: nothing."""

    _timeout: float

    @property
    def has_liveness(self) -> bool:
        """Whether this store can tell the living from the dead. If not, nobody is ever called dead."""
        return False

    def register(self) -> int:
        """Register this handle as a session, unless it is one already, and return the session's number.

        That number is the handle's among `members`. Where sessions are kept, the first call writes to the store. On a
        store that keeps no sessions the number is 0.

        Raises:
            StoreError: the handle can't write, because it is read-only.
            SessionDeadError: the store says that this handle's session is dead.
        """
        return 0

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:  # noqa: ARG002 - see `has_liveness`
        """Return who has, or had, this store open, in the order of their numbers; empty where that is not kept.

        It registers this handle and records the deaths that it finds, unless the handle is read-only.

        Args:
            ranks: ask only for those who said to be one of these ranks.
        """
        return []

    def announce_rank(self, rank: int) -> None:  # noqa: B027 - nothing to do is an answer
        """Record that this handle is rank `rank`. A handle may be several ranks, and several handles one rank."""

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:  # noqa: ARG002 - see `has_liveness`
        """Return those of `ranks` that are known dead: somebody said to be that rank, and all who did are dead.

        A rank that nobody said to be, or of whom it can't be known, is not among them. The answer is the same for all
        handles: a death is recorded before it is told.
        """
        return []

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:  # noqa: ARG002 - see `has_liveness`
        """Return those of the sessions `numbers` that are known dead, as `dead_ranks` does for ranks."""
        return []

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Wait for `keys` as `wait` does, but only as long as all of `ranks` may come.

        Returns:
            The ranks that are known dead, at once, while keys are missing; or nothing when all keys are there.

        Raises:
            StoreTimeoutError: neither happened.
        """
        needed = list(ranks)
        limit = self._timeout if timeout is None else seconds(timeout)
        return self._wait_beside(list(keys_bytes(keys)), limit, lambda: self.dead_ranks(needed))

    def wait_sessions(self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        """Do as `wait_alive`, but for the sessions `numbers`, and return those of them that are known dead."""
        needed = list(numbers)
        limit = self._timeout if timeout is None else seconds(timeout)
        return self._wait_beside(list(keys_bytes(keys)), limit, lambda: self.dead_sessions(needed))

    def _wait_beside(self, names: list[bytes], limit: float, find: Callable[[], list[int]]) -> list[int]:
        """Wait for the keys `names`, or until `find` finds somebody who is dead."""
        if not self.has_liveness:
            self.wait(names, limit)
            return []
        started = system.time.monotonic()
        while True:
            left = limit - (system.time.monotonic() - started)
            try:
                self.wait(names, max(0.0, min(left, LOOK_S)))
                return []
            except StoreTimeoutError:
                dead = find()
                if dead:
                    return dead
                if left <= LOOK_S:
                    raise

    @abstractmethod
    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        """Wait until every one of `keys` is there."""
