"""`FaultyStore`: any store, on a bad day that is the same each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final, TypeVar

from fscoord._arguments import (
    Key,
    Timeout,
    Value,
    key_bytes,
    key_text,
    keys_bytes,
    to_seconds as in_seconds,
    to_timedelta,
)
from fscoord._runtime import system
from fscoord.errors import StoreTimeoutError, StoreUnavailableError
from fscoord.store import Member, Store
from fscoord.testing._plan import Fault, Plan, counted, drawn

__all__ = ["FaultyStore"]

T = TypeVar("T")

READS: Final = ("get", "check", "wait", "num_keys", "list_keys", "multi_get", "queue_len")
WRITES: Final = ("set", "add", "compare_set", "delete_key", "append", "multi_set", "queue_push", "queue_pop")


class FaultyStore(Store):
    """A view of `store` whose operations fail as they are told, to test how your code takes it.

    Each of `delays`, `times_out`, `fails`, `loses_answers` and `bad_day` is a context manager: it holds in its block,
    and gives the list of the operations that it has hit so far. They take names of operations (none: every one that it
    fits), ``after``, how many of them pass before, and ``times``, how many are hit then (None: all)::

        with store.fails("set", after=2, times=1) as hit:
            work(store)
        assert hit == ["set"]

    `barrier` is made of `add`, `set` and `wait`, and fails as they do. Clones share what goes wrong. Without a fault
    this is the store behind it; closing this handle closes that one.

    Args:
        store: the store that does the work.
    """

    def __init__(self, store: Store) -> None:
        self._inner = store
        self._plan = Plan()
        self.capabilities = store.capabilities._replace(certain=False)

    def delays(
        self, *operations: str, seconds: float, after: int = 0, times: int | None = None
    ) -> AbstractContextManager[list[str]]:
        """Have operations sleep so many seconds before they begin."""
        return self._having(operations, Fault("delay", seconds), after, times)

    def times_out(
        self, *operations: str, after: int = 0, times: int | None = None
    ) -> AbstractContextManager[list[str]]:
        """Have operations raise `~fscoord.StoreTimeoutError`, at once; nothing has been done then."""
        return self._having(operations, Fault("time-out"), after, times)

    def fails(
        self, *operations: str, error: BaseException | None = None, after: int = 0, times: int | None = None
    ) -> AbstractContextManager[list[str]]:
        """Have operations raise `error`, or else `~fscoord.StoreUnavailableError`; nothing has been done then."""
        return self._having(operations, Fault("failure", error), after, times)

    def loses_answers(
        self, *operations: str, applied: bool = True, after: int = 0, times: int | None = None
    ) -> AbstractContextManager[list[str]]:
        """Have writes raise `~fscoord.StoreUnavailableError` with ``maybe_applied``.

        Args:
            operations: which; only those that write.
            applied: whether what is not known has in truth been done.
            after: how many of them pass before.
            times: how many are hit then; None: all.
        """
        return self._having(operations, Fault("lost", applied), after, times, WRITES)

    def bad_day(self, seed: int, rate: float = 0.1, delay: float = 0.001) -> AbstractContextManager[list[str]]:
        """Have each operation go wrong with probability `rate`, in one of all these ways; ``seed`` repeats the day.

        Args:
            seed: the seed of the draws; which operation is hit depends on its number alone.
            rate: a probability, 0 to 1.
            delay: how long delays are, in seconds.
        """
        any_of = [Fault("delay", delay), Fault("time-out"), Fault("failure")]
        writes = [*any_of, Fault("lost", True), Fault("lost", False)]
        return self._plan.having(drawn(seed, rate, lambda name: writes if name in WRITES else any_of))

    def _having(
        self,
        operations: tuple[str, ...],
        fault: Fault,
        after: int,
        times: int | None,
        known: tuple[str, ...] = READS + WRITES,
    ) -> AbstractContextManager[list[str]]:
        unknown = sorted(set(operations) - set(known))
        if unknown:
            raise ValueError(f"no such operation: {', '.join(unknown)}; there are {', '.join(known)}")
        return self._plan.having(counted(operations or known, fault, after, times))

    def _do(self, name: str, keys: list[bytes], call: Callable[[], T]) -> T:
        where = f"{name} of {', '.join(map(repr, map(key_text, keys)))}" if keys else name
        for fault in self._plan.faults(name):
            if fault.kind == "delay":
                system.time.sleep(fault.detail)
            elif fault.kind == "time-out":
                raise StoreTimeoutError(f"{where} timed out, as it was told", keys=[key_text(key) for key in keys])
            elif fault.kind == "failure":
                raise fault.detail or StoreUnavailableError(f"{where} failed, as it was told; nothing was done")
            else:
                if fault.detail:
                    call()
                raise StoreUnavailableError(f"{where} has no answer, as it was told", maybe_applied=True)
        return call()

    def _on(self, name: str, key: Key, call: Callable[[], T]) -> T:
        return self._do(name, [key_bytes(key)], call)

    @property
    def timeout(self) -> timedelta:
        """The timeout of the store behind."""
        return to_timedelta(self._limit)

    @property
    def _limit(self) -> float:
        return in_seconds(self._inner.timeout)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the timeout of the store behind."""
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        """Return what the store behind says."""
        return self._inner.has_extended_api()

    def set(self, key: Key, value: Value) -> None:
        self._on("set", key, lambda: self._inner.set(key, value))

    def get(self, key: Key) -> bytes:
        return self._on("get", key, lambda: self._inner.get(key))

    def add(self, key: Key, amount: int) -> int:
        return self._on("add", key, lambda: self._inner.add(key, amount))

    def compare_set(self, key: Key, expected: Value, desired: Value) -> bytes:
        return self._on("compare_set", key, lambda: self._inner.compare_set(key, expected, desired))

    def check(self, keys: Iterable[Key]) -> bool:
        names = keys_bytes(keys)
        return self._do("check", names, lambda: self._inner.check(names))

    def wait(self, keys: Iterable[Key], timeout: Timeout | None = None) -> None:
        names = keys_bytes(keys)
        self._do("wait", names, lambda: self._inner.wait(names, timeout))

    def delete_key(self, key: Key) -> bool:
        return self._on("delete_key", key, lambda: self._inner.delete_key(key))

    def num_keys(self) -> int:
        return self._do("num_keys", [], self._inner.num_keys)

    def list_keys(self, prefix: Key = "") -> list[str]:
        return self._do("list_keys", [], lambda: self._inner.list_keys(prefix))

    def append(self, key: Key, value: Value) -> None:
        self._on("append", key, lambda: self._inner.append(key, value))

    def multi_get(self, keys: Iterable[Key]) -> list[bytes]:
        names = keys_bytes(keys)
        return self._do("multi_get", names, lambda: self._inner.multi_get(names))

    def multi_set(self, keys: Iterable[Key], values: Iterable[Value]) -> None:
        names = keys_bytes(keys)
        self._do("multi_set", names, lambda: self._inner.multi_set(names, values))

    def queue_push(self, key: Key, value: Value) -> None:
        self._on("queue_push", key, lambda: self._inner.queue_push(key, value))

    def queue_pop(self, key: Key, block: bool = True) -> bytes:
        return self._on("queue_pop", key, lambda: self._inner.queue_pop(key, block))

    def queue_len(self, key: Key) -> int:
        return self._on("queue_len", key, lambda: self._inner.queue_len(key))

    def barrier(self, key: Key, world_size: int, timeout: Timeout | None = None) -> None:
        super().barrier(key, world_size, self._limit if timeout is None else timeout)

    @property
    def has_liveness(self) -> bool:
        """Return what the store behind says."""
        return self._inner.has_liveness

    def register(self) -> int:
        return self._inner.register()

    def members(self, ranks: Iterable[int] | None = None) -> list[Member]:
        """Return the members of the store behind."""
        return self._inner.members(ranks)

    def announce_rank(self, rank: int) -> None:
        self._inner.announce_rank(rank)

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        return self._inner.dead_ranks(ranks)

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        return self._inner.dead_sessions(numbers)

    def wait_alive(self, keys: Iterable[Key], ranks: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        names = keys_bytes(keys)
        return self._do("wait", names, lambda: self._inner.wait_alive(names, ranks, timeout))

    def wait_sessions(self, keys: Iterable[Key], numbers: Iterable[int], timeout: Timeout | None = None) -> list[int]:
        names = keys_bytes(keys)
        return self._do("wait", names, lambda: self._inner.wait_sessions(names, numbers, timeout))

    def clone(self) -> FaultyStore:
        """Return a handle of its own on the same store, which fails as this one does."""
        other = FaultyStore(self._inner.clone())
        other._plan = self._plan
        return other

    def close(self) -> None:
        """Close the handle behind."""
        self._inner.close()
