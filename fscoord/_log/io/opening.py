"""Open a log: let it be born if there is none, give an empty file its header, check that all agree on what it is."""

from __future__ import annotations

from typing import Final, NamedTuple

from fscoord._log.format.header import Header
from fscoord._log.format.record import MalformedRecord
from fscoord._log.format.runs import Run
from fscoord._log.io import safe_files
from fscoord._log.locking.log_lock import KIND_NAMES, OFD, SOFT, LogLock
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import CorruptLogError, StoreError, StoreTimeoutError, StoreUnavailableError

__all__ = ["COMPACT_BYTES", "SPILL_BYTES", "LogOptions", "OpenedLog", "open_log"]

ATTEMPTS: Final = 100
PAUSE_S: Final = 0.001

COMPACT_BYTES: Final = 256 * 1024
"""From which length on a log is compacted, unless asked for otherwise: once in 6,000 small writes to few keys, then."""

SPILL_BYTES: Final = 128 * 1024
"""From which length on a value is left in the file. What is read of small records at once is shorter."""


class LogOptions(NamedTuple):
    """What a handle asks of its log.

    Attributes:
        lock_kind: a value of `lock.KINDS`; what the header says must be the same.
        durable: make a new log durable, and refuse an old one that is not.
        read_only: open for reading; nothing is ever written.
        mode: the permissions of a new log, and the most that an old one may have.
        limit: the seconds to wait for the lock of a file that is found empty.
        coherence: how to read what other hosts wrote, one of `mount.COHERENCES`; None: as the mount wants it.
        compact_bytes: a log that is shorter is not compacted unasked; 0: none is.
        run: the run that the handle belongs to; None: whichever there is.
        spill_bytes: values of so many bytes or more are not kept in memory; 0: all are.
        inodes_last: whether the file system's inode numbers stay the same, so that they can identify a file.
    """

    lock_kind: int
    durable: bool = False
    read_only: bool = False
    mode: int = 0o600
    limit: float = 300.0
    coherence: str | None = None
    compact_bytes: int = 0
    run: Run | None = None
    spill_bytes: int = 0
    inodes_last: bool = True

    @property
    def is_soft(self) -> bool:
        """Whether the lock is none of the kernel's, so that others of its locks are not to be relied on, either."""
        return self.lock_kind == SOFT

    def inode(self, fd: int) -> int:
        """Return the inode number of the open file `fd`, 0 where these do not last."""
        return int(system.os.fstat(fd).st_ino) if self.inodes_last else 0

    def header(self, fd: int) -> bytes:
        """Return the header of a new log in the open file `fd`."""
        log_id, inode = system.random_bytes(16), self.inode(fd)
        return Header(
            log_id,
            self.lock_kind,
            self.durable,
            lineage=log_id,
            root_inode=inode,
            inode=inode,
            created_ns=system.time.time_ns(),
            runs=() if self.run is None else (self.run,),
        ).encode()


class OpenedLog(NamedTuple):
    """An open log: its descriptors (``writer`` is -1 when read-only) and what it begins with."""

    reader: int
    writer: int
    header: Header
    size: int
    chain: int


def open_log(path: str, wanted: LogOptions, reading: int, writing: int, owned_fds: set[int]) -> OpenedLog:
    """Open the log at `path` as `wanted`, creating it if need be; `reading` and `writing` are flags for open(2).

    The descriptors are added to `owned_fds`, as by `safe_files.open_descriptor`, so that an interruption loses none.

    Raises:
        OSError: as the system says it; the caller knows the words.
        InsecurePathError: it is no file that only those whom ``mode`` allows can write.
        CorruptLogError: it does not begin with a header.
        StoreError: it is locked in another way, or not durable.
    """
    for _ in range(ATTEMPTS):
        writer = -1 if wanted.read_only else _open_for_writing(path, wanted, writing, owned_fds)
        reader = -1
        try:
            reader = safe_files.open_descriptor(path, reading, owned_fds=owned_fds)
            safe_files.check(path, reader if wanted.read_only else writer, wanted.mode, read_only=wanted.read_only)
            data = read_header(reader)
            if wanted.read_only or safe_files.same_file(system.os.fstat(reader), system.os.fstat(writer)):
                if not Header.is_partial(data):
                    return _settle(path, wanted, reader, writer, data)
                _initialise(path, wanted, writer)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            if wanted.read_only:
                raise
        except BaseException:
            _close(writer, reader, owned_fds)
            raise
        _close(writer, reader, owned_fds)
    raise StoreUnavailableError(f"{path} was replaced again and again while it was opened; try again", path=path)


def read_header(fd: int) -> bytes:
    """Return the first bytes of a log, the whole header among them if it is there."""
    data = more = system.os.read(fd, 4096)
    while more and (missing := Header.missing(data)) > 0:
        more = system.os.read(fd, missing)
        data += more
    return data


def _close(writer: int, reader: int, owned_fds: set[int]) -> None:
    for fd in (writer, reader):
        if fd >= 0:
            safe_files.close_owned(fd, owned_fds)


def _open_for_writing(path: str, wanted: LogOptions, flags: int, owned_fds: set[int]) -> int:
    try:
        return safe_files.open_descriptor(path, flags, owned_fds=owned_fds)
    except FileNotFoundError as error:
        raise_if_foreign(error)
        safe_files.create(path, wanted.header, wanted.mode, durable=wanted.durable)
        # O_CREAT, because NFS may answer from the memory that there was nothing: nfs(5), "lookupcache"
        return safe_files.open_descriptor(path, flags | system.os.O_CREAT, wanted.mode, owned_fds)


def _settle(path: str, wanted: LogOptions, reader: int, writer: int, data: bytes) -> OpenedLog:
    try:
        header, size, chain = Header.decode(data)
    except MalformedRecord as error:
        raise CorruptLogError(
            f"{path} can't be used: {error}. Nothing was changed; choose another path, or see what"
            f" `fscoord verify {path}` says before you remove the file",
            path=path,
            offset=0,
            reason=str(error),
        ) from None
    known = KIND_NAMES.get(header.lock_kind, f"kind {header.lock_kind}")
    if header.lock_kind != wanted.lock_kind and not wanted.read_only:
        raise StoreError(
            f'{path}: this log is locked by "{known}" locks, not by "{KIND_NAMES[wanted.lock_kind]}";'
            f' pass lock="{known}" here, or remove the log',
            path=path,
        )
    if wanted.durable and not header.durable:
        raise StoreError(
            f"{path}: this log was not made durable, and that can't be changed; remove it, or pass durable=False",
            path=path,
        )
    return OpenedLog(reader, writer, header, size, chain)


def _initialise(path: str, wanted: LogOptions, fd: int) -> None:
    """Give a file that was found empty its header, under the lock.

    Which kind of lock its users agree on is not written yet, so the OFD lock is taken as well where there is one. A
    part of a header is what a dying initialiser left. It is the only thing that is ever cut, and only while the file is
    too short for any record.
    """
    if wanted.read_only:
        raise StoreUnavailableError(
            f"{path} is empty: no writer has opened it yet", path=path, errno=system.errno.ENOENT
        )
    deadline = system.time.monotonic() + wanted.limit
    mutex = system.threading.RLock()
    kinds = dict.fromkeys((OFD, wanted.lock_kind) if system.has_ofd_locks() else (wanted.lock_kind,))
    locks = [LogLock(path, fd, kind, mutex, set()) for kind in kinds]
    while True:
        try:
            for lock in locks:
                lock.try_lock()
            _write_header(path, wanted, fd)
            return
        except (BlockingIOError, PermissionError) as error:
            raise_if_foreign(error)
            if system.time.monotonic() >= deadline:
                raise StoreTimeoutError(
                    f"{path} is empty, and the lock to initialise it did not come within {wanted.limit:.3g} s",
                    waited=wanted.limit,
                ) from None
        except OSError as error:
            raise_if_foreign(error)
            raise locks[-1].refuse(error) or error from None
        finally:
            for lock in locks:
                lock.unlock()
        system.time.sleep(PAUSE_S)


def _write_header(path: str, wanted: LogOptions, fd: int) -> None:
    opened: set[int] = set()
    try:
        found = read_header(safe_files.open_descriptor(path, system.os.O_RDONLY, owned_fds=opened))
    finally:
        system.close_all(system.os.close, opened)
    if Header.is_partial(found):
        if found:
            system.os.ftruncate(fd, 0)
        safe_files.write_all(fd, wanted.header(fd))
        if wanted.durable:
            system.os.fsync(fd)
