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
import mmap
import os
import select
import stat
import sys
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import IO, Any, ParamSpec, TypeVar

try:
    import fcntl
except ImportError:  # Windows: the package imports, FileStore refuses
    fcntl = None  # type: ignore[assignment]

P = ParamSpec("P")
R = TypeVar("R")

__all__ = ["errno", "fcntl", "os", "select", "stat", "threading", "time"]

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
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def random_bytes(count: int) -> bytes:
    """Return `count` unpredictable bytes."""
    return os.urandom(count)


def close_quietly(*descriptors: int) -> None:
    """Close every descriptor that is not -1, whatever close(2) says: there is nothing left to do about it."""
    for descriptor in descriptors:
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError:
                pass


def close_all(close: Callable[[int], None], descriptors: set[int]) -> None:
    """Close what a handle that was thrown away held, in the file system that it was opened in."""
    for descriptor in descriptors:
        try:
            close(descriptor)
        except OSError:
            pass


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
        return self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX))


def load(name: str) -> Any:
    """Return the module `name`, imported by a thread of its own, which no Ctrl-C reaches.

    A KeyboardInterrupt in the middle of importlib may leave the lock of all imports taken for ever, and with it every
    thread that imports anything: ``_get_module_lock`` takes it before its ``try`` begins.

    Raises:
        ImportError: there is no such module, or what it raised itself.
    """
    found = sys.modules.get(name)
    if found is None or getattr(found.__spec__, "_initializing", False):
        thread = _Thread(target=_load_quietly, args=(name,), name="fscoord-import", daemon=True)
        try:
            thread.start()
            thread.join()
        except RuntimeError:  # no thread is left: import it here
            pass
        __import__(name)
    return sys.modules[name]


_Thread = threading.Thread  # a real one, whatever takes the place of `threading`

start_bare_thread = _thread.start_new_thread
"""Start a thread in one call of C, in the middle of which no signal handler runs."""


def _load_quietly(name: str) -> None:
    with contextlib.suppress(Exception):  # who asked for it meets it again
        __import__(name)


def load_flock_locker() -> Any:
    """Return portalocker's locker for flock(2), and the exception it raises when somebody else holds the lock."""
    return load("portalocker.portalocker").FlockLocker(), load("portalocker.exceptions")


def flock_holder(fd: int) -> str | None:
    """Return ``host:pid`` of who holds flock(2) on the file of `fd` on this host (proc_locks(5)), or None."""
    inode = f":{os.fstat(fd).st_ino}"
    for line in _proc_text("/proc/locks").splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(inode):
            return f"{hostname()}:{fields[4]}"
    return None


def take_name(name: str) -> Any:
    """Return what keeps `name` from all others on this host's network until its ``with`` ends, or this process does.

    None if somebody has it, or if there is nothing of that kind here: it is an abstract socket address (unix(7)).
    """
    if platform() != "linux" or is_faked():
        return None
    socket = load("socket")
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        found.bind(f"\0{name}")
    except OSError:
        found.close()
        return None
    return found


def mount_table() -> list[str]:
    """Return the lines of this process's mount table (proc_mountinfo(5)), none where there is no such table."""
    return _proc_text("/proc/self/mountinfo").splitlines()


def nfs_recovers_lost_locks() -> bool:
    """Return whether the NFS client takes locks back that it has lost: its parameter ``recover_lost_locks``."""
    return _proc_text("/sys/module/nfs/parameters/recover_lost_locks").upper() in ("Y", "1")


_after_fork: list[Callable[[], None]] = []
_life = [1]


def after_fork_in_child(call: Callable[[], None]) -> None:
    """Have `call` called in every forked child: by Python's own hook, or at the next operation after a fork in C."""
    _after_fork.append(call)


def recover_from_fork() -> None:
    """In a forked child: call what `after_fork_in_child` was given."""
    _life[0] += 1
    for call in _after_fork:
        call()
    own_process[0] = 1


def life() -> int:
    """Return a number that is another one in a forked child than in its parent; getpid(2) takes ten times as long."""
    if not own_process[0]:
        recover_from_fork()
    return _life[0]


class _PidMark:
    """`own_process` where the kernel has no MADV_WIPEONFORK."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __getitem__(self, _: int) -> int:
        return self._pid == os.getpid()

    def __setitem__(self, _: int, __: int) -> None:
        self._pid = os.getpid()


def _make_mark() -> Any:
    wipe_on_fork = 18  # MADV_WIPEONFORK, madvise(2), Linux 4.14
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        page.madvise(wipe_on_fork)
    except (AttributeError, OSError, TypeError):
        return _PidMark()
    page[0] = 1
    return page


own_process = _make_mark()
"""``own_process[0]`` is 0 in a child that was forked without Python's knowledge, until `recover_from_fork`.

The kernel wipes this page in a child. Looking at it takes 15 ns; getpid(2), which says as much, ten times that.
"""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=recover_from_fork)


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
