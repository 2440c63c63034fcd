"""`Cursor`: read a log forward, and apply its records to the state machine.

On a local file system a reader takes no lock: the checksums show whether the last record is complete. Bytes with a
wrong checksum may belong to a record that is being written at this moment. So a reader without the lock raises
`NeedsLock`, and only a reader with the lock reports damage.

The cursor stops after a seal, the last record of a generation. Its caller then enters the next generation
(`generations.follower`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Final

from fscoord._log.files import safe_files, spill, torn_tail
from fscoord._log.files.spill import SpilledRecord
from fscoord._log.format import record
from fscoord._log.format.control_records import Failure, Session, decode_control
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.record import LogPosition, MalformedRecord, Record
from fscoord._log.handle import HandleState, NeedsLock, reopen
from fscoord._log.recovery import APPLYING, POSITION
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import StoreGoneError, StoreTimeoutError, StoreUnavailableError

CHUNK: Final = 1 << 16

SCAN_GRACE_S: Final = 0.03
"""The shortest time for examining the bytes after a torn record, in seconds, even if the timeout is 0."""


class Cursor:
    """The position of one handle in its log. The caller of each method holds the process mutex.

    Args:
        handle: the state of the handle, whose ``machine`` and ``table`` apply the records.
        on_control: a function that is called when control records were read. A control record, such as a death record,
            is about the log and not about a key. So every waiter must read the log again.
    """

    def __init__(self, handle: HandleState, on_control: Callable[[], object] | None = None) -> None:
        self._handle = handle
        self._on_control = on_control

    def seek(self, place: LogPosition) -> None:
        """Move to `place`, and discard the bytes that were read but not applied."""
        handle = self._handle
        system.os.lseek(handle.reader_fd, place.offset, 0)
        handle.offset, handle.chain = place
        handle.pending, handle.is_torn, handle.seal = b"", False, None

    def reset(self) -> None:
        """Reset the state machine and the session table, and seek to the first record of the generation."""
        handle = self._handle
        handle.machine.reset()
        handle.table.reset(is_first=handle.header.generation == 0)
        handle.bell = 0
        handle.path_checked_at = 0.0  # the next read must check the path at once
        self.seek(handle.start)

    def advance(self, data: bytes, *, locked: bool) -> bool:
        """Apply the records in `data`, then read and apply all further records of the file.

        A writer must have read to the end. Otherwise the chain of its record would be wrong. If
        ``handle.short_read_is_end`` is false, only a read of 0 bytes proves the end of the file, because on some file
        systems a read before the end may return fewer bytes than requested.

        ``handle.pending`` holds the bytes between ``handle.offset`` and the position of the descriptor. They are the
        beginning of a record that has not been read completely.

        Args:
            data: the bytes after ``pending``, which the caller has just read from the descriptor.
            locked: whether the caller holds the log lock. Under the lock, bytes that are not a record are damaged.

        Returns:
            Whether a seal was read. Records after the seal are not applied. ``handle.seal`` names the next generation.

        Raises:
            NeedsLock: the bytes look damaged, and the lock is not held.
            CorruptLogError: the bytes are damaged.
        """
        handle = self._handle
        asked = CHUNK
        while data:
            # Under the lock of a local file, a short read does not prove the end: a disk error may have made it short,
            # and a record that is appended after unread records would have a wrong chain. A handle that has not joined
            # a run yet must also read to the end, or it could join a run that is over.
            is_firm = handle.may_lie or (handle.is_settled and not locked)
            is_end = len(data) < asked and handle.short_read_is_end and is_firm
            if handle.pending:
                data = handle.pending + data
            records, others, used, chain, missing = record.decode(data, handle.chain)
            if others and record.SEAL in map(itemgetter(0), others):
                # Records after a seal are not applied: a handle that has already followed the seal never reads them,
                # and all handles must have the same state.
                data = data[: record.end_of_first(data, record.SEAL)]
                records, others, used, chain, missing = record.decode(data, handle.chain)
            if used:
                # The flag is set before the first record is applied, and replaced only after `offset` has moved past
                # the last record. If an exception comes in between, it is unknown which records were applied. To apply
                # an `add` or a push twice would be wrong, so recovery resets the state machine.
                handle.recovery = APPLYING
                try:
                    if records:
                        handle.machine.apply(records if used <= handle.spill_at else self._spill(records, data))
                    if others:
                        self._apply_control(others)
                except MalformedRecord as error:
                    raise handle.corrupt(torn_tail.Damage(handle.offset, f"from here on, {error}")) from error
                handle.offset += used
                handle.chain, handle.is_torn = chain, False
                # In a durable log the flag stays until `_sync`. If an exception comes before, recovery reads the
                # records again, and so syncs them. Otherwise a caller could act on a record that was never synced.
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
        """Apply `records`, which are all data records or all control records. The caller updates the offset.

        `data` begins with the bytes of `records`.
        """
        if records[0][0] not in record.DATA_KINDS:
            self._apply_control(records)
        else:
            handle = self._handle
            handle.machine.apply(records if len(data) <= handle.spill_at else self._spill(records, data))

    def _spill(self, records: Sequence[Record], data: bytes) -> Sequence[SpilledRecord]:
        """Return `records` with a `Spilled` for each long value. `data` begins with the bytes of `records`.

        If ``spill_at`` is `spill.ENDS`, return `records` with the offset of the end of each record.
        """
        handle = self._handle
        if handle.spill_at == spill.ENDS:
            return spill.with_ends(records, data, handle.offset)
        kept, keys = spill.leave_long(records, data, handle.offset, handle.spill_at)
        if keys:
            handle.machine.mark_spilled(keys)
        return kept

    def _apply_control(self, others: Sequence[Record]) -> None:
        handle, table = self._handle, self._handle.table
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
                handle.seal, table.sealed_by = meaning, writer
            elif isinstance(meaning, Failure):
                table.add_failure(meaning)
            elif kind == record.BELL:
                handle.bell += 1
            elif kind == record.LEAVE:
                table.left.add(writer)
            elif kind == record.LAST_TIME:
                table.set_last_time(writer, time_ns)
            elif kind == record.FINISHED:
                table.is_ended = True
            if handle.is_settled and table.is_ended:
                raise self.finished()

    def finished(self) -> StoreGoneError:
        """End the handle because all participants of its run have left. Return the error."""
        count = self._handle.table.world_size
        return self._handle.gone(
            f"is finished: all {f'{count} participants' if count else 'participants'} have closed it"
        )

    def _file_has(self, missing: int) -> bool:
        """Return whether the file has at least `missing` bytes after those that were read."""
        handle = self._handle
        if not handle.may_lie:
            size = system.os.fstat(handle.reader_fd).st_size
        else:  # only open(2) makes the kernel request the size from the server
            with safe_files.closing_owned(reopen(handle, handle.read_flags), handle.owned_fds) as fd:
                size = system.os.fstat(fd).st_size
        return bool(size >= handle.offset + len(handle.pending) + missing)

    def _sync(self) -> None:
        """Sync the records that were just read, before the caller acts on them.

        The process that wrote them may have died before its own sync. A failed sync ends the handle and is not retried.
        The kernel may have dropped the pages, and then a second fdatasync(2) would succeed without writing them.
        """
        handle = self._handle
        try:
            system.sync_data(handle.reader_fd)
        except OSError as error:
            raise_if_foreign(error)
            handle.finish(StoreUnavailableError, "could not be synced, so writes may be lost; open the store again")
            raise safe_files.unavailable(error, handle.path, "syncing the log") from error
        handle.recovery = POSITION

    # -- torn tails ------------------------------------------------------------------------------------------------

    def _skip_void(self, *, locked: bool) -> bool:
        """Move past the torn record at the offset if a VOID follows it. Return False if no VOID was written yet."""
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
        """Move back to the end of the last good record. The bytes after it are torn, or are still being written."""
        self.move(self._handle.offset, self._handle.chain)
        self._handle.is_torn = True

    def examine(self) -> torn_tail.Skip | torn_tail.Torn | torn_tail.Damage:
        """Classify the bytes after the last good record.

        The bytes are read through another descriptor, because `torn_tail.examine` changes the descriptor's position.
        """
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
                f"{handle.file}: timeout: no complete record was found within {handle.time_left:.3g} s in the"
                f" {size - handle.offset} bytes after offset {handle.offset}; try again with a longer timeout. If the"
                " file was made longer by mistake, `fscoord repair` copies the log without these bytes",
                waited=handle.time_left,
            ) from None
        finally:
            handle.close_fd(fd)

    def move(self, offset: int, chain: int) -> None:
        """Continue at `offset` on a new descriptor. `reopen` checks that the descriptor is of the same file."""
        handle = self._handle
        fd = reopen(handle, handle.read_flags)
        system.os.lseek(fd, offset, 0)
        old, handle.reader_fd = handle.reader_fd, fd
        handle.close_fd(old)
        handle.offset, handle.chain, handle.pending, handle.is_torn = offset, chain, b"", False

    # -- the descriptors -------------------------------------------------------------------------------------------

    def check_descriptors(self) -> None:
        """End the handle if other code in this process has closed a descriptor of the log, for example by closerange.

        The descriptor's number may belong to another file by now. So the handle neither uses nor closes this number any
        more.

        Raises:
            StoreGoneError: a descriptor is closed, or refers to another file.
        """
        handle = self._handle
        for fd in (handle.reader_fd, handle.lock.fd):
            try:
                found = system.os.fstat(fd)
            except OSError as error:
                raise_if_foreign(error)
                if error.errno == system.errno.EBADF:
                    break
            else:
                if (found.st_dev, found.st_ino) != handle.file_identity:
                    break
        else:
            return
        if min(handle.reader_fd, handle.lock.fd) < 0:  # -1: a signal handler has forked, and this is the child
            return
        system.forget_descriptors()  # the other descriptors of the package may be closed as well
        handle.lock.unlock()
        handle.lock.after_fork(handle.mutex)
        handle.reader_fd = handle.root_fd = -1
        raise handle.gone("was closed by other code of this process, which has closed descriptors that it did not open")

    def check_landing(self) -> None:
        """Raise the error for an append that did not begin at the end of the records that were read. End the handle.

        Under pyfakefs, return: a fake file does not report the position of an append.

        Raises:
            StoreGoneError: the log was truncated, another program writes to it, or a descriptor was closed.
        """
        if not system.is_fake_fs():
            self.check_descriptors()
            raise self._handle.gone("was truncated by another program, or another program writes to it")
