"""`LogLock`: the advisory lock of a log. It has one of three kinds: ``ofd``, ``flock`` or ``soft``.

A `LogLock` reports which session holds the lock. A wait for the lock has a deadline.

`LogLock.try_lock` and `LogLock.unlock` are attributes. For the kinds ``ofd`` and ``flock``, ``unlock`` is a C function
with its arguments bound. A caller of this form ::

    try:
        lock.try_lock()
        ...
    finally:
        lock.unlock()

always releases the lock, even after a KeyboardInterrupt. Python handles signals between two statements, and when it
enters a Python function, but not before a C function that is the first call of a ``finally`` block. If ``unlock`` were
a Python function, or were not the first call of the block, Ctrl-C could skip ``unlock``, and the lock would stay held
until the process ends. The ``unlock`` of a lock that is not held does nothing, so it may follow a ``try_lock`` that
failed.

The log lock of session n is the byte range [L, L+1+n). All ranges share byte L, so they exclude each other. F_OFD_GETLK
does not report the holder of a range, but it reports the length of the range (fcntl(2)). The length gives the session.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fscoord._log.locking.kernel_wait import cancel_wait, wait_for_lock
from fscoord._log.shared import symlink_lock
from fscoord._runtime import system
from fscoord._runtime.interrupts import ignoring, raise_if_foreign
from fscoord.errors import UnsupportedFilesystemError

OFD: Final = 1
FLOCK: Final = 2
SOFT: Final = 3
KINDS: Final = {"ofd": OFD, "flock": FLOCK, "soft": SOFT}
KIND_NAMES: Final = {number: name for name, number in KINDS.items()}

BASE: Final = 1 << 62
SPINS: Final = 3
NAP_FIRST_S, NAP_S = 0.00005, 0.0005
NAP_PHASE_S: Final = 0.02
"""How long a waiter naps and tries again before it waits in the kernel, in seconds. With many busy writers, naps are
faster: if the kernel grants the lock to a sleeping process, no process uses the lock until that process has woken."""
IN_A_ROW_NAP_S: Final = 0.001
IN_A_ROW_PHASES: Final = 2.5
"""How long a writer that writes again without a pause naps before it waits in the kernel, in units of `NAP_PHASE_S`.

`IN_A_ROW_NAP_S` is the length of each nap, in seconds. While this writer naps, the other writers get the lock at the
first attempt more often. A wake-up costs more than a write, so few long naps are better than many short ones.
"""
POLL_S: Final = 0.05
DEADLOCK_NAP_S: Final = 0.001
"""How long a waiter naps after a first EDEADLK, in seconds. Each further nap is twice as long, up to `POLL_S`."""


def _range(kind: int, session: int) -> bytes:
    return system.FLOCK_STRUCT.pack(kind, 0, BASE, 1 + session, 0)


def _nothing() -> None:
    """Do nothing, in place of `try_lock` or `unlock`."""


def _no_descriptor() -> None:
    """Raise OSError (EBADF), in place of `try_lock`, because a fork has closed the descriptor."""
    raise OSError(system.errno.EBADF, "the descriptor of the log was closed by a fork")


def no_ofd_locks(path: str) -> UnsupportedFilesystemError:
    """Return the error for a platform without open-file-description locks."""
    return UnsupportedFilesystemError(
        f'{path}: this platform has no open-file-description locks; pass lock="flock" in every process',
        path=path,
    )


_REFUSALS = frozenset(getattr(system.errno, name) for name in ("ENOLCK", "ENOSYS", "EOPNOTSUPP", "ENOTSUP", "EINVAL"))


class LogLock:
    """The lock of one log, as one handle uses it.

    Attributes:
        marker: the path of the symbolic link that exists while a soft lock is held.
        fd: the descriptor of the log that the kernel locks, open for writing; -1 after a fork.
        try_lock: acquires the lock, or raises BlockingIOError at once.
        unlock: releases the lock, or does nothing if it is not held.
        handover: a locked `threading.Lock` if the kernel has granted the log's lock and no thread has taken it yet;
            otherwise None. The next thread that takes `mutex` gets the log's lock: it sets ``handover`` to None, and
            calls ``release()`` on the old value. Nothing can interrupt the thread between these steps.
        can_block: whether a thread can wait for this lock in the kernel.
        is_closed: whether `close` was called.
        session: the session whose byte range is locked. The length of the range names the holder.
        file_key: (device, inode number, kind of lock); None until a thread has waited for this lock.
        mutex: the process mutex of the log. A thread holds it while it calls `try_lock`, `unlock` or `bind`.

    A `shared` lock excludes writers but not other readers. Its descriptor may be open for reading only. A shared soft
    lock does nothing, because soft locks have no shared mode.

    `descriptors` are the open descriptors of the handle. The `LogLock` updates this set when it changes to another
    descriptor.
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
        self.file_key: tuple[int, int, int] | None = None
        self._descriptors = descriptors
        self._symlink_lock = symlink_lock.SymlinkLock(self.marker)
        self.bind(fd, 0)

    def bind(self, fd: int, session: int) -> None:
        """Use descriptor `fd` from now on, with the byte range of `session` (0: not registered yet)."""
        self.fd, self.session = fd, session
        if self.kind == OFD:
            self._bind_ofd(fd, session)
        elif self.kind == FLOCK:
            self._bind_flock(fd)
        elif self.shared:
            self.unlock = self.try_lock = _nothing
        else:
            self.try_lock, self.unlock = self._symlink_lock.acquire, self._symlink_lock.release

    def next_on(self, fd: int) -> LogLock:
        """Return a lock of the same kind and session on descriptor `fd`, which replaces this lock.

        The two locks share the symbolic link of a soft lock. If this lock fails to remove the link, the new lock
        removes it.
        """
        following = LogLock(self.path, fd, self.kind, self.mutex, self._descriptors, shared=self.shared)
        following._symlink_lock = self._symlink_lock
        following.bind(fd, self.session)
        return following

    def _bind_ofd(self, fd: int, session: int) -> None:
        fcntl = system.fcntl
        if not system.has_ofd_locks():
            raise no_ofd_locks(self.path)
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
        """Return the error to raise if a lock call raised `error` because the mount has no such locks; else None."""
        is_soft = self.kind == SOFT
        if error.errno not in _REFUSALS and not (is_soft and error.errno == system.errno.EPERM):  # symlink(2)
            return None
        others = " or ".join(f'lock="{name}"' for name, number in KINDS.items() if number != self.kind)
        missing, remedy = f"has no {KIND_NAMES[self.kind]} locks", "choose another directory, mount it with locks, or"
        if is_soft:
            missing, remedy = "refuses symbolic links, and a soft lock is one", "choose another directory, or"
        return UnsupportedFilesystemError(
            f"{self.path}: this file system {missing} ({error.strerror}); {remedy} pass {others} in every process",
            path=self.path,
        )

    def is_taken(self, error: OSError) -> bool:
        """Return whether `try_lock` raised `error` because the lock is held: EAGAIN or, for fcntl(2), EACCES."""
        return isinstance(error, BlockingIOError) or (self.kind == OFD and isinstance(error, PermissionError))

    def foreign_holder(self) -> str:
        """Return why this process can't find out whether the holder of a soft lock is alive; "" if it can."""
        return symlink_lock.foreign(self.marker)

    def holder(self) -> int | str | None:
        """Return the holder of the lock: a session number (0: not registered yet), a description, or None (unknown)."""
        if self.fd < 0:
            return None
        if self.kind == SOFT:
            return symlink_lock.holder(self.marker)
        with ignoring(OSError):
            if self.kind == FLOCK:
                return system.flock_holder(self.fd)
            fcntl = system.fcntl
            answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, _range(fcntl.F_WRLCK, 0))
            kind, _, start, length, _ = system.FLOCK_STRUCT.unpack(bytes(answer)[: system.FLOCK_STRUCT.size])
            # Another program may lock all bytes, by lockf(3), or on Lustre by flock(2). Such a lock names no session.
            return None if kind == fcntl.F_UNLCK or start != BASE or length < 1 else length - 1
        return None

    def wait(
        self,
        attempt: int,
        waited: float,
        left: float,
        reopen: Callable[[], int],
        *,
        flags: int = 0,
        patient: bool,
        in_a_row: bool = False,
        show_life: Callable[[], None] | None = None,
    ) -> bool:
        """Wait before the next attempt to lock. Return whether the wait was a nap of `IN_A_ROW_NAP_S`.

        Other handles may append many records during such a nap.

        Args:
            attempt: the number of attempts so far.
            waited: how long the caller has waited, in seconds.
            left: how long the caller may still wait, in seconds.
            reopen: a function that opens the log once more, and returns the descriptor.
            flags: the flags of open(2) with which `reopen` opens the log.
            patient: whether to nap and retry for a while before waiting in the kernel.
            in_a_row: whether the caller has just held the lock.
            show_life: a function to call at least every `LIFE_S` during a wait in the kernel; None: no call.
        """
        if patient and in_a_row and waited < IN_A_ROW_PHASES * NAP_PHASE_S:
            system.time.sleep(min(IN_A_ROW_NAP_S, left))
            return True
        if patient and waited < NAP_PHASE_S:
            if attempt <= SPINS:
                system.os.sched_yield()
            else:
                doublings = min(attempt - SPINS - 1, 10)
                system.time.sleep(min(NAP_FIRST_S * 2**doublings, NAP_S, left))
        elif self.can_block:
            try:
                wait_for_lock(self, left, reopen, flags=flags, keeps=not patient, show_life=show_life)
            except OSError as error:
                raise_if_foreign(error)
                self.can_block = False
        else:
            system.time.sleep(min(0.001 * attempt, POLL_S, left))
        return False

    def block(self, fd: int, session: int) -> None:
        """Block in the kernel until descriptor `fd` has the lock, with the range of `session`.

        Linux does not report EDEADLK for these kinds of lock, but Lustre does. The server of Lustre follows the chain
        of waiters and holders. The chain may have waiters that were killed, and holders on other hosts that have
        released their locks. A wait for a log's lock is never part of a real deadlock: the descriptor that waits holds
        no lock, and the holder of a log's lock waits for no other lock. So EDEADLK means here that the lock is held.
        """
        fcntl, nap = system.fcntl, DEADLOCK_NAP_S
        while True:
            try:
                if self.kind == OFD:
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLKW, _range(fcntl.F_WRLCK, session))
                else:
                    fcntl.flock(fd, fcntl.LOCK_EX)
                return
            except OSError as error:
                raise_if_foreign(error)
                if error.errno != system.errno.EDEADLK:
                    raise
            system.time.sleep(nap)
            nap = min(2 * nap, POLL_S)

    def unblock(self, fd: int, session: int) -> None:
        """Release a lock that `block` has acquired for `session`."""
        fcntl = system.fcntl
        with ignoring(OSError):  # closing the descriptor unlocks it as well
            if self.kind == OFD:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, session))
            else:
                fcntl.flock(fd, fcntl.LOCK_UN)

    def adopt(self, fd: int, session: int, handover: Any, left: set[int]) -> None:
        """Use descriptor `fd`, on which `block` has acquired the lock for `session`. Store `handover`.

        The caller holds the mutex. The old descriptor, which holds no lock, moves to the set `left`.
        """
        old = self.fd
        self._descriptors.add(fd)
        system.loose.discard(fd)
        self.bind(fd, self.session)
        if self.kind == OFD and session != self.session:
            self._change_range(session)
        self.handover = handover
        left.add(old)  # before the next line, so that a child that is forked meanwhile closes it
        self._descriptors.discard(old)

    def _change_range(self, session: int) -> None:
        """Change the locked range from the range of `session` to the range of this handle's session.

        Byte L stays locked. If the range becomes shorter, this method unlocks the rest, because `unlock` releases only
        the range of this handle's session.
        """
        fcntl, longer = system.fcntl, session - self.session
        tail = system.FLOCK_STRUCT.pack(fcntl.F_UNLCK, 0, BASE + 1 + self.session, longer, 0) if longer > 0 else b""
        with ignoring(OSError):  # the lock is held nevertheless, but waiters can't name its holder
            if tail:
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, tail)
            else:
                self.try_lock()

    def leave(self) -> None:
        """Release the lock and call `close`, because the log continues in another file. The caller holds the mutex.

        Raises:
            OSError: the symbolic link of a soft lock may still exist.
        """
        try:
            self.unlock()
        except OSError as error:
            # NFS 3 fails to unlock a file that another host has removed. Closing the descriptor unlocks it as well.
            raise_if_foreign(error)
            if self.kind == SOFT:
                raise
        self.close()

    def after_fork(self, mutex: Any) -> None:
        """Forget the parent's lock and handover in a forked child, and use `mutex` from now on.

        The descriptor is closed already. In the child, the old mutex may stay locked for ever. A thread that had the
        log's lock and waited for that mutex would never release the log's lock.
        """
        self.mutex = mutex
        self.handover = None
        self.fd = -1
        self.try_lock, self.unlock = _no_descriptor, _nothing

    def close(self) -> None:
        """Cancel all waits. If the lock was handed over and not taken yet, unlock it. The caller holds the mutex."""
        self.is_closed = True
        handover, self.handover = self.handover, None
        if handover is not None:
            with ignoring(OSError):  # closing the descriptor unlocks it as well
                self.unlock()
            handover.release()
        if self.kind == SOFT:
            self._symlink_lock.close()
        self.unlock = _nothing  # the number of the descriptor may belong to another file soon
        cancel_wait(self)
