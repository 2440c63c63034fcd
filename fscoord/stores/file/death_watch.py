"""`DeathWatch` watches the sessions that a wait depends on. The death of one of them ends the wait."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

from fscoord._log.files.spill import Fetch
from fscoord._log.handle import NeedsLock
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import Log
from fscoord._log.shared.node_poller import SEEMS_DEAD, PollerElection
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._waiting.wait import NOT_YET, NeededRanks, NotYet
from fscoord.stores.file.notifier import ChangeNotifier
from fscoord.stores.file.replay import KeyValueState

BEGIN_S: Final = 0.004
"""How long a wait lasts before it first checks the sessions, in seconds. Most waits end before this check."""

DEATH_POLL_S: Final = 0.05
"""The interval, in seconds, between checks of a session if the kernel does not watch the session's process."""

PROBE_S: Final = 0.5
"""The interval, in seconds, between checks of a session if the kernel watches the session's process.

The kernel reports only the end of the process. The checks detect a process that has closed its handle and continues to
run.
"""

OWN_PROBE_S: Final = 1.0
"""The interval, in seconds, between a waiter's own probes of a session on a mount that several hosts share."""

STALE_S: Final = 2.0
"""How long the poller's result for a session may stay the same, in seconds. Then the waiter itself probes the session.

The waiter adds twice the duration of one round of the poller to this time. The poller is the process that probes the
sessions for all waiters of a host; see `DeathWatch`.
"""

ANSWERS: Final = {True: "yes", False: "no", None: "unknown"}
"""The value of `Member.alive` for each result of a probe."""


class Needs(Protocol):
    """The ranks or sessions that a wait needs. The wait ends if one of these dies."""

    def update(self) -> bool:
        """Update the set of needed ranks or sessions.

        Return False if no rank or session is needed any more, so that the wait is over.
        """

    def dead(self) -> list[int]:
        """Return the needed ranks or sessions that are recorded as dead."""

    def undead(self) -> list[int]:
        """Return the needed sessions that are not recorded as dead."""

    def includes(self, number: int) -> bool:
        """Return whether session `number` is needed. The caller holds the log's lock and has read the whole log."""


class SessionNeeds:
    """Implements `Needs` for a wait that needs the sessions `numbers`."""

    def __init__(self, log: Log, numbers: list[int]) -> None:
        self._log = log
        self._numbers = numbers

    def update(self) -> bool:
        return True  # every session is needed until the end of the wait

    def dead(self) -> list[int]:
        return self._log.inspect(lambda: self._log.table.dead_sessions(self._numbers))

    def undead(self) -> list[int]:
        return self._log.inspect(lambda: self._log.table.presumed_alive_among(self._numbers))

    def includes(self, number: int) -> bool:  # noqa: ARG002 - see there
        return True


class RankNeeds:
    """Implements `Needs` for a wait that needs `ranks`. A `NeededRanks` reads the needed ranks from the store."""

    def __init__(self, log: Log, state: KeyValueState, ranks: list[int] | NeededRanks) -> None:
        self._log = log
        self._state = state
        self._needed = ranks if isinstance(ranks, NeededRanks) else None
        self._ranks = list(ranks)
        self._text: bytes | None = None

    def update(self) -> bool:
        if self._needed is None:
            return True
        try:
            self._log.inspect(lambda: self._judge(self._log.read_unlocked))
        except NeedsLock:  # a long value can't be read without the log's lock, so the needs are not updated
            pass
        return bool(self._ranks)

    def _judge(self, fetch: Fetch) -> None:
        """Update the needed ranks from the current state. The caller must hold the process mutex."""
        needed = self._needed
        text = None if needed is None else self._state.get(needed.key, fetch)
        if needed is not None and text is not None and text != self._text:
            self._text = text
            self._ranks = needed.judge(text)

    def dead(self) -> list[int]:
        return self._log.inspect(lambda: self._log.table.dead_ranks(self._ranks))

    def undead(self) -> list[int]:
        return self._log.inspect(lambda: self._log.table.presumed_alive(self._ranks))

    def includes(self, number: int) -> bool:
        self._judge(self._log.read_locked)
        return any(number in self._log.table.ranks.get(rank, ()) for rank in self._ranks)


class DeathWatch:
    """Detects the deaths that end one wait.

    The kernel reports the death of a process of this host (pidfd_open(2)). On a local mount, the waiter itself checks
    the other sessions 20 times a second, for example those of other containers.

    On a mount that several hosts share, one process of each host, the poller, probes the sessions for all waiters of
    its host; see `NodeProbes`. This object itself probes a session only in three cases: the session seems dead to the
    poller; there is no poller, or the poller's result is old; or the deadline has come before the poller has probed the
    session.

    Args:
        log: the log of the handle that waits.
        notifier: the notifier that wakes the wait.
        needs: the ranks or sessions whose death ends the wait.
        known_sessions: all sessions that the wait needs, if they are known from the beginning. The end of one of these
            sessions also wakes the waiter. So the waiter may sleep longer if the kernel watches the processes of all
            these sessions.
    """

    def __init__(
        self,
        log: Log,
        notifier: ChangeNotifier,
        needs: Needs,
        *,
        known_sessions: Sequence[int] | None = None,
    ) -> None:
        self._log = log
        self._notifier = notifier
        self._needs = needs
        self._started = self._probed = system.time.monotonic()
        self._watched: set[int] = set()
        self.known_sessions = known_sessions or ()
        self._are_known = known_sessions is not None
        self._are_all_watched = False
        self._asked: list[int] | None = None  # the sessions of the last check; None: no check was made
        self._results: dict[int, tuple[int, float]] = {}  # the poller's last result on each, and when it changed
        self._own_probes: dict[int, float] = {}  # when this object itself last probed each session
        self._turn_s = 0.0

    def max_sleep_s(self) -> float:
        """Return how long the waiter may sleep until the next check, in seconds."""
        return PROBE_S if self._are_known and self._are_all_watched else DEATH_POLL_S

    def find_dead(self, timeout: float) -> list[int] | NotYet:
        """Check the needed sessions, and record detected deaths in the log.

        Returns:
            The dead ranks or sessions. An empty list: the wait needs no rank or session any more. `NOT_YET`: none of
            the needed ranks or sessions is known dead.

        Raises:
            StoreTimeoutError: the log's lock was not free within `timeout` seconds. A death record needs this lock.
        """
        if not self._needs.update():
            return []
        dead = self._needs.dead()
        self._are_all_watched = False
        now = system.time.monotonic()
        if dead or now - self._started < BEGIN_S or self._log.read_only:
            return dead or NOT_YET
        watched: list[int] = []
        others: list[int] = []
        for number in self._needs.undead():
            (watched if self._is_watched(number) else others).append(number)
        home = ProcessIdentity.find() if others else None
        if self._log.shared is not None:
            if timeout > 0 and self._notifier._watcher is None:  # the first look may find the key without a check
                return NOT_YET
            for number in others:
                self._watch(number, home)
            return self._record(
                [n for n in self._due(watched + others, timeout) if self._probes_dead(n, home)], timeout
            )
        fallen = [number for number in others if home is not None and self._seems_dead(number, home)]
        self._are_all_watched = all(map(self._is_watched, others))
        # With known sessions, a waiter wakes rarely, and the end of a session may have woken it.
        if self.known_sessions or now - self._probed > PROBE_S:
            self._probed = now
            fallen += [number for number in watched if self._log.is_alive(number, None) is False]
        return self._record(fallen, timeout)

    def _record(self, fallen: list[int], timeout: float) -> list[int] | NotYet:
        """Record the deaths of the sessions `fallen`, and return the result of `find_dead`."""
        for number in fallen:
            self._log.record_death(number, timeout, partial(self._needs.includes, number))
        return (self._needs.dead() if fallen else []) or NOT_YET

    # -- on a mount that hosts share -------------------------------------------------------------------------------

    def is_check_due(self) -> bool:
        """Renew the waiter's request to the poller, and return whether the waiter must probe a session itself."""
        return self._asked is None or bool(self._due(self._asked, math.inf))

    def _due(self, numbers: list[int], timeout: float) -> list[int]:
        """Return those of the sessions `numbers` that this waiter must probe itself. The others seem to be alive.

        Args:
            numbers: the needed sessions.
            timeout: the time until the deadline of the wait, in seconds. At the deadline, all sessions for which the
                poller has no result must be probed.
        """
        now = system.time.monotonic()
        results = self._ask(numbers)
        due: list[int] = []
        for number in numbers:
            result = results.get(number, 0)
            seen, since = self._results.get(number, (-1, now))
            if result != seen:
                since = now
                self._results[number] = result, now
                if result & SEEMS_DEAD and not seen & SEEMS_DEAD:
                    self._own_probes.pop(number, None)  # the last own probe found the session alive: probe it again
            is_stale = now - since > STALE_S + 2 * self._turn_s or not results or (not result and timeout <= 0)
            is_late = now - self._own_probes.get(number, -math.inf) >= OWN_PROBE_S
            if is_late and (is_stale or result & SEEMS_DEAD):
                due.append(number)
        return due

    def _ask(self, numbers: list[int]) -> dict[int, int]:
        """Ask the poller to probe the sessions `numbers`. Return the poller's results so far; {} without a poller."""
        self._asked = numbers
        watcher = self._notifier._watcher
        election = None if watcher is None else watcher.election
        if not isinstance(election, PollerElection) or not numbers:
            return {}
        try:
            results, self._turn_s = election.probes.ask(numbers)
        except OSError as error:  # the next use of the bell by the waiter raises the same error
            raise_if_foreign(error)
            return {}
        return results

    def _probes_dead(self, number: int, home: ProcessIdentity | None) -> bool:
        """Probe session `number`. Return whether it seems dead."""
        self._own_probes[number] = system.time.monotonic()
        return self._log.is_alive(number, home) is False

    # -- everywhere ------------------------------------------------------------------------------------------------

    def _seems_dead(self, number: int, home: ProcessIdentity) -> bool:
        """Return whether session `number` seems dead. Also make the kernel watch its process, if possible."""
        self._watch(number, home)
        return self._log.is_alive(number, home) is False

    def _is_watched(self, number: int) -> bool:
        """Return whether the kernel watches the process of session `number`, so that its death ends the sleep."""
        # After a compaction, which another thread may have read, the table has no dead sessions.
        session, watcher = self._log.table.sessions.get(number), self._notifier._watcher
        if session is None or watcher is None or number not in self._watched:
            return False
        return watcher.watches(session.pid)

    def _watch(self, number: int, home: ProcessIdentity | None) -> None:
        session, watcher = self._log.table.sessions.get(number), self._notifier._watcher
        if home is None or session is None or number in self._watched or not home.shares_processes_with(session):
            return
        is_watched = watcher is not None and watcher.watch_process(session.pid)
        # Compare the process only now, when it is watched: the session's process may have died, and its id been reused.
        if is_watched and home.is_same_process(session):
            self._watched.add(number)
