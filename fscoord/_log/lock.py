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

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from fscoord import _system as system
from fscoord.errors import UnsupportedFilesystemError

__all__ = ["KINDS", "LogLock"]

OFD: Final = 1
FLOCK: Final = 2
SOFT: Final = 3
KINDS: Final = {"ofd": OFD, "flock": FLOCK, "soft": SOFT}
KIND_NAMES: Final = {number: name for name, number in KINDS.items()}

BASE: Final = 1 << 62
_FLOCK_STRUCT = struct.Struct("hhqqi4x")  # struct flock with 64-bit offsets, fcntl(2)
HANDOVER_S: Final = 0.1
"""How long a lock that came for a waiter is kept for it, should the waiter have been interrupted meanwhile."""


def _range(kind: int, session: int) -> bytes:
    return _FLOCK_STRUCT.pack(kind, 0, BASE, 1 + session, 0)


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
        fd: the descriptor of the log that the kernel's lock belongs to, open for writing.
        try_lock: takes the lock or raises BlockingIOError at once.
        unlock: gives it back; harmless when it is not held.
        granted: whether the lock came for a waiter and is already held, for whoever is next under `mutex`.
        mutex: what excludes the threads of this process from each other on this log.

    `descriptors` is kept equal to what the handle has open, as the lock moves from one descriptor to another.
    """

    fd: int
    session: int
    try_lock: Callable[[], object]
    unlock: Callable[[], object]

    def __init__(self, path: str, fd: int, kind: int, mutex: Any, descriptors: set[int]) -> None:
        self.path = path
        self.kind = kind
        self.mutex = mutex
        self.granted = False
        self._descriptors = descriptors
        self._soft: Any = None
        self._request: _Request | None = None
        self.bind(fd, 0)

    def bind(self, fd: int, session: int) -> None:
        """From now on lock through descriptor `fd`, in the name of `session` (0: not yet introduced)."""
        self.fd, self.session = fd, session
        if self.kind == OFD:
            self._bind_ofd(fd, session)
        elif self.kind == FLOCK:
            self._bind_flock(fd)
        else:
            self._bind_soft()

    def _bind_ofd(self, fd: int, session: int) -> None:
        fcntl = system.fcntl
        if not system.has_ofd_locks():
            raise UnsupportedFilesystemError(
                f'{self.path}: this platform has no open-file-description locks; pass lock="flock" in every process',
                path=self.path,
            )
        self.unlock = partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, _range(fcntl.F_UNLCK, session))
        self.try_lock = partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLK, _range(fcntl.F_WRLCK, session))

    def _bind_flock(self, fd: int) -> None:
        fcntl = system.fcntl
        locker, exceptions = system.load_flock_locker()
        flags = fcntl.LOCK_EX | fcntl.LOCK_NB

        def try_lock() -> None:
            try:
                locker.lock(fd, flags)
            except exceptions.AlreadyLocked as error:
                raise BlockingIOError(system.errno.EAGAIN, "the log is locked") from error
            except exceptions.LockException as error:
                raise error.__cause__ if isinstance(error.__cause__, OSError) else OSError(*error.args) from error

        self.unlock = partial(fcntl.flock, fd, fcntl.LOCK_UN)
        self.try_lock = try_lock

    def _bind_soft(self) -> None:
        if self._soft is None:
            self._soft = system.load_soft_lock(self.path + ".lock")
        soft, timeout_error = self._soft

        def try_lock() -> None:
            soft.release(force=True)  # of a hold that a KeyboardInterrupt left behind
            try:
                soft.acquire(timeout=0)
            except timeout_error as error:
                raise BlockingIOError(system.errno.EAGAIN, "the log is locked") from error

        self.try_lock = try_lock
        self.unlock = partial(soft.release, force=True)

    def refuse(self, error: OSError) -> UnsupportedFilesystemError | None:
        """Return what `error` of a lock call means if it says that there are no such locks here."""
        return _unsupported(error, self.kind, self.path) if error.errno in _REFUSALS else None

    def holder(self) -> int | str | None:
        """Return who holds the lock: a session's number (0: not introduced), words, or None if nobody or unknown."""
        if self.kind == OFD:
            fcntl = system.fcntl
            asked = _range(fcntl.F_WRLCK, 0)
            try:
                answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, asked)
            except OSError:
                return None
            kind, _, _, length, _ = _FLOCK_STRUCT.unpack(bytes(answer)[: _FLOCK_STRUCT.size])
            return None if kind == fcntl.F_UNLCK else length - 1
        if self.kind == SOFT:
            return system.soft_lock_holder(self.path + ".lock")
        return system.flock_holder(self.fd)

    def wait(self, limit: float, reopen: Callable[[], int]) -> bool:
        """Wait at most `limit` seconds for the lock; True if it came: `granted` then holds it for the next in turn.

        A call that is blocked in the kernel can't be given a deadline (Python repeats it after a signal), so a thread
        blocks, on a descriptor of its own that `reopen` returned: on a shared one a request that nobody waits for any
        more would be granted to whoever holds the lock by then. A request that outlives its waiter serves the next.
        """
        me = system.threading.get_ident()
        request = self._request
        if request is None or request.over:
            request = self._request = _Request(self, reopen(), me)
        request.waiters.add(me)
        try:
            return request.ready.wait(min(limit, system.threading.TIMEOUT_MAX))
        finally:
            request.waiters.discard(me)

    def take_grant(self) -> None:
        """Under the mutex: make the lock that came for a waiter one's own."""
        self.granted = False
        if self._request is not None:
            self._request.used.set()

    def _blocking(self, fd: int) -> tuple[int, Callable[[], object]]:
        fcntl = system.fcntl
        if self.kind == OFD:
            return fd, partial(fcntl.fcntl, fd, fcntl.F_OFD_SETLKW, _range(fcntl.F_WRLCK, self.session))
        return fd, partial(fcntl.flock, fd, fcntl.LOCK_EX)

    @property
    def can_block(self) -> bool:
        """Whether the kernel can be asked to wait for this kind of lock."""
        return self.kind != SOFT

    def try_lock_shared(self) -> bool:
        """Take the lock for reading, for which a descriptor open for reading is enough, and return whether it came.

        A soft lock has no such thing: its readers go without.
        """
        fcntl = system.fcntl
        try:
            if self.kind == OFD:
                fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, _range(fcntl.F_RDLCK, 0))
            elif self.kind == FLOCK:
                fcntl.flock(self.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def abandon(self) -> tuple[int, ...]:
        """In a forked child, where no thread waits any more: return the descriptor of a request that was in flight."""
        request, self._request, self.granted = self._request, None, False
        return () if request is None or request.over else (request.fd,)

    def forget(self) -> None:
        """Let go of a request in flight: it gives back what it gets."""
        request, self._request, self.granted = self._request, None, False
        if request is not None:
            request.waiters.clear()
            request.used.set()


class _Request:
    """A thread that blocks in the kernel until it has the lock, and hands it over with its descriptor.

    It does the handing over itself, because no KeyboardInterrupt can reach it half-way.
    """

    def __init__(self, lock: LogLock, fd: int, waiter: int) -> None:
        self.fd = fd
        self.ready = system.threading.Event()
        self.used = system.threading.Event()
        self.waiters = {waiter}
        self.over = False
        arguments = (lock, lock._blocking(fd))
        system.threading.Thread(target=self._run, args=arguments, name="fscoord-lock", daemon=True).start()

    def _run(self, lock: LogLock, request: tuple[int, Callable[[], object]]) -> None:
        fd, block = request
        try:
            block()
        except OSError:  # the waiter's own try meets the error and says so
            system.close_quietly(fd)
        else:
            with lock.mutex:
                self._hand_over(lock, fd)
        finally:
            self.over = True
            self.ready.set()
        if not self.used.wait(HANDOVER_S):
            with lock.mutex:
                if lock.granted and lock.fd == fd:
                    lock.granted = False
                    lock.unlock()

    def _hand_over(self, lock: LogLock, fd: int) -> None:
        if not self.waiters or lock._request is not self:
            system.close_quietly(fd)
            return
        old = lock.fd
        lock.bind(fd, lock.session)
        lock.granted = True
        lock._descriptors.add(fd)
        lock._descriptors.discard(old)
        system.close_quietly(old)
