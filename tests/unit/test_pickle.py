"""Stores and recipes under `pickle` and `copy`: a clone arrives, or the error says what to pass instead."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fscoord import FileStore, HashStore, PrefixStore, aio
from fscoord.recipes import Lock, Membership, Queue, ReadWriteLock
from fscoord.stores.etcd import EtcdStore


def through_pickle(thing: Any) -> Any:
    return pickle.loads(pickle.dumps(thing))


ways = pytest.mark.parametrize("way", [through_pickle, copy.copy, copy.deepcopy])


@ways
def test_file_store_arrives_as_a_clone(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    path = tmp_path / "store"
    with FileStore(path, 1, rank=0, label="x", timeout=7, lock="flock") as store:
        with way(store) as other:
            other.set("k", "v")
            assert store.get("k") == b"v"
            assert (other.path, other.timeout, other.place_options) == (store.path, store.timeout, {"lock": "flock"})
            assert [(each.rank, each.label) for each in other.members()] == [(0, "x"), (None, "")]
        assert path.exists()
    assert not path.exists()


@ways
def test_view_arrives_with_a_clone_that_it_closes(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    with FileStore(tmp_path / "store") as store:
        view = way(PrefixStore("p", store))
        view.set("k", "v")
        view.close()
        assert store.get("p/k") == b"v"
        with pytest.raises(RuntimeError, match="closed"):
            view.underlying_store.check(["k"])


@ways
def test_store_without_an_address_says_what_to_pass(way: Callable[[Any], Any]) -> None:
    with FileStore() as private, HashStore() as memory:
        with pytest.raises(TypeError, match=f"pass its path '{private.path}'"):
            way(private)
        with pytest.raises(TypeError, match="pass the address of a store that processes can share"):
            way(memory)


@ways
def test_recipe_that_holds_something_is_not_copied(tmp_path: Path, way: Callable[[Any], Any]) -> None:
    with FileStore(tmp_path / "store") as store:
        here = aio.AsyncStore(store)
        Queue(store, "q").put("1")
        lock = Lock(store, "l")
        with lock:
            for each in (lock, ReadWriteLock(store, "r"), Membership(store, "m"), Queue(store, "q").take()):
                with pytest.raises(TypeError, match="pass the store and the name"):
                    way(each)
            for other in (aio.Lock(here, "l"), aio.ReadWriteLock(here, "r"), aio.Membership(here, "m")):
                with pytest.raises(TypeError, match="pass the store and the name"):
                    way(other)
            assert not Lock(store, "l").acquire(blocking=False)


def test_etcd_store_is_pickled_without_credentials() -> None:
    store = EtcdStore("127.0.0.1:1", "p", 7, user="ann", password="secret")
    packed = pickle.dumps(store)
    assert b"secret" not in packed
    assert b"ann" not in packed
    other = pickle.loads(packed)
    assert (repr(other), other.timeout) == (repr(store), store.timeout)
    other.close()
    store.close()
