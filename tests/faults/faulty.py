"""An `os` that fails as it is told, put under the whole package: every call that touches a file is counted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fscoord import _system as system

COUNTED = (
    "open", "read", "write", "fstat", "stat", "ftruncate", "fdatasync", "fsync", "link", "unlink", "chmod",
    "listdir", "pread", "pwrite", "utime",
)  # fmt: skip
"""What fscoord does to files, but for locks, which are not `os`, and close(2) and lseek(2), which no disk lets fail."""


class FaultyOs(ModuleType):
    """`os`, but for the calls that it is told to do otherwise.

    Attributes:
        calls: the name and first argument of every counted call so far.
    """

    def __init__(self) -> None:
        super().__init__("os")
        self.calls: list[tuple[str, Any]] = []
        self._instead: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any] | None = None
        for name in COUNTED:
            setattr(self, name, self._counted(name, getattr(os, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def _counted(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments[0] if arguments else None))
            if self._instead is not None:
                self._instead(name, real, arguments)
            return real(*arguments, **named)

        return call

    @contextmanager
    def instead(self, does: Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
        """Before each counted call, call ``does(name, real, arguments)``; what that raises, the call raises."""
        self._instead = does
        try:
            yield
        finally:
            self._instead = None

    @contextmanager
    def fail(
        self, number: int, error: int, *, names: tuple[str, ...] = COUNTED, for_good: bool = False
    ) -> Iterator[Any]:
        """Let the call of one of `names` with this number, counted from 0, fail, and all later ones if `for_good`.

        Yields a list that is empty as long as nothing has failed.
        """
        left = [number]
        failed: list[str] = []

        def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
            if name in names:
                left[0] -= 1
                if left[0] == -1 or (for_good and left[0] < 0):
                    failed.append(name)
                    raise OSError(error, os.strerror(error))

        with self.instead(does):
            yield failed


@contextmanager
def faulty_os() -> Iterator[FaultyOs]:
    """Put a `FaultyOs` under the package. What is open then, stays open: descriptors are the real ones."""
    faulty, real = FaultyOs(), system.os
    system.os = faulty  # type: ignore[assignment]
    try:
        yield faulty
    finally:
        system.os = real
