"""`Store.transact`: compare some keys and change others, in one step. What every store does is in `fscoord.testing`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.internals import notifier_of
from support.places import Place, start_thread, until, wait_in_vain

from fscoord import FileStore, HashStore, PrefixStore, StoreClosedError, StoreError, inspect
from fscoord.recipes import Lock


def test_waiter_for_each_key_of_a_transaction_is_rung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[bytes] = []
    with FileStore(tmp_path / "store") as store, FileStore(tmp_path / "store") as other:
        wait_in_vain(other)
        monkeypatch.setattr(notifier_of(store), "notify", rung.extend)
        assert not store.transact(compare={"k": "0"}, set={"refused": "1"})
        assert rung == []
        assert store.transact(compare={"k": None}, set={"k": "1", "new": "1"}, add={"n": 1}, delete=["gone"])
        assert {b"k", b"n", b"new"} <= set(rung)


def test_transaction_is_one_record(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        store.multi_set(["a", "old"], ["1", "1"])
        store.transact(compare={"a": "1"}, set={"b": "2"}, add={"a": 1}, delete=["old", "missing"])
        store.transact(compare={"a": "2"}, set={"b": "3"}, add={"a": 1})
        store.transact(compare={"a": "3"}, delete=["missing"])
        kinds = [entry.kind for entry in inspect.dump(tmp_path / "store")]
    assert kinds == ["session", "multi_set", "transaction", "multi_set"], (
        "a transaction without deletions is a multi_set"
    )


def test_long_values_of_a_transaction_are_spilled(tmp_path: Path) -> None:
    long = b"x" * 1000
    with (
        FileStore(tmp_path / "store", spill_bytes=100) as store,
        FileStore(tmp_path / "store", spill_bytes=100) as other,
    ):
        store.multi_set(["a", "old"], [b"a" * 500, "1"])
        assert store.transact(compare={"a": b"a" * 500}, set={"b": long, "c": "2"}, add={"n": 3}, delete=["old", "a"])
        for each in (store, other):
            assert each.list_keys() == ["b", "c", "n"]
            assert each.multi_get(["b", "c", "n"]) == [long, b"2", b"3"]
        store.compact()
        assert other.multi_get(["b", "c", "n"]) == [long, b"2", b"3"]


def test_release_by_a_holder_that_was_woken_is_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further write would be a wake-up in vain, between a release and the next hold."""
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
        for name in ("set", "compare_set", "delete_key", "transact"):
            monkeypatch.setattr(store, name, partial(record_call, written, name, getattr(store, name)))
        second.release()
    assert waiter.result
    assert set(written) == {"transact"}
    assert len(written) <= 2, "the first is refused if the line has changed since it was read, and the second is not"
    assert PrefixStore("l", store).list_keys() == ["line", f"wake/{third._line.entries()[0].id}"]
    third.release()
    assert PrefixStore("l", store).list_keys() == ["line"]
    place.close()


def test_view_that_overrides_an_operation_has_no_transactions(tmp_path: Path) -> None:
    class Watched(PrefixStore):
        """It may override `set` or `compare_set`, so a transaction must not pass them by."""

    with FileStore(tmp_path / "store") as store:
        assert PrefixStore("a", store).capabilities.transacts
        for view in (Watched("a", store), PrefixStore("a", Watched("a", store))):
            assert not view.capabilities.transacts
            with pytest.raises(StoreError, match="Watched has no transact, so nothing was changed"):
                view.transact(set={"k": "1"})
        assert store.num_keys() == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"set": {"k": "1"}, "delete": ["k"]},
        {"set": {"k": "1"}, "add": {b"k": 1}},
        {"delete": ["k", b"k"]},
        {"set": {"k": "1", b"k": "2"}},
        {"compare": {"k": None, b"k": None}},
    ],
)
def test_key_that_occurs_twice_is_refused(changes: dict[str, Any]) -> None:
    with HashStore() as store:
        with pytest.raises(ValueError, match="key 'k' twice; nothing was written"):
            store.transact(**changes)
        assert store.num_keys() == 0


def record_call(written: list[str], name: str, function: Any, *arguments: Any, **named: Any) -> Any:
    written.append(name)
    return function(*arguments, **named)


def test_transaction_whose_sum_overflows_changes_nothing(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store") as store:
        store.multi_set(["k", "l"], ["1", "2"])
        store.queue_push("q", "item")
        with pytest.raises(OverflowError):
            store.transact(set={"k": "3"}, add={"n": 2**63 - 1, "l": 2**63 - 1}, delete=["q"])
        assert (store.get("k"), store.queue_len("q"), store.check(["n"])) == (b"1", 1, False)
        assert store.transact(compare={"k": "1"}, set={"k": "3"}, add={"l": 5}, delete=["q"])
        assert (store.get("k"), store.get("l"), store.queue_len("q")) == (b"3", b"7", 0)


def test_transaction_of_nothing_on_a_closed_store_is_refused(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.close()
    with pytest.raises(StoreClosedError):
        store.transact()
