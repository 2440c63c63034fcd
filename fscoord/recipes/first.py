"""`RankZeroFirst`: rank 0 runs a block of code, and then the other ranks run it."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from fscoord._arguments import Key, Timeout, check_int64, key_bytes, key_text, to_seconds
from fscoord._runtime import tracing
from fscoord._waiting.awaited import WORK, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps
from fscoord.collectives.arrivals import describe_missing
from fscoord.errors import FscoordError, StoreTimeoutError, WorkFailedError
from fscoord.recipes._cleanup import as_one_wait, in_steps
from fscoord.recipes.once import failure, result_key, success, value_of
from fscoord.store import Store, begin_span, needed_store, shown

F = TypeVar("F", bound="RankZeroFirst")


class RankZeroFirst:
    """A context manager: rank 0 runs the body first, and the other ranks run it when rank 0 has finished it.

    Use it for code that every rank runs, and that finds prepared files if another rank has run it before, such as a
    download into a cache. The other ranks do not wait for each other, and rank 0 does not wait for them. If the body
    fails on rank 0, it does not begin on the others.

    A rank that is started again may use the name again: rank 0 then runs the body again, and its outcome replaces the
    former outcome. The other ranks do not wait if the stored outcome is a success. So give each block a name of its
    own, also in a loop.

    Args:
        store: the store that all ranks share.
        name: the name of the block. Keys that begin with the name and a slash belong to it. The outcome is kept under
            ``{name}/result``.
        rank: the rank of this caller, from 0.
        timeout: how long to wait for rank 0, in seconds or as a `timedelta`; None means the store's timeout.

    Raises:
        WorkFailedError: from the ``with`` statement: the body raised an exception on rank 0, or rank 0 is known
            dead. The error names rank 0's process. Rank 0 itself gets the exception of the body.
        StoreTimeoutError: from the ``with`` statement: rank 0 did not finish the body within the timeout.
        ValueError: `rank` is negative.
    """

    def __init__(self, store: Store, name: Key, rank: int, timeout: Timeout | None = None) -> None:
        self._store = needed_store(store)
        self._name = key_bytes(name)
        self._rank = check_int64("rank", rank)
        if self._rank < 0:
            raise ValueError(f"rank must be at least 0, not {rank}")
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._result = key_bytes(result_key(name))

    def __repr__(self) -> str:
        return shown(self, self._store, self._name, f"rank {self._rank}")

    @in_steps
    def __enter__(self: F) -> WaitSteps[F]:
        self._store.announce_rank(self._rank)
        if self._rank != 0:
            awaited = Awaited(WORK, key_text(self._name))
            steps = as_one_wait(awaited, lambda: f"{awaited} of rank 0 on rank {self._rank}", self._wait)
            yield from tracing.record_steps(begin_span("work", self._store, self._name, self._rank), steps)
            value_of(self._name, self._store.get(self._result))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._rank != 0:
            return
        if error is None:
            self._store.set(self._result, success(b""))
            return
        with suppress(FscoordError):  # the body's exception matters more
            self._store.set(self._result, failure(error, "rank 0, "))

    def _wait(self, slow_logger: SlowWaitLogger) -> WaitSteps[None]:
        """Wait for the outcome of rank 0."""
        store, words = self._store, f"the block {key_text(self._name)!r}"
        limit = to_seconds(store.timeout) if self._timeout is None else self._timeout
        try:
            dead = yield WaitRequest(KEYS, [self._result], limit, [0], slow_logger=slow_logger)
        except StoreTimeoutError as error:
            fates = describe_missing(store, [0])
            raise StoreTimeoutError(
                f"rank 0 did not finish {words} within {error.waited:.3g} s, for which rank {self._rank} waits"
                f"{fates.words}",
                keys=error.keys,
                missing_ranks=["0"],
                dead_ranks=fates.dead,
                holder=error.holder,
                waited=error.waited,
            ) from error
        if dead:
            raise WorkFailedError(
                f"rank 0 ended before it finished {words}{describe_missing(store, [0]).words}; start rank 0 again, and"
                " run the block again on the ranks that raise this error"
            )
