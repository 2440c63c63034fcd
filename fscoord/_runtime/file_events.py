"""Events of the file system: inotify read by whoever waits, or an Observer; nobody else imports watchdog.

Its bindings of inotify are no documented API: hence one module, a bounded version, and polling when they fail.
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
"""How many processes are watched at most: each takes a descriptor."""


def watch_file(path: str, mask: int, wake: Callable[[], None]) -> Any:
    """Return a source of events of the file `path`.

    It has ``readable`` (whether the waiting thread itself must call ``wait(seconds)``; otherwise `wake` is called from
    a thread of the source) and ``close()``.

    Raises:
        OSError: the file can't be watched, or the user has no inotify instance or watch left, or this watchdog has no
            such bindings.
        ImportError: it can't be imported.
    """
    if system.is_fake_fs():
        raise OSError(system.errno.ENOSYS, "files that are not real raise no events")
    return Inotify(path, mask) if system.has_inotify() else ObserverSource(path, wake)


class Inotify:
    """An inotify instance with one watch, read by whoever waits.

    Threads use it at once, and no lock keeps them apart: a signal handler may wait, too, and would meet the lock of the
    wait that it has interrupted. So each step that others could come between is one operation on a dict or set.

    Attributes:
        processes: the processes whose end ends a wait, too, and their descriptors.
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
        self._is_complete = False  # whether `wait` knows of the epoll
        _instances.add(self)
        # Each in one chain of C calls, which no signal handler can split.
        descriptors.update(map(system.os.eventfd, (0,), (system.os.EFD_CLOEXEC | system.os.EFD_NONBLOCK,)))
        (self._interruptions,) = descriptors
        descriptors.update(starmap(inotify_c.inotify_init, ((),)))
        fd = next(iter(descriptors - {self._interruptions}))  # of which no other thread knows yet
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
        """The epoll(7) that has the descriptors of processes; None if there are none."""
        return self._epolls.get("obituaries")

    def _make_poll(self) -> Any:
        poll = system.select.poll()
        for fd in self._sources:
            poll.register(fd, system.select.POLLIN)
        if self._pidfds is not None:
            poll.register(self._pidfds.fileno(), system.select.POLLIN)
        return poll

    def wait(self, limit: float) -> bool:
        """Return True after an event or `interrupt`, or False after `limit` seconds."""
        try:
            ready = self._poll.poll(limit * 1000)
        except RuntimeError as error:  # this is a signal handler's wait, and its thread was interrupted here
            raise_if_foreign(error)
            ready = self._make_poll().poll(limit * 1000)
        for fd, _ in ready:
            if fd in self._sources:
                try:
                    system.os.read(fd, 4096)
                except BlockingIOError as error:  # somebody else has taken it
                    raise_if_foreign(error)
        return bool(ready)

    def descriptors(self) -> list[int]:
        """Return what is readable when `wait` would return at once; nothing after `close`."""
        if not self._close.alive:
            return []
        return [*self._sources, *([self._pidfds.fileno()] if self._pidfds is not None else [])]

    def watch_process(self, pid: int) -> bool:
        """Have the end of process `pid` end `wait`; False where there is no pidfd_open(2), or no descriptor left.

        The descriptors of processes stand in an epoll(7) of their own, to which one can be added while another thread
        waits for it. A process that has ended before is no longer there, or ends `wait` at once.
        """
        if pid in self.processes:
            return True
        if len(self.processes) >= PROCESSES_MAX:
            return False
        if not hasattr(system.os, "pidfd_open"):
            return False
        try:
            obituaries = self._epolls.get("obituaries") or self._epolls.setdefault("obituaries", system.select.epoll())
            if not self._is_complete:
                self._poll = self._make_poll()
                self._is_complete = True
                self.interrupt()  # who waits now waits without it
            fd = self._open_process(pid)
        except OSError as error:
            raise_if_foreign(error)
            return False
        entering = partial(self.processes.setdefault, pid, fd)
        try:
            entered, _ = system.in_one_chain(entering, partial(obituaries.register, fd, system.select.EPOLLIN))
        except (OSError, ValueError) as error:  # the latter: it was closed meanwhile
            raise_if_foreign(error)
            if self.processes.get(pid) == fd:
                del self.processes[pid]
            self._give_up(fd)
            return False
        if entered != fd:  # another thread was first
            obituaries.unregister(fd)
            self._give_up(fd)
        return True

    def _open_process(self, pid: int) -> int:
        """Return a descriptor of process `pid`, added to ours in the same chain of C calls."""
        opened: list[int] = []
        opening = partial(opened.extend, map(system.os.pidfd_open, (pid,)))
        system.in_one_chain(opening, partial(self._descriptors.update, opened))
        return opened[0]

    def _give_up(self, fd: int) -> None:
        self._descriptors.discard(fd)
        system.close_quietly(fd)

    def reap_exited(self) -> int:
        """Return how many of the watched processes this call has found ended; they are watched no more."""
        obituaries = self._pidfds
        if obituaries is None:
            return 0
        known = list(self.processes.items())  # before the look: what is opened from now on may have an old number
        try:
            ended = {fd for fd, _ in obituaries.poll(0)}
        except ValueError:  # it was closed meanwhile
            return 0
        count = 0
        for pid, fd in known:
            if fd in ended and self.processes.pop(pid, None) == fd:  # whoever takes it out is the one that closes it
                obituaries.unregister(fd)
                self._give_up(fd)
                count += 1
        return count

    def interrupt(self) -> None:
        """Have `wait`, in whatever thread, return."""
        system.os.eventfd_write(self._interruptions, 1)

    def close(self) -> None:
        """Give the instance back."""
        self._close()
        if self._pidfds is not None:
            self._pidfds.close()

    def after_fork(self) -> None:
        """In a forked child: the descriptors are closed, which the parent reads, and so is the epoll."""
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
        """Have the observer's threads end; in a forked child there are none."""
        if self._owner == system.os.getpid():
            self._observer.stop()


_instances: weakref.WeakSet[Inotify] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for instance in list(_instances):
        instance.after_fork()


system.after_fork_in_child("events", _after_fork_in_child)
