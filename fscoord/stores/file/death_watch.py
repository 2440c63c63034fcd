"""`DeathWatch`, which watches the sessions on which a wait depends. The death of one of them ends the wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import Log
from fscoord._runtime import system
from fscoord.stores.file.notifier import ChangeNotifier

__all__ = ["DeathWatch"]

BEGIN_S: Final = 0.004
"""How long a wait lasts before it checks the sessions, in seconds. Most waits end sooner, without a check."""

DEATH_POLL_S: Final = 0.05
"""The interval in seconds at which sessions are checked whose processes the kernel does not watch."""

PROBE_S: Final = 0.5
"""The interval in seconds at which sessions are checked whose processes the kernel watches. Without these checks, a
process that closes its handle and continues would not be detected."""


class DeathWatch:
    """The death watch of one wait.

    The kernel reports the death of a process of this host (pidfd_open(2)). The sessions of processes on other hosts or
    in other containers are checked at each look. For such sessions the waiter looks 20 times a second.

    Args:
        log: the log of the handle that waits.
        notifier: the notifier that wakes the wait.
        dead: returns the ranks, or sessions, that the wait needs and that are recorded as dead.
        undead: returns the sessions that the wait needs and that are not recorded as dead.
        known_sessions: all sessions that the wait needs, if they are known from the beginning. Then the waiter may
            sleep for longer, provided that the kernel reports the death of each process. The bell reports the end of
            each session.
    """

    def __init__(
        self,
        log: Log,
        notifier: ChangeNotifier,
        dead: Callable[[], list[int]],
        undead: Callable[[], list[int]],
        *,
        known_sessions: Sequence[int] | None = None,
    ) -> None:
        self._log = log
        self._notifier = notifier
        self._dead = dead
        self._undead = undead
        self._started = self._probed = system.time.monotonic()
        self._watched: set[int] = set()
        self.known_sessions = known_sessions or ()
        self._are_known = known_sessions is not None
        self._are_all_watched = False

    def max_sleep_s(self) -> float:
        """Return the longest time in seconds for which the waiter may sleep."""
        return PROBE_S if self._are_known and self._are_all_watched else DEATH_POLL_S

    def find_dead(self, timeout: float) -> list[int]:
        """Check the sessions, record the deaths that are found, and return the ranks or sessions that are dead.

        Raises:
            StoreTimeoutError: the log's lock was not free within `timeout` seconds. A death record needs this lock.
        """
        dead = self._dead()
        self._are_all_watched = False
        now = system.time.monotonic()
        if dead or now - self._started < BEGIN_S or self._log.read_only:
            return dead
        watched: list[int] = []
        others: list[int] = []
        for number in self._undead():
            (watched if self._is_watched(number) else others).append(number)
        home = ProcessIdentity.find() if others else None
        fallen = [number for number in others if home is not None and self._seems_dead(number, home)]
        self._are_all_watched = all(map(self._is_watched, others))
        # With known sessions looks are rare, and each look may have its cause in the end of a session.
        if self.known_sessions or now - self._probed > PROBE_S:
            self._probed = now
            fallen += [number for number in watched if self._log.is_alive(number, None) is False]
        for number in fallen:
            self._log.record_death(number, timeout)
        return self._dead() if fallen else []

    def _seems_dead(self, number: int, home: ProcessIdentity) -> bool:
        """Return whether session `number` seems dead. If it does not, watch its process, where the kernel can do so."""
        self._watch(number, home)
        return self._log.is_alive(number, home) is False

    def _is_watched(self, number: int) -> bool:
        """Return whether the death of the process of session `number` would end the sleep."""
        # A dead session is missing if another thread has followed a compaction meanwhile.
        session = self._log.sessions.get(number)
        return number in self._watched and session is not None and self._notifier.watches(session.pid)

    def _watch(self, number: int, home: ProcessIdentity) -> None:
        session = self._log.sessions.get(number)
        if session is None or number in self._watched or not home.shares_processes_with(session):
            return
        is_watched = self._notifier.watch_process(session.pid)
        # Only now check that the process is that of the session: it may have died, and another may have its number.
        if is_watched and home.is_same_process(session):
            self._watched.add(number)
