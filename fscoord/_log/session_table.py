"""`SessionTable`: the sessions that a log has recorded, their ranks and deaths, and which participants left or failed.

The table applies records, and does no I/O. The process mutex of the log guards it.
"""

from __future__ import annotations

from collections.abc import Iterable

from fscoord._log.format.control_records import Failure, Session


class SessionTable:
    """The sessions of one run of a log, as one handle has read them.

    A *participant* is a session whose handle was opened with ``world_size``. It fails if it leaves by an exception, or
    dies before it has left.

    Attributes:
        sessions: the sessions, by number.
        ranks: the numbers of the sessions that were registered with a rank, by rank.
        deaths: the time of the death record of a session (wall time in ns), by number.
        world_size: the number of participants that the run is to have; 0 if no participant has registered.
        left: the participants that have left in good order.
        failure: the first failure of a participant, or None.
        previous: the failure that ended the run before, or None.
        sealed_by: the session that has sealed the generation that was read; 0 if it is not sealed.
        last: the highest number of a session so far.
        is_ended: whether the last participant has ended the run, by a record that was read.
        keeps_times: whether `times` is kept. Set by the log, if other processes may append the records of its handles.
        times: the latest time of a data record of each session, by number; 0 if a snapshot says that the session has
            none. The session that makes a snapshot is the writer of its data records, whose times are its own.
        has_all_times: whether no session has a later record than `times` says; false after a snapshot without times.
    """

    def __init__(self) -> None:
        self.sessions: dict[int, Session] = {}
        self.ranks: dict[int, set[int]] = {}
        self.deaths: dict[int, int] = {}
        self.world_size = self.sealed_by = 0
        self.left: set[int] = set()
        self.failure: Failure | None = None
        self.previous: Failure | None = None
        self.last = 0
        self.is_ended = False
        self.keeps_times = False
        self.times: dict[int, int] = {}
        self.has_all_times = True

    def reset(self, *, is_first: bool = True) -> None:
        """Discard the state. All records will be applied again, from the first one of a generation.

        Args:
            is_first: whether that is the first record of the log, and not that of a snapshot.
        """
        self.has_all_times = is_first
        self.times.clear()
        self.sessions.clear()
        self.ranks.clear()
        self.deaths.clear()
        self.left.clear()
        self.failure = self.previous = None
        self.last = self.world_size = self.sealed_by = 0
        self.is_ended = False

    # -- records ---------------------------------------------------------------------------------------------------

    def add(self, number: int, session: Session) -> None:
        """Apply a session record. A further record of a known session may add a rank; its earlier ranks stay valid."""
        known = self.sessions.get(number)
        if known is not None:
            session = session._replace(since_ns=known.since_ns)
        self.sessions[number] = session
        self.last = max(self.last, number)
        self.world_size = self.world_size or session.world_size
        if session.replaces in self.sessions:
            self.sessions[session.replaces] = self.sessions[session.replaces]._replace(world_size=0)
        if session.rank is not None:
            self.ranks.setdefault(session.rank, set()).add(number)

    def add_death(self, number: int, time_ns: int) -> None:
        """Apply a death record. The first one counts, so all handles have the same time of death."""
        self.deaths.setdefault(number, time_ns)
        session = self.sessions.get(number)
        if session is not None and session.world_size and number not in self.left:
            self.add_failure(Failure(session, time_ns=time_ns))

    def add_failure(self, failure: Failure) -> None:
        """Apply the record of a failure. The first failure of a run counts."""
        if failure.is_previous:
            self.previous = failure
        else:
            self.failure = self.failure or failure

    def set_last_time(self, number: int, time_ns: int) -> None:
        """Apply a snapshot's record of the time at which session `number` has written last.

        Data records that follow it may have been applied before it; see `Cursor.advance`.
        """
        self.times[number] = max(time_ns, self.times.get(number, 0))
        self.has_all_times = True

    # -- what a snapshot keeps -------------------------------------------------------------------------------------

    def remembered(self) -> list[tuple[int, Session]]:
        """Return the sessions that a snapshot keeps, in order of their numbers.

        These are the sessions without a death record, and the last session of each rank. The session with the highest
        number is always kept, so that no number is assigned twice. A lower number that is missing belongs to a dead
        session (see `dead_sessions`).
        """
        ranked = {max(numbers) for numbers in self.ranks.values()}
        return [
            (number, session)
            for number, session in sorted(self.sessions.items())
            if number in ranked or number == self.last or number not in self.deaths
        ]

    def forget_dead(self) -> None:
        """Forget the sessions that the snapshot of the next generation leaves out, so that memory does not grow."""
        remembered = dict(self.remembered())
        self.sessions = remembered
        self.deaths = {number: when for number, when in self.deaths.items() if number in remembered}
        self.ranks = {rank: numbers & remembered.keys() for rank, numbers in self.ranks.items()}
        self.times = {number: time_ns for number, time_ns in self.times.items() if number in remembered}

    def last_times(self) -> list[tuple[int, int]]:
        """Return the time of the last record of each session that a snapshot keeps; empty unless all times are known.

        From this time the author of a request finds out whether a leader appended its record before the snapshot.
        """
        if not (self.keeps_times and self.has_all_times):
            return []
        return [(number, self.times.get(number, 0)) for number, _ in self.remembered()]

    def failures(self) -> list[Failure]:
        """Return the failures that a snapshot keeps."""
        return [failure for failure in (self.previous, self.failure) if failure is not None]

    # -- questions -------------------------------------------------------------------------------------------------

    def participants(self) -> list[int]:
        """Return the participants that have not left in good order, the dead among them."""
        return [number for number, session in self.sessions.items() if session.world_size and number not in self.left]

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return each of `ranks` that has sessions and whose sessions are all recorded as dead."""
        deaths, known = self.deaths, self.ranks
        return [rank for rank in ranks if rank in known and all(number in deaths for number in known[rank])]

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        """Return each of the sessions `numbers` that is recorded as dead, or that a snapshot has left out since."""
        known, last = self.sessions, self.last
        return [n for n in numbers if n in self.deaths or (n not in known and 0 < n <= last)]

    def presumed_alive(self, ranks: Iterable[int] | None) -> list[int]:
        """Return the sessions of `ranks`, or of all ranks if None, that are not recorded as dead."""
        some = self.sessions if ranks is None else [n for rank in ranks for n in self.ranks.get(rank, ())]
        return sorted(set(some) - self.deaths.keys())

    def presumed_alive_among(self, numbers: Iterable[int]) -> list[int]:
        """Return each of the sessions `numbers` that is known and not recorded as dead."""
        return sorted((self.sessions.keys() & set(numbers)) - self.deaths.keys())
