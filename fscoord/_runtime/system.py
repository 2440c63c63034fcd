"""The operating system, as other modules use it. Only this module imports modules for files, locks and clocks.

Other modules call ``system.os.read(...)``, which costs one attribute lookup. So pyfakefs and the fault tests have one
place where they can replace the system under the whole package.

Under pyfakefs ``os.pread``, ``os.pwrite``, ``os.readv``, ``os.writev``, `mmap` and ``select.poll`` act on the *real*
descriptor of the same number. Code that uses one of them checks `is_fake_fs` first.
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
from fscoord.errors import StoreUnavailableError

try:
    import fcntl
except ImportError:  # Windows: the package imports, FileStore refuses
    fcntl = None  # type: ignore[assignment]

P = ParamSpec("P")
R = TypeVar("R")


def _copy_of_time() -> Any:
    """Return a second module `time`, with functions that no other program has replaced.

    Test libraries such as freezegun replace the functions of the module `time` in the whole process, and also every
    attribute of another module that refers to one of them. While the clock is stopped, no deadline would pass. The copy
    is not in `sys.modules`, so they don't find it. Only ``sleep`` is that of the program, because under gevent and
    eventlet it must let the other green threads run.
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
    """Return whether `os` has been replaced by a fake with its own files, such as that of pyfakefs."""
    return not isinstance(os, ModuleType)


fake_fs_mutex = threading.RLock()
"""Held around all file operations under a fake `os`, which is not thread-safe.

Since Python 3.13, while one thread is inside a call of pyfakefs' ``os``, the calls of all other threads reach the real
``os``. In these calls the descriptors of fake files stand for real files.
"""


def _renew_faked_mutex() -> None:
    global fake_fs_mutex
    fake_fs_mutex = threading.RLock()


after_fork_in_child("faked files", _renew_faked_mutex)


def serialized_on_fake_fs(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that uses files without the mutex of a log. Under a fake `os` it holds `fake_fs_mutex`."""

    @functools.wraps(method)
    def alone(*arguments: P.args, **named: P.kwargs) -> R:
        if not is_fake_fs():
            return method(*arguments, **named)
        with fake_fs_mutex:
            return method(*arguments, **named)

    return alone


def hostname() -> str:
    """Return the name of this host, as gethostname(2)."""
    if hasattr(os, "uname"):
        return os.uname().nodename
    name: str = import_uninterrupted("socket").gethostname()  # Windows
    return name


def process_name(pid: int | str | None = None) -> str:
    """Return ``host:pid`` of process `pid` of this host, as one word (`escape_word`); by default of this process."""
    return f"{escape_word(hostname())}:{os.getpid() if pid is None else pid}"


def boot_id() -> bytes:
    """Return the random id of this boot (proc_sys_kernel(5)), 16 bytes; zeros if the system has none."""
    return bytes.fromhex(_proc_text("/proc/sys/kernel/random/boot_id").replace("-", "") or "00" * 16)


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
    """Return whether process `pid` has ended with all its threads and its parent has not waited for it yet."""
    fields = _stat_fields(pid)
    return len(fields) > 17 and fields[0] in "ZX" and int(fields[17]) <= 1


def process_state(pid: int) -> str:
    """Return the state of process `pid` as one letter, such as ``T`` for stopped (proc_pid_stat(5)); "" if unknown."""
    return "".join(_stat_fields(pid)[:1])


def _stat_fields(pid: int | str) -> list[str]:
    """Return the fields of process `pid` in proc_pid_stat(5), from its state on; none if they are unknown."""
    return _proc_text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _proc_text(path: str) -> str:
    files: list[Any] = []
    found: list[bytes] = []
    # Not opened as text: that may import a codec; see rule 5 in `interrupts`.
    opening = functools.partial(files.extend, map(open, (path,), ("rb",)))
    reading = functools.partial(found.extend, map(operator.methodcaller("read"), files))
    closing: functools.partial[Any] = functools.partial(list, map(operator.methodcaller("close"), files))
    with ignoring(OSError):
        # In one chain: an interruption between two of them would leave an open file to the collector, which warns.
        in_one_chain(opening, reading, closing)
    for file in files:  # after an error of the read
        file.close()
    return b"".join(found).decode("ascii", "replace").strip()


TIME_MAX: Final = (1 << 64) - (1 << 32)
"""The latest time that a record can hold, in ns since 1970, less some for the records after it: in the year 2554."""


def wall_time_ns() -> int:
    """Return the time by the wall clock, in ns since 1970. A clock that is set before 1970 or after 2554 is clamped."""
    return min(max(time.time_ns(), 0), TIME_MAX)


def random_bytes(count: int) -> bytes:
    """Return `count` unpredictable bytes."""
    return os.urandom(count)


def aligned_memory(size: int) -> mmap.mmap:
    """Return `size` bytes of memory that begin at a page, as direct reads and writes require (open(2))."""
    return mmap.mmap(-1, size)


class Descriptors(set[int]):
    """The open descriptors of one owner. A forked child closes them; see rule 1 in `interrupts`.

    Remove a number before closing it: the next open(2) in any thread may return the same number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.close = os.close  # the close of the `os` that opens the descriptors
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
"""The descriptors without an owner. All threads add to this set and remove from it at any time."""


opens_under_way: dict[int, str] = {}
"""The paths of the files that threads are opening. open(2) runs without Python's lock. If another thread forks then,
the child inherits a descriptor whose number the parent has not recorded yet."""


def _close_inherited() -> None:
    """Close all descriptors in a forked child, each once. Unlock nothing, because the locks are the parent's."""
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
    """Close, in a forked child, the files that threads of the parent were just opening.

    `_close_inherited` has closed all recorded descriptors. Any other descriptor of these files belongs to such an open,
    unless the program has opened the file by itself. Descriptors of the program lack the flags with which this package
    opens its files.
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
    """Never close any descriptor that is open now: their numbers may belong to files of the program."""
    for kept in _descriptors:
        kept.clear()


def duplicate(fd: int, owned_fds: set[int]) -> int:
    """Return another descriptor of the open file `fd`, which is added to `owned_fds` in the same chain of C calls."""
    opened: list[int] = []
    in_one_chain(functools.partial(opened.extend, map(os.dup, (fd,))), functools.partial(owned_fds.update, opened))
    return opened[0]


def occupy_standard_descriptors() -> None:
    """Open the null device on each of the descriptors 0, 1 and 2 that is closed, as Git and the runtime of Rust do.

    open(2) returns the lowest free number. A descriptor of the package with one of these numbers would get what the
    program prints, and the dup2(2) of a program that becomes a daemon would replace it. Each function of the package
    that makes descriptors calls this function first.
    """
    for number in range(3):
        try:
            os.get_inheritable(number)  # the cheapest call that fails for a closed descriptor
        except OSError as error:
            raise_if_foreign(error)
            if (opened := os.open(os.devnull, os.O_RDWR)) > number:  # another thread has opened this number
                os.close(opened)


def open_file(path: str, flags: int, mode: int, owned_fds: set[int], *, dir_fd: int | None = None) -> int:
    """Open `path` without following a symbolic link, blocking on a FIFO, or passing the descriptor to a new program.

    This function opens every file of the package whose name another user might have replaced. It adds the descriptor to
    `owned_fds` in the same chain of C calls that opens it (rule 1 in `interrupts`). With `dir_fd`, `path` is a name in
    that open directory.
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
        # An interruption here leaves the path. The next child then looks for such a descriptor in vain.
        opens_under_way.pop(id(opened), None)
    return opened[0]  # not the new member of `owned_fds`, because another thread may have added one


def open_regular(path: str) -> IO[bytes]:
    """Open a regular file for reading, whose name another user may have given to a link, a FIFO or a device.

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
    """Call `call` when this process ends, if it is a child of multiprocessing; otherwise do nothing.

    Such a child may end by os._exit, which calls no function of `atexit`, but runs the finalizers of multiprocessing.
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
    """Make a directory or a FIFO, set its permissions, and publish it at `path`. Return a descriptor of it.

    mkdir(2) and mkfifo(2) return no descriptor. In a directory in which other users may rename, any of them could put
    another file of this user in the place of the new one before its permissions are set. So the node is made in a new
    directory of mode 0700, in which no other user can rename.

    Args:
        path: the path of the node.
        make: `os.mkdir` or `os.mkfifo`.
        mode: the permissions, before the umask.
        permit: sets further permissions of the descriptor that it is given.
        publish: `os.rename`, which replaces an empty directory, or `os.link` without `follow_symlinks`.
        owned_fds: the descriptors are added to this set. The caller closes the one that is returned.
    """
    epoch, place, fd = process_epoch(), -1, -1
    draft = f"{path}.{random_bytes(6).hex()}.new"
    try:
        os.mkdir(draft, 0o700)
        place = open_file(draft, os.O_RDONLY | os.O_DIRECTORY, 0, owned_fds)
        make(_NEW, mode, dir_fd=place)
        fd = open_file(_NEW, os.O_RDONLY, 0, owned_fds, dir_fd=place)
        found, inside = os.fstat(place), os.fstat(fd)
        # The owners are compared with each other, because a file server may map the users of this host (root squash).
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
    """Make the directory `path`, or replace an empty one, see `make_node`. `close_quietly` closes the descriptor.

    Raises:
        FileExistsError: there is a file, or a directory that is not empty.
    """
    try:
        return make_node(path, os.mkdir, mode, permit, os.rename, loose)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        raise


def sync_data(fd: int) -> None:
    """Write the data of `fd` to the disk (fdatasync(2)), so that they survive a power failure.

    On macOS fsync(2) returns while the data are in the cache of the disk; F_FULLFSYNC of fcntl(2) empties that cache.
    """
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        fcntl.fcntl(fd, full)
    else:
        getattr(os, "fdatasync", os.fsync)(fd)


def sync_file(fd: int) -> None:
    """Write the data and the metadata of `fd` to the disk (fsync(2)), on macOS as `sync_data`."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        sync_data(fd)
    else:
        os.fsync(fd)


def drop_cached_pages(fd: int) -> None:
    """Drop the pages of the file of `fd` that this host has cached (posix_fadvise(2)), if the system can do that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def readiness(fd: int, *, writing: bool = False) -> Callable[[float], Any]:
    """Return a function that waits, at most so many milliseconds, until a read or a write of `fd` does not block.

    Its result is true if `fd` is ready, or closed: then the next read or write raises the error.
    """
    if hasattr(select, "poll"):
        poll = select.poll()
        poll.register(fd, select.POLLOUT if writing else select.POLLIN)
        return poll.poll

    def wait(milliseconds: float) -> bool:  # Windows has no poll(2), and there select(2) has no limit at 1024
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
    """Close `descriptors` with `close`, a function of the `os` that opened them; empty the set and ignore errors.

    If a signal handler raises, the set has the descriptors that are still open, and a second call closes them.
    """
    for fd in list(descriptors):
        forget = functools.partial(descriptors.remove, fd), functools.partial(loose.discard, fd)
        try:
            in_one_chain(*forget, functools.partial(close, fd))
        except KeyError as error:
            if error.args != (fd,):  # another thread has not removed it; a signal handler raised
                raise
        except OSError as error:
            raise_if_foreign(error)


_closers: dict[int, weakref.ref[Any]] = {}
"""For each `Descriptors` of a living owner, by id, the weak reference to that owner. Its callback closes them."""


def close_when_collected(owner: object, descriptors: Descriptors) -> None:
    """Close `descriptors` as soon as `owner` is collected.

    `weakref.finalize` is written in Python. A signal handler may run in it after it has removed its own record, and
    Python drops what a handler raises there: the descriptors would stay open for ever. So the callback consists of C
    functions only (rule 1 in `interrupts`): `next` looks in vain for a true result among the results of the calls.
    """
    if os.close is not _close:  # the `os` of a test, whose functions may be written in Python
        weakref.finalize(owner, close_all, descriptors.close, descriptors).atexit = False
        return
    calls = itertools.chain(_closing(descriptors), map(_closers.pop, (id(descriptors),)))
    _closers[id(descriptors)] = weakref.ref(owner, functools.partial(next, filter(None, calls)))


def _closing(descriptors: Descriptors) -> Iterator[Any]:
    """Return an iterator that closes each of `descriptors` when it is exhausted. It consists of C functions only."""
    removed: Iterator[int] = map(set.pop, itertools.takewhile(len, itertools.repeat(descriptors)))
    # Without -1, which some C functions return instead of a descriptor: os.closerange(-1, 0) closes all descriptors.
    removed = filter((-1).__lt__, removed)
    first, again = itertools.tee(removed)
    return itertools.chain(
        map(loose.difference_update, itertools.repeat(descriptors, 1)),
        map(os.closerange, first, map((1).__add__, again)),  # unlike os.close it ignores errors
    )


def owned_for_a_while() -> tuple[Descriptors, Callable[[], object]]:
    """Return an empty set of descriptors, and the function that closes the set once, for a ``finally``.

    It is a C function: rule 3 in `interrupts`. Errors of close(2) are ignored.
    """
    opened = Descriptors()
    if os.close is not _close:  # as in `close_when_collected`
        return opened, functools.partial(close_all, os.close, opened)
    return opened, functools.partial(next, filter(None, _closing(opened)), None)


SLEEP_MAX_S: Final = 1.0
"""The longest sleep in one system call, in seconds."""


class AutoResetEvent:
    """An event for one waiting thread. The end of a wait resets the event.

    The event consists of one bare lock. `threading.Event` is not used, because it guards its state by a lock. If a
    signal interrupted the thread that holds this lock, a handler that sets the event or waits for it would deadlock.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> bool:
        """Set the event, which wakes the waiter or ends its next wait at once. Return False if it was set already."""
        try:
            self._lock.release()
        except RuntimeError as error:
            raise_if_foreign(error, type(self._lock).__module__)  # of gevent, if it has patched `threading`
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for the event at most `seconds`, and reset the event. Return whether it was set."""
        if seconds <= SLEEP_MAX_S:
            return self._lock.acquire(timeout=max(seconds, 0.0))
        ends = time.monotonic() + seconds
        while seconds > SLEEP_MAX_S:
            # A signal that arrives after CPython's last check for signals, but before the system call blocks, does not
            # end the call. Without this slicing Ctrl-C would have no effect until the end of the wait.
            if self._lock.acquire(timeout=SLEEP_MAX_S):
                return True
            seconds = ends - time.monotonic()
        return self._lock.acquire(timeout=max(seconds, 0.0))


exiting: list[int] = []
"""The number of this process, once it is known to be exiting."""

EXIT_MAX_S: Final = 60.0
"""The longest sleep of `is_ended_by_exit`, in seconds, because an exit handler of the program may join the thread."""


def is_ended_by_exit() -> bool:
    """Return whether this is a daemon thread of the program, and its process is exiting.

    The interpreter ends such a thread within moments. An operation that can't succeed any more sleeps for `EXIT_MAX_S`
    before it raises, because its error would be a traceback at the normal end of a program. The thread must hold no
    mutex meanwhile, because the main thread may need it to close a store.
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
    """Start a thread as `try_thread` does, for a `call` that blocks in the kernel. Green threads are refused.

    gevent and eventlet replace `_thread.start_new_thread`. Then a call that blocks in the kernel would block every
    thread of the program, so the caller must poll.
    """
    if not isinstance(_thread.start_new_thread, BuiltinFunctionType):
        return RuntimeError("a green thread must not block in the kernel")
    return try_thread(name, call, *arguments)


def thread_refused(name: str, refusal: RuntimeError) -> StoreUnavailableError:
    """Return the error of an operation that needs the thread `name`, which the interpreter refuses with `refusal`.

    From Python 3.12 on, an interpreter that exits refuses threads before it calls the first exit function. So this
    function sleeps at exit, as `is_ended_by_exit` says. No exit function of this package needs a mutex that a caller of
    this function holds.
    """
    if str(refusal).endswith("at interpreter shutdown"):
        exiting.append(os.getpid())
        if is_ended_by_exit():
            time.sleep(EXIT_MAX_S)
    text = f"the thread {name!r} can't be started ({refusal}); end other threads, raise the limit (ulimit -u), or use"
    return StoreUnavailableError(f"{text} the main interpreter", errno=errno.EAGAIN)


start_bare_thread = _thread.start_new_thread
"""Start a thread in one C call: no signal handler runs in the middle."""

receive_signal: Callable[..., None] = _thread.interrupt_main
"""Mark a signal as received, if it has a handler in Python. The main thread runs the handler after the call."""


def load_flock_locker() -> Any:
    """Return portalocker's locker for flock(2), and the module of portalocker's exceptions."""
    return import_uninterrupted("portalocker.portalocker").FlockLocker(), import_uninterrupted("portalocker.exceptions")


def flock_holder(fd: int) -> str | None:
    """Return ``host:pid`` of the process of this host that holds flock(2) on `fd`'s file (proc_locks(5)), or None."""
    inode = f":{os.fstat(fd).st_ino}"
    for line in _proc_text("/proc/locks").splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[1] == "FLOCK" and fields[5].endswith(inode):
            return process_name(fields[4])
    return None


def range_lock_holder(inode: int, seconds: float) -> str | None:
    """Return ``host:pid`` of another process of this host that locks a range of the file `inode`, or None.

    The kernel shows the holder of an open-file-description lock only in proc_pid_fdinfo(5) of the holder. So this
    function searches all processes, for at most `seconds`.
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
    """Return the lines of this process's mount table (proc_mountinfo(5)); none if the system has no such table."""
    return _proc_text("/proc/self/mountinfo").splitlines()


def nfs_recovers_lost_locks() -> bool:
    """Return whether the NFS client reacquires locks that the server has dropped: parameter ``recover_lost_locks``."""
    return _proc_text("/sys/module/nfs/parameters/recover_lost_locks").upper() in ("Y", "1")


FLOCK_STRUCT: Final = struct.Struct("hhqqi4x")
"""``struct flock`` with 64-bit offsets (fcntl(2)): kind, whence, start, length, pid."""


def has_ofd_locks() -> bool:
    """Return whether this platform has open-file-description locks (fcntl(2), Linux 3.15).

    Another system may have constants of these names, but `FLOCK_STRUCT` is that of Linux.
    """
    return sys.platform == "linux" and hasattr(fcntl, "F_OFD_SETLK")


def has_inotify() -> bool:
    """Return whether inotify(7) can be used, which needs Linux and real files."""
    return sys.platform == "linux" and not is_fake_fs()


def platform() -> str:
    """Return `sys.platform`."""
    return sys.platform


def import_path() -> str:
    """Return the ``PYTHONPATH`` with which a new Python in any directory finds the modules that this one finds."""
    return os.pathsep.join([os.path.abspath(entry) for entry in sys.path if entry] or [""])


def make_private_directory() -> str:
    """Create a temporary directory that only this user can enter, and return its path."""
    import tempfile

    return tempfile.mkdtemp(prefix="fscoord-")


def unnamed_file(data: bytes) -> IO[bytes]:
    """Create a temporary file without a name, write `data` to it, and return it open at its beginning."""
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
    """Remove `directory` and the files of the store in it, which is called ``store``, if this is process `owner`.

    Other users may be able to put another directory at that path. So no link is followed, and no other file is removed.

    Args:
        directory: the path of the directory.
        files: the `os` that made the directory, which may be a fake.
        owner: the id of the process that made the directory.
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
