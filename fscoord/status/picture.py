"""`Picture`: the states, holds and waits of all participants of a store at one moment, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fscoord._waiting.awaited import ShownWait
from fscoord._waiting.rounds import RoundState
from fscoord.recipes.holdings import LineState


class SessionStatus(NamedTuple):
    """One session of the store.

    Attributes:
        number: the number of the session.
        rank: the rank that it announced last, or None.
        label: the label with which its handle was opened, or ``""``.
        host, pid: its process.
        since: when it registered, in seconds since the epoch.
        alive: ``"yes"``, ``"no"`` or ``"unknown"``.
        found_dead: when its death was recorded, in seconds since the epoch; None if no death was recorded.
        is_stopped: whether its process is stopped, as by SIGSTOP; False if this host can't tell.
        idle: the seconds since its last write; None if the log does not have that time any more.
        waiting: its longest wait, or None.
        holds: its holds, in words such as ``lock 'dataset'``.
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
        """The words that name the participant in a sentence: its rank, or else its label, or its process."""
        if self.rank is not None:
            return f"rank {self.rank}"
        return f"{self.label!r} ({self.host}:{self.pid})" if self.label else f"{self.host}:{self.pid}"


class LogLock(NamedTuple):
    """The lock of the store's log, held at the moment of the picture.

    Attributes:
        session: the session that holds it; None or 0 if that is unknown.
        holder: its process, ``host:pid``, or other words for it.
        seconds: how long the same holder was seen to hold the lock without writing.
    """

    session: int | None
    holder: str
    seconds: float


class Picture(NamedTuple):
    """The states, holds and waits of all participants of a store at one moment.

    Attributes:
        place: the address of the store.
        participants: the sessions, in the order of their numbers.
        ranks: the sessions that have announced each rank, in the order of their numbers.
        lines: the locks, semaphores and elections that have a contender.
        rounds: the barriers that have begun and are not complete.
        log_lock: the holder of the log's lock, or None.
        notes: what else a person should know, such as facts that could not be determined, one sentence each.
    """

    place: str
    participants: tuple[SessionStatus, ...]
    ranks: Mapping[int, tuple[int, ...]]
    lines: tuple[LineState, ...] = ()
    rounds: tuple[RoundState, ...] = ()
    log_lock: LogLock | None = None
    notes: tuple[str, ...] = ()
