"""`Run` gives a pytest worker the store that all workers share, and values that are made once for all workers.

The plugin itself is `pytest_fscoord`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, Protocol

from fscoord._arguments import Timeout, Value
from fscoord._runtime import system
from fscoord.recipes import Lock, once
from fscoord.stores.file import FileStore

__all__ = ["Once", "Run"]

WORKERS: Final = "fscoord/workers"
WORK_TIMEOUT_S: Final = 300.0
"""How long to wait for another worker's setup or teardown, in seconds."""
UNKNOWN_LIVENESS_TIMEOUT_S: Final = 10.0
"""How long to wait for another worker on a store that can't detect its death, in seconds."""


class Once(Protocol):
    """The value of the fixture ``fscoord_once``."""

    def __call__(
        self,
        name: str,
        work: Callable[[], Value],
        teardown: Callable[[bytes], object] | None = None,
        *,
        timeout: Timeout | None = WORK_TIMEOUT_S,
    ) -> bytes:
        """Call `Run.once` of this worker."""


class Run:
    """One worker of a pytest run, with its handle of the store. A run without pytest-xdist has one worker.

    Args:
        path: the file of the store that all workers open.
        worker: the name of this worker.
        timeout: how long operations on the store wait by default, in seconds or as a `timedelta`.
    """

    def __init__(self, path: str | system.os.PathLike[str], worker: str, timeout: Timeout) -> None:
        self.store: FileStore = FileStore(path, label=worker, timeout=timeout)
        self._lock = Lock(self.store, "fscoord/end", WORK_TIMEOUT_S)
        self._is_registered = False
        self._teardowns: list[tuple[str, Callable[[bytes], object], bytes]] = []

    def register(self) -> None:
        """Record that this worker may use values of other workers. Every worker calls it before its first test.

        The call takes the lock that a teardown holds. So a worker that replaces a dead worker can't register during a
        teardown.
        """
        if not self._is_registered:
            with self._lock:
                self.store.append(WORKERS, f"{self.store.register()} ")
            self._is_registered = True

    def once(
        self,
        name: str,
        work: Callable[[], Value],
        teardown: Callable[[bytes], object] | None = None,
        *,
        timeout: Timeout | None = WORK_TIMEOUT_S,
    ) -> bytes:
        """Call `work` in one worker, as `fscoord.recipes.once` does, and return its value in all workers.

        Args:
            name: the name of the work.
            work: called without arguments; returns a value for the store.
            teardown: called with the value when every worker has run its last test or has died. One of the workers that
                passed a teardown calls it.
            timeout: how long to wait for another worker's value, in seconds or as a `timedelta`; None means the store's
                timeout.

        Raises:
            WorkFailedError: the work raised an exception in another worker. In that worker the exception itself is
                raised.
            StoreTimeoutError: another worker has not finished in time. The error names that worker.
        """
        self.register()
        value = once(self.store, f"fscoord/once/{name}", work, timeout=timeout)
        if teardown is not None:
            self._teardowns.append((f"fscoord/once/{name}/result", teardown, value))
        return value

    def end(self) -> None:
        """Record that this worker runs no more tests. After the last worker's end, run the remaining teardowns."""
        if not self._is_registered:
            return
        self._is_registered = False
        self.store.set(_ended(self.store.register()), "")
        while self._teardowns:
            self._wait_for_others()
            with self._lock:
                if not self._unfinished():
                    self._tear_down()

    def _tear_down(self) -> None:
        key, teardown, value = self._teardowns.pop()
        try:
            if self.store.check([key]):  # else another worker has torn it down
                self.store.delete_key(key)
                teardown(value)
        finally:
            if self._teardowns:
                self._tear_down()

    def _wait_for_others(self) -> None:
        limit = math.inf if self.store.has_liveness else UNKNOWN_LIVENESS_TIMEOUT_S
        for session in self._unfinished():
            self.store.wait_sessions([_ended(session)], [session], limit)

    def _unfinished(self) -> list[int]:
        """Return the sessions of the workers that may still run a test."""
        sessions = [int(word) for word in self.store.get(WORKERS).split()]
        dead = set(self.store.dead_sessions(sessions))
        return [session for session in sessions if session not in dead and not self.store.check([_ended(session)])]


def _ended(session: int) -> str:
    return f"fscoord/ended/{session}"
