"""One convention for time: None is the store's timeout, ``math.inf`` no limit, 0 looks once; seconds or `timedelta`."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from support.internals import Timeout
from support.recipes import RECIPES, WAITED_FOR, new

import fscoord
from fscoord import (
    FileStore,
    HashStore,
    Store,
    StoreTimeoutError,
    aio,
    barrier,
    barriers,
    broadcast,
    gather,
    inspect as inspect_logs,
    open_store,
    recipes,
    rendezvous,
    synchronize,
)
from fscoord._arguments import DEFAULT_TIMEOUT
from fscoord.barriers import StoreBarrier
from fscoord.inspect import copy, repair, verify
from fscoord.recipes import (
    DoubleBarrier,
    Election,
    Lock,
    Membership,
    Queue,
    RankZeroFirst,
    RateLimiter,
    ReadWriteLock,
    RLock,
    Semaphore,
    once,
)


@pytest.fixture
def log(tmp_path: Path) -> str:
    with FileStore(tmp_path / "log") as store:
        store.set("k", "v")
    return str(tmp_path / "log")


READERS: list[Callable[[str, Timeout], object]] = [
    lambda log, timeout: verify(log, timeout=timeout).verdict == "sound",
    lambda log, timeout: repair(log, f"{log}.repaired", timeout=timeout).kept == 2,
    lambda log, timeout: copy(log, f"{log}.copy-{timeout}", timeout=timeout).kept == 2,
]


@pytest.mark.parametrize("timeout", [0, 0.5, math.inf, timedelta(seconds=1), timedelta.max])
@pytest.mark.parametrize("read", READERS, ids=["verify", "repair", "copy"])
def test_log_tools_accept_a_timeout_in_seconds_as_timedelta_or_unlimited(
    read: Callable[[str, Timeout], object], log: str, timeout: Timeout
) -> None:
    assert read(log, timeout)


@pytest.mark.parametrize("read", READERS, ids=["verify", "repair", "copy"])
def test_log_tools_refuse_a_timeout_below_zero(read: Callable[[str, Timeout], object], log: str) -> None:
    with pytest.raises(ValueError, match="timeout must be >= 0, got -1"):
        read(log, -1)


# Every call that waits


SHORT_S = 0.02


def public_callables() -> dict[str, Any]:
    """Return every public function, class and method, by its name."""
    found: dict[str, Any] = {}
    for module in (fscoord, recipes, aio, barriers, inspect_logs, rendezvous):
        for name in module.__all__:
            each = getattr(module, name)
            if inspect.isclass(each):
                found |= {
                    f"{module.__name__}.{name}.{member}": getattr(each, member)
                    for member in dir(each)
                    if (not member.startswith("_") or member == "__init__") and callable(getattr(each, member))
                }
            elif callable(each):
                found[f"{module.__name__}.{name}"] = each
    return found


# No default: a store's timeout is what is set. Ten seconds: a file that is read by its path has no handle.
NO_DEFAULT = {"set_timeout", "store_timeout"}
TEN_SECONDS = {"verify", "repair", "copy"}
NO_LIMIT = {"watch", "campaign"}
NO_STORE = {"wait_visible"}


@functools.cache
def timeouts() -> dict[str, inspect.Parameter]:
    found = {}
    for name, call in public_callables().items():
        try:
            parameters = inspect.signature(call).parameters
        except (TypeError, ValueError):
            continue
        if "timeout" in parameters:
            found[name] = parameters["timeout"]
    return found


@pytest.mark.parametrize("name", timeouts())
def test_timeout_default_is_none_except_for_the_listed_calls(name: str) -> None:
    parameter, called = timeouts()[name], name.rpartition(".")[2]
    if "RendezvousTimeout" in str(parameter.annotation):  # torch's, of four steps
        return
    assert "Timeout" in str(parameter.annotation), "seconds or a timedelta"
    if called in NO_DEFAULT:
        assert parameter.default is inspect.Parameter.empty
    elif called in TEN_SECONDS:
        assert parameter.default == 10
    elif called in NO_STORE:
        assert parameter.default == DEFAULT_TIMEOUT
    elif called in NO_LIMIT:
        assert parameter.default == math.inf
    elif called == "acquire" and "RateLimiter" not in name:
        assert parameter.default == -1
    else:
        assert parameter.default is None
    assert called in NO_DEFAULT | TEN_SECONDS | NO_STORE or "None" in str(parameter.annotation)


def test_timeout_parameters_are_found_in_the_public_interface() -> None:
    assert len(timeouts()) > 60


def test_timeout_is_the_name_of_every_public_limit() -> None:
    """Those of torch keep their names. A call with two limits names the second one."""
    other = {
        f"{name}({parameter})"
        for name, call in public_callables().items()
        if inspect.isfunction(call)
        for parameter in inspect.signature(call).parameters
        if parameter in ("limit", "patience", "wait", "seconds") or ("timeout" in parameter and parameter != "timeout")
    }
    of_torch = {
        "fscoord.EtcdStore.wait(override_timeout)",
        "fscoord.barriers.TCPStoreBarrier.__init__(timeout_barrier_init_secs)",
        "fscoord.barriers.TCPStoreBarrier.__init__(timeout_secs)",
        *(
            f"{package}.barrier({parameter})"
            for package in ("fscoord", "fscoord.aio")
            for parameter in ("barrier_timeout", "trace_timeout")
        ),
        "fscoord.aio.tree_barrier(trace_timeout)",
    }
    assert other == of_torch | {"fscoord.rendezvous.static_rendezvous(restart_timeout)"}


Waits = Callable[[Store, dict[str, Any]], object]


def waits_for(kind: str) -> Waits:
    return lambda store, given: RECIPES[kind].wait(new(kind, store, "x"), **given)  # type: ignore[misc]


WAITS: dict[str, Waits] = {
    **{f"wait for {name}": waits_for(name) for name in WAITED_FOR},
    "wait": lambda store, given: store.wait(["k"], **given),
    "wait_alive": lambda store, given: store.wait_alive(["k"], [0], **given),
    "wait_sessions": lambda store, given: store.wait_sessions(["k"], [1], **given),
    "Store.barrier": lambda store, given: store.barrier("b", 2, **given),
    "barrier": lambda store, given: barrier(store, 2, "b", *given.values()),
    "barrier, with rank": lambda store, given: barrier(store, 2, "b", *given.values(), rank=0),
    "synchronize": lambda store, given: synchronize(store, "d", 0, 2, "s", **given),
    "broadcast": lambda store, given: broadcast(store, None, 1, 2, "b", **given),
    "gather": lambda store, given: gather(store, "d", 0, 2, "g", **given),
    "DoubleBarrier": lambda store, given: DoubleBarrier(store, "d", 2, 0, **given).enter(),
    "enter": lambda store, given: DoubleBarrier(store, "d", 2, 0).enter(**given),
    "leave": lambda store, given: DoubleBarrier(store, "d", 2, 0).leave(**given),
    "RankZeroFirst": lambda store, given: RankZeroFirst(store, "r", 1, **given).__enter__(),
    "Queue": lambda store, given: Queue(store, "q", **given).take(),
    "Lock": lambda store, given: Lock(store, "taken", **given).__enter__(),
    "once": lambda store, given: once(store, "work", lambda: "v", **given),
    "Membership.watch": lambda store, given: next(Membership(store, "m").watch(**given)),
    "StoreBarrier": lambda store, given: StoreBarrier(store, rank=0, world_size=2, **given).execute_barrier(),
    "execute_barrier": lambda store, given: StoreBarrier(store, rank=0, world_size=2).execute_barrier(**given),
}
ACQUISITIONS: dict[str, Waits] = {
    "acquire": lambda store, given: Lock(store, "taken").acquire(**given),
    "RLock.acquire": lambda store, given: RLock(store, "taken").acquire(**given),
    "Lock(timeout)": lambda store, given: Lock(store, "taken", **given).acquire(timeout=None),
    "Semaphore.acquire": lambda store, given: Semaphore(store, "taken").acquire(**given),
    "reader.acquire": lambda store, given: ReadWriteLock(store, "taken").reader.acquire(**given),
    "campaign": lambda store, given: Election(store, "taken").campaign(**given),
}


@pytest.fixture
def store() -> Iterator[Store]:
    """A store in which another holder has the lock "taken" and does the work "work"."""
    with HashStore(timeout=SHORT_S) as store:
        for name in ("taken", "work"):
            assert Lock(store.clone(), name).acquire()
        yield store


@pytest.mark.parametrize(
    "given", [{}, {"timeout": None}, {"timeout": 0}, {"timeout": timedelta(seconds=SHORT_S)}], ids=str
)
@pytest.mark.parametrize("call", WAITS)
def test_wait_without_a_timeout_has_that_of_the_store(call: str, given: dict[str, Any], store: Store) -> None:
    if call == "Membership.watch" and not given:
        return  # without limit
    started = time.monotonic()
    with pytest.raises(StoreTimeoutError):
        WAITS[call](store, given)
    waited = time.monotonic() - started
    assert waited >= (0 if given.get("timeout") == 0 else SHORT_S)


@pytest.mark.parametrize("given", [{"timeout": None}, {"timeout": 0}, {"timeout": SHORT_S}], ids=str)
@pytest.mark.parametrize("call", ACQUISITIONS)
def test_acquisition_that_times_out_returns_false(call: str, given: dict[str, Any], store: Store) -> None:
    if call == "Semaphore.acquire":
        store = HashStore(timeout=SHORT_S)
        assert Semaphore(store, "taken").acquire()
    assert ACQUISITIONS[call](store, given) is False


@pytest.mark.parametrize("timeout", [-1, -0.5, math.nan, -math.inf, timedelta(seconds=-1)], ids=str)
@pytest.mark.parametrize("call", [*WAITS, "campaign", "Lock(timeout)"])
def test_timeout_below_zero_is_refused(call: str, timeout: Timeout, store: Store) -> None:
    with pytest.raises(ValueError, match="timeout must be >= 0, got"):
        (WAITS | ACQUISITIONS)[call](store, {"timeout": timeout})


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("ttl", lambda store: Lock(store, "lock", ttl=-1)),
        ("per", lambda store: RateLimiter(store, "rate", 1, per=-1)),
        ("delay", lambda store: Queue(store, "queue").put("item", delay=-1)),
        ("expires", lambda store: Queue(store, "queue").put("item", expires=-1)),
    ],
)
def test_time_below_zero_is_refused_by_its_own_name(name: str, call: Callable[[Store], object], store: Store) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be >= 0, got -1.0$"):
        call(store)


@pytest.mark.parametrize("timeout", [-1, -1.0, math.inf, timedelta.max], ids=str)
def test_acquisition_without_limit_is_minus_one_or_infinite(timeout: Timeout, store: Store) -> None:
    assert Lock(store, "free").acquire(timeout=timeout)
    assert RLock(store, "free too").acquire(timeout=timeout)


@pytest.mark.parametrize("timeout", [-0.5, -2, math.nan, timedelta(seconds=-1)], ids=str)
def test_acquisition_refuses_negative_timeouts_other_than_minus_one(timeout: Timeout, store: Store) -> None:
    with pytest.raises(ValueError, match="timeout must be >= 0, got"):
        Lock(store, "free").acquire(timeout=timeout)


def test_acquisition_that_does_not_block_takes_no_timeout() -> None:
    with HashStore() as store:
        with pytest.raises(ValueError, match="can't specify a timeout"):
            Lock(store, "free").acquire(blocking=False, timeout=1)
        assert Lock(store, "free").acquire(blocking=False, timeout=None)


@pytest.mark.parametrize("timeout", [math.inf, timedelta.max], ids=str)
def test_waits_without_limit_end_when_their_condition_holds(timeout: Timeout) -> None:
    with HashStore(timeout=0) as store:
        store.set("k", "v")
        store.wait(["k"], timeout)
        store.barrier("b", 1, timeout)
        assert synchronize(store, "d", 0, 1, "s", timeout) == [b"d"]
        assert barrier(store, 1, "b2", timeout, 0) is None
        assert Election(store, "e").campaign(timeout)
        assert Election(store, "e").observe(timeout=timeout).term == 1
        Queue(store, "q").put("item")
        assert Queue(store, "q").take(timeout=timeout).data == b"item"
        assert once(store, "o", lambda: "v", timeout=timeout) == b"v"


# How long a store's operations wait


@pytest.mark.parametrize(("timeout", "seconds"), [(None, 300), (0, 0), (1.5, 1.5), (timedelta(minutes=1), 60)], ids=str)
def test_store_timeout_is_300_seconds_by_default(timeout: Timeout | None, seconds: float, tmp_path: Path) -> None:
    made: list[Store] = [
        HashStore(timeout=timeout),
        HashStore.named("timeouts", timeout=timeout),
        open_store("mem:", timeout=timeout),
        FileStore(tmp_path / "log", timeout=timeout),
        open_store(tmp_path / "log", timeout=timeout),
    ]
    for store in made:
        assert store.timeout == timedelta(seconds=seconds)
        store.close()


def test_timeout_of_none_leaves_that_of_the_url() -> None:
    with open_store("mem:?timeout=7", timeout=None) as store:
        assert store.timeout == timedelta(seconds=7)
    with open_store("mem:?timeout=7", timeout=3) as store:
        assert store.timeout == timedelta(seconds=3)


async def acquisitions(store: aio.AsyncStore) -> None:
    for lock in (aio.Lock(store, "taken"), aio.RLock(store, "taken"), aio.Election(store, "taken")):
        assert not await lock.acquire(timeout=None)
        assert not await lock.acquire(timeout=0)
    election = aio.Election(store, "taken")
    assert not await election.campaign(None)
    with pytest.raises(ValueError, match="timeout must be >= 0, got -1"):
        await election.campaign(-1)
    assert await aio.Lock(store, "free").acquire(timeout=-1)
    assert await aio.Lock(store, "free too").acquire(timeout=math.inf)
    assert await aio.Election(store, "office").campaign()


def test_tasks_have_the_same_timeouts(store: Store) -> None:
    asyncio.run(acquisitions(aio.AsyncStore(store)))
