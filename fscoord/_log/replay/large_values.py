"""`LargeValues`: read the spilled values of one handle, which stay in the file and not in memory.

The offset of a spilled value is valid only in the generation in use. The next generation begins with a snapshot. A
handle that enters the next generation reads the head of each record of the snapshot, without the value. So the handle
finds the new offset of each spilled value. Therefore the file of the superseded generation can be closed at once.
"""

from __future__ import annotations

from typing import Final

from fscoord._log.files import safe_files, spill, torn_tail
from fscoord._log.files.spill import Spilled
from fscoord._log.format.record import LogPosition
from fscoord._log.handle import GenerationUnlinked, HandleState, NeedsLock, reopen
from fscoord._log.recovery import CLOSED, DESCRIPTORS, GENERATION, POSITION, SERVER_STATE
from fscoord._log.replay.cursor import Cursor
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

_LOST: Final = GENERATION | CLOSED | DESCRIPTORS | SERVER_STATE
"""If one of these recovery flags is set, the read descriptor may refer to another file."""
SERVER_FORGOT: Final = frozenset(
    getattr(system.errno, name) for name in ("ESTALE", "EIO", "ENOTCONN", "ESHUTDOWN") if hasattr(system.errno, name)
)
"""The errors of system calls after the file server has restarted or evicted this host, or another host has removed the
file."""
TRIES: Final = 4
"""How many times an operation is tried if the server has forgotten the file. The last try raises the error."""


class LargeValues:
    """Reads the spilled values of one handle."""

    def __init__(self, handle: HandleState, cursor: Cursor) -> None:
        self._handle = handle
        self._cursor = cursor
        self._forgotten = 0

    def relocate(self, place: LogPosition) -> None:
        """Replace the offsets of the spilled values by their offsets in the next generation's snapshot.

        The snapshot ends at `place`. If the snapshot lacks one of the values, the cursor is reset, so that the next
        read applies the whole generation.
        """
        handle = self._handle
        long = spill.find_long(handle.reader_fd, handle.start, place, handle.spill_at)
        try:
            is_all_there = handle.machine.relocate_spilled(long)
        finally:
            long.close()  # if the collector closed the generator, an exception in it would be lost
        if not is_all_there:
            self._cursor.reset()

    def read_unlocked(self, spilled: Spilled) -> bytes:
        """Return the bytes of a spilled value. The caller holds the mutex, but not the log's lock.

        Raises:
            NeedsLock: the read failed, or the bytes have changed. `read_locked` distinguishes the two cases.
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
        """Return the bytes of a spilled value. The caller holds the mutex and the log's lock.

        Raises:
            CorruptLogError: the bytes have changed since they were first read.
            StoreGoneError: the file was truncated.
            StoreUnavailableError: a system call failed.
            OSError: the server has forgotten the file. The transaction reopens the file and tries again.
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
            raise handle.gone(f"was truncated to {size} bytes, after {handle.offset} bytes had been read")
        if value is None:
            reason = f"the {spilled.size} bytes of a long value have changed since they were read first"
            raise handle.corrupt(torn_tail.Damage(spilled.offset, reason))
        return value

    def _read_past_cache(self, spilled: Spilled) -> bytes | None:
        """Return the bytes of `spilled` from the server, because the cache of the mount may be stale."""
        handle = self._handle
        try:
            fd = reopen(handle, handle.read_flags)
        except GenerationUnlinked:
            handle.recovery |= POSITION  # makes the next attempt recover, and so enter the next generation
            raise
        with safe_files.closing_owned(fd, handle.owned_fds):
            if not handle.read_flags & system.O_DIRECT:
                system.drop_cached_pages(fd)
            return spill.read(fd, spilled)
