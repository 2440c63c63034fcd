"""`Shelf`: the part of a log's handle that leaves long values in the file, and gets them when they are asked for.

Where a long value is, is only known of the generation in use. When the log goes on in another file the snapshot there
holds it, too: the frames of the snapshot's records are read, and not the values. So what is left of a generation that
was superseded is given back at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from fscoord._log.contention import Contender
from fscoord._log.format.record import LogPosition, Record
from fscoord._log.io import safe_files, spill, torn_tail
from fscoord._log.io.cursor import ASTRAY, DIRTY, ENDED, REOPEN, STALE, Suspect, Vanished
from fscoord._log.io.spill import Spilled, SpilledRecord
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign

__all__ = ["Shelf"]

T = TypeVar("T")

_LOST: Final = ASTRAY | ENDED | REOPEN | STALE
"""Trouble in which the descriptor may be another file's."""
_SERVER_FORGOT: Final = frozenset((system.errno.ESTALE, system.errno.EIO))
TRIES: Final = 4
"""How often in a row the server may have forgotten the file."""


class Shelf(Contender):
    """The part of `~fscoord._log.log.LogFile` that keeps long values out of memory."""

    _forgotten = 0

    def _leave_long(self, records: Sequence[Record], data: bytes) -> Sequence[SpilledRecord]:
        """Return `records`, which begin `data`, for the consumer: what is long stays in the file."""
        kept, keys = spill.leave_long(records, data, self._offset, self._spill_at)
        if keys:
            self._consumer.expect_long(keys)
        return kept

    def _rehome(self, place: LogPosition) -> None:
        """In a new generation, at `place` behind its snapshot: find what is long there, or read it all anew."""
        long = spill.find_long(self._rfd, self._start, place, self._spill_at)
        try:
            is_all_there = self._consumer.rehome(long)
        finally:
            long.close()  # not by the collector: what interrupts that is lost
        if not is_all_there:
            self._forget()

    def glance(self, spilled: Spilled) -> bytes:
        """Return the bytes of a long value. The caller has the mutex, by `inspect`, and not the lock.

        Raises:
            Suspect: they can't be had so; `fetch` says why.
        """
        if self._trouble & _LOST:
            raise Suspect
        try:
            value = spill.read(self._rfd, spilled)
        except OSError as error:
            raise_if_foreign(error)
            raise Suspect from error
        if value is None:
            raise Suspect
        return value

    def fetch(self, spilled: Spilled) -> bytes:
        """Return the bytes of a long value. The caller has the lock: what it finds is final.

        Raises:
            CorruptLogError: they are not those that were read before.
            StoreGoneError: the file was truncated.
            StoreUnavailableError: the file system refused.
            OSError: the server has forgotten the file, which whoever has the lock knows how to mend.
        """
        try:
            value = spill.read(self._rfd, spilled)
            if value is None and self._is_shared:
                value = self._read_past_cache(spilled)
            size = self._offset if value is not None else system.os.fstat(self._rfd).st_size
        except OSError as error:
            raise_if_foreign(error)
            self._forgotten += 1
            if self._is_shared and error.errno in _SERVER_FORGOT and self._forgotten % TRIES:
                raise
            raise safe_files.unavailable(error, self.path, "reading a long value") from error
        self._forgotten = 0
        if size < self._offset:
            raise self._gone(f"was truncated to {size} bytes, and {self._offset} were read")
        if value is None:
            reason = f"the {spilled.size} bytes of a long value have changed since they were read first"
            raise self._corrupt(torn_tail.Damage(spilled.offset, reason))
        return value

    def _read_past_cache(self, spilled: Spilled) -> bytes | None:
        """Where a host's cache may lie: read from a new descriptor, and not from the cache."""
        try:
            fd = self._reopen(self._read_flags, self._descriptors)
        except Vanished:
            self._trouble |= DIRTY  # so that the next attempt looks where the log has gone
            raise
        try:
            if not self._read_flags & system.O_DIRECT:
                system.os.posix_fadvise(fd, 0, 0, system.os.POSIX_FADV_DONTNEED)
            return spill.read(fd, spilled)
        finally:
            self._drop(fd)

    def position(self) -> tuple[int, int]:
        """Return how far the consumer has got: the generation, and the offset in its file."""
        return self.inspect(lambda: (self.header.generation, self._offset))

    def inspect(self, answer: Callable[[], T]) -> T:
        """Return what `answer` makes of the consumer's state, which nobody changes meanwhile, nor a signal handler."""
        if not system.own_process[0]:
            system.recover_from_fork()
        shared = self._shared
        with shared.mutex:
            if shared.is_inside:
                raise self._entered_twice()
            try:
                shared.is_inside = True
                return answer()
            finally:
                shared.is_inside = False
