"""The advisory lock of a log: its kinds, the wait for it with a deadline, and who holds it.

`LogLock.try_lock` and `LogLock.unlock` are attributes, and on the kinds that the kernel keeps ``unlock`` is a C
function with its arguments bound. So a caller that says ::

    try:
        lock.try_lock()
        ...
    finally:
        lock.unlock()

can't leak the lock to a KeyboardInterrupt: Python looks for signals between a call and the next statement, and when it
enters a Python function, but not on the way to a C function that begins a ``finally``. To unlock what one does not
hold does nothing.

The log lock of session n is the byte range [L, L+1+n). All ranges share byte L, so they exclude each other; and
F_OFD_GETLK, which does not tell who holds a range, tells its length (fcntl(2)): that is the session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fscoord._log.locking import symlink_lock
from fscoord._log.locking.kernel_wait import cancel_wait, wait_for_lock
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import UnsupportedFilesystemError

__all__ = ["KINDS", "LogLock"]

OFD: Final = 1
FLOCK: Final = 2
SOFT: Final = 3
KINDS: Final = {"ofd": OFD, "flock": FLOCK, "soft": SOFT}
KIND_NAMES: Final = {number: name for name, number in KINDS.items()}

BASE: Final = 1 << 62
SPINS: Final = 3
NAP_FIRST_S, NAP_S = 0.00005, 0.0005
PATIENCE_S: Final = 0.02
"""How long to nap and try again before waiting in the kernel: among many busy writers that is faster, for a lock that
is handed to a sleeping process is held by nobody who works until it wakes."""
POLL_S: Final = 0.05


def _range(kind: int, session: int) -> bytes:
    return system.FLOCK_STRUCT.pack(kind, 0, BASE, 1 + session, 0)


def _nothing() -> None:
    """Lock, or unlock, nothing."""


def _no_descriptor() -> None:
    """Lock through a descriptor that is closed."""
    raise OSError(system.errno.EBADF, "the descriptor was closed by a fork")


def _unsupported(error: OSError, kind: int, path: str) -> UnsupportedFilesystemError:
    others = " or ".join(f'lock="{name}"' for name, number in KINDS.items() if number != kind)
    return UnsupportedFilesystemError(
        f"{path}: this file system has no {KIND_NAMES[kind]} locks ({error.strerror}); choose another directory,"
        f" mount it with locks, or pass {others} in every process",
        path=path,
    )


_REFUSALS = frozenset(getattr(system.errno, name) for name in ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "ENOTSUP", "EINVAL"))


class LogLock:
    """One handle's hold on the lock of one log.

    Attributes:
        marker: the path of the file that is there while a soft lock is held.
        fd: the descriptor of the log that the kernel's lock belongs to, open for writing.
        try_lock: takes the lock or raises BlockingIOError at once.
        unlock: gives it back; harmless when it is not held.
        handover: None, or the lock came for a waiter and is held for whoever is next under `mutex`. That one forgets the
            handover, says ``handover.release()``, and has the lock; all three can't be interrupted half-way.
        can_block: whether the kernel can be asked to wait for this lock.
        mutex: what excludes the threads of this process from each other on this log.

    A `shared` lock keeps writers out and lets other readers in, and a descriptor open for reading is enough for it. A
    reader can do nothing about a soft lock, so it takes none.

    `descriptors` is kept equal to what the handle has open, as the lock moves from one descriptor to another.
    """

    fd: int
    session: int
    try_lock: Callable[[], object]
    unlock: Callable[[], object]

    def __init__(
        self, path: str, fd: int, kind: int, mutex: Any, descriptors: set[int], *, shared: bool = False
    ) -> None:
        self.path, self.marker = path, path + ".lock"
        self.kind = kind
        self.shared = shared
        self.mutex = mutex
        self.handover: Any = None
        self.can_block = kind != SOFT and not shared
        self.is_closed = False
        self._descriptors = descriptors
        self._marker = symlink_lock.Marker(self.marker)
        self.bind(fd, 0)

    def bind(self, fd: int, session: int) -> None:
        """From now on lock through descriptor `fd`, in the name of `session` (0: not yet introduced)."""
        self.fd, self.session = fd, session
        if self.kind == OFD:
            self._bind_ofd(fd, session)
        elif self.kind == FLOCK:
            self._bind_flock(fd)
        elif self.shared:
            self.unlock = self.try_lock = _nothing
        else:
            self.try_lock, self.unlock = self._marker.take, self._marker.give_back

    def next_on(self, fd: int) -> LogLock:
        """Return the lock that takes the place of this one on descriptor `fd`, for the same session.

        A marker stays the same: should it not be had back now, the next lock gives it back.
        """
        following = LogLock(self.path, fd, self.kind, self.mutex, self._descriptors, shared=self.shared)
        following._marker = self._marker
        following.bind(fd, self.session)
        return following

    def _bind_ofd(self, fd: int, session: int) -> None:
        fcntl = system.fcntl
        if not system.has_ofd_locks():
            raise UnsupportedFilesystemError(
                f'{self.path}: this platform has no open-file-description locks; pass lock="flock" in every process',
                path=self.path,
            )
        self.unlock = partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, session))
        kind = fcntl.F_RDLCK if self.shared else fcntl.F_WRLCK
        self.try_lock = partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, _range(kind, session))

    def _bind_flock(self, fd: int) -> None:
        fcntl = system.fcntl
        self.unlock = partial(fcntl.flock, fd, fcntl.LOCK_UN)
        if self.shared:
            self.try_lock = partial(fcntl.flock, fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        locker, exceptions = system.load_flock_locker()
        flags = fcntl.LOCK_EX | fcntl.LOCK_NB

        def try_lock() -> None:
            try:
                locker.lock(fd, flags)
            except exceptions.AlreadyLocked as error:
                raise BlockingIOError(system.errno.EAGAIN, "the log is locked") from error
            except exceptions.LockException as error:
                raise error.__cause__ if isinstance(error.__cause__, OSError) else OSError(*error.args) from error

        self.try_lock = try_lock

    def refuse(self, error: OSError) -> UnsupportedFilesystemError | None:
        """Return what `error` of a lock call means if it says that there are no such locks here."""
        return _unsupported(error, self.kind, self.path) if error.errno in _REFUSALS else None

    def is_taken(self, error: OSError) -> bool:
        """Return whether `error` of `try_lock` only says that somebody else has the lock: fcntl(2) has two ways."""
        return isinstance(error, BlockingIOError) or (self.kind == OFD and isinstance(error, PermissionError))

    def holder(self) -> int | str | None:
        """Return who holds the lock: a session's number (0: not introduced), words, or None if nobody or unknown."""
        if self.fd < 0:
            return None
        if self.kind == OFD:
            fcntl = system.fcntl
            asked = _range(fcntl.F_WRLCK, 0)
            try:
                answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
            except OSError as error:
                raise_if_foreign(error)
                return None
            kind, _, _, length, _ = system.FLOCK_STRUCT.unpack(bytes(answer)[: system.FLOCK_STRUCT.size])
            return None if kind == fcntl.F_UNLCK else length - 1
        if self.kind == SOFT:
            return symlink_lock.holder(self.marker)
        try:
            return system.flock_holder(self.fd)
        except OSError as error:
            raise_if_foreign(error)
            return None

    def wait(self, attempt: int, waited: float, left: float, reopen: Callable[[], int], *, patient: bool) -> None:
        """Return when it is worth trying again.

        Args:
            attempt: how often it was tried.
            waited: for how many seconds.
            left: for how many more.
            reopen: returns another descriptor of the log.
            patient: nap and try for a while before waiting in the kernel.
        """
        if patient and waited < PATIENCE_S:
            if attempt <= SPINS:
                system.os.sched_yield()
            else:
                doublings = min(attempt - SPINS - 1, 10)
                system.time.sleep(min(NAP_FIRST_S * 2**doublings, NAP_S, left))
        elif self.can_block:
            try:
                wait_for_lock(self, left, reopen)
            except (OSError, RuntimeError) as error:
                raise_if_foreign(error)
                self.can_block = False
        else:
            system.time.sleep(min(0.001 * attempt, POLL_S, left))

    def block(self, fd: int) -> None:
        """Wait in the kernel until descriptor `fd` has the lock."""
        fcntl = system.fcntl
        if self.kind == OFD:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _range(fcntl.F_WRLCK, 0))
        else:
            fcntl.flock(fd, fcntl.LOCK_EX)

    def unblock(self, fd: int) -> None:
        """Give back what `block` has got."""
        fcntl = system.fcntl
        try:
            if self.kind == OFD:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, 0))
            else:
                fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError:  # closing the descriptor will do
            pass

    def adopt(self, fd: int, handover: Any) -> None:
        """Under the mutex: go on with descriptor `fd`, which has the lock."""
        old = self.fd
        self._descriptors.add(fd)
        self.bind(fd, self.session)
        if self.kind == OFD:
            try:
                self.try_lock()  # the range of this session: only the byte that all share is locked so far
            except OSError as error:  # then its holder is not named
                raise_if_foreign(error)
        self.handover = handover
        self._descriptors.discard(old)
        system.close_quietly(old)

    def leave(self) -> None:
        """Under the mutex: give back what was held, and close, for the log goes on in another file.

        Raises:
            OSError: the marker of a soft lock may still be there.
        """
        try:
            self.unlock()
        except OSError as error:
            # NFS 3 does not unlock a file that another host has removed; closing the descriptor will do.
            raise_if_foreign(error)
            if self.kind == SOFT:
                raise
        self.close()

    def after_fork(self, mutex: Any) -> None:
        """In a forked child: what was granted was granted to the parent, and the descriptor is closed.

        The old mutex may be locked for ever. A thread that got the log's lock and then waited for that mutex would keep
        the lock from all processes.
        """
        self.mutex = mutex
        self.handover = None
        self.fd = -1
        self.try_lock, self.unlock = _no_descriptor, _nothing

    def close(self) -> None:
        """Under the mutex: give back what came and was not taken, and send away who still waits."""
        self.is_closed = True
        handover, self.handover = self.handover, None
        if handover is not None:
            try:
                self.unlock()
            except OSError as error:  # closing the descriptor will do
                raise_if_foreign(error)
            handover.release()
        if self.kind == SOFT:
            self._marker.close()
        self.unlock = _nothing  # the number of its descriptor will be that of another
        cancel_wait(self)
