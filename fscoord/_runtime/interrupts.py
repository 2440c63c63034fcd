"""Ctrl-C safety: the rules that keep an interrupted operation whole, and the functions that implement them.

A signal handler runs in the main thread, at any point of the operation that this thread executes. The handler may raise
any exception: `KeyboardInterrupt`, a `TimeoutError` for SIGALRM, or an exception of the program. The exception ends the
operation. Afterwards every handle must still work, no lock may stay locked and no descriptor may be lost. The modules
of this package follow these rules and cite them as "the rules in `interrupts`".

CPython runs a handler at three kinds of points only: when the interpreter enters a Python function, after it has called
a C function, and at a jump backwards.

1. **A resource is created and recorded in one chain of C calls.** No handler runs inside a C function that calls other
   C functions, as in ``descriptors.update(map(os.open, ...))`` or `in_one_chain`. So an interruption comes before the
   descriptor exists, or after its owner has recorded it. With two statements, an interruption between them would lose
   the descriptor and every lock that belongs to it. Closing is the reverse, also in one chain: the number is removed
   from the record and then closed, because another thread may get the same number as soon as it is closed.
2. **A mutex is a bare lock in a ``with``.** The interpreter acquires the lock and enters the block without such a point
   between the two. `threading.Condition` and `threading.Event` are written in Python: an interruption inside them can
   leave their lock locked for ever.
3. **A ``finally`` that unlocks begins with a C function**, such as a bound method of a lock or a `functools.partial` of
   an `os` function. If the first call were a Python function, a handler could raise at its entry, before the lock is
   released. After a C function, the handler raises when the lock is free.
4. **A foreign exception passes through unchanged.** A clause that catches an `OSError`, an `ImportError` or a
   `RuntimeError` calls `raise_if_foreign` first. Otherwise a handler's `TimeoutError`, which is an `OSError`, would be
   retried, reported as a failure of the file system, or lost.
5. **A module that is rarely needed is imported in a thread of its own** (`import_uninterrupted`), because handlers run
   in the main thread only. A `KeyboardInterrupt` inside importlib can leave the lock of an import locked for ever,
   because ``_get_module_lock`` acquires the lock before its ``try`` begins. Then every thread that imports the same
   module hangs.

A fork during an import copies the lock of the import and a half-initialized module. It does not copy the thread that
would release the lock. So a forked child abandons the imports that this module had under way, and starts them again. It
does not change the imports of the program's own threads. If an import in the child waits for an import of the program,
it fails after `CHILD_LIMIT_S`. Every import fails in this way after a fork in C if a thread of the parent held the
interpreter's lock of all imports, which Python resets after `os.fork` only.
"""

from __future__ import annotations

import _imp
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from fscoord._runtime.forks import after_fork_in_child, process_epoch
from fscoord.errors import FscoordError

_OF_THE_INTERPRETER: Final = (
    "can't start new thread",
    "can't create new thread",
    "cannot release un-acquired lock",
    "concurrent poll() invocation",
    "release unlocked lock",
)
"""The beginnings of the messages of those RuntimeErrors that the interpreter raises and that the package expects."""

_OF_A_LIST: Final = ("pop from empty list", "pop from an empty deque", "x not in list", "is not in deque")
"""The ends of the messages of the errors that lists and deques raise."""

_OF_AN_EPOLL: Final = "I/O operation on closed epoll object"
"""The message of the error that each method of a closed epoll raises."""


def in_one_chain(*steps: functools.partial[Any]) -> list[Any]:
    """Call `steps`, which must be C functions, with no point between them at which a signal handler could run."""
    return list(map(functools.partial.__call__, steps))


def raise_if_foreign(error: BaseException) -> None:
    """Raise `error` again if neither the system nor the interpreter raised it: rule 4 above.

    An `OSError` of the system has an error number, and an `ImportError` of `import_uninterrupted` has the name of a
    module. The exceptions of a handler have neither. A clause must call this function first if it catches an `OSError`,
    an `ImportError` or a `RuntimeError`, and does not always raise it again.
    """
    if isinstance(error, FscoordError):
        return
    if isinstance(error, OSError) and error.errno is None:
        raise error
    if isinstance(error, ImportError) and error.name is None:
        raise error
    if isinstance(error, RuntimeError) and not str(error).startswith(_OF_THE_INTERPRETER):
        raise error


def raise_unless_absent(error: BaseException) -> None:
    """Raise `error` again unless a list or a deque raised it because an item was missing: rule 4 above.

    A clause that catches an `IndexError` of ``pop``, or a `ValueError` of ``remove``, must call this function first.
    """
    if not str(error).endswith(_OF_A_LIST):
        raise error


def raise_unless_closed(error: BaseException) -> None:
    """Raise `error` again unless it is an error of the system, or a closed epoll raised it: rule 4 above.

    A clause that catches a `ValueError` of an epoll must call this function first.
    """
    if isinstance(error, ValueError):
        if str(error) != _OF_AN_EPOLL:
            raise error
    else:
        raise_if_foreign(error)


LIMIT_S: Final = 60.0
"""The longest import, in seconds. An import takes longer only if it waits for its own caller. This happens when a
signal handler has interrupted an import of the same module."""

CHILD_LIMIT_S: Final = 1.0
"""The longest import in a forked child, if other threads of the parent were importing modules during the fork."""

_JOIN_S: Final = 1.0
"""The longest wait for the thread of an import, in seconds, until the waiting thread checks whether it was forked."""

_Thread = threading.Thread  # the real one, even if a test replaces `threading`
_importlib: Any = sys.modules["_frozen_importlib"]


class _Import:
    """The import of module `name`, in a thread of its own where a thread can be started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        self._owner = os.getpid()
        for daemon in (True, False):  # an isolated subinterpreter refuses daemon threads
            try:
                self.thread = _Thread(target=self._run, name="fscoord-import", daemon=daemon)
                self.thread.start()
                return
            except RuntimeError:  # a limit, a subinterpreter that allows no threads, or the process is ending
                continue
        self.thread = threading.current_thread()
        self._run()

    def _run(self) -> None:
        me = threading.get_ident()
        _importing[me] = self.name
        try:
            __import__(self.name)
        except BaseException as error:  # noqa: BLE001 - `wait` raises it in the calling thread
            self.error = error
        finally:
            _importing.pop(me, None)

    def wait(self, limit: float) -> bool:
        """Wait until the import has ended, and raise its error. After `limit` seconds, raise an `ImportError`.

        Returns:
            False in a child that a signal handler has forked meanwhile. The child does not have the thread.
        """
        if self.thread is not threading.current_thread():
            is_alive = True
            for _ in range(max(round(limit / _JOIN_S), 1)):  # after a fork in C, the join does not end early
                self.thread.join(min(limit, _JOIN_S))
                is_alive = self.thread.is_alive()
                if os.getpid() != self._owner:  # checked last: in the child of `os.fork` the thread counts as ended
                    process_epoch()  # after a fork in C, this call abandons the import
                    return False
                if not is_alive:
                    break
            if is_alive:
                _late[self.name] = self.thread
                raise _unable(self.name, f"timeout: after {limit:g} s its import still waits for another import")
            if isinstance(self.error, ImportError):  # not foreign: no handler runs in this thread
                self.error.name = self.error.name or self.name
            elif self.error is not None and not isinstance(self.error, OSError):
                raise _unable(self.name, f"its import failed ({self.error!r})") from self.error
        if self.error is not None:
            raise self.error
        return True


def _unable(name: str, why: str) -> ImportError:
    return ImportError(f"{name}: {why}", name=name)


_importing: dict[int, str] = {}
"""The name of the module that each thread of an `_Import` is importing, by the identity of the thread."""
_late: dict[str, threading.Thread] = {}
_limit_s = [LIMIT_S]


def import_uninterrupted(name: str) -> Any:
    """Import the module `name` in a thread of its own (rule 5 above), and return the module.

    Raises:
        ImportError: there is no such module, the module raised an exception, or its import waits for another import
            that does not end. The ``name`` of the error is set. An `ImportError` of a signal handler has no ``name``.
        OSError: the system refused a call, for example because no descriptor is left.
    """
    found = sys.modules.get(name)
    if found is None or getattr(found.__spec__, "_initializing", False):
        late = _late.get(name)
        if late is not None and late.is_alive():
            raise _unable(name, "an earlier import of it has not ended; it waits for another import")
        if _owner(_locks().get(name)) == threading.get_ident():
            raise _unable(
                name, "this thread is importing it already; a signal handler or the module itself began a second import"
            )
        while not _Import(name).wait(_limit_s[0]):
            pass  # in a forked child, which imports the module itself
    return sys.modules[name]


def _after_fork_in_child() -> None:
    """Abandon the imports of the `_Import` threads. If other threads were importing modules too, shorten the limit.

    The limit is also shortened if a thread that no longer exists holds the lock of all imports, after a fork in C.
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
    """Return, by the name of each module whose import is under way, a weak reference to importlib's lock for it."""
    return getattr(_importlib, "_module_locks", {})


def _owner(reference: Callable[[], Any] | None) -> int | None:
    """Return the identity of the thread that holds the lock of importlib at `reference`, or None."""
    return None if reference is None else getattr(reference(), "owner", None)


def _abandon(name: str) -> None:
    """Remove the lock and the half-initialized module `name`, so that the import can start again in the child."""
    _locks().pop(name, None)
    module = sys.modules.get(name)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        del sys.modules[name]


after_fork_in_child("imports", _after_fork_in_child)
