"""Tell the errors of the system from those that a signal handler raised in the middle of an operation.

A handler may raise what it likes, and `TimeoutError`, the usual choice for SIGALRM, is an `OSError`. It must pass
through unchanged: taken for the system's, it would be retried, reported as a broken file system, or lost.
"""

from __future__ import annotations

from typing import Final

from fscoord.errors import FscoordError

__all__ = ["raise_if_foreign", "raise_unless_absent"]

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

    What the system raises as an `OSError` has an error number, and what `_imports.load` raises as an `ImportError` has
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
