"""Barriers and exchanges of data for tasks: names, arguments and errors of `fscoord.collectives`."""

from __future__ import annotations

from fscoord._arguments import Key, Timeout, Value
from fscoord.aio.store import AsyncStore
from fscoord.collectives import steps as turns
from fscoord.collectives.arrivals import Decoder

__all__ = ["barrier", "broadcast", "gather", "get_all", "synchronize"]


async def barrier(
    store: AsyncStore,
    world_size: int,
    key_prefix: Key,
    barrier_timeout: Timeout | None = None,
    rank: int | None = None,
    rank_tracing_decoder: Decoder | None = None,
    trace_timeout: Timeout = 10.0,
    *,
    fail_fast: bool = False,
) -> None:
    """Wait until `world_size` callers have come; see `fscoord.barrier`. Who is cancelled counts as one who came."""
    arguments = (world_size, key_prefix, barrier_timeout, rank, rank_tracing_decoder, trace_timeout)
    await store._take_turns(turns.barrier(store.store, *arguments, fail_fast=fail_fast))


async def get_all(store: AsyncStore, rank: int, prefix: Key, world_size: int) -> list[bytes]:
    """Return the values of all ranks; see `fscoord.get_all`."""
    return await store._take_turns(turns.get_all(store.store, rank, prefix, world_size))


async def synchronize(
    store: AsyncStore,
    data: Value,
    rank: int,
    world_size: int,
    key_prefix: Key,
    timeout: Timeout | None = None,
) -> list[bytes]:
    """Give `data` to all ranks and return the data of all; see `fscoord.synchronize`."""
    return await store._take_turns(turns.synchronize(store.store, data, rank, world_size, key_prefix, timeout))


async def broadcast(
    store: AsyncStore,
    data: Value | None,
    rank: int,
    world_size: int,
    key_prefix: Key,
    timeout: Timeout | None = None,
    *,
    source: int = 0,
) -> bytes:
    """Give the `data` of rank `source` to all ranks, and return it; see `fscoord.broadcast`."""
    return await store._take_turns(turns.broadcast(store.store, data, rank, world_size, key_prefix, timeout, source))


async def gather(
    store: AsyncStore,
    data: Value,
    rank: int,
    world_size: int,
    key_prefix: Key,
    timeout: Timeout | None = None,
    *,
    target: int = 0,
) -> list[bytes] | None:
    """Give the `data` of all ranks to rank `target`; see `fscoord.gather`."""
    return await store._take_turns(turns.gather(store.store, data, rank, world_size, key_prefix, timeout, target))
