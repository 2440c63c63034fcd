"""Events of the file system: inotify(7), read by the waiting thread itself, or a watchdog `Observer` elsewhere.

No other module imports watchdog. Its bindings of inotify are not a documented API: its version is bounded, and if they
fail, waiters poll.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign

__all__ = ["BELL_RUNG", "LOG_CHANGED", "Inotify", "ObserverSource", "watch_file"]

LOG_CHANGED = 0x0002 | 0x0004 | 0x0400 | 0x0800  # IN_MODIFY, IN_ATTRIB, IN_DELETE_SELF, IN_MOVE_SELF: inotify(7)
BELL_RUNG = 0x0004 | 0x0400 | 0x0800

PROCESSES_MAX = 256
"""The most processes that one instance watches: each needs a descriptor."""


def watch_file(path: str, mask: int, wake: Callable[[], None]) -> Any:
    """Return a source of events of the file `path`.

    If its ``is_pollable`` is true, the waiting thread must call its ``wait(seconds)``. Otherwise a thread of the source
    calls `wake` after each event. ``close()`` ends it.

    Args:
        path: the file.
        mask: the events of inotify(7).
        wake: see above.

    Raises:
        OSError: the file can't be watched, the user has no inotify instance or watch left, or this version of watchdog
            has no bindings of inotify.
        ImportError: watchdog can't be imported.
    """
    if system.is_fake_fs():
        raise OSError(system.errno.ENOSYS, "a fake file system has no events")
    return Inotify(path, mask) if system.has_inotify() else ObserverSource(path, wake)


class Inotify:
    """An inotify instance with one watch, read by the waiting threads.

    Several threads use it at once without a lock. A signal handler may wait as well, and would deadlock on the lock of
    the wait that it has interrupted. So every change of shared data is one operation on a dict or a set.

    Attributes:
        processes: the watched processes, whose end also ends a wait: process id to pidfd.
    """

    is_pollable = True

    def __init__(self, path: str, mask: int) -> None:
        inotify_c = system.import_uninterrupted("watchdog.observers.inotify_c")
        ctypes = system.import_uninterrupted("ctypes")
        if not (hasattr(inotify_c, "inotify_init") and hasattr(inotify_c, "inotify_add_watch")):
            raise OSError(system.errno.ENOSYS, "this watchdog has no bindings of inotify")
        if not hasattr(system.os, "eventfd"):
            raise OSError(system.errno.ENOSYS, "this Python has no eventfd(2)")

        self._descriptors = descriptors = system.Descriptors()
        self._close = weakref.finalize(self, system.close_all, system.os.close, descriptors)
        self._close.atexit = False
        self.processes: dict[int, int] = {}
        self._epolls: dict[str, Any] = {}
        self._is_complete = False  # whether `_poll` includes the epoll
        _instances.add(self)
        # Each descriptor is opened and recorded in one chain of C calls: rule 1 in `interrupts`.
        descriptors.update(map(system.os.eventfd, (0,), (system.os.EFD_CLOEXEC | system.os.EFD_NONBLOCK,)))
        (self._interruptions,) = descriptors
        descriptors.update(starmap(inotify_c.inotify_init, ((),)))
        fd = next(iter(descriptors - {self._interruptions}))  # no other thread uses the instance yet
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{system.os.strerror(number)}: see fs.inotify.max_user_instances")
        system.os.set_inheritable(fd, False)
        system.os.set_blocking(fd, False)
        if inotify_c.inotify_add_watch(fd, system.os.fsencode(path), mask) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{system.os.strerror(number)}: see fs.inotify.max_user_watches")
        self._sources = (fd, self._interruptions)
        self._poll = self._make_poll()

    @property
    def _pidfds(self) -> Any:
        """The epoll(7) of the pidfds; None before the first process is watched."""
        return self._epolls.get("pidfds")

    def _make_poll(self) -> Any:
        poll = system.select.poll()
        for fd in self._sources:
            poll.register(fd, system.select.POLLIN)
        if self._pidfds is not None:
            poll.register(self._pidfds.fileno(), system.select.POLLIN)
        return poll

    def wait(self, limit: float) -> bool:
        """Wait for an event or `interrupt`, at most `limit` seconds; return whether there was one."""
        try:
            ready = self._poll.poll(limit * 1000)
        except RuntimeError as error:  # a signal handler waits, and has interrupted its thread in this call
            raise_if_foreign(error)
            ready = self._make_poll().poll(limit * 1000)
        for fd, _ in ready:
            if fd in self._sources:
                try:
                    system.os.read(fd, 4096)
                except BlockingIOError as error:  # another thread has read it
                    raise_if_foreign(error)
        return bool(ready)

    def descriptors(self) -> list[int]:
        """Return the descriptors of which one is readable while `wait` would return at once; none after `close`."""
        if not self._close.alive:
            return []
        return [*self._sources, *([self._pidfds.fileno()] if self._pidfds is not None else [])]

    def watch_process(self, pid: int) -> bool:
        """Make the end of process `pid` end `wait`. Return False without pidfd_open(2) or a free descriptor.

        The pidfds are in an epoll(7), because a descriptor can be added to that while another thread waits for it. If
        the process has ended already, `wait` returns at once, or pidfd_open(2) fails.
        """
        if pid in self.processes:
            return True
        if len(self.processes) >= PROCESSES_MAX:
            return False
        if not hasattr(system.os, "pidfd_open"):
            return False
        try:
            pidfds = self._epolls.get("pidfds") or self._epolls.setdefault("pidfds", system.select.epoll())
            if not self._is_complete:
                self._poll = self._make_poll()
                self._is_complete = True
                self.interrupt()  # threads that wait now wait without the epoll
            fd = self._open_process(pid)
        except OSError as error:
            raise_if_foreign(error)
            return False
        entering = partial(self.processes.setdefault, pid, fd)
        try:
            entered, _ = system.in_one_chain(entering, partial(pidfds.register, fd, system.select.EPOLLIN))
        except (OSError, ValueError) as error:  # ValueError: the epoll was closed meanwhile
            raise_if_foreign(error)
            if self.processes.get(pid) == fd:
                del self.processes[pid]
            self._close_pidfd(fd)
            return False
        if entered != fd:  # another thread was first
            pidfds.unregister(fd)
            self._close_pidfd(fd)
        return True

    def _open_process(self, pid: int) -> int:
        """Return a pidfd of process `pid`, recorded in the same chain of C calls: rule 1 in `interrupts`."""
        opened: list[int] = []
        opening = partial(opened.extend, map(system.os.pidfd_open, (pid,)))
        system.in_one_chain(opening, partial(self._descriptors.update, opened))
        return opened[0]

    def _close_pidfd(self, fd: int) -> None:
        self._descriptors.discard(fd)
        system.close_quietly(fd)

    def reap_exited(self) -> int:
        """Stop watching the processes that have ended; return how many this call has found."""
        pidfds = self._pidfds
        if pidfds is None:
            return 0
        known = list(self.processes.items())  # before the poll: a pidfd opened later may reuse a number
        try:
            ended = {fd for fd, _ in pidfds.poll(0)}
        except ValueError:  # the epoll was closed meanwhile
            return 0
        count = 0
        for pid, fd in known:
            if fd in ended and self.processes.pop(pid, None) == fd:  # the thread that removes it closes it
                pidfds.unregister(fd)
                self._close_pidfd(fd)
                count += 1
        return count

    def interrupt(self) -> None:
        """Make a `wait` of any thread return."""
        system.os.eventfd_write(self._interruptions, 1)

    def close(self) -> None:
        """Close all descriptors."""
        self._close()
        if self._pidfds is not None:
            self._pidfds.close()

    def after_fork(self) -> None:
        """In a forked child: close the epoll. The descriptors are closed by another step (`system.Descriptors`)."""
        if self._pidfds is not None:
            self._pidfds.close()


class ObserverSource:
    """A watchdog `Observer` on the directory of one file, for platforms without inotify."""

    is_pollable = False

    def __init__(self, path: str, wake: Callable[[], None]) -> None:
        watched = system.import_uninterrupted("watchdog.events")
        name = system.os.fsencode(path)

        class Handler(watched.FileSystemEventHandler):  # type: ignore[misc, name-defined]
            def on_any_event(self, event: Any) -> None:
                if name in (system.os.fsencode(event.src_path), system.os.fsencode(event.dest_path)):
                    wake()

        self._owner = system.os.getpid()
        self._observer = system.import_uninterrupted("watchdog.observers").Observer()
        self._observer.daemon = True
        self._observer.schedule(Handler(), system.os.path.dirname(path))
        self._observer.start()

    def close(self) -> None:
        """End the observer's threads; a forked child has none."""
        if self._owner == system.os.getpid():
            self._observer.stop()


_instances: weakref.WeakSet[Inotify] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for instance in list(_instances):
        instance.after_fork()


system.after_fork_in_child("events", _after_fork_in_child)
