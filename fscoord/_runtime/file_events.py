"""Sources of file system events: inotify(7), a FIFO, or an `Observer` of watchdog on platforms without inotify.

A process that can't get an inotify instance reads a FIFO instead. The writers of the file must signal this FIFO.

The waiting thread itself reads the events of inotify and of a FIFO. No other module imports watchdog. watchdog's
bindings of inotify are not a documented API, so the package requires a range of versions. If the bindings fail, waiters
poll.

The bindings are in the module `inotify_c` of watchdog. The import of `inotify_c` takes 30 to 40 ms of processor time.
Nine tenths of this time are spent in modules of the standard library that `inotify_c` imports (ctypes, logging,
dataclasses). An import of `inotify_c` without its package would save little. Such an import would also fail, because
`dataclasses` looks up the module in `sys.modules`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from itertools import starmap
from typing import Any

from fscoord._runtime import system
from fscoord._runtime.interrupts import BareCall, ignoring, raise_if_foreign, raise_unless_closed

LOG_CHANGED = 0x0002 | 0x0004 | 0x0400 | 0x0800  # IN_MODIFY, IN_ATTRIB, IN_DELETE_SELF, IN_MOVE_SELF: inotify(7)
BELL_RUNG = 0x0004 | 0x0400 | 0x0800

EXHAUSTED = frozenset((system.errno.EMFILE, system.errno.ENOSPC))
"""Each of these error numbers says that no inotify instance, watch or descriptor is left (inotify(7))."""
PROCESSES_MAX = 256
"""The maximum number of processes that one source watches. Each process needs a descriptor."""


def watch_file(path: str, mask: int, wake: Callable[[], None]) -> Any:
    """Return a source of events of the file `path`: an `Inotify` or an `ObserverSource`.

    If the attribute ``is_pollable`` of the source is true, the waiting thread must call ``wait(seconds)`` of the
    source. Otherwise a thread of the source calls `wake` after each event. ``close()`` ends the source.

    Args:
        path: the file.
        mask: the events to watch, as in inotify(7). An `ObserverSource` ignores it.
        wake: the function that the thread of the source calls.

    Raises:
        OSError: the file can't be watched, the user has no inotify instance or watch left, or the installed watchdog
            lacks the functions for inotify.
        ImportError: watchdog can't be imported.
    """
    if system.is_fake_fs():
        raise OSError(system.errno.ENOSYS, "a fake file system has no events")
    if system.has_inotify() and not hasattr(system.select, "poll"):  # any other source would block all green threads
        raise OSError(system.errno.ENOSYS, "this process has no select.poll, which eventlet removes")
    return Inotify(path, mask) if system.has_inotify() else ObserverSource(path, wake)


class PollableSource(ABC):
    """The base class of sources that the waiting threads read. A wait also ends on `interrupt` or when a process ends.

    Several threads use one source at the same time, without a lock. With a lock, a signal handler that waits would
    deadlock if the handler interrupted a wait that holds the lock. So every change of shared data is one operation on a
    dict or a set.

    Another thread may close the source while a method runs. A signal handler may fork in the middle of a method. Then
    the child continues the method with closed descriptors. After a close or a fork, the source watches no process, and
    `wait` returns at once.

    Attributes:
        is_closed: whether the source was closed, or was inherited from the parent of this process.
        processes: {process id: pidfd} of the watched processes. The end of a watched process also ends a wait.
    """

    is_pollable = True

    def __init__(self) -> None:
        if not hasattr(system.os, "eventfd"):
            raise OSError(system.errno.ENOSYS, "this Python has no eventfd(2)")
        self._descriptors = system.Descriptors()
        system.close_when_collected(self, self._descriptors)
        self.is_closed = False
        self.processes: dict[int, int] = {}
        self._epolls: dict[str, Any] = {}
        self._is_complete = False  # whether `wait` also waits for the epoll of the pidfds
        _instances.add(self)

    def _open_interruptions(self) -> None:
        flags = system.os.EFD_CLOEXEC | system.os.EFD_NONBLOCK
        self._interruptions = self._open(map(system.os.eventfd, (0,), (flags,)))

    def _open(self, opening: Iterator[int]) -> int:
        """Open a descriptor and record it, in one chain of C calls (rule 1 in `interrupts`). Return the descriptor.

        Args:
            opening: an iterator in C, such as a `map`, whose first item is the new descriptor.
        """
        system.occupy_standard_descriptors()
        opened: list[int] = []
        system.in_one_chain(partial(opened.extend, opening), partial(self._descriptors.update, opened))
        return opened[0]

    def _require_open(self) -> None:
        """Raise an `OSError` if a signal handler has forked this process while the source was created."""
        if self.is_closed:
            raise OSError(system.errno.EBADF, "a fork has closed the descriptors of this source of events")

    @property
    def _pidfds(self) -> Any:
        """The epoll(7) instance to which the pidfds are added; None before the first process is watched."""
        return self._epolls.get("pidfds")

    @abstractmethod
    def _include_pidfds(self) -> None:
        """Make `wait` also wait for the epoll instance of the pidfds.

        Two threads may call this method at the same time.
        """

    def watch_process(self, pid: int) -> bool:
        """Watch process `pid`, so that `wait` also returns when the process ends.

        The method adds the pidfd of the process to an epoll(7) instance, because the kernel allows this addition while
        another thread waits for the instance. If the process has ended already, `wait` returns at once, or
        pidfd_open(2) fails.

        Returns:
            False if the process can't be watched. Possible reasons: the source is closed, it watches `PROCESSES_MAX`
            processes already, all descriptors are in use, or pidfd_open(2) or epoll(7) is missing (as under gevent).
        """
        if pid in self.processes:
            return not self.is_closed
        can_watch = hasattr(system.os, "pidfd_open") and hasattr(system.select, "epoll")
        if self.is_closed or len(self.processes) >= PROCESSES_MAX or not can_watch:
            return False
        try:
            system.occupy_standard_descriptors()
            pidfds = self._epolls.get("pidfds") or self._epolls.setdefault("pidfds", system.select.epoll())
            if not self._is_complete:
                self._include_pidfds()
                self._is_complete = True
            fd = self._open(map(system.os.pidfd_open, (pid,)))
        except (OSError, ValueError) as error:
            raise_unless_closed(error)
            return False
        entering = partial(self.processes.setdefault, pid, fd)
        try:
            entered, _ = system.in_one_chain(entering, partial(pidfds.register, fd, system.select.EPOLLIN))
        except (OSError, ValueError) as error:
            raise_unless_closed(error)
            if self.processes.get(pid) == fd:
                del self.processes[pid]
            self._close_pidfd(fd)
            return False
        if entered != fd or self.is_closed:  # another thread was first, or closed the descriptors before this one
            self._unregister(pidfds, fd)
        return not self.is_closed

    def _unregister(self, pidfds: Any, fd: int) -> None:
        try:
            pidfds.unregister(fd)
        except (OSError, ValueError) as error:  # closed meanwhile
            raise_unless_closed(error)
        self._close_pidfd(fd)

    def _close_pidfd(self, fd: int) -> None:
        """Close `fd` unless another thread has closed it. The number of a closed descriptor may be in use again."""
        try:
            system.in_one_chain(partial(self._descriptors.remove, fd), partial(system.os.close, fd))
        except OSError as error:
            raise_if_foreign(error)
        except KeyError as error:
            if error.args != (fd,):  # not from `remove`: rule 4 in `interrupts`
                raise

    def reap_exited(self) -> int:
        """Stop watching the processes that have ended; return their number."""
        pidfds = self._pidfds
        if pidfds is None:
            return 0
        known = list(self.processes.items())  # before the poll: a pidfd opened later may reuse a number
        try:
            ended = {fd for fd, _ in pidfds.poll(0)}
        except ValueError as error:
            raise_unless_closed(error)
            return 0
        count = 0
        for pid, fd in known:
            if fd in ended and self.processes.pop(pid, None) == fd:  # the thread that removes it closes it
                self._unregister(pidfds, fd)
                count += 1
        return count

    def interrupt(self) -> None:
        """Wake at least one thread that is in `wait`.

        If no thread is in `wait`, the next call of `wait` returns at once.
        """
        if not self.is_closed:
            system.os.eventfd_write(self._interruptions, 1)

    def close(self) -> None:
        """Close all descriptors."""
        self.is_closed = True
        system.close_all(system.os.close, self._descriptors)
        self.after_fork()

    def after_fork(self) -> None:
        """Close the epolls in a forked child. The step "descriptors" of `forks` has closed the descriptors."""
        self.is_closed = True
        for epoll in list(self._epolls.values()):
            epoll.close()


class Inotify(PollableSource):
    """An inotify instance that watches one file. The waiting threads read its events."""

    def __init__(self, path: str, mask: int) -> None:
        inotify_c = system.import_uninterrupted("watchdog.observers.inotify_c")
        ctypes = system.import_uninterrupted("ctypes")
        if not (hasattr(inotify_c, "inotify_init") and hasattr(inotify_c, "inotify_add_watch")):
            raise OSError(
                system.errno.ENOSYS,
                "the installed watchdog lacks inotify_init; install the version that fscoord requires",
            )
        super().__init__()
        fd = self._open(starmap(inotify_c.inotify_init, ((),)))
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{system.os.strerror(number)}: see fs.inotify.max_user_instances")
        system.os.set_inheritable(fd, False)
        system.os.set_blocking(fd, False)
        if inotify_c.inotify_add_watch(fd, system.os.fsencode(path), mask) < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{system.os.strerror(number)}: see fs.inotify.max_user_watches")
        self._open_interruptions()
        self._sources = (fd, self._interruptions)
        self._poll = self._make_poll()
        self._require_open()

    def _make_poll(self) -> Any:
        poll = system.select.poll()
        for fd in self.descriptors():
            poll.register(fd, system.select.POLLIN)
        return poll

    def _include_pidfds(self) -> None:
        self._poll = self._make_poll()
        self.interrupt()  # threads that wait now wait without the epoll

    def wait(self, limit: float) -> bool:
        """Wait at most `limit` seconds for an event or a call of `interrupt`. Return False if the time has passed.

        After `close` the method returns True at once.
        """
        poll = self._poll
        while not self.is_closed:
            try:
                ready = poll.poll(limit * 1000)
                break
            except RuntimeError as error:  # this is a signal handler that has interrupted this thread in the same call
                raise_if_foreign(error)
                poll = self._make_poll()
        else:
            return True
        for fd, _ in ready:
            if fd in self._descriptors:  # not the epoll, which has nothing to read, and no closed descriptor
                try:
                    system.os.read(fd, 4096)
                except BlockingIOError as error:  # another thread has read it
                    raise_if_foreign(error)
        return bool(ready)

    def descriptors(self) -> list[int]:
        """Return the descriptors for which `wait` waits. While one descriptor is readable, `wait` returns at once.

        After `close` the list is empty.
        """
        try:
            pidfds = () if self._pidfds is None else (self._pidfds.fileno(),)
        except ValueError as error:
            raise_unless_closed(error)
            return []
        return [] if self.is_closed else [*self._sources, *pidfds]


class FifoSource(PollableSource):
    """A FIFO used as a source of events, instead of inotify. An event occurs when the last writer closes the FIFO.

    After the first event the FIFO stays in the state EPOLLHUP. So the epoll is edge-triggered (EPOLLET): it reports the
    state once for each close. The epoll does not wait for data, so data in the FIFO have no effect.

    Args:
        fifo: a descriptor of the FIFO, open for reading. The caller closes it.
    """

    def __init__(self, fifo: int) -> None:
        if not hasattr(system.select, "epoll"):
            raise OSError(system.errno.ENOSYS, "this process has no select.epoll, which gevent removes")
        super().__init__()
        self._open_interruptions()
        self._epoll = self._epolls.setdefault("all", system.select.epoll())
        try:
            self._epoll.register(self._interruptions, system.select.EPOLLIN)
            self._epoll.register(fifo, system.select.EPOLLET)  # epoll always reports EPOLLHUP
        except ValueError as error:
            raise_unless_closed(error)
        self._require_open()

    def _include_pidfds(self) -> None:
        with ignoring(FileExistsError):  # another thread was first
            self._epoll.register(self._pidfds.fileno(), system.select.EPOLLIN)  # also for threads that wait now

    def wait(self, limit: float) -> bool:
        """Wait at most `limit` seconds for an event or a call of `interrupt`. Return False if the time has passed.

        After `close` the method returns True at once.
        """
        try:
            ready = self._epoll.poll(limit, 8)
        except ValueError as error:
            raise_unless_closed(error)
            return True
        if self._interruptions in dict(ready) and self._interruptions in self._descriptors:
            try:
                system.os.read(self._interruptions, 8)
            except BlockingIOError as error:  # another thread has read it
                raise_if_foreign(error)
        return bool(ready)

    def descriptors(self) -> list[int]:
        """Return the descriptor for which `wait` waits. While it is readable, `wait` returns at once.

        After `close` the list is empty.
        """
        try:
            return [self._epoll.fileno()]
        except ValueError as error:
            raise_unless_closed(error)
            return []


class ObserverSource:
    """Reports the events of one file through an `Observer` of watchdog, for platforms without inotify."""

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
        start = BareCall(self._observer.start)
        start.wait(system.threading.TIMEOUT_MAX)
        error = start.refusal or start.error
        if isinstance(error, RuntimeError):
            raise system.thread_refused("watchdog", error)
        if error is not None:
            raise error

    def close(self) -> None:
        """End the threads of the observer. Do nothing in a forked child, which does not have these threads."""
        if self._owner == system.os.getpid():
            self._observer.stop()


_instances = system.reset_in_child("events", PollableSource.after_fork)
