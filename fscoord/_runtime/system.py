"""The operating system as fscoord sees it: the only module that imports what touches files, locks and clocks.

Others call ``system.os.read(...)``: one attribute more than a bare call, so that the hot path pays nothing, and one
place where pyfakefs, or a fault test, puts something else under the whole package.

Under pyfakefs ``os.pread``, ``os.pwrite``, ``os.readv``, ``os.writev``, `mmap` and ``select.poll`` reach the *real*
descriptor of the same number: whoever uses one asks `is_faked` first.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import functools
import os
import select
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import IO, Any, Final, ParamSpec, TypeVar

from fscoord._runtime.forks import after_fork_in_child, life, own_process, recover_from_fork
from fscoord._runtime.imports import load
from fscoord._runtime.words import one_word
from fscoord.errors import StoreUnavailableError

try:
    import fcntl
except ImportError:  # Windows: the package imports, FileStore refuses
    fcntl = None  # type: ignore[assignment]

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["errno", "fcntl", "os", "select", "stat", "threading", "time"]
__all__ += ["after_fork_in_child", "life", "load", "own_process", "recover_from_fork"]  # from modules of their own

O_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
O_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
O_BINARY = getattr(os, "O_BINARY", 0)
O_DIRECT = getattr(os, "O_DIRECT", 0)


def is_faked() -> bool:
    """Return whether `os` is a stand-in with files of its own, such as pyfakefs."""
    return not isinstance(os, ModuleType)


faked_mutex = threading.RLock()
"""Held around all that touches files under a stand-in for `os`, which keeps no threads apart.

Under Python 3.13 and later each call of pyfakefs' ``os`` sends the calls of all other threads, for that moment, to the
real one: descriptors that it gave out then mean real files.
"""


def _renew_faked_mutex() -> None:
    global faked_mutex
    faked_mutex = threading.RLock()


after_fork_in_child("faked files", _renew_faked_mutex)


def alone_if_faked(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate what touches files and is not under the mutex of a log: hold `faked_mutex` where it is needed."""

    @functools.wraps(method)
    def alone(*arguments: P.args, **named: P.kwargs) -> R:
        if not is_faked():
            return method(*arguments, **named)
        with faked_mutex:
            return method(*arguments, **named)

    return alone


def hostname() -> str:
    """Return the name of this host, as gethostname(2) does."""
    return os.uname().nodename


def process_name(pid: int | str | None = None) -> str:
    """Return ``host:pid`` of a process of this host, by default of this one; it is one word (`one_word`)."""
    return f"{one_word(hostname())}:{os.getpid() if pid is None else pid}"


def boot_id() -> bytes:
    """Return the random id that the kernel drew at boot (proc_sys_kernel(5)), 16 bytes; zeros where there is none."""
    return bytes.fromhex(_proc_text("/proc/sys/kernel/random/boot_id").replace("-", "") or "00" * 16)


def network_namespace() -> str:
    """Return which network this process is in (network_namespaces(7)), ``""`` where that can't be known."""
    try:
        return os.readlink("/proc/self/ns/net")
    except OSError:
        return ""


def start_time(pid: int | str = "self") -> int:
    """Return when process `pid` started, in clock ticks since boot (proc_pid_stat(5)); 0 where that can't be known."""
    fields = _proc_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else 0


def namespace(kind: str) -> int:
    """Return the number of this process's namespace of `kind`, such as ``"pid"`` (namespaces(7)); 0 if not known."""
    try:
        return int(os.stat(f"/proc/self/ns/{kind}").st_ino)
    except OSError:
        return 0


def is_zombie(pid: int) -> bool:
    """Return whether process `pid` has ended, all its threads too, and has not been waited for (proc_pid_stat(5))."""
    fields = _proc_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return len(fields) > 17 and fields[0] in "ZX" and int(fields[17]) <= 1


def _proc_text(path: str) -> str:
    try:
        with open(path, "rb") as file:  # as text it might import a codec, which a fork or Ctrl-C can cut in half
            return file.read().decode("ascii", "replace").strip()
    except OSError:
        return ""


def random_bytes(count: int) -> bytes:
    """Return `count` unpredictable bytes."""
    return os.urandom(count)


def in_one_chain(*steps: functools.partial[Any]) -> list[Any]:
    """Return what the steps return, calls of C functions, with no place between them for a signal handler."""
    return list(map(functools.partial.__call__, steps))


class Descriptors(set[int]):
    """Descriptors that are open. A forked child closes them.

    So a number must be taken out before it is closed: it is that of another file as soon as somebody opens one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.close = os.close  # of the files that they are opened in, should those be a stand-in's
        _descriptors[id(self)] = self


_descriptors: weakref.WeakValueDictionary[int, Descriptors] = weakref.WeakValueDictionary()
loose = Descriptors()
"""Those that nobody keeps elsewhere. It is shared by all threads, so nothing may be concluded from what is in it."""


def _close_inherited() -> None:
    """In a forked child: close all, each once, and unlock nothing, for the locks are the parent's."""
    found: dict[Callable[[int], None], set[int]] = {}
    for kept in list(_descriptors.values()):
        found.setdefault(kept.close, set()).update(kept)
        kept.clear()
    for close, descriptors in found.items():
        with contextlib.suppress(Exception):  # whatever a stand-in raises that is over
            close_all(close, descriptors)


after_fork_in_child("descriptors", _close_inherited)


def close_quietly(*descriptors: int) -> None:
    """Close every descriptor that is not -1, whatever close(2) says: there is nothing left to do about it."""
    for descriptor in descriptors:
        if descriptor >= 0:
            try:
                in_one_chain(functools.partial(loose.discard, descriptor), functools.partial(os.close, descriptor))
            except OSError:
                pass


def close_all(close: Callable[[int], None], descriptors: set[int]) -> None:
    """Close what a handle that was thrown away held, in the file system that it was opened in."""
    while descriptors:
        try:
            descriptor = descriptors.pop()
            loose.discard(descriptor)
            close(descriptor)
        except (OSError, KeyError):  # the latter: another thread has taken the last
            pass


SLEEP_MAX_S: Final = 1.0
"""How long a thread sleeps in one system call, in seconds."""


class Wakeup:
    """An event that one thread waits for, and that a wait uses up.

    Unlike `threading.Event` it is one lock: whoever is interrupted by a signal may be the one who holds an event's, and
    then a handler that sets it, or waits, would hang.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> bool:
        """Wake who waits, or will; False if it was set already."""
        try:
            self._lock.release()
        except RuntimeError:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Return whether it was set, at once or within so many seconds."""
        if seconds <= SLEEP_MAX_S:
            return self._lock.acquire(timeout=max(seconds, 0.0))
        ends = time.monotonic() + seconds
        while seconds > SLEEP_MAX_S:
            # A signal that comes after Python's last look for one, and before the system call begins, does not end the
            # call: Ctrl-C would have no effect until the end of the wait.
            if self._lock.acquire(timeout=SLEEP_MAX_S):
                return True
            seconds = ends - time.monotonic()
        return self._lock.acquire(timeout=max(seconds, 0.0))


def start_thread(name: str, call: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Have a thread of this name make the call, and return the thread; the process does not wait for it at its end.

    Raises:
        StoreUnavailableError: there can be no such thread; an error of ours, and a `RuntimeError`.
    """
    try:
        thread = threading.Thread(target=call, args=arguments, name=name, daemon=True)
        thread.start()
    except RuntimeError as error:  # a limit, a subinterpreter that allows no such threads, or the process is ending
        raise StoreUnavailableError(
            f"the thread {name!r} can't be started ({error}); end other threads, raise the limit (ulimit -u), or use"
            " the main interpreter",
            errno=errno.EAGAIN,
        ) from error
    return thread


start_bare_thread = _thread.start_new_thread
"""Start a thread in one call of C, in the middle of which no signal handler runs."""


def load_flock_locker() -> Any:
    """Return portalocker's locker for flock(2), and the exception it raises when somebody else holds the lock."""
    return load("portalocker.portalocker").FlockLocker(), load("portalocker.exceptions")


def flock_holder(fd: int) -> str | None:
    """Return ``host:pid`` of who holds flock(2) on the file of `fd` on this host (proc_locks(5)), or None."""
    inode = f":{os.fstat(fd).st_ino}"
    for line in _proc_text("/proc/locks").splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(inode):
            return process_name(fields[4])
    return None


def range_lock_holder(inode: int, seconds: float) -> str | None:
    """Return ``host:pid`` of a process of this host that locks a range of the file `inode`, or None if none is found.

    An open-file-description lock names no process to anybody but to proc_pid_fdinfo(5) of that process itself. So all
    processes are looked through, for at most so many `seconds`.
    """
    deadline = time.monotonic() + seconds
    mark = f":{inode} "
    for pid in _numbers_in("/proc"):
        for fd in _numbers_in(f"/proc/{pid}/fdinfo"):
            if time.monotonic() > deadline:
                return None
            if pid != str(os.getpid()) and any(
                line.startswith("lock:") and mark in line
                for line in _proc_text(f"/proc/{pid}/fdinfo/{fd}").splitlines()
            ):
                return process_name(pid)
    return None


def _numbers_in(directory: str) -> list[str]:
    try:
        return [name for name in os.listdir(directory) if name.isdigit()]
    except OSError:
        return []


def mount_table() -> list[str]:
    """Return the lines of this process's mount table (proc_mountinfo(5)), none where there is no such table."""
    return _proc_text("/proc/self/mountinfo").splitlines()


def nfs_recovers_lost_locks() -> bool:
    """Return whether the NFS client takes locks back that it has lost: its parameter ``recover_lost_locks``."""
    return _proc_text("/sys/module/nfs/parameters/recover_lost_locks").upper() in ("Y", "1")


FLOCK_STRUCT: Final = struct.Struct("hhqqi4x")
"""``struct flock`` with 64-bit offsets (fcntl(2)): kind, whence, start, length, pid."""


def has_ofd_locks() -> bool:
    """Return whether this platform has open-file-description locks (fcntl(2), Linux 3.15)."""
    return hasattr(fcntl, "F_OFD_SETLK")


def has_inotify() -> bool:
    """Return whether inotify(7) can be used: on Linux, on real files."""
    return sys.platform == "linux" and not is_faked()


def platform() -> str:
    """Return the name of the platform, as in `sys.platform`."""
    return sys.platform


def make_private_directory() -> str:
    """Return a fresh directory that only this user can enter."""
    import tempfile

    return tempfile.mkdtemp(prefix="fscoord-")


def unnamed_file(data: bytes) -> IO[bytes]:
    """Return a file that holds `data` and has no name, open at its beginning."""
    import tempfile

    file = tempfile.TemporaryFile()  # noqa: SIM115 - whoever gets it closes it
    try:
        file.write(data)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def remove_directory(directory: str, files: Any, owner: int) -> None:
    """Remove `directory` and the files in it, if this is process `owner`; `files` is the `os` that it was made with."""
    if files.getpid() != owner:
        return
    try:
        for name in files.listdir(directory):
            files.unlink(files.path.join(directory, name))
        files.rmdir(directory)
    except OSError:
        pass


def remove_tree(directory: str) -> None:
    """Remove `directory` and all below it, as far as that goes."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
