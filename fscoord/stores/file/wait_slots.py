"""`WaitSlots` writes the wait of a handle's session to a file beside the log. `read_slots` reads all shown waits.

The file consists of slots. A wait that has lasted for `timing.SHOW_S` seconds writes its session's slot, by one
pwrite(2), and clears the slot when the wait ends. A session reserves its slot by a lock on one byte of the liveness
file. When the session ends, the lock is released, and another session can use the slot. If several threads of a session
wait, `ShownWaits` selects the wait to show. A handle that has never written has no session: such a long wait registers
the handle.

The file is opened for each write. So a forked child inherits no descriptor. On NFS the open and the close make the
write visible to other hosts, even if direct writes are refused.

A failure of this module never ends a wait. Every failure, such as a full disk or another program's file at the same
path, is logged, and the wait continues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from fscoord._log.files import safe_files
from fscoord._log.format.control_records import Session
from fscoord._log.format.wait_slot import EMPTY, FILE_HEADER, MAGIC, SLOT_SIZE, WaitSlot, is_blank
from fscoord._log.log import Log
from fscoord._log.recovery import CLOSED
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord._runtime.logging import logger
from fscoord._waiting.shown_waits import Shown, ShownWaits
from fscoord._waiting.timing import SlowWaitLogger
from fscoord.errors import FscoordError, InsecurePathError, StoreTimeoutError

WAITS_SUFFIX: Final = ".waits"

READ_AT_ONCE: Final = 256
"""The maximum number of slots that one read(2) fetches."""

SLOTS_MAX: Final = 1 << 16
"""The highest slot number plus 1."""

BLOCK: Final = 64
"""The number of slots in the first block. Each later block has twice as many slots as the block before it."""

REGISTER_S: Final = 0.1
"""How long the registration of a waiting handle may wait for the log's lock, in seconds. If another process holds the
lock for longer, the next look of the wait, a second later, tries again."""

TRIES: Final = 8
"""How many slots of each block a session tries to lock. On a network mount, each try costs a request to the server."""


class WaitSlots:
    """Shows the longest wait of one handle to other processes, in the slot of the handle's session.

    Args:
        log: the log of the handle.
        mode: the permissions of a new file of slots.
    """

    def __init__(self, log: Log, mode: int) -> None:
        self._log = log
        self._mode = mode
        self._waits = ShownWaits(self._write)
        self._number = 0, 0  # the process epoch, and the number of the session whose slot was written last
        self._has_warned = False

    def show(self, slow_logger: SlowWaitLogger, kind: str, keys: Sequence[bytes]) -> None:
        """Show the wait of `slow_logger`; see `ShownWaits.show`. A handle that only reads has no session, and no slot.

        The wait is armed, or looks again before it sleeps: a registration reads the log, so a record that it finds must
        still end the wait.
        """
        if not system.is_fake_fs() and self._has_session():
            self._waits.show(slow_logger, kind, keys)

    def _has_session(self) -> bool:
        """Return whether the handle has a session. If it has none yet, try to register one."""
        log = self._log
        if not log.session_if_ready and not log.read_only and not log.handle.recovery & CLOSED:
            try:
                log.register(REGISTER_S)
            except StoreTimeoutError as error:
                logger(__name__).debug("%s: a waiting handle could not register: %s", log.path, str(error))
            except FscoordError as error:  # if the handle is of no use any more, the next look raises the error
                self._log_failure(error)
        return log.session_if_ready != 0

    def _write(self, longest: Shown | None, more: int) -> None:
        """Write the wait `longest` to the session's slot; None: clear the slot. The handle may be closed already."""
        epoch, number = self._number
        if longest is not None:
            epoch, number = system.process_epoch(), self._log.session_if_ready
        if not number or epoch != system.process_epoch():
            return
        try:
            write_slot(self._log, self._mode, number, self._encode(number, longest, more))
            self._number = epoch, number
        except (OSError, FscoordError) as error:
            raise_if_foreign(error)
            self._log_failure(error)

    def _encode(self, number: int, longest: Shown | None, more: int) -> bytes:
        session = self._log.table.sessions.get(number)
        if longest is None or session is None:
            return EMPTY
        waited_ns = int((system.time.monotonic() - longest.started) * 1e9)
        return WaitSlot(
            number=number,
            pid=session.pid,
            start_time=session.start_time,
            boot_id=session.boot_id,
            since_ns=session.since_ns,
            more=more,
            began_ns=max(0, system.wall_time_ns() - waited_ns),
            began_monotonic_ns=max(0, int(longest.started * 1e9)),
            kind=longest.awaited.kind,
            name=longest.awaited.name,
            size=longest.awaited.size,
            keys=tuple(longest.keys),
            key_count=len(longest.keys),
        ).encode()

    def _log_failure(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger(__name__).info(
                "%s%s can't be written (%s); `fscoord ps` does not show what this process waits for",
                self._log.path,
                WAITS_SUFFIX,
                str(error),
            )


def write_slot(log: Log, mode: int, number: int, data: bytes) -> None:
    """Write `data` to the slot of session `number` of `log`. If there is no file of slots, create it.

    Raises:
        OSError: a system call failed.
        InsecurePathError: the file at this path is not a file of slots, or too many users may write to it.
    """
    path = log.path + WAITS_SUFFIX
    slot = log.liveness.lock_slot(number, _candidates(number))
    if not 0 < slot < SLOTS_MAX:
        if data == EMPTY:  # the handle was closed, or has lost the liveness file
            return
        raise OSError(system.errno.ENOLCK, "no slot is free, or the session has no lock in the liveness file")
    opened = system.Descriptors()
    try:
        is_direct = log.handle.is_shared
        try:
            fd = _open(path, system.os.O_RDWR, opened, is_direct=is_direct)
        except FileNotFoundError as error:
            raise_if_foreign(error)
            if data == EMPTY:
                return
            safe_files.create(path, lambda _: FILE_HEADER, mode, durable=False, like=log.path)
            fd = _open(path, system.os.O_RDWR, opened, is_direct=is_direct)
        safe_files.check(path, fd, mode, read_only=False)
        head = _read(fd, 0, 1, is_direct=is_direct)
        if not head:  # the file system has no hard links, so the file was created empty
            _write(fd, 0, FILE_HEADER, is_direct=is_direct)
        elif not head.startswith(MAGIC):
            raise InsecurePathError(f"{path} is not a file of wait slots; remove it", path=path)
        _write(fd, slot, data, is_direct=is_direct)
        if is_direct:
            system.sync_data(fd)  # for a mount that does not support direct writes
    finally:
        system.close_all(system.os.close, opened)


def _candidates(number: int) -> Iterator[int]:
    """Yield the slots that session `number` tries to lock. Consecutive sessions begin with different slots."""
    first, size = 1, BLOCK
    while first + size <= SLOTS_MAX:
        yield from (first + (number + place) % size for place in range(TRIES))
        first, size = first + size, 2 * size


def _open(path: str, flags: int, opened: set[int], *, is_direct: bool) -> int:
    """Open the file of slots. With `is_direct`, bypass the cache of this host, if the mount allows it.

    On NFS a plain write may stay in the cache of the host, and a plain read may return old data from this cache.
    """
    if is_direct and system.O_DIRECT:
        try:
            return safe_files.open_descriptor(path, flags | system.O_DIRECT, owned_fds=opened)
        except OSError as error:
            raise_if_foreign(error)
            if error.errno != system.errno.EINVAL:
                raise
    return safe_files.open_descriptor(path, flags, owned_fds=opened)


def _write(fd: int, slot: int, data: bytes, *, is_direct: bool) -> None:
    """Write `data` to the slot with the number `slot`, by one system call."""
    if is_direct:
        page = system.aligned_memory(len(data))
        page[:] = data
        written = system.os.pwrite(fd, page, slot * SLOT_SIZE)
    else:
        written = system.os.pwrite(fd, data, slot * SLOT_SIZE)
    if written != len(data):
        raise OSError(system.errno.ENOSPC, "the slot was written in part")


def _read(fd: int, slot: int, count: int, *, is_direct: bool) -> bytes:
    """Return the bytes of `count` slots, beginning with the slot number `slot`; fewer at the end of the file."""
    if not is_direct:
        return system.os.pread(fd, count * SLOT_SIZE, slot * SLOT_SIZE)
    pages = system.aligned_memory(count * SLOT_SIZE)
    size = system.os.preadv(fd, [pages], slot * SLOT_SIZE)
    return bytes(pages[:size])


class SlotReading:
    """The result of `read_slots`.

    Attributes:
        slots: {session number: its slot} for the sessions that wait.
        torn: the numbers of malformed slots. A slot that is being written may be malformed for a moment.
        problem: why the file of slots can't be read; None if it was read or does not exist.
    """

    def __init__(self) -> None:
        self.slots: dict[int, WaitSlot] = {}
        self.torn: list[int] = []
        self.problem: str | None = None


def read_slots(path: str, sessions: dict[int, Session], *, is_shared: bool) -> SlotReading:
    """Read the wait slots of `sessions` from the file beside the log at `path`. The function raises no error.

    `is_shared` says whether several hosts share the log.
    """
    found = SlotReading()
    if system.is_fake_fs():  # positional reads would reach real files
        return found
    opened = system.Descriptors()
    try:
        fd = _open(path + WAITS_SUFFIX, system.os.O_RDONLY, opened, is_direct=is_shared)
        safe_files.check(path + WAITS_SUFFIX, fd, 0, read_only=True)
        if not _read(fd, 0, 1, is_direct=is_shared).startswith(MAGIC):
            found.problem = f"{path}{WAITS_SUFFIX} is not a file of wait slots; remove it"
            return found
        for first in range(0, SLOTS_MAX, READ_AT_ONCE):
            data = _read(fd, first, READ_AT_ONCE, is_direct=is_shared)
            for place in range(1 if first == 0 else 0, len(data) // SLOT_SIZE):
                _note(found, sessions, first + place, data[place * SLOT_SIZE : (place + 1) * SLOT_SIZE])
            if len(data) < READ_AT_ONCE * SLOT_SIZE:
                break
    except FileNotFoundError as error:
        raise_if_foreign(error)
    except (OSError, FscoordError) as error:
        raise_if_foreign(error)
        found.problem = f"{path}{WAITS_SUFFIX} can't be read: {error}"
    finally:
        system.close_all(system.os.close, opened)
    return found


def _note(found: SlotReading, sessions: dict[int, Session], place: int, data: bytes) -> None:
    """Add the slot with the bytes `data` to `found` if it belongs to one of `sessions`.

    If the slot is malformed, add its number `place` to `found.torn`.
    """
    if is_blank(data):
        return
    slot = WaitSlot.decode(data)
    if slot is None:
        found.torn.append(place)
    elif slot.number in sessions and slot.is_of(slot.number, sessions[slot.number]):
        found.slots[slot.number] = slot
