"""The way from the log's own name to its newest generation: forward records behind the seal of generation 0.

Generation 0 keeps the name and stays; each later one is a file of its own, which its predecessor's seal names. So that
nobody has to follow every seal, and old generations can go, a record is appended to generation 0 after each seal. It is
a hint: whoever follows it checks the id of what it finds, and goes on along the seals.

Whether the log is durable or not, what stands in generation 0 is synced before such a record is written, and behind it.
So a power loss can harm the last one only, and what is lost of it is told from damage as in a durable log.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from fscoord import _system as system
from fscoord._log import path as paths, record, tail
from fscoord._log.lock import SOFT, LogLock
from fscoord._log.opening import read_header
from fscoord._log.successor import Place, Successor, parse_name
from fscoord.errors import InsecurePathError

__all__ = ["Root", "hint", "newest", "post", "remove_log", "remove_superseded"]

_CHUNK = 1 << 18
_HINT_BYTES = 512
_TRIES = 200
_PAUSE_S = 0.0005


class Root(NamedTuple):
    """Generation 0 of a log: its ``header``, where its first record begins, and which file it is (device, inode)."""

    header: record.Header
    start: Place
    identity: tuple[int, int]


def hint(fd: int) -> Successor | None:
    """Return what the forward record at the very end of the log `fd` names, or None if there is none to be seen.

    What stands before it is not read. So the record is only known to be sound in itself, whatever it is chained over.
    """
    size = system.os.fstat(fd).st_size
    system.os.lseek(fd, max(0, size - _HINT_BYTES), 0)
    data = system.os.read(fd, _HINT_BYTES)
    if data[-1:] != bytes([record.FORWARD]):
        return None
    for start in range(len(data) - record.FRAME_SIZE - record.BODY_MIN, -1, -1):
        length = record.unpack_frame(data, start)[0]
        if start + record.FRAME_SIZE + length == len(data) and tail.is_sound_alone(data, start):
            try:
                return Successor.from_forward(data[start + record.FRAME_SIZE + record.BODY_MIN - 1 : -1])
            except ValueError:
                continue
    return None


def newest(fd: int, start: Place) -> tuple[Successor | None, Place, bool]:
    """Read the log `fd` from `start` on; return the last successor named, where its last good record ends, and whether
    something torn follows. Damage ends the reading, too: here it is not judged.
    """
    system.os.lseek(fd, start.offset, 0)
    found: Successor | None = None
    (offset, chain), data, missing = start, b"", 0
    while True:
        more = system.os.read(fd, max(_CHUNK, missing))
        data += more
        _, others, used, chain, missing = record.decode(data, chain)
        for kind, _, value, _, _ in others:
            try:
                if kind == record.SEAL:
                    found = Successor.from_seal(value)
                elif kind == record.FORWARD:
                    found = Successor.from_forward(value)
            except ValueError:  # who reads the log itself is told
                continue
        offset, data = offset + used, data[used:]
        if missing < 0:
            verdict = tail.examine(fd, offset, chain, durable=True)
            if not isinstance(verdict, tail.Skip):
                return found, Place(offset, chain), True
            (offset, chain), data = verdict, b""
            system.os.lseek(fd, offset, 0)
        elif not more:
            return found, Place(offset, chain), bool(data)


def post(
    path: str,
    root: Root,
    successor: Successor,
    writer: int,
    reading: int,
    writing: int,
    keep: set[int],
    known: Place | None = None,
) -> Place | None:
    """Append to the log `path` itself that `successor` is the newest generation, and sync that.

    Args:
        path: the log's own name.
        root: what its header must say, and where its first record begins.
        successor: the generation to name.
        writer: the session that posts.
        reading: the flags with which this mount's logs are opened to be read, and
        writing: to be appended to.
        keep: is kept equal to the descriptors that are open, so that an interruption loses none.
        known: what an earlier call returned: nothing before that place is read again, for it never changes.

    Returns:
        behind the last record; None if the lock did not come soon, so that the next one to post does it.

    Raises:
        OSError: the file system refused. What was posted may be torn; the next one steps over it.
        ValueError: the file at `path` is not this log any more.
    """
    fd = paths.open_descriptor(path, writing, keep=keep)
    reader = -1
    kind = root.header.lock_kind
    lock = LogLock(path, fd, kind, system.threading.RLock(), set())
    try:
        reader = paths.open_descriptor(path, reading, keep=keep)
        if record.Header.decode(read_header(reader))[0].log_id != root.header.log_id:
            raise ValueError(f"{path} is another log by now")
        if kind != SOFT and not _take(lock):  # a soft lock is that of all generations, and held
            return None
        is_cut = known is not None and system.os.fstat(reader).st_size < known.offset
        named, place, is_torn = newest(reader, root.start if known is None or is_cut else known)
        if named is None or named.generation < successor.generation:
            system.os.fdatasync(fd)
            if is_torn:
                place = _void(fd, reader, place)
            system.os.lseek(fd, place.offset, 0)  # for where there is no O_APPEND
            data, chain = record.encode(
                record.FORWARD, b"", successor.forward(), writer, system.time.time_ns(), place.chain
            )
            paths.write_all(fd, data)
            place = Place(place.offset + len(data), chain)
        system.os.fdatasync(fd)
        return place
    finally:
        try:
            if kind != SOFT:
                lock.unlock()
        except OSError:  # closing the descriptor will do
            pass
        paths.close_kept(fd, keep)
        if reader >= 0:
            paths.close_kept(reader, keep)


def _take(lock: LogLock) -> bool:
    for _ in range(_TRIES):
        try:
            lock.try_lock()
        except OSError as error:
            if not lock.is_taken(error):
                raise
            system.time.sleep(_PAUSE_S)
        else:
            return True
    return False


def _void(fd: int, reader: int, place: Place) -> Place:
    verdict = tail.examine(reader, place.offset, place.chain, durable=True)
    if isinstance(verdict, tail.Damage):
        raise ValueError(verdict.reason)
    if isinstance(verdict, tail.Skip):
        return Place(verdict.offset, verdict.chain)
    if system.os.fstat(fd).st_size < verdict.place:
        system.os.ftruncate(fd, verdict.place)
    system.os.lseek(fd, verdict.place, 0)
    data, chain = record.encode_void(place.offset, 0, system.time.time_ns(), place.chain)
    paths.write_all(fd, data)
    system.os.fdatasync(fd)
    return Place(verdict.place + len(data), chain)


def remove_superseded(path: str, current: bytes, before: bytes | None, kind: int, keep: set[int]) -> None:
    """Remove generation `before`, which a forward record has passed, and what makers left that died before their seal.

    The caller holds the lock of the newest generation, whose file is called `current`. So no seal will ever name any
    other file that nobody locks.
    """
    directory, base = system.os.path.split(path)
    for name in system.os.listdir(directory):
        other = system.os.fsencode(name)
        if other == current or parse_name(other, system.os.fsencode(base)) is None:
            continue
        file = system.os.path.join(directory, name)
        if other == before or kind == SOFT or _is_unlocked(file, kind, keep):
            paths.unlink_quietly(file)


def _is_unlocked(file: str, kind: int, keep: set[int]) -> bool:
    try:
        fd = paths.open_descriptor(file, system.os.O_RDWR, keep=keep)
    except (OSError, InsecurePathError):
        return False
    lock = LogLock(file, fd, kind, system.threading.RLock(), set())
    try:
        lock.try_lock()
        return True
    except OSError:
        return False
    finally:
        try:
            lock.unlock()
        except OSError:  # closing the descriptor will do
            pass
        paths.close_kept(fd, keep)


def remove_log(path: str, root: Root, clear: Callable[[str], object], keep: set[int]) -> None:
    """Remove the names of a finished log, as far as that can be done: its last record is what counts.

    The caller holds its lock. As soon as `path` is free another log may be born there, so what stands beside it goes
    first, by ``clear(path)``; and of the later generations, those that are there before, which nobody looks for after.
    """
    directory, base = system.os.path.split(path)
    try:
        if not _has_one_name(path, root, keep):
            return
        names = system.os.listdir(directory)
        clear(path)
        system.os.unlink(path)
    except (OSError, ValueError, InsecurePathError):
        return
    for name in names:
        if parse_name(system.os.fsencode(name), system.os.fsencode(base)) is not None:
            paths.unlink_quietly(system.os.path.join(directory, name))


def _has_one_name(path: str, root: Root, keep: set[int]) -> bool:
    fd = paths.open_descriptor(path, system.os.O_RDONLY, keep=keep)
    try:
        header, _, _ = record.Header.decode(read_header(fd))
        return bool(system.os.fstat(fd).st_nlink == 1 and header.log_id == root.header.log_id)
    finally:
        paths.close_kept(fd, keep)
