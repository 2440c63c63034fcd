"""`Picture`: a snapshot of a store's participants, what they hold and what they wait for, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fscoord._waiting.awaited import ShownWait
from fscoord._waiting.rounds import RoundState
from fscoord.recipes.holdings import LineState


class SessionStatus(NamedTuple):
    """A participant of the store: one open handle, with its session.

    Attributes:
        number: the number of the session.
        rank: the rank that the session announced last, or None.
        label: the label with which the handle was opened, or ``""``.
        host: the host of the process.
        pid: the id of the process.
        since: when the session registered, in seconds since the epoch.
        alive: ``"yes"``, ``"no"`` or ``"unknown"``.
        found_dead: when the death was recorded, in seconds since the epoch; None if no death was recorded.
        is_stopped: whether the process is stopped, for example by SIGSTOP; False if this host can't tell.
        idle: the seconds since the last write of the session; None if the log no longer has the time of this write.
        waiting: the longest of the present waits of the session; None if the session does not wait.
        holds: what the session holds, as texts such as ``lock 'dataset'``.
    """

    number: int
    rank: int | None
    label: str
    host: str
    pid: int
    since: float
    alive: str
    found_dead: float | None = None
    is_stopped: bool = False
    idle: float | None = None
    waiting: ShownWait | None = None
    holds: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The name of the participant in messages: its rank, or else its label and process, or else its process."""
        if self.rank is not None:
            return f"rank {self.rank}"
        return f"{self.label!r} ({self.host}:{self.pid})" if self.label else f"{self.host}:{self.pid}"


class LogLock(NamedTuple):
    """The holder of the lock of the store's log.

    Attributes:
        session: the session that holds the lock; None or 0 if it is unknown.
        holder: the process that holds the lock, as ``host:pid`` or another description.
        seconds: how long the holder was seen to hold the lock without writing.
    """

    session: int | None
    holder: str
    seconds: float


class Picture(NamedTuple):
    """A snapshot of all participants of a store, what they hold and what they wait for.

    Attributes:
        place: the address of the store.
        participants: the sessions, in the order of their numbers.
        ranks: for each rank, the sessions that have announced the rank, in the order of their numbers.
        lines: the locks, semaphores and elections that have a holder or a waiter.
        rounds: the barriers that have begun and are not complete.
        log_lock: the holder of the log's lock, or None.
        notes: further sentences for the user, for example about facts that could not be determined.
    """

    place: str
    participants: tuple[SessionStatus, ...]
    ranks: Mapping[int, tuple[int, ...]]
    lines: tuple[LineState, ...] = ()
    rounds: tuple[RoundState, ...] = ()
    log_lock: LogLock | None = None
    notes: tuple[str, ...] = ()
