"""Wait for a log's lock in the kernel, with a deadline.

A lock call that blocks in the kernel can't be given a deadline: Python repeats it after a signal. So a thread makes
that call. There is one such thread for each log and process, however many threads of the process wait.

The thread blocks on a descriptor of its own. Suppose that it used the descriptor of a handle, and all waiters gave up.
When another thread then acquired the lock on that descriptor, the kernel would grant the blocked request as well, and
two threads would have the lock.

When the kernel grants the lock, the thread hands the lock over to the first waiter, together with the descriptor. If no
waiter is left, the thread releases the lock.

The order of the locks: `_guard` protects `_requests` and the list of waiters of each request. It is held for a few
lines only, and nothing blocks in them. A thread that holds a process mutex may take `_guard` (see `cancel_wait`), and
no thread takes the two in the opposite order. In particular, the thread that hands over a lock does not hold `_guard`
when it takes the process mutex.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from fscoord._runtime import system
from fscoord.errors import FscoordError

HANDOVER_S: Final = 0.1
"""How long a lock is kept for the waiter to which it was handed over. A signal handler may delay that waiter."""


class WaitableLock(Protocol):
    """The lock that is waited for: see `~fscoord._log.locking.log_lock.LogLock`.

    Attributes:
        fd: a descriptor of the log.
        session: the session whose range is locked. The length of the range names the holder.
        kind: the kind of lock.
        mutex: the process mutex of the log.
        handover: a locked `threading.Lock` while the lock is kept for the next thread that takes the mutex, else None.
        can_block: whether the kernel can be asked to wait.
        is_closed: whether the lock will not be used any more.
        unlock: releases the lock.
    """

    fd: int
    session: int
    kind: int
    mutex: Any
    handover: Any
    can_block: bool
    is_closed: bool
    unlock: Callable[[], object]

    def block(self, fd: int, session: int) -> None:
        """Block in the kernel until descriptor `fd` has the lock, with the range of `session`."""

    def unblock(self, fd: int, session: int) -> None:
        """Release a lock that `block` has acquired for `session`."""

    def adopt(self, fd: int, session: int, handover: Any) -> None:
        """Replace the lock's descriptor by `fd`, on which `block` has acquired the lock for `session`.

        The caller holds the mutex.
        """


def wait_for_lock(lock: WaitableLock, left: float, reopen: Callable[[], int]) -> None:
    """Wait until `lock` was handed over, until another attempt to lock is worthwhile, or for `left` seconds.

    `reopen` opens the log once more and returns the descriptor.

    Raises:
        OSError, RuntimeError: no descriptor or thread is left, or the interpreter is about to end.
    """
    waiter = _Waiter(lock, reopen)
    try:
        request = _enqueue(waiter)
        waiter.wake.wait(left)
        request.remove(waiter)
    finally:
        waiter.gone = True  # even if Ctrl-C came between any two lines above: the thread then skips this waiter


def cancel_wait(lock: WaitableLock) -> None:
    """Wake all threads that wait for `lock`."""
    with _guard[0]:
        waiters = [waiter for request in _requests.values() for waiter in request.waiters if waiter.lock is lock]
    for waiter in waiters:
        waiter.gone = True
        waiter.wake.set()


class _Waiter:
    """A thread that waits for a lock."""

    def __init__(self, lock: WaitableLock, reopen: Callable[[], int]) -> None:
        self.lock = lock
        self.reopen = reopen
        self.gone = False
        self.wake = system.AutoResetEvent()


class _LockThread:
    """A thread that blocks in the kernel for the lock of one log, and hands the lock over to the first waiter.

    This thread, and not the waiter, stores the handover in the waiter's lock. No KeyboardInterrupt can reach this
    thread, because Python raises one in the main thread only.
    """

    def __init__(self, key: tuple[int, int, int], first: _Waiter) -> None:
        self.key = key
        self.waiters = [first]
        self.fd = -1
        self.session = 0  # the session whose range is locked on `fd`, or waited for
        system.start_thread("fscoord-lock", self._run)

    def _run(self) -> None:
        try:
            while True:
                waiter = self._first(end=True)
                if waiter is None:
                    return
                self.fd = waiter.reopen()
                block, unblock = waiter.lock.block, waiter.lock.unblock
                if _file_key(self.fd, self.key[2]) != self.key:  # the log continues in another file, or is gone
                    # Let the waiter poll, or it would return here in a loop for as long as the lock is held.
                    waiter.lock.can_block = False
                    waiter.gone = True
                    waiter.wake.set()
                    system.close_quietly(self.fd)
                    self.fd = -1
                    continue
                # The range of the waiter that probably gets the lock. Where it does, the lock costs no further request.
                self.session = waiter.lock.session
                waiter = None  # `block` may take for ever, and must not keep a waiter that has given up alive
                block(self.fd, self.session)
                if not self._hand_over():
                    # Closing is not enough: a child forked in C may have inherited the descriptor, and keep it open.
                    unblock(self.fd, self.session)
                    system.close_quietly(self.fd)
                    self.fd = -1
        except (OSError, FscoordError):  # the waiters will meet the same error when they poll
            for waiter in self.waiters:
                waiter.lock.can_block = False
        finally:
            system.close_quietly(self.fd)
            with _guard[0]:
                if _requests.get(self.key) is self:
                    del _requests[self.key]
            for waiter in self.waiters:
                waiter.wake.set()

    def remove(self, *others: _Waiter) -> None:
        """Remove `others`, and all waiters that have given up."""
        with _guard[0]:
            self.waiters[:] = [waiter for waiter in self.waiters if not waiter.gone and waiter not in others]

    def _first(self, *, end: bool = False) -> _Waiter | None:
        """Return the first waiter that has not given up. If there is none and `end` is set, accept no more waiters.

        Both steps happen under one hold of the guard. Otherwise a waiter could join a thread that is about to end.
        """
        with _guard[0]:
            self.remove()
            if self.waiters:
                return self.waiters[0]
            if end and _requests.get(self.key) is self:
                del _requests[self.key]
            return None

    def _hand_over(self) -> bool:
        """Hand the lock and the descriptor over to the first waiter; return False if none is left."""
        # The order matters. `adopt` gives the descriptor to the handle while the mutex is held, so the lock has
        # an owner at each moment: this thread until `self.fd` is -1, then the handle. The waiter is woken after that:
        # if it woke first, it would find no handover, and wait again for a lock that its own process holds.
        handover = None
        while handover is None:
            waiter = self._first()
            if waiter is None:
                return False
            lock = waiter.lock
            with lock.mutex:
                if not (waiter.gone or lock.is_closed):
                    handover = system.threading.Lock()
                    handover.acquire()
                    lock.adopt(self.fd, self.session, handover)
                    self.fd = -1
            waiter.gone = True
            waiter.wake.set()
        # The thread that takes the lock releases the handover. If no thread does so within `HANDOVER_S`, because the
        # waiter has given up or is inside a signal handler, the lock is released here. Otherwise no process could get
        # it. Only one of the two threads can find `lock.handover` set, because both test it under the mutex.
        if not handover.acquire(timeout=HANDOVER_S):
            with lock.mutex:
                if lock.handover is handover:
                    lock.handover = None
                    lock.unlock()
        return True


_requests: dict[tuple[int, int, int], _LockThread] = {}
"""The threads of this process that wait in the kernel, by device, inode number and kind of lock."""
_guard = [system.threading.RLock()]
"""Protects `_requests` and the waiters of each. It is re-entrant because a signal handler may interrupt its holder and
take it again."""


def _file_key(fd: int, kind: int) -> tuple[int, int, int]:
    found = system.os.fstat(fd)
    return found.st_dev, found.st_ino, kind


def _enqueue(waiter: _Waiter) -> _LockThread:
    key = _file_key(waiter.lock.fd, waiter.lock.kind)
    with _guard[0]:
        request = _requests.get(key)
        if request is None:
            request = _requests[key] = _LockThread(key, waiter)
        else:
            request.remove()
            request.waiters.append(waiter)
        return request


def _after_fork_in_child() -> None:
    _guard[0] = system.threading.RLock()
    for request in list(_requests.values()):
        for waiter in list(request.waiters):  # a signal handler may have forked in the middle of this thread's own wait
            waiter.wake.set()
    _requests.clear()


system.after_fork_in_child("lock waits", _after_fork_in_child)
