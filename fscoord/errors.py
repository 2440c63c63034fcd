"""Every exception that fscoord raises on purpose, in one tree.

The root is a `RuntimeError`, because callers of torch's c10d stores catch that; each leaf is also the
built-in exception that a reader of Python would expect (`TimeoutError`, `ValueError`, `OSError`...).
A message says what happened, to which path, and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = [
    "BarrierError",
    "BrokenBarrierError",
    "CorruptLogError",
    "FscoordError",
    "InsecurePathError",
    "LimitExceededError",
    "LockLostError",
    "NoProcessGroupError",
    "QueueEmptyError",
    "RendezvousClosedError",
    "RendezvousConnectionError",
    "RendezvousError",
    "RendezvousGracefulExit",
    "RendezvousStateError",
    "RendezvousTimeoutError",
    "SessionDeadError",
    "StaleRunError",
    "StaleTokenError",
    "StoreClosedError",
    "StoreError",
    "StoreGoneError",
    "StoreTimeoutError",
    "StoreUnavailableError",
    "UnsupportedFilesystemError",
    "WorkFailedError",
]


def missing_extra(user: str, module: str, extra: str) -> ImportError:
    """Return the error of `user` for a `module` that is not installed; its ``name`` is ``fscoord[extra]``."""
    name = f"fscoord[{extra}]"
    return ImportError(f"{user} needs {module}: install the extra, pip install '{name}'", name=name)


def _rebuild(cls: type[FscoordError], message: str, details: dict[str, Any]) -> FscoordError:
    # RuntimeError comes first in the order of bases, but its __new__ refuses what has an OSError's layout.
    error = OSError.__new__(cls, message) if issubclass(cls, OSError) else cls.__new__(cls, message)
    error.args = (message,)
    for name, value in details.items():
        setattr(error, name, value)
    return error


class FscoordError(RuntimeError):
    """The root of the tree: catch it to catch whatever fscoord raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Callable[..., FscoordError], tuple[Any, ...]]:
        details = dict(self.__dict__)
        if isinstance(self, OSError):
            details["errno"] = self.errno  # it is a slot of OSError
        return _rebuild, (type(self), str(self), details)


def _timeout_message(message: str) -> str:
    """Return `message` with the word "timeout" in it, which callers of torch's stores look for.

    That a path or a key in it may have the word is not enough. torch's own words for barriers have ``timeout=``.
    """
    return message if message.startswith("timeout") or "timeout=" in message else f"timeout: {message}"


class StoreTimeoutError(FscoordError, TimeoutError, LookupError):
    """A wait reached its deadline. The word "timeout" is in its message, which callers of torch's stores look for.

    Attributes:
        keys: the keys that were still missing, as text.
        missing_ranks: the ranks that had not arrived (a barrier's time-out), as the decoder names them.
        dead_ranks: the numbers, as text, of those of them that are known dead; the others are late.
        holder: who held the log lock at the end, as ``host:pid``, or None if the lock was not the reason.
        waited: the seconds waited.
    """

    def __init__(
        self,
        message: str,
        *,
        keys: Sequence[str] = (),
        missing_ranks: Sequence[str] = (),
        dead_ranks: Sequence[str] = (),
        holder: str | None = None,
        waited: float = 0.0,
    ) -> None:
        super().__init__(_timeout_message(message))
        self.keys = tuple(keys)
        self.missing_ranks = tuple(missing_ranks)
        self.dead_ranks = tuple(dead_ranks)
        self.holder = holder
        self.waited = waited


class StoreError(FscoordError):
    """A store could not do what it was asked.

    Attributes:
        path: the path of the store's log, or None for stores without one.
        maybe_applied: whether the failed write may have taken effect all the same.
    """

    def __init__(self, message: str, *, path: str | None = None, maybe_applied: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.maybe_applied = maybe_applied


class StoreClosedError(StoreError):
    """The handle was closed; open the store again."""


class StoreGoneError(StoreError):
    """The log was deleted, replaced or truncated under the handle, or is finished; open the store again."""


class SessionDeadError(StoreGoneError):
    """The store says that this handle's session is dead, and the others go on without it; open the store again.

    That happens to a process that was cut off from the others for long. The handle has written nothing since.
    """


class StaleRunError(StoreError):
    """The handle belongs to a run that a newer one has superseded."""


class StoreUnavailableError(StoreError, OSError):
    """The file system refused a call: no space, read-only, input/output error.

    Attributes:
        errno: the system's error number, also as ``__cause__``.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        maybe_applied: bool = False,
        errno: int | None = None,
    ) -> None:
        super().__init__(message, path=path, maybe_applied=maybe_applied)
        self.errno = errno


class CorruptLogError(StoreError):
    """The log holds bytes that no writer of fscoord leaves behind; nothing was repaired.

    Attributes:
        offset: where the damage begins, in bytes from the start of the file.
        reason: what is wrong there.
    """

    def __init__(self, message: str, *, path: str | None = None, offset: int, reason: str) -> None:
        super().__init__(message, path=path)
        self.offset = offset
        self.reason = reason


class QueueEmptyError(StoreError):
    """`queue_pop(block=False)` found nothing."""


class LimitExceededError(StoreError, ValueError):
    """A key, a value or a log is larger than the format allows; nothing was written."""


class InsecurePathError(StoreError, PermissionError):
    """The path is a symbolic link, no regular file, or open to users it should not be open to."""


class UnsupportedFilesystemError(StoreError, OSError):
    """The file system (or the platform) cannot do what the store needs, and nothing weaker is used instead."""


class BarrierError(FscoordError):
    """A barrier was used wrongly: too many arrivals, a finished key used again, a rank out of range."""


class NoProcessGroupError(BarrierError, AssertionError):
    """torch has no process group yet, whose barrier this was to be."""


class BrokenBarrierError(BarrierError):
    """A barrier can't complete any more, because ranks that it needs are dead.

    Attributes:
        missing: the ranks that had not arrived, as the decoder names them.
        dead: those of them that are known dead.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = (), dead: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing = tuple(missing)
        self.dead = tuple(dead)


class LockLostError(FscoordError):
    """A lock, or another hold on something, was taken away: its holder was taken for dead, or
    `fscoord.recipes.force_release` was called for it.
    """


class StaleTokenError(LockLostError):
    """A write was refused, because a newer fencing token than its own has been seen: its lock is another's by now."""


class WorkFailedError(FscoordError):
    """What one process did for all of them (`fscoord.recipes.once`) raised an exception there."""


class RendezvousError(FscoordError):
    """Nodes could not find each other, or could not agree on who takes part. (The names are those of torch.)"""


class RendezvousClosedError(RendezvousError):
    """The rendezvous has been closed: this job is over, or ending."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Too few nodes came in time. The word "timeout" is in its message, too."""

    def __init__(self, message: str) -> None:
        super().__init__(_timeout_message(message))


class RendezvousConnectionError(RendezvousError):
    """The store under the rendezvous failed; ``__cause__`` is its own error."""


class RendezvousStateError(RendezvousError):
    """The state in the store is damaged, or was written by something else."""


class RendezvousGracefulExit(RendezvousError):
    """This node was spare, and the rendezvous closed without having needed it: there is nothing left to do."""
