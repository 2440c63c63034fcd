"""Wait for a log's lock in the kernel, with a deadline.

A lock call that blocks in the kernel has no deadline, and Python repeats it after a signal. So a separate thread makes
the call. A process has one such thread for each log, kind of lock and flags of open(2), no matter how many waiters it
serves. The flags matter, because a handle that reads under the lock can't use a descriptor that is open for writing
only.

The thread blocks on a descriptor of its own. If it blocked on the descriptor of a handle, all waiters might give up,
and another thread might acquire the lock on that descriptor. A lock belongs to a descriptor, so the kernel would then
grant the blocked call as well. Two threads would have the lock.

When the kernel grants the lock, the thread hands the lock over to the first waiter, together with the descriptor. If no
waiter is left, the thread releases the lock.

On a mount that hosts share, the thread then keeps the waiter's old descriptor as a spare, and waits up to `KEEP_S` for
the next waiter. So the next wait needs no new thread, and no request to open the file. The spare descriptor holds no
lock. It is closed when the handle is closed or enters another generation.

The order of the locks: `_guard` protects `_requests` and the list of waiters of each request. A thread holds `_guard`
for a few lines only, and does not block in these lines. A thread that holds a process mutex may take `_guard` (see
`cancel_wait`). No thread takes a process mutex while it holds `_guard`: the thread that hands over a lock releases
`_guard` before it takes the process mutex.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.errors import FscoordError

if TYPE_CHECKING:
    from fscoord._log.locking.log_lock import LogLock

HANDOVER_S: Final = 0.1
"""How long a lock stays reserved for the waiter to which it was handed over, in seconds. A signal handler may delay the
waiter."""

KEEP_S: Final = 5.0
"""How long the thread and its spare descriptor are kept for the next wait, in seconds."""

LIFE_S: Final = 0.1
"""The longest pause between two calls of ``show_life``, in seconds."""


def wait_for_lock(
    lock: LogLock,
    left: float,
    reopen: Callable[[], int],
    *,
    flags: int = 0,
    keeps: bool = False,
    show_life: Callable[[], None] | None = None,
) -> None:
    """Wait up to `left` seconds for `lock`. Return early if the lock was handed over, or if the caller must try again.

    If no thread can be started, return at once, and set `lock.can_block` to False.

    Args:
        lock: the lock.
        left: how long to wait, in seconds.
        reopen: a function that opens the log once more, and returns the descriptor.
        flags: the flags of open(2) with which `reopen` opens the log.
        keeps: whether to keep the thread and a spare descriptor for the next wait.
        show_life: a function that the calling thread calls at least every `LIFE_S` while it waits; None: no call.

    Raises:
        OSError: no descriptor is left.
    """
    waiter = _Waiter(lock, reopen, keeps=keeps)
    try:
        request = _enqueue(waiter, flags)
        if request is None:
            lock.can_block = False
        elif show_life is None:
            waiter.wake.wait(left)
        else:
            _wait_and_show_life(waiter, left, show_life)
        if request is not None:
            request.remove(waiter)
    finally:
        waiter.gone = True  # even if Ctrl-C came between any two lines above: the thread then skips this waiter


def _wait_and_show_life(waiter: _Waiter, left: float, show_life: Callable[[], None]) -> None:
    deadline = system.time.monotonic() + left
    while left > 0 and not waiter.wake.wait(min(left, LIFE_S)):
        show_life()
        left = deadline - system.time.monotonic()


def cancel_wait(lock: LogLock) -> None:
    """Wake all threads that wait for `lock`, and close its spare descriptor."""
    with _guard[0]:
        waiters = [waiter for request in _requests.values() for waiter in request.waiters if waiter.lock is lock]
        kept = [
            request for request in _requests.values() if request.spare_of is not None and request.spare_of() is lock
        ]
    for waiter in waiters:
        waiter.gone = True
        waiter.wake.set()
    for request in kept:
        request.drop_spare()


class _Waiter:
    """A thread that waits for a lock."""

    def __init__(self, lock: LogLock, reopen: Callable[[], int], *, keeps: bool) -> None:
        self.lock = lock
        self.reopen = reopen
        self.keeps = keeps
        self.gone = False
        self.wake = system.AutoResetEvent()


class _LockThread:
    """A thread that blocks in the kernel for the lock of one log, and hands the lock over to the first waiter.

    This thread stores the handover in the `LogLock` of the waiter. If the waiter stored the handover, a
    KeyboardInterrupt could come between two of the steps. Python raises KeyboardInterrupt in the main thread only.

    Attributes:
        key: the key of this thread in `_requests`.
        waiters: the waiters, in the order of their arrival.
        fd: the descriptor on which this thread blocks, or has the lock; -1 if there is none.
        session: the number of the session whose byte range this thread locks on `fd`.
        spare: a set with the descriptor that is kept for the next wait; empty if none is kept.
        spare_of: a weak reference to the lock for which ``spare`` is kept.
    """

    def __init__(self, key: tuple[int, int, int, int], first: _Waiter) -> None:
        self.key = key
        self.waiters = [first]
        self.fd = -1
        self.spare = system.Descriptors()
        self.spare_of: weakref.ref[LogLock] | None = None
        self.session = 0
        self._taken = system.Descriptors()  # ``fd``, if it was the spare descriptor
        self._wake = system.AutoResetEvent()

    def start(self) -> bool:
        """Start the thread. Return whether it could be started. The caller holds `_guard`."""
        return not isinstance(system.try_kernel_thread("fscoord-lock", self._run), RuntimeError)

    def _run(self) -> None:
        try:
            while self._await_waiter():
                self._serve()
        except (OSError, FscoordError):  # the waiters will meet the same error when they poll
            for waiter in self.waiters:
                waiter.lock.can_block = False
        finally:
            self._close_fd()
            with _guard[0]:
                if _requests.get(self.key) is self:
                    del _requests[self.key]
            self.drop_spare()
            for waiter in self.waiters:
                waiter.wake.set()

    def _serve(self) -> None:
        """Wait for the lock in the kernel, and hand it over."""
        waiter = self._first()
        if waiter is None:
            return
        is_spare = self._open_for(waiter)
        lock = waiter.lock
        # A spare descriptor is always of the right file. So fstat(2), which may be a request on NFS, is left out.
        if (
            not is_spare and _file_key(self.fd, lock.kind) != self.key[:3]
        ):  # the log continues in another file, or is gone
            # Let the waiter poll, or it would return here in a loop for as long as the lock is held.
            lock.can_block = False
            waiter.gone = True
            waiter.wake.set()
            self._close_fd()
            return
        # Lock the range of the waiter that will probably get the lock. Then its range need not be changed later.
        self.session = lock.session
        waiter = None  # `block` may take for ever, and must not keep a waiter that has given up alive
        try:
            lock.block(self.fd, self.session)
        except OSError:
            if not is_spare:
                raise
            self._close_fd()  # the server may have forgotten it; the next turn opens another
            return
        if not self._hand_over():
            # Closing is not enough: a child forked in C may have inherited the descriptor, and keep it open.
            lock.unblock(self.fd, self.session)
            self._close_fd()

    def _open_for(self, waiter: _Waiter) -> bool:
        """Set ``fd`` to the spare descriptor if the spare is for the waiter's lock, and otherwise to a new descriptor.

        Return whether ``fd`` is the spare descriptor.
        """
        if self.keeps_for(waiter.lock):
            try:
                # In one step, so that a child that is forked meanwhile finds it in one of the sets, and closes it.
                self._taken.update(map(set.pop, (self.spare,)))
            except KeyError:  # the handle was closed meanwhile
                pass
            else:
                (self.fd,) = self._taken
                return True
        self.drop_spare()
        self.fd = waiter.reopen()
        return False

    def _close_fd(self) -> None:
        fd, self.fd = self.fd, -1
        self._taken.clear()
        system.close_quietly(fd)

    def keeps_for(self, lock: LogLock) -> bool:
        """Return whether ``spare_of`` refers to `lock`. The set ``spare`` may be empty."""
        return self.spare_of is not None and self.spare_of() is lock

    def drop_spare(self) -> None:
        """Close the spare descriptor, if there is one. The thread ends if it also has no waiter."""
        try:
            # One chain removes and closes it (rule 1 in `interrupts`). Of two threads that come here, one finds it.
            system.in_one_chain(partial(list, map(system.os.close, map(set.pop, (self.spare,)))))
        except KeyError:  # there is none
            pass
        except OSError as error:
            raise_if_foreign(error)
        self._wake.set()

    def add(self, waiter: _Waiter) -> None:
        """Add `waiter`. The caller holds `_guard`."""
        self.remove()
        self.waiters.append(waiter)
        self._wake.set()

    def remove(self, *others: _Waiter) -> None:
        """Remove `others`, and all waiters that have stopped waiting."""
        with _guard[0]:
            self.waiters[:] = [waiter for waiter in self.waiters if not waiter.gone and waiter not in others]

    def _first(self) -> _Waiter | None:
        """Return the first waiter that still waits, or None."""
        with _guard[0]:
            self.remove()
            return self.waiters[0] if self.waiters else None

    def _await_waiter(self) -> bool:
        """Return True as soon as there is a waiter. Return False if no spare descriptor is kept, or after `KEEP_S`.

        Before it returns False, it removes this thread from `_requests` without releasing `_guard`. Otherwise a waiter
        could join a thread that is about to end.
        """
        deadline = system.time.monotonic() + KEEP_S
        while True:
            with _guard[0]:
                if self._first() is not None:
                    return True
                left = deadline - system.time.monotonic()
                if not self.spare or left <= 0:
                    if _requests.get(self.key) is self:
                        del _requests[self.key]
                    return False
            self._wake.wait(left)

    def _hand_over(self) -> bool:
        """Hand the lock and the descriptor over to the first waiter. Return False if no waiter is left."""
        # The order matters. `adopt` gives the descriptor to the handle while the mutex is held, so the lock has
        # an owner at each moment: this thread until `self.fd` is -1, then the handle. The waiter is woken after that:
        # if it woke first, it would find no handover, and wait again for a lock that its own process holds.
        handover = None
        while handover is None:
            waiter = self._first()
            if waiter is None:
                return False
            lock, left = waiter.lock, self.spare if waiter.keeps else system.Descriptors()
            with lock.mutex:
                if not (waiter.gone or lock.is_closed):
                    handover = system.threading.Lock()
                    handover.acquire()
                    # Under the mutex, as the rest: a handle that is closed later finds the spare descriptor.
                    self.spare_of = weakref.ref(lock)
                    lock.adopt(self.fd, self.session, handover, left)
                    self.fd = -1
                    self._taken.clear()
            if left is not self.spare:
                system.close_all(system.os.close, left)
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


_requests: dict[tuple[int, int, int, int], _LockThread] = {}
"""The threads of this process that wait in the kernel. The key is (device, inode number, kind of lock, open flags)."""
_guard = [system.recursive_mutex()]
"""Protects `_requests` and the list of waiters of each request. The mutex is re-entrant, because a signal handler may
interrupt the thread that holds the mutex, and take it again."""


def _file_key(fd: int, kind: int) -> tuple[int, int, int]:
    found = system.os.fstat(fd)
    return found.st_dev, found.st_ino, kind


def _enqueue(waiter: _Waiter, flags: int) -> _LockThread | None:
    lock = waiter.lock
    lock.file_key = lock.file_key or _file_key(lock.fd, lock.kind)
    key = *lock.file_key, flags
    with _guard[0]:
        request = _requests.get(key)
        if request is not None:
            request.add(waiter)
            return request
        request = _LockThread(key, waiter)
        if not request.start():
            return None
        _requests[key] = request
        return request


def _after_fork_in_child() -> None:
    _guard[0] = system.recursive_mutex()
    for request in list(_requests.values()):
        for waiter in list(request.waiters):  # a signal handler may have forked in the middle of this thread's own wait
            waiter.wake.set()
    _requests.clear()


system.after_fork_in_child("lock waits", _after_fork_in_child)
