"""`Vigil`: watch over ranks during a wait, so that a death ends it at once and a life costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.log import Log
from fscoord._runtime import system
from fscoord.stores.file.notifier import Waiting

__all__ = ["Vigil"]

BEGIN_S: Final = 0.004
"""How long a wait lasts before it looks after the others: most end sooner, and cost nothing more."""

LOOK_S: Final = 0.05
"""How often those are looked after whose processes are not watched."""

PROBE_S: Final = 0.5
"""How often even those are probed whose processes are watched: a handle may be closed, and its process live on."""


class Vigil:
    """One wait's watch over some sessions.

    The kernel tells of the death of a process of this host (pidfd_open(2)). The others, on other hosts or in other
    containers, are asked for at each look, which a waiter takes 20 times a second.

    Args:
        log: the handle that waits.
        waiting: how it sleeps.
        dead: returns who of those that are needed is recorded as dead, in the words of whoever waits.
        undead: returns the sessions that stand for the others.
        ends: all sessions that are watched over, if they are known from the beginning: then a waiter may sleep for
            longer, as long as the kernel would tell of each of their deaths, and the bell of their ends.
    """

    def __init__(
        self,
        log: Log,
        waiting: Waiting,
        dead: Callable[[], list[int]],
        undead: Callable[[], list[int]],
        *,
        ends: Sequence[int] | None = None,
    ) -> None:
        self._log = log
        self._waiting = waiting
        self._dead = dead
        self._undead = undead
        self._started = self._probed = system.time.monotonic()
        self._watched: set[int] = set()
        self.ends = ends or ()
        self._is_calm = ends is not None
        self._is_told = False

    def pace(self) -> float:
        """Return for how many seconds a waiter may sleep at most."""
        return PROBE_S if self._is_calm and self._is_told else LOOK_S

    def dead(self, limit: float) -> list[int]:
        """Return those that are recorded as dead, after recording the deaths that show.

        Raises:
            StoreTimeoutError: the log's lock, to record one, did not come within `limit` seconds.
        """
        dead = self._dead()
        self._is_told = False
        now = system.time.monotonic()
        if dead or now - self._started < BEGIN_S or self._log.read_only:
            return dead
        watched: list[int] = []
        others: list[int] = []
        for number in self._undead():
            (watched if self._is_watched(number) else others).append(number)
        home = ProcessIdentity.find() if others else None
        fallen = [number for number in others if home is not None and self._seems_dead(number, home)]
        self._is_told = all(map(self._is_watched, others))
        if self.ends or now - self._probed > PROBE_S:  # a ring may have come for one of the ends; looks are rare then
            self._probed = now
            fallen += [number for number in watched if self._log.is_alive(number, None) is False]
        for number in fallen:
            self._log.record_death(number, limit)
        return self._dead() if fallen else []

    def _seems_dead(self, number: int, home: ProcessIdentity) -> bool:
        """Return whether the session seems dead; if not, watch its process where that can be done."""
        self._watch(number, home)
        return self._log.is_alive(number, home) is False

    def _is_watched(self, number: int) -> bool:
        """Return whether the death of this session's process would end the sleep."""
        session = self._log.sessions.get(number)  # None: it is dead, and another thread followed a compaction meanwhile
        return number in self._watched and session is not None and self._waiting.watches(session.pid)

    def _watch(self, number: int, home: ProcessIdentity) -> None:
        session = self._log.sessions.get(number)
        if session is None or number in self._watched or not home.shares_processes_with(session):
            return
        is_watched = self._waiting.watch_process(session.pid)
        if is_watched and home.is_same_process(session):  # in this order: it may die meanwhile
            self._watched.add(number)
