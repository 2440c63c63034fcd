"""`HandleState`: what one handle knows of its log, in one object that the parts of the handle share.

The process mutex of the log (`HandleState.mutex`) guards every attribute: only the thread that holds it reads or
changes them. Three are also read without it, as a single load each: ``bell`` after a write, and ``file`` and ``lock``
by a thread that waits for the log's lock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.format.record import LogPosition
from fscoord._log.io import safe_files, torn_tail
from fscoord._log.io.opening import LogOptions
from fscoord._log.io.spill import NEVER
from fscoord._log.locking.log_lock import LogLock
from fscoord._log.locking.process_mutex import LogKey, ProcessMutex
from fscoord._log.recovery import CLOSED
from fscoord._runtime import system
from fscoord.errors import CorruptLogError, SessionDeadError, StoreError, StoreGoneError

__all__ = ["GenerationUnlinked", "HandleState", "NeedsLock", "Root"]


class Root(NamedTuple):
    """Generation 0 of a log.

    Attributes:
        header: its header.
        start: the position of its first record.
        identity: its device and inode number.
        inode: the inode number if these last on this file system; otherwise 0.
    """

    header: Header
    start: LogPosition
    identity: tuple[int, int]
    inode: int = 0

    @property
    def key(self) -> LogKey:
        """The key that tells this log from all others on this host."""
        return self.header.log_id, *self.identity


class NeedsLock(Exception):
    """Without the log's lock the bytes look damaged: read them again with it."""


class GenerationUnlinked(NeedsLock):
    """The file of the generation in use has no name any more: it was superseded, or somebody has deleted it."""


class HandleState:
    """The state of one handle.

    Attributes:
        path: the absolute path of the log.
        options: the options with which the log was opened.
        read_only: whether this handle never writes.
        root: generation 0, which has the log's own name.
        file: the path of the generation in use.
        file_identity: its device and inode number.
        header: its header.
        start: the position after its header.
        reader_fd: the descriptor that reads it; -1 if there is none.
        root_fd: a descriptor of generation 0, held while a later generation is in use, so that its inode number is
            given to no other file; -1 in generation 0.
        lock: the log's lock, on a descriptor of its own.
        shared: the mutex, and the mark of re-entry, that all handles of this process on this log share.
        mutex: `shared.mutex`, for brevity.
        owned_fds: every descriptor that the handle must close.
        offset: where the last good record ends.
        chain: the chained checksum there.
        pending: the bytes after it that were read: the beginning of a record that is not complete yet.
        is_torn: the record at ``offset`` is torn and has no void yet, as far as was seen.
        seal: the seal that was read, until the handle has entered the next generation.
        recovery: what the next operation must recover (see `recovery`); 0 at the end of an operation that succeeds.
        final_error: with `CLOSED`: the type and message of the error that every operation raises.
        path_checked_at: when the path was last compared with the file (monotonic, in seconds).
        time_left: how many seconds the operation may take that is under way.
        bell: how many announcements of a bell were read; 0 if no process has waited yet.
        is_settled: whether the handle belongs to its run and life, so that another one ends it.
        is_copy: the files are a copy of a log, and nothing was written to it yet: see `identity`.
        compact_at: the length from which a writer considers to compact; 0 for a copy.
        spill_at: from how many bytes on a value is left in the file.
        zeros: how far zeros were read after a torn record.
        is_shared: whether other hosts write to the log, whose appends no event of the file system reports.
        may_lie: whether bytes may have come from a cache that was not valid, so that zeros prove nothing.
        short_read_is_end: whether a read that brings less than was asked for has seen the end of the file.
        read_flags: the flags that open the generation in use for reading.
        write_flags: likewise for writing.
    """

    __slots__ = (
        "__weakref__", "bell", "chain", "compact_at", "file", "file_identity", "final_error", "header", "is_copy",
        "is_settled", "is_shared", "is_torn", "lock", "may_lie", "mutex", "offset", "options", "owned_fds", "path",
        "path_checked_at", "pending", "read_flags", "read_only", "reader_fd", "recovery", "root", "root_fd", "seal",
        "shared", "short_read_is_end", "spill_at", "start", "time_left", "write_flags", "zeros",
    )  # fmt: skip

    root: Root
    file: str
    file_identity: tuple[int, int]
    header: Header
    start: LogPosition
    lock: LogLock
    shared: ProcessMutex
    mutex: Any
    offset: int
    chain: int
    zeros: torn_tail.Zeros

    def __init__(self, path: str, options: LogOptions) -> None:
        self.path, self.options, self.read_only = path, options, options.read_only
        self.reader_fd = self.root_fd = -1
        self.owned_fds = system.Descriptors()
        self.pending, self.is_torn = b"", False
        self.seal: GenerationRef | None = None
        self.recovery, self.bell = 0, 0
        self.final_error: tuple[type[StoreError], str] = (StoreError, "")
        self.path_checked_at, self.time_left = 0.0, float("inf")
        self.is_settled = self.is_copy = False
        self.compact_at: float = options.compact_bytes or float("inf")
        self.spill_at = options.spill_bytes or NEVER
        self.is_shared = self.may_lie = self.short_read_is_end = False
        self.read_flags: int = system.os.O_RDONLY
        self.write_flags: int = system.os.O_RDWR | system.os.O_APPEND

    @property
    def lock_flags(self) -> int:
        """The flags that open the descriptor of the log's lock, through which the handle also appends."""
        return system.os.O_RDONLY if self.read_only else self.write_flags

    def finish(self, kind: type[StoreError], message: str) -> None:
        """Let every later operation raise `kind`."""
        self.final_error = (kind, message)
        self.recovery |= CLOSED

    def gone(self, how: str) -> StoreGoneError:
        """End the handle, and return the error that says `how` the log went."""
        return self.over(StoreGoneError, f"{how}; open the store again")

    def over(self, kind: type[StoreGoneError], message: str) -> StoreGoneError:
        """End the handle, and return the error that every operation raises from now on."""
        self.finish(kind, message)
        return kind(f"{self.path} {message}", path=self.path)

    def session_is_dead(self, number: int) -> StoreGoneError:
        """End the handle whose own session was recorded as dead."""
        message = f"says that this handle's session {number} is dead, so others go on without it; open the store again"
        return self.over(SessionDeadError, message)

    def unlinked(self) -> Exception:
        """Return what to raise because the file in use has no name any more."""
        return GenerationUnlinked() if self.header.generation else self.gone("was deleted")

    def corrupt(self, damage: torn_tail.Damage) -> CorruptLogError:
        """Return the error for `damage` in the generation in use."""
        return safe_files.damaged(self.path, self.file, damage.offset, damage.reason)

    def close_fd(self, fd: int) -> None:
        """Close one of the descriptors that the handle owns; -1 is none."""
        if fd >= 0:
            safe_files.close_owned(fd, self.owned_fds)

    def fds_in_use(self) -> set[int]:
        """Return the descriptors that are in use; an interruption may have left others open."""
        return {self.reader_fd, self.lock.fd, self.root_fd}
