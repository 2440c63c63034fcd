"""`StoreBarrier` works on any store. `FileStoreBarrier` opens a `~fscoord.FileStore` itself."""

from __future__ import annotations

from typing import Any

from fscoord._arguments import Key, MalformedText, Timeout, check_rank, key_bytes, key_text, parse_uint63, to_seconds
from fscoord._runtime import system
from fscoord._runtime.logging import logger
from fscoord.barriers.base import Barrier, register_barrier
from fscoord.collectives import barrier
from fscoord.collectives.arrivals import Decoder
from fscoord.environment import rank_and_world_size
from fscoord.errors import BarrierError, BrokenBarrierError, FscoordError, StoreTimeoutError, UsedBeforeError
from fscoord.store import Store, shown
from fscoord.stores.url import file_url, open_store


@register_barrier
class StoreBarrier(Barrier):
    """A reusable barrier on any store.

    The store records how many barriers each rank has passed. So a process that replaces a dead process continues with
    the barrier that the dead process was in. If the other ranks have already passed this barrier, the new process
    passes at once. At most three barriers have keys in the store, however many are executed.

    Only one caller at a time may use a rank. All ranks under a prefix must give the same world size. If the world size
    changes, or if a job starts again on an old store, use another prefix or open the store as another run.

    Args:
        store: an open store, which stays open, or an address for `~fscoord.open_store`.
        barrier_prefix: the name of this sequence of barriers; other sequences on the same store need other names.
        rank: the caller's rank; None means the rank in the environment.
        world_size: the number of ranks, the same for all ranks; None means the world size in the environment.
        timeout: how long each `execute_barrier` waits, in seconds or as a `timedelta`. If `store` is an address, this
            is also the timeout of the opened store. None means the store's timeout at the time of each call.
        fail_fast: whether to raise `~fscoord.BrokenBarrierError` as soon as a rank that has not arrived is known dead.
        rank_tracing_decoder: returns the name of a rank for error messages, such as its host.
        options: if `store` is an address, further arguments of `~fscoord.open_store`.

    Raises:
        TypeError: `options` are given, although `store` is an open store.
        ValueError: rank or world size is neither given nor in the environment.
        BarrierError: `rank` is not below `world_size`.
    """

    barrier_type = "store"

    def __init__(
        self,
        store: Store | str | system.os.PathLike[str],
        barrier_prefix: Key = "barrier",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: Timeout | None = None,
        fail_fast: bool = False,
        rank_tracing_decoder: Decoder | None = None,
        **options: Any,
    ) -> None:
        self._rank, self._world_size = rank_and_world_size(rank, world_size)
        self._rank, self._world_size = check_rank(self._rank, self._world_size)
        self._prefix = key_bytes(barrier_prefix)
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._fail_fast = fail_fast
        self._decoder = rank_tracing_decoder
        self._owns_store = not isinstance(store, Store)
        if isinstance(store, Store) and options:
            raise TypeError(f"options apply only to an address, and the store is open already: {', '.join(options)}")
        self._store = store if isinstance(store, Store) else self._open(store, options)

    def _open(self, address: str | system.os.PathLike[str], options: dict[str, Any]) -> Store:
        return open_store(address, **self._with_timeout(options))

    def _with_timeout(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return `options`. If this barrier has a timeout and `options` has none, add the barrier's timeout."""
        return options if self._timeout is None else {"timeout": self._timeout, **options}

    def __repr__(self) -> str:
        return shown(self, self._store, self._prefix, f"rank {self._rank} of {self._world_size}")

    @property
    def rank(self) -> int:
        """The caller's rank."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self._world_size

    @property
    def sequence(self) -> int:
        """The number of barriers that this rank has passed, read from the store."""
        return self._next_of(self._rank)

    def execute_barrier(self, timeout: Timeout | None = None) -> None:
        """Wait until every rank has called this method as many times as this rank.

        After a timeout a rank may call this method again.

        Args:
            timeout: how long to wait, in seconds or as a `timedelta`; None means the barrier's own timeout, or else the
                store's timeout.

        Raises:
            StoreTimeoutError: a rank did not arrive. The error names the missing ranks and the `sequence` of each.
            BrokenBarrierError: with `fail_fast`, a rank that has not arrived is dead.
            BarrierError: the callers disagree about the world size, or two callers use the same rank.
        """
        limit = self._timeout if timeout is None else to_seconds(timeout)
        number = self._next_of(self._rank)
        words = "Executing barrier barrier_prefix=%s timeout_secs=%s"  # as in torch
        logger(__name__).info(words, key_text(self._prefix), limit)
        missing: list[int] = []

        def named(rank: int) -> str:
            missing.append(rank)
            return self._decoder(rank) if self._decoder else str(rank)

        prefix = b"%s/%d" % (self._prefix, number)
        try:
            barrier(self._store, self._world_size, prefix, limit, self._rank, named, fail_fast=self._fail_fast)
        except UsedBeforeError:
            pass  # an earlier process of this rank passed the barrier, but died before it recorded this
        except (StoreTimeoutError, BrokenBarrierError) as error:
            error.args = (f"{error}{self._positions(number, missing)}",)
            raise
        self._advance(number)

    def close(self) -> None:
        """Close the store, if this barrier opened it."""
        if self._owns_store:
            self._store.close()

    def _next_of(self, rank: int) -> int:
        """Return how many barriers `rank` has passed.

        Raises:
            BarrierError: the value in the store is not a number.
        """
        key = self._key(rank)
        text = self._store.get(key, default=b"0")
        try:
            return parse_uint63(text)
        except MalformedText as error:
            raise BarrierError(
                f"key {key_text(key)!r} holds {text[:40]!r}, which is not a sequence number: another program wrote"
                " it; use a different prefix for every sequence of barriers"
            ) from error

    def _advance(self, passed: int) -> None:
        """Record that this rank has passed barrier number `passed`.

        Rank 0 also deletes the keys of the previous barrier, because all ranks have passed the previous barrier.

        Raises:
            BarrierError: another caller with the same rank has changed the recorded number.
        """
        if self._rank == 0 and passed > 0:
            for name in (b"arrivals", b"complete"):
                self._store.delete_key(b"%s/%d/%s" % (self._prefix, passed - 1, name))
        key = self._key(self._rank)
        reached = b"%d" % (passed + 1)
        found = self._store.compare_set(key, b"%d" % passed if passed else b"", reached)
        if found != reached:
            raise BarrierError(
                f"rank {self._rank} passed barrier {passed} of {key_text(self._prefix)!r}, but is at sequence"
                f" {found[:40].decode(errors='replace')}: two callers use the same rank"
            )

    def _key(self, rank: int) -> bytes:
        return b"%s/sequence/%d" % (self._prefix, rank)

    def _positions(self, number: int, ranks: list[int]) -> str:
        """Return text for a message: the `sequence` of this rank and of each of `ranks`. Empty if the store fails."""
        try:
            others = [f"rank {rank} is at sequence {self._next_of(rank)}" for rank in ranks]
        except FscoordError:
            return ""
        return f"; this is sequence {number}, {', '.join(others)}" if others else ""


@register_barrier
class FileStoreBarrier(StoreBarrier):
    """A `StoreBarrier` on a `~fscoord.FileStore`. The constructor opens the store, and `close` closes it.

    Args:
        path: the path of the store. The path is never interpreted as an address.
        barrier_prefix, rank, world_size, timeout, fail_fast, rank_tracing_decoder: as for `StoreBarrier`.
        options: further arguments of `~fscoord.FileStore`, such as ``lock``, ``durable`` or ``label``.
    """

    barrier_type = "file_store"

    def __init__(
        self,
        path: str | system.os.PathLike[str],
        barrier_prefix: Key = "barrier",
        *,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: Timeout | None = None,
        fail_fast: bool = False,
        rank_tracing_decoder: Decoder | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            path,
            barrier_prefix,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            fail_fast=fail_fast,
            rank_tracing_decoder=rank_tracing_decoder,
            **options,
        )

    def _open(self, address: str | system.os.PathLike[str], options: dict[str, Any]) -> Store:
        # The path is quoted, because it may contain colons and question marks, which have a meaning in an address.
        return open_store(file_url(system.os.fspath(address), {}), rank=self._rank, **self._with_timeout(options))
