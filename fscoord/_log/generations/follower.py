"""`GenerationFollower`: open a log in its newest generation, and follow its seals from one generation to the next.

A seal is the last record of a generation, and names the next. A handle that has read a seal continues after the
snapshot of the next generation, and so reads no data twice. If the next generation was removed, the log has been
compacted again. The handle then finds the name of the newest generation in generation 0, and reads the newest
generation from its first record.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fscoord._log.files import safe_files
from fscoord._log.files.opening import open_log, read_header
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import UNNAMED, Header, Provenance, provenance_of
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.generations import forwarding
from fscoord._log.handle import GenerationUnlinked, HandleState, Root, open_root, reopen
from fscoord._log.locking.log_lock import LogLock
from fscoord._log.locking.process_mutex import process_mutex_for
from fscoord._log.recovery import GENERATION, POSITION
from fscoord._log.replay.cursor import Cursor
from fscoord._log.replay.large_values import LargeValues
from fscoord._runtime import system
from fscoord._runtime.escaping import shell_word
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError, StaleRunError, StoreError

NEVER: Final = float("inf")


class GenerationFollower:
    """Moves a handle from one generation of the log to the next. Callers hold the process mutex.

    Attributes:
        run: the number of the run that the handle has joined. Set by `settle`.
        forwarded: the position in generation 0 up to which this handle has read or appended forward records (records
            that name a later generation). None until the handle has read the seal of generation 0.
    """

    def __init__(self, handle: HandleState, cursor: Cursor, large_values: LargeValues) -> None:
        self._handle = handle
        self._cursor = cursor
        self._large_values = large_values
        self._missing: GenerationRef | None = None  # the last generation that a seal named and whose file was missing
        self.forwarded: LogPosition | None = None
        self.run = 0

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self, opened_lock: Callable[[], object]) -> None:
        """Open the log in its newest generation. A missing log is created with its header.

        Args:
            opened_lock: a function that is called as soon as `HandleState.lock` is set. From then on, a forked child
                must renew the lock.
        """
        handle, options = self._handle, self._handle.options
        opened = open_log(handle.path, options, handle.read_flags, handle.write_flags, handle.owned_fds)
        found = system.os.fstat(opened.reader)
        handle.file, handle.file_identity = handle.path, (found.st_dev, found.st_ino)
        inode = options.inode(opened.reader)
        handle.root = Root(opened.header, opened.start, handle.file_identity, inode)
        handle.header, handle.start = opened.header, opened.start
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
        """Open new descriptors of the same generation, after a fork, or after the server has forgotten the file.

        Raises:
            StoreGoneError: the log is gone. It is not created again.
        """
        handle = self._handle
        handle.lock.close()
        # The old descriptors were closed by the fork, or are stale. Their numbers may belong to other files by now.
        handle.reader_fd = handle.root_fd = handle.lock.fd = -1
        was_on_the_way = handle.recovery & GENERATION  # set by an interrupted `_enter`; it must stay set
        handle.recovery |= GENERATION  # until all descriptors are of one generation again
        root_fd = open_root(handle)
        try:
            reader = reopen(handle, handle.read_flags)
            writer = reopen(handle, handle.lock_flags)
        except GenerationUnlinked:
            return  # GENERATION stays set, so the handle starts from generation 0
        handle.reader_fd, handle.lock = reader, handle.lock.next_on(writer)
        if handle.header.generation:
            handle.root_fd = root_fd
        else:
            handle.close_fd(root_fd)
        handle.recovery &= ~GENERATION | was_on_the_way

    # -- from one generation to the next ---------------------------------------------------------------------------

    def follow(self) -> None:
        """Enter the generation that ``handle.seal`` names, after its snapshot. The caller has just read the seal."""
        handle, seal = self._handle, self._handle.seal
        assert seal is not None, "the caller has read a seal"
        if handle.header.generation == 0:
            self.forwarded = way = LogPosition(handle.offset, handle.chain)
            if forwarding.newest(handle.reader_fd, way)[0] is not None:
                self.restart()  # the seal's generation is superseded: its file may be removed at any moment
                return
        if self._enter(seal, LogPosition(seal.size, seal.chain)):
            return
        if seal == self._missing:  # from the newest generation on, the seals lead to the same missing file again
            raise self._lost(seal)
        self._missing = seal
        self.restart()

    def restart(self) -> None:
        """Drop all state, and begin at the first record of the newest generation, which generation 0 names."""
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
        """Return the newest generation that a record in generation 0 names; None if there is none.

        `fd` is a descriptor of generation 0. The search begins at `forwarded`. If no record after `forwarded` names a
        generation, the search is repeated from the first record.
        """
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
            f" {system.os.path.dirname(path)}. If the log was moved, move that file there too; if it is lost, `fscoord"
            f" repair --salvage {shell_word(path)} --output NEW` copies what was written before it"
        )

    def _enter(self, successor: GenerationRef, place: LogPosition | None = None) -> bool:
        """Make `successor` the generation in use. Return False if the file of `successor` is missing.

        The handle continues at `place`. If `place` is None, the handle continues after the header.

        The file is opened and checked before the handle changes.
        """
        handle = self._handle
        file = safe_files.beside(handle.path, successor.name)
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
            if error.errno in safe_files.GONE and not isinstance(error, FscoordError):
                return False
            raise
        if handle.is_settled and header.run != self.run:
            raise self.superseded(header)
        is_new = header.run != handle.header.run
        # Until the flag is restored, some attributes belong to the old generation and some to the new. An exception
        # leaves the flag set, and recovery starts from generation 0.
        recovery, handle.recovery = handle.recovery, handle.recovery | GENERATION
        handle.root_fd = root_fd
        self._switch(file, reader, writer, header, start)
        handle.is_copy = is_copy
        if is_new:  # another run: the state begins empty, and this handle has no session in it
            handle.lock.bind(writer, 0)
            self._cursor.reset()
        else:
            self._cursor.seek(place or start)
            handle.table.has_all_times = place is not None and handle.table.has_all_times
            if place is not None:
                self._large_values.relocate(place)
                handle.table.forget_dead()
        handle.compact_at = self._first_compaction()
        handle.recovery = recovery
        return True

    def _first_compaction(self) -> float:
        """Return the length in bytes at which the generation in use must be compacted; 0 for a copy of a log."""
        handle = self._handle
        least = handle.options.compact_bytes
        if handle.is_copy:
            return 0
        return max(least, 2 * handle.offset) if least and handle.header.generation else least or NEVER

    def _switch(self, file: str, reader: int, writer: int, header: Header, start: LogPosition) -> None:
        """Make `file` the generation in use. The caller then seeks.

        The handle gets the new descriptors before the old ones are closed. Otherwise an interruption could leave the
        handle with the number of a closed descriptor, and the kernel may give this number to another file.
        """
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

    # -- runs ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Bind the handle to the present run of the log. When another run begins, the handle ends."""
        self.run, self._handle.is_settled = self._handle.header.run, True

    def superseded(self, by: Header) -> StaleRunError:
        """End the handle because a later run, whose header is `by`, has begun. Return the error."""
        table = self._handle.table
        job, count = by.run_ids[0] if by.run_ids else UNNAMED
        name = f"run {job.decode('utf-8', 'replace')!r}" if job else "a new start of the job"
        name += f", restart {count}," if count >= 0 else ""
        starter = table.sessions.get(table.sealed_by)
        place = "" if starter is None else f" (begun by {starter})"
        why = "" if job or table.failure is None else f", because {table.failure}"
        return self._handle.over(StaleRunError, f"belongs to {name} by now{place}{why}; end this process")

    def _checked_header(self, file: str, fd: int, successor: GenerationRef) -> tuple[Header, LogPosition, bool]:
        """Return (header, its end, whether the file is a copy) for the file `fd` of the generation `successor`.

        `successor` is a hint, so the id and the number in the header are compared with it.
        """
        handle = self._handle
        try:
            header, start = Header.decode(read_header(fd))
            if (header.log_id, header.generation) != (successor.log_id, successor.generation):
                raise MalformedRecord("it is not the next generation")
        except MalformedRecord as error:
            raise safe_files.damaged(handle.path, file, 0, str(error)) from None
        ours = handle.root.header
        if (header.lock_kind, header.durable) != (ours.lock_kind, ours.durable):
            raise StoreError(
                f"{file}: its kind of lock or its durability differs from that of {handle.path}; `fscoord verify"
                f" {shell_word(handle.path)}` reports what is safe to do",
                path=file,
            )
        stands = provenance_of(header, handle.root.inode, handle.options.inode(fd))
        original = None
        if stands is Provenance.OTHER_ROOT:
            original = forwarding.find_root(handle.path, header, ours.log_id)
        if original is not None:
            raise StoreError(
                f"{handle.path} is a copy of {original}, and both continue in {file}: they would be one store."
                f" `fscoord cp {shell_word(handle.path)} NEW` makes a store of its own; then remove {handle.path}",
                path=handle.path,
            )
        return header, start, stands is not Provenance.OWN
