"""`Presence`: the part of a handle that says who it is, holds its liveness byte, and knows who else lives.

A death is a record, appended with the lock after another probe, so that all agree on it: an unlocked byte may also be
that of a host which was cut off, and comes back. Whoever reads of its own death stops.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, NoReturn

from fscoord._log.consumer import Consumer
from fscoord._log.format import record
from fscoord._log.format.control_records import Session, encode_death
from fscoord._log.generations.follower import Successive
from fscoord._log.io import safe_files
from fscoord._log.liveness.liveness_file import LivenessFile, ProcessIdentity, open_liveness_file
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign
from fscoord._runtime.logger import logger
from fscoord.errors import FscoordError, LimitExceededError, StoreGoneError

__all__ = ["Presence"]

BYTE_TRIES: Final = 64
"""How many bytes of the liveness file are tried for a new session, before it goes on without one."""

CHECK_S: Final = 1.0
"""How old the last look at one's own byte, and at the name of the liveness file, may be."""


class Presence(Successive):
    """What `~fscoord._log.log.LogFile` knows of sessions.

    Args:
        introduce: returns who this handle is, when it first writes.
    """

    refresh: Callable[[float], None]
    update: Callable[..., Any]
    _append: Callable[..., None]

    def __init__(self, path: str, consumer: Consumer, participants: int, introduce: Callable[[], Session]) -> None:
        super().__init__(path, consumer, participants)
        self._introduce_as = introduce
        self._rank: int | None = None
        self._alive: LivenessFile | None = None
        self._alive_checked = 0.0
        self._alive_warned = False
        self._alive_descriptors = system.Descriptors()
        weakref.finalize(self, system.close_all, system.os.close, self._alive_descriptors).atexit = False

    @property
    def session(self) -> int:
        """The number of this handle's session, 0 if it has not introduced itself."""
        return self._lock.session

    @property
    def settled_session(self) -> int:
        """The same, for who does nothing else: 0 also if the next operation must first mend something, or says no."""
        return 0 if self._trouble or not system.own_process[0] else self._lock.session

    @property
    def can_tell(self) -> bool:
        """Whether there are bytes that tell who lives."""
        return system.has_ofd_locks() and not system.is_faked() and not self._wanted.is_soft

    # -- who this handle is ----------------------------------------------------------------------------------------

    def introduce(self, limit: float, rank: int | None = None) -> int:
        """Have this handle be a session, of `rank` if that is given; return its number. Errors as in `update`."""
        if rank is not None:
            self._rank = rank
        number = self._lock.session
        if number and (rank is None or number in self.ranks.get(rank, ())):
            return number

        def decide(_: bytes, __: bytes) -> tuple[None, int, bytes]:
            known = self.sessions.get(self._lock.session)
            return None, record.SESSION, b"" if known is None else known._replace(rank=rank).encode()

        self.update(record.SESSION, b"", b"", decide, limit)
        return self._lock.session

    def _introduce(self) -> int:
        """With the lock: say who writes; from now on the length of the lock's range names this handle."""
        who = self._introduce_as()
        if self._rank is not None:
            who = who._replace(rank=self._rank)
        number = self._take_byte()
        if number > record.WRITER_MAX:
            raise LimitExceededError(
                f"{self.path}: all numbers for sessions are used up; begin another log, or another run", path=self.path
            )
        alive_id = bytes(16) if self._alive is None else self._alive.id
        self._append(record.SESSION, b"", who._replace(alive_id=alive_id).encode(), number)
        self._lock.bind(self._lock.fd, number)
        return number

    def _take_byte(self) -> int:
        """Return the first number that was never used whose byte is free, and hold that byte, if there are bytes."""
        number = self._last_session + 1
        self._alive_checked = system.time.monotonic()
        try:
            alive = self._open_alive(create=True)
            tries = 1
            while alive is not None and not alive.hold(number):
                # The caller holds the log's lock. A process that locks all bytes must not keep the others waiting.
                if tries == BYTE_TRIES:
                    raise OSError(
                        system.errno.EAGAIN,
                        f"{alive.locker()} locks {tries} bytes of it and more, from {number - tries + 1} on, which no"
                        " session uses; end that process",
                    )
                number, tries = number + 1, tries + 1
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            number = self._last_session + 1
            self._lose_alive()
            if not self._alive_warned:
                self._alive_warned = True
                logger(__name__).warning(
                    "%s.alive can't be used (%s); other processes can't tell whether this one lives",
                    self.path,
                    str(error),
                )
        return number

    def _open_alive(self, *, create: bool) -> LivenessFile | None:
        if self._alive is None and self.can_tell:
            self._lose_alive()  # an interruption may have come between opening and use
            mode, read_only = self._wanted.mode, self._wanted.read_only
            self._alive = open_liveness_file(
                self.path, mode, self._alive_descriptors, create=create, read_only=read_only
            )
        return self._alive

    def _lose_alive(self) -> None:
        self._alive = None
        for fd in list(self._alive_descriptors):
            safe_files.close_owned(fd, self._alive_descriptors)

    def _forget(self) -> None:
        super()._forget()
        self._looked = 0.0  # the next look, when all has been read again, is not to be put off

    def _look(self, now: float) -> None:
        super()._look(now)
        if self._lock.session and self._lock.session not in self.sessions:  # it was dead, and then forgotten
            self._die(self._lock.session)
        self._look_after_byte(now)

    def _look_after_byte(self, now: float) -> None:
        if self._alive is not None and now - self._alive_checked > CHECK_S:
            self._alive_checked = now
            self._check_alive(self._alive)

    def _check_alive(self, alive: LivenessFile) -> None:
        """Hold our byte again, which a lost connection may have cost; if the file is gone, be another session."""
        try:
            keeps = not alive.is_lost() and (not alive.number or alive.hold(alive.number))
        except OSError as error:
            raise_if_foreign(error)
            keeps = False
        if not keeps:
            self._lose_alive()
            self._lock.session = 0  # and no new range, because the lock may be held with this one

    def after_fork(self) -> None:
        """In a forked child: the byte is the parent's; the child is another session as soon as it writes."""
        self._lose_alive()
        self._lock.session = 0
        super().after_fork()

    # -- who lives -------------------------------------------------------------------------------------------------

    def lives(self, number: int, home: ProcessIdentity | None) -> bool | None:
        """Return whether session `number` lives; None if that can't be known.

        False without a record in `deaths` is evidence, not the verdict: see `bury`. Without `home` its byte alone is
        asked: for who is told of the death of its process anyway.
        """
        session = self.sessions.get(number)
        if number in self.deaths or session is None:
            return None if session is None else False
        if not any(session.alive_id):
            return None
        try:
            alive = self._open_alive(create=False)
            if alive is None or alive.id != session.alive_id:
                return False if home is not None and home.is_provably_dead(session) else None
            return alive.is_held(number) and not (home is not None and home.is_provably_dead(session))
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            return None

    def lives_now(self, number: int, home: ProcessIdentity | None) -> bool | None:
        """As `lives`, for who does not hold the mutex."""
        return self.inspect(lambda: self.lives(number, home))

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that somebody said to be, and all who did are recorded as dead."""
        deaths, known = self.deaths, self.ranks
        return self.inspect(
            lambda: [rank for rank in ranks if rank in known and all(number in deaths for number in known[rank])]
        )

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the sessions `numbers` that are recorded as dead, or were, and are forgotten since."""

        def answer() -> list[int]:
            known, last = self.sessions, self._last_session
            return [n for n in numbers if n in self.deaths or (n not in known and 0 < n <= last)]

        return self.inspect(answer)

    def undead(self, ranks: Iterable[int] | None) -> list[int]:
        """Return the sessions that said to be one of `ranks`, or all, without those that are recorded as dead."""

        def answer() -> list[int]:
            some = self.sessions if ranks is None else [n for rank in ranks for n in self.ranks.get(rank, ())]
            return sorted(set(some) - self.deaths.keys())

        return self.inspect(answer)

    def undead_sessions(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the sessions `numbers` that are known, and not recorded as dead."""
        return self.inspect(lambda: sorted((self.sessions.keys() & set(numbers)) - self.deaths.keys()))

    def bury(self, number: int, limit: float) -> bool:
        """Record that session `number` is dead, if with the lock it still seems so; return whether that is recorded.

        Errors as in `update`.
        """
        self.refresh(limit)
        if number in self.deaths:  # all who watch find it at the same moment, and one record is enough
            return True

        def decide(_: bytes, __: bytes) -> tuple[bool, int, bytes]:
            if number in self.deaths:
                return True, 0, b""
            if self.lives(number, ProcessIdentity.find()) is not False:
                return False, 0, b""
            return True, record.DEATH, encode_death(number, self.sessions[number].alive_id)

        return bool(self.update(record.DEATH, b"", b"", decide, limit))

    def _mourn(self, number: int, time_ns: int) -> None:
        super()._mourn(number, time_ns)
        if number == self._lock.session:
            self._die(number)

    def _die(self, number: int) -> NoReturn:
        message = f"says that this handle's session {number} is dead, so others go on without it; open the store again"
        self._finish(StoreGoneError, message)
        raise StoreGoneError(f"{self.path} {message}", path=self.path)
