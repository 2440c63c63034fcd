"""Barriers and exchanges of data between ranks, on the contract of `~fscoord.Store` alone.

Names, arguments and the words of a time-out follow ``torch.distributed.elastic.utils.store``. A key prefix serves
once: nothing is removed afterwards, and whoever uses a finished prefix again gets a `~fscoord.BarrierError`.

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

from contextlib import suppress

from fscoord import _system as system
from fscoord._roll import Attempt, Decoder, Roll, attempt, check_rank
from fscoord._store_timeout import store_timeout
from fscoord.arguments import (
    DEFAULT_TIMEOUT,
    Key,
    Timeout,
    Value,
    key_bytes,
    key_text,
    positive,
    seconds,
    value_bytes,
)
from fscoord.errors import BarrierError, StoreTimeoutError
from fscoord.store import Store

__all__ = ["barrier", "broadcast", "gather", "get_all", "store_timeout", "synchronize"]


def barrier(
    store: Store,
    world_size: int,
    key_prefix: Key,
    barrier_timeout: Timeout = DEFAULT_TIMEOUT,
    rank: int | None = None,
    rank_tracing_decoder: Decoder | None = None,
    trace_timeout: Timeout = 10.0,
    *,
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
        barrier_timeout: how long to wait for the others, in seconds or as a `timedelta`.
        rank: which caller this is, 0 to `world_size` - 1.
        rank_tracing_decoder: turns a missing rank into what the error says of it, such as its host.
        trace_timeout: how much later than `barrier_timeout` the error may come, in order to name the missing ranks.
            (Writing one's own arrival is bounded by the store's timeout, as every write is.)
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
    if rank is None:
        if fail_fast:
            raise ValueError("fail_fast needs rank: without it nobody knows which ranks have come")
        if rank_tracing_decoder is not None:
            raise ValueError("rank_tracing_decoder needs rank: without it nobody knows which ranks have come")
        seconds(trace_timeout)
        _anonymous_barrier(store, positive("world_size", world_size), key_bytes(key_prefix), seconds(barrier_timeout))
        return
    call = attempt(key_prefix, rank, world_size, barrier_timeout, trace_timeout, rank_tracing_decoder)
    roll = Roll(store, call.prefix, call)
    try:
        complete = roll.arrive()
        if fail_fast:
            roll.wait_alive()
        elif not complete:
            roll.wait()
    except StoreTimeoutError as error:
        missing = roll.missing()
        roll.sign_off(bool(missing), call.trace_left())
        if missing:
            mixed = store.check([call.prefix + b"/num_members"])
            hint = "; some callers gave no rank: either all do, or none" if mixed else ""
            raise call.time_out("waiting on barrier", missing, error, store, hint) from error


def get_all(store: Store, rank: int, prefix: Key, world_size: int) -> list[bytes]:
    """Return the values of ``{prefix}0`` to ``{prefix}{world_size - 1}``, waiting for them up to the store's timeout.

    Rank 0 returns last, after all other ranks have read everything, because its process often runs the store.

    Raises:
        StoreTimeoutError: it names the ranks whose data did not come, or, on rank 0, those who have not finished.
        BarrierError: this rank has done this before, and all were through.
    """
    call = attempt(prefix, rank, world_size, store.timeout)
    return _collect(store, call, call.prefix, "get_all")


def synchronize(
    store: Store,
    data: Value,
    rank: int,
    world_size: int,
    key_prefix: Key,
    timeout: Timeout = DEFAULT_TIMEOUT,
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
        timeout: one limit for the whole of it, in seconds or as a `timedelta`.

    Raises:
        StoreTimeoutError: it names the ranks whose data did not come, or, on rank 0, those who have not finished.
        BarrierError: the prefix was used before. Nothing has been overwritten.
    """
    call, content = attempt(key_prefix, rank, world_size, timeout), value_bytes(data)
    prefix = call.data_prefix()
    own = prefix + b"%d" % rank
    Roll(store, prefix + b"/finished", call).refuse_if_finished(own)
    _give(store, own, content)
    _meet(store, call, prefix)
    return _collect(store, call, prefix, "synchronize")


def broadcast(
    store: Store,
    data: Value | None,
    rank: int,
    world_size: int,
    key_prefix: Key,
    timeout: Timeout = DEFAULT_TIMEOUT,
    *,
    source: int = 0,
) -> bytes:
    """Give the `data` of rank `source` to all ranks, and return it.

    The source does not wait for the others; they wait for it. The data stays, under ``{key_prefix}/broadcast``.

    Args:
        store: where they meet.
        data: what the source has to say; the others' is ignored, and may be None.
        rank: which rank this is, 0 to `world_size` - 1.
        world_size: how many ranks there are.
        key_prefix: names the exchange.
        timeout: how long to wait for the source, in seconds or as a `timedelta`.
        source: the rank that speaks.

    Raises:
        StoreTimeoutError: the source did not come.
        BarrierError: on the source, other data was broadcast under this prefix before. Nothing has been overwritten.
    """
    call = attempt(key_prefix, rank, world_size, timeout)
    check_rank(source, world_size)
    key = call.prefix + b"/broadcast"
    if rank == source:
        if data is None:
            raise TypeError(f"rank {rank} is the source: its data is str or bytes-like, not None")
        content = value_bytes(data)
        _give(store, key, content)
        return content
    try:
        store.wait([key], call.left())
    except StoreTimeoutError as error:
        raise call.time_out("in broadcast", [source], error, store) from error
    return store.get(key)


def gather(
    store: Store,
    data: Value,
    rank: int,
    world_size: int,
    key_prefix: Key,
    timeout: Timeout = DEFAULT_TIMEOUT,
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
        key_prefix: names the exchange.
        timeout: how long the target waits, in seconds or as a `timedelta`.
        target: the rank that listens.

    Raises:
        StoreTimeoutError: on the target; it names the ranks whose data did not come.
        BarrierError: the prefix was used before. Nothing has been overwritten.
    """
    call, content = attempt(key_prefix, rank, world_size, timeout), value_bytes(data)
    check_rank(target, world_size)
    prefix = call.data_prefix()
    end = prefix + b"/gathered"
    if store.check([end]):
        raise call.used_before()
    _give(store, prefix + b"%d" % rank, content)
    if rank != target:
        return None
    values = _read_all(store, call, prefix, "gather")
    store.set(end, b"1")
    return values


def _anonymous_barrier(store: Store, world_size: int, prefix: bytes, timeout: float) -> None:
    start = system.time.monotonic()
    try:
        store.barrier(prefix, world_size, timeout)
    except StoreTimeoutError as error:
        counter = prefix + b"/num_members"
        came = store.get(counter).decode() if store.check([counter]) else "none"
        mixed = "; other callers gave a rank: either all do, or none" if store.check([prefix + b"/arrivals"]) else ""
        raise StoreTimeoutError(
            f"Timed out waiting on barrier for key prefix: {key_text(prefix)} (world_size={world_size},"
            f" timeout={timeout:g}): {came} came; with rank it would name the missing{mixed}",
            keys=error.keys,
            holder=error.holder,
            waited=system.time.monotonic() - start,
        ) from error


def _collect(store: Store, call: Attempt, prefix: bytes, what: str) -> list[bytes]:
    values = _read_all(store, call, prefix, what)
    roll = Roll(store, prefix + b"/finished", call)
    try:
        if not roll.arrive() and call.rank == 0:
            roll.wait()
    except StoreTimeoutError as error:
        missing = roll.missing()
        roll.sign_off(bool(missing), call.trace_left())
        if missing:
            raise call.time_out(f"in {what}, waiting for the others to finish,", missing, error, store) from error
    return values


def _meet(store: Store, call: Attempt, prefix: bytes) -> None:
    """Wait until all have given their data, for one key: whoever waits for all of them is woken by each of them."""
    all_given = prefix + b"/given"
    if store.check(prefix + b"%d" % rank for rank in range(call.world_size)):
        store.set(all_given, b"1")
    else:
        with suppress(StoreTimeoutError):  # the look at the data that follows says who is missing
            store.wait([all_given], call.left())


def _read_all(store: Store, call: Attempt, prefix: bytes, what: str) -> list[bytes]:
    keys = [prefix + b"%d" % rank for rank in range(call.world_size)]
    try:
        store.wait(keys, call.left())
    except StoreTimeoutError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            raise call.time_out(f"in {what}", missing, error, store) from error
    return store.multi_get(keys)


def _give(store: Store, key: bytes, content: bytes) -> None:
    """Set `key` to `content`, unless it has another value: somebody may have read that."""
    if not store.check([key]):
        store.set(key, content)
    elif store.get(key) != content:
        raise BarrierError(
            f"key {key_text(key)!r} holds other data already: its prefix was used before, or two callers have one"
            " rank; give every exchange a prefix of its own"
        )
