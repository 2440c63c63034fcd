"""`Latch`: wait until `count_down` was called a number of times. `DoubleBarrier`: begin and end work together."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TypeVar

from fscoord._arguments import Key, Timeout, check_positive, key_bytes, key_text, to_seconds
from fscoord._runtime import system, tracing
from fscoord._waiting.awaited import LATCH, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.collectives.steps import barrier
from fscoord.errors import StoreTimeoutError
from fscoord.recipes._cleanup import as_one_wait, in_steps
from fscoord.recipes._keys import add_checked, parse_count
from fscoord.recipes._look import LOOK_S
from fscoord.store import Store, begin_span, needed_store, shown

D = TypeVar("D", bound="DoubleBarrier")


class Latch:
    """A latch that opens after `count` calls of `count_down`, by any processes, and stays open.

    The latch works like Java's ``CountDownLatch``. Unlike at a barrier, a process that counts need not wait, a process
    that waits need not count, and no process has a rank. Each call counts. So a caller that repeats a failed call whose
    outcome is unknown may count twice.

    Args:
        store: the store that all processes share.
        name: the latch's name in the store. Keys that begin with the name and a slash belong to the latch. A latch
            opens once, and no other latch can use the name afterwards.
        count: the number of calls that open the latch. All processes must pass the same number.

    Raises:
        ValueError: `count` is below 1.
    """

    def __init__(self, store: Store, name: Key, count: int) -> None:
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._count = check_positive("count", count)
        self._counted, self._open = self._name + b"/counted", self._name + b"/open"
        key_bytes(self._counted)

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, f"opens after {self._count} call{'s' if self._count > 1 else ''}")

    def count_down(self) -> int:
        """Count this call, and return how many more calls are needed to open the latch."""
        missing = self._count - add_checked(self._store, self._counted)
        if missing <= 0:
            self._store.set(self._open, b"1")
        return max(0, missing)

    def missing(self) -> int:
        """Return how many more calls of `count_down` are needed; 0 means that the latch is open."""
        text = self._store.get(self._counted, default=b"0")
        return max(0, self._count - parse_count(self._counted, text))

    @in_steps
    def wait(self, timeout: Timeout | None = None) -> WaitSteps[None]:
        """Wait until the latch is open.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means the store's timeout.

        Raises:
            StoreTimeoutError: the latch did not open. The message says how many calls are missing.
        """
        limit = to_seconds(self._store.timeout if timeout is None else timeout)
        awaited = Awaited(LATCH, key_text(self._name), self._count)
        steps = as_one_wait(awaited, self._progress, partial(self._await_opening, limit))
        return tracing.record_steps(begin_span("latch", self._store, self._name), steps)

    def _await_opening(self, limit: float, slow_logger: SlowWaitLogger) -> WaitSteps[None]:
        start = system.time.monotonic()
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
                    f" calls are missing{self._store._closer_look()}",
                    keys=[key_text(self._open)],
                    waited=limit,
                )

    def _progress(self) -> str:
        return f"the latch {key_text(self._name)!r} ({self.missing()} of {self._count} calls missing)"


class DoubleBarrier:
    """Two barriers around a block of work: all ranks begin together, and no rank continues before all have finished.

    The recipe is ZooKeeper's. Both barriers have a timeout, and raise the errors of `fscoord.barrier` after a timeout
    or a death. A name can be used once. A ``with`` statement calls `enter` at its beginning, and `leave` if the block
    succeeds. If the block raises, `leave` is not called, so the other ranks find this rank missing.

    Args:
        store: the store that all ranks share.
        name: the name in the store. Keys that begin with the name and a slash belong to this object.
        world_size: the number of ranks, the same for all.
        rank: the caller's rank, 0 to `world_size` - 1.
        timeout: how long each barrier waits, in seconds or as a `timedelta`; None means the store's timeout.
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
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._world_size = world_size
        self._rank = rank
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._fail_fast = fail_fast

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, f"rank {self._rank} of {self._world_size}")

    @in_steps
    def enter(self, timeout: Timeout | None = None) -> WaitSteps[None]:
        """Wait until all ranks have called this method. A rank that calls again after a timeout counts once.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means this object's `timeout`, or else the
                store's timeout.

        Raises:
            StoreTimeoutError: a rank is missing. The error names the missing ranks.
            BrokenBarrierError: with `fail_fast`, a missing rank is dead.
            UsedBeforeError: the name was used before.
            BarrierError: `rank` is not below `world_size`.
        """
        return self._meeting(b"/enter", timeout)

    @in_steps
    def leave(self, timeout: Timeout | None = None) -> WaitSteps[None]:
        """Wait until all ranks have called this method. `timeout` and the errors are those of `enter`."""
        return self._meeting(b"/leave", timeout)

    @in_steps
    def __enter__(self: D) -> WaitSteps[D]:
        yield from self._meeting(b"/enter", None)
        return self

    @in_steps
    def __exit__(self, kind: type[BaseException] | None, *_: object) -> WaitSteps[None]:
        if kind is None:
            yield from self._meeting(b"/leave", None)

    def _meeting(self, end: bytes, timeout: Timeout | None) -> WaitSteps[None]:
        limit = self._timeout if timeout is None else timeout
        return barrier(self._store, self._world_size, self._name + end, limit, self._rank, fail_fast=self._fail_fast)
