"""A read that takes no mutex, while another thread of the handle applies the whole log again: it sees no state of old.

A thread does so after it was interrupted while it applied records, or when the log went on in a file without one of the
values that it keeps in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of, notifier_of, state_of

from fscoord import FileStore, StoreTimeoutError
from fscoord._log.format import record
from fscoord._log.log import Log
from fscoord._log.recovery import APPLYING
from fscoord._waiting.wait import NOT_YET, ArrivalRequest
from fscoord.stores.file.waits import FileWait

OLD = [(record.SET, b"v", b"1", 1, 1), (record.SET, b"gone", b"1", 1, 2), (record.SET, b"b/complete", b"1", 1, 3)]
NEW = [(record.SET, b"v", b"2", 1, 4), (record.DELETE, b"gone", b"", 1, 5), (record.DELETE, b"b/complete", b"", 1, 6)]
"""All records of the log, in two halves."""
HANG_S = 60.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        store.set("v", "1")
        store.set("gone", "1")
        store.set("v", "2")
        store.delete_key("gone")
        yield store


@pytest.fixture
def replay(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread has the mutex from the end of each read on, and has applied a half of the records again.

    It applies the rest before it lets go of the mutex.
    """
    refresh, inspect, state = Log.refresh, Log.inspect, state_of(store)

    def refreshed(log: Log, *given: Any) -> Any:
        answer = refresh(log, *given)
        if log is log_of(store):
            state.reset()
            state.apply(OLD)
        return answer

    def inspected(log: Log, answer: Callable[[], Any]) -> Any:
        if log is log_of(store):
            state.apply(NEW)
        return inspect(log, answer)

    monkeypatch.setattr(Log, "refresh", refreshed)
    monkeypatch.setattr(Log, "inspect", inspected)


def test_get_returns_no_value_of_a_replay_that_is_under_way(store: FileStore, replay: None) -> None:
    assert store.get("v") == b"2"


def test_multi_get_returns_no_value_of_a_replay_that_is_under_way(store: FileStore, replay: None) -> None:
    assert store.multi_get(["v"]) == [b"2"]


def test_wait_finds_no_key_of_a_replay_that_is_under_way(store: FileStore, replay: None) -> None:
    with pytest.raises(StoreTimeoutError):
        store.wait(["gone"], 0)


def arrival_at(store: FileStore) -> FileWait[bytes | None]:
    """Return the wait of the first of two, after its arrival."""
    arrival = store._new_arrival_wait(ArrivalRequest(b"b/num", b"", b"b/complete", 2, HANG_S), notifier_of(store))
    assert arrival.look() is NOT_YET
    return arrival


def test_rank_is_not_let_pass_by_a_replay_that_is_under_way(store: FileStore, replay: None) -> None:
    assert arrival_at(store).look() is NOT_YET


def test_rank_that_applies_the_log_again_is_not_let_pass_by_what_was_there(store: FileStore) -> None:
    arrival = arrival_at(store)
    with FileStore(store.path) as other:
        other.set("b/complete", "1")
        assert store.check(["b/complete"])
        other.delete_key("b/complete")
    log_of(store).handle.recovery = APPLYING
    assert arrival.look() is NOT_YET


@pytest.mark.parametrize("read", [lambda store: store.get("v"), lambda store: store.multi_get(["v"])[0]])
def test_read_that_applies_the_log_again_returns_what_came_since(store: FileStore, read: Callable[..., bytes]) -> None:
    assert read(store) == b"2"
    with FileStore(store.path) as other:
        other.set("v", "3")
    log_of(store).handle.recovery = APPLYING  # as after an interruption
    assert read(store) == b"3"


def test_wait_that_applies_the_log_again_finds_no_key_that_was_deleted_since(store: FileStore) -> None:
    store.wait(["v"], 0)
    with FileStore(store.path) as other:
        other.delete_key("v")
    log_of(store).handle.recovery = APPLYING
    with pytest.raises(StoreTimeoutError):
        store.wait(["v"], 0)
