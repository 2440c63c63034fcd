"""The steps of a `Queue`: on a `FileStore` of one host each call is one record, decided under the log's lock."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of

from fscoord import FileStore, HashStore, PrefixStore
from fscoord._arguments import VALUE_MAX, Key, Transaction
from fscoord._log.replay.writer import LogWriter
from fscoord.errors import LimitExceededError, QueueEmptyError
from fscoord.recipes import PriorityQueue, Queue, queue
from fscoord.store import Store

HANG_S = 30.0


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of the records that this process appends."""
    found: list[str] = []
    append = LogWriter.append

    def record_kind(self: LogWriter, kind: int, *rest: Any) -> None:
        found.append(chr(kind))
        append(self, kind, *rest)

    monkeypatch.setattr(LogWriter, "append", record_kind)
    return found


@pytest.fixture(params=["file", "prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path, kinds: list[str]) -> Iterator[Store]:
    assert kinds == []  # the log keeps the function that `kinds` has replaced
    with FileStore(tmp_path / "log") as store:
        yield PrefixStore("view", store) if request.param == "prefix" else store


def test_put_take_and_ack_write_one_record_each(store: Store, kinds: list[str]) -> None:
    found = Queue(store, "q", maxsize=2)
    found.put("first")
    found.take().ack()
    kinds.clear()
    found.put("a")
    assert len(kinds) == 1
    item = found.take()
    assert (item.data, len(kinds)) == (b"a", 2)
    item.ack()
    assert len(kinds) == 3


def test_poll_of_an_empty_queue_writes_nothing_after_the_first(store: Store, kinds: list[str]) -> None:
    found = Queue(store, "q")
    found.put("a")
    found.take().ack()
    for count in (1, 0):  # the first deletes the wake-up key
        kinds.clear()
        with pytest.raises(QueueEmptyError):
            found.take(block=False)
        assert len(kinds) == count


def test_poll_of_an_empty_queue_reads_no_keys_of_earlier_items(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    found = Queue(store, "q")
    monkeypatch.setattr(queue, "LOOK_S", HANG_S)  # the list of all keys stays valid
    found.put_all(["x"] * 100)
    found.ack_all(found.take_all(100))
    with pytest.raises(QueueEmptyError):
        found.take(block=False)
    found._until = -1.0  # as if the list were old
    with pytest.raises(QueueEmptyError):
        found.take(block=False)
    read: list[int] = []
    peek_all = store._peek_all
    monkeypatch.setattr(store, "_peek_all", lambda keys: read.append(len(keys)) or peek_all(keys))
    with pytest.raises(QueueEmptyError):
        found.take(block=False)
    assert sum(read) == 0


def test_items_come_once_and_in_order_while_the_log_is_compacted(tmp_path: Path) -> None:
    """A step that compacts the log is decided twice."""
    with FileStore(tmp_path / "log", compact_bytes=2048) as store:
        found = Queue(store, "q")
        for number in range(200):
            found.put(f"{number} " + "x" * 50)
        items = []
        for _ in range(200):
            with found.take(block=False) as item:
                items.append((int(item.data.split()[0]), item.deliveries))
        assert items == [(number, 1) for number in range(200)]
        assert log_of(store).position()[0] > 0
        assert found.size() == 0


def test_sleeping_consumer_learns_of_the_end_of_a_consumer_that_came_after_its_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "LOOK_S", 10 * HANG_S)
    monkeypatch.setattr(queue, "LOOK_SHARE", float("inf"))  # a list that took long may be repeated at once
    with FileStore(tmp_path / "log") as store, FileStore(tmp_path / "log") as other:
        found = Queue(store, "q")
        with pytest.raises(QueueEmptyError):
            found.take(block=False)  # lists all keys
        found.put("a")
        Queue(other, "q").take()
        items: list[bytes] = []
        thread = threading.Thread(target=lambda: items.append(found.take(timeout=HANG_S).data))
        thread.start()
        other.close()
        thread.join(HANG_S)
        assert items == [b"a"]


def test_step_whose_function_returns_nothing_changes_nothing(store: Store, kinds: list[str]) -> None:
    store.set("k", "v")
    kinds.clear()
    found: list[bytes | None] = []

    def choose(get: Any) -> None:
        found.extend([get(b"k"), get(b"absent")])

    assert not store._transact_by(choose)
    assert (found, kinds) == ([b"v", None], [])


def test_step_changes_all_keys_that_its_function_names(store: Store) -> None:
    store.set("gone", "v")
    assert store._transact_by(lambda _: Transaction({}, {b"k": b"v"}, {b"n": 2}, [b"gone"]))
    assert (store.get("k"), store.get("n"), store.check(["gone"])) == (b"v", b"2", False)


def test_values_that_are_too_long_together_are_refused_before_the_step(
    store: Store, kinds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Queue(store, "q")
    value = b"x" * (40 << 20)
    with pytest.raises(LimitExceededError, match="nothing was written"):
        found.put_all([value, value])
    assert kinds == []
    assert found.size() == 0


def test_long_value_with_a_delay_is_put(store: Store) -> None:
    found = Queue(store, "q")
    found.put(b"x" * (VALUE_MAX - 200), delay=10 * HANG_S)
    assert [len(item.data) for item in found.items()] == [VALUE_MAX - 200]


def test_items_that_are_too_long_with_their_claims_are_refused_before_the_step(store: Store, kinds: list[str]) -> None:
    found = Queue(store, "n" * 900)
    with pytest.raises(LimitExceededError, match="nothing was written"):
        found.put_all(["x"] * 40_000, delay=HANG_S)
    assert kinds == []


def test_item_that_was_put_during_a_listing_is_handed_out_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    found, list_keys = Queue(store, "q"), store.list_keys
    found.put("a")

    def put_and_list(prefix: Key) -> list[str]:
        found.put("b")
        return list_keys(prefix)

    monkeypatch.setattr(store, "list_keys", put_and_list)
    assert [item.data for item in found.take_all(9)] == [b"a", b"b"]


class _InterruptedList(list[Any]):
    """Raises KeyboardInterrupt after its first append, as a signal handler may."""

    def append(self, each: Any) -> None:
        super().append(each)
        if len(self) == 1:
            raise KeyboardInterrupt


def test_item_whose_choice_was_interrupted_is_handed_out_once(store: Store) -> None:
    found = Queue(store, "q")
    found.put_all("ab")
    found._chosen = _InterruptedList()
    with pytest.raises(KeyboardInterrupt):
        found.take_all(2)
    found._chosen = list(found._chosen)
    assert [item.data for item in found.take_all(2)] == [b"a", b"b"]


def test_item_whose_choice_was_interrupted_comes_after_an_earlier_one(store: Store) -> None:
    found, other = Queue(store, "q"), Queue(store, "q")
    found.put_all("ab")
    earlier = other.take()
    found._chosen = _InterruptedList()
    with pytest.raises(KeyboardInterrupt):
        found.take()
    found._chosen = list(found._chosen)
    earlier.release()
    found._until = -1.0  # as if the list were old
    assert [found.take().data, found.take().data] == [b"a", b"b"]


@pytest.mark.parametrize("priority", [-1, 1])
def test_item_with_a_priority_is_found_at_once_by_a_plain_queue(
    store: Store, priority: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "LOOK_S", HANG_S)  # the list of all keys stays valid
    found = Queue(store, "q")
    with pytest.raises(QueueEmptyError):
        found.take(block=False)
    PriorityQueue(store, "q").put("a", priority)
    assert found.take(block=False).data == b"a"
