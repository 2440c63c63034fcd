"""`Roster`: who has introduced themselves in a log, as what, who of them was found dead, and how many have left."""

from __future__ import annotations

from fscoord._log.format.control_records import Session

__all__ = ["Roster"]


class Roster:
    """The part of `~fscoord._log.io.cursor.LogReader` that remembers sessions.

    Attributes:
        sessions: who has introduced themselves, by session number.
        ranks: by rank, the sessions that have said that they are it.
        deaths: when (wall time in ns) a session was found dead, by its number.
        left: how many participants have left for good.
    """

    _is_settled = False
    """Whether this handle is over when the life of the log is that it has joined."""

    def __init__(self, participants: int) -> None:
        self.sessions: dict[int, Session] = {}
        self.ranks: dict[int, set[int]] = {}
        self.deaths: dict[int, int] = {}
        self._last_session = 0
        self._participants = participants
        self.left = 0
        self._is_ended = False

    @property
    def is_finished(self) -> bool:
        """Whether all participants have left, so that this life of the log is over."""
        return self._is_ended or 0 < self._participants <= self.left

    def _forget_sessions(self) -> None:
        self.sessions.clear()
        self.ranks.clear()
        self.deaths.clear()
        self._last_session = self.left = 0
        self._is_ended = False

    def _remembered(self) -> list[tuple[int, Session]]:
        """Return the sessions that matter, by number: each that is not recorded as dead, and of a rank's dead the last.

        The last is always among them, so that no number is given twice. A session that is missing was dead: see
        `~fscoord._log.liveness.presence.Present.dead_sessions`.
        """
        ranked = {max(numbers) for numbers in self.ranks.values()}
        return [
            (number, session)
            for number, session in sorted(self.sessions.items())
            if number in ranked or number == self._last_session or number not in self.deaths
        ]

    def _forget_dead(self) -> None:
        """Forget the sessions that the snapshot of the next generation forgets, or memory grows with each death."""
        remembered = dict(self._remembered())
        self.sessions = remembered
        self.deaths = {number: when for number, when in self.deaths.items() if number in remembered}
        self.ranks = {rank: numbers & remembered.keys() for rank, numbers in self.ranks.items()}

    def _meet(self, number: int, session: Session) -> None:
        """A session introduces itself, or says more of itself: what it said of its rank before stays true."""
        known = self.sessions.get(number)
        if known is not None:
            session = session._replace(since_ns=known.since_ns)
        self.sessions[number] = session
        self._last_session = max(self._last_session, number)
        if session.rank is not None:
            self.ranks.setdefault(session.rank, set()).add(number)

    def _mourn(self, number: int, time_ns: int) -> None:
        """A session was found dead; all who read this agree on it."""
        self.deaths.setdefault(number, time_ns)
