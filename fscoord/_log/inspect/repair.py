"""`repair` and `copy`: write the sound records of a log to a new log, and report each record that is left out.

The old log is only read. By default, all records after the first damage are left out as well. So the copy holds a state
that the store had at some time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple

from fscoord._arguments import Timeout, to_seconds
from fscoord._log.files import safe_files, torn_tail
from fscoord._log.files.opening import no_header, read_header, write_log
from fscoord._log.files.safe_files import FilePath
from fscoord._log.format import record
from fscoord._log.format.control_records import Session, decode_control
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.format.record import LogPosition, MalformedRecord, Record
from fscoord._log.generations import forwarding
from fscoord._log.inspect import scan
from fscoord._log.inspect.scan import Damaged, ProgressCallback, Scan, Sound, Torn, WriterLockout, iter_records
from fscoord._log.inspect.verify import GenerationMissing, ignore_progress
from fscoord._log.locking.log_lock import OFD
from fscoord._log.mount import find_mount
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import CorruptLogError, FscoordError


def write_copy(path: str, header: Header, mode: int, records: Iterable[Record]) -> None:
    """Write a log to a new file at `path`. The file appears when it is complete and synced, or not at all.

    Args:
        path: the path of the new log.
        header: the header of the new log. The function replaces its lineage by a new lineage.
        mode: the permissions of the file.
        records: the records of the log. They keep their writers and times.

    Raises:
        ValueError: a file was created at `path` meanwhile. It is not overwritten.
    """
    temporary, epoch = safe_files.temporary_name(path), system.process_epoch()
    opened, close = system.owned_for_a_while()
    try:
        fd = safe_files.create_descriptor(temporary, mode, opened)
        inode = system.os.fstat(fd).st_ino if find_mount(path).inodes_last else 0
        write_log(fd, header._replace(lineage=header.log_id, root_inode=inode, inode=inode), records)
        system.sync_file(fd)
        try:
            safe_files.publish(temporary, path)
        except FileExistsError as error:
            raise_if_foreign(error)
            raise ValueError(f"{path} was created meanwhile, and nothing is overwritten; name another file") from None
        safe_files.sync_directory(path, opened)
    finally:
        close()
        safe_files.unlink_quietly(temporary, epoch)


_OF_THIS_FILE: Final = frozenset(
    (record.BELL, record.SEAL, record.FORWARD, record.LAST_TIME, record.LEAVE, record.FAILURE)
)
"""The kinds of records that describe the files and the participants of a log. A copy must not contain such records."""

NEVER_FINISHED: Final = "it was never finished, and no success was reported for it"


class Skipped(NamedTuple):
    """A record that is not in the copy, or bytes that can't be read as a record.

    Attributes:
        file: the path of the file that holds the record.
        offset: where the record begins in the file, in bytes.
        size: the length of the record in bytes.
        why: why the record is left out.
        kind: the name of the operation; ``""`` if it is not known.
        key: the key of the record.
        writer: the number of the session that wrote the record; 0 if it is not known.
        time: when the record was written, by the writer's wall clock, in seconds since the epoch.
        value_size: the length of the value in bytes.
        is_certain: whether the record's checksum is right. If not, kind, key, writer, time and value_size are decoded
            from damaged bytes.
    """

    file: str
    offset: int
    size: int
    why: str
    kind: str = ""
    key: bytes = b""
    writer: int = 0
    time: float = 0.0
    value_size: int = 0
    is_certain: bool = False


SkippedCallback = Callable[[Skipped], object]


class Repair(NamedTuple):
    """The result of `repair` or `copy`, or a preview of the result if nothing was written.

    Attributes:
        path: the path of the log.
        output: the path of the copy.
        is_written: whether the copy was written.
        source: the path of the file that was copied: the newest generation, which holds all of the store's data.
        generation: the number of the generation that was copied.
        kept: how many records were copied.
        skipped: how many records, or unreadable parts, were left out.
        skipped_bytes: the total length of the skipped records and parts, in bytes.
        notes: further facts, one sentence each.
    """

    path: str
    output: str
    is_written: bool
    source: str
    generation: int
    kept: int
    skipped: int
    skipped_bytes: int
    notes: tuple[str, ...]


def repair(
    path: FilePath,
    output: FilePath,
    *,
    salvage: bool = False,
    write: bool = False,
    timeout: Timeout = 10.0,
    on_progress: ProgressCallback = ignore_progress,
    on_skipped: SkippedCallback = ignore_progress,
) -> Repair:
    """Copy the sound records of the log at `path` to a new log at `output`. The old log is only read.

    Only the newest generation is copied, because it holds all of the store's data. Records keep their writers and
    times. Before the call, end all processes that use the store: writers block until the copy is done. The copy is a
    store like any other.

    Args:
        path: the path of a file store.
        output: the path of the copy, which appears when it is complete. No file may exist there.
        salvage: whether to copy the sound records after damage as well, and to continue if a header is damaged or a
            generation is missing. The copy may then hold a state that the store never had.
        write: whether to write the copy. If False, the records that would be left out are only reported.
        timeout: how long to wait for the log's lock, in seconds or as a `timedelta`; ``math.inf`` means no limit.
        on_progress: called with the path of a file, how many of its bytes were read, and its size in bytes.
        on_skipped: called with each `Skipped`, in the order of the file.

    Raises:
        ValueError: a file exists at `output`.
        CorruptLogError: the log can't be copied at all, or only with `salvage`.
        StoreUnavailableError: a file can't be opened, read or written, or no writer has opened the log yet.
        InsecurePathError: `path` is a symbolic link, or not a regular file.
        StoreTimeoutError: the log's lock was not released in time. The error names its holder.
        UnsupportedFilesystemError: this file system has no locks of the log's kind.
    """
    source, target = safe_files.resolve(path), safe_files.resolve(output)
    return _repair(_Request(source, salvage, to_seconds(timeout), on_progress, on_skipped), target, write=write)


def copy(
    path: FilePath, output: FilePath, *, timeout: Timeout = 10.0, on_progress: ProgressCallback = ignore_progress
) -> Repair:
    """Create a new file store at `output` with the present contents of the file store at `path`.

    The store at `path` is only read. It may be in use, but its writers block until the copy is done. Use this function
    instead of cp(1): a store may have several files, and the copy must be a store of its own.

    Args:
        path: the path of a file store.
        output: the path of the copy, which appears when it is complete. No file may exist there.
        timeout: how long to wait for the store's lock, in seconds or as a `timedelta`; ``math.inf`` means no limit.
        on_progress: called with the path of a file, how many of its bytes were read, and its size in bytes.

    Raises:
        ValueError: a file exists at `output`.
        CorruptLogError: the store is damaged, so nothing was written. Use `fscoord.inspect.repair` instead.
        StoreUnavailableError: a file can't be opened, read or written, or no writer has opened the log yet.
        InsecurePathError: `path` is a symbolic link, or not a regular file.
        StoreTimeoutError: the lock was not released in time. The error names its holder.
        UnsupportedFilesystemError: this file system has no locks of the store's kind.
    """
    source, target = safe_files.resolve(path), safe_files.resolve(output)

    def refuse_damage(found: Skipped) -> None:
        if found.why is not NEVER_FINISHED:
            raise safe_files.damaged(source, found.file, found.offset, found.why)

    return _repair(_Request(source, False, to_seconds(timeout), on_progress, refuse_damage), target, write=True)


class _Request(NamedTuple):
    """The arguments of `repair`. ``path`` is absolute, and ``limit`` is the timeout in seconds."""

    path: str
    salvage: bool
    limit: float
    on_progress: ProgressCallback
    on_skipped: SkippedCallback


def _repair(request: _Request, output: str, *, write: bool) -> Repair:
    path = request.path
    if system.os.path.lexists(output):
        raise ValueError(f"{output} exists, and nothing is overwritten; name another file for the copy")
    directory = system.os.path.dirname(output)
    if not system.os.path.isdir(directory):
        absent = FileNotFoundError(system.errno.ENOENT, system.os.strerror(system.errno.ENOENT), output)
        raise safe_files.unavailable(absent, output, "writing the copy")
    try:
        with _open_for_repair(request) as (source, root, notes):
            copier = _RecordCopier(request, source, root, notes)
            if write:
                mode = system.stat.S_IMODE(system.os.fstat(source.fd).st_mode)
                write_copy(output, copier.header, mode, copier.records())
            else:
                for _ in copier.records():  # the copier counts them
                    pass
            counts = (copier.kept, copier.skipped, copier.skipped_bytes)
            return Repair(path, output, write, source.file, source.generation, *counts, tuple(notes))
    except FscoordError:
        raise
    except OSError as error:
        raise_if_foreign(error)
        name = str(error.filename)
        if name == output or name.startswith(f"{output}."):  # the copy, or its temporary name
            raise safe_files.unavailable(error, output, "writing the copy") from error
        raise safe_files.unavailable(error, path, f"copying the log to {output}") from error


# -- the generation that is copied -------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """An open file of the log, with writers locked out. ``header`` is None if the header can't be read."""

    file: str
    fd: int
    lockout: WriterLockout
    generation: int
    header: Header | None
    place: LogPosition


_Opened = tuple[_Source, Header | None, list[str]]


@contextmanager
def _open_for_repair(request: _Request) -> Iterator[_Opened]:
    """Context manager: open the newest generation of the log with writers locked out.

    Yields (file, header of generation 0 or None if it can't be read, list of notes). Callers may add notes.
    """
    missing: GenerationRef | None = None
    while True:
        with ExitStack() as stack:
            try:
                found = _open_newest(request, stack, missing)
            except GenerationMissing as error:
                missing = error.named
                continue
            yield found
            return


def _open_newest(request: _Request, stack: ExitStack, missing: GenerationRef | None) -> _Opened:
    notes: list[str] = []
    path = request.path
    source = _open(request, path, None, stack)
    root = source.header
    while True:
        successor = _find_successor(source, request.on_progress, notes)
        if successor is None:
            notes += _unnamed_generations(path, source)
            return source, root, notes
        file = safe_files.beside(path, successor.name)
        try:
            source = _open(request, file, successor, stack)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            if successor != missing:
                raise GenerationMissing(successor) from None
            lost = (
                f"generation {successor.generation} is missing: what was written since generation {source.generation}"
            )
            if not request.salvage:
                raise _refused(path, file, f"{lost} is lost") from None
            notes.append(f"{lost} ended is lost")
            return source, root, notes


def _open(request: _Request, file: str, named: GenerationRef | None, stack: ExitStack) -> _Source:
    path, salvage = request.path, request.salvage
    fd = safe_files.open_descriptor(file, system.os.O_RDONLY)
    stack.callback(system.close_quietly, fd)
    safe_files.check(file, fd, 0, read_only=True)
    generation = named.generation if named else 0
    header: Header | None = None
    data = read_header(fd)
    if named is None and Header.is_partial(data):
        raise no_header(path, data)
    try:
        header, place = Header.decode(data)
    except MalformedRecord as error:
        if not salvage:
            raise _refused(path, file, str(error)) from None
        header, found = None, scan.find_next(fd, LogPosition(0, 0))
        if found is None:
            reason = f"{error}, and no record can be found in it"
            raise CorruptLogError(
                f"{file}: {reason}. Nothing was written; restore the file from a backup",
                path=path,
                offset=0,
                reason=reason,
            ) from None
        place = found
    if header and named and (header.log_id, header.generation) != (named.log_id, named.generation):
        if not salvage:
            raise _refused(path, file, "it is not the next generation")
        raise FileNotFoundError(system.errno.ENOENT, "another file is in its place", file)
    lockout = WriterLockout(path, fd, OFD if header is None else header.lock_kind, request.limit)
    stack.callback(lockout.release)
    lockout.acquire()
    return _Source(file, fd, lockout, generation, header, place)


def _find_successor(source: _Source, on_progress: ProgressCallback, notes: list[str]) -> GenerationRef | None:
    """Return the newest generation that a sound record of `source` names, even after damage; None if there is none."""
    found: GenerationRef | None = None
    durable = source.header is not None and source.header.durable
    scan = Scan(source.fd, source.place, durable=durable, lockout=source.lockout)
    bad: list[str] = []
    for segment in scan.segments():
        if isinstance(segment, Damaged):
            bad.append(f"{segment.offset}")
        if isinstance(segment, Sound):
            for kind, _, value, _, _ in segment.others:
                if kind in (record.SEAL, record.FORWARD):
                    try:
                        named = GenerationRef.decode(kind, value)
                    except MalformedRecord:
                        continue
                    known = source.generation if found is None else found.generation
                    if named.generation > known:
                        found = named
        on_progress(source.file, segment.end, scan.size())
    if found is not None and bad:
        notes.append(
            f"generation {source.generation} is damaged at {', '.join(bad[:9])}; a later generation holds all data"
        )
    return found


def _unnamed_generations(path: str, newest: _Source) -> Iterator[str]:
    """Yield a note on each file that is named like a later generation, although no readable record names it."""
    for number, file in forwarding.later_files(path):
        if number > newest.generation:
            yield (
                f"{file} looks like a later generation, but no readable record names it: if the log used this"
                " file, repair it separately"
            )


def _refused(path: str, file: str, reason: str) -> CorruptLogError:
    return CorruptLogError(
        f"{file}: {reason}. Nothing was written; `fscoord repair --salvage` copies the sound records",
        path=path,
        offset=0,
        reason=reason,
    )


# -- its records -------------------------------------------------------------------------------------------------------


class _RecordCopier:
    """Reads one file of the log, and counts the records that are copied and skipped.

    Attributes:
        header: the header of the copy.
        kept: how many records were copied.
        skipped: how many records, or unreadable parts, were left out.
        skipped_bytes: the total length of the skipped records and parts, in bytes.
    """

    def __init__(self, request: _Request, source: _Source, root: Header | None, notes: list[str]) -> None:
        self._request, self._source, self._notes = request, source, notes
        self.kept = self.skipped = self.skipped_bytes = 0
        self._is_broken = source.header is None
        self._is_sealed = False
        self._registered: set[int] = set()
        known = source.header or root
        if known is None:
            known = Header(b"", OFD)
            notes.append('no header could be read: the copy has "ofd" locks, is not durable, and belongs to no run')
        now = system.wall_time_ns()
        self.header = known._replace(log_id=system.random_bytes(16), generation=0, run=0, created_ns=now)

    def records(self) -> Iterator[Record]:
        """Yield each record of the copy, in order."""
        source = self._source
        scan = Scan(source.fd, source.place, durable=self.header.durable, lockout=source.lockout)
        if source.header is None:
            self._skip(Skipped(source.file, 0, source.place.offset, "the header is damaged"))
        chain = source.place.chain
        for segment in scan.segments():
            if isinstance(segment, Sound):
                for start, end, found in iter_records(segment):
                    yield from self._kept(start, end, found)
            elif isinstance(segment, Damaged):
                self._skip(self._describe_damage(segment, chain))
                self._is_broken = True
            elif isinstance(segment, Torn):
                self._skip(Skipped(source.file, segment.offset, segment.end - segment.offset, NEVER_FINISHED))
            chain = scan.place.chain
            self._request.on_progress(source.file, segment.end, scan.size())

    def _kept(self, start: int, end: int, found: Record) -> Iterator[Record]:
        kind, key, value, writer, time_ns = found
        why = self._objection(found)
        if why is not None:
            name = record.NAMES.get(kind, f"kind {kind}")
            about = (name, key, writer, time_ns / 1e9, len(value), True)
            self._skip(Skipped(self._source.file, start, end - start, why, *about))
            return
        if kind in _OF_THIS_FILE:
            return
        if kind == record.SESSION:
            self._registered.add(writer)
            # The copy is a log of its own. Without participants, none of them can fail, and the data are kept.
            known = Session.decode(value)._replace(world_size=0, replaces=0)
            found = kind, key, known.encode(), writer, time_ns
        elif writer and writer not in self._registered:
            self._registered.add(writer)
            self._notes.append(f"the description of session {writer} is lost")
            unknown = Session("unknown", 0).encode()
            yield record.SESSION, b"", unknown, writer, time_ns  # otherwise a new session would get its number
        self.kept += 1
        yield found

    def _objection(self, found: Record) -> str | None:
        try:
            meaning = decode_control(found, self._source.generation, is_sealed=self._is_sealed)
        except MalformedRecord as error:
            self._is_broken = True
            return str(error)
        self._is_sealed |= found[0] == record.SEAL and isinstance(meaning, GenerationRef)
        if self._is_broken and not self._request.salvage:
            return "it comes after the damage"
        return None

    def _skip(self, skipped: Skipped) -> None:
        self.skipped += 1
        self.skipped_bytes += skipped.size
        self._request.on_skipped(skipped)

    def _describe_damage(self, segment: Damaged, chain: int) -> Skipped:
        """Describe unreadable bytes. If they are as long as one record, decode its fields without a checksum."""
        source, size = self._source, segment.end - segment.offset
        skipped = Skipped(source.file, segment.offset, size, segment.reason)
        if record.record_length(torn_tail.read_at(source.fd, segment.offset, record.PREFIX_SIZE), chain) != size:
            return skipped
        kind, key, value_size, writer, time_ns = record.decode_unverified(
            torn_tail.read_at(source.fd, segment.offset, size)
        )
        return skipped._replace(
            kind=record.NAMES.get(kind, ""), key=key, writer=writer, time=time_ns / 1e9, value_size=value_size
        )
