"""`Sessions`: the part of a `~fscoord.FileStore` that answers who else has the store open, and who of them lives."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fscoord._log.alive import Home
from fscoord._log.file import LogFile
from fscoord._log.record import Session
from fscoord.arguments import integer
from fscoord.members import Member
from fscoord.store import Store

__all__ = ["Sessions"]

ANSWERS: Final = {True: "yes", False: "no", None: "unknown"}


class Sessions(Store):
    """A store whose handles are the sessions of a log."""

    _log: LogFile

    @property
    def has_liveness(self) -> bool:
        """Whether `members` can tell who lives: on this platform, with the locks of this log."""
        return self._log.can_tell

    @property
    def session(self) -> int:
        """See `Store.session`. A handle that has not introduced itself does so now, which writes a record."""
        self._log.refresh(self._timeout)
        return self._log.introduce(self._timeout)

    def be_rank(self, rank: int) -> None:
        """See `Store.be_rank`. It writes a record unless the store knows already."""
        if not self._log.read_only:
            self._log.refresh(self._timeout)
            self._log.introduce(self._timeout, integer("rank", rank))

    def members(self) -> list[Member]:
        """See `Store.members`. Deaths that it finds are recorded, unless the handle is read-only."""
        if not self._log.read_only:
            self._log.introduce(self._timeout)
        self._log.refresh(self._timeout)
        self._bury(sorted(self._log.sessions))
        home = Home.find()
        return self._log.inspect(
            lambda: [
                _member(number, session, self._log.lives(number, home), self._log.deaths.get(number, 0))
                for number, session in sorted(self._log.sessions.items())
            ]
        )

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """See `Store.dead_ranks`. Deaths that it finds are recorded, unless the handle is read-only."""
        wanted = [integer("rank", rank) for rank in ranks]
        self._log.refresh(self._timeout)
        self._bury(number for rank in wanted for number in sorted(self._log.ranks.get(rank, ())))
        return self._recorded_dead(wanted)

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        """See `Store.dead_sessions`. Deaths that it finds are recorded, unless the handle is read-only."""
        wanted = [integer("session", number) for number in numbers]
        if wanted:
            self._log.refresh(self._timeout)
            self._bury(number for number in wanted if number in self._log.sessions)
        return [number for number in wanted if number in self._log.deaths]

    def _recorded_dead(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` all of whose sessions are recorded as dead."""
        deaths, known = self._log.deaths, self._log.ranks
        return self._log.inspect(
            lambda: [rank for rank in ranks if rank in known and all(number in deaths for number in known[rank])]
        )

    def _bury(self, numbers: Iterable[int]) -> None:
        """Record the deaths among the sessions `numbers` that show."""
        home = Home.find()
        living = [number for number in numbers if number not in self._log.deaths]
        fallen = self._log.inspect(lambda: [number for number in living if self._log.lives(number, home) is False])
        if not self._log.read_only:
            for number in fallen:
                self._log.bury(number, self._timeout)


def _member(number: int, session: Session, lives: bool | None, found_dead_ns: int) -> Member:
    return Member(
        number=number,
        host=session.host,
        pid=session.pid,
        rank=session.rank,
        label=session.label,
        since=session.since_ns / 1e9,
        alive=ANSWERS[lives],
        found_dead=found_dead_ns / 1e9 if found_dead_ns else None,
    )
