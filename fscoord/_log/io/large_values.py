"""`LargeValues`: long values are left in the file, and read when they are asked for.

The place of a long value is only known in the generation in use. The snapshot of the next generation holds the value,
too: the frames of the snapshot's records are read, and not the values, and so a generation that was superseded is
closed at once.
"""

from __future__ import annotations

from typing import Final

from fscoord._log.format.record import LogPosition
from fscoord._log.handle import GenerationUnlinked, HandleState, NeedsLock
from fscoord._log.io import safe_files, spill, torn_tail
from fscoord._log.io.cursor import Cursor
from fscoord._log.io.descriptors import reopen
from fscoord._log.io.spill import Spilled
from fscoord._log.recovery import CLOSED, DESCRIPTORS, GENERATION, POSITION, SERVER_STATE
from fscoord._log.state_machine import StateMachine
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

__all__ = ["SERVER_FORGOT", "LargeValues"]

_LOST: Final = GENERATION | CLOSED | DESCRIPTORS | SERVER_STATE
"""Flags with which the descriptor may be that of another file."""
SERVER_FORGOT: Final = frozenset((system.errno.ESTALE, system.errno.EIO))
TRIES: Final = 4
"""How often in a row the server may have forgotten the file."""


class LargeValues:
    """The values that one handle keeps out of memory."""

    def __init__(self, handle: HandleState, cursor: Cursor, machine: StateMachine) -> None:
        self._handle = handle
        self._cursor = cursor
        self._machine = machine
        self._forgotten = 0

    def relocate(self, place: LogPosition) -> None:
        """In a new generation, at `place` after its snapshot: find the long values there, or read it all anew."""
        handle = self._handle
        long = spill.find_long(handle.reader_fd, handle.start, place, handle.spill_at)
        try:
            is_all_there = self._machine.relocate_spilled(long)
        finally:
            long.close()  # not by the collector: an exception that interrupts that is lost
        if not is_all_there:
            self._cursor.reset()

    def read_unlocked(self, spilled: Spilled) -> bytes:
        """Return the bytes of a long value. The caller holds the mutex, by `Log.inspect`, and not the log's lock.

        Raises:
            NeedsLock: they can't be read so; `read_locked` says why.
        """
        if self._handle.recovery & _LOST:
            raise NeedsLock
        try:
            value = spill.read(self._handle.reader_fd, spilled)
        except OSError as error:
            raise_if_foreign(error)
            raise NeedsLock from error
        if value is None:
            raise NeedsLock
        return value

    def read_locked(self, spilled: Spilled) -> bytes:
        """Return the bytes of a long value. The caller holds the log's lock: the verdict is final.

        Raises:
            CorruptLogError: they are not those that were read before.
            StoreGoneError: the file was truncated.
            StoreUnavailableError: the file system refused.
            OSError: the server has forgotten the file; the transaction under way reopens it and tries again.
        """
        handle = self._handle
        try:
            value = spill.read(handle.reader_fd, spilled)
            if value is None and handle.is_shared:
                value = self._read_past_cache(spilled)
            size = handle.offset if value is not None else system.os.fstat(handle.reader_fd).st_size
        except OSError as error:
            raise_if_foreign(error)
            self._forgotten += 1
            if handle.is_shared and error.errno in SERVER_FORGOT and self._forgotten % TRIES:
                raise
            raise safe_files.unavailable(error, handle.path, "reading a long value") from error
        self._forgotten = 0
        if size < handle.offset:
            raise handle.gone(f"was truncated to {size} bytes, and {handle.offset} were read")
        if value is None:
            reason = f"the {spilled.size} bytes of a long value have changed since they were read first"
            raise handle.corrupt(torn_tail.Damage(spilled.offset, reason))
        return value

    def _read_past_cache(self, spilled: Spilled) -> bytes | None:
        """Where a host's cache may lie: read from a new descriptor, and not from the cache."""
        handle = self._handle
        try:
            fd = reopen(handle, handle.read_flags)
        except GenerationUnlinked:
            handle.recovery |= POSITION  # so that the next attempt follows the log to its next generation
            raise
        try:
            if not handle.read_flags & system.O_DIRECT:
                system.os.posix_fadvise(fd, 0, 0, system.os.POSIX_FADV_DONTNEED)
            return spill.read(fd, spilled)
        finally:
            handle.close_fd(fd)
