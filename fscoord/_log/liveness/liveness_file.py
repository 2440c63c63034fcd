"""`LivenessFile`: the side-car whose byte n is locked as long as session n lives, and what proves that a process is gone.

The kernel gives a byte back when its holder dies, however that happens, and across NFS hosts the server does. One asks
with F_OFD_GETLK, which takes nothing and waits for nobody. An unlocked byte is evidence only: see `LogFile.bury`.

The file is never replaced by us. It carries a random id, which the records of sessions name: a byte of a file with
another id says nothing about them.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from fscoord._log.format.control_records import Session
from fscoord._log.io import safe_files
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError, InsecurePathError

__all__ = ["LIVENESS_SUFFIX", "LivenessFile", "ProcessIdentity", "open_liveness_file"]

LIVENESS_SUFFIX: Final = ".alive"
MAGIC: Final = b"fsalive\n"
SIZE: Final = len(MAGIC) + 16
LOCKER_S: Final = 0.05
"""How long to look for the process that locks what is no session's, in seconds: the log's lock is held meanwhile."""


def open_liveness_file(
    path: str, mode: int, owned_fds: set[int], *, create: bool, read_only: bool
) -> LivenessFile | None:
    """Return the liveness file of the log at `path`, open; None where there is none and none is to be created.

    Args:
        path: the log's.
        mode: the permissions of a new file.
        owned_fds: is kept equal to the descriptors that are open.
        create: let it be born. The caller holds the log's lock, so nobody else does the same.
        read_only: ask only; no byte of it can be held then.

    Raises:
        OSError: it can't be opened or created.
        InsecurePathError: what is there is not a file of ours.
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
        safe_files.close_owned(safe_files.create_descriptor(name, mode, owned_fds), owned_fds)
        safe_files.inherit_permissions(path, name)
        fd = safe_files.open_descriptor(name, system.os.O_RDWR, owned_fds=owned_fds)
    try:
        safe_files.check(name, fd, mode, read_only=read_only)
        data = _read(fd)
        if create and _is_unfinished(fd, data):
            data = MAGIC + system.random_bytes(16)
            _write(fd, data)
    except (OSError, FscoordError) as error:
        raise_if_foreign(error)
        safe_files.close_owned(fd, owned_fds)
        raise
    if len(data) < SIZE or not data.startswith(MAGIC):
        safe_files.close_owned(fd, owned_fds)
        raise InsecurePathError(f"{name} is no liveness file; remove it", path=name)
    return LivenessFile(name, fd, data[len(MAGIC) :], owned_fds)


def _read(fd: int) -> bytes:
    data = more = system.os.pread(fd, SIZE, 0)
    while more and len(data) < SIZE:
        more = system.os.pread(fd, SIZE - len(data), len(data))
        data += more
    return data


def _write(fd: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += system.os.pwrite(fd, data[done:], done)


def _is_unfinished(fd: int, data: bytes) -> bool:
    """Return whether the liveness file `fd`, which begins with `data`, was born just now, or to one who died.

    It is never synced, so a power failure may leave zeros of it. Whoever lives holds a byte, and has seen it whole.
    """
    if len(data) < SIZE and MAGIC.startswith(data[: len(MAGIC)]):
        return True
    return not any(data) and not _is_locked(fd, 0, 0)


def _is_locked(fd: int, start: int, length: int) -> bool:
    """Return whether somebody else holds one of `length` bytes from `start` on; 0: however many there are."""
    asked = system.FLOCK_STRUCT.pack(system.fcntl.F_RDLCK, 0, start, length, 0)
    answer = bytes(system.fcntl.fcntl(fd, system.fcntl.F_OFD_GETLK, asked))
    return bool(system.FLOCK_STRUCT.unpack(answer[: system.FLOCK_STRUCT.size])[0] != system.fcntl.F_UNLCK)


class LivenessFile:
    """The liveness file at `path`, open on `fd`; see `open_liveness_file`.

    Attributes:
        id: the random id that it carries, 16 bytes.
        number: the session whose byte this handle holds, or 0.
    """

    def __init__(self, path: str, fd: int, identity: bytes, owned_fds: set[int]) -> None:
        self.path = path
        self.id = identity
        self.number = 0
        self._fd = fd
        self._keep = owned_fds

    def hold(self, number: int) -> bool:
        """Lock byte `number`, and give back the one held before; False if it is somebody else's.

        Raises:
            OSError: there are no such locks here, or the file system failed.
        """
        fcntl = system.fcntl
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

    def is_held(self, number: int) -> bool:
        """Return whether a handle holds the byte of session `number`.

        Raises:
            OSError: the file system failed.
        """
        if number == self.number:
            return True
        return _is_locked(self._fd, number, 1)

    def locker(self) -> str:
        """Return ``host:pid`` of another process of this host that locks bytes of the file, or words for an unknown."""
        try:
            found = system.range_lock_holder(system.os.fstat(self._fd).st_ino, LOCKER_S)
        except OSError as error:
            raise_if_foreign(error)
            found = None
        return found or "a process that is not known"

    def is_lost(self) -> bool:
        """Return whether the file has gone from its path, so that nobody new would find our byte."""
        try:
            found = system.os.fstat(self._fd)
            return found.st_nlink == 0 or not safe_files.names_same_file(self.path, (found.st_dev, found.st_ino))
        except OSError as error:
            raise_if_foreign(error)
            return True

    def give_back(self) -> None:
        """Unlock the byte that this handle holds.

        To close the descriptor is not enough: a child that another thread forks at that moment may inherit it, and
        would hold the byte for as long as the child lives.
        """
        number, self.number = self.number, 0
        if number:
            try:
                self._lock(system.fcntl.F_UNLCK, number)
            except OSError:  # closing the descriptor will do
                pass

    def close(self) -> None:
        """Give the descriptor back, and the byte with it; in a forked child the byte stays its parent's."""
        safe_files.close_owned(self._fd, self._keep)
        self._fd = -1


class ProcessIdentity(NamedTuple):
    """Where this process runs: what makes the pid of another mean something here."""

    host: str
    boot_id: bytes
    pid_space: int
    time_space: int

    @classmethod
    def find(cls) -> ProcessIdentity:
        """Return that of this process."""
        return cls(system.hostname(), system.boot_id(), system.namespace("pid"), system.namespace("time"))

    def is_provably_dead(self, session: Session) -> bool:
        """Return whether the process of `session` is gone for certain, whoever has inherited its descriptors.

        A process number alone proves nothing: it is given again, and means another process in another container.
        """
        if not self.shares_processes_with(session):
            return False
        try:
            system.os.kill(session.pid, 0)
        except ProcessLookupError as error:
            raise_if_foreign(error)
            return True
        except (OSError, OverflowError) as error:  # it is another user's, or no number of a process
            raise_if_foreign(error)
        return self.is_other_process(session) or system.is_zombie(session.pid)

    def shares_processes_with(self, session: Session) -> bool:
        """Return whether the process number of `session` means the same process here."""
        here = (self.host, self.boot_id, self.pid_space)
        return here == (session.host, session.boot_id, session.pid_space) and any(self.boot_id) and self.pid_space > 0

    def is_same_process(self, session: Session) -> bool:
        """Return whether the process that has the number of `session` now, here, is that of the session for certain."""
        began = session.start_time if session.time_space == self.time_space else 0
        return self.shares_processes_with(session) and system.start_time(session.pid) == began != 0

    def is_other_process(self, session: Session) -> bool:
        """Return whether the process that has the number of `session` now began at another time."""
        if session.time_space != self.time_space or not session.start_time:
            return False  # start times in other time namespaces can't be compared: time_namespaces(7)
        found = system.start_time(session.pid)
        return found not in (0, session.start_time)
