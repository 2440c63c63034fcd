"""Ctrl-C safety: the rules that keep an interrupted operation whole, and the functions that implement them.

A signal handler runs in the main thread, in the middle of whatever that thread is doing, and may raise any exception:
`KeyboardInterrupt`, a `TimeoutError` for SIGALRM, one of the program's own. The exception leaves the operation that it
interrupts. Afterwards every handle must still work, no lock may stay locked and no descriptor may be lost. The modules
of this package follow these rules and cite them as "the rules in `interrupts`".

CPython runs a handler at three kinds of points only: when it enters a Python function, after it has called a C
function, and at a jump backwards.

1. **A resource is created and recorded in one chain of C calls.** No handler runs inside a C function that calls other
   C functions, as in ``descriptors.update(map(os.open, ...))`` or `in_one_chain`. The interruption comes before the
   descriptor exists, or after its owner has recorded it. With two statements, an interruption between them would lose
   the descriptor and every lock that belongs to it. Closing goes the other way round, also in one chain: a number is
   forgotten first, because another thread may get the same number as soon as it is closed.
2. **A mutex is a bare lock in a ``with``.** The interpreter acquires it and enters the block without a point between.
   `threading.Condition` and `threading.Event` are written in Python: an interruption inside them can leave their lock
   locked for ever.
3. **A ``finally`` that unlocks begins with a C function**, such as a bound method of a lock or a `functools.partial` of
   an `os` function. A handler that runs when a Python function is entered would raise before the unlocking. After a C
   function it raises when the lock is free.
4. **A foreign exception passes through unchanged.** A clause that catches an `OSError`, an `ImportError` or a
   `RuntimeError` calls `raise_if_foreign` first. Otherwise a handler's `TimeoutError`, which is an `OSError`, would be
   retried, reported as a failure of the file system, or lost.
5. **A module that is rarely needed is imported in a thread of its own** (`import_uninterrupted`), because handlers run
   in the main thread only. A `KeyboardInterrupt` inside importlib can leave the lock of an import locked for ever
   (``_get_module_lock`` takes it before its ``try`` begins), and then every thread that imports that module hangs.

A fork during an import copies the lock, but not the thread that would release it, and half of a module. So a forked
child abandons the imports that this module had under way and starts them again. It leaves the imports of the program's
own threads alone; an import that has to wait for one of those fails in the child after `CHILD_LIMIT_S`.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from fscoord._runtime.forks import after_fork_in_child
from fscoord.errors import FscoordError

__all__ = ["import_uninterrupted", "in_one_chain", "raise_if_foreign", "raise_unless_absent"]

_OF_THE_INTERPRETER: Final = (
    "can't start new thread",
    "can't create new thread",
    "cannot release un-acquired lock",
    "concurrent poll() invocation",
    "release unlocked lock",
)
"""Beginnings of the messages of the interpreter's own RuntimeErrors that the package expects somewhere."""

_OF_A_LIST: Final = ("pop from empty list", "pop from an empty deque", "x not in list", "is not in deque")
"""Ends of the messages of the errors that lists and deques raise."""


def in_one_chain(*steps: functools.partial[Any]) -> list[Any]:
    """Call `steps`, which must be C functions, with no point between them at which a signal handler could run."""
    return list(map(functools.partial.__call__, steps))


def raise_if_foreign(error: BaseException) -> None:
    """Raise `error` again if neither the system nor the interpreter raised it: rule 4 above.

    An `OSError` of the system has an error number, and an `ImportError` of `import_uninterrupted` has the name of a
    module. Those that a handler raises have neither. Every clause that catches one of these, or a `RuntimeError`, and
    does not raise it again in any case, calls this first.
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
    """Raise `error` again unless a list or a deque raised it, for lack of an item: rule 4 above.

    Every clause that catches an `IndexError` of ``pop``, or a `ValueError` of ``remove``, calls this first.
    """
    if not str(error).endswith(_OF_A_LIST):
        raise error


LIMIT_S: Final = 60.0
"""How long an import may take. It takes longer only if it waits for its own caller, as when a signal handler has
interrupted an import of the same module."""

CHILD_LIMIT_S: Final = 1.0
"""The same limit in a forked child, if other threads of its parent were importing something."""

_Thread = threading.Thread  # the real one, even if a test replaces `threading`
_importlib: Any = sys.modules["_frozen_importlib"]


class _Import:
    """The import of module `name`, in a thread of its own where a thread can be started."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
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

    def wait(self, limit: float) -> None:
        """Wait until the import has ended; raise its error, or an `ImportError` after `limit` seconds."""
        if self.thread is not threading.current_thread():
            self.thread.join(limit)
            if self.thread.is_alive():
                _late[self.name] = self.thread
                raise _unable(self.name, f"timeout: its import waits for another import, after {limit:g} s still")
            if isinstance(self.error, ImportError):  # not foreign: no handler runs in this thread
                self.error.name = self.error.name or self.name
            elif self.error is not None and not isinstance(self.error, OSError):
                raise _unable(self.name, f"its import failed ({self.error!r})") from self.error
        if self.error is not None:
            raise self.error


def _unable(name: str, why: str) -> ImportError:
    return ImportError(f"{name}: {why}", name=name)


_importing: dict[int, str] = {}
"""The module that each thread of this module imports, by thread identity."""
_late: dict[str, threading.Thread] = {}
_limit_s = [LIMIT_S]


def import_uninterrupted(name: str) -> Any:
    """Return the module `name`, imported in a thread of its own: rule 5 above.

    Raises:
        ImportError: there is no such module, or it raised an exception, or its import waits for another import that
            does not end. The error's ``name`` is set, unlike that of an error from a signal handler.
        OSError: the system refused a call, for example because no descriptor is left.
    """
    found = sys.modules.get(name)
    if found is None or getattr(found.__spec__, "_initializing", False):
        late = _late.get(name)
        if late is not None and late.is_alive():
            raise _unable(name, "an earlier import of it has not ended; it waits for another import")
        if _owner(_locks().get(name)) == threading.get_ident():
            raise _unable(name, "this thread is importing it already; a signal handler, or the module, asked for it")
        _Import(name).wait(_limit_s[0])
    return sys.modules[name]


def _after_fork_in_child() -> None:
    """Abandon the imports of this module's threads. If other threads were importing as well, shorten the limit."""
    me = threading.get_ident()
    gone = _importing.keys() - {me}
    _importing.clear()
    _late.clear()
    others = False
    locks = _locks()
    for name, reference in list(locks.items()):
        owner = _owner(reference)
        if owner in gone:
            _abandon(name)
        elif owner is None:  # it was being acquired or released
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
    """Return weak references to importlib's locks, one for each import under way, by the name of the module."""
    return getattr(_importlib, "_module_locks", {})


def _owner(reference: Callable[[], Any] | None) -> int | None:
    """Return the identity of the thread that holds this lock of importlib, or None."""
    return None if reference is None else getattr(reference(), "owner", None)


def _abandon(name: str) -> None:
    """Remove the lock and the half-made module that a thread of the parent left, so that the import can start again."""
    _locks().pop(name, None)
    module = sys.modules.get(name)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        del sys.modules[name]


after_fork_in_child("imports", _after_fork_in_child)
