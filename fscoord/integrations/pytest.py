"""What the workers of one pytest run have in common: a store, and work that is done once and torn down at the end.

The plugin itself is `pytest_fscoord`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from fscoord._runtime import system
from fscoord.arguments import Timeout, Value
from fscoord.recipes import Lock, once
from fscoord.stores.file import FileStore

__all__ = ["Once", "Run"]

WORKERS: Final = "fscoord/workers"
WORK_S: Final = 300.0
"""How long to wait for another worker that sets up, or tears down."""
UNTOLD_S: Final = 10.0
"""How long to wait for another worker where nobody can tell whether it lives."""


class Once(Protocol):
    """The value of the fixture ``fscoord_once``."""

    def __call__(
        self,
        name: str,
        work: Callable[[], Value],
        teardown: Callable[[bytes], object] | None = None,
        *,
        timeout: Timeout | None = WORK_S,
    ) -> bytes:
        """See `Run.once`."""


class Run:
    """One worker's part in a run; a run without pytest-xdist has one worker.

    Args:
        path: the file of the store, where all workers find it.
        worker: the name of this one.
        timeout: how long operations on the store wait by default.
    """

    def __init__(self, path: str | system.os.PathLike[str], worker: str, timeout: Timeout) -> None:
        self.store = FileStore(path, label=worker, timeout=timeout)
        self._turn = Lock(self.store, "fscoord/end", WORK_S)
        self._is_registered = False
        self._teardowns: list[tuple[str, Callable[[bytes], object], bytes]] = []

    def register(self) -> None:
        """Say that this worker may come to use what others have made. All do before the first test runs.

        Under the lock, so that one that replaces a worker which died comes before a teardown, or after all of it.
        """
        if not self._is_registered:
            with self._turn:
                self.store.append(WORKERS, f"{self.store.register()} ")
            self._is_registered = True

    def once(
        self,
        name: str,
        work: Callable[[], Value],
        teardown: Callable[[bytes], object] | None = None,
        *,
        timeout: Timeout | None = WORK_S,
    ) -> bytes:
        """Do the work in one of the workers, as `fscoord.recipes.once` does, and return its value in all of them.

        Args:
            name: names the work.
            work: is called without arguments.
            teardown: is called with the value, in one of the workers that asked for it, when all workers have run
                their last test or have died.
            timeout: how long to wait for another worker's value, in seconds or as a `timedelta`; None means the store's
                timeout.

        Raises:
            WorkFailedError: the work raised in another worker. In that one its own exception comes out.
            StoreTimeoutError: another one has not finished in time. It names it.
        """
        self.register()
        value = once(self.store, f"fscoord/once/{name}", work, timeout=timeout)
        if teardown is not None:
            self._teardowns.append((f"fscoord/once/{name}/result", teardown, value))
        return value

    def end(self) -> None:
        """Run no more tests; when the others do so too, tear down what nobody has torn down yet."""
        if not self._is_registered:
            return
        self._is_registered = False
        self.store.set(_ended(self.store.register()), "")
        while self._teardowns:
            self._wait_for_the_others()
            with self._turn:
                if not self._unfinished():
                    self._tear_down()

    def _tear_down(self) -> None:
        key, teardown, value = self._teardowns.pop()
        try:
            if self.store.check([key]):  # otherwise another worker has done it
                self.store.delete_key(key)
                teardown(value)
        finally:
            if self._teardowns:
                self._tear_down()

    def _wait_for_the_others(self) -> None:
        limit = math.inf if self.store.has_liveness else UNTOLD_S
        for session in self._unfinished():
            self.store.wait_sessions([_ended(session)], [session], limit)

    def _unfinished(self) -> list[int]:
        """Return who may still be at a test."""
        sessions = [int(word) for word in self.store.get(WORKERS).split()]
        dead = set(self.store.dead_sessions(sessions))
        return [session for session in sessions if session not in dead and not self.store.check([_ended(session)])]


def _ended(session: int) -> str:
    return f"fscoord/ended/{session}"
