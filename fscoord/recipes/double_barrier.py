"""`DoubleBarrier`: all begin together and all end together."""

from __future__ import annotations

from types import TracebackType

from fscoord._arguments import Key, Timeout, key_bytes, to_seconds
from fscoord._waiting.wait import WaitSteps
from fscoord.collectives.steps import barrier
from fscoord.store import Store, run_blocking

__all__ = ["DoubleBarrier"]


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
