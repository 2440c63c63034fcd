"""Wait for a lock in the kernel, and still keep a deadline.

A call that is blocked in the kernel can't be given a deadline: Python repeats it after a signal. So a thread blocks,
one for a log and process however many wait, on a descriptor of its own; on a shared one a request that nobody waits for
any more would be granted to whoever holds the lock by then. The thread hands the lock over together with the
descriptor, and gives it back if nobody waits any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from fscoord._runtime import system
from fscoord.errors import FscoordError

__all__ = ["Lock", "cancel_wait", "wait_for_lock"]

HANDOVER_S: Final = 0.1
"""How long a lock that came for a waiter is kept for it, should the waiter have been interrupted meanwhile."""


class Lock(Protocol):
    """What is waited for: see `~fscoord._log.locking.log_lock.LogLock`.

    Attributes:
        fd: a descriptor of the log.
        kind: the kind of lock.
        mutex: what excludes the threads of this process from each other.
        handover: None, or the lock came for a waiter and is held for whoever is next under the mutex.
        can_block: whether the kernel can be asked to wait.
        is_closed: whether nobody will want the lock any more.
        unlock: gives the lock back.
    """

    fd: int
    kind: int
    mutex: Any
    handover: Any
    can_block: bool
    is_closed: bool
    unlock: Callable[[], object]

    def block(self, fd: int) -> None:
        """Wait in the kernel until descriptor `fd` has the lock."""

    def unblock(self, fd: int) -> None:
        """Give back what `block` has got."""

    def adopt(self, fd: int, handover: Any) -> None:
        """Under the mutex: go on with descriptor `fd`, which has the lock."""


def wait_for_lock(lock: Lock, left: float, reopen: Callable[[], int]) -> None:
    """Return when `lock` has come, or may come at once, or after `left` seconds; `reopen` opens the log once more.

    Raises:
        OSError, RuntimeError: there is no descriptor or no thread left, or the interpreter is about to end.
    """
    waiter = _Waiter(lock, reopen)
    try:
        request = _line_up(waiter)
        waiter.wake.wait(left)
        request.forget_gone(waiter)
    finally:
        waiter.gone = True


def cancel_wait(lock: Lock) -> None:
    """Wake all who wait for `lock`."""
    with _guard[0]:
        waiters = [waiter for request in _requests.values() for waiter in request.waiters if waiter.lock is lock]
    for waiter in waiters:
        waiter.gone = True
        waiter.wake.set()


class _Waiter:
    """A thread in the line for a lock."""

    def __init__(self, lock: Lock, reopen: Callable[[], int]) -> None:
        self.lock = lock
        self.reopen = reopen
        self.gone = False
        self.wake = system.AutoResetEvent()


class _Request:
    """A thread that blocks in the kernel until it has the lock of one log, and hands it to the first in the line.

    It does the handing over itself, because no KeyboardInterrupt can reach it half-way.
    """

    def __init__(self, place: tuple[int, int, int], first: _Waiter) -> None:
        self.place = place
        self.waiters = [first]
        self.fd = -1
        system.start_thread("fscoord-lock", self._run)

    def _run(self) -> None:
        try:
            while True:
                waiter = self._first(end=True)
                if waiter is None:
                    return
                self.fd = waiter.reopen()
                block, unblock = waiter.lock.block, waiter.lock.unblock
                if _place(self.fd, self.place[2]) != self.place:  # its log goes on in another file, or has gone
                    waiter.lock.can_block = False  # or it would come back at once, for as long as the lock is held
                    waiter.gone = True
                    waiter.wake.set()
                    system.close_quietly(self.fd)
                    self.fd = -1
                    continue
                waiter = None  # whoever gives up may also be thrown away
                block(self.fd)
                if not self._hand_over():
                    unblock(self.fd)  # a child that was forked in C has inherited the descriptor, and keeps it open
                    system.close_quietly(self.fd)
                    self.fd = -1
        except (OSError, FscoordError):  # whoever waits will meet it, too, and must not ask the kernel again
            for waiter in self.waiters:
                waiter.lock.can_block = False
        finally:
            system.close_quietly(self.fd)
            with _guard[0]:
                if _requests.get(self.place) is self:
                    del _requests[self.place]
            for waiter in self.waiters:
                waiter.wake.set()

    def forget_gone(self, *others: _Waiter) -> None:
        """Forget `others`, and those who do not wait any more."""
        with _guard[0]:
            self.waiters[:] = [waiter for waiter in self.waiters if not waiter.gone and waiter not in others]

    def _first(self, *, end: bool = False) -> _Waiter | None:
        """Return the first who still waits; if there is nobody and this is the `end`, let nobody else line up."""
        with _guard[0]:
            self.forget_gone()
            if self.waiters:
                return self.waiters[0]
            if end and _requests.get(self.place) is self:
                del _requests[self.place]
            return None

    def _hand_over(self) -> bool:
        """Give the lock, with the descriptor, to the first who still waits; False if there is nobody."""
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
                    lock.adopt(self.fd, handover)
                    self.fd = -1
            waiter.gone = True
            waiter.wake.set()
        if not handover.acquire(timeout=HANDOVER_S):
            with lock.mutex:
                if lock.handover is handover:
                    lock.handover = None
                    lock.unlock()
        return True


_requests: dict[tuple[int, int, int], _Request] = {}
"""The requests of this process that are in flight, by device, inode and kind of lock."""
_guard = [system.threading.RLock()]


def _place(fd: int, kind: int) -> tuple[int, int, int]:
    found = system.os.fstat(fd)
    return found.st_dev, found.st_ino, kind


def _line_up(waiter: _Waiter) -> _Request:
    place = _place(waiter.lock.fd, waiter.lock.kind)
    with _guard[0]:
        request = _requests.get(place)
        if request is None:
            request = _requests[place] = _Request(place, waiter)
        else:
            request.forget_gone()
            request.waiters.append(waiter)
        return request


def _after_fork_in_child() -> None:
    _guard[0] = system.threading.RLock()
    for request in list(_requests.values()):
        for waiter in list(request.waiters):  # for one whose signal handler has forked, in the middle of its wait
            waiter.wake.set()
    _requests.clear()


system.after_fork_in_child("lines", _after_fork_in_child)
