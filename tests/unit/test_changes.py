"""`Store._wait_for_change`: a waiter for any change learns of each, at once if the store can report it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.places import start_thread

from fscoord import FileStore, HashStore, PrefixStore, Store, store as contract
from fscoord._log.wakeup import watcher
from fscoord.stores.file import notifier

HANG_S = 60

LONG_S = 10 * HANG_S
"""How long to wait for what must come sooner: a wait that ends finds it with its last look, though it heard of nothing.
"""

CHANGES: dict[str, Callable[[FileStore], object]] = {
    "set": lambda store: store.set("k", "2"),
    "add": lambda store: store.add("number", 1),
    "append": lambda store: store.append("k", "3"),
    "compare and set": lambda store: store.compare_set("k", "23", "4"),
    "delete": lambda store: store.delete_key("k"),
    "several": lambda store: store.multi_set(["a", "b"], ["1", "2"]),
    "push": lambda store: store.queue_push("q", "v"),
    "pop": lambda store: store.queue_pop("q"),
    "compaction": lambda store: store.compact(),
    "behind a compaction": lambda store: store.set("k", "5"),
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def only_events_wake(monkeypatch: pytest.MonkeyPatch) -> None:
    """No slow poll helps: an event that is lost is a test that hangs."""
    for name in ("SLOW_FIRST_S", "SLOW_LAST_S"):
        monkeypatch.setattr(watcher, name, LONG_S)
    monkeypatch.setattr(notifier, "ANNOUNCE_S", LONG_S)


def until_asleep(store: FileStore, name: str = "_change_notifier") -> None:
    """Return when somebody sleeps until anything changes in `store`, or with ``"_notifier"`` until a key does."""
    deadline = time.monotonic() + HANG_S
    while not ((waits := getattr(store, name)) and waits._watcher and waits._watcher._sleeping):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.usefixtures("only_events_wake")
@pytest.mark.parametrize("options", [{"read_only": True}, {}, {"watch": "poll"}], ids=["reads", "writes", "polls"])
@pytest.mark.parametrize("is_nested", [False, True], ids=["plain", "nested"])
def test_wait_ends_at_every_change(path: str, options: dict[str, object], is_nested: bool) -> None:
    with FileStore(path) as writer, FileStore(path, **options) as watcher:
        view: Store = PrefixStore("view", watcher) if is_nested else watcher
        writer.set("k", "1")
        known = view._wait_for_change(None, HANG_S)
        for name, change in CHANGES.items():
            assert view._wait_for_change(known, 0.0) == known
            with start_thread(view._wait_for_change, known, LONG_S) as thread:
                until_asleep(watcher)
                change(writer)
            assert thread.result != known, name
            known = view._wait_for_change(thread.result, 0.0)


@pytest.mark.usefixtures("only_events_wake")
def test_change_before_the_wait_ends_it_too(path: str) -> None:
    with FileStore(path) as store:
        known = store._wait_for_change(None, HANG_S)
        store.set("k", "1")
        assert store._wait_for_change(known, LONG_S) != known


def test_store_without_notification_may_have_changed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    with HashStore() as store:
        monkeypatch.setattr(contract, "POLL_INTERVAL_S", LONG_S)
        known = store._wait_for_change(None, HANG_S)
        assert known is not None
        store._wait_for_change(known, 0.0)
        monkeypatch.setattr(contract, "POLL_INTERVAL_S", 0.0)
        assert store._wait_for_change(known, math.inf) is not None
