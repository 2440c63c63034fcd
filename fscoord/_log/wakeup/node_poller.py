"""One process of a node asks the server for news, for all who wait there for the same log.

On a mount that hosts share nothing tells of another host's write, so whoever waits must ask, and a hundred processes of
a node would ask a hundred times for the same. They share a bell (see `bell`) in a directory of this node instead, and
the post of the one who asks, which is a lock on that bell: who holds it polls and rings for the others. When it leaves
or dies the kernel gives the lock to another at once, who rings all, for the news that were not passed on.

The one who asks counts its looks in the bell. Who sees that it does not (it is stopped, say) looks itself. As with
every bell, all of this is a hint: each look at the log is a look at the server.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final
from zlib import crc32

from fscoord._log.access.mount import find_mount
from fscoord._log.io import safe_files
from fscoord._log.locking.process_mutex import LogKey
from fscoord._log.wakeup.doorbell import SIZE, Doorbell
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

__all__ = ["PollerElection", "node_bell_path"]

BEAT, PACE, NUDGES = SIZE, SIZE + 1, SIZE + 2
"""Behind the buckets: how often was asked, at which pace (milliseconds), and how often somebody wanted it faster."""
FALLBACK = "/tmp"  # noqa: S108
"""Where there is no XDG_RUNTIME_DIR (basedir specification); the directory made there is checked."""
SLOW_PACE_MS: Final = 8
POST: Final = 1 << 20
"""The byte whose lock is the post."""


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
    """This process's part in asking for all of the node.

    Args:
        bell: the bell of the node; closed with the `Watch` that it belongs to.
        call: has every waiting thread of this process see whether the post is its own.
    """

    def __init__(self, bell: Doorbell, call: Callable[[], None]) -> None:
        self._bell = bell
        self._call = call
        self._guard = system.threading.RLock()
        self._held = system.Descriptors()  # the descriptor whose lock is the post, while this process has it
        self._line = system.Descriptors()  # the one that waits for it
        self._holder: Any = None  # the thread's ticket that asks
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()
        self._nudges = 0
        self._finalizer = weakref.finalize(self, system.close_all, system.os.close, self._held)
        self._finalizer.atexit = False
        _posts.add(self)

    # -- who has it ------------------------------------------------------------------------------------------------

    def join(self, ticket: Any) -> None:
        """`ticket` begins to wait; have whoever asks do so faster."""
        self._waiting.add(ticket)
        if self._byte(PACE) > SLOW_PACE_MS:
            self._put(NUDGES, self._byte(NUDGES) + 1)
            system.os.utime(self._bell.fd)

    def leave(self, ticket: Any) -> None:
        """`ticket` waits no more; give the post to another thread, or process."""
        with self._guard:
            self._waiting.discard(ticket)
            if self._holder is ticket:
                self._holder = None
            if self._holder is not None or not self._held:
                return
            if not self._waiting:
                self._resign()
                return
        self._call()

    def _resign(self) -> None:
        for fd in list(self._held):
            self._give_up(fd, self._held)

    def _give_up(self, fd: int, kept: set[int]) -> None:
        """Unlock the post and close its descriptor; a child that is forked meanwhile may inherit that one still."""
        try:
            self._lock(fd, system.fcntl.F_OFD_SETLK, system.fcntl.F_UNLCK)
        except OSError:  # closing the descriptor will do
            pass
        safe_files.close_owned(fd, kept)

    @staticmethod
    def _lock(fd: int, command: int, kind: int) -> None:
        system.fcntl.fcntl(fd, command, system.FLOCK_STRUCT.pack(kind, 0, POST, 1, 0))

    def close(self) -> None:
        """Give the post back; nobody of this process waits for this bell any more."""
        with self._guard:
            self._waiting.clear()
            self._holder = self  # so that it is nobody's
            self._resign()

    def is_mine(self, ticket: Any) -> bool:
        """Return whether `ticket` is to ask, now or from now on; if another process has the post, stand in line."""
        if self._holder is ticket:
            return True
        with self._guard:
            if self._holder is not None or (self._line and not self._held):
                return False
            if not self._held:
                fd = safe_files.open_descriptor(self._bell.path, system.os.O_RDWR, owned_fds=self._line)
                if not self._try_lock(fd):
                    self._seek(fd)
                    return False
                self._held.add(fd)
                self._line.clear()
            self._holder = ticket
        self._nudges = self._byte(NUDGES)
        self.tell(range(SIZE))
        return True

    def _try_lock(self, fd: int) -> bool:
        try:
            self._lock(fd, system.fcntl.F_OFD_SETLK, system.fcntl.F_WRLCK)
        except (BlockingIOError, PermissionError) as error:
            raise_if_foreign(error)
            return False
        return True

    def _seek(self, fd: int) -> None:
        """Have a thread wait for the post: the kernel gives it away the moment that its holder leaves or dies."""
        try:
            system.start_thread("fscoord-post", self._wait_for_lock, fd)
        except RuntimeError as error:  # no thread left: go on by looking when nobody else does
            safe_files.close_owned(fd, self._line)
            raise_if_foreign(error)

    def _wait_for_lock(self, fd: int) -> None:
        try:
            self._lock(fd, system.fcntl.F_OFD_SETLKW, system.fcntl.F_WRLCK)
        except OSError:
            safe_files.close_owned(fd, self._line)
            return
        with self._guard:
            if not self._waiting:
                self._give_up(fd, self._line)
                return
            self._held.add(fd)
            self._line.discard(fd)
        self._call()

    # -- what is said in the bell ----------------------------------------------------------------------------------

    def beat(self, pause: float) -> None:
        """Say that this process has just asked, and in how many seconds it will ask again."""
        self._put(BEAT, self._byte(BEAT) + 1)
        self._put(PACE, min(int(pause * 1000), 255))

    def beats(self) -> int:
        """Return a number that changes while somebody asks."""
        return self._byte(BEAT)

    def is_hurried(self, ticket: Any) -> bool:
        """Return, to who asks, whether somebody wants it faster."""
        return self._holder is ticket and self._byte(NUDGES) != self._nudges

    def heed(self) -> None:
        """Take note of the nudges so far."""
        self._nudges = self._byte(NUDGES)

    def asks(self, ticket: Any) -> bool:
        """Return whether `ticket` is the one that asks."""
        return self._holder is ticket

    def tell(self, buckets: Iterable[int]) -> bool:
        """Ring for `buckets`, which have been written to; return whether anybody waits for one."""
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
        """In a forked child: the post is the parent's; its descriptors are closed by now, and nothing is unlocked."""
        self._guard = system.threading.RLock()
        self._waiting.clear()
        self._holder = self


_posts: weakref.WeakSet[PollerElection] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for post in list(_posts):
        post.after_fork()


system.after_fork_in_child("posts", _after_fork_in_child)
