"""System calls for the other modules. Only this module imports the standard modules for files, locks and clocks.

Other modules call ``system.os.read(...)``, for example. So pyfakefs and the fault tests can replace the system for the
whole package in one place. The price is one attribute lookup per call.

Under pyfakefs ``os.pread``, ``os.pwrite``, ``os.readv``, ``os.writev``, `mmap` and ``select.poll`` act on the *real*
descriptor of the same number. Code that uses one of these functions checks `is_fake_fs` first.
"""

from __future__ import annotations

import _thread
import contextlib
import errno
import functools
import itertools
import mmap
import operator
import os
import select
import stat
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, ModuleType
from typing import IO, TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

from fscoord._runtime.escaping import escape_word
from fscoord._runtime.forks import (
    WeakObjects,
    after_fork_in_child,
    fork_marker,
    process_epoch,
    recover_from_fork,
    reset_in_child,
)
from fscoord._runtime.interrupts import (
    HelperThread,
    ignoring,
    import_uninterrupted,
    in_one_chain,
    raise_if_foreign,
    start_thread as try_thread,
)
from fscoord._runtime.mutexes import atomic
from fscoord.errors import StoreUnavailableError

try:
    import fcntl
except ImportError:  # on Windows the package can be imported, but FileStore raises an error
    fcntl = None  # type: ignore[assignment]

P = ParamSpec("P")
R = TypeVar("R")


def _copy_of_time() -> Any:
    """Return a second module `time`, whose functions test libraries such as freezegun don't replace.

    These libraries stop the clock: they replace the functions of `time`, and every reference to them in other modules.
    With a stopped clock, no deadline would pass. The libraries don't find the copy, because it is not in `sys.modules`.
    Only ``sleep`` calls the program's function. Under gevent and eventlet, that function lets other green threads run.
    """
    program, spec = sys.modules["time"], cast(Any, time.__spec__)
    copy: Any = sys.modules["_frozen_importlib"].module_from_spec(spec)
    spec.loader.exec_module(copy)

    def sleep(seconds: float) -> None:  # looks it up at each call, because it may be replaced later
        program.sleep(seconds)

    copy.sleep = sleep
    return copy


if not TYPE_CHECKING:
    time = _copy_of_time()

__all__ = ["errno", "fcntl", "os", "select", "stat", "threading", "time"]
__all__ += ["WeakObjects", "after_fork_in_child", "fork_marker", "process_epoch", "recover_from_fork", "reset_in_child"]
__all__ += ["import_uninterrupted", "in_one_chain", "try_thread"]

O_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
O_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
O_BINARY = getattr(os, "O_BINARY", 0)
O_DIRECT = getattr(os, "O_DIRECT", 0)


def is_fake_fs() -> bool:
    """Return whether a test has replaced `os` by a fake file system, such as pyfakefs."""
    return not isinstance(os, ModuleType)


def mutex() -> Any:
    """Return a new `threading.Lock`, or on Python 3.14 a `Mutex`, for use in a ``with`` (rule 2 in `interrupts`)."""
    return atomic(threading.Lock())


def recursive_mutex() -> Any:
    """Return a new `threading.RLock`, or on Python 3.14 a `Mutex`, for use in a ``with`` (rule 2 in `interrupts`)."""
    return atomic(threading.RLock())


fake_fs_mutex = recursive_mutex()
"""A thread holds this mutex during each file operation on a fake file system, because pyfakefs is not thread-safe.

Since Python 3.13, while one thread is in a call of pyfakefs, the calls of all other threads reach the real ``os``. The
real ``os`` would apply the descriptor numbers of fake files to real files.
"""


def _renew_faked_mutex() -> None:
    global fake_fs_mutex
    fake_fs_mutex = recursive_mutex()


after_fork_in_child("faked files", _renew_faked_mutex)


def serialized_on_fake_fs(method: Callable[P, R]) -> Callable[P, R]:
    """Make `method` hold `fake_fs_mutex` on a fake file system.

    A method needs this decorator if it uses files while it does not hold the mutex of a log.
    """

    @functools.wraps(method)
    def alone(*arguments: P.args, **named: P.kwargs) -> R:
        if not is_fake_fs():
            return method(*arguments, **named)
        with fake_fs_mutex:
            return method(*arguments, **named)

    return alone


def hostname() -> str:
    """Return the name of this host (gethostname(2))."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    name: str = import_uninterrupted("socket").gethostname()  # Windows
    return name


def usable_processors() -> int:
    """Return the number of processors on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_name(pid: int | str | None = None) -> str:
    """Return ``host:pid`` for process `pid` of this host, as one word (`escape_word`). Default: this process."""
    return f"{escape_word(hostname())}:{os.getpid() if pid is None else pid}"


def boot_id() -> bytes:
    """Return the 16 bytes of the random id of this boot (proc_sys_kernel(5)); zeros if the system has none."""
    return bytes.fromhex(_proc_text("/proc/sys/kernel/random/boot_id").replace("-", "") or "00" * 16)


def host_identity() -> str:
    """Return the name and the boot id of this host, as one word (`escape_word`).

    The boot id is the same in all containers of a host, and the name usually is not.
    """
    return f"{escape_word(hostname())}:{boot_id().hex()}"


def start_time(pid: int | str = "self") -> int:
    """Return the start time of process `pid`, in clock ticks since boot (proc_pid_stat(5)); 0 if unknown."""
    fields = _stat_fields(pid)
    return int(fields[19]) if len(fields) > 19 else 0


def namespace(kind: str) -> int:
    """Return the inode number of this process's namespace `kind`, such as ``"pid"`` (namespaces(7)); 0 if unknown."""
    with ignoring(OSError):
        return int(os.stat(f"/proc/self/ns/{kind}").st_ino)
    return 0


def is_zombie(pid: int) -> bool:
    """Return whether process `pid` has ended with all its threads, but its parent has not waited for it yet."""
    fields = _stat_fields(pid)
    return len(fields) > 17 and fields[0] in "ZX" and int(fields[17]) <= 1


def process_state(pid: int) -> str:
    """Return the state of process `pid` as one letter, such as ``T`` for stopped (proc_pid_stat(5)); "" if unknown."""
    return "".join(_stat_fields(pid)[:1])


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields of proc_pid_stat(5) of process `pid`, beginning with the state. [] if they are unknown."""
    return _proc_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _proc_text(path: str) -> str:
    files: list[Any] = []
    found: list[bytes] = []
    # Opened in binary mode, because text mode may import a codec; see rule 5 in `interrupts`.
    opening = functools.partial(files.extend, map(open, (path,), ("rb",)))
    reading = functools.partial(found.extend, map(operator.methodcaller("read"), files))
    closing: functools.partial[Any] = functools.partial(list, map(operator.methodcaller("close"), files))
    with ignoring(OSError):
        # In one chain, because an interruption between two calls would leave the file open. Its collection would warn.
        in_one_chain(opening, reading, closing)
    for file in files:  # after an error of the read
        file.close()
    return b"".join(found).decode("ascii", "replace").strip()


TIME_MAX: Final = (1 << 64) - (1 << 32)
"""The latest time that `wall_time_ns` returns, in ns since 1970 (in the year 2554). A record holds a time in 64 bits;
the remaining 4 s are for later records, whose times must be greater."""


def wall_time_ns() -> int:
    """Return the time of the wall clock in ns since 1970, from 0 to `TIME_MAX`."""
    return min(max(time.time_ns(), 0), TIME_MAX)


def random_bytes(count: int) -> bytes:
    """Return `count` unpredictable bytes."""
    return os.urandom(count)


def aligned_memory(size: int) -> mmap.mmap:
    """Return `size` bytes of page-aligned memory, as direct I/O requires (O_DIRECT in open(2))."""
    return mmap.mmap(-1, size)


class Descriptors(set[int]):
    """The set of the open descriptors of one object. A forked child closes these descriptors.

    Add a number in the chain of C calls that opens the descriptor (rule 1 in `interrupts`). Remove a number before
    closing it: the next open(2) in any thread may return the same number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.close = os.close  # of the `os`, real or fake, that opens the descriptors
        if is_fake_fs():
            self.close = functools.partial(_close_fake, os.close)
        _descriptors.add(self)

    def __hash__(self) -> int:  # type: ignore[override]  # each is equal to itself only
        return id(self)


def _close_fake(close: Callable[[int], None], fd: int) -> None:
    with contextlib.suppress(Exception):  # after the end of its test a fake may raise anything
        close(fd)


_close = os.close
"""The real close(2), even if a test replaces `os`."""
_descriptors: WeakObjects[Descriptors] = WeakObjects()
loose = Descriptors()
"""The open descriptors that belong to no object. Any thread may change this set at any time."""


opens_under_way: dict[int, str] = {}
"""The paths of the files that threads are opening at this moment. If another thread forks during an open(2), the child
inherits a descriptor whose number the parent has not recorded yet."""


def _close_inherited() -> None:
    """Close all descriptors in a forked child, each once. Don't unlock any file, because the parent holds the locks."""
    found: dict[Callable[[int], None], set[int]] = {}
    for kept in _descriptors:
        found.setdefault(kept.close, set()).update(kept)
        kept.clear()
    for close, descriptors in found.items():
        with contextlib.suppress(Exception):  # a fake `os` that is no longer in place may raise anything
            close_all(close, descriptors)
    if opens_under_way:
        _close_unfinished_opens()


def _close_unfinished_opens() -> None:
    """Close the files that threads of the parent were opening during the fork.

    `_close_inherited` has closed all recorded descriptors. Another descriptor of one of these files belongs to an
    unfinished open, or the program itself has opened the file. The descriptors of the program lack the flags with which
    this package opens files.
    """
    paths, flags = set(opens_under_way.values()), os.O_NOFOLLOW | os.O_NONBLOCK
    with contextlib.suppress(Exception):  # there may be no /proc, and a fake `os` may raise anything
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # that of the listing
                is_unfinished = os.readlink(f"/proc/self/fd/{name}") in paths
                if is_unfinished and fcntl.fcntl(int(name), fcntl.F_GETFL) & flags == flags:
                    os.close(int(name))
    opens_under_way.clear()


after_fork_in_child("descriptors", _close_inherited)


def forget_descriptors() -> None:
    """Forget all open descriptors without closing them, because the program may have reused their numbers."""
    for kept in _descriptors:
        kept.clear()


def duplicate(fd: int, owned_fds: set[int]) -> int:
    """Duplicate `fd` (dup(2)), and return the new descriptor. The same chain of C calls adds it to `owned_fds`."""
    opened: list[int] = []
    in_one_chain(functools.partial(opened.extend, map(os.dup, (fd,))), functools.partial(owned_fds.update, opened))
    return opened[0]


def occupy_standard_descriptors() -> None:
    """Open the null device on each of the descriptors 0, 1 and 2 that is closed, as Git and the runtime of Rust do.

    Each function of the package that opens descriptors calls this function first. Otherwise open(2) could return a
    number from 0 to 2. Then the output of the program would go to the package's file, or a program that becomes a
    daemon would replace the descriptor.
    """
    for number in range(3):
        try:
            os.get_inheritable(number)  # the cheapest call that fails for a closed descriptor
        except OSError as error:
            raise_if_foreign(error)
            if (opened := os.open(os.devnull, os.O_RDWR)) > number:  # another thread has opened this number
                os.close(opened)


def open_file(path: str, flags: int, mode: int, owned_fds: set[int], *, dir_fd: int | None = None) -> int:
    """Open `path` safely: O_NOFOLLOW, O_NONBLOCK for FIFOs, and O_CLOEXEC are added to `flags`.

    Use this function for every file whose name another user might have replaced. The descriptor is added to `owned_fds`
    in the same chain of C calls that opens it (rule 1 in `interrupts`). With `dir_fd`, `path` is relative to that open
    directory.
    """
    occupy_standard_descriptors()
    flags |= O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | O_BINARY
    call = os.open if dir_fd is None else functools.partial(os.open, dir_fd=dir_fd)
    opened: list[int] = []
    opening = functools.partial(opened.extend, map(call, (path,), (flags,), (mode,)))
    begin = functools.partial(opens_under_way.__setitem__, id(opened), path)
    try:
        in_one_chain(begin, opening, functools.partial(owned_fds.update, opened))
    finally:
        # An interruption here leaves the path in the dict. Then the next forked child searches in vain.
        opens_under_way.pop(id(opened), None)
    return opened[0]  # not the new member of `owned_fds`, because another thread may have added one


def open_regular(path: str) -> IO[bytes]:
    """Open a regular file for reading. Refuse a link, a FIFO or a device that another user may have put at `path`.

    Raises:
        OSError: the file can't be opened, or is not a regular file.
    """
    try:
        fd = open_file(path, os.O_RDONLY, 0, set())
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a symbolic link", path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return os.fdopen(fd, "rb")


def at_end_of_child(call: Callable[[], object]) -> None:
    """If this process is a child of multiprocessing, call `call` when the process ends. Otherwise do nothing.

    A child of multiprocessing may end without a call of the functions of `atexit`. Such a child always runs
    multiprocessing's finalizers.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        from multiprocessing.util import Finalize

        Finalize(None, call, exitpriority=-1)  # after the child's own children have ended


_NEW: Final = "new"


def make_node(
    path: str,
    make: Callable[..., object],
    mode: int,
    permit: Callable[[int], object],
    publish: Callable[..., object],
    owned_fds: set[int],
) -> int:
    """Create a directory or a FIFO, set its permissions, and move it to `path`. Return a descriptor of the new node.

    mkdir(2) and mkfifo(2) return no descriptor. Before the permissions are set, another user who may rename files in
    the parent directory could replace the new node by another file of this user. So the node is created in a new
    directory of mode 0700, where no other user can rename files.

    Args:
        path: the path of the node.
        make: `os.mkdir` or `os.mkfifo`.
        mode: the permissions, before the umask.
        permit: called with the descriptor to set further permissions.
        publish: moves the node to `path`: `os.rename`, or `os.link` without `follow_symlinks`.
        owned_fds: the descriptors are added to this set. The caller closes the returned descriptor.
    """
    epoch, place, fd = process_epoch(), -1, -1
    draft = f"{path}.{random_bytes(6).hex()}.new"
    try:
        os.mkdir(draft, 0o700)
        place = open_file(draft, os.O_RDONLY | os.O_DIRECTORY, 0, owned_fds)
        make(_NEW, mode, dir_fd=place)
        fd = open_file(_NEW, os.O_RDONLY, 0, owned_fds, dir_fd=place)
        found, inside = os.fstat(place), os.fstat(fd)
        # Compare the owners with each other and not with this user: a file server may map user ids (root squash).
        if found.st_mode & 0o077 or found.st_uid != inside.st_uid:
            raise PermissionError(errno.EPERM, "another user has replaced this new directory", draft)
        permit(fd)
        publish(_NEW, path, src_dir_fd=place)
    except BaseException:
        _close_owned(fd, owned_fds)
        raise
    finally:
        if process_epoch() == epoch:  # a child that a signal handler forks must not remove what the parent still uses
            _remove_draft(draft, place)
        _close_owned(place, owned_fds)
    return fd


def _remove_draft(draft: str, place: int) -> None:
    removals = [functools.partial(os.unlink, _NEW, dir_fd=place), functools.partial(os.rmdir, _NEW, dir_fd=place)]
    for remove in (*removals * (place >= 0), functools.partial(os.rmdir, draft)):
        try:  # not `ignoring`, which begins with a Python function: the draft must not stay
            remove()
        except OSError as error:
            raise_if_foreign(error)


def _close_owned(fd: int, owned_fds: set[int]) -> None:
    if fd >= 0:
        in_one_chain(functools.partial(owned_fds.discard, fd), functools.partial(os.close, fd))


def make_directory(path: str, mode: int, permit: Callable[[int], object]) -> int:
    """Create the directory `path`, or replace an empty directory, with `make_node`. Return its descriptor.

    The caller closes the descriptor with `close_quietly`.

    Raises:
        FileExistsError: `path` is a file, or a directory that is not empty.
    """
    try:
        return make_node(path, os.mkdir, mode, permit, os.rename, loose)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        raise


def sync_data(fd: int) -> None:
    """Write the data of `fd` to the disk (fdatasync(2)), so that the data survive a power failure.

    On macOS, fsync(2) only writes to the disk's volatile cache. There, F_FULLFSYNC of fcntl(2) also flushes this cache.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        fcntl.fcntl(fd, full)
    else:
        getattr(os, "fdatasync", os.fsync)(fd)


def sync_file(fd: int) -> None:
    """Write the data and the metadata of `fd` to the disk (fsync(2); on macOS F_FULLFSYNC)."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        sync_data(fd)
    else:
        os.fsync(fd)


def drop_cached_pages(fd: int) -> None:
    """Drop the pages of the file of `fd` that this host has cached (posix_fadvise(2)), if the system can do that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def readiness(fd: int, *, writing: bool = False) -> Callable[[float], Any]:
    """Return a function that waits until `fd` is ready to be read, or with `writing` to be written.

    The argument of the returned function is the longest wait in milliseconds. The result of the returned function is
    true if `fd` is ready or closed. On a closed `fd`, the next read or write raises the error.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, select.POLLOUT if writing else select.POLLIN)
        return poll.poll

    def wait(milliseconds: float) -> bool:  # Windows has no poll(2). Its select(2) has no limit of 1024 descriptors
        readers, writers = ((), (fd,)) if writing else ((fd,), ())
        with ignoring(OSError):
            return any(select.select(readers, writers, (), min(milliseconds / 1000, SLEEP_MAX_S)))
        return True

    return wait


def close_quietly(*descriptors: int) -> None:
    """Close every descriptor that is not -1, and ignore errors of close(2)."""
    for descriptor in descriptors:
        if descriptor >= 0:
            with ignoring(OSError):
                in_one_chain(functools.partial(loose.discard, descriptor), functools.partial(os.close, descriptor))


def close_all(close: Callable[[int], None], descriptors: set[int]) -> None:
    """Close `descriptors` with `close`, and remove them from the set. Errors of `close` are ignored.

    `close` must belong to the same real or fake `os` that opened the descriptors. If a signal handler raises an
    exception, the set keeps the descriptors that are still open, and a second call closes them.
    """
    for fd in list(descriptors):
        forget = functools.partial(descriptors.remove, fd), functools.partial(loose.discard, fd)
        try:
            in_one_chain(*forget, functools.partial(close, fd))
        except KeyError as error:
            if error.args != (fd,):  # a signal handler raised this error; otherwise another thread has removed `fd`
                raise
        except OSError as error:
            raise_if_foreign(error)


_closers: dict[int, weakref.ref[Any]] = {}
"""{id of a `Descriptors`: weak reference to the object that uses the descriptors}. The callback of the reference closes
the descriptors."""


def close_when_collected(owner: object, descriptors: Descriptors) -> None:
    """Close `descriptors` as soon as `owner` is collected.

    `weakref.finalize` is written in Python. If a signal handler interrupted `weakref.finalize` with an exception, the
    descriptors would stay open for ever. So the callback consists of C functions only (rule 1 in `interrupts`). The
    callback applies `next` to `filter(None, calls)`. The results of all calls are false, so `next` makes every call in
    its search for a true result.
    """
    if os.close is not _close:  # the `os` of a test, whose functions may be written in Python
        weakref.finalize(owner, close_all, descriptors.close, descriptors).atexit = False
        return
    calls = itertools.chain(_closing(descriptors), map(_closers.pop, (id(descriptors),)))
    _closers[id(descriptors)] = weakref.ref(owner, functools.partial(next, filter(None, calls)))


def _closing(descriptors: Descriptors) -> Iterator[Any]:
    """Return an iterator that consists of C functions. Iterating over it to the end closes all `descriptors`."""
    removed: Iterator[int] = map(set.pop, itertools.takewhile(len, itertools.repeat(descriptors)))
    # Leave out -1, which a failed C function returns as a descriptor, because os.closerange(-1, 0) closes everything.
    removed = filter((-1).__lt__, removed)
    first, again = itertools.tee(removed)
    return itertools.chain(
        map(loose.difference_update, itertools.repeat(descriptors, 1)),
        map(os.closerange, first, map((1).__add__, again)),  # unlike os.close it ignores errors
    )


def owned_for_a_while() -> tuple[Descriptors, Callable[[], object]]:
    """Return an empty set of descriptors, and a function that closes the descriptors in the set.

    The function is a C function, so a ``finally`` can begin with it (rule 3 in `interrupts`). Call the function only
    once. Errors of close(2) are ignored.
    """
    opened = Descriptors()
    if os.close is not _close:  # as in `close_when_collected`
        return opened, functools.partial(close_all, os.close, opened)
    return opened, functools.partial(next, filter(None, _closing(opened)), None)


SLEEP_MAX_S: Final = 1.0
"""The longest sleep in one system call, in seconds."""


class AutoResetEvent:
    """An event that wakes one waiting thread and is reset when the thread wakes.

    The event is a single lock, which any thread may release. `threading.Event` is unsafe here, because a second lock
    guards its state. If a signal interrupted the thread that holds the second lock, a signal handler that uses the
    event would deadlock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> bool:
        """Set the event: wake the waiter, or end its next wait at once. Return False if the event was set already."""
        try:
            self._lock.release()
        except RuntimeError as error:
            raise_if_foreign(error, type(self._lock).__module__)  # of gevent, if it has patched `threading`
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for the event at most `seconds`, and reset the event. Return whether the event was set."""
        if seconds <= SLEEP_MAX_S:
            return self._lock.acquire(timeout=max(seconds, 0.0))
        ends = time.monotonic() + seconds
        while seconds > SLEEP_MAX_S:
            # Sleep in short slices. A signal that arrives after CPython's last check for signals, but before the system
            # call blocks, does not end the call. In one long call, Ctrl-C would have no effect until the end.
            if self._lock.acquire(timeout=SLEEP_MAX_S):
                return True
            seconds = ends - time.monotonic()
        return self._lock.acquire(timeout=max(seconds, 0.0))


exiting: list[int] = []
"""The id of this process, once the process is known to be exiting; before, the list is empty."""

EXIT_MAX_S: Final = 60.0
"""How long a daemon thread sleeps at exit, in seconds; see `is_ended_by_exit`. The sleep is limited, because an exit
handler of the program may join the thread."""


def is_ended_by_exit() -> bool:
    """Return whether the process is exiting, and the calling thread is a daemon thread of the program.

    The interpreter soon ends such a thread. An operation that can't succeed any more should sleep for `EXIT_MAX_S`
    seconds before it raises its error. Otherwise a program that ends normally would print a traceback. The thread must
    hold no mutex during the sleep, because the main thread may need the mutex to close a store.
    """
    if not exiting or exiting[-1] != os.getpid():
        return False
    thread = threading.current_thread()
    return thread.daemon and not isinstance(thread, HelperThread)


def start_thread(name: str, call: Callable[..., object], *arguments: Any) -> threading.Thread:
    """Start a daemon thread named `name` that calls `call` with `arguments`, and return the thread.

    Raises:
        StoreUnavailableError: the thread can't be started.
    """
    thread = try_thread(name, call, *arguments)
    if isinstance(thread, RuntimeError):  # a limit, a subinterpreter that allows no daemons, or the process is ending
        raise thread_refused(name, thread)
    return thread


def try_kernel_thread(name: str, call: Callable[..., object], *arguments: Any) -> threading.Thread | RuntimeError:
    """Do as `try_thread`, for a `call` that blocks in the kernel. Return an error under gevent or eventlet.

    If one green thread of gevent or eventlet blocks in the kernel, all green threads are blocked. So a caller that gets
    the error must poll.
    """
    if not isinstance(_thread.start_new_thread, BuiltinFunctionType):
        return RuntimeError("a green thread must not block in the kernel")
    return try_thread(name, call, *arguments)


def thread_refused(name: str, refusal: RuntimeError) -> StoreUnavailableError:
    """Return the error of an operation that can't start the thread `name`. `refusal` is the interpreter's error.

    Since Python 3.12, the interpreter starts no threads at exit, even before it calls the first exit function. If the
    calling thread is a daemon thread that the exit will end, this function first sleeps for `EXIT_MAX_S` seconds
    (`is_ended_by_exit` explains why). A caller of this function may hold mutexes of this package, except a mutex that
    an exit function of this package needs.
    """
    if str(refusal).endswith("at interpreter shutdown"):
        exiting.append(os.getpid())
        if is_ended_by_exit():
            time.sleep(EXIT_MAX_S)
    text = f"the thread {name!r} can't be started ({refusal}); end other threads, raise the limit (ulimit -u), or use"
    return StoreUnavailableError(f"{text} the main interpreter", errno=errno.EAGAIN)


start_bare_thread = _thread.start_new_thread
"""Starts a thread in one C call, which no signal handler can interrupt."""

receive_signal: Callable[..., None] = _thread.interrupt_main
"""Marks a signal with a Python handler as received. The main thread runs the handler after the call."""


def load_flock_locker() -> Any:
    """Return portalocker's `FlockLocker`, and the module with its exceptions."""
    return import_uninterrupted("portalocker.portalocker").FlockLocker(), import_uninterrupted("portalocker.exceptions")


def flock_holder(fd: int) -> str | None:
    """Return ``host:pid`` of the process that holds flock(2) on the file of `fd`. None: no process of this host."""
    inode = f":{os.fstat(fd).st_ino}"
    for line in _proc_text("/proc/locks").splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(inode):
            return process_name(fields[4])
    return None


def range_lock_holder(inode: int, seconds: float) -> str | None:
    """Return ``host:pid`` of another process of this host that locks a range of the file `inode`, or None.

    The kernel shows the holder of an open-file-description lock only in the holder's own proc_pid_fdinfo(5). So this
    function searches all processes, for at most `seconds` seconds.
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
    with ignoring(OSError):
        return [name for name in os.listdir(directory) if name.isdigit()]
    return []


def lustre_timeout() -> int | None:
    """Return the ``timeout`` of Lustre's client in seconds, which `lctl get_param timeout` shows; None if unknown."""
    for path in ("/sys/fs/lustre/timeout", "/proc/fs/lustre/timeout", "/proc/sys/lustre/timeout"):
        text = _proc_text(path)
        if text.isdecimal():
            return int(text)
    return None


def mount_table() -> list[str]:
    """Return the lines of this process's mount table (proc_mountinfo(5)); [] if the system does not show it."""
    return _proc_text("/proc/self/mountinfo").splitlines()


def nfs_recovers_lost_locks() -> bool:
    """Return whether the NFS client reacquires locks that the server has dropped (option ``recover_lost_locks``)."""
    return _proc_text("/sys/module/nfs/parameters/recover_lost_locks").upper() in ("Y", "1")


FLOCK_STRUCT: Final = struct.Struct("hhqqi4x")
"""``struct flock`` with 64-bit offsets (fcntl(2)): kind, whence, start, length, pid."""


def has_ofd_locks() -> bool:
    """Return whether this platform has open-file-description locks (fcntl(2), Linux 3.15).

    The result is False outside Linux, because `FLOCK_STRUCT` is the layout of Linux.
    """
    return sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")


def has_inotify() -> bool:
    """Return whether inotify(7) can be used: the system is Linux, and the file system is not a fake file system."""
    return sys.platform == "linux" and not is_fake_fs()


def platform() -> str:
    """Return `sys.platform`."""
    return sys.platform


def import_path() -> str:
    """Return a ``PYTHONPATH`` for child processes: the entries of this process's `sys.path` as absolute paths."""
    return os.pathsep.join([os.path.abspath(entry) for entry in sys.path if entry] or [""])


def make_private_directory() -> str:
    """Create a temporary directory that only this user can enter, and return its path."""
    import tempfile

    return tempfile.mkdtemp(prefix="fscoord-")


def unnamed_file(data: bytes) -> IO[bytes]:
    """Create a nameless temporary file, write `data` to it, seek to its beginning, and return the open file."""
    import tempfile

    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        file.write(data)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def remove_directory(directory: str, files: Any, owner: int) -> None:
    """Remove `directory` and the store named ``store`` in it. Do nothing in any other process than `owner`.

    Another user may have put another directory at the path. So no link is followed, and no other file is removed.

    Args:
        directory: the path of the directory.
        files: the real or fake `os` that created the directory.
        owner: the id of the process that created the directory.
    """
    if files.getpid() != owner:
        return
    fd = -1
    try:
        fd = files.open(directory, files.O_RDONLY | files.O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC)
        for name in files.listdir(fd):
            if name == "store" or name.startswith("store."):
                files.unlink(name, dir_fd=fd)
        files.rmdir(directory)
    except OSError as error:
        raise_if_foreign(error)
    finally:
        if fd >= 0:
            files.close(fd)


def remove_tree(directory: str) -> None:
    """Remove `directory` and everything below it; ignore errors."""
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
