"""The functions of `fscoord.collectives` as coroutines, with the same names, arguments and errors."""

from __future__ import annotations

from typing import overload

from fscoord import collectives
from fscoord._arguments import Key, Timeout, Value, key_given, timeout_given
from fscoord.aio._docstrings import explained_by
from fscoord.aio._methods import function_for_tasks
from fscoord.aio.store import AsyncStore, driver_of
from fscoord.collectives import steps
from fscoord.collectives.arrivals import Decoder
from fscoord.collectives.tree import TreeCall
from fscoord.errors import StoreTimeoutError


@overload
async def barrier(
    store: AsyncStore,
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
async def barrier(
    store: AsyncStore,
    world_size: int,
    *,
    key: Key,
    timeout: Timeout | None = None,
    rank: int | None = None,
    rank_tracing_decoder: Decoder | None = None,
    trace_timeout: Timeout = 10.0,
    fail_fast: bool = False,
) -> None: ...


@explained_by(collectives.barrier)
async def barrier(
    store: AsyncStore,
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
    """Wait until `world_size` callers have called this function. A cancelled task counts as arrived."""
    prefix = key_given(key, "key_prefix", key_prefix)
    limit = timeout_given(timeout, "barrier_timeout", barrier_timeout)
    arguments = (world_size, prefix, limit, rank, rank_tracing_decoder, trace_timeout)
    await driver_of(store).drive(steps.barrier(store.store, *arguments, fail_fast=fail_fast))


@overload
async def get_all(
    store: AsyncStore, rank: int, prefix: Key, world_size: int, *, timeout: Timeout | None = None
) -> list[bytes]: ...


@overload
async def get_all(
    store: AsyncStore, rank: int, *, key: Key, world_size: int, timeout: Timeout | None = None
) -> list[bytes]: ...


@explained_by(collectives.get_all)
async def get_all(
    store: AsyncStore,
    rank: int,
    prefix: Key | None = None,
    world_size: int | None = None,
    *,
    key: Key | None = None,
    timeout: Timeout | None = None,
) -> list[bytes]:
    """Wait for the keys ``{prefix}0`` to ``{prefix}{world_size - 1}`` and return their values."""
    if world_size is None:
        raise TypeError("world_size is missing")
    start = key_given(key, "prefix", prefix)
    return await driver_of(store).drive(steps.get_all(store.store, rank, start, world_size, timeout))


@overload
async def synchronize(
    store: AsyncStore, data: Value, rank: int, world_size: int, key_prefix: Key, timeout: Timeout | None = None
) -> list[bytes]: ...


@overload
async def synchronize(
    store: AsyncStore, data: Value, rank: int, world_size: int, *, key: Key, timeout: Timeout | None = None
) -> list[bytes]: ...


@explained_by(collectives.synchronize)
async def synchronize(
    store: AsyncStore,
    data: Value,
    rank: int,
    world_size: int,
    key_prefix: Key | None = None,
    timeout: Timeout | None = None,
    *,
    key: Key | None = None,
) -> list[bytes]:
    """Give `data` to all ranks and return the data of all ranks, in the order of the ranks."""
    prefix = key_given(key, "key_prefix", key_prefix)
    return await driver_of(store).drive(steps.synchronize(store.store, data, rank, world_size, prefix, timeout))


broadcast = function_for_tasks(collectives.broadcast, steps.broadcast)
gather = function_for_tasks(collectives.gather, steps.gather)


@explained_by(collectives.tree_barrier)
async def tree_barrier(
    group: AsyncStore,
    root: AsyncStore,
    rank: int,
    world_size: int,
    group_size: int,
    key: Key,
    timeout: Timeout | None = None,
    *,
    trace_timeout: Timeout = 10.0,
) -> None:
    """Wait until all ranks have called this function with `key`. A cancelled task may have arrived."""
    in_group, in_root = driver_of(group), driver_of(root)
    call = TreeCall(in_group.store, in_root.store, rank, world_size, group_size, key, timeout, trace_timeout)
    try:
        await in_group.drive(call.arrive())
        if call.is_representative:
            await in_root.drive(call.meet())
        await in_group.drive(call.leave())
    except StoreTimeoutError as error:
        await in_root.drive(call.time_out(error))
