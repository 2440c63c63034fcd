"""`verify_log`: say of every file of a log whether it is sound, and where not, what is wrong and what is safe to do.

Nothing is changed. The log may be in use: what may only be unfinished is looked at again with writers kept away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from fscoord._log.access.mount import find_mount
from fscoord._log.format import record
from fscoord._log.format.control_records import decode_control
from fscoord._log.format.generation_ref import GenerationRef, parse_generation_name
from fscoord._log.format.header import Header, LogIdentity, Provenance, provenance_of
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.generations import forwarding
from fscoord._log.inspect.scan import Damaged, Quiet, Scan, Skipped, Sound, Torn, each
from fscoord._log.io import safe_files
from fscoord._log.io.opening import read_header
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError

__all__ = ["DAMAGED", "EMPTY", "SOUND", "TORN", "Finding", "Generation", "Report", "verify_log"]

SOUND: Final = "sound"
TORN: Final = "torn"
EMPTY: Final = "empty"
DAMAGED: Final = "damaged"

FINDINGS_MAX: Final = 1000
"""How many places are told of one by one; of the others, that there are more."""
_GONE: Final = frozenset((system.errno.ENOENT, getattr(system.errno, "ESTALE", -1)))

_TORN_ADVICE = "nothing: whoever wrote it was never told that it is there, and the next to write steps over it"
_DAMAGE_ADVICE = (
    "end the processes that use it; `fscoord repair` copies what is sound to another file, and tells what it leaves out"
)


class Finding(NamedTuple):
    """Something that is not as it should be, or that people may wonder about.

    Attributes:
        file: the path of the file that it is in.
        offset: where it begins there, in bytes.
        size: how many bytes it concerns.
        is_damage: whether it keeps the store from being used; all else takes care of itself.
        says: what is wrong.
        advice: what is safe to do about it.
    """

    file: str
    offset: int
    size: int
    is_damage: bool
    says: str
    advice: str


class Generation(NamedTuple):
    """One file of a log.

    Attributes:
        file: its path.
        generation: its number; 0 has the log's own name.
        size: how much of it was read, in bytes.
        records: how many sound records it holds, voids not counted.
        voids: how many torn records are skipped in it.
        ends: ``"whole"``, ``"sealed"`` (the log goes on in another), ``"torn"``, ``"empty"`` or ``"damaged"``.
    """

    file: str
    generation: int
    size: int
    records: int
    voids: int
    ends: str


class Report(NamedTuple):
    """What `verify_log` found.

    Attributes:
        path: the path of the log.
        verdict: ``"sound"``; ``"torn"`` (sound, and the last record was never finished); ``"empty"`` (no writer has
            opened it yet); or ``"damaged"``.
        generations: its files, in their order; those between the first and the last that are still there have no part
            in it any more.
        findings: what there is to tell, in the same order.
        more: how many findings are not in that list, for there are too many.
    """

    path: str
    verdict: str
    generations: tuple[Generation, ...]
    findings: tuple[Finding, ...]
    more: int = 0


Tell = Callable[[str, int, int], object]
"""Called with the path of a file, how many bytes of it were read, and how many there are."""


def verify_log(path: str, *, limit: float, tell: Tell) -> Report:
    """Read the whole log at `path` and say what is wrong with it.

    Args:
        path: the log's own name.
        limit: how many seconds to wait for the log's lock, if something looks unfinished.
        tell: is told how far it has got.

    Raises:
        StoreUnavailableError: it can't be opened or read.
        InsecurePathError: it is a link, or no regular file.
        StoreTimeoutError: the lock did not come, so that nothing can be said for certain.
        UnsupportedFilesystemError: this file system has no locks of the log's kind.
    """
    missed: GenerationRef | None = None
    while True:
        verification = _Verification(path, limit, tell, missed)
        try:
            return verification.run()
        except _Superseded as error:
            missed = error.successor
        except FscoordError:
            raise
        except OSError as error:
            raise_if_foreign(error)
            raise safe_files.unavailable(error, path, "reading the log") from error


class _Superseded(Exception):
    """A generation has gone since another named it: the log goes on in a later one, so begin again."""

    def __init__(self, successor: GenerationRef) -> None:
        super().__init__()
        self.successor = successor


class _Verification:
    """One attempt to read all of a log."""

    def __init__(self, path: str, limit: float, tell: Tell, missed: GenerationRef | None) -> None:
        self.tell = tell
        self._path, self._limit, self._missed = path, limit, missed
        self.generations: list[Generation] = []
        self._findings: list[Finding] = []
        self._more = 0
        self._root: Header | None = None
        self._inodes_last = find_mount(path).inodes_last
        self._root_inode = 0
        self._newest: tuple[str, Header, int] | None = None  # the last file whose header was sound, and its inode

    def run(self) -> Report:
        successor = self._read_file(self._path, None)
        while successor is not None:
            directory = system.os.path.dirname(self._path)
            successor = self._read_file(system.os.path.join(directory, system.os.fsdecode(successor.name)), successor)
        self._identify()
        self._look_beside()
        ends = self.generations[-1].ends
        if any(finding.is_damage for finding in self._findings):
            verdict = DAMAGED
        else:
            verdict = ends if ends in (TORN, EMPTY) else SOUND
        return Report(self._path, verdict, tuple(self.generations), tuple(self._findings), self._more)

    def find(self, finding: Finding) -> None:
        if len(self._findings) < FINDINGS_MAX:
            self._findings.append(finding)
        else:
            self._more += 1

    def damage(self, file: str, offset: int, size: int, says: str, advice: str = _DAMAGE_ADVICE) -> None:
        self.find(Finding(file, offset, size, True, says, advice))

    def _read_file(self, file: str, named: GenerationRef | None) -> GenerationRef | None:
        """Read one file of the log, which `named` has named; return what names the next."""
        try:
            fd = safe_files.open_descriptor(file, system.os.O_RDONLY)
        except OSError as error:
            raise_if_foreign(error)
            if named is None or error.errno not in _GONE or isinstance(error, FscoordError):
                raise
            self._miss(file, named)
            return None
        try:
            safe_files.check(file, fd, 0, read_only=True)
            begin = self._read_header(file, fd, named)
            if begin is None:
                return None
            quiet = Quiet(self._path, fd, begin[0].lock_kind, self._limit)
            try:
                return _Reading(self, file, named, begin[0]).read(Scan(quiet, begin[1], durable=begin[0].durable))
            finally:
                quiet.end()
        finally:
            system.close_quietly(fd)

    def _miss(self, file: str, named: GenerationRef) -> None:
        """A file that was named is not there: it has been superseded meanwhile, or somebody has deleted it."""
        if named != self._missed:
            raise _Superseded(named)
        says = f"generation {named.generation} of the log is missing: what it held is lost"
        self.damage(
            file, 0, 0, says, "put this file back; if it is lost, `fscoord repair` copies what there was before"
        )

    def _read_header(self, file: str, fd: int, named: GenerationRef | None) -> tuple[Header, LogPosition] | None:
        data = read_header(fd)
        if named is None and Header.is_partial(data):
            says = (
                "no writer has opened it yet" if not data else "whoever created it died before its header was written"
            )
            self.find(Finding(file, 0, len(data), False, says, "nothing: the next to open it for writing begins it"))
            self.generations.append(Generation(file, 0, len(data), 0, 0, EMPTY))
            return None
        try:
            header, size, chain = Header.decode(data)
            if named is not None and (header.log_id, header.generation) != (named.log_id, named.generation):
                raise MalformedRecord("it is not the generation that was to follow")
            if self._root is not None and (header.lock_kind, header.durable) != (
                self._root.lock_kind,
                self._root.durable,
            ):
                raise MalformedRecord(f"its kind of lock, or durability, is not that of {self._path}")
        except MalformedRecord as error:
            size = system.os.fstat(fd).st_size
            self.damage(file, 0, size, str(error))
            self.generations.append(Generation(file, named.generation if named else 0, size, 0, 0, DAMAGED))
            return None
        inode = system.os.fstat(fd).st_ino if self._inodes_last else 0
        if self._root is None:
            self._root, self._root_inode = header, inode
        self._newest = file, header, inode
        return header, LogPosition(size, chain)

    def _identify(self) -> None:
        """Report it if the files were copied or restored since they were made."""
        if self._newest is None:
            return
        file, header, inode = self._newest
        stands = provenance_of(header, self._root_inode, inode)
        original = None
        if stands is Provenance.OTHER_ROOT and self._root is not None:
            original = forwarding.find_root(self._path, header, self._root.log_id)
        if original is not None:
            says = f"it is a copy of {original}, and both go on in {file}: they would be one store"
            self.damage(self._path, 0, 0, says, "make a store of its own with `fscoord cp`, then remove it")
        elif stands is not Provenance.OWN:
            says = "the log was copied, or restored: it begins a lineage of its own with the first write to it"
            self.find(Finding(self._path, 0, 0, False, says, "nothing"))

    def _look_beside(self) -> None:
        """Tell of files beside the log that look like a part of it and are none."""
        directory, base = system.os.path.split(self._path)
        known = {system.os.path.basename(generation.file) for generation in self.generations}
        newest = max(generation.generation for generation in self.generations)
        owner = LogIdentity(self._newest[1].lineage, self._root_inode) if self._newest else LogIdentity(b"", 0)
        for name in sorted(system.os.listdir(directory)):
            number = parse_generation_name(system.os.fsencode(name), system.os.fsencode(base))
            if name in known or number is None:
                continue
            if number > newest:
                says = f"it looks like generation {number} of the log, and no seal names it: its maker died, or works"
            else:
                says = f"it is generation {number} of the log, or was to be, and has no part in it any more"
            file = system.os.path.join(directory, name)
            if forwarding.is_removable(file, owner, newest, system.os.O_RDONLY, set()):
                advice = "nothing: one of the next compactions removes it"
            else:
                advice = "nothing; it does not belong to this log, and can be removed once no store uses it"
            self.find(Finding(file, 0, 0, False, says, advice))


class _Reading:
    """The reading of one file."""

    def __init__(self, whole: _Verification, file: str, named: GenerationRef | None, header: Header) -> None:
        self._whole, self._file, self._named, self._header = whole, file, named, header
        self._successor: GenerationRef | None = None
        self._sealed_at = 0
        self._is_snapshot_seen = not (named and named.size)
        self._records = self._voids = 0
        self._ends = "whole"

    def read(self, scan: Scan) -> GenerationRef | None:
        self._pass_snapshot(scan.place)
        for piece in scan.pieces():
            if isinstance(piece, Sound):
                self._take(piece)
            elif isinstance(piece, Skipped):
                self._voids += 1
            elif isinstance(piece, Torn):
                self._ends = TORN
                says = "the record that begins here was never finished: its writer died, or its disk was full"
                self._whole.find(Finding(self._file, piece.offset, piece.end - piece.offset, False, says, _TORN_ADVICE))
            else:
                self._damage(piece)
            self._whole.tell(self._file, piece.end, scan.size())
        self._compare_hint(scan)
        size = scan.place.offset
        if not self._is_snapshot_seen and self._ends != DAMAGED:
            self._bad(0, size, "its snapshot does not end where, or as, the seal that names it says")
        if self._sealed_at and self._ends != DAMAGED:
            self._ends = "sealed"
        self._whole.generations.append(
            Generation(self._file, self._header.generation, size, self._records, self._voids, self._ends)
        )
        return self._successor

    def _compare_hint(self, scan: Scan) -> None:
        """Openers go by a forward record at the very end of generation 0, whatever stands before it."""
        if self._named is not None or self._ends != TORN:  # whoever has ended torn keeps writers away
            return
        hinted = forwarding.hint(scan.fd)
        if hinted is not None and (self._successor is None or hinted.generation > self._successor.generation):
            says = (
                f"its end names generation {hinted.generation}, and what stands before it is torn: no writer does that"
            )
            self._bad(scan.place.offset, scan.size(), says)

    def _take(self, piece: Sound) -> None:
        self._records += len(piece.records) + len(piece.others)
        is_special = any(found[0] != record.BELL for found in piece.others) or self._sealed_at
        is_special = is_special or any(found[0] == record.MULTI_SET for found in piece.records)
        if not is_special and (self._is_snapshot_seen or piece.end < self._promised.offset):
            return
        for start, end, found in each(piece):
            self._note(start, end, found)
            self._pass_snapshot(LogPosition(end, record.chain_at_end(piece.data[: end - piece.offset])))

    def _note(self, start: int, end: int, found: record.Record) -> None:
        is_lost = self._ends == DAMAGED and found[0] == record.FORWARD  # the seal may be what is damaged
        try:
            meaning = decode_control(found, self._header.generation, is_sealed=bool(self._sealed_at) or is_lost)
            if isinstance(meaning, GenerationRef) and (
                self._successor is None or meaning.generation > self._successor.generation
            ):
                self._successor = meaning
        except MalformedRecord as error:
            self._bad(start, end, str(error))
        if found[0] == record.SEAL:
            self._sealed_at = self._sealed_at or start

    @property
    def _promised(self) -> LogPosition:
        assert self._named is not None, "who promises a snapshot has a name"
        return LogPosition(self._named.size, self._named.chain)

    def _pass_snapshot(self, place: LogPosition) -> None:
        if not self._is_snapshot_seen and place == self._promised:
            self._is_snapshot_seen = True

    def _damage(self, piece: Damaged) -> None:
        self._bad(piece.offset, piece.end, piece.reason)
        self._is_snapshot_seen = True  # if it is not, then because of this

    def _bad(self, start: int, end: int, says: str) -> None:
        self._ends = DAMAGED
        self._whole.damage(self._file, start, end - start, says)
