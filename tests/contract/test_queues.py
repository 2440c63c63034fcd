"""Queues whose items come back when their consumers die, and groups that report leaves, on every kind of store."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contract.worker import Workers, start
from support.internals import group_module, look_module
from support.places import ETCD, HANG_S, Place, start_thread, until
from support.third_party import place_of

from fscoord.errors import (
    FscoordError,
    LimitExceededError,
    LockLostError,
    QueueEmptyError,
    StoreTimeoutError,
    WorkFailedError,
)
from fscoord.recipes import Membership, PriorityQueue, Queue, queue
from fscoord.store import Store
from fscoord.stores.prefix import PrefixStore


@pytest.fixture(params=["hash", "nested-hash", "third-party", "file-ofd", "nested-file", ETCD])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    place = place_of(request.param, str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def file_place(tmp_path: Path) -> Iterator[Place]:
    place = place_of("file-ofd", str(tmp_path))
    yield place
    place.close()


@pytest.fixture
def no_slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A waiter that is not woken hangs, for longer than a test may take."""
    monkeypatch.setattr(queue, "LOOK_S", LONG_S)
    monkeypatch.setattr(look_module, "LOOK_S", LONG_S)


SHORT_S = 0.05
"""How long to wait in vain."""
TIMEOUT_S = 1.0
"""A store's timeout that is to pass; within it the store can be had under any load."""
LONG_S = 10 * HANG_S
"""How long to wait for what must come sooner: a wait that ends finds it with its last look, though nobody was told."""


def drained(found: Queue) -> list[bytes]:
    """Take and do all there is."""
    values = []
    while True:
        try:
            with found.take(block=False) as item:
                values.append(item.data)
        except QueueEmptyError:
            return values


class Interrupted(PrefixStore):
    """A view in which the operation number `at` is interrupted, before or after it was done."""

    def __init__(self, store: Store, at: int, after: bool) -> None:
        super().__init__("q-view", store)
        self.count, self.at, self.after, self.hit = 0, at, after, False

    def _step(self, operation: Callable[..., Any], *arguments: Any) -> Any:
        self.count += 1
        now = self.count == self.at
        self.hit = self.hit or now
        if now and not self.after:
            raise KeyboardInterrupt
        found = operation(*arguments)
        if now:
            raise KeyboardInterrupt
        return found

    def add(self, key: Any, amount: int) -> int:
        return int(self._step(super().add, key, amount))

    def set(self, key: Any, value: Any) -> None:
        self._step(super().set, key, value)

    def get(self, key: Any, **named: Any) -> Any:
        return self._step(partial(super().get, **named), key)

    def compare_set(self, key: Any, expected: Any, desired: Any) -> bytes:
        return bytes(self._step(super().compare_set, key, expected, desired))

    def delete_key(self, key: Any) -> bool:
        return bool(self._step(super().delete_key, key))

    def multi_set(self, keys: Any, values: Any) -> None:
        self._step(super().multi_set, keys, values)


class Asleep(PrefixStore):
    """A view that counts the waits that have begun."""

    def __init__(self, prefix: str, store: Store) -> None:
        super().__init__(prefix, store)
        self.asleep = threading.Semaphore(0)

    def wait(self, keys: Any, timeout: Any = None) -> None:
        self.asleep.release()
        super().wait(keys, timeout)

    def wait_sessions(self, keys: Any, numbers: Any, timeout: Any = None) -> list[int]:
        self.asleep.release()
        return super().wait_sessions(keys, numbers, timeout)


# Queues


def test_items_are_taken_in_the_order_of_put(store: Store) -> None:
    found = Queue(store, "q")
    found.put("a")
    found.put_all([b"b", b"", "d" * 5000])
    found.put_all([])
    found.put("e")
    assert len(found) == 5
    assert drained(found) == [b"a", b"b", b"", b"d" * 5000, b"e"]
    assert len(found) == 0
    assert found.name == "q"
    many = [b"%d" % number for number in range(20)]
    found.put_all(many)
    assert drained(found) == many


def test_queue_that_was_drained_leaves_four_keys_at_most(store: Store) -> None:
    before = store.num_keys()
    found = PriorityQueue(store, "q")
    for number in range(20):
        found.put(str(number), -number)
    drained(found)
    assert store.num_keys() - before <= 4


def test_priority_that_is_lowest_goes_first_and_equals_go_in_order_of_put(store: Store) -> None:
    found = PriorityQueue(store, "q")
    for value, priority in (("c", 5), ("a", -(1 << 31)), ("d", (1 << 31) - 1), ("b", 0), ("c2", 5)):
        found.put(value, priority)
    assert found.take().data == b"a"
    for value, priority in (("a3", 16 - (1 << 31)), ("a2", 2 - (1 << 31))):
        found.put(value, priority)
    assert [found.take().data, found.take().data] == [b"a2", b"a3"]
    found.put_all(["b2", "b3"])
    assert drained(found) == [b"b", b"b2", b"b3", b"c", b"c2", b"d"]
    for wrong in (1 << 31, -(1 << 31) - 1):
        with pytest.raises(ValueError, match="32 bits"):
            found.put("x", wrong)
    with pytest.raises(TypeError, match="priority"):
        found.put_all(["x"], 1.5)  # type: ignore[arg-type]


def test_take_finds_an_item_put_after_others_took_all_that_it_had_seen(place: Place, store: Store) -> None:
    one, other = Queue(store, "q"), Queue(place.open(how="clone"), "q")
    one.put_all("123")
    assert [queue.take().data for queue in (one, other, other)] == [b"1", b"2", b"3"]
    with pytest.raises(QueueEmptyError):
        one.take(block=False)
    one.put_all("456")
    assert [queue.take().data for queue in (one, other, other)] == [b"4", b"5", b"6"]
    other.put("7")
    assert one.take(block=False).data == b"7"


def test_item_that_is_taken_has_one_owner_until_it_is_given_back(place: Place, store: Store) -> None:
    mine, theirs = Queue(store, "q"), Queue(place.open(how="clone"), "q")
    mine.put_all("abc")
    first, second = mine.take(), theirs.take()
    assert (first.data, second.data, len(mine)) == (b"a", b"b", 1)
    assert len(mine.taken()) == 2
    assert mine.taken()[0].owner.count(":") == 1
    first.release()
    again = theirs.take()
    assert again.data == b"a", "it has its place in the order"
    again.ack()
    second.ack()
    for item in (first, again):
        for call in (item.ack, item.release):
            with pytest.raises(RuntimeError, match="'q' was acknowledged or released already"):
                call()
    assert drained(mine) == [b"c"]
    assert theirs.taken() == []


def test_item_comes_back_from_a_with_that_raises_but_not_once_it_is_acked(store: Store) -> None:
    found = Queue(store, "q")
    found.put("a")
    with pytest.raises(ZeroDivisionError), found.take():
        raise ZeroDivisionError
    with found.take() as item:
        item.release()
    with found.take() as item:
        item.ack()
    assert len(found) == 0


def test_queue_that_is_empty_is_an_error_now_or_when_time_runs_out(store: Store) -> None:
    found = Queue(store, "q", timeout=0.05)
    with pytest.raises(QueueEmptyError, match="'q'"):
        found.take(block=False)
    with pytest.raises(StoreTimeoutError, match=r"no item came into the queue 'q' within 0\.05 s") as caught:
        found.take()
    assert caught.value.waited == 0.05
    with pytest.raises(StoreTimeoutError, match=r"within 0 s"):
        found.take(timeout=0)
    store.set_timeout(0.01)
    with pytest.raises(StoreTimeoutError, match=r"within 0.01 s"):
        Queue(store, "q").take()


def test_name_or_value_that_does_not_fit_is_refused_at_once(store: Store) -> None:
    with pytest.raises(LimitExceededError):
        Queue(store, "q" * 1020)
    with pytest.raises(LimitExceededError):
        Membership(store, "m" * 1020)
    with pytest.raises(TypeError):
        Queue(store, "q").put_all(["a", 1])  # type: ignore[list-item]
    assert len(Queue(store, "q")) == 0


@pytest.mark.parametrize("what", ["put", "put_all", "release"])
def test_waiters_all_get_an_item(what: str, place: Place, store: Store, no_slow_looks: None) -> None:
    found = Queue(store, "q")
    done = threading.Semaphore(0)

    def consume() -> bytes:
        with Queue(place.open(how="clone"), "q").take(True, LONG_S) as item:
            done.release()
            return item.data

    values = ["1", "2", "3"]
    items = []
    if what == "release":
        found.put_all(values)
        items = [found.take() for _ in values]
    threads = [start_thread(consume) for _ in values]
    if what == "put_all":
        found.put_all(values)
    for item in items:
        item.release()
    if what == "put":
        for value in values:
            found.put(value)
            assert done.acquire(timeout=HANG_S)
    assert sorted(thread.join() for thread in threads) == [b"1", b"2", b"3"]


def test_consumer_that_sleeps_is_woken_by_an_item_given_back(place: Place, store: Store, no_slow_looks: None) -> None:
    found = Queue(PrefixStore("x", store), "q")
    found.put("a")
    item = found.take()
    sleeper = Asleep("x", place.open(how="clone"))
    with start_thread(Queue(sleeper, "q").take, True, LONG_S) as thread:
        assert sleeper.asleep.acquire(timeout=HANG_S)  # and the bell of the put is cleared
        assert not found._store.check(["q/bell"])
        item.release()
    assert thread.result.data == b"a"


def test_consumer_that_clears_the_bell_rings_it_again_if_items_are_left(place: Place, store: Store) -> None:
    class Late(PrefixStore):
        def check(self, keys: Any) -> bool:
            if keys == [b"q/bell"] and others:  # between its look at the items and that at the bell
                others.pop().put_all("ab")
            return super().check(keys)

    other = Queue(PrefixStore("x", place.open(how="clone")), "q")
    others = [other]
    assert Queue(Late("x", store), "q").take().data == b"a"
    assert PrefixStore("x", store).check(["q/bell"])


def test_producers_and_consumers_that_share_objects_handle_each_item_once(
    place: Place, store: Store, seed: int
) -> None:
    shared = PriorityQueue(store, "q")
    done: list[bytes] = []

    def produce(rank: int) -> None:
        mine = PriorityQueue(place.open(how="clone"), "q")
        for number in range(10):
            mine.put(f"{rank}.{number}", rank)

    def consume(number: int) -> None:
        draw = random.Random(seed + number)
        while True:
            item = shared.take()
            if item.data == b"end":
                return item.release()
            if draw.random() < 0.2:
                item.release()
            else:
                done.append(item.data)
                item.ack()

    consumers = [start_thread(consume, number) for number in range(3)]
    for thread in [start_thread(produce, rank) for rank in range(3)]:
        thread.join()
    shared.put("end", 9)
    for thread in consumers:
        thread.join()
    assert Counter(done) == Counter(f"{rank}.{number}".encode() for rank in range(3) for number in range(10))


def test_item_that_was_done_between_a_look_and_a_claim_is_not_taken(place: Place, store: Store) -> None:
    mine, theirs = Queue(store, "q"), Queue(place.open(how="clone"), "q")
    mine.put_all("abc")
    first = mine.take()  # and knows of b and c
    assert drained(theirs) == [b"b", b"c"]
    mine.put("d")
    assert mine.take().data == b"d"
    first.ack()
    assert len(mine.taken()) == 1


@pytest.mark.parametrize("has_list", [False, True])
def test_item_that_is_being_written_is_taken_before_the_next_one(store: Store, has_list: bool) -> None:
    if store._decides:
        return  # a put has no number before its item is written
    found = Queue(store, "q")
    if not has_list:
        assert drained(found) == []
    found.put("a")
    number = store.add(found._items.numbers, 1) - 1  # the producer has a number, and has not written its item yet
    assert found.take().data == b"a"
    text = queue.Content(b"b", float("inf"), False).text()
    store.set(found._items.item_key(queue._order_key(0, number)), text)
    found.put("c")
    assert drained(found) == [b"b", b"c"]


def test_producer_waits_for_room_until_an_item_is_acknowledged(place: Place, store: Store, no_slow_looks: None) -> None:
    sleeper = Asleep("x", place.open(how="clone"))
    full, consumer = Queue(sleeper, "q", maxsize=2), Queue(PrefixStore("x", store), "q")
    ids = full.put_all("ab")
    with pytest.raises(StoreTimeoutError, match="room in the queue 'q' took 0 s: it still has 2 items"):
        full.put("c", timeout=0)
    item = consumer.take()
    sleeper.asleep = threading.Semaphore(0)
    with start_thread(lambda: full.put("c", timeout=LONG_S)) as thread:
        assert sleeper.asleep.acquire(timeout=HANG_S)  # although one item is with a consumer
        item.ack()
    assert [each.id for each in consumer.items()] == [ids[1], thread.result]
    with pytest.raises(ValueError, match="3 items don't fit into the queue 'q', whose maxsize is 2"):
        full.put_all("def")
    assert drained(consumer) == [b"b", b"c"]
    with pytest.raises(ValueError, match="maxsize must be at least 1"):
        Queue(store, "q", maxsize=0)
    for each in full, Queue(store, "without-a-limit"):
        with pytest.raises(ValueError, match="timeout"):
            each.put(b"v", timeout=-1)


def test_join_waits_until_the_last_item_is_acknowledged(place: Place, store: Store, no_slow_looks: None) -> None:
    found = Queue(PrefixStore("x", store), "q")
    found.join(timeout=0)
    found.put_all("ab")
    first, last = found.take(), found.take()
    with pytest.raises(StoreTimeoutError, match="the end of the queue 'q' took 0 s: it still has 2 items"):
        found.join(timeout=0)
    sleeper = Asleep("x", place.open(how="clone"))
    with start_thread(Queue(sleeper, "q").join, LONG_S) as thread:
        assert sleeper.asleep.acquire(timeout=HANG_S)
        first.ack()
        assert sleeper.asleep.acquire(timeout=HANG_S)  # it looked, and waits for the other
        assert thread.is_alive()
        last.ack()
    assert thread.result is None


def test_items_are_listed_cancelled_and_purged_unless_a_consumer_has_them(place: Place, store: Store) -> None:
    found, other = PriorityQueue(store, "q"), PriorityQueue(place.open(how="clone"), "q")
    low, high, last = found.put("low", 5), found.put("high", -5), found.put("last", 5)
    item = other.take()
    listed = [(each.id, each.data, each.deliveries, bool(each.consumer)) for each in found.items()]
    assert listed == [(high, b"high", 1, True), (low, b"low", 0, False), (last, b"last", 0, False)]
    assert not found.cancel(high)
    assert found.cancel(low)
    assert not found.cancel(low)
    assert not found.cancel("no id")
    assert found.purge() == 1
    assert found.purge() == 0
    item.release()
    assert found.purge() == 1
    assert store.list_keys("q/item/") + store.list_keys("q/claim/") == []


def test_dead_letters_that_are_requeued_begin_anew(store: Store) -> None:
    found = PriorityQueue(store, "q", max_deliveries=1, dead_letter="dead")
    found.put("first", -3)
    found.put("second", 4)
    for _ in range(2):
        found.take().release()
    with pytest.raises(QueueEmptyError):
        found.take(block=False)
    found.put("middle", 0)
    assert found.requeue_dead_letters() == 2
    assert found.requeue_dead_letters() == 0
    assert [(each.data, each.deliveries) for each in found.items()] == [(b"first", 0), (b"middle", 0), (b"second", 0)]
    assert len(Queue(store, "dead")) == 0
    with pytest.raises(ValueError, match="'q' was opened without dead_letter"):
        Queue(store, "q").requeue_dead_letters()


@pytest.mark.parametrize("act", ["cancel", "purge", "requeue_dead_letters"])
def test_ctrl_c_at_any_operation_of_a_removal_leaves_no_claim(act: str, store: Store) -> None:
    for at in range(1, 50):
        view = Interrupted(store, at, after=True)
        name, source = f"q{at}", f"dead{at}" if act == "requeue_dead_letters" else f"q{at}"
        found = Queue(view, name, max_deliveries=1, dead_letter=f"dead{at}")
        view.at = 0
        id_of = Queue(view, source).put("a")
        arguments = (id_of,) if act == "cancel" else ()
        view.count, view.at = 0, at
        try:
            getattr(found, act)(*arguments)
        except KeyboardInterrupt:
            pass
        view.at = 0
        left = drained(Queue(view, name)) + (drained(Queue(view, source)) if source != name else [])
        assert set(left) == {b"a"} or (act != "requeue_dead_letters" and not left)
        assert store.list_keys(f"q-view/{source}/claim/") == []
        if not view.hit:
            assert at > 3
            return
    raise AssertionError("it never came to an end")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("act", ["take", "ack", "release"])
def test_ctrl_c_at_any_operation_leaves_the_item_available_or_done(act: str, after: bool, store: Store) -> None:
    """Never neither: an item that this process keeps for ever without knowing of it would be lost to all."""
    for at in range(1, 50):
        view = Interrupted(store, at, after)
        found = Queue(view, f"{act}{at}")
        view.at = 0
        found.put("a")
        item = None if act == "take" else found.take()
        view.count, view.at = 0, at
        try:
            if item is None:
                item = found.take()
            elif act == "ack":
                item.ack()
            else:
                item.release()
        except KeyboardInterrupt:
            pass
        if not view.hit:
            assert at > 2
            return
        view.at = 0
        left = drained(found)
        assert left == [b"a"] or (act == "ack" and not left)
        assert found.taken() == []
    raise AssertionError("it never came to an end")


def test_consumer_that_was_taken_for_dead_learns_it_at_check_and_ack(store: Store) -> None:
    found = Queue(store, "q")
    found.put("a")
    item = found.take()
    item.check()
    store.set(next(key for key in store.list_keys("q/claim/")), "7 host:1 of-another")
    with pytest.raises(LockLostError, match="another process took the holder for dead"):
        item.check()
    with pytest.raises(
        LockLostError, match=r"'q' is no longer held by .*:\d+: another process took the holder for dead"
    ):
        item.ack()
    assert store.num_keys()


def test_ctrl_c_does_not_return_an_item_that_another_has_by_now(store: Store) -> None:
    view = Interrupted(store, 0, after=False)
    Queue(view, "q").put("a")
    item = Queue(view, "q").take()
    claim = next(key for key in store.list_keys("q-view/q/claim/"))
    store.set(claim, "7 host:1 of-another")
    view.count, view.at = 0, 1
    with pytest.raises(KeyboardInterrupt):
        item.ack()
    assert store.get(claim) == b"7 host:1 of-another"


def test_item_counts_its_deliveries_also_those_that_end_by_a_release(place: Place, store: Store) -> None:
    found, other = Queue(store, "q"), Queue(place.open(how="clone"), "q")
    found.put_all("ab")
    first = found.take()
    assert (first.deliveries, found.taken()[0].token) == (1, 1)
    first.release()
    assert found.taken() == []
    again = other.take()
    assert (again.data, again.deliveries, other.take().deliveries) == (b"a", 2, 1)


def test_item_that_kills_each_consumer_goes_to_the_dead_letters(file_place: Place) -> None:
    store = file_place.open()
    found = PriorityQueue(store, "q", max_deliveries=2, dead_letter="dead")
    found.put("poison", -7)
    found.put("good")
    for number in (1, 2):
        lost = file_place.open()
        assert PriorityQueue(lost, "q").take().deliveries == number
        lost.close()
    with found.take(block=False) as item:
        assert (item.data, item.deliveries) == (b"good", 1)
    assert (len(found), found.taken()) == (0, [])
    assert store.list_keys("q/item/") == store.list_keys("q/claim/") == []
    assert len(store.list_keys("dead/item/7ffffff9-")) == 1
    dead = PriorityQueue(store, "dead").take(block=False)
    assert (dead.data, dead.deliveries) == (b"poison", 1)


def test_dead_letters_are_moved_although_no_other_item_is_there(store: Store) -> None:
    found = Queue(store, "q", max_deliveries=1, dead_letter="dead")
    found.put("a")
    found.take().release()
    with pytest.raises(QueueEmptyError):
        found.take(block=False)
    assert drained(Queue(store, "dead")) == [b"a"]


def test_ctrl_c_at_any_operation_of_a_move_leaves_the_item_in_one_of_the_queues(store: Store) -> None:
    for at in range(1, 50):
        view = Interrupted(store, at, after=True)
        found = Queue(view, f"q{at}", max_deliveries=1, dead_letter=f"dead{at}")
        view.at = 0
        found.put("a")
        found.take().release()
        view.count, view.at = 0, at
        try:
            found.take(block=False)
        except (KeyboardInterrupt, QueueEmptyError):
            pass
        if not view.hit:
            assert at > 5
            return
        view.at = 0
        left = drained(Queue(view, f"q{at}")) + drained(Queue(view, f"dead{at}"))
        assert set(left) == {b"a"}
    raise AssertionError("it never came to an end")


def test_limit_of_deliveries_needs_another_queue_for_dead_letters(store: Store) -> None:
    for options in ({"max_deliveries": 3}, {"dead_letter": "dead"}):
        with pytest.raises(ValueError, match="give both max_deliveries and dead_letter"):
            Queue(store, "q", **options)
    with pytest.raises(ValueError, match="another queue than 'q'"):
        Queue(store, "q", max_deliveries=3, dead_letter=b"q")
    with pytest.raises(ValueError, match="max_deliveries must be at least 1"):
        Queue(store, "q", max_deliveries=0, dead_letter="dead")


def test_consumer_that_dies_between_the_two_steps_of_ack_leaves_nothing(file_place: Place) -> None:
    store = file_place.open()
    found = Queue(store, "q")
    found.put("a")
    lost = file_place.open()
    item = Queue(lost, "q").take()
    lost.delete_key(found._items.item_key(item._taken[0]))
    assert len(found.taken()) == 1
    lost.close()
    with pytest.raises(QueueEmptyError):
        found.take(block=False)
    assert found.taken() == []


def test_consumer_that_closes_its_store_returns_its_item_to_a_waiter(file_place: Place, no_slow_looks: None) -> None:
    store = file_place.open()
    Queue(store, "q").put_all("ab")
    lost = file_place.open()
    Queue(lost, "q").take()
    found = Queue(store, "q")
    with found.take() as item:
        assert item.data == b"b"
    with start_thread(found.take, True, LONG_S) as thread:
        lost.close()
    assert thread.result.data == b"a"


def test_consumer_that_is_killed_returns_its_items(file_place: Place, no_slow_looks: None) -> None:
    store = file_place.open()
    found = Queue(store, "q")
    found.put_all("abcdef")
    with Workers(file_place.spec(), "take_and_keep", [["q"]] * 3) as workers:
        start(store, 3)
        for _ in range(3):
            store.queue_pop("taken")
        rest = [found.take() for _ in range(3)]
        for process in workers.processes:
            process.kill()
        again = [start_thread(found.take, True, LONG_S).join() for _ in range(3)]
    assert [item.data for item in rest] == [b"d", b"e", b"f"]
    assert sorted(item.data for item in again) == [b"a", b"b", b"c"]


def test_consumers_killed_at_any_moment_leave_every_item_done_once_at_least(
    file_place: Place, rng: random.Random, scale: Callable[[int], int]
) -> None:
    """Done items are counted by the store, in a key each, before they are done."""
    store = file_place.open()
    found = Queue(store, "q")
    names = [str(number) for number in range(scale(60))]
    with Workers(file_place.spec(), "take_and_do", [["q"]] * 4) as workers:
        start(store, 4)
        killed = 0
        for name in names:
            found.put(name)
            if killed < 3 and rng.random() < 3 / len(names):
                workers.processes[killed].kill()
                killed += 1
        for process in workers.processes[:3]:
            process.kill()
        store.wait([f"did/{name}" for name in names], HANG_S)
    counts = [int(store.get(f"did/{name}")) for name in names]
    assert min(counts) >= 1
    assert sum(counts) <= len(names) + 3, "only what the dead had is done again"


class Clock:
    """The wall clock of the recipes, which a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        clock = queue.system.time
        real = clock.time
        monkeypatch.setattr(clock, "time", lambda: real() + self.ahead)


def test_delayed_item_is_taken_when_it_is_due_before_the_items_put_later(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, found = Clock(monkeypatch), Queue(store, "q")
    found.put("later", delay=60)
    found.put("a")
    found.put("b")
    assert (len(found), [each.data for each in found.items()]) == (2, [b"later", b"a", b"b"])
    assert found.take().data == b"a"
    assert found.taken()[0].token == 1
    with pytest.raises(StoreTimeoutError, match="it still has 3 items"):
        found.join(timeout=0)
    clock.ahead = 61
    found = Queue(store, "q")  # the other object would find out a second later, because its clock was set
    assert found.take().data == b"later"
    assert found.take().data == b"b"


def test_consumer_that_waits_for_a_delayed_item_wakes_up_when_it_is_due(
    store: Store, no_slow_looks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Queue(store, "q")
    begin = time.time()
    with monkeypatch.context() as patch:
        patch.setattr(queue.system.time, "time", lambda: begin)
        found.put("a", delay=SHORT_S)
        with pytest.raises(QueueEmptyError):
            found.take(block=False)
    assert found.take(timeout=LONG_S).data == b"a"
    assert time.time() >= begin + SHORT_S


def test_delayed_item_can_be_cancelled_and_purged(store: Store) -> None:
    found = Queue(store, "q")
    ids = found.put_all("ab", delay=60)
    assert found.cancel(ids[0])
    assert found.purge() == 1
    found.join(timeout=0)
    with pytest.raises(ValueError, match="delay must be a finite time"):
        found.put("a", delay=float("inf"))
    found.put("a", expires=1e300)
    assert found.take().data == b"a"


def test_item_that_has_expired_is_dropped_or_goes_to_the_dead_letters(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, careful = Clock(monkeypatch), Queue(store, "careful", max_deliveries=1, dead_letter="dead")
    plain = Queue(store, "plain")
    for each in (careful, plain):
        each.put("old", expires=60)
        each.put("new", expires=120)
    clock.ahead = 61
    assert (careful.take().data, plain.take().data) == (b"new", b"new")
    assert [each.data for each in Queue(store, "dead").items()] == [b"old"]
    assert len(plain.items()) == 1
    assert "an item of the queue 'plain' has expired: it was dropped" in caplog.text


def test_producer_gets_the_result_once(place: Place, store: Store, no_slow_looks: None) -> None:
    producer, consumer = Queue(store, "q"), Queue(place.open(how="clone"), "q")
    ids = producer.put_all("ab", wants_result=True)
    with start_thread(producer.result, ids[0], LONG_S) as thread:
        consumer.take().ack(b"1")
    assert thread.result == b"1"
    with consumer.take():
        pass
    assert producer.result(ids[1]) == b""
    with pytest.raises(StoreTimeoutError, match="wants_result=True, and only once"):
        producer.result(ids[0], timeout=0)
    producer.put("c")
    consumer.take().ack("not wanted")
    assert store.list_keys("q/result/") == []


@pytest.mark.parametrize("end", ["cancel", "purge", "expires", "deliveries"])
def test_producer_learns_that_its_item_has_no_result(end: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, found = Clock(monkeypatch), Queue(store, "q", max_deliveries=1, dead_letter="dead")
    name = found.put("a", expires=60, wants_result=True)
    why = "was removed"
    if end == "cancel":
        assert found.cancel(name)
    elif end == "purge":
        found.purge()
    else:
        if end == "expires":
            clock.ahead, why = 61, "has expired; it is in the queue 'dead' now"
        else:
            found.take().release()
            why = "was handed out 1 times and never acknowledged; it is in the queue 'dead' now"
        with pytest.raises(QueueEmptyError):
            found.take(block=False)
    with pytest.raises(WorkFailedError, match=f"no result of the item '{name}' of the queue 'q': the item {why}"):
        found.result(name, timeout=0)
    assert store.list_keys("q/result/") == []


def test_batch_is_taken_in_order_and_acknowledged_at_once(place: Place, store: Store) -> None:
    mine, theirs = Queue(store, "q"), Queue(place.open(how="clone"), "q")
    mine.put_all("abcdef")
    batch, others = mine.take_all(3), theirs.take_all(2)
    assert [item.data for item in batch + others] == [b"a", b"b", b"c", b"d", b"e"]
    mine.ack_all(batch[:2])
    with pytest.raises(RuntimeError, match="acknowledged or released already"):
        mine.ack_all(batch)
    mine.ack_all(batch[2:])
    mine.ack_all([])
    others[0].release()
    assert [item.data for item in mine.take_all(9, block=False)] == [b"d", b"f"]
    with pytest.raises(QueueEmptyError):
        mine.take_all(9, block=False)
    with pytest.raises(ValueError, match="n must be at least 1"):
        mine.take_all(0)


def test_batch_with_a_lost_item_acknowledges_the_others(store: Store) -> None:
    found = Queue(store, "q")
    found.put_all("abc")
    batch = found.take_all(3)
    store.set(found._items.claim_key(batch[1]._taken[0]), "2 0 another:1 0")
    with pytest.raises(LockLostError, match="was handed out again"):
        found.ack_all(batch)
    assert [each.data for each in found.items()] == [b"b"]


@pytest.mark.parametrize("act", ["take_all", "ack_all"])
def test_ctrl_c_at_any_operation_of_a_batch_leaves_each_item_available_or_done(act: str, store: Store) -> None:
    for at in range(1, 50):
        view = Interrupted(store, at, after=True)
        found = Queue(view, f"{act}{at}")
        view.at = 0
        found.put_all("abc")
        items = [] if act == "take_all" else found.take_all(3)
        view.count, view.at = 0, at
        try:
            if act == "take_all":
                found.take_all(3)
            else:
                found.ack_all(items)
        except KeyboardInterrupt:
            pass
        if not view.hit:
            assert at > 3
            return
        view.at = 0
        left = drained(found)
        assert left == [b"a", b"b", b"c"] or (act == "ack_all" and len(left) < 3)
        assert found.taken() == []
    raise AssertionError("it never came to an end")


def test_ctrl_c_at_any_operation_of_result_leaves_it_to_be_taken(store: Store) -> None:
    for at in range(1, 50):
        view = Interrupted(store, at, after=True)
        found = Queue(view, f"q{at}")
        view.at = 0
        name = found.put("a", wants_result=True)
        found.take().ack("done")
        view.count, view.at = 0, at
        try:
            assert found.result(name, timeout=0) == b"done"
        except KeyboardInterrupt:
            view.at = 0
            assert found.result(name, timeout=0) == b"done"
        if not view.hit:
            return
    raise AssertionError("it never came to an end")


def test_take_does_not_list_the_items_of_a_long_queue(file_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "LOOK_S", LONG_S)
    store, producer = file_place.open(), file_place.open()
    found, feed = Queue(store, "q"), Queue(producer, "q", maxsize=100)
    feed.put_all([b"0"] * 50)
    found.take().ack()
    listed: list[object] = []
    for each in (store, producer):
        monkeypatch.setattr(each, "list_keys", lambda prefix: listed.append(prefix) or [])
    for number in range(1, 300):
        feed.put(str(number))
        with found.take() as item:
            pass
    assert (item.data, listed) == (b"250", [])


def test_producers_and_consumers_killed_at_any_moment_lose_no_item_and_repeat_none(
    file_place: Place, rng: random.Random, scale: Callable[[int], int]
) -> None:
    store = file_place.open()
    with (
        Workers(file_place.spec(), "put_batches", [["q", rank] for rank in range(4)]) as producers,
        Workers(file_place.spec(), "take_batches", [["q"]] * 5) as consumers,
    ):
        start(store, 9)
        victims = [*producers.processes[1:], *consumers.processes[1:]]
        rng.shuffle(victims)
        for victim in victims:
            for _ in range(rng.randint(1, scale(5))):
                store.queue_pop("rounds", timeout=HANG_S)
            victim.kill()
        for process in [*producers.processes, *consumers.processes]:
            process.kill()
            process.wait(HANG_S)
    left = set(drained(Queue(store, "q")))
    put, taken = (set(store.get(key).split()) for key in ("put", "taken"))
    assert put <= taken | left
    assert not left & {key.removeprefix("acked/").encode() for key in store.list_keys("acked/")}
    assert not store.check(["again"])
    assert set(store.list_keys("q/")) <= {f"q/{key}" for key in ("bell", "ended", "number", "removed", "returns")}


# Groups


def test_member_that_joins_is_listed_and_one_that_leaves_is_not(place: Place, store: Store) -> None:
    look = Membership(store, "m")
    assert look.members() == []
    assert not look.leave()
    one, two = Membership(place.open(how="clone"), "m", "at one"), Membership(place.open(how="clone"), "m")
    one.join()
    with two:
        with pytest.raises(RuntimeError, match="has already joined the group 'm'"):
            two.join()
        assert [each.data for each in look.members()] == [b"at one", b""]
        one.update("elsewhere")
        two.update(b"two")
        assert [each.data for each in look.members()] == [b"elsewhere", b"two"]
        assert [each.number for each in look.members()] == [1, 2]
        assert look.members()[0].owner.count(":") == 1
    assert len(look.members()) == 1
    assert one.leave()
    assert not one.leave()
    with pytest.raises(RuntimeError, match="has not joined the group 'm'"):
        one.update("x")
    one.join()
    assert [(each.number, each.data) for each in look.members()] == [(3, b"elsewhere")]
    one.leave()


def test_watchers_all_see_every_change(place: Place, store: Store, no_slow_looks: None) -> None:
    def watch(seen: list[list[bytes]]) -> None:
        for present in Membership(place.open(how="clone"), "m").watch():
            seen.append([each.data for each in present])
            if not present:
                return

    group = Membership(store, "m", "1")
    logs: list[list[list[bytes]]] = [[], []]
    threads = [start_thread(watch, log) for log in logs]
    group.join()
    other = Membership(place.open(how="clone"), "m", "2")
    steps = [lambda: None, other.join, lambda: group.update("3"), group.leave, other.leave]
    states = [[b"1"], [b"1", b"2"], [b"3", b"2"], [b"2"], []]
    for step, state in zip(steps, states, strict=True):
        step()
        watcher = Membership(store, "m")
        assert [each.data for each in watcher.members()] == state
        for log in logs:
            while not log or log[-1] != state:
                threading.Event().wait(0.001)
    for thread in threads:
        thread.join()
    assert logs[0] == logs[1] == states


def test_watch_of_a_quiet_group_outlasts_the_stores_timeout(place: Place, store: Store) -> None:
    handle = place.open(timeout=TIMEOUT_S, how="clone")
    start = time.monotonic()
    thread = start_thread(next, Membership(handle, "m").watch())
    until(lambda: time.monotonic() > start + 1.5 * TIMEOUT_S or not thread.is_alive())
    Membership(store, "m", "here").join()
    assert [each.data for each in thread.join()] == [b"here"]


@pytest.mark.parametrize("timeout", [SHORT_S, None], ids=["its own", "the store's"])
def test_watch_with_a_timeout_ends_in_a_quiet_group(place: Place, timeout: float | None) -> None:
    group = Membership(place.open(timeout=SHORT_S, how="clone"), "m")
    with pytest.raises(StoreTimeoutError, match=rf"no member joined or left 'm' within {SHORT_S:g} s"):
        next(group.watch(timeout))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_member_that_is_interrupted_while_it_joins_does_not_take_part(after: bool, store: Store) -> None:
    look = Membership(PrefixStore("q-view", store), "m")
    at, hit = 0, True
    while hit:
        at += 1
        view = Interrupted(store, at, after)
        group = Membership(view, "m")
        try:
            group.join()
        except KeyboardInterrupt:
            assert look.members() == []
            assert not group.leave()
        hit = view.hit
    assert at > 4
    assert len(look.members()) == 1


def test_observe_without_a_change_looks_once_and_times_out(store: Store, no_slow_looks: None) -> None:
    class Counting(PrefixStore):
        waits = 0

        def wait_sessions(self, keys: Any, numbers: Any, timeout: Any = None) -> list[int]:
            self.waits += 1
            return super().wait_sessions(keys, numbers, timeout)

    view = Counting("x", store)
    with Membership(view, "m") as group:
        known = group.observe()
        with pytest.raises(StoreTimeoutError, match=r"no member joined or left 'm' within 0\.02 s"):
            group.observe(known, 0.02)
    assert view.waits <= 1


def test_changes_by_the_dozen_leave_a_bounded_number_of_keys(store: Store) -> None:
    for _ in range(50):
        with Membership(store, "m"):
            pass
    before = store.num_keys()
    for _ in range(50):
        with Membership(store, "m"):
            pass
    assert store.num_keys() == pytest.approx(before, abs=group_module.KEPT)


def test_membership_ends_with_a_death_and_observers_see_it(file_place: Place, no_slow_looks: None) -> None:
    store = file_place.open()
    look = Membership(store, "m")
    with Workers(file_place.spec(), "take_part", [["m", "one"], ["m", "two"]]) as workers:
        start(store, 2)
        present = look.observe()
        while len(present) < 2:
            present = look.observe(present)
        workers.processes[0].kill()
        left = start_thread(look.observe, present, LONG_S).join()
        assert len(left) == 1
        workers.processes[1].kill()
        assert start_thread(look.observe, left, LONG_S).join() == []


def test_forked_child_does_not_take_part(file_place: Place) -> None:
    store = file_place.open()
    group = Membership(store, "m")
    group.join()
    pid, group._joined = group._joined[0], (group._joined[0] + 1, group._joined[1])  # type: ignore[index]
    assert pid
    assert not group.leave()
    assert len(group.members()) == 1


def test_errors_after_the_store_is_closed_are_of_the_library(store: Store) -> None:
    found, group = Queue(store, "q"), Membership(store, "m")
    store.close()
    for call in (found.take, group.join, group.members, lambda: found.put("x"), lambda: len(found)):
        with pytest.raises(FscoordError):
            call()


def test_member_that_is_evicted_takes_part_no_longer(store: Store, place: Place) -> None:
    evicted, other = Membership(store, "g", "a"), Membership(place.open(), "g", "b")
    evicted.join()
    with other:
        first, second = other.members()
        assert other.evict(first)
        assert not other.evict(first), "it was evicted before"
        assert other.members() == [second]
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"has not joined|is no longer in"):
                evicted.update("c")
        assert other.members() == [second]
        assert not evicted.leave()
        evicted.join()
        assert [each.data for each in other.observe([second])] == [b"b", b"a"]
        assert evicted.leave()


def test_watcher_sees_an_eviction_at_once(store: Store, place: Place) -> None:
    group = Membership(store, "g", "a")
    with group, start_thread(Membership(place.open(), "g").observe, known := group.members()) as watcher:
        assert group.evict(known[0])
    assert watcher.result == []
