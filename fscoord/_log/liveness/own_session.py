"""The session of one handle: `Liveness` holds its byte and probes those of others, `Registration` appends its record.

A death is a record, appended with the log's lock after another probe, so that all agree on it: an unlocked byte may
also be that of a host which was cut off, and comes back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.handle import HandleState
from fscoord._log.io import safe_files
from fscoord._log.io.writer import LogWriter
from fscoord._log.liveness.liveness_file import LivenessFile, ProcessIdentity, open_liveness_file
from fscoord._log.liveness.session_table import SessionTable
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, LimitExceededError

__all__ = ["Liveness", "Registration"]


BYTE_TRIES: Final = 64
"""How many bytes of the liveness file are tried for a new session, before it goes on without one."""

CHECK_S: Final = 1.0
"""How old the last check of one's own byte, and of the name of the liveness file, may be."""


class Liveness:
    """The liveness file, as one handle uses it.

    Attributes:
        file: the liveness file, once it is open.
        checked_at: when the handle's own byte was last checked (monotonic, in seconds).
    """

    def __init__(self, handle: HandleState, table: SessionTable) -> None:
        self._handle = handle
        self._table = table
        self.file: LivenessFile | None = None
        self.checked_at = 0.0
        self._has_warned = False
        self._fds = system.Descriptors()
        weakref.finalize(self, system.close_all, system.os.close, self._fds).atexit = False

    @property
    def is_supported(self) -> bool:
        """Whether there are bytes that tell which sessions live."""
        return system.has_ofd_locks() and not system.is_fake_fs() and not self._handle.options.is_soft

    def take_byte(self) -> int:
        """With the log's lock: return the first number never used whose byte is free, and hold that byte."""
        number = self._table.last + 1
        self.checked_at = system.time.monotonic()
        try:
            alive = self._open(create=True)
            tries = 1
            while alive is not None and not alive.hold(number):
                # A process that locks all bytes must not keep the others waiting for the log's lock.
                if tries == BYTE_TRIES:
                    raise OSError(
                        system.errno.EAGAIN,
                        f"{alive.locker()} locks {tries} bytes of it and more, from {number - tries + 1} on, which no"
                        " session uses; end that process",
                    )
                number, tries = number + 1, tries + 1
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            number = self._table.last + 1
            self.lose()
            if not self._has_warned:
                self._has_warned = True
                logger(__name__).warning(
                    "%s.alive can't be used (%s); other processes can't tell whether this one lives",
                    self._handle.path,
                    str(error),
                )
        return number

    def _open(self, *, create: bool) -> LivenessFile | None:
        if self.file is None and self.is_supported:
            self.lose()  # an interruption may have come between opening and use
            options = self._handle.options
            self.file = open_liveness_file(
                self._handle.path, options.mode, self._fds, create=create, read_only=options.read_only
            )
        return self.file

    def lose(self) -> None:
        """Close the liveness file, and with that give up the byte."""
        self.file = None
        for fd in list(self._fds):
            safe_files.close_owned(fd, self._fds)

    def unlock(self) -> None:
        """Unlock the byte, so that others see the end of the session at once."""
        if self.file is not None:
            self.file.release()

    def check_byte(self, now: float) -> None:
        """Once in a second: hold the own byte again, which a lost connection may have cost.

        If the liveness file is gone, the handle becomes another session with its next write.
        """
        alive = self.file
        if alive is None or now - self.checked_at <= CHECK_S:
            return
        self.checked_at = now
        try:
            keeps = not alive.is_lost() and (not alive.number or alive.hold(alive.number))
        except OSError as error:
            raise_if_foreign(error)
            keeps = False
        if not keeps:
            self.lose()
            self._handle.lock.session = 0  # not bound to another range, because the lock may be held with this one

    def is_alive(self, number: int, home: ProcessIdentity | None) -> bool | None:
        """Return whether session `number` lives; None if that can't be known. The caller holds the mutex.

        False without a death record is evidence, not the verdict. Without `home` its byte alone is probed.
        """
        table = self._table
        session = table.sessions.get(number)
        if number in table.deaths or session is None:
            return None if session is None else False
        if not any(session.alive_id):
            return None
        try:
            alive = self._open(create=False)
            if alive is None or alive.id != session.alive_id:
                return False if home is not None and home.is_provably_dead(session) else None
            return alive.is_held(number) and not (home is not None and home.is_provably_dead(session))
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            return None


class Registration:
    """The session record of one handle, which it appends before its first write.

    Args:
        introduce: returns the session record's content: host, process, label.

    Attributes:
        rank: the rank that the next session record names.
    """

    def __init__(
        self, handle: HandleState, liveness: Liveness, writer: LogWriter, introduce: Callable[[], Session]
    ) -> None:
        self._handle = handle
        self._liveness = liveness
        self._writer = writer
        self._introduce = introduce
        self.rank: int | None = None

    def append(self) -> int:
        """With the log's lock: register this handle; return its number, which the lock's range shows from now on."""
        handle, liveness = self._handle, self._liveness
        session = self._introduce()
        if self.rank is not None:
            session = session._replace(rank=self.rank)
        number = liveness.take_byte()
        if number > record.WRITER_MAX:
            raise LimitExceededError(
                f"{handle.path}: all numbers for sessions are used up; begin another log, or another run",
                path=handle.path,
            )
        alive_id = bytes(16) if liveness.file is None else liveness.file.id
        self._writer.append(record.SESSION, b"", session._replace(alive_id=alive_id).encode(), number)
        handle.lock.bind(handle.lock.fd, number)
        return number
