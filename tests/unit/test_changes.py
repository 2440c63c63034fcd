"""`Store._wait_for_change`: a waiter for any change learns of each, at once if the store can report it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.internals import sharing_of
from support.places import start_thread

from fscoord import FileStore, HashStore, PrefixStore, Store, StoreClosedError, store as contract
from fscoord._log import mount, opened
from fscoord._log.shared import network
from fscoord._log.wakeup import watcher
from fscoord._log.wakeup.doorbell import bucket
from fscoord._runtime import system
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


@pytest.mark.usefixtures("only_events_wake")
def test_threads_of_the_same_handle_wait_for_their_keys_meanwhile(path: str) -> None:
    with FileStore(path) as writer, FileStore(path, timeout=HANG_S) as store:
        with start_thread(store.get, "key") as getter:
            until_asleep(store, "_notifier")
            known = store._wait_for_change(None, HANG_S)
            with start_thread(store._wait_for_change, known, LONG_S) as thread:
                until_asleep(store)
                writer.set("other", "1")
            assert thread.result != known
            writer.set("key", "2")
        assert getter.result == b"2"


@pytest.mark.usefixtures("only_events_wake")
def test_wait_ends_when_the_store_is_closed(path: str) -> None:
    with FileStore(path) as store:
        known = store._wait_for_change(None, HANG_S)
        thread = start_thread(store._wait_for_change, known, LONG_S)
        until_asleep(store)
        store.close()
        with pytest.raises(StoreClosedError):
            thread.join()


def test_poller_on_a_mount_of_several_hosts_still_gets_the_changes_itself(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "find_mount", lambda _: mount.Mount("nfs4", str(tmp_path), ("rw",)))
    monkeypatch.setattr(network, "PATH_CHECK_S", math.inf)
    monkeypatch.setattr(system, "O_DIRECT", 0)
    with FileStore(path) as afar, FileStore(path) as store:
        known = store._wait_for_change(None, HANG_S)
        sharing_of(store).take_changed_keys()
        with start_thread(store._wait_for_change, known, LONG_S) as thread:
            until_asleep(store)
            afar.set("k", "1")
        assert thread.result != known
        assert bucket(b"k") in sharing_of(store).take_changed_keys()
        assert not list(tmp_path.glob("*.bell"))


def test_store_without_notification_may_have_changed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    with HashStore() as store:
        monkeypatch.setattr(contract, "POLL_INTERVAL_S", LONG_S)
        known = store._wait_for_change(None, HANG_S)
        assert known is not None
        store._wait_for_change(known, 0.0)
        monkeypatch.setattr(contract, "POLL_INTERVAL_S", 0.0)
        assert store._wait_for_change(known, math.inf) is not None
