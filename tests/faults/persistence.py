"""The content of a disk after a power failure: record the calls of a workload, then build every allowed state.

The model is that of the ALICE study (Pillai and others, OSDI 2014), as far as fscoord's calls need it: what was not
synced may be lost, may reach the disk in any order, and may be torn at sectors or pages, the missing part reading as
zeros; names that were made or removed since the directory was synced may each be there or not, whatever the files hold.
fsync(2) and fdatasync(2) of a file keep its bytes and its length, but no name; fsync(2) of the directory keeps names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

from support.internals import Header, LogIdentity, LogOptions, MalformedRecord, system

SECTOR, PAGE = 512, 4096
FEW = 3
"""Of so many parts of a write, or names, every subset is tried; of more, those at an end and those but for one."""

State = dict[str, bytes]
"""The files of a directory, by name."""


class Write(NamedTuple):
    """Bytes that were written to file `file`, at `offset`."""

    file: int
    offset: int
    data: bytes


class Truncate(NamedTuple):
    """File `file` was made `size` bytes long, which is more than it was."""

    file: int
    size: int


class Name(NamedTuple):
    """`name` came to mean file `file`, or nothing, if that is None."""

    name: str
    file: int | None


class Sync(NamedTuple):
    """All that was written to `file` is on the disk; None: all names are."""

    file: int | None


class Acknowledged(NamedTuple):
    """Operation `number`, counted from 1, returned; or it was begun, if `begun`."""

    number: int
    begun: bool


Step = Write | Truncate | Name | Sync | Acknowledged


class RecordingOs(ModuleType):
    """An `os` that records what is done to the files of one directory, those that are there before among them.

    Attributes:
        steps: what was done, in order.
        before: the directory at the beginning, all of which is on the disk.
    """

    def __init__(self, directory: str) -> None:
        super().__init__("os")
        self.steps: list[Step] = []
        self.before: State = {}
        self._directory = directory
        self._files: dict[str, int] = {}
        self._sizes: dict[int, int] = {}
        self._open: dict[int, int] = {}
        for name in sorted(os.listdir(directory)):
            with open(os.path.join(directory, name), "rb") as file:
                self.before[name] = file.read()
            self._files[name] = self._new(len(self.before[name]))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _new(self, size: int) -> int:
        number = len(self._sizes)
        self._sizes[number] = size
        return number

    def _name(self, path: str) -> str | None:
        directory, name = os.path.split(path)
        return name if directory == self._directory else None

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        fd = os.open(path, flags, mode)
        name = self._name(path)
        if name is not None:
            if name not in self._files:
                self._files[name] = self._new(0)
                self.steps.append(Name(name, self._files[name]))
            self._open[fd] = self._files[name]
        elif path == self._directory:
            self._open[fd] = -1
        return fd

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        os.close(fd)

    def write(self, fd: int, data: bytes) -> int:
        done = os.write(fd, data)
        if fd in self._open:  # whoever writes here appends
            self._wrote(fd, self._sizes[self._open[fd]], bytes(data[:done]))
        return done

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        done = os.pwrite(fd, data, offset)
        if fd in self._open:
            self._wrote(fd, offset, bytes(data[:done]))
        return done

    def _wrote(self, fd: int, offset: int, data: bytes) -> None:
        file = self._open[fd]
        self._sizes[file] = max(self._sizes[file], offset + len(data))
        self.steps.append(Write(file, offset, data))

    def ftruncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)
        assert size >= self._sizes[self._open[fd]], "no log is ever cut"
        self._sizes[self._open[fd]] = size
        self.steps.append(Truncate(self._open[fd], size))

    def link(self, source: str, target: str) -> None:
        os.link(source, target)
        old, new = self._name(source), self._name(target)
        assert old is not None
        assert new is not None
        self._files[new] = self._files[old]
        self.steps.append(Name(new, self._files[new]))

    def unlink(self, path: str) -> None:
        os.unlink(path)
        name = self._name(path)
        if name is not None:
            del self._files[name]
            self.steps.append(Name(name, None))

    def rename(self, *_: Any) -> None:
        raise AssertionError("nothing is renamed over a log")

    replace = rename

    def fsync(self, fd: int) -> None:
        """Nothing has to reach a disk of this machine for the model to know that it would have."""
        self.steps.append(Sync(None if self._open[fd] < 0 else self._open[fd]))

    def fdatasync(self, fd: int) -> None:
        self.fsync(fd)


@contextmanager
def recording(directory: str) -> Iterator[RecordingOs]:
    """Put a `RecordingOs` under the whole package."""
    recorder, real = RecordingOs(directory), system.os
    system.os = recorder  # type: ignore[assignment]
    try:
        yield recorder
    finally:
        system.os = real


# -- the model ---------------------------------------------------------------------------------------------------------


class Disk:
    """What is on the disk for certain, and what may be: by file, and for the names."""

    def __init__(self, before: State) -> None:
        self.files: dict[int, bytes] = dict(enumerate(before.values()))
        self.changes: dict[int, list[Write | Truncate]] = {}
        self.names: dict[str, int] = {name: number for number, name in enumerate(before)}
        self.renamed: list[Name] = []

    def take(self, step: Step) -> None:
        """Let `step` be done."""
        if isinstance(step, (Write, Truncate)):
            self.changes.setdefault(step.file, []).append(step)
        elif isinstance(step, Name):
            self.renamed.append(step)
        elif isinstance(step, Sync) and step.file is None:
            self.names, self.renamed = named(self.names, self.renamed), []
        elif isinstance(step, Sync):
            self.files[step.file] = changed(self._file(step.file), self.changes.pop(step.file, []))  # type: ignore[arg-type, index]

    def _file(self, number: int) -> bytes:
        return self.files.get(number, b"")

    def states(self, *, deep: bool) -> Iterator[State]:
        """Every state that the directory may be in if the power fails now.

        Of files and names one at a time goes through all that it may be, while the others are as they were when last
        synced, or as they are now; `deep`: all at once.
        """
        choices: list[list[Any]] = [list(name_choices(self.names, self.renamed))]
        files = sorted(self.changes)
        choices += [list(dict.fromkeys(file_choices(self._file(file), self.changes[file]))) for file in files]
        for some in all_of(choices) if deep else one_at_a_time(choices):
            names, *contents = some
            found = self.files | dict(zip(files, contents, strict=True))
            yield {name: found.get(file, b"") for name, file in sorted(names.items())}


def all_of(choices: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Every combination of one choice of each."""
    return product(*choices)


def one_at_a_time(choices: list[list[Any]]) -> Iterator[tuple[Any, ...]]:
    """Every choice of each, beside the first of all others, and beside the last of all others."""
    for place, some in enumerate(choices):
        for choice in some:
            for rest in (0, -1):
                yield tuple(choice if other == place else own[rest] for other, own in enumerate(choices))


def subsets(count: int) -> list[tuple[bool, ...]]:
    """Which of `count` things may have reached the disk: from none to all, in this order."""
    if count <= FEW:
        return sorted(product([False, True], repeat=count), key=sum)
    starts = [tuple(number < end for number in range(count)) for end in range(count + 1)]
    but_one = [tuple(number != missing for number in range(count)) for missing in range(count)]
    only_one = [tuple(number == there for number in range(count)) for there in range(count)]
    return list(dict.fromkeys([starts[0], *only_one, *but_one, *starts[1:]]))


def name_choices(names: dict[str, int], renamed: list[Name]) -> Iterator[dict[str, int]]:
    """What the names may be; first none of those `renamed`, last all of them."""
    for there in subsets(len(renamed)):
        yield named(names, [step for step, kept in zip(renamed, there, strict=True) if kept])


def named(names: dict[str, int], steps: list[Name]) -> dict[str, int]:
    """`names` after `steps`."""
    found = dict(names)
    for name, file in steps:
        if file is None:
            found.pop(name, None)
        else:
            found[name] = file
    return found


def changed(data: bytes, changes: list[Write | Truncate]) -> bytes:
    """`data` after `changes`."""
    for change in changes:
        if isinstance(change, Truncate):
            data = data.ljust(change.size, b"\0")
        else:
            end = change.offset + len(change.data)
            data = data.ljust(change.offset, b"\0")[: change.offset] + change.data + data[end:]
    return data


def file_choices(data: bytes, changes: list[Write | Truncate]) -> Iterator[bytes]:
    """What a file may hold; first nothing of `changes`, last all of them."""
    for there in subsets(len(changes))[:-1]:
        yield changed(data, [change for change, kept in zip(changes, there, strict=True) if kept])
    for number, change in enumerate(changes):
        if isinstance(change, Write):
            for block in (SECTOR, PAGE):
                yield from torn(data, changes[:number], change, changes[number + 1 :], block)
    yield changed(data, changes)


def torn(
    data: bytes, before: list[Write | Truncate], change: Write, behind: list[Write | Truncate], block: int
) -> Iterator[bytes]:
    """What a file may hold of which `change` reached the disk in part: some of its blocks, whatever its length."""
    start = changed(data, before)
    offset, end = change.offset, change.offset + len(change.data)
    edges = [offset, *range(offset - offset % block + block, end, block), end]
    parts = [Write(0, a, change.data[a - offset : b - offset]) for a, b in pairwise(edges)]
    for there in subsets(len(parts))[:-1]:
        kept: list[Write | Truncate] = [part for part, is_there in zip(parts, there, strict=True) if is_there]
        for size in (0, end):
            some = changed(start, [*kept, Truncate(0, size)])
            yield some
            if behind:
                yield changed(some, behind)


# -- workloads ---------------------------------------------------------------------------------------------------------


class Crash(NamedTuple):
    """A state that the power may leave, and how many operations have left their mark in it.

    Attributes:
        state: the files.
        least: so many operations had returned.
        most: so many had begun.
    """

    state: State
    least: int
    most: int


def crashes(recorder: RecordingOs, *, deep: bool = False) -> Iterator[Crash]:
    """Every state in which the power may leave the directory, at any moment of what was recorded."""
    disk, least, most = Disk(recorder.before), 0, 0
    for step in recorder.steps:
        if isinstance(step, Acknowledged):
            least, most = (least, step.number) if step.begun else (step.number, most)
        else:
            disk.take(step)
        for state in disk.states(deep=deep):
            yield Crash(state, least, most)


def put_state(directory: str, state: State) -> None:
    """Let `directory` hold the files of `state` and no others. See `same_files`."""
    for name in os.listdir(directory):
        os.unlink(os.path.join(directory, name))
    for name, data in state.items():
        fd = os.open(os.path.join(directory, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)


@contextmanager
def same_files(number: Callable[[], int] | None = None) -> Iterator[None]:
    """Let files that `put_state` has made anew be those that they stand for: after a power failure a file has the inode
    number that it had. So it is the one that its header names; `number` gives those of new files, if not the system.
    """
    real_inode, owns = LogOptions.inode, LogIdentity.owns

    def inode(wanted: LogOptions, fd: int) -> int:
        found = real_inode(wanted, fd)
        try:
            return Header.decode(os.pread(fd, 4096, 0))[0].inode
        except (OSError, MalformedRecord):  # it is being written, by a descriptor that may read nothing
            return found if number is None else number()

    with (
        patch.object(LogOptions, "inode", inode),
        patch.object(LogIdentity, "owns", lambda self, header, _: owns(self, header, header.inode)),
    ):
        yield


@contextmanager
def repeatable(start: int = 0) -> Iterator[None]:
    """Let all that is drawn at random from `start` on, inode numbers, and the wall clock, be the same in every
    repetition, so that states are, too.
    """
    drawn = [start]
    real_bytes, real_time = system.random_bytes, system.time

    class Time(ModuleType):
        def __getattr__(self, name: str) -> Any:
            return getattr(real_time, name)

        def time_ns(self) -> int:
            return 1_700_000_000_000_000_000

    def random_bytes(count: int) -> bytes:
        drawn[0] += 1
        return drawn[0].to_bytes(2, "big") * (count // 2)

    fake: Callable[[int], bytes] = random_bytes
    system.random_bytes, system.time = fake, Time("time")
    try:
        with same_files(lambda: (1 << 40) + drawn[0]):
            yield
    finally:
        system.random_bytes, system.time = real_bytes, real_time
