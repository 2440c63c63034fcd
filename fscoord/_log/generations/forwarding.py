"""Forward records: records after the seal of generation 0 that name the newest generation of a log.

Generation 0 keeps the log's own name and is never removed. Each later generation is a file of its own, which the seal
of its predecessor names. When a later generation is sealed, a forward record is appended to generation 0. So an opener
need not follow every seal, and superseded generations can be removed. A forward record is a hint: a process that
follows it checks the id of the file, and then follows the seals from that file on.

Generation 0 is synced before and after each forward record, even if the log is not durable. So a power failure can tear
only the last forward record, and `torn_tail.examine` can distinguish it from damage as in a durable log.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from fscoord._log.files import safe_files, torn_tail
from fscoord._log.files.opening import read_header
from fscoord._log.format import record
from fscoord._log.format.generation_ref import GenerationRef, parse_generation_name
from fscoord._log.format.header import Header, LogIdentity
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.handle import HandleState
from fscoord._log.locking.log_lock import SOFT, LogLock
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord.errors import InsecurePathError

_CHUNK = 1 << 18
_HINT_BYTES = 512
_TRIES = 200
_PAUSE_S = 0.0005
ORPHAN_MAX: Final = 1 << 20
"""The size in bytes up to which a file of zeros may be removed. After a power failure, an unsynced file may hold zeros.
"""


def hint(fd: int) -> GenerationRef | None:
    """Return the generation that the last record of generation 0 names, if it is a forward record; otherwise None.

    `fd` is a descriptor of generation 0. Only the end of the file is read, so only the record's own checksum is
    verified, and not the chain of all records.
    """
    size = system.os.fstat(fd).st_size
    system.os.lseek(fd, max(0, size - _HINT_BYTES), 0)
    data = system.os.read(fd, _HINT_BYTES)
    place = data.rfind(bytes([record.FORWARD]))
    while place >= record.KIND_AT:
        start = place - record.KIND_AT
        if start + record.unpack_prefix(data, start)[0] == len(data) and record.chain_if_sound(data, start) is not None:
            with suppress(MalformedRecord):
                return GenerationRef.decode(record.FORWARD, data[start + record.HEAD_SIZE : -record.TAIL_SIZE])
        place = data.rfind(bytes([record.FORWARD]), 0, place)
    return None


def newest(fd: int, start: LogPosition) -> tuple[GenerationRef | None, LogPosition, bool]:
    """Find the last record in generation 0 that names a later generation. Read from `start` to the last good record.

    This function does not report damage. A handle that reads the log reports it.

    Returns:
        The named generation or None, the end of the last good record, and whether other bytes follow that record.
    """
    system.os.lseek(fd, start.offset, 0)
    found: GenerationRef | None = None
    zeros = torn_tail.Zeros()
    (offset, chain), data, missing = start, b"", 0
    while True:
        more = system.os.read(fd, max(_CHUNK, missing))
        data += more
        _, others, used, chain, missing = record.decode(data, chain)
        for kind, _, value, _, _ in others:
            if kind in (record.SEAL, record.FORWARD):
                with suppress(MalformedRecord):
                    found = GenerationRef.decode(kind, value)
        offset, data = offset + used, data[used:]
        if missing < 0:
            verdict = torn_tail.examine(fd, offset, chain, zeros, durable=True)
            if not isinstance(verdict, torn_tail.Skip):
                return found, LogPosition(offset, chain), True
            (offset, chain), data = verdict, b""
            system.os.lseek(fd, offset, 0)
        elif not more:
            return found, LogPosition(offset, chain), bool(data)


def post(
    handle: HandleState, successor: GenerationRef, writer: int, time_ns: int, known: LogPosition | None = None
) -> LogPosition | None:
    """Append to generation 0 a forward record that names `successor`, and sync the record.

    If generation 0 already names this or a later generation, nothing is appended.

    Args:
        handle: the state of the handle that writes the record.
        successor: the generation to name.
        writer: the number of the session that writes the record.
        time_ns: the time of the record (wall time in nanoseconds).
        known: the position that an earlier call returned. The bytes before it are not read again.

    Returns:
        The position after the last record; None if nothing was written because another process held the lock of
        generation 0. The next compaction then appends a forward record.

    Raises:
        OSError: a system call failed. The record may be torn; then the next call appends a VOID after it.
        MalformedRecord: the file at the log's path is not this log any more.
    """
    path, root = handle.path, handle.root
    fd = safe_files.open_descriptor(path, handle.write_flags, owned_fds=handle.owned_fds)
    reader = -1
    kind = root.header.lock_kind
    lock = LogLock(path, fd, kind, system.recursive_mutex(), set())
    try:
        reader = safe_files.open_descriptor(path, handle.read_flags, owned_fds=handle.owned_fds)
        if Header.decode(read_header(reader))[0].log_id != root.header.log_id:
            raise MalformedRecord(f"{path} was replaced by another log")
        if kind != SOFT and not _take(lock):  # all generations have one soft lock, which the caller holds
            return None
        is_cut = known is not None and system.os.fstat(reader).st_size < known.offset
        named, place, is_torn = newest(reader, root.start if known is None or is_cut else known)
        if named is None or named.generation < successor.generation:
            # First sync the bytes before the record. Otherwise a power failure could lose an earlier record and keep
            # this one, and the gap between them would look like damage.
            system.sync_data(fd)
            if is_torn:
                place = _void(fd, reader, place)
            system.os.lseek(fd, place.offset, 0)  # for mounts whose flags for writing have no O_APPEND
            data, chain = record.encode(record.FORWARD, b"", successor.forward(), writer, time_ns, place.chain)
            safe_files.write_all(fd, data)
            place = LogPosition(place.offset + len(data), chain)
        system.sync_data(fd)
        return place
    finally:
        try:
            if kind != SOFT:
                lock.unlock()
        except OSError as error:  # closing the descriptor unlocks it as well
            raise_if_foreign(error)
        handle.close_fd(fd)
        handle.close_fd(reader)


def _take(lock: LogLock) -> bool:
    for _ in range(_TRIES):
        try:
            lock.try_lock()
        except OSError as error:
            raise_if_foreign(error)
            if not lock.is_taken(error):
                raise
            system.time.sleep(_PAUSE_S)
        else:
            return True
    return False


def _void(fd: int, reader: int, place: LogPosition) -> LogPosition:
    verdict = torn_tail.examine(reader, place.offset, place.chain, torn_tail.Zeros(), durable=True)
    if isinstance(verdict, torn_tail.Damage):
        raise MalformedRecord(verdict.reason)
    if isinstance(verdict, torn_tail.Skip):
        return LogPosition(verdict.offset, verdict.chain)
    if system.os.fstat(fd).st_size < verdict.place:
        system.os.ftruncate(fd, verdict.place)
    system.os.lseek(fd, verdict.place, 0)
    data, chain = record.encode_void(place.offset, 0, system.wall_time_ns(), place.chain)
    safe_files.write_all(fd, data)
    system.sync_data(fd)
    return LogPosition(verdict.place + len(data), chain)


def find_root(path: str, header: Header, log_id: bytes) -> str | None:
    """Return the path of the generation 0 to which the file with `header` belongs; None if it is not found.

    Only the directory of `path` is searched, because all generations of a log are in one directory.
    """
    directory = system.os.path.dirname(path)
    # One chain of C calls opens, reads and closes the directory (rule 1 in `interrupts`): a signal handler may raise,
    # or fork, between two of them. A fork in another thread in the middle of the chain is not prevented.
    entries = list(itertools.chain.from_iterable(map(system.os.scandir, (directory,))))
    for name in [entry.name for entry in entries if entry.inode() == header.root_inode]:
        file = system.os.path.join(directory, name)
        with ignoring(OSError, MalformedRecord, InsecurePathError):
            fd = safe_files.open_descriptor(file, system.os.O_RDONLY)
            with safe_files.closing_owned(fd, system.loose):
                found = Header.decode(read_header(fd))[0]
                if (found.log_id, found.generation, system.os.fstat(fd).st_ino) == (log_id, 0, header.root_inode):
                    return file
    return None


def later_files(path: str) -> list[tuple[int, str]]:
    """Return (number, path) of each file beside the log at `path` that is named like a later generation."""
    directory, base = system.os.path.split(path)
    encode, found = system.os.fsencode, []
    for name in sorted(system.os.listdir(directory)):
        number = parse_generation_name(encode(name), encode(base))
        if number is not None:
            found.append((number, system.os.path.join(directory, name)))
    return found


def remove_superseded(handle: HandleState, owner: LogIdentity, newest: GenerationRef, before: bytes | None) -> None:
    """Remove the file `before` of the superseded generation, and the orphans of the log.

    If `before` is None, the superseded generation is generation 0, which is never removed.

    An orphan is a generation whose creator died before it wrote the seal that names it. The caller holds the locks of
    `newest` and of the generation before it, so any other file of the log that is unlocked is an orphan.

    A name does not prove that a file belongs to the log. So only files that belong to `owner`, and files without
    content, are removed. A file of a higher generation than `newest` comes from a restored backup, and stays.
    """
    epoch, kind = system.process_epoch(), handle.root.header.lock_kind
    directory, base = system.os.path.split(handle.path)
    bases = {system.os.fsencode(base)} | ({before.rsplit(b".", 2)[0]} if before else set())
    for name in system.os.listdir(directory):
        other = system.os.fsencode(name)
        if other == newest.name or parse_generation_name(other) is None or other.rsplit(b".", 2)[0] not in bases:
            continue
        file = system.os.path.join(directory, name)
        if not is_removable(file, owner, newest.generation, handle.read_flags, handle.owned_fds):
            continue
        if other == before or kind == SOFT or _is_unlocked(handle, file):
            safe_files.unlink_quietly(file, epoch)


def is_removable(file: str, owner: LogIdentity, newest: int, reading: int, owned_fds: set[int]) -> bool:
    """Return whether `file` has no content, or belongs to `owner` and is generation `newest` or an older one."""
    with ignoring(OSError, InsecurePathError, MalformedRecord):
        fd = safe_files.open_descriptor(file, reading, owned_fds=owned_fds)
        with safe_files.closing_owned(fd, owned_fds):
            data = read_header(fd)
            if any(data) and not Header.is_partial(data):
                header = Header.decode(data)[0]
                return owner.owns(header, system.os.fstat(fd).st_ino) and header.generation <= newest
            # Its maker died, or the power failed before the file was synced.
            is_short = system.os.fstat(fd).st_size <= ORPHAN_MAX
            return Header.is_partial(data) or (is_short and not any(torn_tail.read_at(fd, 0, ORPHAN_MAX)))
    return False


def _is_unlocked(handle: HandleState, file: str) -> bool:
    with ignoring(OSError, InsecurePathError):
        fd = safe_files.open_descriptor(file, handle.write_flags, owned_fds=handle.owned_fds)
        with safe_files.closing_owned(fd, handle.owned_fds):
            lock = LogLock(file, fd, handle.root.header.lock_kind, system.recursive_mutex(), set())
            try:
                lock.try_lock()
                return True
            finally:
                lock.unlock()
    return False


def remove_log(handle: HandleState, owner: LogIdentity, clear: Callable[[str], object]) -> None:
    """Remove the files of a finished log, as far as possible. The log has ended even if some files remain.

    The caller holds the log lock. The function first calls ``clear(path)``, which removes the files beside the log, and
    then removes the log's path. From then on, another process may create a log at this path. So the function then
    removes only files that belong to `owner` and that existed before the path was removed.
    """
    epoch, path = system.process_epoch(), handle.path
    with ignoring(OSError, MalformedRecord, InsecurePathError):
        if not _has_one_name(handle):
            return
        files = later_files(path)
        if system.process_epoch() == epoch:  # a child that a signal handler forks continues here, without the lock
            clear(path)
        if system.process_epoch() == epoch:
            system.os.unlink(path)
        for _, file in files:
            if is_removable(file, owner, sys.maxsize, handle.read_flags, handle.owned_fds):
                safe_files.unlink_quietly(file, epoch)


def _has_one_name(handle: HandleState) -> bool:
    fd = safe_files.open_descriptor(handle.path, system.os.O_RDONLY, owned_fds=handle.owned_fds)
    with safe_files.closing_owned(fd, handle.owned_fds):
        log_id = Header.decode(read_header(fd))[0].log_id
        return bool(system.os.fstat(fd).st_nlink == 1 and log_id == handle.root.header.log_id)
