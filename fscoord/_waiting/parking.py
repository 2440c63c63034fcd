"""A wait as a generator of its sleeps: a thread sleeps through them itself, an event loop has others go on meanwhile.

The generator does all that a wait does but sleep; for that it yields what will wake it, and for how many seconds at
most. Code that does no waiting itself, and leaves that to whoever drives it, goes by the name "sans-I/O".
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, Protocol, TypeVar, cast

from fscoord._runtime import system

__all__ = ["THREADS", "Naps", "Sleepers", "Wake", "sleep_through"]

T = TypeVar("T")


class Wake(Protocol):
    """What ends a sleep early."""

    def set(self) -> bool:
        """Wake who sleeps, or will, from any thread; False if that was done already."""


Naps = Generator[tuple[Wake, float], None, T]
"""A wait that ends with a `T`."""


class Sleepers:
    """Who sleeps, and listens to events of the file system meanwhile: here threads, each by itself."""

    def new_wake(self) -> Wake:
        """Return what wakes one of them."""
        return system.AutoResetEvent()

    def listen(self, events: Any, heard: Callable[[], None]) -> bool:  # noqa: ARG002 - see there
        """Have `heard` called whenever `events` has something to read; False if whoever sleeps reads it by itself."""
        return False

    def give_back(self, events: Any) -> None:
        """Close `events`, which nobody listens to any more."""
        events.close()


THREADS: Final = Sleepers()


def sleep_through(naps: Naps[T]) -> T:
    """Return what `naps` ends with, sleeping in this thread."""
    try:
        while True:
            wake, seconds = next(naps)
            cast(system.AutoResetEvent, wake).wait(seconds)
    except StopIteration as end:
        return cast(T, end.value)
    finally:
        naps.close()  # at once: whoever keeps the error of an interrupted sleep keeps this frame
