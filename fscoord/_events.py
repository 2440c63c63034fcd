"""Events of the file system: inotify read by whoever waits, or an Observer; nobody else imports watchdog.

Its bindings of inotify are no documented API: hence one module, a bounded version, and polling when they fail.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import starmap
from typing import Any

from fscoord import _system as system

__all__ = ["BELL_RUNG", "LOG_CHANGED", "Inotify", "Observed", "watch_file"]

LOG_CHANGED = 0x0002 | 0x0004 | 0x0400 | 0x0800  # IN_MODIFY, IN_ATTRIB, IN_DELETE_SELF, IN_MOVE_SELF: inotify(7)
BELL_RUNG = 0x0004 | 0x0400 | 0x0800


def watch_file(path: str, mask: int, wake: Callable[[], None]) -> Any:
    """Return a source of events of the file `path`.

    It has ``readable`` (whether the waiting thread itself must call ``wait(seconds)``; otherwise `wake` is called from
    a thread of the source) and ``close()``.

    Raises:
        OSError: the file can't be watched, or the user has no inotify instance or watch left.
        ImportError, AttributeError: this watchdog has no such bindings.
    """
    if system.is_faked():
        raise OSError(system.errno.ENOSYS, "files that are not real raise no events")
    return Inotify(path, mask) if system.has_inotify() else Observed(path, wake)


class Inotify:
    """An inotify instance with one watch, read by whoever waits."""

    readable = True

    def __init__(self, path: str, mask: int) -> None:
        import ctypes

        from watchdog.observers import inotify_c

        descriptors: set[int] = set()
        self._close = weakref.finalize(self, system.close_all, system.os.close, descriptors)
        self._close.atexit = False
        # Each in one chain of C calls, which no signal handler can split.
        descriptors.update(map(system.os.eventfd, (0,), (system.os.EFD_CLOEXEC | system.os.EFD_NONBLOCK,)))
        (self._interruptions,) = descriptors
        descriptors.update(starmap(inotify_c.inotify_init, ((),)))
        fd = next(iter(descriptors - {self._interruptions}))
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

    def _make_poll(self) -> Any:
        poll = system.select.poll()
        for fd in self._sources:
            poll.register(fd, system.select.POLLIN)
        return poll

    def wait(self, limit: float) -> bool:
        """Return True after an event or `interrupt`, or False after `limit` seconds."""
        try:
            ready = self._poll.poll(limit * 1000)
        except RuntimeError:  # this is a signal handler's wait, and the signal came while the same thread was here
            ready = self._make_poll().poll(limit * 1000)
        for fd, _ in ready:
            try:
                system.os.read(fd, 4096)
            except BlockingIOError:  # somebody else has taken it
                pass
        return bool(ready)

    def interrupt(self) -> None:
        """Have `wait`, in whatever thread, return."""
        system.os.eventfd_write(self._interruptions, 1)

    def close(self) -> None:
        """Give the instance back."""
        self._close()


class Observed:
    """A watchdog `Observer` on the directory of one file, for platforms without inotify."""

    readable = False

    def __init__(self, path: str, wake: Callable[[], None]) -> None:
        from watchdog.events import FileSystemEvent, FileSystemEventHandler
        from watchdog.observers import Observer

        name = system.os.fsencode(path)

        class Handler(FileSystemEventHandler):
            def on_any_event(self, event: FileSystemEvent) -> None:
                if name in (system.os.fsencode(event.src_path), system.os.fsencode(event.dest_path)):
                    wake()

        self._owner = system.os.getpid()
        self._observer = Observer()
        self._observer.daemon = True
        self._observer.schedule(Handler(), system.os.path.dirname(path))
        self._observer.start()

    def close(self) -> None:
        """Have the observer's threads end; in a forked child there are none."""
        if self._owner == system.os.getpid():
            self._observer.stop()
