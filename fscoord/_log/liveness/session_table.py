"""`SessionTable`: the sessions that a log has recorded, their ranks and deaths, and how many participants have left.

It holds what the records say, and does no I/O. The process mutex of the log guards it.
"""

from __future__ import annotations

from collections.abc import Iterable

from fscoord._log.format.control_records import Session

__all__ = ["SessionTable"]


class SessionTable:
    """The sessions of one log, as one handle has read them.

    Args:
        participants: the life of the log is over when so many have left; 0 for never.

    Attributes:
        sessions: the sessions, by number.
        ranks: by rank, the sessions that were registered with it.
        deaths: when (wall time in ns) a session was found dead, by its number.
        left: how many participants have left for good.
    """

    def __init__(self, participants: int) -> None:
        self.sessions: dict[int, Session] = {}
        self.ranks: dict[int, set[int]] = {}
        self.deaths: dict[int, int] = {}
        self.left = 0
        self.last = 0
        self.is_ended = False
        self.participants = participants

    @property
    def is_finished(self) -> bool:
        """Whether all participants have left, so that this life of the log is over."""
        return self.is_ended or 0 < self.participants <= self.left

    def reset(self) -> None:
        """Forget every record: they come again from the first."""
        self.sessions.clear()
        self.ranks.clear()
        self.deaths.clear()
        self.last = self.left = 0
        self.is_ended = False

    # -- records ---------------------------------------------------------------------------------------------------

    def add(self, number: int, session: Session) -> None:
        """Apply a session record: a new session, or more of a known one, whose earlier ranks stay valid."""
        known = self.sessions.get(number)
        if known is not None:
            session = session._replace(since_ns=known.since_ns)
        self.sessions[number] = session
        self.last = max(self.last, number)
        if session.rank is not None:
            self.ranks.setdefault(session.rank, set()).add(number)

    def add_death(self, number: int, time_ns: int) -> None:
        """Apply a death record. The first one counts, and all handles that read it agree on the death."""
        self.deaths.setdefault(number, time_ns)

    # -- what a snapshot keeps -------------------------------------------------------------------------------------

    def remembered(self) -> list[tuple[int, Session]]:
        """Return the sessions that a snapshot keeps, by number: the living, and of a rank's dead the last.

        The last number is always among them, so that no number is given twice. A session that is missing was dead: see
        `dead_sessions`.
        """
        ranked = {max(numbers) for numbers in self.ranks.values()}
        return [
            (number, session)
            for number, session in sorted(self.sessions.items())
            if number in ranked or number == self.last or number not in self.deaths
        ]

    def forget_dead(self) -> None:
        """Forget the sessions that the snapshot of the next generation leaves out: memory must not grow with deaths."""
        remembered = dict(self.remembered())
        self.sessions = remembered
        self.deaths = {number: when for number, when in self.deaths.items() if number in remembered}
        self.ranks = {rank: numbers & remembered.keys() for rank, numbers in self.ranks.items()}

    # -- questions -------------------------------------------------------------------------------------------------

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have sessions, all of which are recorded as dead."""
        deaths, known = self.deaths, self.ranks
        return [rank for rank in ranks if rank in known and all(number in deaths for number in known[rank])]

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the sessions `numbers` that are recorded as dead, or were, and are forgotten since."""
        known, last = self.sessions, self.last
        return [n for n in numbers if n in self.deaths or (n not in known and 0 < n <= last)]

    def presumed_alive(self, ranks: Iterable[int] | None) -> list[int]:
        """Return the sessions of `ranks`, or all, without those that are recorded as dead."""
        some = self.sessions if ranks is None else [n for rank in ranks for n in self.ranks.get(rank, ())]
        return sorted(set(some) - self.deaths.keys())

    def presumed_alive_among(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the sessions `numbers` that are known, and not recorded as dead."""
        return sorted((self.sessions.keys() & set(numbers)) - self.deaths.keys())
