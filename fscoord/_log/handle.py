"""`HandleState`: the state of one handle, in one object that the parts of the handle share.

`reopen` and `open_root` open a file of the log again, and check that it is still the same file.

The process mutex of the log (`HandleState.mutex`) guards every attribute: only the thread that holds the mutex reads or
changes an attribute. There are three exceptions. In each of them, a thread loads an attribute without the mutex:

- A thread reads ``bell`` after a write.
- A thread that waits for the log's lock reads ``file``, ``lock``, ``recovery`` and ``path_checked_at``.
- A wait reads ``recovery`` to learn whether the handle is closed.

``is_shared`` and ``root`` do not change after opening.

Terms: a *generation* is one of the files in which a log continues, one after another; generation 0 is the first. A
*torn* record is a record whose writer died before the record was complete. A *void* is a record with which readers skip
a torn record.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from fscoord._log.files import safe_files, torn_tail
from fscoord._log.files.opening import LogOptions
from fscoord._log.files.spill import NEVER
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.format.record import LogPosition
from fscoord._log.locking.log_lock import LogLock
from fscoord._log.locking.process_mutex import LogKey, ProcessMutex
from fscoord._log.recovery import CLOSED
from fscoord._log.session_table import SessionTable
from fscoord._log.state_machine import StateMachine
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import CorruptLogError, SessionDeadError, StoreError, StoreGoneError

E = TypeVar("E", bound=StoreError)


class Root(NamedTuple):
    """Generation 0 of a log.

    Attributes:
        header: the header of generation 0.
        start: the position of its first record.
        identity: the device and inode number of generation 0.
        inode: the inode number if the file system keeps inode numbers; otherwise 0.
    """

    header: Header
    start: LogPosition
    identity: tuple[int, int]
    inode: int = 0

    @property
    def key(self) -> LogKey:
        """The key of this log, unique among all logs on this host."""
        return self.header.log_id, *self.identity


class NeedsLock(Exception):
    """Raised by a read that must be repeated under the log's lock, for example because the bytes look damaged."""


class GenerationUnlinked(NeedsLock):
    """Raised if the generation in use has no name any more: it was superseded, or a user deleted the file."""


class HandleState:
    """The state of one handle.

    Attributes:
        path: the absolute path of the log.
        options: the options with which the log was opened.
        machine: the state machine that applies every data record once, in order.
        table: the sessions that the log has recorded.
        read_only: whether this handle never writes.
        root: generation 0, which has the log's own name.
        file: the path of the generation in use.
        file_identity: the device and inode number of ``file``.
        header: the header of ``file``.
        start: the position after the header.
        reader_fd: the descriptor from which the file is read; -1 if there is none.
        root_fd: a descriptor of generation 0, open while a later generation is in use, so that the file system gives
            the inode number of generation 0 to no other file; -1 in generation 0.
        lock: the log's lock, on a descriptor of its own.
        shared: the mutex and the flag of re-entry, which all handles of this process on this log share.
        mutex: the same object as `shared.mutex`.
        owned_fds: every descriptor that the handle must close.
        offset: the end of the last good record that was applied.
        chain: the chained checksum at ``offset``.
        pending: the bytes after ``offset`` that were read: the beginning of a record that is not complete yet.
        is_torn: whether the record at ``offset`` is torn, and no void for this record was read yet.
        seal: the seal (the last record of a generation, which names the next one) that the handle has read and not
            followed yet; None if there is none.
        recovery: the flags of the invariants that the next operation must restore (see `recovery`); 0 at the end of an
            operation that succeeds.
        final_error: the type and message of the error that every operation raises once `recovery` is `CLOSED`.
        path_checked_at: when the path was last compared with the file (monotonic, in seconds).
        time_left: how many seconds the present operation may take.
        bell: the number of BELL records (announcements of the bell file) that were read; 0 if no process has waited
            yet.
        is_settled: whether the handle has joined a run of the log. The end of the run ends the handle.
        is_copy: whether the files are a copy of another log's files, and no record was appended to the copy yet (see
            `Provenance`).
        compact_at: the file length in bytes from which a writer considers a compaction; 0 for a copy.
        spill_at: the size in bytes from which a value is spilled: memory keeps only its location in the file.
        zeros: the range of bytes after a torn record that are known to be zeros.
        is_shared: whether other hosts write to the log. File events on this host do not report their appends.
        may_lie: whether a read may return bytes from a stale cache. Then zeros do not prove that a record is torn.
        short_read_is_end: whether a read has reached the end of the file if it returns fewer bytes than requested.
        read_flags: the flags of open(2) for reading the generation in use.
        write_flags: the flags of open(2) for writing to the generation in use.
    """

    __slots__ = (
        "__weakref__", "bell", "chain", "compact_at", "file", "file_identity", "final_error", "header", "is_copy",
        "is_settled", "is_shared", "is_torn", "lock", "machine", "may_lie", "mutex", "offset", "options", "owned_fds",
        "path", "path_checked_at", "pending", "read_flags", "read_only", "reader_fd", "recovery", "root", "root_fd",
        "seal", "shared", "short_read_is_end", "spill_at", "start", "table", "time_left", "write_flags", "zeros",
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

    def __init__(self, path: str, options: LogOptions, machine: StateMachine, table: SessionTable) -> None:
        self.path, self.options, self.read_only = path, options, options.read_only
        self.machine, self.table = machine, table
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
        """The flags of open(2) for the descriptor on which the handle locks the log and appends to it."""
        return system.os.O_RDONLY if self.read_only else self.write_flags

    def finish(self, kind: type[StoreError], message: str) -> None:
        """Make every later operation raise `kind` with the log's path and `message`."""
        self.final_error = (kind, message)
        self.recovery |= CLOSED

    def gone(self, how: str) -> StoreGoneError:
        """End the handle because its log is gone. Return the error. `how` says what happened to the log."""
        return self.over(StoreGoneError, f"{how}; open the store again")

    def over(self, kind: type[E], message: str) -> E:
        """End the handle with an error of type `kind`. Return the error; every later operation raises it too."""
        self.finish(kind, message)
        return kind(f"{self.path} {message}", path=self.path)

    def session_is_dead(self, number: int) -> SessionDeadError:
        """End the handle because its own session `number` was recorded as dead. Return the error."""
        message = f"has a death record: this handle's session {number} is dead; open the store again"
        return self.over(SessionDeadError, message)

    def unlinked(self) -> Exception:
        """Return the exception to raise if the generation in use has no name any more.

        Generation 0 keeps its name as long as the log exists. A later generation loses its name when it is superseded.
        """
        return GenerationUnlinked() if self.header.generation else self.gone("was deleted")

    def corrupt(self, damage: torn_tail.Damage) -> CorruptLogError:
        """Return the error for `damage` in the generation in use."""
        return safe_files.damaged(self.path, self.file, damage.offset, damage.reason)

    def close_fd(self, fd: int) -> None:
        """Close `fd`, one of the descriptors that the handle owns. Do nothing if it is -1."""
        if fd >= 0:
            safe_files.close_owned(fd, self.owned_fds)

    def fds_in_use(self) -> set[int]:
        """Return the descriptors that are in use. Only an interruption can leave other descriptors in ``owned_fds``."""
        return {self.reader_fd, self.lock.fd, self.root_fd}


def reopen(handle: HandleState, flags: int) -> int:
    """Return another descriptor of the generation in use, owned by the handle.

    Raises:
        GenerationUnlinked: the file has no name any more.
        StoreGoneError: another file has the name, or the log was deleted.
    """
    fd = -1
    try:
        fd = safe_files.open_descriptor(handle.file, flags, owned_fds=handle.owned_fds)
        found = system.os.fstat(fd)
    except FileNotFoundError as error:
        raise_if_foreign(error)
        raise handle.unlinked() from None
    except PermissionError as error:
        raise_if_foreign(error)
        # The user of this process, or the mode of the directory, has changed since the log was opened. So duplicate the
        # descriptor that still works. The two share one position, but the callers seek before they read.
        if flags != handle.read_flags or handle.may_lie:
            raise
        fd = system.duplicate(handle.reader_fd, handle.owned_fds)
        found = system.os.fstat(fd)
    except OSError as error:
        raise_if_foreign(error)
        handle.close_fd(fd)
        # An NFS client caches the names of files. If another host has removed this file, open(2) may still succeed, and
        # then fstat(2) is the first call that the server refuses.
        if handle.header.generation and error.errno in safe_files.GONE:
            raise GenerationUnlinked from None
        raise
    if (found.st_dev, found.st_ino) != handle.file_identity:
        handle.close_fd(fd)
        raise handle.gone("was replaced by another file")
    return fd


def open_root(handle: HandleState) -> int:
    """Return another descriptor of generation 0, owned by the handle.

    Raises:
        StoreGoneError: generation 0 does not have the log's name any more.
    """
    try:
        fd = safe_files.open_descriptor(handle.path, handle.read_flags, owned_fds=handle.owned_fds)
    except FileNotFoundError as error:
        raise_if_foreign(error)
        raise handle.gone("was deleted") from None
    found = system.os.fstat(fd)
    if (found.st_dev, found.st_ino) != handle.root.identity:
        handle.close_fd(fd)
        raise handle.gone("was replaced by another file")
    return fd
