"""`LogReader`: follow a log: open it, read forward, skip what is void, notice when it is gone.

On a local file system a reader takes no lock: the checksums say whether the last record is complete. Without the lock
the next bytes are "valid" or "incomplete", never "damaged": that verdict is repeated with it.

Invariant: the descriptor stands ``len(_pending)`` bytes behind ``_offset``, and the consumer has applied every record
before ``_offset``, unless ``_trouble`` says that an interruption left that in doubt; the next operation mends it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from fscoord._log.consumer import Consumer
from fscoord._log.format import record
from fscoord._log.format.control_records import Session, decode_control
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.format.record import LogPosition, MalformedRecord, Record
from fscoord._log.io import safe_files, torn_tail
from fscoord._log.io.spill import NEVER, SpilledRecord
from fscoord._log.liveness.session_table import Roster
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign
from fscoord.errors import (
    CorruptLogError,
    FscoordError,
    StoreError,
    StoreGoneError,
    StoreTimeoutError,
    StoreUnavailableError,
)

__all__ = ["LogReader"]

CHUNK: Final = 1 << 16
LOOK_S: Final = 0.05
"""How old the last look at the file's name and size may be."""

SCAN_GRACE_S: Final = 0.03
"""How long to read what follows a torn record, in seconds, even if the caller does not want to wait."""

DIRTY, APPLYING, REOPEN, ENDED, STALE, ASTRAY = 1, 2, 4, 8, 16, 32
"""Where the reader stands is unknown; what was applied is unknown; the descriptors are gone; the handle is over; the
descriptors are there, but the server does not know them, or their locks, any more; which generation it is in is
unknown."""


class Suspect(Exception):
    """Without the lock, the next bytes look damaged: look again with it."""


class Vanished(Suspect):
    """The file of the generation in use has no name any more: it was superseded, or somebody has deleted it."""


readers: weakref.WeakSet[LogReader] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for reader in list(readers):
        reader.after_fork()


system.after_fork_in_child("handles", _after_fork_in_child)


class LogReader(Roster):
    """The reading half of `~fscoord._log.log.LogFile`.

    Attributes:
        path: the absolute path of the log.
        file: the path of the generation in use; generation 0 has the log's own.
        header: what that begins with.
        mutex: excludes the threads of this process.
        bell: how often a bell was announced (see `bell`); 0 if nobody has waited yet.
    """

    header: Header
    mutex: Any
    file: str
    _shared: Any
    _identity: tuple[int, int]
    _start: LogPosition
    _read_flags: int = system.os.O_RDONLY
    _short_is_end = False
    """Whether a read that brings less than was asked for has seen the end of the file, as a direct one has."""
    _may_lie = False
    """Whether bytes that were read may have come from a cache that was not valid, so that zeros prove nothing."""
    _limit = float("inf")
    """How many seconds the operation may take that is under way."""
    _zeros: torn_tail.Zeros
    _spill_at = NEVER
    """From how many bytes on a value is left in the file."""

    def __init__(self, path: str, consumer: Consumer, participants: int) -> None:
        super().__init__(participants)
        self.path = path
        self._consumer = consumer
        self._rfd = self._root_fd = -1
        self._end: tuple[type[StoreError], str] = (StoreError, "")
        self._trouble = 0
        self._looked = 0.0
        self.bell = 0
        self._seal: GenerationRef | None = None
        self._descriptors = system.Descriptors()
        self._finalizer = weakref.finalize(self, system.close_all, system.os.close, self._descriptors)
        self._finalizer.atexit = False

    # -- opening ---------------------------------------------------------------------------------------------------

    def _drop(self, fd: int) -> None:
        if fd >= 0:
            safe_files.close_owned(fd, self._descriptors)

    def _in_use(self) -> set[int]:
        return {self._rfd}

    def _stand(self, place: LogPosition) -> None:
        """Stand at `place`, on a descriptor that nothing was read from yet, or whose place does not matter."""
        system.os.lseek(self._rfd, place.offset, 0)
        self._offset, self._chain = place
        self._pending, self._torn, self._seal = b"", False, None

    def _forget(self) -> None:
        """Forget all that was read, and begin again."""
        self._consumer.reset()
        self._forget_sessions()
        self.bell = 0
        self._stand(self._start)

    if TYPE_CHECKING:  # what the classes below this one know: how a log is opened, and one generation from the next

        def _open_again(self) -> None: ...

        def _follow(self) -> None: ...

        def _restart(self) -> None: ...

        def _look(self, now: float) -> None: ...

        def _leave_long(self, records: Sequence[Record], data: bytes) -> Sequence[SpilledRecord]: ...

    def _reopen(self, flags: int, owned_fds: set[int]) -> int:
        """Return another descriptor of the generation in use, which must still be its file, added to `owned_fds`."""
        try:
            fd = safe_files.open_descriptor(self.file, flags, owned_fds=owned_fds)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            raise self._unnamed() from None
        found = system.os.fstat(fd)
        if (found.st_dev, found.st_ino) != self._identity:
            safe_files.close_owned(fd, owned_fds)
            raise self._gone("was replaced by another file")
        return fd

    def _unnamed(self) -> Exception:
        """Return what to raise because the file in use has no name any more."""
        return Vanished() if self.header.generation else self._gone("was deleted")

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
            if others and record.SEAL in map(itemgetter(0), others):
                # Nothing after a seal counts, whatever it is, for a handle that read the seal before would not see it.
                data = data[: record.end_of_first(data, record.SEAL)]
                records, others, used, chain, missing = record.decode(data, self._chain)
            if used:
                self._trouble = APPLYING
                try:
                    if records:
                        self._consumer.apply(records if used <= self._spill_at else self._leave_long(records, data))
                    if others:
                        self._note(others)
                except MalformedRecord as error:
                    raise self._corrupt(torn_tail.Damage(self._offset, f"from here on, {error}")) from error
                self._offset += used
                self._chain, self._torn = chain, False
                if not self.header.durable:
                    self._trouble = DIRTY
            self._pending = data[used:]
            if self._seal is not None:
                if self._trouble == APPLYING:
                    self._sync_read()
                self._follow()
                if locked:
                    return  # the lock was that of the generation that has ended
                asked = CHUNK
                data = system.os.read(self._rfd, asked)
                continue
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
            raise_if_foreign(error)
            self._finish(StoreUnavailableError, "could not be synced, so nothing is certain; open the store again")
            raise safe_files.unavailable(error, self.path, "syncing the log") from error
        self._trouble = DIRTY

    def _skip_void(self, *, locked: bool) -> bool:
        """Pass the bad bytes at the offset if a VOID says that they are torn; False if they may yet be voided."""
        verdict = self._examine()
        if isinstance(verdict, torn_tail.Damage):
            if not locked:
                raise Suspect
            raise self._corrupt(verdict)
        if isinstance(verdict, torn_tail.Torn):
            self._leave_torn()
            return False
        self._move(verdict.offset, verdict.chain)
        return True

    def _leave_torn(self) -> None:
        """Stay where the last good record ends: what follows is torn, or still being written."""
        self._move(self._offset, self._chain)
        self._torn = True

    def _examine(self) -> torn_tail.Skip | torn_tail.Torn | torn_tail.Damage:
        fd = self._reopen(self._read_flags, self._descriptors)
        try:
            if self._may_lie:
                self._zeros.forget()
            self._zeros.deadline = system.time.monotonic() + max(self._limit, SCAN_GRACE_S)
            return torn_tail.examine(fd, self._offset, self._chain, self._zeros, durable=self.header.durable)
        except torn_tail.DeadlineReached:
            size = system.os.fstat(fd).st_size
            raise StoreTimeoutError(
                f"{self.file}: the {size - self._offset} bytes after offset {self._offset} hold no complete record, and"
                f" not all of them were read within {self._limit:.3g} s; try again with a longer timeout. If the file"
                " was made longer by mistake, `fscoord repair` copies the log without these bytes",
                waited=self._limit,
            ) from None
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
        for found in others:
            kind, _, _, writer, time_ns = found
            meaning = decode_control(found, self.header.generation, is_sealed=self._seal is not None)
            if isinstance(meaning, Session):
                self._meet(writer, meaning)
            elif isinstance(meaning, int):
                self._mourn(meaning, time_ns)
            elif isinstance(meaning, GenerationRef):
                self._seal = meaning
            elif kind == record.BELL:
                self.bell += 1
            elif kind == record.LEAVE:
                self.left += 1
            elif kind == record.FINISHED:
                self._is_ended = True
            if self._is_settled and self.is_finished:
                raise self._finished()

    def _finished(self) -> StoreError:
        count = f"{self._participants} participants" if self._participants else "its participants"
        return self._gone(f"is finished: all {count} have closed it")

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
            if self._trouble & ASTRAY:
                self._restart()
            elif trouble & APPLYING:
                self._forget()
            self._find_place()
            for fd in self._descriptors - self._in_use():  # an interruption came between opening and use, or close
                self._drop(fd)
        except FscoordError:
            raise
        except OSError as error:
            raise_if_foreign(error)
            raise safe_files.unavailable(error, self.path, "opening the log again") from error
        self._trouble = 0

    def _find_place(self) -> None:
        """Stand where the last good record ends, on a new descriptor; behind a seal that was read, go on."""
        try:
            if self._seal is None:
                self._move(self._offset, self._chain)
            else:
                self._follow()
        except Vanished:
            self._restart()

    def _finish(self, kind: type[StoreError], message: str) -> None:
        """Let every later operation raise `kind`."""
        self._end = (kind, message)
        self._trouble |= ENDED

    def _gone(self, how: str) -> StoreGoneError:
        message = f"{how}; open the store again"
        self._finish(StoreGoneError, message)
        return StoreGoneError(f"{self.path} {message}", path=self.path)

    def _corrupt(self, damage: torn_tail.Damage) -> CorruptLogError:
        return safe_files.damaged(self.path, self.file, damage.offset, damage.reason)

    def after_fork(self) -> None:
        """In a forked child: the descriptors are closed, and nothing is unlocked; the next operation opens its own.

        `_shared` has a new mutex by then (see ``_forks.ORDER``).
        """
        self.mutex = self._shared.mutex
        self._rfd = self._root_fd = -1
        self._trouble |= REOPEN
