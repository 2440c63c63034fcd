"""The session of one handle: `Liveness` locks and probes bytes, and `Registration` appends the session record.

An unlocked byte does not prove a death: the session's host may have lost its connection, and may come back. So a
process that finds an unlocked byte probes it again under the log lock, and then appends a death record. From this
record on, all processes treat the session as dead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.handle import HandleState
from fscoord._log.liveness.liveness_file import LivenessFile, ProcessIdentity, open_liveness_file
from fscoord._log.recovery import CLOSED
from fscoord._log.replay.writer import LogWriter
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord.errors import FscoordError, LimitExceededError

BYTE_TRIES: Final = 64
"""How many bytes of the liveness file a new session tries to lock. If all are locked, the session locks no byte."""

CHECK_S: Final = 1.0
"""How often a handle checks its own byte, and the name of the liveness file, in seconds."""


class Liveness:
    """Locks and probes bytes of the liveness file for one handle.

    Attributes:
        file: the liveness file; None before it is opened.
        checked_at: when the handle's own byte was last checked (monotonic, in seconds).
    """

    def __init__(self, handle: HandleState) -> None:
        self._handle = handle
        self.file: LivenessFile | None = None
        self.checked_at = 0.0
        self._has_warned = False
        self._is_name_next = True  # on a mount that hosts share: whether the next check is of the name or of the byte
        self._fds = system.Descriptors()
        system.close_when_collected(self, self._fds)

    @property
    def is_supported(self) -> bool:
        """Whether the log can have a liveness file: open-file-description locks exist, and the log has no soft lock."""
        return system.has_ofd_locks() and not system.is_fake_fs() and not self._handle.options.is_soft

    def take_byte(self) -> int:
        """Find a number for a new session, lock its byte, and return the number. The caller holds the log's lock.

        The caller appends the session record after this call. Otherwise a probe between the two steps would find the
        new session dead.
        """
        number = self._handle.table.last + 1
        self.checked_at = system.time.monotonic()
        try:
            alive = self._open(create=True)
            tries = 1
            while alive is not None and not alive.hold(number):
                # A process that locks all bytes must not make this loop endless: the log lock is held meanwhile.
                if tries == BYTE_TRIES:
                    raise OSError(
                        system.errno.EAGAIN,
                        f"{alive.locker()} locks {tries} or more bytes of the file, from {number - tries + 1} on,"
                        " which no session uses; end that process",
                    )
                number, tries = number + 1, tries + 1
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            number = self._handle.table.last + 1
            self.lose()
            if not self._has_warned:
                self._has_warned = True
                logger(__name__).warning(
                    "%s.alive can't be used (%s); other processes can't find out whether this one is alive",
                    self._handle.path,
                    str(error),
                )
        return number

    def _open(self, *, create: bool) -> LivenessFile | None:
        handle = self._handle
        if self.file is None and self.is_supported and not handle.recovery & CLOSED:  # `Log.close` came before
            self.lose()  # close a descriptor that an interrupted call has opened and not used
            options = handle.options
            self.file = open_liveness_file(
                handle.path, options.mode, self._fds, create=create, read_only=options.read_only
            )
        return self.file

    def lock_slot(self, number: int, candidates: Iterable[int]) -> int:
        """Lock a wait slot for session `number` of this handle. Return the number of the slot; 0 if none is free.

        The method locks the slot that the handle locked before, or else the first free slot of `candidates`. A log
        without a liveness file has no locks on slots: there, session `number` uses slot `number`.
        """
        if not self.is_supported:
            return number
        alive = self.file
        return 0 if alive is None else alive.lock_slot(candidates)

    def lose(self) -> None:
        """Close the liveness file, and so unlock the byte. (In a forked child, the byte stays locked by the parent.)"""
        self.file = None
        system.close_all(system.os.close, self._fds)

    def unlock(self) -> None:
        """Unlock the byte, so that other processes notice the end of the session at once."""
        if self.file is not None:
            self.file.release()

    def check_byte(self, now: float) -> None:
        """Check that the liveness file is at its path, and lock the handle's byte again.

        The method does nothing if the last check was less than `CHECK_S` seconds ago.

        A lost connection to a server drops locks. If the file is gone, or another handle has locked the byte, the
        handle registers as another session with its next write. On a mount that hosts share, each of the two steps
        costs a request, so each check makes only one step, in turn.
        """
        alive = self.file
        if alive is None or now - self.checked_at <= CHECK_S:
            return
        self.checked_at = now
        are_both_due = not self._handle.is_shared
        is_name_due, self._is_name_next = self._is_name_next, not self._is_name_next
        try:
            keeps = not ((is_name_due or are_both_due) and alive.is_lost())
            if keeps and alive.number and (are_both_due or not is_name_due):
                keeps = alive.hold(alive.number)
        except OSError as error:
            raise_if_foreign(error)
            keeps = False
        if not keeps:
            self.lose()
            # `bind` is not called, because the log lock may be held. It must be released with the range that was
            # acquired.
            self._handle.lock.session = 0

    def is_alive(self, number: int, home: ProcessIdentity | None) -> bool | None:
        """Probe session `number`. Return whether it is alive; None if that is unknown. The caller holds the mutex.

        False is not a proof unless the log has a death record. If `home` is given, the process of the session is probed
        as well, because a child that has inherited the descriptor of a dead process keeps the byte locked.
        """
        table = self._handle.table
        session = table.sessions.get(number)
        if number in table.deaths or session is None:
            return None if session is None else False
        if not any(session.alive_id):
            return None
        with ignoring(OSError, FscoordError):
            alive = self._open(create=False)
            if alive is None or alive.id != session.alive_id:
                return False if home is not None and home.is_provably_dead(session) else None
            return alive.is_held(number) and not (home is not None and home.is_provably_dead(session))
        return None


class Registration:
    """Appends the session record of one handle, before the first write of the handle, or in a long wait.

    Args:
        introduce: a function that returns the content of the session record: host, process and label.

    Attributes:
        liveness: locks a byte of the liveness file for the session.
        writer: appends the session record.
        rank: the rank for the next session record; None: the rank that `introduce` returns, if any.
    """

    def __init__(
        self, handle: HandleState, liveness: Liveness, writer: LogWriter, introduce: Callable[[], Session]
    ) -> None:
        self._handle = handle
        self.liveness = liveness
        self.writer = writer
        self._introduce = introduce
        self._participant = (0, 0)  # the run and the session number with which this handle is a participant
        self.rank: int | None = None

    def describe(self) -> Session:
        """Return the content of the next session record."""
        session = self._introduce()._replace(world_size=self._handle.options.world_size)
        return session if self.rank is None else session._replace(rank=self.rank)

    def append(self, *, is_guest: bool = False) -> int:
        """Register this handle and return its session number. The caller holds the log's lock.

        The method appends the session record, and then binds the log lock to the session number. A process that waits
        for a bound lock finds the number of the holder in the byte range of the lock. The log must then contain the
        record of this session, so the record is appended first.

        Args:
            is_guest: whether to register without a rank, and not as a participant. A handle that begins the next run
                passes True.
        """
        handle, liveness, run = self._handle, self.liveness, self._handle.header.run
        session = self.describe()
        if is_guest:
            session = session._replace(rank=None, world_size=0)
        elif session.world_size and self._participant[0] == run:
            # The handle has lost its byte, so its earlier session looks dead. It must not count as a failure.
            session = session._replace(replaces=self._participant[1])
        number = liveness.take_byte()
        if number > record.WRITER_MAX:
            raise LimitExceededError(
                f"{handle.path}: all numbers for sessions are used up; begin another log, or another run",
                path=handle.path,
            )
        alive_id = bytes(16) if liveness.file is None else liveness.file.id
        self.writer.append(record.SESSION, b"", session._replace(alive_id=alive_id).encode(), number)
        if session.world_size:
            self._participant = run, number
        handle.lock.bind(handle.lock.fd, number)
        return number
