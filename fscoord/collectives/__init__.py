"""Barriers and exchanges of data between ranks, on the contract of `~fscoord.Store` alone.

Names, positional arguments and the words of a time-out follow ``torch.distributed.elastic.utils.store``. By keyword all
functions also take ``world_size``, ``key`` and ``timeout``, whatever torch calls these. A key prefix serves once:
nothing is removed afterwards, and whoever uses a finished prefix again gets a `~fscoord.BarrierError`.

**Keys.** Of torch's keys these are kept:

- ``{prefix}/num_members`` and ``{prefix}/last_member`` for a barrier without ranks: it is `Store.barrier`, which is
  c10d's, so that torch's processes can meet ours at it, and some stores do it in one round trip.
- ``{prefix}{i}`` for the data of `get_all`, because its callers write that data; and ``{prefix}/finished`` for what
  follows, as the prefix of a barrier with ranks.

A barrier with ranks can't use the first two: a counter counts a rank that tries again twice, and can't say who is
missing. It keeps a roll instead, ``{prefix}/arrivals``, to which each arrival appends one token, and which therefore
knows at any time, for everybody, who has come; ``{prefix}/complete`` appears when all have, and is all that the others
wait for. So a time-out needs no second meeting to find the missing, and ``{prefix}{rank}/TRACE`` and
``{prefix}/TRACING_GATE`` are gone, and with them the prefixes that collided (``a1`` + ``0`` = ``a`` + ``10``).

Where ``{prefix}{rank}`` holds data that is written here (`synchronize`, `gather`), a prefix that ends in a digit or a
colon gets a colon first, ``a1:0``, so that no two prefixes share a key; all others are as in torch. `synchronize` adds
``{prefix}/given``, which appears when all data is there: whoever waited for N keys would be woken N times.
"""

from __future__ import annotations

from typing import overload

from fscoord._waiting.request import take_turns
from fscoord.arguments import Key, Timeout, Value, key_given, timeout_given
from fscoord.collectives import steps as turns
from fscoord.collectives.arrivals import Decoder
from fscoord.collectives.timeout import store_timeout
from fscoord.store import Store

__all__ = ["barrier", "broadcast", "gather", "get_all", "store_timeout", "synchronize"]


@overload
def barrier(
    store: Store,
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
    store: Store,
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
    store: Store,
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
    """Wait until `world_size` callers have called this with `key_prefix`.

    With `rank`, arriving is idempotent: a rank that tries again, here or in a new process, counts once; after a
    time-out it passes even if the others have gone on meanwhile. Without `rank` every call counts. All callers of one
    barrier give a rank, or none does.

    Each rank costs one write, one read and one wait; the last one, one write more.

    Args:
        store: where the callers meet.
        world_size: how many must come; the same for all.
        key_prefix: names the barrier; it serves once.
        barrier_timeout: how long to wait for the others, in seconds or as a `timedelta`; None means the store's
            timeout.
        rank: which caller this is, 0 to `world_size` - 1.
        rank_tracing_decoder: turns a missing rank into what the error says of it, such as its host.
        trace_timeout: how much later than `barrier_timeout` the error may come, in order to name the missing ranks.
            (Writing one's own arrival is bounded by the store's timeout, as every write is.)
        key: another name of `key_prefix`.
        timeout: another name of `barrier_timeout`.
        fail_fast: with `rank`, raise as soon as a rank that has not come is known dead (see `Store.dead_ranks`). All
            who came before raise, with the same verdict; for who comes later the barrier begins anew, so that a rank
            that was started again can meet the others there. All callers of one barrier ask for it, or none does. On
            a store that can't tell the dead (see `Store.has_liveness`) it does nothing.

    Raises:
        StoreTimeoutError: not all came. On every rank, and on every store, it says rank, key prefix, world size,
            timeout and the ranks that are missing (16 at most, and how many more), the dead apart from the late where
            the store can tell them.
        BrokenBarrierError: with `fail_fast`, ranks that are missing are dead.
        BarrierError: more than `world_size` callers came, or the barrier was finished before, or the callers
            disagree about `world_size`, or `rank` is not below it.
        ValueError: there is a decoder, or `fail_fast`, but no `rank`.
    """
    prefix = key_given(key, "key_prefix", key_prefix)
    limit = timeout_given(timeout, "barrier_timeout", barrier_timeout)
    arguments = (world_size, prefix, limit, rank, rank_tracing_decoder, trace_timeout)
    take_turns(store, turns.barrier(store, *arguments, fail_fast=fail_fast))


@overload
def get_all(
    store: Store, rank: int, prefix: Key, world_size: int, *, timeout: Timeout | None = None
) -> list[bytes]: ...


@overload
def get_all(store: Store, rank: int, *, key: Key, world_size: int, timeout: Timeout | None = None) -> list[bytes]: ...


def get_all(
    store: Store,
    rank: int,
    prefix: Key | None = None,
    world_size: int | None = None,
    *,
    key: Key | None = None,
    timeout: Timeout | None = None,
) -> list[bytes]:
    """Return the values of ``{prefix}0`` to ``{prefix}{world_size - 1}``, waiting for them.

    Rank 0 returns last, after all other ranks have read everything, because its process often runs the store.

    Args:
        store: where the values are.
        rank: which rank this is, 0 to `world_size` - 1.
        prefix: what the keys of the values begin with.
        world_size: how many ranks there are.
        key: another name of `prefix`.
        timeout: one limit for the whole of it, in seconds or as a `timedelta`; None means the store's timeout.

    Raises:
        StoreTimeoutError: it names the ranks whose data did not come, or, on rank 0, those who have not finished.
        BarrierError: this rank has done this before, and all were through.
    """
    if world_size is None:
        raise TypeError("world_size is missing")
    return take_turns(store, turns.get_all(store, rank, key_given(key, "prefix", prefix), world_size, timeout))


@overload
def synchronize(
    store: Store,
    data: Value,
    rank: int,
    world_size: int,
    key_prefix: Key,
    timeout: Timeout | None = None,
) -> list[bytes]: ...


@overload
def synchronize(
    store: Store,
    data: Value,
    rank: int,
    world_size: int,
    *,
    key: Key,
    timeout: Timeout | None = None,
) -> list[bytes]: ...


def synchronize(
    store: Store,
    data: Value,
    rank: int,
    world_size: int,
    key_prefix: Key | None = None,
    timeout: Timeout | None = None,
    *,
    key: Key | None = None,
) -> list[bytes]:
    """Give `data` to all ranks and return the data of all ranks, in their order.

    Rank 0 returns last, as in `get_all`. **The data stays in the store**, so a key prefix serves once. A rank may try
    again after a time-out, with the same data: somebody may have read it.

    Args:
        store: where they meet.
        data: what this rank has to say.
        rank: which rank this is, 0 to `world_size` - 1.
        world_size: how many ranks there are.
        key_prefix: names the exchange.
        timeout: one limit for the whole of it, in seconds or as a `timedelta`; None means the store's timeout.
        key: another name of `key_prefix`.

    Raises:
        StoreTimeoutError: it names the ranks whose data did not come, or, on rank 0, those who have not finished.
        BarrierError: the prefix was used before. Nothing has been overwritten.
    """
    prefix = key_given(key, "key_prefix", key_prefix)
    return take_turns(store, turns.synchronize(store, data, rank, world_size, prefix, timeout))


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
    """Give the `data` of rank `source` to all ranks, and return it.

    The source does not wait for the others; they wait for it. The data stays, under ``{key}/broadcast``.

    Args:
        store: where they meet.
        data: what the source has to say; the others' is ignored, and may be None.
        rank: which rank this is, 0 to `world_size` - 1.
        world_size: how many ranks there are.
        key: names the exchange.
        timeout: how long to wait for the source, in seconds or as a `timedelta`; None means the store's timeout.
        source: the rank that speaks.

    Raises:
        StoreTimeoutError: the source did not come.
        BarrierError: on the source, other data was broadcast under this key before. Nothing has been overwritten.
    """
    return take_turns(store, turns.broadcast(store, data, rank, world_size, key, timeout, source))


def gather(
    store: Store,
    data: Value,
    rank: int,
    world_size: int,
    key: Key,
    timeout: Timeout | None = None,
    *,
    target: int = 0,
) -> list[bytes] | None:
    """Give the `data` of all ranks to rank `target`, which gets it in the order of the ranks; the others get None.

    Only the target waits. The data stays in the store.

    Args:
        store: where they meet.
        data: what this rank has to say.
        rank: which rank this is, 0 to `world_size` - 1.
        world_size: how many ranks there are.
        key: names the exchange.
        timeout: how long the target waits, in seconds or as a `timedelta`; None means the store's timeout.
        target: the rank that listens.

    Raises:
        StoreTimeoutError: on the target; it names the ranks whose data did not come.
        BarrierError: the key was used before. Nothing has been overwritten.
    """
    return take_turns(store, turns.gather(store, data, rank, world_size, key, timeout, target))
