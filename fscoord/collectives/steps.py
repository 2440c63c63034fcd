"""The functions of `fscoord.collectives` as generators. Each generator yields a request wherever it must wait.

The caller carries out the requests in a thread or in an event loop. Each generator has the arguments, the result and
the errors of the function of the same name in `fscoord.collectives`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

from fscoord._arguments import Key, Timeout, Value, check_rank, key_bytes, key_names, key_text, to_seconds, value_bytes
from fscoord._runtime import system, tracing
from fscoord._waiting.awaited import EXCHANGE, Awaited
from fscoord._waiting.timing import SlowWaitLogger
from fscoord._waiting.wait import KEYS, WaitRequest, WaitSteps, new_tuple
from fscoord.collectives.arrivals import Arrivals, Attempt, Decoder
from fscoord.errors import StoreTimeoutError, UsedBeforeError
from fscoord.store import NUM_MEMBERS, Store, barrier_steps, begin_span, how_to_run_again

T = TypeVar("T")


def barrier(
    store: Store,
    world_size: int,
    key_prefix: Key,
    barrier_timeout: Timeout | None,
    rank: int | None,
    rank_tracing_decoder: Decoder | None = None,
    trace_timeout: Timeout = 10.0,
    *,
    fail_fast: bool,
    span: tracing.Span | None = None,
    start: float | None = None,
    begun: object = None,
) -> WaitSteps[None]:
    """Execute `fscoord.barrier`.

    `start` is when the call began, by the monotonic clock; None means now. `span` is the trace span of the call, if
    this process records a trace. `begun` is the arrival that `Store._meet` has begun, or None.
    """
    if tracing.recorder is not None and span is None:
        given = (store, world_size, key_prefix, barrier_timeout, rank, rank_tracing_decoder, trace_timeout)
        span = begin_span("barrier", store, key_bytes(key_prefix), rank, "world_size", world_size)
        return (yield from tracing.record_steps(span, barrier(*given, fail_fast=fail_fast, span=span)))
    limit = to_seconds(store.timeout if barrier_timeout is None else barrier_timeout)
    if start is None:
        start = system.time.monotonic()
    is_usual = trace_timeout.__class__ is float and trace_timeout >= 0  # without a call
    trace_s = trace_timeout if is_usual else to_seconds(trace_timeout)
    prefix = key_bytes(key_prefix)
    if rank is None:
        check_needs_rank(rank, rank_tracing_decoder, fail_fast=fail_fast)
        return (yield from _anonymous_barrier(store, world_size, prefix, limit, start))
    rank, world_size = check_rank(rank, world_size)
    call = new_tuple(Attempt, (prefix, rank, world_size, limit, start, trace_s, rank_tracing_decoder))
    arrivals = Arrivals(store, prefix, call)
    try:
        text = yield arrivals.request(waits=not fail_fast, begun=begun)
        if text is not None:
            yield from arrivals.settle(text, waits=not fail_fast)
        if fail_fast:
            yield from arrivals.wait_alive()
        if span is not None and arrivals.is_repeated:
            span += ("repeated", 1)
    except StoreTimeoutError as error:
        arrivals.time_out(error)


def get_all(store: Store, rank: int, prefix: Key, world_size: int, timeout: Timeout | None) -> WaitSteps[list[bytes]]:
    """Execute `fscoord.get_all`."""
    call = _attempt(store, prefix, rank, world_size, timeout)
    return _recorded(_span("get_all", store, call), _collect(store, call, call.prefix, "get_all"))


def synchronize(
    store: Store, data: Value, rank: int, world_size: int, key_prefix: Key, timeout: Timeout | None
) -> WaitSteps[list[bytes]]:
    """Execute `fscoord.synchronize`."""
    call, content = _attempt(store, key_prefix, rank, world_size, timeout), value_bytes(data)
    span = _span("synchronize", store, call)
    return _recorded(span, _synchronize(store, call, content, span))


def broadcast(
    store: Store,
    data: Value | None,
    rank: int,
    world_size: int,
    key: Key,
    timeout: Timeout | None = None,
    *,
    source: int = 0,
) -> WaitSteps[bytes]:
    """Execute `fscoord.broadcast`."""
    call = _attempt(store, key, rank, world_size, timeout)
    source, _ = check_rank(source, call.world_size)
    return _recorded(_span("broadcast", store, call), _broadcast(store, call, data, source))


def gather(
    store: Store, data: Value, rank: int, world_size: int, key: Key, timeout: Timeout | None = None, *, target: int = 0
) -> WaitSteps[list[bytes] | None]:
    """Execute `fscoord.gather`."""
    call, content = _attempt(store, key, rank, world_size, timeout), value_bytes(data)
    target, _ = check_rank(target, call.world_size)
    return _recorded(_span("gather", store, call), _gather(store, call, content, target))


def _span(operation: str, store: Store, call: Attempt) -> tracing.Span | None:
    facts = ("world_size", call.world_size, "operation", operation)
    span = begin_span("exchange", store, call.prefix, call.rank, *facts)
    if span is not None:
        span[tracing.BEGIN] = int(call.start * 1e9)  # not later than the waits that are parts of it
    return span


def _recorded(span: tracing.Span | None, steps: WaitSteps[T]) -> WaitSteps[T]:
    return steps if span is None else tracing.record_steps(span, steps)


class _RankNeededError(ValueError, AssertionError):
    """An argument of `barrier` needs `rank`. The error is also an `AssertionError`, because torch raises one."""


def check_needs_rank(rank: int | None, rank_tracing_decoder: Decoder | None, *, fail_fast: bool) -> None:
    """Raise `ValueError` if `rank` is None, but another argument of `barrier` needs a rank."""
    if rank is None and (fail_fast or rank_tracing_decoder is not None):
        name = "fail_fast" if fail_fast else "rank_tracing_decoder"
        raise _RankNeededError(f"{name} needs rank: without ranks it is unknown which ranks have arrived")


def _synchronize(store: Store, call: Attempt, content: bytes, span: tracing.Span | None) -> WaitSteps[list[bytes]]:
    prefix = call.data_prefix()
    own = prefix + b"%d" % call.rank
    Arrivals(store, prefix + b"/finished", call).refuse_if_finished(own)
    if not _give(store, own, content) and span is not None:
        span += ("repeated", 1)
    yield from _meet(store, call, prefix)
    return (yield from _collect(store, call, prefix, "synchronize"))


def _broadcast(store: Store, call: Attempt, data: Value | None, source: int) -> WaitSteps[bytes]:
    key = call.prefix + b"/broadcast"
    if call.rank == source:
        if data is None:
            raise TypeError(f"rank {source} is the source, so its data must be str or bytes-like, not None")
        content = value_bytes(data)
        _give(store, key, content)
        return content
    try:
        yield from _await_keys(call, [key])
    except StoreTimeoutError as error:
        raise call.time_out("in broadcast", [source], error, store) from None
    return store.get(key)


def _gather(store: Store, call: Attempt, content: bytes, target: int) -> WaitSteps[list[bytes] | None]:
    prefix = call.data_prefix()
    end = prefix + b"/gathered"
    if store.check([end]):
        raise call.used_before(store)
    _give(store, prefix + b"%d" % call.rank, content)
    if call.rank != target:
        return None
    values = yield from _read_all(store, call, prefix, "gather")
    store.set(end, b"1")
    return values


def _attempt(store: Store, prefix: Key, rank: int, world_size: int, timeout: Timeout | None) -> Attempt:
    """Check the arguments of a call that begins now, and return them as an `Attempt`."""
    limit, start = _limit(store, timeout), system.time.monotonic()
    rank, world_size = check_rank(rank, world_size)
    return Attempt(key_bytes(prefix), rank, world_size, limit, start)


def _limit(store: Store, timeout: Timeout | None) -> float:
    return to_seconds(store.timeout if timeout is None else timeout)


def _anonymous_barrier(store: Store, world_size: int, prefix: bytes, timeout: float, start: float) -> WaitSteps[None]:
    try:
        yield from barrier_steps(store, prefix, world_size, timeout)
    except StoreTimeoutError as error:
        count = store.get(prefix + NUM_MEMBERS, default=None)
        if count is None:  # the server of a `TCPStore` counts in the key itself
            count = store.get(prefix, default=b"none")
        came = count.decode(errors="replace")
        mixed = (
            "; other callers gave a rank: all callers must give a rank, or none"
            if store.check([prefix + b"/arrivals"])
            else ""
        )
        raise StoreTimeoutError(
            f"Timed out waiting on barrier for key prefix: {key_text(prefix)} (world_size={world_size},"
            f" timeout={timeout:g}): {came} arrived; a barrier with rank also names the missing ranks{mixed}"
            f"{store._closer_look()}",
            keys=error.keys,
            holder=error.holder,
            waited=system.time.monotonic() - start,
        ) from None


def _collect(store: Store, call: Attempt, prefix: bytes, what: str) -> WaitSteps[list[bytes]]:
    values = yield from _read_all(store, call, prefix, what)
    arrivals = Arrivals(store, prefix + b"/finished", call)
    try:
        text = yield arrivals.request(waits=call.rank == 0, all_wait=False)
        if text is not None:
            yield from arrivals.settle(text, waits=call.rank == 0)
    except StoreTimeoutError as error:
        missing = arrivals.record_time_out()
        if missing:
            raise call.time_out(f"in {what}, waiting for the others to finish,", missing, error, store) from None
    return values


def _meet(store: Store, call: Attempt, prefix: bytes) -> WaitSteps[None]:
    """Wait for the key ``given``, which shows that all ranks have set their data.

    A wait for the keys of all ranks would be woken once for each key.
    """
    all_given = prefix + b"/given"
    if store.check(prefix + b"%d" % rank for rank in range(call.world_size)):
        store.set(all_given, b"1")
    else:
        with suppress(StoreTimeoutError):  # `_read_all`, which follows, raises the error that names the missing ranks
            yield from _await_keys(call, [all_given])


def _read_all(store: Store, call: Attempt, prefix: bytes, what: str) -> WaitSteps[list[bytes]]:
    keys = [prefix + b"%d" % rank for rank in range(call.world_size)]
    try:
        yield from _await_keys(call, keys)
    except StoreTimeoutError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            raise call.time_out(f"in {what}", missing, error, store) from None
    return store.multi_get(keys)


def _await_keys(call: Attempt, keys: list[bytes]) -> WaitSteps[None]:
    """Wait for `keys`, which other ranks set, until the timeout of `call`."""
    awaited = Awaited(EXCHANGE, key_text(call.prefix), call.world_size)
    words = f"{awaited} on rank {call.rank}"
    slow_logger = SlowWaitLogger(__name__, lambda: f"{words} ({key_names(keys)} missing)", awaited=awaited)
    try:
        yield WaitRequest(KEYS, keys, call.left(), slow_logger=slow_logger)
    finally:
        slow_logger.end()


def _give(store: Store, key: bytes, content: bytes) -> bool:
    """Set `key` to `content`. Return False if the key already has this value.

    Raises:
        UsedBeforeError: the key has another value. The value is unchanged, because another rank may have read it.
    """
    found = store.get(key, default=None)
    if found is None:
        store.set(key, content)
        return True
    if found != content:
        raise UsedBeforeError(
            f"key {key_text(key)!r} already holds other data: the prefix was used before, or two callers gave the"
            f" same rank; {how_to_run_again(store)}"
        )
    return False
