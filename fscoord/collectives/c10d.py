"""The functions of torch's ``elastic.utils.store``, for stores of torch and other stores that are not of fscoord.

Such a store may be any object with the few methods that these functions call, for example a test double. The object may
lack the operations that `Arrivals` needs. So these functions make exactly torch's calls, in torch's order, with torch's
keys. Ranks that call torch's own functions can take part.

The functions do not import torch. Errors of the store pass unchanged, except a time-out in `barrier` with a rank. If
rank 0 looks for the missing ranks, `barrier` raises an error with torch's message: on rank 0 the message names the
missing ranks, on any other rank the message refers to rank 0. The protocols `BarrierStore` and `ExchangeStore` declare
the methods that the functions call, with the types of torch's stubs (torch/_C/_distributed_c10d.pyi).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Final, Protocol, cast, overload

from fscoord._arguments import (
    DEFAULT_TIMEOUT,
    Key,
    Timeout,
    Value,
    check_positive,
    check_rank,
    key_bytes,
    key_text,
    to_seconds,
)
from fscoord._runtime import system
from fscoord._runtime.interrupts import raise_if_foreign
from fscoord.collectives.arrivals import MISSING_MAX, Decoder
from fscoord.collectives.timeout import TimeoutStore, store_timeout
from fscoord.errors import FscoordError, StoreTimeoutError, joined
from fscoord.store import needed_store

IGNORED: Final = "<val_ignored>"
"""The value, as in torch, of keys whose values are never read."""

CALLED: Final = ("set", "add", "wait")
"""The methods that every store must have for these functions."""


class BarrierStore(TimeoutStore, Protocol):
    """A store on which `~fscoord.barrier` works: any `~fscoord.Store`, any store of torch, or a test double.

    The protocol has the methods that torch's ``barrier`` calls. Results of the type `object` are ignored. After a
    time-out ``wait`` must raise `TimeoutError`, a plain `LookupError`, torch's ``DistStoreError``, or a `RuntimeError`
    whose text contains "timeout".
    """

    def set(self, key: str, value: str, /) -> object:
        """Set the value of `key` to `value`."""

    def add(self, key: str, amount: int, /) -> int:
        """Add `amount` to the integer in `key`, and return the sum. A missing key counts as 0."""

    @overload
    def wait(self, keys: list[str], /) -> object: ...
    @overload
    def wait(self, keys: list[str], timeout: timedelta, /) -> object: ...
    def wait(self, keys: list[str], timeout: timedelta = ..., /) -> object:
        """Wait until all `keys` have values. Without `timeout`, the store's timeout applies."""


class ExchangeStore(BarrierStore, Protocol):
    """A store on which `~fscoord.synchronize`, `~fscoord.get_all` and `~fscoord.barrier` work.

    Any `~fscoord.Store` and any store of torch conforms. `~fscoord.synchronize` passes its data to ``set`` unchanged.
    The data may be ``bytes``, as in torch's ``synchronize``, although torch's stubs say ``str``.
    """

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Wait until all `keys` have values, and return the values in the order of `keys`."""


def get_all(store: ExchangeStore, rank: int, prefix: Key, world_size: int, timeout: Timeout | None) -> list[bytes]:
    """Make the calls of torch's ``get_all``. If `timeout` is None, the store's timeout applies."""
    needed_store(store, *CALLED)
    rank, world_size = check_rank(rank, world_size)
    name = key_text(key_bytes(prefix))
    with nullcontext() if timeout is None else store_timeout(store, timeout):
        return _get_all(store, rank, name, world_size)


def synchronize(
    store: ExchangeStore, data: Value, rank: int, world_size: int, key_prefix: Key, timeout: Timeout | None
) -> list[bytes]:
    """Make the calls of torch's ``synchronize``. If `timeout` is None, the timeout is 300 seconds, as in torch."""
    needed_store(store, *CALLED)
    rank, world_size = check_rank(rank, world_size)
    prefix = key_text(key_bytes(key_prefix))
    with _limited(store, timeout):
        store.set(f"{prefix}{rank}", cast(Any, data))  # see `ExchangeStore`
        return _get_all(store, rank, prefix, world_size)


def barrier(
    store: BarrierStore,
    world_size: int,
    key_prefix: Key,
    barrier_timeout: Timeout | None,
    rank: int | None,
    rank_tracing_decoder: Decoder | None,
    trace_timeout: Timeout,
) -> None:
    """Make the calls of torch's ``barrier``.

    Raises:
        StoreTimeoutError: the wait timed out and `rank` is given. On rank 0 the error names the missing ranks. On any
            other rank the error refers to rank 0. If rank 0 does not answer, the other rank raises the store's own
            error.
    """
    needed_store(store, *CALLED)
    world_size = check_positive("world_size", world_size)
    if rank is not None:
        rank, world_size = check_rank(rank, world_size)
    prefix, trace_s, started = key_text(key_bytes(key_prefix)), to_seconds(trace_timeout), system.time.monotonic()
    with _limited(store, barrier_timeout):
        last_member = _arrive(store, world_size, prefix)
        try:
            store.wait([last_member])
        except Exception as error:
            if rank is None or not _is_timeout(error, store):
                raise
            named = rank_tracing_decoder or str
            if rank == 0:
                names = _find_missing(store, world_size, prefix, named, trace_s)
                shown = ", ".join(names)
            elif _is_rank_0_there(store, prefix, rank):
                names, shown = [], f"<check rank 0 ({named(0)}) for missing rank info>"
            else:
                raise
            limit = to_seconds(DEFAULT_TIMEOUT if barrier_timeout is None else barrier_timeout)
            ours: FscoordError = StoreTimeoutError(
                f"Timed out waiting on barrier on rank {rank}, for key prefix: {prefix} (world_size={world_size},"
                f" missing_ranks=[{shown}], timeout={limit:g})",
                keys=[last_member],
                missing_ranks=names,
                waited=system.time.monotonic() - started,
            )
            theirs = _store_error_of_torch(store)
            raise (ours if theirs is None else joined(ours, theirs)) from error


def _limited(store: BarrierStore, timeout: Timeout | None) -> AbstractContextManager[None]:
    """Return a context manager in which `store` has the timeout `timeout`; None means torch's default of 300 seconds.

    If `timeout` is None, a test double without ``set_timeout`` keeps its own limit.
    """
    if timeout is None and not hasattr(store, "set_timeout"):
        return nullcontext()
    return store_timeout(store, DEFAULT_TIMEOUT if timeout is None else timeout)


def _get_all(store: ExchangeStore, rank: int, prefix: str, world_size: int) -> list[bytes]:
    values = store.multi_get([f"{prefix}{other}" for other in range(world_size)])
    last_member = _arrive(store, world_size, f"{prefix}/finished")
    if rank == 0:  # the process of rank 0 often runs the server, so it must end last
        store.wait([last_member])
    return values


def _arrive(store: BarrierStore, world_size: int, prefix: str) -> str:
    """Count this caller at the barrier `prefix`, and return the key that the last caller sets."""
    last_member = f"{prefix}/last_member"
    if store.add(f"{prefix}/num_members", 1) == world_size:
        store.set(last_member, IGNORED)
    return last_member


def _find_missing(store: BarrierStore, world_size: int, prefix: str, named: Decoder, trace_s: float) -> Sequence[str]:
    """Return the names of the ranks that do not set their trace key in `trace_s` seconds. Only rank 0 calls this."""
    store.set(f"{prefix}0/TRACE", IGNORED)
    missing: list[str] = []
    for rank in range(1, world_size):
        if len(missing) >= MISSING_MAX:
            break
        # All living ranks time out at about the same time. So after one missing rank, the others need no more time.
        patience = timedelta(milliseconds=1) if missing else timedelta(seconds=trace_s)
        try:
            store.wait([f"{prefix}{rank}/TRACE"], patience)
        except Exception as error:
            if not _is_timeout(error, store):
                raise
            missing.append(str(named(rank)))
    store.set(f"{prefix}/TRACING_GATE", IGNORED)
    return missing


def _is_rank_0_there(store: BarrierStore, prefix: str, rank: int) -> bool:
    """Set the trace key of `rank`, and return whether rank 0 answers within the store's timeout."""
    store.set(f"{prefix}{rank}/TRACE", IGNORED)
    try:
        store.wait([f"{prefix}/TRACING_GATE"])
    except Exception as error:
        if not _is_timeout(error, store):
            raise
        return False
    return True


def _store_error_of_torch(store: BarrierStore) -> type[Exception] | None:
    """Return torch's ``DistStoreError`` if `store` is a store of torch; otherwise None."""
    if any(each.__module__.startswith("torch.") for each in type(store).__mro__):
        found: type[Exception] | None = getattr(sys.modules.get("torch.distributed"), "DistStoreError", None)
        return found
    return None


def _is_timeout(error: Exception, store: BarrierStore) -> bool:
    """Return whether `error` is a time-out of `store`.

    torch's stores raise ``DistStoreError`` or a plain `RuntimeError`, and its EtcdStore raises a plain `LookupError`.
    """
    if isinstance(error, TimeoutError) or type(error) is LookupError:
        return True
    if "DistStoreError" in {each.__name__ for each in type(error).__mro__}:
        return True
    raise_if_foreign(error, "torch", type(store).__module__)
    return isinstance(error, RuntimeError) and "timeout" in str(error).lower()
