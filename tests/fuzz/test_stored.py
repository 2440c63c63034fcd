"""Random content under the keys of recipes, barriers and exchanges: a reader goes on, or reports the content."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from support.internals import check_int64, key_bytes
from support.recipes import RECIPES, new

from fscoord import (
    BarrierError,
    FscoordError,
    HashStore,
    RendezvousStateError,
    barrier,
    broadcast,
    gather,
    get_all,
    synchronize,
)
from fscoord.barriers import StoreBarrier
from fscoord.launch.agent import Agent, Job
from fscoord.recipes import DoubleBarrier, Lock, Queue, ReadWriteLock, Semaphore, force_release, once
from fscoord.store import Store


class Sessions(HashStore):
    """A store that is asked about sessions and ranks, and refuses what can be none, as `FileStore` does."""

    has_liveness = True
    session = 1

    def dead_sessions(self, numbers: Iterable[int]) -> list[int]:
        return [number for number in numbers if check_int64("session", number) == 2]

    def dead_ranks(self, ranks: Iterable[int]) -> list[int]:
        return [rank for rank in ranks if check_int64("rank", rank) == 1]

    def clone(self) -> Sessions:
        other = Sessions(timeout=self.timeout)
        other._shared = self._shared
        return other


Calls = list[Callable[[], Any]]


def locks(store: Store) -> Calls:
    lock, turns, semaphore = Lock(store, "r"), ReadWriteLock(store, "r"), Semaphore(store, "r", 2)
    return [
        lock.holders,
        lock.waiters,
        lambda: lock.acquire(timeout=0),
        lock.release,
        lambda: turns.reader.acquire(timeout=0),
        turns.reader.release,
        lambda: semaphore.acquire(timeout=0),
        semaphore.release,
        lambda: force_release(store, "r", 1),
    ]


def alone(kind: str) -> Callable[[Store], Calls]:
    def calls(store: Store) -> Calls:
        recipe, made = RECIPES[kind], new(kind, store, "r")
        wait = recipe.wait
        return [*([lambda: wait(made, timeout=0)] if wait else []), *recipe.calls(made)]

    return calls


def the_work(store: Store) -> Calls:
    return [lambda: once(store, "r", lambda: b"done", timeout=0)] * 2


def meetings(store: Store) -> Calls:
    row = StoreBarrier(store, "r", rank=0, world_size=1, timeout=0)
    two = [DoubleBarrier(store, "r", 2, rank, 0) for rank in (0, 1)]
    return [
        row.execute_barrier,
        row.execute_barrier,
        lambda: row.sequence,
        *(each.enter for each in two),
        *(lambda rank=rank: barrier(store, 2, "r", 0, rank, fail_fast=rank == 0) for rank in (0, 1, 1)),  # type: ignore[misc]
        *[lambda: barrier(store, 2, "r", 0)] * 2,
        *(lambda rank=rank: synchronize(store, b"data", rank, 2, "r", 0) for rank in (0, 1, 0)),  # type: ignore[misc]
        *(lambda rank=rank: get_all(store, rank, "r", 2) for rank in (0, 1)),  # type: ignore[misc]
        *(lambda rank=rank: broadcast(store, b"data", rank, 2, "r", 0) for rank in (0, 1)),  # type: ignore[misc]
        *(lambda rank=rank: gather(store, b"data", rank, 2, "r", 0) for rank in (1, 0)),  # type: ignore[misc]
    ]


KINDS = {
    "locks": locks,
    **{name: alone(name) for name in RECIPES},
    "once": the_work,
    "meetings": meetings,
}


def outcome(call: Callable[[], Any]) -> Exception | None:
    """Return the error that `call` raises, which must be a documented one."""
    try:
        call()
    except FscoordError as error:
        assert len(str(error)) < 10_000
        return error
    except (RuntimeError, IndexError) as error:  # nothing was acquired, joined or taken, so it can't be given back
        assert "is not held" in str(error) or type(error) is RuntimeError or "list index" in str(error)
        return error
    except ValueError as error:  # said of `Semaphore`: another program gives another value, or has a lock of the name
        assert re.search("all contenders must give the same value|as a lock, not as a semaphore", str(error))
        return error
    return None


@cache
def keys_of(kind: Callable[[Store], Calls]) -> list[bytes]:
    """Every key that the calls of `kind` leave behind for a moment, on a store where nothing else is."""
    store = Sessions(timeout=0)
    seen: dict[str, None] = {}
    for call in kind(store):
        outcome(call)
        seen.update(dict.fromkeys(store.list_keys()))
    return [key_bytes(key) for key in seen]


WORDS = st.sampled_from(
    [b"", b"x", b"=", b"?", b"0", b"1", b"2", b"-1", b"1.5", b"\xff", b"9" * 30, b"9" * 5000, b"\xc2\xb2", b"\xd9\xa1",
     b"id", b"r", b"-", b"host:1", b"0/2", b"1/2", b"7/2", b"!0:1", b"/", b"2 host:1 x", b"1 ", b"60:0"]
)  # fmt: skip
STORED = st.one_of(
    st.binary(max_size=20),
    st.lists(WORDS, max_size=8).map(b" ".join),
    st.lists(st.lists(WORDS, min_size=1, max_size=6).map(b" ".join), min_size=1, max_size=3).map(b"\n".join),
)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@given(data=st.data())
@settings(max_examples=25)
def test_recipe_reads_or_refuses_any_content_of_its_keys(kind: Callable[[Store], Calls], data: st.DataObject) -> None:
    keys = keys_of(kind)
    assert keys
    store = Sessions(timeout=0)
    places = st.one_of(st.sampled_from(keys), st.builds(bytes.__add__, st.sampled_from(keys), st.binary(max_size=3)))
    calls = kind(store)
    moment = data.draw(st.integers(0, len(calls) - 1), label="written before call")
    for number, call in enumerate(calls):
        if number == moment:
            for key, text in data.draw(st.dictionaries(places, STORED, min_size=1, max_size=3), label="stored").items():
                store.set(key, text)
        outcome(call)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_recipe_with_garbage_under_a_key_raises_no_exception_of_python(kind: Callable[[Store], Calls]) -> None:
    for key in keys_of(kind):
        for text in (b"\xff", b"9" * 5000, b"9" * 20 + b" me"):
            for moment in (0, 2):
                store = Sessions(timeout=0)
                for number, call in enumerate(kind(store)):
                    if number == moment:
                        store.set(key, text)
                    outcome(call)


@pytest.mark.parametrize("text", [b"x/2 ", b"7/2 ", b"/2 ", b"7/2 0/2 ", b"1", b"\xff/2 "])
def test_arrival_that_is_malformed_counts_for_no_rank(text: bytes) -> None:
    store = HashStore(timeout=0)
    store.set("b/arrivals", text)
    for fail_fast in (False, True):
        with pytest.raises(BarrierError, match=r"b/arrivals.*not an arrival"):
            barrier(store, 2, "b", 0, 1, fail_fast=fail_fast)
    assert not store.check(["b/complete"])


def test_lock_line_with_an_impossible_session_is_refused() -> None:
    store = Sessions(timeout=0)
    store.set("l/line", b"1 me\nid x 1 %d host:1 -" % 2**63)
    with pytest.raises(FscoordError, match="not a valid line of waiters"):
        Lock(store, "l").acquire(timeout=0)


def test_queue_refuses_malformed_claims_and_items_and_leaves_them_there() -> None:
    store = HashStore(timeout=0)
    work = Queue(store, "q")
    work.put(b"data")
    (item,) = (key for key in store.list_keys() if "/item/" in key)
    store.set(item, b"data")
    with pytest.raises(FscoordError, match=r"q/item/.*not a valid item of a queue.*delete the key"):
        work.take(block=False)
    assert store.get(item) == b"data"
    assert len(work) == 1
    claim = item.replace("/item/", "/claim/")
    store.set(claim, b"mine")
    for call in (work.taken, lambda: Queue(store, "q").take(block=False)):
        with pytest.raises(FscoordError, match=r"q/claim/.*not a valid claim on an item"):
            call()
    assert store.get(claim) == b"mine"


@pytest.mark.parametrize("text", [b"x", b"\xff", b"{}", b"[]", b'{"round": 1}', b"[" * 100_000, b"9" * 5000, b"-1"])
def test_agent_reads_or_refuses_any_content_stored_for_its_nodes(text: bytes) -> None:
    handler: Any = SimpleNamespace(get_run_id=lambda: "id", life=1, is_current=lambda: True)
    store = HashStore(timeout=0)
    agent = Agent(Job(["true"], 1, "logs"), handler, store, None)  # type: ignore[arg-type]
    agent._view().set("failed/1", text)
    with pytest.raises(RendezvousStateError, match="failures"):
        agent._failures()
    store.set("workers/1", text)
    with pytest.raises(RendezvousStateError, match="numbers of workers"):
        agent._crews(SimpleNamespace(store=store, rank=0, world_size=2))  # type: ignore[arg-type]
