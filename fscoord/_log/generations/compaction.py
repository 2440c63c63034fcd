"""`Compactor`: let a log go on in a new generation that holds what it amounts to, and not how it came about.

The new generation is a file of its own, written, synced and locked before anybody can know of it. Then one record, the
seal, ends the old generation and names the new one; only that commits. Before the seal a crash leaves a file that
nobody looks at, and that the next to compact removes; after it there is nothing to repair. Nothing is renamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from fscoord._log.format import record
from fscoord._log.format.control_records import encode_death
from fscoord._log.format.generation_ref import RANDOM_BYTES, GenerationRef, generation_name
from fscoord._log.format.header import Header, LogIdentity
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.format.runs import Run, supersede
from fscoord._log.generations import forwarding
from fscoord._log.generations.follower import NEVER
from fscoord._log.io import safe_files
from fscoord._log.io.cursor import DIRTY
from fscoord._log.io.safe_files import copy_permissions
from fscoord._log.io.writer import Appender
from fscoord._log.locking.log_lock import SOFT, LogLock
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign
from fscoord._runtime.logger import logger
from fscoord.errors import FscoordError, StoreUnavailableError

__all__ = ["MOVED", "NEVER", "Compactor"]

MOVED: Final[Any] = object()
"""What an attempt returns that had to stop because the log goes on in another file."""

_BUFFER: Final = 1 << 20
_RECORD_SIZE: Final = record.RECORD_MIN

Entry = tuple[int, bytes, bytes, int, int]
"""Kind, key, value, writer and time of a record of a snapshot."""


class Compactor(Appender):
    """The part of `~fscoord._log.log.LogFile` that keeps the log short."""

    _refused_by: int | None = None
    """The error number because of which the log could not be compacted last, if that was said."""

    def _tries_to_compact(self, more: int) -> bool:
        """Before `more` bytes are written: compact if that is worth it; return whether it was tried.

        That a disk is full, or anything else, keeps nobody from writing. Only a copy of a log must go on in a file of
        its own before anything is written to it.
        """
        if self._is_copy:
            self._compact()
            return True
        least = self._wanted.compact_bytes
        live = self._live_size()
        grown = self._offset + more
        garbage = self._offset - live
        self._compact_at = max(grown + least // 4, min(grown + max(least, grown // 4), 2 * live)) + 1
        if self.header.generation and garbage <= max(live, least // 2):
            return False  # generation 0 stays for good, so it is ended while it is small
        try:
            self._compact()
            self._refused_by = None
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            reason = getattr(error, "errno", None)
            if self._refused_by != reason or reason is None:  # once, for it is tried again and again
                logger(__name__).warning("%s could not be compacted, and goes on growing: %s", self.path, str(error))
            self._refused_by = reason
        return True

    def _live_size(self) -> int:
        sessions = sum(_RECORD_SIZE + len(session.encode()) for _, session in self._remembered())
        return self._start.offset + sessions + self._consumer.live_size()

    def _compact(self) -> None:
        """With the lock, and up to date: go on in a new generation, which the next operation follows into.

        Raises:
            OSError, FscoordError: there is no new generation, unless the error's ``maybe_applied`` is true.
        """
        self._trouble = DIRTY
        if self._pending or self._torn:
            self._void_tail()
        session = self._lock.session or self._introduce()
        self._bury_all(session)
        self._succeed(self._next_header(), self._snapshot(session), session)

    def _next_header(self) -> Header:
        """Return the header of the next generation, without the inode number of its file."""
        log_id = system.random_bytes(16)
        return self.header._replace(
            log_id=log_id,
            lineage=log_id if self._is_copy else self.header.lineage,
            root_inode=self.root.inode,
            generation=self.header.generation + 1,
            created_ns=system.time.time_ns(),
        )

    def _begin_life(self, run: Run | None) -> None:
        """With the lock, and up to date: go on in a new generation that holds nothing, for `run` if it is given.

        Raises:
            StoreGoneError: the log was removed.
            OSError, FscoordError: there is no new generation, unless the error's ``maybe_applied`` is true.
        """
        self._trouble = DIRTY
        self._drop(self._open_root())  # whoever ended the log may have removed it while this handle waited for the lock
        if self._pending or self._torn:
            self._void_tail()
        header = self._next_header()._replace(
            runs=self.header.runs if run is None else supersede(self.header.runs, run),
            life=(self.header.life + self.is_finished) % (1 << 32),
        )
        self._succeed(header, (), self._lock.session or self._introduce())

    def _snapshot(self, session: int) -> Iterator[Entry]:
        now = system.time.time_ns()
        for number, who in self._remembered():
            for rank, numbers in self.ranks.items():
                if number in numbers and rank != who.rank and (number not in self.deaths or number == max(numbers)):
                    yield record.SESSION, b"", who._replace(rank=rank).encode(), number, who.since_ns
            yield record.SESSION, b"", who.encode(), number, who.since_ns
            if number in self.deaths:
                yield record.DEATH, b"", encode_death(number, who.alive_id), session, self.deaths[number]
        for kind in [record.BELL] * self.bell + [record.LEAVE] * self.left:
            yield kind, b"", b"", session, now
        for kind, key, value in self._consumer.snapshot(self.fetch):
            yield kind, key, value, session, now

    def _bury_all(self, session: int) -> None:
        """With the lock: record the deaths that show. Whoever is to be forgotten must be able to read of its end.

        Bytes alone are asked: to ask for processes opens descriptors, which an interruption would lose.
        """
        alive = self._alive
        deadline = system.time.monotonic() + max(self._limit, 0)
        for number, who in list(self.sessions.items()):
            if alive is None or number in self.deaths or who.alive_id != alive.id:
                continue
            if system.time.monotonic() > deadline:  # the snapshot then remembers those that were not asked for
                return
            if not alive.is_held(number):
                self._append(record.DEATH, b"", encode_death(number, who.alive_id), session)

    def _succeed(self, header: Header, entries: Iterable[Entry], session: int) -> None:
        """Write a generation with this header and these records, and seal the one in use."""
        life = system.life()
        directory, base = system.os.path.split(self.path)
        name = generation_name(system.os.fsencode(base), header.generation, system.random_bytes(RANDOM_BYTES))
        file = system.os.path.join(directory, system.os.fsdecode(name))
        flags = system.os.O_RDWR | system.os.O_APPEND | system.os.O_CREAT | system.os.O_EXCL
        is_sealing, fd, lock = False, -1, None
        try:
            fd = safe_files.open_descriptor(file, flags, owned_fds=self._descriptors)
            self._copy_permissions(file)
            lock = LogLock(file, fd, header.lock_kind, system.threading.RLock(), set())
            if header.lock_kind != SOFT:
                lock.bind(fd, session)
                lock.try_lock()
            place = _write(fd, header._replace(inode=self._wanted.inode(fd)), entries)
            system.os.fsync(fd)
            safe_files.sync_directory(self.path, self._descriptors)
            successor = GenerationRef(header.generation, header.log_id, place.offset, place.chain, name)
            is_sealing = True
            self._append(record.SEAL, b"", successor.seal(), session)
            self._show_the_way(successor, session, LogIdentity(header.lineage, header.root_inode))
        except BaseException as error:
            # as long as the seal may be there, so must be what it names
            if not is_sealing or (isinstance(error, StoreUnavailableError) and not error.maybe_applied):
                safe_files.unlink_quietly(file, life)
            raise
        finally:
            try:
                if lock is not None and header.lock_kind != SOFT:
                    lock.unlock()
            except OSError as error:  # closing the descriptor will do
                raise_if_foreign(error)
            self._drop(fd)

    def _copy_permissions(self, file: str) -> None:
        try:
            copy_permissions(self.file, file)
        except OSError as error:
            raise_if_foreign(error)
            doing = "giving the next file of the log the group and access control list of this one"
            raise safe_files.unavailable(error, self.path, doing) from error

    def _show_the_way(self, successor: GenerationRef, session: int, owner: LogIdentity) -> None:
        """Behind the seal: all that is left can wait, and be done by somebody else."""
        before = system.os.fsencode(system.os.path.basename(self.file)) if self.header.generation else None
        flags = forwarding.Flags(self._read_flags, self._write_flags)
        try:
            if before is not None:
                signed = session, self._next_time()
                posted = forwarding.post(self.path, self.root, successor, *signed, *flags, self._descriptors, self._way)
                if posted is None:
                    return
                self._way = posted
            kind = self.root.header.lock_kind
            forwarding.remove_superseded(self.path, owner, successor, before, kind, flags, self._descriptors)
        except (OSError, MalformedRecord, FscoordError) as error:
            raise_if_foreign(error)
            logger(__name__).debug("%s: behind the seal of generation %d: %s", self.path, successor.generation, error)


def _write(fd: int, header: Header, entries: Iterable[Entry]) -> LogPosition:
    """Write a generation to the empty file `fd`; return where its snapshot ends."""
    first = header.encode()
    _, size, chain = Header.decode(first)
    parts, waiting = [first], size
    for kind, key, value, writer, time_ns in entries:
        data, chain = record.encode(kind, key, value, writer, time_ns, chain)
        parts.append(data)
        size += len(data)
        waiting += len(data)
        if waiting >= _BUFFER:
            safe_files.write_all(fd, b"".join(parts))
            parts, waiting = [], 0
    safe_files.write_all(fd, b"".join(parts))
    return LogPosition(size, chain)
