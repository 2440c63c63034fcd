"""`open_log`: open a log, create it if there is none, write the header of an empty file, and check the options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from fscoord._log.files import safe_files
from fscoord._log.format import record
from fscoord._log.format.header import ForeignFile, Header, RunId
from fscoord._log.format.record import LogPosition, MalformedRecord, Record
from fscoord._log.locking.log_lock import KIND_NAMES, OFD, SOFT, LogLock
from fscoord._log.mount import LOCAL
from fscoord._runtime import system
from fscoord._runtime.escaping import shell_word
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import CorruptLogError, StoreError, StoreTimeoutError, StoreUnavailableError

ATTEMPTS: Final = 100
PAUSE_S: Final = 0.001

BUFFER: Final = 1 << 20
"""The approximate size in bytes of each write(2) to a new log."""

COMPACT_BYTES: Final = 256 * 1024
"""The default file size in bytes from which a log is compacted. A log with few keys grows to this size in about 6,000
small writes."""

SPILL_BYTES: Final = 128 * 1024
"""The default size in bytes from which a value stays in the file and not in memory (see `spill`)."""


class LogOptions(NamedTuple):
    """The options with which a handle opens its log.

    Attributes:
        lock_kind: a value of `log_lock.KINDS`. The header of an existing log must name the same kind.
        durable: make a new log durable, and refuse an existing log that is not durable.
        read_only: open for reading. Nothing is ever written.
        mode: the permissions of a new log. An existing log that other users can write is refused.
        limit: how long to wait for the lock of an empty file, in seconds.
        coherence: how the writes of other hosts are read, one of `mount.COHERENCES`; None: the default of the mount.
        compact_bytes: the file size in bytes from which the log is compacted automatically; 0: never.
        run_id: the id of the run to join or to begin; None: the present run of the log.
        spill_bytes: the size in bytes from which a value is spilled (stays in the file); 0: no value is spilled.
        trust_locks: whether to use the mount's locks although they may not exclude other hosts.
        inodes_last: whether the file system keeps the inode number of a file until the file is removed. Then the
            number identifies the file.
        world_size: the number of participants of the run, if this handle is a participant; otherwise 0.
    """

    lock_kind: int
    durable: bool = False
    read_only: bool = False
    mode: int = 0o600
    limit: float = 300.0
    coherence: str | None = None
    compact_bytes: int = 0
    run_id: RunId | None = None
    spill_bytes: int = 0
    trust_locks: bool = False
    inodes_last: bool = True
    world_size: int = 0

    @property
    def is_soft(self) -> bool:
        """Whether the lock is a soft lock: a symbolic link, for mounts whose kernel locks are missing or unreliable."""
        return self.lock_kind == SOFT

    @property
    def syncs_header(self) -> bool:
        """Whether a new log is synced before other processes use it.

        Without the sync, a host that loses its connection to the file server could leave a log that begins with zeros.
        """
        return self.durable or self.coherence not in (None, LOCAL)

    def inode(self, fd: int) -> int:
        """Return the inode number of the open file `fd`; 0 if the file system does not keep inode numbers."""
        return int(system.os.fstat(fd).st_ino) if self.inodes_last else 0

    def header(self, fd: int) -> bytes:
        """Return the header for a new log in the open file `fd`."""
        log_id, inode = system.random_bytes(16), self.inode(fd)
        return Header(
            log_id,
            self.lock_kind,
            self.durable,
            lineage=log_id,
            root_inode=inode,
            inode=inode,
            created_ns=system.wall_time_ns(),
            run_ids=() if self.run_id is None else (self.run_id,),
        ).encode()


class OpenedLog(NamedTuple):
    """An open log: its descriptors (``writer`` is -1 if read-only), its header, and the position after the header."""

    reader: int
    writer: int
    header: Header
    start: LogPosition


def open_log(path: str, options: LogOptions, reading: int, writing: int, owned_fds: set[int]) -> OpenedLog:
    """Open the log at `path` with `options`, and create it if it does not exist.

    `reading` and `writing` are the flags of open(2) for the two descriptors, which are added to `owned_fds`.

    Raises:
        OSError: a system call failed. The caller converts it.
        InsecurePathError: the file is not a regular file, or users whom ``mode`` does not allow can write it.
        CorruptLogError: the file does not begin with a header.
        StoreError: the log has another kind of lock than `options`, or is not durable although `options` require a
            durable log.
    """
    for _ in range(ATTEMPTS):
        writer = -1 if options.read_only else _open_for_writing(path, options, writing, owned_fds)
        reader = -1
        try:
            reader = safe_files.open_descriptor(path, reading, owned_fds=owned_fds)
            safe_files.check(path, reader if options.read_only else writer, options.mode, read_only=options.read_only)
            data = read_header(reader)
            if options.read_only or safe_files.same_file(system.os.fstat(reader), system.os.fstat(writer)):
                if not Header.is_partial(data):
                    return _check_header(path, options, reader, writer, data)
                if options.read_only:
                    raise no_header(path, data)
                _initialise(path, options, writer)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            if options.read_only:
                raise
        except BaseException:
            _close(writer, reader, owned_fds)
            raise
        _close(writer, reader, owned_fds)
    raise StoreUnavailableError(f"{path} was replaced again and again while it was opened; try again", path=path)


def read_header(fd: int) -> bytes:
    """Return the first bytes of a log. The bytes contain the whole header, unless the file is shorter."""
    data = more = system.os.read(fd, 4096)
    while more and (missing := Header.missing(data)) > 0:
        more = system.os.read(fd, missing)
        data += more
    return data


def write_log(fd: int, header: Header, records: Iterable[Record]) -> LogPosition:
    """Write `header` and `records` to the empty file `fd`. Return the position after the last record.

    Records keep their writers and times.
    """
    first = header.encode()
    _, (size, chain) = Header.decode(first)
    parts, waiting = [first], size
    for each in records:
        data, chain = record.encode(*each, chain)
        parts.append(data)
        size += len(data)
        waiting += len(data)
        if waiting >= BUFFER:
            safe_files.write_all(fd, b"".join(parts))
            parts, waiting = [], 0
    safe_files.write_all(fd, b"".join(parts))
    return LogPosition(size, chain)


def _close(writer: int, reader: int, owned_fds: set[int]) -> None:
    for fd in (writer, reader):
        if fd >= 0:
            safe_files.close_owned(fd, owned_fds)


def _open_for_writing(path: str, options: LogOptions, flags: int, owned_fds: set[int]) -> int:
    try:
        return safe_files.open_descriptor(path, flags, owned_fds=owned_fds)
    except FileNotFoundError as error:
        raise_if_foreign(error)
        safe_files.create(path, options.header, options.mode, durable=options.syncs_header)
        # With O_CREAT, because an NFS client may have cached that the file does not exist: nfs(5), "lookupcache".
        return safe_files.open_descriptor(path, flags | system.os.O_CREAT, options.mode, owned_fds)


def refused_header(path: str, file: str, error: MalformedRecord) -> CorruptLogError:
    """Return the error to raise for the log at `path`, because `error` was raised for the header of `file`."""
    if isinstance(error, ForeignFile):
        what = f"{file} is {error}. Nothing was changed; check the path. If a store was there"
    else:
        what = f"{file} can't be used: {error}. Nothing was changed; choose another path. Before you remove the file"
    return CorruptLogError(f"{what}, run `fscoord verify {shell_word(path)}`", path=path, offset=0, reason=str(error))


def no_header(path: str, data: bytes) -> StoreUnavailableError:
    """Return the error to raise if `path` is opened for reading only, and the file has no complete header.

    `data` are all bytes of the file. The next process that opens the file for writing writes the header.
    """
    what = "has only a part of a header, because its creator died" if data else "is empty: no writer has opened it yet"
    message = f"{path} {what}; check the path (`set` makes it a store)"
    return StoreUnavailableError(message, path=path, errno=system.errno.ENOENT)


def _check_header(path: str, options: LogOptions, reader: int, writer: int, data: bytes) -> OpenedLog:
    try:
        header, start = Header.decode(data)
    except MalformedRecord as error:
        raise refused_header(path, path, error) from None
    known = KIND_NAMES.get(header.lock_kind, f"kind {header.lock_kind}")
    if header.lock_kind != options.lock_kind and not options.read_only:
        raise StoreError(
            f'{path}: this log is locked by "{known}" locks, not by "{KIND_NAMES[options.lock_kind]}";'
            f' pass lock="{known}" here, or remove the log',
            path=path,
        )
    if options.durable and not header.durable:
        raise StoreError(
            f"{path}: this log was not made durable, and that can't be changed; remove it, or pass durable=False",
            path=path,
        )
    return OpenedLog(reader, writer, header, start)


def _initialise(path: str, options: LogOptions, fd: int) -> None:
    """Write the header of an empty file, and hold a lock meanwhile.

    An empty file has no header that states the kind of lock. So two processes may open the file with different kinds
    of locks, which do not exclude each other. Therefore each process first takes an open-file-description lock, if the
    platform has such locks, and then a lock of the kind in `options`.

    A process that dies during this call may leave a part of a header. The next process truncates this part. No other
    bytes of a log are ever truncated.
    """
    deadline = system.time.monotonic() + options.limit
    mutex = system.recursive_mutex()
    kinds = dict.fromkeys((OFD, options.lock_kind) if system.has_ofd_locks() else (options.lock_kind,))
    locks = [LogLock(path, fd, kind, mutex, set()) for kind in kinds]
    while True:
        lock = locks[0]
        try:
            for lock in locks:
                lock.try_lock()
            _write_header(path, options, fd)
            return
        except OSError as error:
            raise_if_foreign(error)
            if not lock.is_taken(error):
                raise lock.refuse(error) or error from None
            if system.time.monotonic() >= deadline:
                raise StoreTimeoutError(
                    f"{path} is empty, and the lock to write its header was not released within {options.limit:.3g} s;"
                    " end the process that opens it, or try again",
                    waited=options.limit,
                ) from None
        finally:
            for lock in locks:
                lock.unlock()
        system.time.sleep(PAUSE_S)


def _write_header(path: str, options: LogOptions, fd: int) -> None:
    opened: set[int] = set()
    try:
        found = read_header(safe_files.open_descriptor(path, system.os.O_RDONLY, owned_fds=opened))
    finally:
        system.close_all(system.os.close, opened)
    if Header.is_partial(found):
        if found:
            system.os.ftruncate(fd, 0)
        safe_files.write_all(fd, options.header(fd))
        if options.syncs_header:
            system.sync_file(fd)
