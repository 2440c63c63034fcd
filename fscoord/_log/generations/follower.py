"""`GenerationFollower`: open a log wherever it has got to, and follow its seals from generation to generation.

A handle that has read all of a sealed generation goes on after the snapshot of the next, and reads nothing twice. A
handle that finds the next generation gone has been left behind by more than one: it asks generation 0 for the newest,
and reads that from its first record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header, Provenance, Run, provenance_of
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.generations import forwarding
from fscoord._log.handle import GenerationUnlinked, HandleState, Root
from fscoord._log.io import safe_files
from fscoord._log.io.cursor import Cursor
from fscoord._log.io.descriptors import FILE_GONE, open_root, reopen
from fscoord._log.io.large_values import LargeValues
from fscoord._log.io.opening import open_log, read_header
from fscoord._log.liveness.session_table import SessionTable
from fscoord._log.locking.log_lock import LogLock
from fscoord._log.locking.process_mutex import process_mutex_for
from fscoord._log.recovery import GENERATION, POSITION
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError, StaleRunError, StoreError

__all__ = ["NEVER", "GenerationFollower"]

NEVER: Final = float("inf")


class GenerationFollower:
    """The way of one handle from one generation to the next.

    Attributes:
        run: the run that the handle belongs to, as the first of a header's runs, once it is settled.
        life: likewise the life of the log.
        forwarded: how far this handle has read generation 0, its seal included, or has appended there; None if it
            has not.
    """

    def __init__(self, handle: HandleState, cursor: Cursor, table: SessionTable, large_values: LargeValues) -> None:
        self._handle = handle
        self._cursor = cursor
        self._table = table
        self._large_values = large_values
        self._missing: GenerationRef | None = None  # the last generation that a seal has named and that was not there
        self.forwarded: LogPosition | None = None
        self.run: tuple[Run, ...] = ()
        self.life = 0

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self, opened_lock: Callable[[], object]) -> None:
        """Open the log, which appears with its header if it is not there, in its newest generation.

        Args:
            opened_lock: is called when the handle has a lock, and a forked child has something to renew.
        """
        handle, options = self._handle, self._handle.options
        opened = open_log(handle.path, options, handle.read_flags, handle.write_flags, handle.owned_fds)
        found = system.os.fstat(opened.reader)
        handle.file, handle.file_identity = handle.path, (found.st_dev, found.st_ino)
        inode = options.inode(opened.reader)
        handle.root = Root(opened.header, LogPosition(opened.size, opened.chain), handle.file_identity, inode)
        handle.header, handle.start = opened.header, handle.root.start
        handle.is_copy = provenance_of(opened.header, inode, inode) is Provenance.COPY
        handle.shared = process_mutex_for(handle.root.key)
        handle.mutex = handle.shared.mutex
        handle.reader_fd, handle.root_fd = opened.reader, -1
        lock_fd = reopen(handle, handle.lock_flags) if handle.read_only else opened.writer
        kind = opened.header.lock_kind
        handle.lock = LogLock(handle.path, lock_fd, kind, handle.mutex, handle.owned_fds, shared=handle.read_only)
        opened_lock()
        successor = forwarding.hint(opened.reader)
        if successor is None or not self._enter(successor):
            self._cursor.seek(handle.start)
            handle.compact_at = self._first_compaction()

    def open_again(self) -> None:
        """In a forked child, or when the server has forgotten ours: open new descriptors of the same generation.

        The log must still be there: a log that is gone must not be created again.
        """
        handle = self._handle
        handle.lock.close()
        handle.reader_fd = handle.root_fd = handle.lock.fd = -1  # these numbers are not ours any more, or of no use
        was_on_the_way = handle.recovery & GENERATION  # into this generation, and did not arrive
        handle.recovery |= GENERATION  # should this be interrupted, or fail half-way
        root_fd = open_root(handle)
        try:
            reader = reopen(handle, handle.read_flags)
            writer = reopen(handle, handle.lock_flags)
        except GenerationUnlinked:
            return  # with GENERATION set the handle starts from generation 0
        handle.reader_fd, handle.lock = reader, handle.lock.next_on(writer)
        if handle.header.generation:
            handle.root_fd = root_fd
        else:
            handle.close_fd(root_fd)
        handle.recovery &= ~GENERATION | was_on_the_way

    # -- from one generation to the next ---------------------------------------------------------------------------

    def follow(self) -> None:
        """After a seal that was read: go on after the snapshot of the generation that it names."""
        handle, seal = self._handle, self._handle.seal
        assert seal is not None, "the caller has read a seal"
        if handle.header.generation == 0:
            self.forwarded = way = LogPosition(handle.offset, handle.chain)
            if forwarding.newest(handle.reader_fd, way)[0] is not None:
                self.restart()  # the generation that the seal names is gone, or should be, and may be damaged by now
                return
        if self._enter(seal, LogPosition(seal.size, seal.chain)):
            return
        if seal == self._missing:  # from the newest that generation 0 knows of, the seals have led here again
            raise self._lost(seal)
        self._missing = seal
        self.restart()

    def restart(self) -> None:
        """Forget everything, and begin at the newest generation that generation 0 knows of."""
        handle = self._handle
        handle.recovery |= GENERATION
        last: GenerationRef | None = None
        while True:
            fd = open_root(handle)
            successor = self._newest(fd)
            if successor is None:
                if handle.header.generation:
                    raise handle.gone("was replaced by another file, which names no later generation")
                writer = safe_files.open_descriptor(handle.path, handle.lock_flags, owned_fds=handle.owned_fds)
                self._switch(handle.path, fd, writer, handle.root.header, handle.root.start)
                handle.is_copy = (
                    provenance_of(handle.root.header, handle.root.inode, handle.root.inode) is Provenance.COPY
                )
                handle.compact_at = self._first_compaction()
                break
            handle.close_fd(fd)
            if self._enter(successor):
                break
            if successor == last:
                raise self._lost(successor)
            last = successor
        self._cursor.reset()
        handle.recovery = POSITION

    def _newest(self, fd: int) -> GenerationRef | None:
        """Return the generation that `fd`, generation 0, names last; the part read before is read again if need be."""
        for start in (self.forwarded, self._handle.root.start):
            if start is not None:
                successor, place, _ = forwarding.newest(fd, start)
                if successor is not None:
                    self.forwarded = place
                    return successor
        return None

    def _lost(self, successor: GenerationRef) -> StoreError:
        path = self._handle.path
        return self._handle.gone(
            f"has lost generation {successor.generation}: there is no {system.os.fsdecode(successor.name)} in"
            f" {system.os.path.dirname(path)}. If the log was moved, move that file there, too; if it is lost, `fscoord"
            f" repair --salvage {path} --output NEW` copies what was written before it"
        )

    def _enter(self, successor: GenerationRef, place: LogPosition | None = None) -> bool:
        """Go on in the file of `successor`, at `place` or after its header; False if it is not there any more."""
        handle = self._handle
        file = system.os.path.join(system.os.path.dirname(handle.path), system.os.fsdecode(successor.name))
        reader = writer = -1
        try:
            reader = safe_files.open_descriptor(file, handle.read_flags, owned_fds=handle.owned_fds)
            writer = safe_files.open_descriptor(file, handle.lock_flags, owned_fds=handle.owned_fds)
            safe_files.check(file, writer, handle.options.mode, read_only=handle.read_only)
            header, start, is_copy = self._checked_header(file, reader, successor)
            root_fd = open_root(handle) if handle.root_fd < 0 else handle.root_fd
        except OSError as error:
            raise_if_foreign(error)
            handle.close_fd(reader)
            handle.close_fd(writer)
            if error.errno in FILE_GONE and not isinstance(error, FscoordError):
                return False
            raise
        is_new = (header.life, header.runs[:1]) != (handle.header.life, handle.header.runs[:1])
        if handle.is_settled and header.runs[:1] != self.run:
            raise self.superseded(header.runs[0] if header.runs else None)
        if handle.is_settled and header.life != self.life:
            raise self._cursor.finished()
        recovery, handle.recovery = handle.recovery, handle.recovery | GENERATION
        handle.root_fd = root_fd
        self._switch(file, reader, writer, header, start)
        handle.is_copy = is_copy
        if is_new:  # nothing that was known counts, nor does this handle's session
            handle.lock.bind(writer, 0)
            self._cursor.reset()
        else:
            self._cursor.seek(place or start)
            if place is not None:
                self._large_values.relocate(place)
                self._table.forget_dead()
        handle.compact_at = self._first_compaction()
        handle.recovery = recovery
        return True

    def _first_compaction(self) -> float:
        """Return the length from which the generation just entered is compacted; a copy is, before its first write."""
        handle = self._handle
        least = handle.options.compact_bytes
        if handle.is_copy:
            return 0
        return max(least, 2 * handle.offset) if least and handle.header.generation else least or NEVER

    def _switch(self, file: str, reader: int, writer: int, header: Header, start: LogPosition) -> None:
        """Let these be the generation in use; until the caller seeks, the position in it is unknown."""
        handle = self._handle
        found = system.os.fstat(reader)
        lock = handle.lock.next_on(writer)
        handle.file, handle.file_identity = file, (found.st_dev, found.st_ino)
        handle.header, handle.start = header, start
        handle.zeros.forget()
        old, handle.reader_fd = handle.reader_fd, reader
        before, handle.lock = handle.lock, lock
        before.leave()
        handle.close_fd(before.fd)
        handle.close_fd(old)

    # -- runs and lives --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bind the handle to the present run and life of the log: when another begins, the handle is over."""
        handle = self._handle
        self.run, self.life, handle.is_settled = handle.header.runs[:1], handle.header.life, True

    def superseded(self, by: Run | None) -> StaleRunError:
        """End the handle: the log belongs to another run."""
        handle = self._handle
        name = "another run" if by is None else f"run {by[0].decode('utf-8', 'replace')!r}"
        if by is not None and by[1] >= 0:
            name += f", restart {by[1]},"
        message = f"belongs to {name} by now, which took the store over; end this process"
        handle.finish(StaleRunError, message)
        return StaleRunError(f"{handle.path} {message}", path=handle.path)

    def _checked_header(self, file: str, fd: int, successor: GenerationRef) -> tuple[Header, LogPosition, bool]:
        """Return the header of the generation that `successor` names, where it ends, and whether it is a copy."""
        handle = self._handle
        try:
            header, size, chain = Header.decode(read_header(fd))
            if (header.log_id, header.generation) != (successor.log_id, successor.generation):
                raise MalformedRecord("it is not the generation that was to follow")
        except MalformedRecord as error:
            raise safe_files.damaged(handle.path, file, 0, str(error)) from None
        ours = handle.root.header
        if (header.lock_kind, header.durable) != (ours.lock_kind, ours.durable):
            raise StoreError(f"{file}: its kind of lock, or durability, is not that of {handle.path}", path=file)
        stands = provenance_of(header, handle.root.inode, handle.options.inode(fd))
        original = None
        if stands is Provenance.OTHER_ROOT:
            original = forwarding.find_root(handle.path, header, ours.log_id)
        if original is not None:
            raise StoreError(
                f"{handle.path} is a copy of {original}, and both go on in {file}: they would be one store."
                f" `fscoord cp {handle.path} NEW` makes a store of its own; then remove {handle.path}",
                path=handle.path,
            )
        return header, LogPosition(size, chain), stands is not Provenance.OWN
