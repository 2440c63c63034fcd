"""`Store._exchange`: a compare-and-set that changes other keys as well, in one step, where the store can."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.internals import KEY_MAX, notifier_of
from support.places import Place, start_thread, until, wait_in_vain

from fscoord import FileStore, HashStore, LimitExceededError, PrefixStore, Store
from fscoord.recipes import Lock


@pytest.fixture(params=["store", "view"])
def view(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    with FileStore(tmp_path / "store") as store:
        yield store if request.param == "store" else PrefixStore("a", PrefixStore("b", store))


def test_exchange_changes_all_keys_in_one_step(view: Store) -> None:
    view.multi_set(["k", "old", "n"], ["1", "x", "y"])
    assert view._exchange(b"k", b"1", b"2", [b"new", b"n"], [b"old", b"missing"]) == b"2"
    assert view.list_keys() == ["k", "n", "new"]
    assert view.multi_get(["k", "n", "new"]) == [b"2", b"1", b"1"]


@pytest.mark.parametrize("before", [b"0", b""])
def test_exchange_that_is_refused_changes_nothing(view: Store, before: bytes) -> None:
    view.set("old", "x")
    if before:
        view.set("k", before)
    assert view._exchange(b"k", b"1", b"2", [b"new"], [b"old"]) == (before or b"1")
    assert view.list_keys() == (["k"] if before else []) + ["old"]
    assert view.get("old") == b"x"


def test_exchange_takes_an_empty_expectation_for_a_missing_key(view: Store) -> None:
    assert view._exchange(b"k", b"", b"2", [], []) == b"2"
    assert view._exchange(b"k", b"", b"3", [b"new"], []) == b"2"
    assert view.list_keys() == ["k"]


def test_exchange_refuses_a_key_that_is_too_long_and_changes_nothing(view: Store) -> None:
    with pytest.raises(LimitExceededError):
        view._exchange(b"k", b"", b"1", [b"x" * KEY_MAX + b"y"], [])
    assert view.num_keys() == 0


def test_waiter_for_a_key_of_an_exchange_is_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[bytes] = []
    with FileStore(tmp_path / "store") as store, FileStore(tmp_path / "store") as other:
        wait_in_vain(other)
        monkeypatch.setattr(notifier_of(store), "notify", rung.extend)
        assert store._exchange(b"k", b"0", b"1", [b"refused"], []) == b"0"
        assert rung == []
        store._exchange(b"k", b"", b"1", [b"new"], [])
        assert sorted(rung) == [b"k", b"new"]


def test_exchange_is_left_to_stores_that_can(tmp_path: Path) -> None:
    class Watched(PrefixStore):
        """It may override `set` or `compare_set`, so an exchange must not pass them by."""

    with FileStore(tmp_path / "store") as store:
        assert store._exchanges_keys
        assert PrefixStore("a", store)._exchanges_keys
        assert not Watched("a", store)._exchanges_keys
        assert not PrefixStore("a", Watched("a", store))._exchanges_keys
        with HashStore() as other, pytest.raises(TypeError, match="HashStore can't change 'k' and other keys"):
            other._exchange(b"k", b"", b"1", [], [])


def test_release_by_a_holder_that_was_woken_is_one_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further write would be a transaction, and a wake-up in vain, between a release and the next hold."""
    place = Place("file-ofd", str(tmp_path))
    first, second, third = (Lock(place.open(), "l") for _ in range(3))
    assert first.acquire()
    with start_thread(second.acquire) as waiter:
        until(first.waiters)
        first.release()
    assert waiter.result
    with start_thread(third.acquire) as waiter:
        until(second.waiters)
        written: list[str] = []
        store = second._line._store
        for name in ("set", "compare_set", "delete_key", "_exchange"):
            monkeypatch.setattr(store, name, partial(record_call, written, name, getattr(store, name)))
        second.release()
    assert waiter.result
    assert set(written) == {"_exchange"}
    assert len(written) <= 2, "the first is refused if the line has changed since it was read, and the second is not"
    assert PrefixStore("l", store).list_keys() == ["line", f"wake/{third._line.entries()[0].id}"]
    third.release()
    assert PrefixStore("l", store).list_keys() == ["line"]
    place.close()


def record_call(written: list[str], name: str, function: Any, *arguments: Any) -> Any:
    written.append(name)
    return function(*arguments)
