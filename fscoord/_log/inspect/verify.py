"""`verify`: report whether each file of a log is sound, what is wrong with it, and what the user can safely do.

The log is not changed, and may be in use: a record that looks unfinished is read again while writers are locked out.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fscoord._arguments import Timeout, to_seconds
from fscoord._log.files import safe_files
from fscoord._log.files.opening import read_header
from fscoord._log.files.safe_files import FilePath
from fscoord._log.format import record
from fscoord._log.format.control_records import decode_control
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import ForeignFile, Header, LogIdentity, Provenance, provenance_of
from fscoord._log.format.record import LogPosition, MalformedRecord
from fscoord._log.generations import forwarding
from fscoord._log.inspect.scan import Damaged, ProgressCallback, Scan, Sound, Torn, Voided, WriterLockout, iter_records
from fscoord._log.mount import find_mount
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError

SOUND: Final = "sound"
TORN: Final = "torn"
EMPTY: Final = "empty"
DAMAGED: Final = "damaged"

FINDINGS_MAX: Final = 1000
"""How many findings a report lists. Further findings are only counted."""

_TORN_ADVICE = "nothing: no success was reported for it, and the next writer skips it"
_DAMAGE_ADVICE = (
    "end the processes that use it; `fscoord repair` copies the sound records to another file, and reports the others"
)
_FOREIGN_ADVICE = (
    "check the path; if the file was a store, end the processes that use it: `fscoord repair --salvage` copies the"
    " records that it still holds"
)


class Finding(NamedTuple):
    """Damage in a log, or another fact about its files.

    Attributes:
        file: the path of the file.
        offset: where the finding begins in the file, in bytes.
        size: how many bytes are affected.
        is_damage: whether the store can't be used because of this finding. Other findings need no attention.
        message: what is wrong.
        advice: what the user can safely do about it.
    """

    file: str
    offset: int
    size: int
    is_damage: bool
    message: str
    advice: str


class Generation(NamedTuple):
    """One file of a log.

    Attributes:
        file: the path of the file.
        generation: the number of the file. Number 0 is the file at the log's own path.
        size: how many bytes of the file were read.
        records: the number of sound records, without voids.
        voids: the number of voids. Each void makes readers skip one torn record.
        ends: ``"whole"``, ``"sealed"`` (the log continues in another file), ``"torn"``, ``"empty"`` or ``"damaged"``.
    """

    file: str
    generation: int
    size: int
    records: int
    voids: int
    ends: str


class Report(NamedTuple):
    """The result of `verify`.

    Attributes:
        path: the path of the log.
        verdict: ``"sound"``; ``"torn"`` (sound, but the last record was never finished); ``"empty"`` (no writer has
            opened it yet); or ``"damaged"``.
        generations: the files of the log, in order. Superseded files are not listed, although they may still exist.
        findings: the damage and other facts that were found, in the order of the files.
        more: how many further findings are not listed, because there are too many.
    """

    path: str
    verdict: str
    generations: tuple[Generation, ...]
    findings: tuple[Finding, ...]
    more: int = 0


def ignore_progress(*_: object) -> None:
    """Do nothing. The default for all callbacks."""


def verify(path: FilePath, *, timeout: Timeout = 10.0, on_progress: ProgressCallback = ignore_progress) -> Report:
    """Read all files of the log at `path`, and report what is wrong with them. Nothing is changed.

    The store may be in use. A record that looks unfinished is read again under a shared lock, which blocks writers
    until the rest of the file was read. As with ``fsck -n``, the user decides what to do about the findings.

    Args:
        path: the path of a file store.
        timeout: how long to wait for the lock, in seconds or as a `timedelta`; ``math.inf`` means no limit.
        on_progress: called with the path of a file, how many of its bytes were read, and its size in bytes.

    Raises:
        StoreUnavailableError: a file can't be opened or read.
        InsecurePathError: `path` is a symbolic link, or not a regular file.
        StoreTimeoutError: the lock was not released in time, so an unfinished record could not be told from damage. The
            error names the holder of the lock.
        UnsupportedFilesystemError: this file system has no locks of the log's kind.
    """
    path, limit = safe_files.resolve(path), to_seconds(timeout)
    missing: GenerationRef | None = None
    while True:
        verification = _Verification(path, limit, on_progress, missing)
        try:
            return verification.run()
        except GenerationMissing as error:
            missing = error.named
        except FscoordError:
            raise
        except OSError as error:
            raise_if_foreign(error)
            raise safe_files.unavailable(error, path, "reading the log") from error


class GenerationMissing(Exception):
    """Raised if the file of generation `named` is missing.

    A compaction may have removed the file meanwhile, so the caller begins again.
    """

    def __init__(self, named: GenerationRef) -> None:
        super().__init__()
        self.named = named


class _Verification:
    """One attempt to read all files of a log. `missing` is the generation that the previous attempt did not find."""

    def __init__(self, path: str, limit: float, on_progress: ProgressCallback, missing: GenerationRef | None) -> None:
        self.on_progress = on_progress
        self._path, self._limit, self._missing = path, limit, missing
        self.generations: list[Generation] = []
        self._findings: list[Finding] = []
        self._more = 0
        self._root: Header | None = None
        self._inodes_last = find_mount(path).inodes_last
        self._root_inode = 0
        self._newest: tuple[str, Header, int] | None = None  # the last file with a sound header, and its inode

    def run(self) -> Report:
        named = self._read_file(self._path, None)
        while named is not None:
            named = self._read_file(safe_files.beside(self._path, named.name), named)
        self._identify()
        self._report_unused_files()
        ends = self.generations[-1].ends
        if any(finding.is_damage for finding in self._findings):
            verdict = DAMAGED
        else:
            verdict = ends if ends in (TORN, EMPTY) else SOUND
        return Report(self._path, verdict, tuple(self.generations), tuple(self._findings), self._more)

    def find(self, file: str, offset: int, size: int, message: str, advice: str, *, is_damage: bool = False) -> None:
        if len(self._findings) < FINDINGS_MAX:
            self._findings.append(Finding(file, offset, size, is_damage, message, advice))
        else:
            self._more += 1

    def damage(self, file: str, offset: int, size: int, message: str, advice: str = _DAMAGE_ADVICE) -> None:
        self.find(file, offset, size, message, advice, is_damage=True)

    def _read_file(self, file: str, named: GenerationRef | None) -> GenerationRef | None:
        """Read generation 0 if `named` is None, otherwise generation `named`. Return the next generation, or None."""
        try:
            fd = safe_files.open_descriptor(file, system.os.O_RDONLY)
        except OSError as error:
            raise_if_foreign(error)
            if named is None or error.errno not in safe_files.GONE or isinstance(error, FscoordError):
                raise
            self._report_missing(file, named)
            return None
        try:
            safe_files.check(file, fd, 0, read_only=True)
            begin = self._read_header(file, fd, named)
            if begin is None:
                return None
            lockout = WriterLockout(self._path, fd, begin[0].lock_kind, self._limit)
            try:
                scan = Scan(fd, begin[1], durable=begin[0].durable, lockout=lockout)
                return _FileReader(self, file, named, begin[0]).read(scan)
            finally:
                lockout.release()
        finally:
            system.close_quietly(fd)

    def _report_missing(self, file: str, named: GenerationRef) -> None:
        """Report that the file of generation `named` is missing.

        Raises:
            GenerationMissing: this attempt is the first that did not find the file. A compaction may have removed the
                file.
        """
        if named != self._missing:
            raise GenerationMissing(named)
        message = f"generation {named.generation} of the log is missing: what it held is lost"
        self.damage(
            file, 0, 0, message, "put this file back; if it is lost, `fscoord repair` copies the generation before it"
        )

    def _read_header(self, file: str, fd: int, named: GenerationRef | None) -> tuple[Header, LogPosition] | None:
        data = read_header(fd)
        if named is None and Header.is_partial(data):
            message = "no writer has opened it yet" if not data else "its creator died before the header was written"
            advice = "do nothing: the next writer that opens the file writes its header"
            self.find(file, 0, len(data), message, advice)
            self.generations.append(Generation(file, 0, len(data), 0, 0, EMPTY))
            return None
        try:
            header, start = Header.decode(data)
            if named is not None and (header.log_id, header.generation) != (named.log_id, named.generation):
                raise MalformedRecord("it is not the next generation")
            if self._root is not None and (header.lock_kind, header.durable) != (
                self._root.lock_kind,
                self._root.durable,
            ):
                raise MalformedRecord(f"its kind of lock or its durability differs from that of {self._path}")
        except MalformedRecord as error:
            size = system.os.fstat(fd).st_size
            foreign = isinstance(error, ForeignFile)
            self.damage(file, 0, size, str(error), _FOREIGN_ADVICE if foreign else _DAMAGE_ADVICE)
            self.generations.append(Generation(file, named.generation if named else 0, size, 0, 0, DAMAGED))
            return None
        inode = system.os.fstat(fd).st_ino if self._inodes_last else 0
        if self._root is None:
            self._root, self._root_inode = header, inode
        self._newest = file, header, inode
        return header, start

    def _identify(self) -> None:
        """Report a finding if the ids and inode numbers in the headers show that the log was copied or restored."""
        if self._newest is None:
            return
        file, header, inode = self._newest
        stands = provenance_of(header, self._root_inode, inode)
        original = None
        if stands is Provenance.OTHER_ROOT and self._root is not None:
            original = forwarding.find_root(self._path, header, self._root.log_id)
        if original is not None:
            message = f"it is a copy of {original}, and both continue in {file}: they would be one store"
            self.damage(self._path, 0, 0, message, "make a store of its own with `fscoord cp`, then remove it")
        elif stands is not Provenance.OWN:
            message = "the log was copied or restored; the first write to it makes it a log of its own"
            self.find(self._path, 0, 0, message, "nothing")

    def _report_unused_files(self) -> None:
        """Report files beside the log that are named like generations but are not part of the log."""
        known = {generation.file for generation in self.generations}
        newest = max(generation.generation for generation in self.generations)
        owner = LogIdentity(self._newest[1].lineage, self._root_inode) if self._newest else LogIdentity(b"", 0)
        for number, file in forwarding.later_files(self._path):
            if file in known:
                continue
            if number > newest:
                message = (
                    f"it is named like generation {number} of the log, but no seal names it: its creator has died, or"
                    " is still writing it"
                )
            else:
                message = f"it is named like generation {number} of the log, but the log does not use it"
            if forwarding.is_removable(file, owner, newest, system.os.O_RDONLY, set()):
                advice = "nothing: a later compaction removes it"
            else:
                advice = "nothing: it does not belong to this log; you can remove it if no other store uses it"
            self.find(file, 0, 0, message, advice)


class _FileReader:
    """Reads one file of the log after its `header`, and reports findings to `whole`, the verification of the log."""

    def __init__(self, whole: _Verification, file: str, named: GenerationRef | None, header: Header) -> None:
        self._whole, self._file, self._named, self._header = whole, file, named, header
        self._successor: GenerationRef | None = None
        self._sealed_at = 0
        self._is_snapshot_seen = not (named and named.size)
        self._records = self._voids = 0
        self._ends = "whole"

    def read(self, scan: Scan) -> GenerationRef | None:
        self._check_snapshot_end(scan.place)
        for segment in scan.segments():
            if isinstance(segment, Sound):
                self._take(segment)
            elif isinstance(segment, Voided):
                self._voids += 1
            elif isinstance(segment, Torn):
                self._ends = TORN
                message = "the record that begins here was never finished: its writer died, or its disk was full"
                size = segment.end - segment.offset
                self._whole.find(self._file, segment.offset, size, message, _TORN_ADVICE)
            else:
                self._damage(segment)
            self._whole.on_progress(self._file, segment.end, scan.size())
        self._compare_hint(scan)
        size = scan.place.offset
        if not self._is_snapshot_seen and self._ends != DAMAGED:
            self._bad(0, size, "the end of its snapshot does not match the seal that names it")
        if self._sealed_at and self._ends != DAMAGED:
            self._ends = "sealed"
        self._whole.generations.append(
            Generation(self._file, self._header.generation, size, self._records, self._voids, self._ends)
        )
        return self._successor

    def _compare_hint(self, scan: Scan) -> None:
        """Report a forward record at the end of generation 0 after a torn record.

        A process that opens the log follows this forward record, and does not read the records before it.
        """
        if self._named is not None or self._ends != TORN:  # a torn end was read with writers locked out
            return
        hinted = forwarding.hint(scan.fd)
        if hinted is not None and (self._successor is None or hinted.generation > self._successor.generation):
            message = (
                f"its last record names generation {hinted.generation}, but the record before it is torn: no writer"
                " leaves a file like this"
            )
            self._bad(scan.place.offset, scan.size(), message)

    def _take(self, segment: Sound) -> None:
        self._records += len(segment.records) + len(segment.others)
        # Records are decoded one by one only if one of them can be malformed, or if the snapshot ends among them.
        is_special = any(found[0] != record.BELL for found in segment.others) or self._sealed_at
        is_special = is_special or any(found[0] in record.OF_SEVERAL_KEYS for found in segment.records)
        if not is_special and (self._is_snapshot_seen or segment.end < self._snapshot_end.offset):
            return
        for start, end, found in iter_records(segment):
            self._interpret(start, end, found)
            self._check_snapshot_end(LogPosition(end, record.chain_at_end(segment.data[: end - segment.offset])))

    def _interpret(self, start: int, end: int, found: record.Record) -> None:
        # After damage, a forward record may follow a seal that can't be read any more.
        is_seal_lost = self._ends == DAMAGED and found[0] == record.FORWARD
        try:
            meaning = decode_control(found, self._header.generation, is_sealed=bool(self._sealed_at) or is_seal_lost)
            if isinstance(meaning, GenerationRef) and (
                self._successor is None or meaning.generation > self._successor.generation
            ):
                self._successor = meaning
        except MalformedRecord as error:
            self._bad(start, end, str(error))
        if found[0] == record.SEAL:
            self._sealed_at = self._sealed_at or start

    @property
    def _snapshot_end(self) -> LogPosition:
        assert self._named is not None, "only a seal states where a snapshot ends"
        return LogPosition(self._named.size, self._named.chain)

    def _check_snapshot_end(self, place: LogPosition) -> None:
        if not self._is_snapshot_seen and place == self._snapshot_end:
            self._is_snapshot_seen = True

    def _damage(self, segment: Damaged) -> None:
        self._bad(segment.offset, segment.end, segment.reason)
        self._is_snapshot_seen = True  # if its end was not found, this damage is the reason

    def _bad(self, start: int, end: int, message: str) -> None:
        self._ends = DAMAGED
        self._whole.damage(self._file, start, end - start, message)
