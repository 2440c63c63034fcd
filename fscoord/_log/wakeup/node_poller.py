"""One process of a node polls the file server, for all processes there that wait for changes of the same log.

On a mount that hosts share no event tells of another host's write, so waiters must poll, and a hundred processes of a
node would poll a hundred times for the same change. Instead they share a bell (see `doorbell`) in a directory of this
node, and elect a *poller*: the process that holds a lock on one byte of that bell polls, and rings for the others. When
it stops waiting or dies, the kernel gives the lock to another process at once. That one rings for every key, because
the last changes may not have been passed on.

The poller counts its polls in the bell. A waiter that sees the count stand still (the poller is stopped, say) polls for
itself. As with every bell, all of this is a hint: each look at the log is a look at the server.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final
from zlib import crc32

from fscoord._log.access.mount import find_mount
from fscoord._log.io import safe_files
from fscoord._log.locking.process_mutex import LogKey
from fscoord._log.wakeup.doorbell import SIZE, Bell
from fscoord._runtime import system
from fscoord._runtime.foreign import raise_if_foreign

__all__ = ["PollerElection", "node_bell_path"]

BEAT, PACE, HURRIES = SIZE, SIZE + 1, SIZE + 2
"""Bytes after the buckets: the poller's heartbeat, its pace in milliseconds, and how often a waiter hurried it."""
FALLBACK = "/tmp"  # noqa: S108
"""Where there is no XDG_RUNTIME_DIR (basedir specification); the directory made there is checked."""
SLOW_PACE_MS: Final = 8
ROLE: Final = 1 << 20
"""The byte whose lock makes its holder the poller."""

_FLOCK_STRUCT: Final = struct.Struct("hhqqi4x")  # struct flock with 64-bit offsets, fcntl(2)


def node_bell_path(key: LogKey) -> str:
    """Return where the processes of this user on this node have the bell of the log `key`.

    Its name tells nodes apart, which may have one /tmp.

    Raises:
        OSError: there is no directory for it that is on this node, and only this user's.
    """
    log_id, device, inode = key
    uid = system.os.geteuid()
    runtime = system.os.environ.get("XDG_RUNTIME_DIR", "")
    bases = [base for base in (runtime, FALLBACK) if system.os.path.isabs(base)]
    node = crc32(system.hostname().encode("utf-8", "surrogateescape"), crc32(system.boot_id()))
    for base in bases:
        directory = system.os.path.join(base, f"fscoord-{uid}")
        try:
            _make_private(directory, uid)
        except OSError as error:
            raise_if_foreign(error)
            if base == bases[-1]:
                raise
            continue
        return system.os.path.join(directory, f"{log_id.hex()}-{device:x}-{inode:x}-{node:08x}")
    raise OSError(system.errno.ENOENT, "there is no /tmp")


def _make_private(directory: str, uid: int) -> None:
    """Make `directory` if it is not there, and make sure that it is a directory, this user's alone, and this node's."""
    try:
        system.os.mkdir(directory, 0o700)
    except FileExistsError as error:
        raise_if_foreign(error)
    flags = system.os.O_RDONLY | system.os.O_DIRECTORY | system.O_NOFOLLOW | system.O_CLOEXEC
    fd = system.os.open(directory, flags)
    try:
        found = system.os.fstat(fd)
    finally:
        system.close_quietly(fd)
    if found.st_uid != uid or found.st_mode & 0o077:
        raise PermissionError(system.errno.EPERM, f"{directory} is not this user's alone")
    if not find_mount(directory + "/x").is_local:
        raise OSError(system.errno.EXDEV, f"{directory} is not on this node")


class PollerElection:
    """The election of the poller of a node, as one of its processes takes part in it.

    Within a process one waiter at a time polls. It is any object; waiters are compared by identity.

    Args:
        bell: the bell of the node; closed together with the `ChangeWatcher` that it belongs to.
        on_vacancy: wakes all local waiters, so that each checks whether it is the poller now.
    """

    def __init__(self, bell: Bell, on_vacancy: Callable[[], None]) -> None:
        self._bell = bell
        self._on_vacancy = on_vacancy
        self._mutex = system.threading.RLock()  # guards the four that follow
        self._held = system.Descriptors()  # the descriptor that holds the lock, while this process is the poller
        self._requested = system.Descriptors()  # the descriptor on which a thread waits for the lock
        self._poller: Any = None  # the local waiter that polls
        self._waiters: weakref.WeakSet[Any] = weakref.WeakSet()
        self._hurries_seen = 0
        self._finalizer = weakref.finalize(self, system.close_all, system.os.close, self._held)
        self._finalizer.atexit = False
        _elections.add(self)

    # -- the role --------------------------------------------------------------------------------------------------

    def add(self, waiter: Any) -> None:
        """`waiter` begins to wait: hurry a poller that has slowed down."""
        self._waiters.add(waiter)
        if self._byte(PACE) > SLOW_PACE_MS:
            self._put(HURRIES, self._byte(HURRIES) + 1)
            system.os.utime(self._bell.fd)

    def remove(self, waiter: Any) -> None:
        """`waiter` has ended; if it was the poller, pass the role to another local waiter, or to another process."""
        with self._mutex:
            self._waiters.discard(waiter)
            if self._poller is waiter:
                self._poller = None
            if self._poller is not None or not self._held:
                return
            if not self._waiters:
                self._resign()
                return
        self._on_vacancy()

    def _resign(self) -> None:
        for fd in list(self._held):
            self._release(fd, self._held)

    def _release(self, fd: int, kept: set[int]) -> None:
        """Unlock, and close the descriptor: a child that is forked meanwhile may still have inherited that one."""
        try:
            self._lock(fd, system.fcntl.F_OFD_SETLK, system.fcntl.F_UNLCK)
        except OSError:  # closing the descriptor will do
            pass
        safe_files.close_kept(fd, kept)

    @staticmethod
    def _lock(fd: int, command: int, kind: int) -> None:
        system.fcntl.fcntl(fd, command, _FLOCK_STRUCT.pack(kind, 0, ROLE, 1, 0))

    def close(self) -> None:
        """Resign; this process has no waiters on this bell any more."""
        with self._mutex:
            self._waiters.clear()
            self._poller = self  # so that no waiter gets the role
            self._resign()

    def elect(self, waiter: Any) -> bool:
        """Return whether `waiter` polls, now or from now on; if another process does, queue for the role."""
        if self._poller is waiter:
            return True
        with self._mutex:
            if self._poller is not None or (self._requested and not self._held):
                return False
            if not self._held:
                fd = safe_files.open_descriptor(self._bell.path, system.os.O_RDWR, keep=self._requested)
                if not self._try_lock(fd):
                    self._request(fd)
                    return False
                self._held.add(fd)
                self._requested.clear()
            self._poller = waiter
        self._hurries_seen = self._byte(HURRIES)
        self.notify(range(SIZE))
        return True

    def _try_lock(self, fd: int) -> bool:
        try:
            self._lock(fd, system.fcntl.F_OFD_SETLK, system.fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError) as error:
            raise_if_foreign(error)
            return False
        return True

    def _request(self, fd: int) -> None:
        """Have a thread wait for the lock: the kernel hands it over the moment that the poller resigns or dies."""
        try:
            system.start_thread("fscoord-post", self._wait_for_lock, fd)
        except RuntimeError as error:  # no thread left: this process polls only when it sees that no other does
            safe_files.close_kept(fd, self._requested)
            raise_if_foreign(error)

    def _wait_for_lock(self, fd: int) -> None:
        try:
            self._lock(fd, system.fcntl.F_OFD_SETLKW, system.fcntl.F_WRLCK)
        except OSError:
            safe_files.close_kept(fd, self._requested)
            return
        with self._mutex:
            if not self._waiters:
                self._release(fd, self._requested)
                return
            self._held.add(fd)
            self._requested.discard(fd)
        self._on_vacancy()

    # -- what the bell tells ---------------------------------------------------------------------------------------

    def heartbeat(self, pause: float) -> None:
        """As the poller: record that it has just polled, and will do so again after `pause` seconds."""
        self._put(BEAT, self._byte(BEAT) + 1)
        self._put(PACE, min(int(pause * 1000), 255))

    def heartbeats(self) -> int:
        """Return a number that changes while some process polls."""
        return self._byte(BEAT)

    def is_hurried(self, waiter: Any) -> bool:
        """Return whether `waiter` is the poller, and another waiter wants it to poll at once."""
        return self._poller is waiter and self._byte(HURRIES) != self._hurries_seen

    def acknowledge_hurry(self) -> None:
        """As the poller: forget the requests to hurry so far."""
        self._hurries_seen = self._byte(HURRIES)

    def is_poller(self, waiter: Any) -> bool:
        """Return whether `waiter` is the poller."""
        return self._poller is waiter

    def notify(self, buckets: Iterable[int]) -> bool:
        """Ring for `buckets`, which have been written to; return whether anybody waits for one of them."""
        fd = self._bell.fd
        marks = system.os.pread(fd, SIZE, 0)
        marked = [number for number in buckets if number < len(marks) and marks[number] & 1]
        for number in marked:
            system.os.pwrite(fd, bytes([(marks[number] + 1) & 0xFF]), number)
        if marked:
            system.os.utime(fd)
        return bool(marked)

    def _byte(self, place: int) -> int:
        return int.from_bytes(system.os.pread(self._bell.fd, 1, place), "little")

    def _put(self, place: int, number: int) -> None:
        system.os.pwrite(self._bell.fd, bytes([number & 0xFF]), place)

    def after_fork(self) -> None:
        """In a forked child: the role is the parent's. Its descriptors are closed by now, and nothing is unlocked."""
        self._mutex = system.threading.RLock()
        self._waiters.clear()
        self._poller = self


_elections: weakref.WeakSet[PollerElection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for election in list(_elections):
        election.after_fork()


system.after_fork_in_child("poller elections", _after_fork_in_child)
