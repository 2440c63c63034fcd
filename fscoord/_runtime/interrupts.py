"""Ctrl-C safety: rules for code that a signal handler may interrupt, and the functions that implement the rules.

A signal handler runs in the main thread, at any point of the operation that this thread executes. The handler may raise
any exception: `KeyboardInterrupt`, a `TimeoutError` for SIGALRM, or an exception of the program. The exception ends the
operation. Afterwards every handle must still work, no lock may stay locked and no descriptor may be lost. The modules
of this package follow these rules and cite them as "the rules in `interrupts`".

CPython runs a handler at three kinds of points only: when the interpreter enters a Python function, after it has called
a C function, and at a jump backwards.

1. **A resource is created and recorded in one chain of C calls.** No handler runs inside a C function that calls other
   C functions, as in ``descriptors.update(map(os.open, ...))`` or `in_one_chain`. So an interruption comes before the
   descriptor exists, or after its owner has recorded it. With two statements, an interruption between them would lose
   the descriptor and every lock that belongs to it. Closing is also one chain: the number is first removed from the
   record and then closed, because another thread may get the same number as soon as the descriptor is closed.
2. **A mutex is made by `system.mutex` or `system.recursive_mutex`, and held in a ``with``.** No handler can run between
   the moment when the interpreter acquires the mutex and the moment when it enters the block. A bare lock has this
   property up to Python 3.13 only (`mutexes`). `threading.Condition` and `threading.Event` are written in Python: an
   interruption inside them can leave their lock locked for ever.
3. **A ``finally`` that unlocks begins with a C function**, such as a bound method of a lock or a `partial` of
   an `os` function. If the first call were a Python function, a handler could raise at its entry, before the lock is
   released. After a C function, the handler raises when the lock is free.
4. **A foreign exception passes through unchanged.** A clause that catches an `OSError`, an `ImportError` or a
   `RuntimeError` calls `raise_if_foreign` first. A clause that drops the error uses `ignoring` instead. Otherwise a
   handler's `TimeoutError`, which is an `OSError`, would be retried, reported as a failure of the file system, or lost.
5. **Python code that must not be interrupted runs in a bare thread** (`BareCall`), because handlers run in the main
   thread only. For example, a `KeyboardInterrupt` inside importlib can leave the lock of a module locked for ever.
   Then every thread that imports the same module hangs. An exception inside `threading.Thread.start` can make the new
   thread end with a `KeyError` before its work begins. So `import_uninterrupted` imports every module that is rarely
   needed, and `start_thread` starts every thread.

A fork during an import copies the lock of the import and a half-initialized module. The fork does not copy the thread
that would release the lock. So a forked child abandons the unfinished imports of this module, and starts them again.
The child does not abandon the imports of the program's own threads. An import in the child that waits for such an
import fails after `CHILD_LIMIT_S` seconds. After a fork by C code, every import in the child may fail in this way,
because the interpreter's global import lock may be locked: Python resets this lock only after `os.fork`.
"""

from __future__ import annotations

import _imp
import _thread
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Final, Generic, TypeVar

from fscoord._runtime.forks import after_fork_in_child, process_epoch
from fscoord.errors import FscoordError

T = TypeVar("T")

_OF_AN_EPOLL: Final = "I/O operation on closed epoll object"
"""The message of the `ValueError` that a method of a closed epoll raises."""


def in_one_chain(*steps: partial[Any]) -> list[Any]:
    """Call `steps`, which must be C functions. No signal handler runs between two steps. Return the list of results."""
    return list(map(partial.__call__, steps))


def raise_if_foreign(error: BaseException, *libraries: str) -> None:
    """Raise `error` again if a signal handler of the program raised it (rule 4 in `interrupts`).

    An ``except`` clause that catches an `OSError`, an `ImportError` or a `RuntimeError` must call this function first,
    unless the clause always raises the error again. The function recognises an exception of a handler as follows. An
    `OSError` has no error number. An `ImportError` has no name of a module. The traceback of a `RuntimeError` has a
    function outside of this package and of `libraries`.

    Args:
        error: the exception.
        libraries: names of modules of other packages whose `RuntimeError` the clause expects.
    """
    if isinstance(error, FscoordError):
        return
    if isinstance(error, OSError) and error.errno is None:
        raise error
    if isinstance(error, ImportError) and error.name is None:
        raise error
    if isinstance(error, RecursionError):
        raise error
    if isinstance(error, RuntimeError) and not _passed_only(error.__traceback__, __name__, *libraries):
        raise error


class ignoring:  # noqa: N801 - used like `contextlib.suppress`
    """Context manager that ignores errors of `kinds`, except the errors of signal handlers (rule 4 in `interrupts`).

    Don't use this class in the first statement of a ``finally``: the ``with`` begins with a Python function (rule 3).
    """

    def __init__(self, *kinds: type[Exception]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        if not isinstance(error, self._kinds):
            return False
        raise_if_foreign(error)
        return True


def _passed_only(traceback: TracebackType | None, *modules: str) -> bool:
    """Return whether all Python functions in `traceback` belong to the packages of `modules`."""
    packages = {name.partition(".")[0] for name in modules}
    while traceback is not None:
        if str(traceback.tb_frame.f_globals.get("__name__")).partition(".")[0] not in packages:
            return False
        traceback = traceback.tb_next
    return True


def raise_unless_absent(error: BaseException) -> None:
    """Raise `error` again unless a list or a deque raised it for a missing item (rule 4 in `interrupts`).

    An ``except`` clause that expects an `IndexError` from ``pop``, or a `ValueError` from ``remove``, must call this
    function first. The function does not compare messages, because they differ between versions of Python. It
    recognises an exception of a handler by the traceback, which has the handler's function. An exception that one
    thread raises in another by ``PyThreadState_SetAsyncExc`` has no arguments.
    """
    if not error.args or not _passed_only(error.__traceback__, __name__):
        raise error


def raise_unless_closed(error: BaseException) -> None:
    """Raise `error` again unless a system call or a closed epoll raised it (rule 4 in `interrupts`).

    An ``except`` clause that expects a `ValueError` from an epoll must call this function first.
    """
    if isinstance(error, ValueError):
        if str(error) != _OF_AN_EPOLL:
            raise error
    else:
        raise_if_foreign(error)


LIMIT_S: Final = 60.0
"""The time limit of an import, in seconds. A longer import counts as a deadlock: a signal handler has interrupted an
import, and now waits for an import of the same module."""

CHILD_LIMIT_S: Final = 1.0
"""The time limit of an import in a forked child, in seconds, if other threads of the parent were importing modules
during the fork."""

_LOOK_S: Final = 0.05
"""The interval, in seconds, at which a thread that waits for a `BareCall` checks whether the process was forked."""

_objects_of_threads: dict[int, threading.Thread] = vars(threading)["_active"]
_importlib: Any = sys.modules["_frozen_importlib"]


class HelperThread(threading.Thread):  # the real `Thread`, even if a test replaces `threading`
    """The class of all threads that this package starts, as opposed to the threads of the program."""


class BareCall(Generic[T]):
    """Calls `work` in a new thread, where no signal handler can interrupt the call (rule 5 in `interrupts`).

    Attributes:
        refusal: the error of the interpreter if the thread can't be started. Then `work` is not called.
        result: the result of the call, if it has returned.
        error: the exception of the call, if it has raised one.
        is_over: whether the call has ended.
    """

    result: T
    error: BaseException | None = None
    refusal: RuntimeError | None = None

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._owner = os.getpid()
        self.is_over = False
        # Look up both names now, and not when this module is imported: gevent or eventlet may have replaced them.
        self._end = _thread.allocate_lock()
        self._end.acquire()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:  # a limit, a subinterpreter that allows no threads, or the process is ending
            raise_if_foreign(error)
            self.refusal = error

    def _run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self.error = error
        finally:
            # Up to Python 3.12, `threading` never forgets the object that `current_thread` creates for a bare thread.
            _objects_of_threads.pop(threading.get_ident(), None)
            self.is_over = True
            self._end.release()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the call to end; return whether it has ended."""
        while not (self.is_over or self.is_lost) and seconds > 0:
            if self._end.acquire(timeout=min(seconds, _LOOK_S)):
                self._end.release()
            seconds -= _LOOK_S
        return self.is_over

    @property
    def is_lost(self) -> bool:
        """Whether this process is a forked child, so that the thread exists only in the parent."""
        return not self.is_over and os.getpid() != self._owner


def start_thread(name: str, call: Callable[..., object], *arguments: Any) -> threading.Thread | RuntimeError:
    """Start a daemon thread named `name` that calls `call`. Return the thread, or the error if it can't be started.

    The error is returned, not raised, so that the caller can't confuse it with an exception of a signal handler.
    """

    def start() -> threading.Thread:
        thread = HelperThread(target=call, args=arguments, name=name, daemon=True)
        thread.start()
        return thread

    while True:
        started = BareCall(start)
        if started.refusal is not None:
            return started.refusal
        if started.wait(threading.TIMEOUT_MAX):
            if isinstance(started.error, RuntimeError):
                return started.error
            if started.error is not None:
                raise started.error
            return started.result


def _import(name: str) -> None:
    me = threading.get_ident()
    _importing[me] = name
    try:
        __import__(name)
    finally:
        _importing.pop(me, None)


def _raise_as_import_error(error: BaseException, name: str) -> None:
    """Raise `error`, which the import of module `name` has raised, as an `ImportError` with a name or an `OSError`."""
    if isinstance(error, ImportError):
        error.name = error.name or name
    elif not isinstance(error, OSError):
        raise _unable(name, f"its import failed ({error!r})") from error
    raise error


def _unable(name: str, why: str) -> ImportError:
    return ImportError(f"{name}: {why}", name=name)


_importing: dict[int, str] = {}
"""{thread identity: name of the module} for the threads of `import_uninterrupted`."""
_late: dict[str, BareCall[None]] = {}
_limit_s = [LIMIT_S]


def import_uninterrupted(name: str) -> Any:
    """Import the module `name` in a new thread (rule 5 in `interrupts`), and return the module.

    Raises:
        ImportError: there is no such module, the module raised an exception, or its import waits for another import
            that does not end. The attribute ``name`` of the error is set. An error that a signal handler raises has no
            ``name``.
        OSError: a system call failed, for example because no descriptor is left.
    """
    found = sys.modules.get(name)
    if found is None or getattr(found.__spec__, "_initializing", False):
        late = _late.get(name)
        if late is not None and not late.is_over:
            raise _unable(
                name,
                "an earlier import of this module still waits for another import; import it when the program starts",
            )
        if _owner(_locks().get(name)) == threading.get_ident():
            raise _unable(
                name,
                "this thread already imports this module; a signal handler or the module itself began a second import",
            )
        call = BareCall(partial(_import, name))
        while call.refusal is None and not call.wait(_limit_s[0]):
            if not call.is_lost:
                _late[name] = call
                raise _unable(
                    name,
                    f"timeout: after {_limit_s[0]:g} s its import still waits for another import; import it when the"
                    " program starts",
                )
            process_epoch()  # after a fork in C, this call abandons the import
            call = BareCall(partial(_import, name))
        if call.refusal is not None:
            _import(name)
        elif call.error is not None:
            _raise_as_import_error(call.error, name)
    return sys.modules[name]


def _after_fork_in_child() -> None:
    """Abandon the unfinished imports of `import_uninterrupted` in a forked child.

    Shorten the time limit of imports if another thread of the parent was importing a module or held the global import
    lock. An import in the child may wait for ever for that thread, which the child does not have.
    """
    me = threading.get_ident()
    gone = _importing.keys() - {me}
    _importing.clear()
    _late.clear()
    others = _imp.lock_held()
    locks = _locks()
    for name, reference in list(locks.items()):
        owner = _owner(reference)
        if owner in gone:
            _abandon(name)
        elif owner is None:  # a thread was acquiring or releasing the lock
            locks.pop(name, None)
        elif owner != me:
            others = True
    blocking = getattr(_importlib, "_blocking_on", {})
    for thread_id in gone:
        if isinstance(blocking, dict):
            blocking.pop(thread_id, None)
        elif blocking is not None:  # lists in a weak dictionary since Python 3.12.2
            (blocking.get(thread_id) or []).clear()
    _limit_s[0] = CHILD_LIMIT_S if others or not hasattr(_importlib, "_module_locks") else LIMIT_S


def _locks() -> dict[str, Callable[[], Any]]:
    """Return importlib's locks of unfinished imports: {name of the module: weak reference to its lock}."""
    return getattr(_importlib, "_module_locks", {})


def _owner(reference: Callable[[], Any] | None) -> int | None:
    """Return the identity of the thread that holds the lock of `reference`, or None."""
    return None if reference is None else getattr(reference(), "owner", None)


def _abandon(name: str) -> None:
    """Remove the lock and the half-initialized module `name`, so that the import can start again in the child."""
    _locks().pop(name, None)
    module = sys.modules.get(name)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        del sys.modules[name]


after_fork_in_child("imports", _after_fork_in_child)
