"""`Cursor`: read a log forward, record by record, and apply each to the state machine.

On a local file system a reader takes no lock: the checksums say whether the last record is complete. Without the lock
the next bytes are "valid" or "incomplete", never "damaged": that verdict is repeated with it.

The cursor stops after a seal. To go on in the next generation is for its caller, which knows how generations follow
one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

from fscoord._log.format import record
from fscoord._log.format.control_records import Session, decode_control
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.record import LogPosition, MalformedRecord, Record
from fscoord._log.handle import HandleState, NeedsLock
from fscoord._log.io import safe_files, spill, torn_tail
from fscoord._log.io.descriptors import reopen
from fscoord._log.io.spill import SpilledRecord
from fscoord._log.liveness.session_table import SessionTable
from fscoord._log.recovery import APPLYING, POSITION
from fscoord._log.state_machine import StateMachine
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreGoneError, StoreTimeoutError, StoreUnavailableError

__all__ = ["CHUNK", "Cursor"]

CHUNK: Final = 1 << 16

SCAN_GRACE_S: Final = 0.03
"""How long to read what follows a torn record, in seconds, even if the caller does not want to wait."""


class Cursor:
    """The position of one handle in its log, and the way forward from there.

    Args:
        handle: the state of the handle.
        machine: is given every data record once, in order.
        table: likewise every record about sessions.
        on_control: is called when records are read that are not data, which concern every waiter.
    """

    def __init__(
        self,
        handle: HandleState,
        machine: StateMachine,
        table: SessionTable,
        on_control: Callable[[], object] | None = None,
    ) -> None:
        self._handle = handle
        self._machine = machine
        self._table = table
        self._on_control = on_control

    def seek(self, place: LogPosition) -> None:
        """Go to `place`, on a descriptor that nothing was read from yet, or whose position does not matter."""
        handle = self._handle
        system.os.lseek(handle.reader_fd, place.offset, 0)
        handle.offset, handle.chain = place
        handle.pending, handle.is_torn, handle.seal = b"", False, None

    def reset(self) -> None:
        """Forget all that was read, and begin again after the header of the generation in use."""
        self._machine.reset()
        self._table.reset()
        self._handle.bell = 0
        self._handle.path_checked_at = 0.0  # the next check must not be put off when all has been read again
        self.seek(self._handle.start)

    def advance(self, data: bytes, *, locked: bool) -> bool:
        """Apply `data`, just read, and what follows it in the file, until a read returns nothing.

        A short read is not the end of the file on every file system, and a writer must have read to the end. If the
        handle has `locked` the log, a verdict of damage is final.

        Returns:
            Whether a seal was read: then nothing after it was, and ``handle.seal`` names the next generation.

        Raises:
            NeedsLock: the bytes look damaged, and the lock is not held.
            CorruptLogError: they are damaged.
        """
        handle = self._handle
        asked = CHUNK
        while data:
            is_end = handle.short_read_is_end and len(data) < asked
            if handle.pending:
                data = handle.pending + data
            records, others, used, chain, missing = record.decode(data, handle.chain)
            if others and record.SEAL in map(itemgetter(0), others):
                # Nothing after a seal counts, for a handle that read the seal earlier does not see it.
                data = data[: record.end_of_first(data, record.SEAL)]
                records, others, used, chain, missing = record.decode(data, handle.chain)
            if used:
                # From here until the offset has moved on, an interruption leaves it open which records were applied.
                handle.recovery = APPLYING
                try:
                    if records:
                        self._machine.apply(records if used <= handle.spill_at else self._spill(records, data))
                    if others:
                        self._apply_control(others)
                except MalformedRecord as error:
                    raise handle.corrupt(torn_tail.Damage(handle.offset, f"from here on, {error}")) from error
                handle.offset += used
                handle.chain, handle.is_torn = chain, False
                if not handle.header.durable:
                    handle.recovery = POSITION
            handle.pending = data[used:]
            if handle.seal is not None:
                if handle.recovery == APPLYING:
                    self._sync()
                return True
            if missing < 0:
                if not self._skip_void(locked=locked):
                    break
            elif is_end:
                break
            elif missing > CHUNK and not self._file_has(missing):
                self._stay_before_torn_record()
                break
            asked = max(missing, CHUNK)
            data = system.os.read(handle.reader_fd, asked)
        if handle.recovery == APPLYING:
            self._sync()
        return False

    def apply(self, records: Sequence[Record], data: bytes) -> None:
        """Apply `records`, all data or all control records, which begin `data` at the offset; the offset stays."""
        if records[0][0] not in record.DATA_KINDS:
            self._apply_control(records)
        elif len(data) <= self._handle.spill_at:
            self._machine.apply(records)
        else:
            self._machine.apply(self._spill(records, data))

    def _spill(self, records: Sequence[Record], data: bytes) -> Sequence[SpilledRecord]:
        """Return `records`, which begin `data`, for the state machine: long values stay in the file."""
        kept, keys = spill.leave_long(records, data, self._handle.offset, self._handle.spill_at)
        if keys:
            self._machine.mark_spilled(keys)
        return kept

    def _apply_control(self, others: Sequence[Record]) -> None:
        """Apply records that are not data."""
        handle, table = self._handle, self._table
        if self._on_control is not None:
            self._on_control()
        for found in others:
            kind, _, _, writer, time_ns = found
            meaning = decode_control(found, handle.header.generation, is_sealed=handle.seal is not None)
            if isinstance(meaning, Session):
                table.add(writer, meaning)
            elif isinstance(meaning, int):
                table.add_death(meaning, time_ns)
                if meaning == handle.lock.session:
                    raise handle.session_is_dead(meaning)
            elif isinstance(meaning, GenerationRef):
                handle.seal = meaning
            elif kind == record.BELL:
                handle.bell += 1
            elif kind == record.LEAVE:
                table.left += 1
            elif kind == record.FINISHED:
                table.is_ended = True
            if handle.is_settled and table.is_finished:
                raise self.finished()

    def finished(self) -> StoreGoneError:
        """End the handle: the life of the log that it has joined is over."""
        participants = self._table.participants
        count = f"{participants} participants" if participants else "its participants"
        return self._handle.gone(f"is finished: all {count} have closed it")

    def _file_has(self, missing: int) -> bool:
        """Return whether the file has `missing` bytes more than were read."""
        handle = self._handle
        if not handle.may_lie:
            size = system.os.fstat(handle.reader_fd).st_size
        else:  # only open(2) has the kernel ask the server for the size
            fd = reopen(handle, handle.read_flags)
            try:
                size = system.os.fstat(fd).st_size
            finally:
                handle.close_fd(fd)
        return bool(size >= handle.offset + len(handle.pending) + missing)

    def _sync(self) -> None:
        """Sync the records that were just read: a caller that sees a record of a durable log may act on it."""
        handle = self._handle
        try:
            system.os.fdatasync(handle.reader_fd)
        except OSError as error:
            raise_if_foreign(error)
            handle.finish(StoreUnavailableError, "could not be synced, so nothing is certain; open the store again")
            raise safe_files.unavailable(error, handle.path, "syncing the log") from error
        handle.recovery = POSITION

    # -- torn tails ------------------------------------------------------------------------------------------------

    def _skip_void(self, *, locked: bool) -> bool:
        """Pass the bad bytes at the offset if a void says that they are torn; False if they may yet be voided."""
        verdict = self.examine()
        if isinstance(verdict, torn_tail.Damage):
            if not locked:
                raise NeedsLock
            raise self._handle.corrupt(verdict)
        if isinstance(verdict, torn_tail.Torn):
            self._stay_before_torn_record()
            return False
        self.move(verdict.offset, verdict.chain)
        return True

    def _stay_before_torn_record(self) -> None:
        """Stay where the last good record ends: the bytes after it are torn, or still being written."""
        self.move(self._handle.offset, self._handle.chain)
        self._handle.is_torn = True

    def examine(self) -> torn_tail.Skip | torn_tail.Torn | torn_tail.Damage:
        """Return the verdict on the bytes after the last good record, read through a descriptor of its own."""
        handle = self._handle
        fd = reopen(handle, handle.read_flags)
        try:
            if handle.may_lie:
                handle.zeros.forget()
            handle.zeros.deadline = system.time.monotonic() + max(handle.time_left, SCAN_GRACE_S)
            return torn_tail.examine(fd, handle.offset, handle.chain, handle.zeros, durable=handle.header.durable)
        except torn_tail.DeadlineReached:
            size = system.os.fstat(fd).st_size
            raise StoreTimeoutError(
                f"{handle.file}: the {size - handle.offset} bytes after offset {handle.offset} hold no complete record,"
                f" and not all of them were read within {handle.time_left:.3g} s; try again with a longer timeout. If"
                " the file was made longer by mistake, `fscoord repair` copies the log without these bytes",
                waited=handle.time_left,
            ) from None
        finally:
            handle.close_fd(fd)

    def move(self, offset: int, chain: int) -> None:
        """Go on reading at `offset`, on a new descriptor: the position of the old one is unknown, or not wanted."""
        handle = self._handle
        fd = reopen(handle, handle.read_flags)
        system.os.lseek(fd, offset, 0)
        old, handle.reader_fd = handle.reader_fd, fd
        handle.close_fd(old)
        handle.offset, handle.chain, handle.pending, handle.is_torn = offset, chain, b"", False
