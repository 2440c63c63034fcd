"""The exceptions of fscoord, in one tree.

The root `FscoordError` is a `RuntimeError`, because callers of torch's c10d stores catch `RuntimeError`. Many classes
also inherit from another built-in exception (`TimeoutError`, `ValueError`, `OSError`...). A message says what happened,
to which path or key, and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fscoord._runtime.escaping import encodable

__all__ = [
    "AcquireCancelledError",
    "BarrierError",
    "BrokenBarrierError",
    "CompactedError",
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
    "UsedBeforeError",
    "WorkFailedError",
]


@contextmanager
def needed_extra(user: str, module: str, extra: str) -> Iterator[None]:
    """Context manager around an import of `module`. If the import fails, the error says that `user` needs `extra`.

    The ``name`` of the error is ``fscoord[extra]``.
    """
    try:
        yield
    except ImportError as error:
        name = f"fscoord[{extra}]"
        raise ImportError(f"{user} needs {module}: install the extra, pip install '{name}'", name=name) from error


def _rebuild(cls: type[FscoordError], message: str, details: dict[str, Any]) -> FscoordError:
    # RuntimeError is the first base, but its __new__ rejects a class with the layout of OSError.
    error = OSError.__new__(cls, message) if issubclass(cls, OSError) else cls.__new__(cls, message)
    error.args = (message,)
    for name, value in details.items():
        setattr(error, name, value)
    return error


class FscoordError(RuntimeError):
    r"""The base of all exceptions of fscoord.

    The message can be printed: a byte of a path that is not UTF-8 is ``\xNN`` in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(encodable(message))

    _own_class: type[FscoordError] | None = None
    """The class of fscoord from which `joined` has derived this class. None in a class that `joined` has not created.
    """

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Callable[..., FscoordError], tuple[Any, ...]]:
        return _rebuild, (self._own_class or type(self), str(self), _details(self))


def _details(error: FscoordError) -> dict[str, Any]:
    details = dict(error.__dict__)
    if isinstance(error, OSError):
        details["errno"] = error.errno  # a slot of OSError, not in __dict__
    return details


_joined_classes: dict[tuple[type[FscoordError], type[Exception]], type[FscoordError]] = {}


def joined(error: FscoordError, theirs: type[Exception]) -> FscoordError:
    """Return a copy of `error` whose class also inherits from `theirs`, an exception class of another package.

    pickle can't find the new class by name, so an unpickled copy of the result has the class of `error`.
    """
    ours = error._own_class or type(error)
    names = {"__module__": ours.__module__, "__qualname__": ours.__qualname__, "_own_class": ours}
    cls = _joined_classes.setdefault((ours, theirs), type(ours.__name__, (ours, theirs), names))
    return _rebuild(cls, str(error), _details(error))


def _timeout_message(message: str) -> str:
    """Prepend "timeout: " to `message`, unless it begins with "timeout" or contains "timeout=".

    Callers of torch's stores search messages for "timeout". Other occurrences of the word don't count, because they may
    be part of a path or a key.
    """
    return message if message.startswith("timeout") or "timeout=" in message else f"timeout: {message}"


class StoreTimeoutError(FscoordError, TimeoutError, LookupError):
    """A wait reached its deadline. The message contains "timeout", because callers of torch's stores search for it.

    Attributes:
        keys: the keys that were still missing, as text.
        missing_ranks: the ranks that had not arrived at a barrier, as text (see the decoder of `fscoord.barrier`).
        dead_ranks: the missing ranks that are known dead, as text. The other missing ranks are late.
        holder: the process that held the log lock at the deadline, as ``host:pid``. None: the lock was not the reason.
        waited: the time waited, in seconds.
        maybe_applied: whether a write that timed out may still take effect. The attribute is always False unless
            several hosts share the log. On such a log one process of a host writes for the other processes of the host.
            This writer may stall.
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
        self.keys: tuple[str, ...] = tuple(keys)
        self.missing_ranks: tuple[str, ...] = tuple(missing_ranks)
        self.dead_ranks: tuple[str, ...] = tuple(dead_ranks)
        self.holder = holder
        self.waited = waited
        self.maybe_applied = False


class StoreError(FscoordError):
    """An operation of a store failed.

    Attributes:
        path: the path of the store's log, or None for stores without one.
        maybe_applied: whether the failed write may have taken effect.
    """

    def __init__(self, message: str, *, path: str | None = None, maybe_applied: bool = False) -> None:
        super().__init__(message)
        self.path = path
        self.maybe_applied = maybe_applied


class StoreClosedError(StoreError):
    """The handle has been closed; open the store again."""


class StoreGoneError(StoreError):
    """The log was deleted, replaced, truncated, or finished by its last participant; open the store again."""


class SessionDeadError(StoreGoneError):
    """The store has recorded this handle's session as dead; open the store again.

    The usual cause is that the process was stopped, or cut off from the other processes, for a long time. The handle
    has written nothing since its session was recorded as dead.
    """


class StaleRunError(StoreError):
    """The handle belongs to a run that a newer run has superseded."""


class StoreUnavailableError(StoreError, OSError):
    """A system call failed: no space, read-only file system, input/output error.

    Attributes:
        errno: the system's error number, as in the `OSError` that is the ``__cause__``.
    """

    def __init__(
        self, message: str, *, path: str | None = None, maybe_applied: bool = False, errno: int | None = None
    ) -> None:
        super().__init__(message, path=path, maybe_applied=maybe_applied)
        self.errno = errno


class CorruptLogError(StoreError):
    """The log contains bytes that fscoord never writes; nothing was repaired.

    Attributes:
        offset: the beginning of the damage, in bytes from the start of the file.
        reason: the kind of the damage, as a clause.
    """

    def __init__(self, message: str, *, path: str | None = None, offset: int, reason: str) -> None:
        super().__init__(message, path=path)
        self.offset = offset
        self.reason = reason


class CompactedError(StoreError):
    """The store does not have all changes after a position any more, because a compaction has removed them.

    Attributes:
        position: a position after which the store has all changes. Read the keys, and then watch after this position.
    """

    def __init__(self, message: str, *, path: str | None = None, position: Any = None) -> None:
        super().__init__(message, path=path)
        self.position = position


class QueueEmptyError(StoreError):
    """`Store.queue_pop` with ``block=False`` was called on an empty queue."""


class LimitExceededError(StoreError, ValueError):
    """A key, a value or a log would exceed a limit of the format; nothing was written."""


class InsecurePathError(StoreError, PermissionError):
    """The path is a symbolic link or not a regular file, or its owner or its permissions are not safe."""


class UnsupportedFilesystemError(StoreError, OSError):
    """The file system or platform lacks a feature that the store needs."""


class BarrierError(FscoordError):
    """Wrong use of a barrier: too many arrivals, a finished key used again, a rank out of range."""


class UsedBeforeError(BarrierError):
    """The key of a barrier or an exchange, or the rank of a participant, was used before.

    The usual cause is a second run of a program on the same store.
    """


class NoProcessGroupError(BarrierError, AssertionError):
    """The barrier needs torch's default process group, which has not been initialized."""


class BrokenBarrierError(BarrierError):
    """A barrier cannot complete, because ranks that had not arrived are dead; or a `recipes.CyclicBarrier` is broken.

    Attributes:
        missing: the ranks that had not arrived, as text (see the decoder of `fscoord.barrier`).
        dead: the missing ranks that are known dead, as text.
    """

    def __init__(self, message: str, *, missing: Sequence[str] = (), dead: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.missing: tuple[str, ...] = tuple(missing)
        self.dead: tuple[str, ...] = tuple(dead)


class LockLostError(FscoordError):
    """A lock or a similar claim was lost: its holder was declared dead, or `recipes.force_release` released it."""


class AcquireCancelledError(FscoordError):
    """Another thread or task of this process called ``cancel`` while an acquisition waited. Nothing is held."""


class StaleTokenError(LockLostError):
    """A write was refused because the value has a newer fencing token: another process has acquired the lock since."""


class WorkFailedError(FscoordError):
    """One process did the work for the others, and the work raised an exception, or the process died before the end.

    `fscoord.recipes.once` and `fscoord.recipes.RankZeroFirst` raise this error in the other processes. Only
    `RankZeroFirst` raises it after a death. `fscoord.recipes.Queue.result` raises it for an item that ended without a
    result.
    """


class RendezvousError(FscoordError):
    """A rendezvous failed: nodes did not find each other or did not agree. Subclasses are named as in torch."""


class RendezvousClosedError(RendezvousError):
    """The rendezvous has been closed, because the job has ended or is ending."""


class RendezvousTimeoutError(RendezvousError, TimeoutError):
    """Too few nodes joined in time. The message contains "timeout"."""

    def __init__(self, message: str) -> None:
        super().__init__(_timeout_message(message))


class RendezvousConnectionError(RendezvousError):
    """The store of the rendezvous failed; ``__cause__`` is the store's error."""


class RendezvousStateError(RendezvousError):
    """The state of the rendezvous in the store is damaged, or another program wrote it."""


class RendezvousGracefulExit(RendezvousError):
    """The rendezvous closed while this node waited as a spare, to replace a node of the job. The node can exit."""
