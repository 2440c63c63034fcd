"""Import what is rarely needed when it is needed: in a thread of its own, which no Ctrl-C reaches.

A KeyboardInterrupt in the middle of importlib may leave the lock of all imports taken for ever, and with it every
thread that imports anything: ``_get_module_lock`` takes it before its ``try`` begins.

A fork in the middle of an import leaves its lock to a thread that the child does not have, and half a module. So a
child abandons the imports that this module had under way, and begins them anew. Those of other threads are not ours to
judge; an import that has to wait for one of them fails in the child after `CHILD_LIMIT_S`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Final

from fscoord._runtime.forks import after_fork_in_child
from fscoord.errors import FscoordError

__all__ = ["import_uninterrupted", "raise_if_foreign", "raise_unless_absent"]

_OF_THE_INTERPRETER: Final = (
    "can't start new thread",
    "can't create new thread",
    "cannot release un-acquired lock",
    "concurrent poll() invocation",
    "release unlocked lock",
)
"""How the texts of those RuntimeErrors begin that the interpreter raises, and that are expected somewhere."""

_OF_A_LIST: Final = ("pop from empty list", "pop from an empty deque", "x not in list", "is not in deque")
"""How the texts of the errors of lists and deques end."""


def raise_if_foreign(error: BaseException) -> None:
    """Raise `error` again if neither the system nor the interpreter raised it.

    What the system raises as an `OSError` has an error number, and an `ImportError` of `import_uninterrupted` has
    the name of a module; what is raised by name has none. Every clause that catches one of these, or a `RuntimeError`,
    and does not raise it again by itself, calls this first.
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
    """Raise `error` again unless a list or a deque raised it, because it is empty or does not have what was looked for.

    Every clause that catches an `IndexError` of ``pop``, or a `ValueError` of ``remove``, calls this first.
    """
    if not str(error).endswith(_OF_A_LIST):
        raise error


LIMIT_S: Final = 60.0
"""How long an import may take. It is longer only if it waits for its caller: for what a signal handler has interrupted,
say, which was importing the same."""

CHILD_LIMIT_S: Final = 1.0
"""The same in a forked child whose parent's other threads were importing something."""

_Thread = threading.Thread  # a real one, whatever takes the place of `threading`
_importlib: Any = sys.modules["_frozen_importlib"]


class _Import:
    """The import of module `name`, made in a thread if there can be one."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.error: BaseException | None = None
        for daemon in (True, False):  # an isolated subinterpreter refuses the former
            try:
                self.thread = _Thread(target=self._run, name="fscoord-import", daemon=daemon)
                self.thread.start()
                return
            except RuntimeError:  # no thread is left, or this is a subinterpreter that allows none, or is about to end
                continue
        self.thread = threading.current_thread()
        self._run()

    def _run(self) -> None:
        me = threading.get_ident()
        _importing[me] = self.name
        try:
            __import__(self.name)
        except BaseException as error:  # noqa: BLE001 - whoever asked for it gets it
            self.error = error
        finally:
            _importing.pop(me, None)

    def wait(self, limit: float) -> None:
        """Return when it is over, or raise why it is not."""
        if self.thread is not threading.current_thread():
            self.thread.join(limit)
            if self.thread.is_alive():
                _late[self.name] = self.thread
                raise _unable(self.name, f"timeout: its import waits for another, and did not end within {limit:g} s")
            if isinstance(self.error, ImportError):  # no signal handler's, for it comes from a thread
                self.error.name = self.error.name or self.name
            elif self.error is not None and not isinstance(self.error, OSError):
                raise _unable(self.name, f"its import failed ({self.error!r})") from self.error
        if self.error is not None:
            raise self.error


def _unable(name: str, why: str) -> ImportError:
    return ImportError(f"{name}: {why}", name=name)


_importing: dict[int, str] = {}
"""What the threads of this module import, by their identity."""
_late: dict[str, threading.Thread] = {}
_limit_s = [LIMIT_S]


def import_uninterrupted(name: str) -> Any:
    """Return the module `name`.

    Raises:
        ImportError: there is no such module, or it raised something, or its import waits for one that does not end. The
            error has the name of a module, unlike one that a signal handler raises.
        OSError: no descriptor is left, say.
    """
    found = sys.modules.get(name)
    if found is None or getattr(found.__spec__, "_initializing", False):
        late = _late.get(name)
        if late is not None and late.is_alive():
            raise _unable(name, "its import has not ended yet; it waits for another one")
        if _owner(_locks().get(name)) == threading.get_ident():
            raise _unable(name, "this thread was importing it when a signal handler, or the module, called here")
        _Import(name).wait(_limit_s[0])
    return sys.modules[name]


def _after_fork_in_child() -> None:
    """Abandon what other threads were importing for us, and note whether they imported anything else."""
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
        elif owner is None:  # it was being taken, or given back
            locks.pop(name, None)
        elif owner != me:
            others = True
    blocking = getattr(_importlib, "_blocking_on", {})
    for thread_id in gone:
        if isinstance(blocking, dict):
            blocking.pop(thread_id, None)
        elif blocking is not None:  # since Python 3.12.2 it has lists, weakly
            (blocking.get(thread_id) or []).clear()
    _limit_s[0] = CHILD_LIMIT_S if others or not hasattr(_importlib, "_module_locks") else LIMIT_S


def _locks() -> dict[str, Callable[[], Any]]:
    """Return what leads to importlib's locks, by the name of the module: for each import that is under way, its own."""
    return getattr(_importlib, "_module_locks", {})


def _owner(reference: Callable[[], Any] | None) -> int | None:
    """Return the thread that has a lock of importlib, if any has."""
    return None if reference is None else getattr(reference(), "owner", None)


def _abandon(name: str) -> None:
    """Let module `name` be imported anew: its lock, and what there is of it, are of a thread that is gone."""
    _locks().pop(name, None)
    module = sys.modules.get(name)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        del sys.modules[name]


after_fork_in_child("imports", _after_fork_in_child)
