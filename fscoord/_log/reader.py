"""`LogReader`: follow a log: open it, read forward, skip what is void, notice when it is gone.

On a local file system a reader takes no lock: the checksums say whether the last record is complete. Without the lock
the next bytes are "valid" or "incomplete", never "damaged": that verdict is repeated with it.

Invariant: the descriptor stands ``len(_pending)`` bytes behind ``_offset``, and the consumer has applied every record
before ``_offset``, unless ``_trouble`` says that an interruption left that in doubt; the next operation mends it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar

from fscoord import _system as system
from fscoord._log import path as paths, record, tail
from fscoord._log.record import Header, Record
from fscoord._log.session import Session, decode_death
from fscoord._log.shared import shared_by
from fscoord.errors import CorruptLogError, FscoordError, StoreError, StoreGoneError, StoreUnavailableError

__all__ = ["Consumer", "LogReader"]

T = TypeVar("T")

CHUNK: Final = 1 << 16
LOOK_S: Final = 0.05
"""How old the last look at the file's name and size may be."""

DIRTY, APPLYING, REOPEN, ENDED, STALE = 1, 2, 4, 8, 16
"""Where the reader stands is unknown; what was applied is unknown; the descriptors are gone; the handle is over; the
descriptors are there, but the server does not know them, or their locks, any more."""


class Consumer(Protocol):
    """Who makes sense of the data records."""

    def apply(self, records: Sequence[Record]) -> None:
        """Take in the next records."""

    def reset(self) -> None:
        """Forget every record: they come again from the first."""


class Suspect(Exception):
    """Without the lock, the next bytes look damaged: look again with it."""


_readers: weakref.WeakSet[LogReader] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for reader in list(_readers):
        reader.after_fork()


system.after_fork_in_child(_after_fork_in_child)


class LogReader:
    """The reading half of `~fscoord._log.file.LogFile`.

    Attributes:
        path: the absolute path of the log.
        header: what the log begins with.
        mutex: excludes the threads of this process.
        sessions: who has introduced themselves, by session number.
        ranks: by rank, the sessions that have said that they are it.
        deaths: when (wall time in ns) a session was found dead, by its number.
        bell: how often a bell was announced (see `bell`); 0 if nobody has waited yet.
        left: how many participants have left for good.
    """

    header: Header
    mutex: Any
    _read_flags: int = system.os.O_RDONLY
    _short_is_end = False
    """Whether a read that brings less than was asked for has seen the end of the file, as a direct one has."""

    def __init__(self, path: str, consumer: Consumer, participants: int) -> None:
        self.path = path
        self._consumer = consumer
        self._participants = participants
        self._rfd = -1
        self._end: tuple[type[StoreError], str] = (StoreError, "")
        self._trouble = 0
        self._looked = 0.0
        self.sessions: dict[int, Session] = {}
        self.ranks: dict[int, set[int]] = {}
        self.deaths: dict[int, int] = {}
        self.bell = 0
        self.left = 0
        self._last_session = 0
        self._descriptors: set[int] = set()
        self._finalizer = weakref.finalize(self, system.close_all, system.os.close, self._descriptors)
        self._finalizer.atexit = False

    # -- opening ---------------------------------------------------------------------------------------------------

    def _adopt(self, rfd: int, header: Header, size: int, chain: int) -> None:
        """Begin to follow the log that `rfd` is open on, just behind its header."""
        self._rfd = self._hold(rfd)
        found = system.os.fstat(rfd)
        self._identity = (found.st_dev, found.st_ino)
        self.header, self._header_size, self._header_chain = header, size, chain
        self._shared = shared_by(header.log_id)
        self.mutex = self._shared.mutex
        self._rewind()
        _readers.add(self)

    def _hold(self, fd: int) -> int:
        self._descriptors.add(fd)
        return fd

    def _drop(self, fd: int) -> None:
        paths.close_kept(fd, self._descriptors)

    def _in_use(self) -> set[int]:
        return {self._rfd}

    def _rewind(self) -> None:
        system.os.lseek(self._rfd, self._header_size, 0)
        self._offset, self._chain, self._pending, self._torn = self._header_size, self._header_chain, b"", False

    def _open_again(self) -> None:
        raise AssertionError("the half that knows how to open a log")

    def _reopen(self, flags: int, keep: set[int]) -> int:
        """Return another descriptor of the log, which must still be the same file; it is added to `keep`."""
        try:
            fd = paths.open_descriptor(self.path, flags, keep=keep)
        except FileNotFoundError:
            raise self._gone("was deleted") from None
        found = system.os.fstat(fd)
        if (found.st_dev, found.st_ino) != self._identity:
            paths.close_kept(fd, keep)
            raise self._gone("was replaced by another file")
        return fd

    # -- following -------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Give the consumer every record that is complete by now. The caller holds the mutex and watches over it."""
        data = system.os.read(self._rfd, CHUNK)
        if data:
            self._advance(data, locked=False)
        now = system.time.monotonic()
        if now - self._looked > LOOK_S:
            self._look(now)

    def _advance(self, data: bytes, *, locked: bool) -> None:
        """Take in `data`, just read, and what follows it in the file, until a read returns nothing.

        A short read is no end of the file on every file system; and who writes must have read to the end.
        """
        asked = CHUNK
        while data:
            is_end = self._short_is_end and len(data) < asked
            if self._pending:
                data = self._pending + data
            records, others, used, chain, missing = record.decode(data, self._chain)
            if used:
                self._trouble = APPLYING
                try:
                    if records:
                        self._consumer.apply(records)
                    if others:
                        self._note(others)
                except ValueError as error:
                    raise self._corrupt(tail.Damage(self._offset, f"from here on, {error}")) from error
                self._offset += used
                self._chain, self._torn = chain, False
                if not self.header.durable:
                    self._trouble = DIRTY
            self._pending = data[used:]
            if missing < 0:
                if not self._skip_void(locked=locked):
                    break
            elif is_end:
                break
            elif missing > CHUNK and not self._has(missing):
                self._leave_torn()
                break
            asked = max(missing, CHUNK)
            data = system.os.read(self._rfd, asked)
        if self._trouble == APPLYING:
            self._sync_read()

    def _has(self, missing: int) -> bool:
        """Return whether the file has `missing` bytes more than were read."""
        return bool(system.os.fstat(self._rfd).st_size >= self._offset + len(self._pending) + missing)

    def _sync_read(self) -> None:
        """Who sees a record of a durable log may act on it, so it must not be lost any more."""
        try:
            system.os.fdatasync(self._rfd)
        except OSError as error:
            self._finish(StoreUnavailableError, "could not be synced, so nothing is certain; open the store again")
            raise paths.unavailable(error, self.path, "syncing the log") from error
        self._trouble = DIRTY

    def _skip_void(self, *, locked: bool) -> bool:
        """Pass the bad bytes at the offset if a VOID says that they are torn; False if they may yet be voided."""
        verdict = self._examine()
        if isinstance(verdict, tail.Damage):
            if not locked:
                raise Suspect
            raise self._corrupt(verdict)
        if isinstance(verdict, tail.Torn):
            self._leave_torn()
            return False
        self._move(verdict.offset, verdict.chain)
        return True

    def _leave_torn(self) -> None:
        """Stay where the last good record ends: what follows is torn, or still being written."""
        self._move(self._offset, self._chain)
        self._torn = True

    def _examine(self) -> tail.Skip | tail.Torn | tail.Damage:
        fd = self._reopen(self._read_flags, self._descriptors)
        try:
            return tail.examine(fd, self._offset, self._chain, durable=self.header.durable)
        finally:
            self._drop(fd)

    def _move(self, offset: int, chain: int) -> None:
        """Go on reading at `offset`, on a new descriptor: where the old one stands is not known, or not wanted."""
        fd = self._reopen(self._read_flags, self._descriptors)
        system.os.lseek(fd, offset, 0)
        old, self._rfd = self._rfd, fd
        self._drop(old)
        self._offset, self._chain, self._pending, self._torn = offset, chain, b"", False

    def _note(self, others: Sequence[Record]) -> None:
        """Take in records that are not data."""
        for kind, _, value, writer, time_ns in others:
            if kind == record.SESSION:
                self._meet(writer, value, time_ns)
            elif kind == record.DEATH:
                self._mourn(decode_death(value), time_ns)
            elif kind == record.BELL:
                self.bell += 1
            elif kind == record.LEAVE:
                self.left += 1
                if 0 < self._participants <= self.left:
                    raise self._gone(f"is finished: all {self._participants} participants have closed it")
            elif not ord("a") <= kind <= ord("z"):
                raise ValueError(f"a record of kind {chr(kind)!r} needs a newer fscoord; upgrade it")

    def _meet(self, number: int, value: bytes, time_ns: int) -> None:
        """A session introduces itself, or says more of itself: what it said of its rank before stays true."""
        known = self.sessions.get(number)
        session = Session.decode(value, known.since_ns if known else time_ns)
        self.sessions[number] = session
        self._last_session = max(self._last_session, number)
        if session.rank is not None:
            self.ranks.setdefault(session.rank, set()).add(number)

    def _mourn(self, number: int, time_ns: int) -> None:
        """A session was found dead; all who read this agree on it."""
        self.deaths.setdefault(number, time_ns)

    def _look(self, now: float) -> None:
        """Make sure that the file is still the one that its name leads to, and has not shrunk."""
        found = system.os.fstat(self._rfd)
        if found.st_size < self._offset:
            raise self._gone(f"was truncated to {found.st_size} bytes, and {self._offset} were read")
        try:
            named = system.os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            raise self._gone("was deleted") from None
        if found.st_nlink == 0 or not paths.same_file(named, found):
            raise self._gone("was replaced by another file")
        self._looked = now

    def inspect(self, answer: Callable[[], T]) -> T:
        """Return what `answer` makes of the consumer's state, which nobody changes meanwhile, nor a signal handler."""
        shared = self._shared
        with shared.mutex:
            if shared.busy:
                raise self._entered_twice()
            try:
                shared.busy = True
                return answer()
            finally:
                shared.busy = False

    # -- trouble ---------------------------------------------------------------------------------------------------

    def _entered_twice(self) -> StoreError:
        return StoreError(
            f"{self.path}: the store was called by a signal handler or finalizer that interrupted a call of the"
            " same thread; hand the work to another thread",
            path=self.path,
        )

    def _sort_out(self) -> None:
        """At the start of an operation: mend what an interruption or a fork left, or say that all is over."""
        trouble = self._trouble
        if trouble & ENDED:
            kind, message = self._end
            raise kind(f"{self.path} {message}", path=self.path)
        try:
            if trouble & (REOPEN | STALE):
                self._open_again()
            if trouble & APPLYING:
                self._consumer.reset()
                self.sessions.clear()
                self.ranks.clear()
                self.deaths.clear()
                self.left = self.bell = self._last_session = 0
                self._rewind()
            self._move(self._offset, self._chain)
            for fd in self._descriptors - self._in_use():  # an interruption came between opening and use, or close
                self._drop(fd)
        except FscoordError:
            raise
        except OSError as error:
            raise paths.unavailable(error, self.path, "opening the log again") from error
        self._trouble = 0

    def _finish(self, kind: type[StoreError], message: str) -> None:
        """Let every later operation raise `kind`."""
        self._end = (kind, message)
        self._trouble |= ENDED

    def _gone(self, how: str) -> StoreGoneError:
        message = f"{how}; open the store again"
        self._finish(StoreGoneError, message)
        return StoreGoneError(f"{self.path} {message}", path=self.path)

    def _corrupt(self, damage: tail.Damage) -> CorruptLogError:
        return CorruptLogError(
            f"{self.path} is damaged at offset {damage.offset}: {damage.reason}. Nothing was repaired; what comes"
            " before it can be read with `fscoord dump`",
            path=self.path,
            offset=damage.offset,
            reason=damage.reason,
        )

    def after_fork(self) -> None:
        """In a forked child: close the inherited descriptors without unlocking; the next operation opens its own."""
        self.mutex = self._shared.mutex
        for fd in list(self._descriptors):
            self._drop(fd)
        self._trouble |= REOPEN
