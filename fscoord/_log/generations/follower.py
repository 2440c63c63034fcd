"""`Successive`: open a log wherever it has got to, and follow its seals from generation to generation.

A handle that has read all of a sealed generation goes on behind the snapshot of the next, and reads nothing twice. One
that finds the next generation gone has been left behind by more than one: it asks generation 0 for the newest, and
reads that from the start.
"""

from __future__ import annotations

from typing import Final

from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header, Provenance, provenance_of
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.format.runs import Run
from fscoord._log.generations import forwarding
from fscoord._log.generations.forwarding import Root
from fscoord._log.io import safe_files
from fscoord._log.io.cursor import ASTRAY, DIRTY, Vanished, readers
from fscoord._log.io.large_values import Shelf
from fscoord._log.io.opening import LogOptions, open_log, read_header
from fscoord._log.locking.log_lock import LogLock
from fscoord._log.locking.process_mutex import process_mutex_for
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign
from fscoord.errors import FscoordError, StaleRunError, StoreError

__all__ = ["NEVER", "Successive"]

NEVER: Final = float("inf")
_GONE: Final = frozenset((system.errno.ENOENT, getattr(system.errno, "ESTALE", -1)))


class Successive(Shelf):
    """The part of `~fscoord._log.log.LogFile` that knows which file of the log is the one to use.

    Attributes:
        root: generation 0, which has the log's own name.
        file: the path of the generation in use.
    """

    root: Root
    read_only: bool
    _wanted: LogOptions
    _durable: bool
    _run: tuple[Run, ...] = ()
    _life = 0
    _compact_at: float = NEVER
    _is_copy = False
    """Whether the files in use are a copy of a log, which nobody has written to yet: see `identity`."""
    _missed: GenerationRef | None = None
    """The last generation that a seal has named and that was not there."""
    _way: LogPosition | None = None
    """How far this handle has read generation 0, its seal included, or has posted there; None if it has not."""

    def _open(self) -> None:
        opened = open_log(self.path, self._wanted, self._read_flags, self._write_flags, self._descriptors)
        self._consumer.reset()  # of what a log held that was removed while it was opened
        writer = opened.writer
        found = system.os.fstat(opened.reader)
        self.file, self._identity = self.path, (found.st_dev, found.st_ino)
        inode = self._wanted.inode(opened.reader)
        self.root = Root(opened.header, LogPosition(opened.size, opened.chain), self._identity, inode)
        self.header, self._start, self._durable = opened.header, self.root.start, opened.header.durable
        self._is_copy = provenance_of(opened.header, inode, inode) is Provenance.COPY
        self._shared = process_mutex_for(self.root.key)
        self.mutex = self._shared.mutex
        self._rfd, self._root_fd = opened.reader, -1
        lock_fd = self._reopen(self._writing, self._descriptors) if self.read_only else writer
        kind = opened.header.lock_kind
        self._lock = LogLock(self.path, lock_fd, kind, self.mutex, self._descriptors, shared=self.read_only)
        readers.add(self)
        successor = forwarding.hint(opened.reader)
        if successor is None or not self._enter(successor):
            self._stand(self._start)
            self._compact_at = self._first_compaction()

    def _open_again(self) -> None:
        """In a forked child, or when the server has forgotten ours: open new descriptors on the same log.

        It must still be there, for one that is gone is not to be born again.
        """
        self._lock.close()
        self._rfd = self._root_fd = self._lock.fd = -1  # these numbers are not ours any more, or no good
        astray = self._trouble & ASTRAY  # on the way into this generation, and did not arrive
        self._trouble |= ASTRAY  # should this be interrupted, or fail half-way
        root_fd = self._open_root()
        try:
            reader = self._reopen(self._read_flags, self._descriptors)
            writer = self._reopen(self._writing, self._descriptors)
        except Vanished:
            return  # who is astray starts from generation 0
        self._rfd, self._lock = reader, self._lock.next_on(writer)
        if self.header.generation:
            self._root_fd = root_fd
        else:
            self._drop(root_fd)
        self._trouble &= ~ASTRAY | astray

    def _reopen(self, flags: int, owned_fds: set[int]) -> int:
        try:
            return super()._reopen(flags, owned_fds)
        except OSError as error:
            raise_if_foreign(error)
            if self.header.generation and error.errno in _GONE:  # NFS: a name that another host has removed lingers
                raise Vanished from None
            raise

    @property
    def _writing(self) -> int:
        """The flags to open a generation for writing, if this handle writes."""
        return system.os.O_RDONLY if self.read_only else self._write_flags

    def _in_use(self) -> set[int]:
        return {self._rfd, self._lock.fd, self._root_fd}

    def _open_root(self) -> int:
        """Return another descriptor of generation 0, which must still have the log's name."""
        try:
            fd = safe_files.open_descriptor(self.path, self._read_flags, owned_fds=self._descriptors)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            raise self._gone("was deleted") from None
        found = system.os.fstat(fd)
        if (found.st_dev, found.st_ino) != self.root.identity:
            self._drop(fd)
            raise self._gone("was replaced by another file")
        return fd

    # -- from one generation to the next ---------------------------------------------------------------------------

    def _follow(self) -> None:
        """Behind a seal that was read: go on behind the snapshot of the generation that it names."""
        seal = self._seal
        assert seal is not None, "who follows has read a seal"
        if self.header.generation == 0:
            self._way = way = LogPosition(self._offset, self._chain)
            if forwarding.newest(self._rfd, way)[0] is not None:
                self._restart()  # what the seal names is gone, or should be, and may be damaged by now
                return
        if self._enter(seal, LogPosition(seal.size, seal.chain)):
            return
        if seal == self._missed:  # from the newest that generation 0 knows of, the way has led here again
            raise self._lost(seal)
        self._missed = seal
        self._restart()

    def _restart(self) -> None:
        """Forget everything, and begin at the newest generation that generation 0 knows of."""
        self._trouble |= ASTRAY
        last: GenerationRef | None = None
        while True:
            fd = self._open_root()
            successor = self._newest(fd)
            if successor is None:
                if self.header.generation:
                    raise self._gone("was replaced by another file, which names no later generation")
                writer = safe_files.open_descriptor(self.path, self._writing, owned_fds=self._descriptors)
                self._use(self.path, fd, writer, self.root.header, self.root.start)
                self._is_copy = provenance_of(self.root.header, self.root.inode, self.root.inode) is Provenance.COPY
                self._compact_at = self._first_compaction()
                break
            self._drop(fd)
            if self._enter(successor):
                break
            if successor == last:
                raise self._lost(successor)
            last = successor
        self._forget()
        self._trouble = DIRTY

    def _newest(self, fd: int) -> GenerationRef | None:
        """Return what `fd`, generation 0, names last. The part that was read before is read again only if it must."""
        for start in (self._way, self.root.start):
            if start is not None:
                successor, place, _ = forwarding.newest(fd, start)
                if successor is not None:
                    self._way = place
                    return successor
        return None

    def _lost(self, successor: GenerationRef) -> StoreError:
        directory = system.os.path.dirname(self.path)
        return self._gone(
            f"has lost generation {successor.generation}: there is no {system.os.fsdecode(successor.name)} in"
            f" {directory}. If the log was moved, move that file there, too; if it is lost, `fscoord repair --salvage"
            f" {self.path} --output NEW` copies what was written before it"
        )

    def _enter(self, successor: GenerationRef, place: LogPosition | None = None) -> bool:
        """Go on in the file of `successor`, at `place` or behind its header; False if it is not there any more."""
        file = system.os.path.join(system.os.path.dirname(self.path), system.os.fsdecode(successor.name))
        reader = writer = -1
        try:
            reader = safe_files.open_descriptor(file, self._read_flags, owned_fds=self._descriptors)
            writer = safe_files.open_descriptor(file, self._writing, owned_fds=self._descriptors)
            safe_files.check(file, writer, self._wanted.mode, read_only=self.read_only)
            header, start, is_copy = self._checked_header(file, reader, successor)
            root_fd = self._open_root() if self._root_fd < 0 else self._root_fd
        except OSError as error:
            raise_if_foreign(error)
            self._drop(reader)
            self._drop(writer)
            if error.errno in _GONE and not isinstance(error, FscoordError):
                return False
            raise
        is_new = (header.life, header.runs[:1]) != (self.header.life, self.header.runs[:1])
        if self._is_settled and header.runs[:1] != self._run:
            raise self._superseded(header.runs[0] if header.runs else None)
        if self._is_settled and header.life != self._life:
            raise self._finished()
        trouble, self._trouble = self._trouble, self._trouble | ASTRAY
        self._root_fd = root_fd  # kept open, so that its inode number is nobody else's
        self._use(file, reader, writer, header, start)
        self._is_copy = is_copy
        if is_new:  # nothing of what was known counts, nor who we were
            self._lock.bind(writer, 0)
            self._forget()
        else:
            self._stand(place or start)
            if place is not None:
                self._rehome(place)
                self._forget_dead()
        self._compact_at = self._first_compaction()
        self._trouble = trouble
        return True

    def _first_compaction(self) -> float:
        """Return from which length on the generation that was just entered is compacted; a copy is before all else."""
        least = self._wanted.compact_bytes
        if self._is_copy:
            return 0
        return max(least, 2 * self._offset) if least and self.header.generation else least or NEVER

    def _use(self, file: str, reader: int, writer: int, header: Header, start: LogPosition) -> None:
        """Let these be the generation in use; until the caller says so, it is not known where in it we stand."""
        found = system.os.fstat(reader)
        lock = self._lock.next_on(writer)
        self.file, self._identity = file, (found.st_dev, found.st_ino)
        self.header, self._start = header, start
        self._zeros.forget()
        old, self._rfd = self._rfd, reader
        before, self._lock = self._lock, lock
        before.leave()
        self._drop(before.fd)
        self._drop(old)

    def settle(self) -> None:
        """The handle belongs to the run, and the life, that there is now: when another begins, it is over."""
        self._run, self._life, self._is_settled = self.header.runs[:1], self.header.life, True

    def _superseded(self, by: Run | None) -> StaleRunError:
        name = "another run" if by is None else f"run {by[0].decode('utf-8', 'replace')!r}"
        if by is not None and by[1] >= 0:
            name += f", restart {by[1]},"
        message = f"belongs to {name} by now, which took the store over; end this process"
        self._finish(StaleRunError, message)
        return StaleRunError(f"{self.path} {message}", path=self.path)

    def _checked_header(self, file: str, fd: int, successor: GenerationRef) -> tuple[Header, LogPosition, bool]:
        """Return the header of the generation that `successor` names, where it ends, and whether it is a copy."""
        try:
            header, size, chain = Header.decode(read_header(fd))
            if (header.log_id, header.generation) != (successor.log_id, successor.generation):
                raise MalformedRecord("it is not the generation that was to follow")
        except MalformedRecord as error:
            raise safe_files.damaged(self.path, file, 0, str(error)) from None
        ours = self.root.header
        if (header.lock_kind, header.durable) != (ours.lock_kind, ours.durable):
            raise StoreError(f"{file}: its kind of lock, or durability, is not that of {self.path}", path=file)
        stands = provenance_of(header, self.root.inode, self._wanted.inode(fd))
        original = None
        if stands is Provenance.OTHER_ROOT:
            original = forwarding.find_root(self.path, header, ours.log_id)
        if original is not None:
            raise StoreError(
                f"{self.path} is a copy of {original}, and both go on in {file}: they would be one store."
                f" `fscoord cp {self.path} NEW` makes a store of its own; then remove {self.path}",
                path=self.path,
            )
        return header, LogPosition(size, chain), stands is not Provenance.OWN

    def _look(self, now: float) -> None:
        """Make sure that the log's name still leads to its file, and that what was read has not shrunk or gone."""
        found = system.os.fstat(self._rfd)
        if found.st_size < self._offset:
            raise self._gone(f"was truncated to {found.st_size} bytes, and {self._offset} were read")
        try:
            named = system.os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            raise self._gone("was deleted") from None
        is_root = self._root_fd < 0
        if (named.st_dev, named.st_ino) != self.root.identity or (is_root and found.st_nlink == 0):
            raise self._gone("was replaced by another file")
        if found.st_nlink == 0:  # there is a seal behind what was read, or somebody has deleted it
            raise Vanished
        self._looked = now
