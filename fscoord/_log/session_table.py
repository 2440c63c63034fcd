"""`SessionTable`: the sessions that a log has recorded, their ranks and deaths, and which participants left or failed.

The table does no I/O: the cursor passes it the records. The process mutex of the log guards it.
"""

from __future__ import annotations

from collections.abc import Iterable

from fscoord._log.format.control_records import Failure, Session


class SessionTable:
    """The sessions of one run of a log, as one handle has read them.

    A *participant* is a session whose handle was opened with ``world_size``. A participant fails if it leaves by an
    exception, or dies before it has left.

    Attributes:
        sessions: the sessions, by number.
        ranks: {rank: numbers of the sessions that have registered it}.
        deaths: {session number: wall time of its death record in nanoseconds}.
        world_size: how many participants the run needs; 0 if no participant has registered.
        left: the numbers of the participants that have left in good order.
        failure: the first failure of a participant, or None.
        previous: the failure that ended the previous run, or None.
        sealed_by: the number of the session that has sealed the generation that was read; 0 if it is not sealed.
        last: the highest session number so far.
        is_ended: whether a record that ends the run was read.
        keeps_times: whether `times` is kept. The log sets ``keeps_times`` if its writes are combined: then one process
            may append the records of another process.
        times: {session number: time of its latest data record}; 0 if a snapshot says that the session has none. The
            data records of a snapshot count as written by the session that made the snapshot.
        has_all_times: whether `times` covers all records. False after a snapshot without times.
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
        """Discard the state. All records will be applied again, from the first record of a generation.

        Args:
            is_first: whether that generation is the first of the log. Every other generation begins with a snapshot.
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
        """Apply a session record. A session that announces a rank later has a second record, which adds the rank."""
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
        """Apply a death record. Later records of the same death are ignored, so all handles agree on its time."""
        self.deaths.setdefault(number, time_ns)
        session = self.sessions.get(number)
        if session is not None and session.world_size and number not in self.left:
            self.add_failure(Failure(session, time_ns=time_ns))

    def add_failure(self, failure: Failure) -> None:
        """Apply the record of a failure. Only the first failure of a run is kept."""
        if failure.is_previous:
            self.previous = failure
        else:
            self.failure = self.failure or failure

    def set_last_time(self, number: int, time_ns: int) -> None:
        """Apply a LAST_TIME record of a snapshot: `time_ns` is the time of the last data record of session `number`.

        The table keeps the later time, because the cursor may already have applied data records after the snapshot.
        """
        self.times[number] = max(time_ns, self.times.get(number, 0))
        self.has_all_times = True

    # -- what a snapshot keeps -------------------------------------------------------------------------------------

    def remembered(self) -> list[tuple[int, Session]]:
        """Return the sessions that a snapshot keeps, in order of their numbers.

        A snapshot keeps each session without a death record, and the last session of each rank. It also keeps the
        session with the highest number, so that no number is assigned twice. A lower number that is missing belongs to
        a dead session (see `dead_sessions`).
        """
        ranked = {max(numbers) for numbers in self.ranks.values()}
        return [
            (number, session)
            for number, session in sorted(self.sessions.items())
            if number in ranked or number == self.last or number not in self.deaths
        ]

    def forget_dead(self) -> None:
        """Remove the sessions that the snapshot of the next generation leaves out. This bounds the memory."""
        remembered = dict(self.remembered())
        self.sessions = remembered
        self.deaths = {number: when for number, when in self.deaths.items() if number in remembered}
        self.ranks = {rank: numbers & remembered.keys() for rank, numbers in self.ranks.items()}
        self.times = {number: time_ns for number, time_ns in self.times.items() if number in remembered}

    def last_times(self) -> list[tuple[int, int]]:
        """Return (number, time of its last data record) for each session in a snapshot; empty if times are not known.

        With combined writes, one session (the leader) appends the records of other sessions. A session compares its
        time in the snapshot with the time of its request, to learn whether the leader had appended the record of the
        request before the snapshot.
        """
        if not (self.keeps_times and self.has_all_times):
            return []
        return [(number, self.times.get(number, 0)) for number, _ in self.remembered()]

    def failures(self) -> list[Failure]:
        """Return the failures that a snapshot keeps."""
        return [failure for failure in (self.previous, self.failure) if failure is not None]

    # -- questions -------------------------------------------------------------------------------------------------

    def participants(self) -> list[int]:
        """Return the numbers of the participants that have not left in good order. The dead are included."""
        return [number for number, session in self.sessions.items() if session.world_size and number not in self.left]

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have sessions, and whose sessions are all recorded as dead."""
        deaths, known = self.deaths, self.ranks
        return [rank for rank in ranks if rank in known and all(number in deaths for number in known[rank])]

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the sessions `numbers` that are recorded as dead, or that a snapshot has left out."""
        known, last = self.sessions, self.last
        return [n for n in numbers if n in self.deaths or (n not in known and 0 < n <= last)]

    def presumed_alive(self, ranks: Iterable[int] | None) -> list[int]:
        """Return the sessions of `ranks` (None: all sessions) that are not recorded as dead."""
        some = self.sessions if ranks is None else [n for rank in ranks for n in self.ranks.get(rank, ())]
        return sorted(set(some) - self.deaths.keys())

    def presumed_alive_among(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the sessions `numbers` that are known and not recorded as dead."""
        return sorted((self.sessions.keys() & set(numbers)) - self.deaths.keys())
