"""`LogWriter`: append one record at the end of the log, or a VOID after a torn record.

The caller holds the process mutex and the log lock, and has read to the end. Nothing is ever truncated or overwritten.
If a writer died in the middle of a record, the next writer appends a VOID record, with which readers skip the torn one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fscoord._log.files import torn_tail
from fscoord._log.format.record import DATA_KINDS, encode, encode_void
from fscoord._log.handle import HandleState
from fscoord._log.recovery import APPLYING, POSITION
from fscoord._log.replay.cursor import Cursor
from fscoord._runtime import system
from fscoord._runtime.system import TIME_MAX
from fscoord.errors import StoreUnavailableError


class LogWriter:
    """Appends the records of one handle.

    Args:
        handle: the state of the handle.
        cursor: the cursor of the handle.
        write: `Access.write` for the mount. It writes bytes at the end of the file, and syncs them if the log is
            durable.

    Attributes:
        last_time: the time of the last record (wall time in nanoseconds).
    """

    def __init__(self, handle: HandleState, cursor: Cursor, write: Callable[[bytes], None]) -> None:
        self._handle = handle
        self._cursor = cursor
        self._write = write
        self.last_time = 0

    def next_time(self) -> int:
        """Return the time of the next record (wall time in ns), which is later than the time of the last record."""
        self.last_time = max(system.wall_time_ns(), self.last_time + 1)
        return self.last_time

    def append(self, kind: int, key: bytes, value: bytes, session: int) -> None:
        """Write a record, sync it if the log is durable, and apply it.

        Raises:
            StoreUnavailableError: the write failed; ``maybe_applied`` is true if the record may have been written.
        """
        handle = self._handle
        time_ns = system.time.time_ns()
        if time_ns <= self.last_time or time_ns > TIME_MAX:
            time_ns = max(min(time_ns, TIME_MAX), self.last_time + 1)
        self.last_time = time_ns
        data, chain = encode(kind, key, value, session, time_ns, handle.chain)
        size = len(data)
        self._write(data)
        # The record has taken effect, so it is applied now. The read descriptor must move past it before the next read.
        # Otherwise the record would be applied twice. The flag covers all these lines: after an interruption between
        # any two of them, recovery reads the generation again, and finds the record there.
        handle.recovery = APPLYING
        # Check that the record directly follows all records that were read. If only this host mounts the file system,
        # the file must end with the record. On a shared mount the size may come from a cache, so there the position of
        # the write is compared.
        end = handle.offset + size
        if handle.is_shared:
            landed = system.os.lseek(handle.lock.fd, 0, 1)
            system.os.lseek(handle.reader_fd, size, 1)
        else:
            landed = system.os.lseek(handle.reader_fd, 0, 2)
        if landed != end:
            self._cursor.check_landing()
        if size <= handle.spill_at and kind in DATA_KINDS:
            handle.machine.apply(((kind, key, value, session, time_ns),))
        else:
            self._cursor.apply(((kind, key, value, session, time_ns),), data)
        handle.offset = end
        handle.chain = chain
        handle.recovery = POSITION

    def void_tail(self) -> None:
        """Append a VOID if the log ends with a torn record. The caller holds the lock, so no process still writes."""
        handle = self._handle
        if not handle.pending and not handle.is_torn:
            return
        verdict = self._cursor.examine()
        if isinstance(verdict, torn_tail.Damage):
            raise handle.corrupt(verdict)
        if isinstance(verdict, torn_tail.Torn):
            fd = handle.lock.fd
            # The file is extended by zeros, and never truncated: readers may have read the torn bytes already, and
            # would take other bytes at their offsets for damage.
            if system.os.fstat(fd).st_size < verdict.place:
                system.os.ftruncate(fd, verdict.place)
            data, chain = encode_void(handle.offset, handle.lock.session, self.next_time(), handle.chain)
            self._write(data)
            verdict = torn_tail.Skip(verdict.place + len(data), chain)
        self._cursor.move(verdict.offset, verdict.chain)


def append_each(append: Callable[..., object], records: Iterable[tuple[Any, ...]]) -> None:
    """Call ``append(*each)`` for each of `records`.

    If a call raises a `StoreUnavailableError` after the first record was appended, set the error's ``maybe_applied``.
    """
    is_first = True
    try:
        for each in records:
            append(*each)
            is_first = False
    except StoreUnavailableError as error:
        error.maybe_applied = error.maybe_applied or not is_first
        raise
