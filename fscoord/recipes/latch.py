"""`Latch`: wait until something has happened a number of times. `DoubleBarrier`: begin and end together."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import Final

from fscoord._arguments import Key, Timeout, check_positive, key_bytes, key_text, to_seconds
from fscoord._runtime import system
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.collectives.steps import barrier
from fscoord.errors import StoreTimeoutError
from fscoord.recipes._keys import add_checked, parse_count
from fscoord.store import Store, run_blocking

__all__ = ["DoubleBarrier", "Latch"]


LOOK_S: Final = 1.0
"""How often one who waits looks at the count: who counted the last may have died before it opened the latch."""


class Latch:
    """A door that opens when `count` times `count_down` was called, by whomever, and stays open.

    Unlike a barrier it is not the same people who count and who wait, and nobody needs a rank. Each call counts; a
    caller that does not know whether its call took effect, and calls again, may count twice.

    Args:
        store: where they meet.
        name: the latch's name there; keys that begin with it and a slash belong to it. It opens once.
        count: how many calls open it; the same for all.
    """

    def __init__(self, store: Store, name: Key, count: int) -> None:
        self._store = store
        self._name = key_bytes(name)
        self._count = check_positive("count", count)
        self._counted, self._open = self._name + b"/counted", self._name + b"/open"
        key_bytes(self._counted)

    def count_down(self) -> int:
        """Count one, and return how many are still missing."""
        missing = self._count - add_checked(self._store, self._counted)
        if missing <= 0:
            self._store.set(self._open, b"1")
        return max(0, missing)

    def missing(self) -> int:
        """Return how many calls are still missing; 0: it is open."""
        text = self._store.get(self._counted) if self._store.check([self._counted]) else b"0"
        return max(0, self._count - parse_count(self._counted, text))

    def wait(self, timeout: Timeout | None = None) -> None:
        """Wait until the latch is open.

        Args:
            timeout: seconds or a `timedelta`; None means the store's.

        Raises:
            StoreTimeoutError: it did not open; the message says how many are missing.
        """
        run_blocking(self._store, self._waiting(timeout))

    def _waiting(self, timeout: Timeout | None) -> WaitSteps[None]:
        limit = to_seconds(self._store.timeout if timeout is None else timeout)
        start, slow_logger = system.time.monotonic(), SlowWaitLogger(__name__, self._progress)
        while True:
            left = limit - (system.time.monotonic() - start)
            with suppress(StoreTimeoutError):
                yield WaitRequest(KEYS, [self._open], max(0.0, min(LOOK_S, left)), slow_logger=slow_logger)
                return None
            missing = self.missing()
            if not missing:
                return self._store.set(self._open, b"1")
            if left <= LOOK_S:
                raise StoreTimeoutError(
                    f"the latch {key_text(self._name)!r} did not open within {limit:g} s: {missing} of {self._count}"
                    " calls are missing",
                    keys=[key_text(self._open)],
                    waited=limit,
                )

    def _progress(self) -> str:
        return f"the latch {key_text(self._name)!r} ({self.missing()} of {self._count} calls missing)"


class DoubleBarrier:
    """Two barriers around one piece of work: nobody begins before all have come, and nobody goes before all have ended.

    The recipe is ZooKeeper's; here both ends have a deadline, and what is said by a time-out, or when somebody dies, is
    what `fscoord.barrier` says. A name serves once. As a context manager it enters, and leaves after success; when the
    body raises it does not wait for the others, who then miss this rank.

    Args:
        store: where they meet.
        name: the name there; keys that begin with it and a slash belong to it.
        world_size: how many take part; the same for all.
        rank: which of them this is, 0 to `world_size` - 1.
        timeout: how long each end waits, in seconds or as a `timedelta`; None means the store's.
        fail_fast: whether to raise `~fscoord.BrokenBarrierError` as soon as a rank that is missing is known dead.
    """

    def __init__(
        self,
        store: Store,
        name: Key,
        world_size: int,
        rank: int,
        timeout: Timeout | None = None,
        *,
        fail_fast: bool = False,
    ) -> None:
        self._store = store
        self._name = key_bytes(name)
        self._world_size = world_size
        self._rank = rank
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._fail_fast = fail_fast

    def enter(self, timeout: Timeout | None = None) -> None:
        """Wait until all have come; a rank that tries again after a time-out counts once.

        Raises:
            StoreTimeoutError: not all came; it names the missing.
            BrokenBarrierError: with `fail_fast`, a missing rank is dead.
            BarrierError: the name was used before, or `rank` is not below `world_size`.
        """
        run_blocking(self._store, self._meeting(b"/enter", timeout))

    def leave(self, timeout: Timeout | None = None) -> None:
        """Wait until all have come to this end, too; it raises what `enter` does."""
        run_blocking(self._store, self._meeting(b"/leave", timeout))

    def __enter__(self) -> DoubleBarrier:
        self.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.leave()

    def _meeting(self, end: bytes, timeout: Timeout | None) -> WaitSteps[None]:
        own = self._store.timeout if self._timeout is None else self._timeout
        limit = own if timeout is None else timeout
        size, fails = self._world_size, self._fail_fast
        return barrier(self._store, size, self._name + end, limit, self._rank, fail_fast=fails)
