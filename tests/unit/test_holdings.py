"""Locks, items and barriers as read from the keys of a store. Keys of other programs are skipped."""

from __future__ import annotations

import random

import pytest

from fscoord import FileStore, HashStore, barrier
from fscoord._waiting.rounds import RoundState, is_of_barrier, open_rounds
from fscoord.errors import StoreTimeoutError
from fscoord.recipes import Condition, CyclicBarrier, Election, Lock, Queue, RateLimiter, Semaphore
from fscoord.recipes.condition import WAITS
from fscoord.recipes.holdings import HeldItem, is_of_recipe, items, lines
from fscoord.store import Store


def values_of(store: Store) -> dict[bytes, bytes]:
    return {name.encode(): store.get(name) for name in store.list_keys()}


def test_lines_tell_kind_holders_and_waiters() -> None:
    with HashStore() as store:
        Lock(store, "dataset").acquire()
        Election(store, "front", b"data").campaign()
        slots = Semaphore(store, "slots", 2)
        slots.acquire()
        slots.acquire()
        line = Lock(store, "dataset")._line
        line.join(line.new_id(), "x")
        values = values_of(store)
        found = lines(values, values.keys())
        assert [(each.kind, each.name, len(each.holders), len(each.waiters)) for each in found] == [
            ("lock", "dataset", 1, 1),
            ("election", "front", 1, 0),
            ("semaphore", "slots", 2, 0),
        ]
        assert [each.needs_all for each in found] == [True, True, False]
        assert found[0].wake_keys == (b"dataset/wake/" + line.entries()[1].id.encode(),)
        assert all(is_of_recipe(key) for key in values if key.endswith(b"/line"))


def test_lines_of_other_recipes_are_not_those_of_locks() -> None:
    with HashStore() as store:
        RateLimiter(store, "rate", 1)._turn.acquire()
        waiters, arrivals = Condition(store, "condition")._line, CyclicBarrier(store, "barrier", 2)._line
        waiters.join(waiters.new_id(), WAITS)
        waiters.join(waiters.new_id(), WAITS)
        waiters.notify(1)
        arrivals.join(arrivals.new_id(), "")
        arrivals.break_round("abort")
        values = values_of(store)
        found = lines(values, values.keys())
    assert [(each.kind, each.name, len(each.holders)) for each in found] == [
        ("cyclic barrier", "barrier", 0),  # a process that passes a barrier or is notified holds nothing
        ("condition", "condition", 0),
        ("rate limiter", "rate", 1),
    ]
    assert [len(each.waiters) for each in found[1:]] == [1, 0]


def test_items_tell_who_has_them(tmp_path) -> None:
    with FileStore(tmp_path / "store") as store:
        queue = Queue(store, "work")
        queue.put_all(["1", "2"])
        first = queue.take()
        values = values_of(store)
        (found,) = items({key: value for key, value in values.items() if is_of_recipe(key)})
        assert found == HeldItem("work", store.register(), queue.taken()[0].owner)
        first.ack()


@pytest.mark.parametrize(
    ("text", "come", "missing"),
    [
        (b"0/3 ", 1, (1, 2)),
        (b"0/3 2/3 ", 2, (1,)),
        (b"0/3 2/3 -0/3 ", 2, (1,)),
        (b"0/3 2/3 !0:1 ", 0, ()),
        (b"0/3 2/3 !0:1 1/3 ", 1, (0, 2)),
        (b"0/3 2/3 !1:1 ", 2, (1,)),
        (b"0/3 2/3 !0:2 ", 2, (1,)),
    ],
)
def test_round_is_read_as_the_ranks_read_it(text: bytes, come: int, missing: tuple[int, ...]) -> None:
    found = open_rounds({b"b/arrivals": text}, {b"b/arrivals"})
    assert found == ([RoundState("b", b"b/complete", 3, come, missing)] if come else [])
    assert open_rounds({b"b/arrivals": text}, {b"b/arrivals", b"b/complete"}) == []


def test_rounds_of_real_barriers_are_found() -> None:
    with HashStore(timeout=0.01) as store:
        with pytest.raises(StoreTimeoutError):
            barrier(store, 3, "ranked", 0.01, 1)
        with pytest.raises(StoreTimeoutError):
            barrier(store, 3, "counted", 0.01)
        barrier(store, 1, "passed", rank=0)
        values = values_of(store)
        assert open_rounds({key: values[key] for key in values if is_of_barrier(key)}, values.keys()) == [
            RoundState("counted", b"counted/last_member", 0, 1, None),
            RoundState("ranked", b"ranked/complete", 3, 1, (0, 2)),
        ]


def test_values_of_other_programs_are_skipped() -> None:
    rng = random.Random(random.randrange(1 << 32))
    for _ in range(500):
        text = bytes(rng.choices(b"0123456789/!:- \n\xffxr", k=rng.randrange(40)))
        values = dict.fromkeys((b"a/line", b"a/arrivals", b"a/num_members", b"a/claim/1", b"/line", b"/claim/"), text)
        lines(values, values.keys())
        list(items(values))
        open_rounds(values, values.keys())
