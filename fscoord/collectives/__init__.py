"""Barriers and exchanges of data between ranks, on any `~fscoord.Store`.

The functions have the names, the positional arguments and the time-out messages of
``torch.distributed.elastic.utils.store``. Where torch has other names for the keyword arguments ``world_size``, ``key``
and ``timeout``, the functions accept both names. A key prefix can be used once. The keys with this prefix stay in the
store, and a second use raises `~fscoord.BarrierError`.

On a store of another package, such as a store of torch, `barrier`, `synchronize` and `get_all` do exactly what torch's
functions do; see `collectives.c10d`. The rest of this text describes the stores of fscoord.

**Keys.** These keys are the same as in torch:

- ``{prefix}/num_members`` and ``{prefix}/last_member`` of a barrier without ranks. This barrier is `Store.barrier`,
  which uses the keys of c10d, so processes that use torch can take part.
- ``{prefix}{i}`` with the data of rank i for `get_all`. The callers of `get_all` write this data.
- ``{prefix}/finished``, the prefix of the barrier with ranks at the end of `get_all`.

A barrier with ranks can't use a counter: a rank that calls again would count twice, and the missing ranks would be
unknown. Instead, each rank appends one token to ``{prefix}/arrivals``. This key shows at any time which ranks have
arrived. The last rank to arrive sets ``{prefix}/complete``, the only key for which the other ranks wait.

After a time-out, torch finds the missing ranks through the keys ``{prefix}{rank}/TRACE`` and
``{prefix}/TRACING_GATE``. fscoord does not need these keys. In torch, two prefixes may share a key: rank 0 under the
prefix ``a1`` and rank 10 under the prefix ``a`` both use ``a10/TRACE``.

`synchronize` and `gather` write their data to ``{prefix}{rank}``, as torch does. If the prefix ends in a digit or a
colon, a colon is inserted (``a1:0``), so that no two prefixes share a key. `synchronize` also sets ``{prefix}/given``
when all ranks have written data. Ranks wait for this one key, because a wait for N keys would be woken N times.
"""

from __future__ import annotations

from typing import overload

from fscoord._arguments import Key, Timeout, Value, check_rank, key_bytes, key_given, timeout_given, to_seconds
from fscoord._runtime import system, tracing
from fscoord.collectives import c10d, steps
from fscoord.collectives.arrivals import Decoder
from fscoord.collectives.c10d import BarrierStore, ExchangeStore
from fscoord.collectives.timeout import TimeoutStore, store_timeout
from fscoord.collectives.tree import TreeCall
from fscoord.errors import StoreTimeoutError
from fscoord.store import Store, needed_store, run_blocking

__all__ = [
    "BarrierStore",
    "ExchangeStore",
    "TimeoutStore",
    "barrier",
    "broadcast",
    "gather",
    "get_all",
    "store_timeout",
    "synchronize",
    "tree_barrier",
]


@overload
def barrier(
    store: BarrierStore,
    world_size: int,
    key_prefix: Key,
    barrier_timeout: Timeout | None = None,
    rank: int | None = None,
    rank_tracing_decoder: Decoder | None = None,
    trace_timeout: Timeout = 10.0,
    *,
    timeout: Timeout | None = None,
    fail_fast: bool = False,
) -> None: ...


@overload
def barrier(
    store: BarrierStore,
    world_size: int,
    *,
    key: Key,
    timeout: Timeout | None = None,
    rank: int | None = None,
    rank_tracing_decoder: Decoder | None = None,
    trace_timeout: Timeout = 10.0,
    fail_fast: bool = False,
) -> None: ...


def barrier(
    store: BarrierStore,
    world_size: int,
    key_prefix: Key | None = None,
    barrier_timeout: Timeout | None = None,
    rank: int | None = None,
    rank_tracing_decoder: Decoder | None = None,
    trace_timeout: Timeout = 10.0,
    *,
    key: Key | None = None,
    timeout: Timeout | None = None,
    fail_fast: bool = False,
) -> None:
    """Wait until `world_size` callers have called this function with `key_prefix`.

    With `rank`, the arrival is idempotent: a rank that calls again, in the same process or in a new process, counts
    once. A rank whose call timed out may call again. Such a rank passes even if the other ranks have already passed.
    Without `rank`, every call counts. Either all callers of a barrier give a rank, or no caller does.

    On a `~fscoord.FileStore`, a rank records its arrival in one transaction, and then waits. If the file is on a local
    file system, a rank without `fail_fast` arrives without the log's lock, in a shared-memory slot beside the file. On
    any other store each rank makes one write, one read and one wait, and the last rank makes one more write.

    Args:
        store: the store that the callers share. It may be a store of torch; see `fscoord.collectives.BarrierStore`.
        world_size: the number of callers; the same for all.
        key_prefix: the name of the barrier, which can be used once.
        barrier_timeout: the time to wait for the other callers, in seconds or as a `timedelta`; None: the store's
            timeout.
        rank: the rank of this caller, 0 to `world_size` - 1.
        rank_tracing_decoder: returns the name of a rank for error messages, such as its host.
        trace_timeout: how long the call may take after `barrier_timeout` to find and name the missing ranks, in seconds
            or as a `timedelta`. (The write of this rank's arrival is limited by the store's timeout.)
        key: another name of `key_prefix`.
        timeout: another name of `barrier_timeout`.
        fail_fast: with `rank`, raise as soon as a rank that has not arrived is known dead
            (`~fscoord.Store.dead_ranks`). All ranks that have arrived raise, with the same lists of ranks. A new round
            of the barrier then begins, so all ranks, including a restarted rank, may call again. Either all callers of
            a barrier give `fail_fast`, or no caller does. On a store without `~fscoord.Store.has_liveness`, `fail_fast`
            has no effect.

    Raises:
        StoreTimeoutError: some callers did not arrive. The message has the rank, the key prefix, the world size, the
            timeout and the first 16 missing ranks. If the store can detect dead sessions, the message lists dead and
            late ranks separately. The message is the same on every store.
        BrokenBarrierError: with `fail_fast`, missing ranks are dead.
        UsedBeforeError: the barrier has been used before, or more than `world_size` callers arrived.
        BarrierError: the callers disagree about `world_size`, or `rank` is not below `world_size`.
        ValueError: `rank_tracing_decoder` or `fail_fast` is given without `rank`.
        TypeError: the key is missing, or an argument is given under both of its names.
    """
    if key is not None or key_prefix is None:
        key_prefix = key_given(key, "key_prefix", key_prefix)
    if timeout is not None:
        barrier_timeout = timeout_given(timeout, "barrier_timeout", barrier_timeout)
    if not isinstance(store, Store):
        steps.check_needs_rank(rank, rank_tracing_decoder, fail_fast=fail_fast)
        c10d.barrier(store, world_size, key_prefix, barrier_timeout, rank, rank_tracing_decoder, trace_timeout)
        return
    start, begun = system.time.monotonic(), None
    if rank is not None and not fail_fast and tracing.recorder is None and trace_timeout.__class__ is float:
        prefix, (rank, world_size) = key_bytes(key_prefix), check_rank(rank, world_size)
        limit = None if barrier_timeout is None else to_seconds(barrier_timeout)
        store.announce_rank(rank)
        begun = store._meet(prefix, rank, world_size, limit)
        if begun is True:
            return
    arguments = (world_size, key_prefix, barrier_timeout, rank, rank_tracing_decoder, trace_timeout)
    run_blocking(store, steps.barrier(store, *arguments, fail_fast=fail_fast, start=start, begun=begun))


@overload
def get_all(
    store: ExchangeStore, rank: int, prefix: Key, world_size: int, *, timeout: Timeout | None = None
) -> list[bytes]: ...


@overload
def get_all(
    store: ExchangeStore, rank: int, *, key: Key, world_size: int, timeout: Timeout | None = None
) -> list[bytes]: ...


def get_all(
    store: ExchangeStore,
    rank: int,
    prefix: Key | None = None,
    world_size: int | None = None,
    *,
    key: Key | None = None,
    timeout: Timeout | None = None,
) -> list[bytes]:
    """Wait for the keys ``{prefix}0`` to ``{prefix}{world_size - 1}`` and return their values.

    Rank 0 returns after all other ranks have read the values, because the process of rank 0 often runs the store's
    server.

    Args:
        store: the store that the ranks share. It may be a store of torch; see `fscoord.collectives.ExchangeStore`.
        rank: the rank of this caller, 0 to `world_size` - 1.
        prefix: the common prefix of the keys.
        world_size: the number of ranks.
        key: another name of `prefix`.
        timeout: one limit for the whole call, in seconds or as a `timedelta`; None: the store's timeout.

    Raises:
        StoreTimeoutError: some ranks set no data, or, on rank 0, some ranks have not finished. The error names these
            ranks.
        UsedBeforeError: a call of `get_all` with this prefix has already finished on all ranks.
        BarrierError: `rank` is not below `world_size`.
    """
    if world_size is None:
        raise TypeError("world_size is missing")
    prefix = key_given(key, "prefix", prefix)
    if not isinstance(store, Store):
        return c10d.get_all(store, rank, prefix, world_size, timeout)
    return run_blocking(store, steps.get_all(store, rank, prefix, world_size, timeout))


@overload
def synchronize(
    store: ExchangeStore, data: Value, rank: int, world_size: int, key_prefix: Key, timeout: Timeout | None = None
) -> list[bytes]: ...


@overload
def synchronize(
    store: ExchangeStore, data: Value, rank: int, world_size: int, *, key: Key, timeout: Timeout | None = None
) -> list[bytes]: ...


def synchronize(
    store: ExchangeStore,
    data: Value,
    rank: int,
    world_size: int,
    key_prefix: Key | None = None,
    timeout: Timeout | None = None,
    *,
    key: Key | None = None,
) -> list[bytes]:
    """Give `data` to all ranks and return the data of all ranks, in the order of the ranks.

    Rank 0 returns last, as in `get_all`. **The data stays in the store**, so a key prefix can be used once. After a
    time-out a rank may call again. The rank must pass the same data, because other ranks may have read the data
    already.

    Args:
        store: the store that the ranks share. It may be a store of torch; see `fscoord.collectives.ExchangeStore`.
        data: the data of this rank.
        rank: the rank of this caller, 0 to `world_size` - 1.
        world_size: the number of ranks.
        key_prefix: the name of the exchange.
        timeout: one limit for the whole call, in seconds or as a `timedelta`; None: the store's timeout.
        key: another name of `key_prefix`.

    Raises:
        StoreTimeoutError: some ranks set no data, or, on rank 0, some ranks have not finished. The error names these
            ranks.
        UsedBeforeError: the prefix has been used before. Nothing was overwritten.
        BarrierError: `rank` is not below `world_size`.
    """
    prefix = key_given(key, "key_prefix", key_prefix)
    if not isinstance(store, Store):
        return c10d.synchronize(store, data, rank, world_size, prefix, timeout)
    return run_blocking(store, steps.synchronize(store, data, rank, world_size, prefix, timeout))


def broadcast(
    store: Store,
    data: Value | None,
    rank: int,
    world_size: int,
    key: Key,
    timeout: Timeout | None = None,
    *,
    source: int = 0,
) -> bytes:
    """Send the `data` of rank `source` to all ranks, and return the data.

    The operation is MPI's ``MPI_Bcast``. The source does not wait. The other ranks wait for the source. The data stays
    in the store, under the key ``{key}/broadcast``.

    Args:
        store: the store that the ranks share.
        data: the data of the source. The argument of other ranks is ignored and may be None.
        rank: the rank of this caller, 0 to `world_size` - 1.
        world_size: the number of ranks.
        key: the name of the exchange.
        timeout: the time to wait for the source, in seconds or as a `timedelta`; None: the store's timeout.
        source: the rank that sends.

    Raises:
        StoreTimeoutError: the source has not sent data.
        UsedBeforeError: on the source, other data has been sent under this key before. Nothing was overwritten.
        BarrierError: `rank` or `source` is not below `world_size`.
        TypeError: `data` is None on the source, or `store` is not a store of fscoord.
    """
    needed_store(store)
    return run_blocking(store, steps.broadcast(store, data, rank, world_size, key, timeout, source=source))


def gather(
    store: Store, data: Value, rank: int, world_size: int, key: Key, timeout: Timeout | None = None, *, target: int = 0
) -> list[bytes] | None:
    """Send the `data` of all ranks to rank `target`.

    The operation is MPI's ``MPI_Gather``. The target waits for the data of all ranks and returns it, in the order of
    the ranks. The other ranks do not wait, and return None. The data stays in the store.

    Args:
        store: the store that the ranks share.
        data: the data of this rank.
        rank: the rank of this caller, 0 to `world_size` - 1.
        world_size: the number of ranks.
        key: the name of the exchange.
        timeout: how long the target waits, in seconds or as a `timedelta`; None: the store's timeout.
        target: the rank that receives.

    Raises:
        StoreTimeoutError: on the target, some ranks sent no data. The error names these ranks.
        UsedBeforeError: the key has been used before. Nothing was overwritten.
        BarrierError: `rank` or `target` is not below `world_size`.
        TypeError: `store` is not a store of fscoord.
    """
    needed_store(store)
    return run_blocking(store, steps.gather(store, data, rank, world_size, key, timeout, target=target))


def tree_barrier(
    group: Store,
    root: Store,
    rank: int,
    world_size: int,
    group_size: int,
    key: Key,
    timeout: Timeout | None = None,
    *,
    trace_timeout: Timeout = 10.0,
) -> None:
    """Wait until all ranks have called this function with `key`; for jobs of more nodes than one log can serve.

    Ranks 0 to `group_size` - 1 are the first group, the next `group_size` ranks are the second group, and so on. The
    first rank of each group represents the group in `root`. The other ranks use `root` only after a time-out. The page
    "Many ranks on a file server" says when a tree barrier is faster than `barrier`.

    As in `barrier` with a rank, an arrival is idempotent: a rank whose call timed out, or whose process died, may call
    again. If a representative dies, its group waits until a new process replaces it, or until the timeout. If another
    rank dies after its arrival, the barrier may end without it.

    Args:
        group: the store that the ranks of this group share; another log for each group.
        root: the store that all ranks share.
        rank: the rank of this caller, 0 to `world_size` - 1.
        world_size: the number of ranks.
        group_size: the number of ranks in a group. The last group may be smaller.
        key: the name of the barrier, which can be used once.
        timeout: the time to wait for the other ranks, in seconds or as a `timedelta`; None: the timeout of `group`.
        trace_timeout: the time that the call may take after `timeout` to find the missing ranks of other groups.

    Raises:
        StoreTimeoutError: some ranks did not arrive. The error names the missing ranks of all groups, and lists the
            dead ranks separately. If no rank of a missing group has reported the group's missing ranks within
            `trace_timeout`, the error has the first and the last rank of that group.
        UsedBeforeError: the barrier has been used before, or a process that died had arrived as this rank, and the
            group has been released since.
        BarrierError: the ranks disagree about the sizes, or `rank` is not below `world_size`.
    """
    call = TreeCall(group, root, rank, world_size, group_size, key, timeout, trace_timeout)
    try:
        run_blocking(group, call.arrive())
        if call.is_representative:
            run_blocking(root, call.meet())
        run_blocking(group, call.leave())
    except StoreTimeoutError as error:
        run_blocking(root, call.time_out(error))
