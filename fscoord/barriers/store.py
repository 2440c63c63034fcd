"""`StoreBarrier`, on any store, and `FileStoreBarrier`, on a file of its own."""

from __future__ import annotations

from typing import Any

from fscoord._arguments import Key, Timeout, check_positive, key_bytes, to_seconds
from fscoord._runtime import system
from fscoord.barriers.base import Barrier, register_barrier
from fscoord.barriers.sequence import Sequence
from fscoord.collectives import barrier
from fscoord.collectives.arrivals import Decoder, UsedBeforeError, check_rank
from fscoord.environment import rank_and_world_size
from fscoord.errors import BrokenBarrierError, FscoordError, StoreTimeoutError
from fscoord.store import Store
from fscoord.stores.url import open_store

__all__ = ["FileStoreBarrier", "StoreBarrier"]


@register_barrier
class StoreBarrier(Barrier):
    """A barrier on any store.

    How far each rank is, is kept in the store: another object, or the process that takes a dead one's place, goes on
    with the barrier that its rank was in, and passes at once if the others have gone on. Three barriers at most leave
    keys behind, however many are executed. One rank has one caller at a time, and a prefix belongs to one world: one of
    another size, and a job that begins from the start on an old store, take another prefix (or the store another run).

    Args:
        store: an open store, which stays open, or an address for `~fscoord.open_store`.
        barrier_prefix: names this row of barriers; others on the same store have other names.
        rank: which caller this is; None means what the environment says.
        world_size: how many there are, the same for all; None means what the environment says.
        timeout: how long each `execute_barrier` waits, in seconds or as a `timedelta`; a store that is opened here has
            it too. None means the store's timeout, as it is at each call.
        fail_fast: whether to raise `~fscoord.BrokenBarrierError` as soon as a rank that is needed is known dead.
        rank_tracing_decoder: turns a missing rank into what the error says of it, such as its host.
        options: what else `~fscoord.open_store` takes for that address.

    Raises:
        TypeError: there are options, and the store is open already.
        ValueError: rank or world size is not given and the environment does not say it.
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
        check_rank(self._rank, check_positive("world_size", self._world_size))
        prefix = key_bytes(barrier_prefix)
        self._timeout = None if timeout is None else to_seconds(timeout)
        self._fail_fast = fail_fast
        self._decoder = rank_tracing_decoder
        self._owns_store = not isinstance(store, Store)
        if isinstance(store, Store) and options:
            raise TypeError(f"an open store takes no options; these are for an address: {', '.join(options)}")
        self._store = store if isinstance(store, Store) else self._open(store, options)
        self._sequence = Sequence(self._store, prefix, self._rank)

    def _open(self, address: str | system.os.PathLike[str], options: dict[str, Any]) -> Store:
        return open_store(address, **self._with_timeout(options))

    def _with_timeout(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return `options` with the barrier's timeout; without one the address, or the store's default, decides."""
        return options if self._timeout is None else {"timeout": self._timeout, **options}

    @property
    def rank(self) -> int:
        """Which caller this is."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many callers there are."""
        return self._world_size

    @property
    def sequence(self) -> int:
        """The number of the barrier that this rank joins next, as it stands in the store."""
        return self._sequence.next_of(self._rank)

    def execute_barrier(self, timeout: Timeout | None = None) -> None:
        """Wait until all ranks have called this as often as this one has. After a time-out a rank may try again.

        Args:
            timeout: seconds or a `timedelta`; None means the barrier's own, or else the store's.

        Raises:
            StoreTimeoutError: not all came. It names the missing ranks, and says how far each of them is.
            BrokenBarrierError: with `fail_fast`, a rank that is needed is dead.
            BarrierError: the callers disagree about the world's size, or two of them have one rank.
        """
        limit = self._timeout if timeout is None else to_seconds(timeout)
        number = self._sequence.next_of(self._rank)
        missing: list[int] = []

        def named(rank: int) -> str:
            missing.append(rank)
            return self._decoder(rank) if self._decoder else str(rank)

        prefix = self._sequence.barrier(number)
        try:
            barrier(self._store, self._world_size, prefix, limit, self._rank, named, fail_fast=self._fail_fast)
        except UsedBeforeError:
            pass  # all came, this rank too: whoever was it then never told its caller
        except (StoreTimeoutError, BrokenBarrierError) as error:
            error.args = (f"{error}{self._positions(number, missing)}",)
            raise
        self._sequence.advance(number)

    def close(self) -> None:
        """Close the store, if it was opened here."""
        if self._owns_store:
            self._store.close()

    def _positions(self, number: int, ranks: list[int]) -> str:
        """Return the words that say how far this rank and the missing are; none if the store does not tell."""
        try:
            others = [f"rank {rank} is at sequence {self._sequence.next_of(rank)}" for rank in ranks]
        except FscoordError:
            return ""
        return f"; this is sequence {number}, {', '.join(others)}" if others else ""


@register_barrier
class FileStoreBarrier(StoreBarrier):
    """A `StoreBarrier` on a `~fscoord.FileStore` of its own.

    Args:
        path: the store's path, taken as it stands.
        barrier_prefix, rank, world_size, timeout, fail_fast, rank_tracing_decoder: as for `StoreBarrier`.
        options: whatever else `~fscoord.FileStore` takes, such as ``lock``, ``durable`` or ``label``.
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
        from urllib.parse import quote

        # An address in which nothing has a meaning: a path may hold colons and question marks.
        url = "file:" + quote(system.os.fspath(address), safe="", errors="surrogateescape")
        return open_store(url, rank=self._rank, **self._with_timeout(options))
