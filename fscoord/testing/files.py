"""`FaultyFiles`: files and locks that fail as they are told, under every `~fscoord.FileStore` of this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, Final

from fscoord._runtime import system
from fscoord.testing._plan import Fault, Plan, counted

__all__ = ["FaultyFiles"]

CALLS: Final = (
    "open", "read", "write", "pread", "pwrite", "fstat", "stat", "ftruncate", "fdatasync", "fsync", "link", "unlink",
)  # fmt: skip
LOCK: Final = "lock"


class FaultyFiles:
    """A context manager in which the files of stores fail as they are told; your own files do not.

    Each of `fails`, `delays` and `tears_writes` is one, too, and gives the list of the calls that it has hit so far.
    They take the names of system calls (``"write"``, ``"read"``, ``"fstat"``, ``"fdatasync"``... and ``"lock"``, which
    is any attempt at a lock), ``after``, how many of them pass before, and ``times``, how many are hit then (None:
    all)::

        with FaultyFiles() as files, FileStore(path) as store:
            with files.fails("write", error=errno.ENOSPC, times=1):
                work(store)

    Open the store inside: it keeps the lock calls that it was opened with. Locks fail with the kind ``"ofd"``, which is
    the default. It is for the whole process, threads included, and not for pyfakefs.
    """

    def __init__(self) -> None:
        self._plan = Plan()
        self._real: tuple[Any, Any] | None = None

    def __enter__(self) -> FaultyFiles:
        if isinstance(system.os, _StandIn) or system.is_fake_fs() or system.fcntl is None:
            raise RuntimeError(
                "FaultyFiles needs the real files: it is in force already, or pyfakefs is, or has no locks"
            )
        self._real = system.os, system.fcntl
        system.os = _StandIn(system.os, {name: self._faulty(name) for name in CALLS})
        system.fcntl = _StandIn(system.fcntl, {"fcntl": self._lock})
        return self

    def __exit__(self, *_: object) -> None:
        if self._real is not None:
            system.os, system.fcntl = self._real
            self._real = None

    def fails(
        self, *calls: str, error: int = system.errno.EIO, after: int = 0, times: int | None = None
    ) -> AbstractContextManager[list[str]]:
        """Have calls fail with the error number `error`, such as ``errno.ESTALE``; nothing has been done then."""
        return self._having(calls, Fault("failure", error), after, times)

    def delays(
        self, *calls: str, seconds: float, after: int = 0, times: int | None = None
    ) -> AbstractContextManager[list[str]]:
        """Have calls sleep so many seconds before they begin."""
        return self._having(calls, Fault("delay", seconds), after, times)

    def tears_writes(
        self, keep: int, *, error: int = system.errno.ENOSPC, after: int = 0, times: int | None = None
    ) -> AbstractContextManager[list[str]]:
        """Have a write bring its first `keep` bytes into the file, but not its last one, and then fail with `error`."""
        return self._having(("write",), Fault("torn", (keep, error)), after, times)

    def _having(
        self, calls: tuple[str, ...], fault: Fault, after: int, times: int | None
    ) -> AbstractContextManager[list[str]]:
        known = (*CALLS, LOCK)
        unknown = sorted(set(calls) - set(known))
        if unknown or not calls:
            raise ValueError(f"no such call: {', '.join(unknown) or '(none given)'}; there are {', '.join(known)}")
        return self._plan.having(counted(calls, fault, after, times))

    def _faulty(self, name: str) -> Callable[..., Any]:
        real = getattr(system.os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            for fault in self._plan.faults(name):
                if fault.kind == "torn":
                    keep, number = fault.detail
                    data = bytes(arguments[1])
                    real(arguments[0], data[: min(keep, len(data) - 1)])
                    raise _error(number)
                _suffer(fault)
            return real(*arguments, **named)

        return call

    def _lock(self, fd: int, command: int, argument: Any = 0) -> Any:
        real = (self._real or (None, system.fcntl))[1]
        if command in (getattr(real, "F_OFD_SETLK", None), getattr(real, "F_OFD_SETLKW", None)):
            kind = int.from_bytes(
                bytes(argument)[:2], sys.byteorder
            )  # fcntl(2): struct flock begins with l_type, a short
            if kind != real.F_UNLCK:
                for fault in self._plan.faults(LOCK):
                    _suffer(fault)
        return real.fcntl(fd, command, argument)


class _StandIn(ModuleType):
    """A module, but for some of its functions."""

    def __init__(self, real: Any, instead: dict[str, Callable[..., Any]]) -> None:
        super().__init__(real.__name__)
        self._real = real
        for name, call in instead.items():
            setattr(self, name, call)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _suffer(fault: Fault) -> None:
    if fault.kind == "failure":
        raise _error(fault.detail)
    system.time.sleep(fault.detail)


def _error(number: int) -> OSError:
    return OSError(number, system.os.strerror(number))
