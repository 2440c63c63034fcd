"""`open_newest`: find the generation of a damaged log that holds all that counts, and keep its writers away."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from fscoord._log.format import record
from fscoord._log.format.generation_ref import GenerationRef, parse_generation_name
from fscoord._log.format.header import Header
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.inspect import resync
from fscoord._log.inspect.scan import Damaged, Quiet, Scan, Sound
from fscoord._log.inspect.verify import Tell
from fscoord._log.io import safe_files
from fscoord._log.io.opening import read_header
from fscoord._log.locking.log_lock import OFD
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import CorruptLogError

__all__ = ["Source", "open_newest"]


class Source(NamedTuple):
    """A file of the log, open, with its writers kept away; ``header`` is None if it can't be read."""

    file: str
    fd: int
    quiet: Quiet
    generation: int
    header: Header | None
    place: LogPosition


class _Superseded(Exception):
    """A generation has gone since another named it: begin again."""

    def __init__(self, successor: GenerationRef) -> None:
        super().__init__()
        self.successor = successor


Found = tuple[Source, Header | None, list[str]]


@contextmanager
def open_newest(path: str, limit: float, tell: Tell, *, salvage: bool) -> Iterator[Found]:
    """Give the newest generation of the log, open and kept quiet, the header of generation 0, and notes."""
    missed: GenerationRef | None = None
    while True:
        with ExitStack() as stack:
            try:
                found = _walk(path, limit, tell, stack, missed, salvage=salvage)
            except _Superseded as error:
                missed = error.successor
                continue
            yield found
            return


def _walk(
    path: str, limit: float, tell: Tell, stack: ExitStack, missed: GenerationRef | None, *, salvage: bool
) -> Found:
    notes: list[str] = []
    source = _open(path, path, None, limit, stack, salvage=salvage)
    root = source.header
    while True:
        successor = _successor(source, tell, notes)
        if successor is None:
            notes += _unnamed(path, source)
            return source, root, notes
        file = system.os.path.join(system.os.path.dirname(path), system.os.fsdecode(successor.name))
        try:
            source = _open(path, file, successor, limit, stack, salvage=salvage)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            if successor != missed:
                raise _Superseded(successor) from None
            says = (
                f"generation {successor.generation} is missing: what was written since generation {source.generation}"
            )
            if not salvage:
                raise _refused(path, file, f"{says} is lost") from None
            notes.append(f"{says} ended is lost")
            return source, root, notes


def _open(
    path: str, file: str, named: GenerationRef | None, limit: float, stack: ExitStack, *, salvage: bool
) -> Source:
    fd = safe_files.open_descriptor(file, system.os.O_RDONLY)
    stack.callback(system.close_quietly, fd)
    safe_files.check(file, fd, 0, read_only=True)
    generation = named.generation if named else 0
    header: Header | None = None
    try:
        header, size, chain = Header.decode(read_header(fd))
        place = LogPosition(size, chain)
    except MalformedRecord as error:
        if not salvage:
            raise _refused(path, file, str(error)) from None
        header, found = None, resync.find_next(fd, LogPosition(0, 0))
        if found is None:
            reason = f"{error}, and no record can be found in it"
            raise CorruptLogError(f"{file}: {reason}", path=path, offset=0, reason=reason) from None
        place = found
    if header and named and (header.log_id, header.generation) != (named.log_id, named.generation):
        if not salvage:
            raise _refused(path, file, "it is not the generation that was to follow")
        raise FileNotFoundError(system.errno.ENOENT, "another file is in its place", file)
    quiet = Quiet(path, fd, OFD if header is None else header.lock_kind, limit)
    stack.callback(quiet.end)
    quiet.owned_fds()
    return Source(file, fd, quiet, generation, header, place)


def _successor(source: Source, tell: Tell, notes: list[str]) -> GenerationRef | None:
    """Return which generation follows `source`, also if it is named behind a damage only."""
    found: GenerationRef | None = None
    scan = Scan(source.quiet, source.place, durable=source.header is not None and source.header.durable)
    bad: list[str] = []
    for piece in scan.pieces():
        if isinstance(piece, Damaged):
            bad.append(f"{piece.offset}")
        if isinstance(piece, Sound):
            for kind, _, value, _, _ in piece.others:
                if kind in (record.SEAL, record.FORWARD):
                    try:
                        named = (
                            GenerationRef.from_seal(value) if kind == record.SEAL else GenerationRef.from_forward(value)
                        )
                    except MalformedRecord:
                        continue
                    known = source.generation if found is None else found.generation
                    if named.generation > known:
                        found = named
        tell(source.file, piece.end, scan.size())
    if found is not None and bad:
        notes.append(
            f"generation {source.generation} is damaged at {', '.join(bad[:9])}; all that counts is in a later one"
        )
    return found


def _unnamed(path: str, newest: Source) -> Iterator[str]:
    """Tell of files that look like later generations: whatever named them may be damaged, or their makers have died."""
    directory, base = system.os.path.split(path)
    for name in sorted(system.os.listdir(directory)):
        number = parse_generation_name(system.os.fsencode(name), system.os.fsencode(base))
        if number is not None and number > newest.generation:
            yield (
                f"{system.os.path.join(directory, name)} looks like a later generation, and nothing that can be read"
                " names it: if it was in use, repair that file by itself"
            )


def _refused(path: str, file: str, reason: str) -> CorruptLogError:
    return CorruptLogError(
        f"{file}: {reason}. Nothing was written; `fscoord repair --salvage` makes do with what there is",
        path=path,
        offset=0,
        reason=reason,
    )
