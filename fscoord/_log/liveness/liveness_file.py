"""`LivenessFile`: the file in which each living session locks a byte. `ProcessIdentity` proves that a process is dead.

Session n locks byte n. When the process dies, the kernel releases the lock; on NFS, the server does. F_OFD_GETLK
reports whether a byte is locked, without locking anything or waiting. An unlocked byte is evidence of a death, but not
a proof: see `Log.record_death`.

The file is never replaced. It contains a random id, and each session record contains the id of its file. The bytes of a
file with another id say nothing about the session.

A handle that shows its wait in a wait slot also locks a byte for that slot, far beyond the bytes of the sessions. So
two handles never write to one slot, and a slot is free again as soon as its session ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final, NamedTuple

from fscoord._log.files import safe_files
from fscoord._log.format.control_records import Session
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord.errors import FscoordError, InsecurePathError

LIVENESS_SUFFIX: Final = ".alive"
MAGIC: Final = b"fsalive\n"
SIZE: Final = len(MAGIC) + 16
SLOT_BYTES: Final = 1 << 62
"""The offset of the byte that is locked for wait slot 0."""
LOCKER_S: Final = 0.05
"""How long `LivenessFile.locker` may search, in seconds. The log's lock is held meanwhile."""


def open_liveness_file(
    path: str, mode: int, owned_fds: set[int], *, create: bool, read_only: bool
) -> LivenessFile | None:
    """Open the liveness file of the log at `path`. Return None if it does not exist and `create` is false.

    Args:
        path: the path of the log.
        mode: the permissions of a new file.
        owned_fds: a set to which the file's descriptor is added.
        create: whether to create a missing file. If true, the caller holds the log's lock, so that no other process
            creates the file at the same time.
        read_only: whether to open the file for reading only. Bytes can then be probed, but not locked.

    Raises:
        OSError: the file can't be opened or created.
        InsecurePathError: the file is not a liveness file, or users whom `mode` does not allow can write it.
    """
    name = path + LIVENESS_SUFFIX
    try:
        fd = safe_files.open_descriptor(
            name, system.os.O_RDONLY if read_only else system.os.O_RDWR, owned_fds=owned_fds
        )
    except FileNotFoundError as error:
        raise_if_foreign(error)
        if not create:
            return None
        fd = safe_files.create_descriptor(name, mode, owned_fds)
        safe_files.inherit_permissions(path, fd)
        safe_files.close_owned(fd, owned_fds)
        fd = safe_files.open_descriptor(name, system.os.O_RDWR, owned_fds=owned_fds)
    try:
        safe_files.check(name, fd, mode, read_only=read_only)
        data = safe_files.read_all(fd, SIZE, 0)
        if create and _is_unfinished(fd, data):
            data = MAGIC + system.random_bytes(16)
            safe_files.write_all(fd, data)  # at the position 0, which pread(2) does not move
    except (OSError, FscoordError) as error:
        raise_if_foreign(error)
        safe_files.close_owned(fd, owned_fds)
        raise
    if len(data) < SIZE or not data.startswith(MAGIC):
        safe_files.close_owned(fd, owned_fds)
        raise InsecurePathError(f"{name} is not a liveness file; remove it", path=name)
    return LivenessFile(name, fd, data[len(MAGIC) :])


def _is_unfinished(fd: int, data: bytes) -> bool:
    """Return whether the caller must write the header of the liveness file `fd`. `data` are its first bytes.

    The header is missing or incomplete if the caller has just created the file, or if the creator of the file died. The
    header may also be zeros after a power failure, because the file is never synced. If the header is zeros but a byte
    is locked, return False: a session locks a byte only after the header was written, so the file is not new.
    """
    if len(data) < SIZE and MAGIC.startswith(data[: len(MAGIC)]):
        return True
    return not any(data) and not _is_locked(fd, 0, 0)


def _is_locked(fd: int, start: int, length: int) -> bool:
    """Return whether another open file locks any of the `length` bytes from `start` on (0: all later bytes)."""
    asked = system.FLOCK_STRUCT.pack(system.fcntl.F_RDLCK, 0, start, length, 0)
    answer = bytes(system.fcntl.fcntl(fd, system.fcntl.F_OFD_GETLK, asked))
    return bool(system.FLOCK_STRUCT.unpack(answer[: system.FLOCK_STRUCT.size])[0] != system.fcntl.F_UNLCK)


class LivenessFile:
    """An open liveness file. `open_liveness_file` creates the object.

    Attributes:
        id: the random id of the file, 16 bytes.
        number: the number of the session whose byte this handle has locked; 0 if it has locked none.
    """

    def __init__(self, path: str, fd: int, identity: bytes) -> None:
        self.path = path
        self.id = identity
        self.number = 0
        self._slots: list[int] = []  # the wait slots that are locked; threads that lock two at once use the first
        self._fd = fd

    def hold(self, number: int) -> bool:
        """Lock byte `number`, and then unlock the previous byte. Return False if another handle has locked `number`.

        Raises:
            OSError: the file system has no such locks, or the call failed.
        """
        fcntl = system.fcntl
        # The new byte is locked before the old one is unlocked, so that the handle holds a byte at every moment.
        try:
            self._lock(fcntl.F_WRLCK, number)
        except (BlockingIOError, PermissionError) as error:
            raise_if_foreign(error)
            return False
        if self.number not in (0, number):
            self._lock(fcntl.F_UNLCK, self.number)
        self.number = number
        return True

    def _lock(self, kind: int, number: int) -> None:
        system.fcntl.fcntl(self._fd, system.fcntl.F_OFD_SETLK, system.FLOCK_STRUCT.pack(kind, 0, number, 1, 0))

    def lock_slot(self, numbers: Iterable[int]) -> int:
        """Lock the wait slot that this handle locked before, or else the first free slot of `numbers`.

        The caller locks the slot again before each write, because a lost connection to a server drops locks.

        Returns:
            The number of the slot; 0 if none is free.

        Raises:
            OSError: the call failed.
        """
        for number in chain(self._slots[:1], numbers):
            try:
                self._lock(system.fcntl.F_WRLCK, SLOT_BYTES + number)
            except (BlockingIOError, PermissionError) as error:
                raise_if_foreign(error)
                if number in self._slots:
                    self._slots.clear()
                continue
            if number not in self._slots:
                self._slots.append(number)
            return self._slots[0]
        return 0

    def is_held(self, number: int) -> bool:
        """Return whether any handle, including this handle, has locked the byte of session `number`.

        Raises:
            OSError: the file system failed.
        """
        if number == self.number:
            return True  # F_OFD_GETLK does not report locks of the descriptor that asks
        return _is_locked(self._fd, number, 1)

    def locker(self) -> str:
        """Return ``host:pid`` of another process on this host that locks bytes of the file, or "an unknown process"."""
        found = None
        with ignoring(OSError):
            found = system.range_lock_holder(system.os.fstat(self._fd).st_ino, LOCKER_S)
        return found or "an unknown process"

    def is_lost(self) -> bool:
        """Return whether the file is not at its path any more. A new handle then can't find the locked byte."""
        with ignoring(OSError):
            found = system.os.fstat(self._fd)
            return found.st_nlink == 0 or not safe_files.names_same_file(self.path, (found.st_dev, found.st_ino))
        return True

    def release(self) -> None:
        """Unlock the bytes that this handle has locked.

        Closing the descriptor is not enough, because a forked child may have inherited it. Then the byte would stay
        locked for as long as the child lives.
        """
        number, self.number = self.number, 0
        for byte in (number, *(SLOT_BYTES + slot for slot in self._slots)):
            with ignoring(OSError):  # closing the descriptor unlocks it as well
                self._lock(system.fcntl.F_UNLCK, byte)


class ProcessIdentity(NamedTuple):
    """The host, boot and namespaces of a process. A pid and a start time are unique only within these."""

    host: str
    boot_id: bytes
    pid_space: int
    time_space: int

    @classmethod
    def find(cls) -> ProcessIdentity:
        """Return the identity of this process."""
        return cls(system.hostname(), system.boot_id(), system.namespace("pid"), system.namespace("time"))

    def session(self, rank: int | None = None, label: str = "") -> Session:
        """Return a `Session` that describes this process, with `rank` and `label`."""
        return Session(
            host=self.host,
            pid=system.os.getpid(),
            start_time=system.start_time(),
            boot_id=self.boot_id,
            rank=rank,
            label=label,
            pid_space=self.pid_space,
            time_space=self.time_space,
        )

    def is_provably_dead(self, session: Session) -> bool:
        """Return whether the process of `session` is certainly dead. A child may still keep the session's byte locked.

        A pid alone is not a proof: the kernel reuses pids, and the same pid in another container belongs to another
        process.
        """
        if not self.shares_processes_with(session):
            return False
        try:
            system.os.kill(session.pid, 0)
        except ProcessLookupError as error:
            raise_if_foreign(error)
            return True
        except (OSError, OverflowError) as error:  # the process of another user, or not a process number
            raise_if_foreign(error)
        return self.is_other_process(session) or system.is_zombie(session.pid)

    def shares_processes_with(self, session: Session) -> bool:
        """Return whether the pid in `session` refers to the host, boot and pid namespace of this process."""
        here = (self.host, self.boot_id, self.pid_space)
        return here == (session.host, session.boot_id, session.pid_space) and any(self.boot_id) and self.pid_space > 0

    def is_same_process(self, session: Session) -> bool:
        """Return whether the process that now has the pid of `session` is certainly the process of `session`."""
        began = session.start_time if session.time_space == self.time_space else 0
        return self.shares_processes_with(session) and system.start_time(session.pid) == began != 0

    def is_stopped(self, session: Session) -> bool:
        """Return whether the process of `session` is certainly stopped, for example by SIGSTOP or a debugger."""
        return self.is_same_process(session) and system.process_state(session.pid) in ("T", "t")

    def is_other_process(self, session: Session) -> bool:
        """Return whether the process that now has the pid of `session` is certainly not the process of `session`."""
        if session.time_space != self.time_space or not session.start_time:
            return False  # start times of different time namespaces can't be compared: time_namespaces(7)
        found = system.start_time(session.pid)
        return found not in (0, session.start_time)
