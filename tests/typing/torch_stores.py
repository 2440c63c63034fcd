"""Code that passes stores of torch to fscoord, checked by test_torch_stores.py and never run.

An ignored error is an error that the type checker must find: `mypy --strict` refuses an unused ``type: ignore``.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore
from typing_extensions import assert_type

import fscoord
from fscoord import aio, barrier, broadcast, gather, get_all, recipes, store_timeout, synchronize
from fscoord.collectives import BarrierStore, ExchangeStore, TimeoutStore
from fscoord.rendezvous import C10dRendezvousBackend, DynamicRendezvousHandler, StateStore


def all_protocols(store: ExchangeStore, state: StateStore) -> None:
    with store_timeout(store, timedelta(seconds=5)):
        barrier(store, 2, "prefix")
        barrier(store, 2, "prefix", 5, 0, "node{}".format, 2)
        barrier(store, world_size=2, key=b"key", timeout=timedelta(seconds=5), rank=0)
    assert_type(synchronize(store, b"data", 0, 2, "prefix"), list[bytes])
    assert_type(synchronize(store, "data", 0, world_size=2, key="key", timeout=5), list[bytes])
    assert_type(get_all(store, 0, "prefix", 2), list[bytes])
    assert_type(get_all(store, 0, key="key", world_size=2, timeout=5), list[bytes])
    C10dRendezvousBackend(state, "id")


def stores_of_torch(base: Store) -> None:
    for store in (base, PrefixStore("prefix", base)):
        all_protocols(store, store)
    server = TCPStore("localhost", 0, is_master=True)
    all_protocols(server, server)
    barrier(server, 2, "prefix", 5, 0)
    synchronize(server, b"data", 0, 2, "prefix", 5)
    get_all(server, 0, "prefix", 2)
    file, memory = FileStore("/shared/store", 2), HashStore()
    all_protocols(file, memory)
    all_protocols(memory, file)


def stores_of_fscoord(store: fscoord.Store) -> None:
    all_protocols(store, store)
    all_protocols(fscoord.FileStore(), fscoord.PrefixStore("prefix", store))
    all_protocols(fscoord.HashStore(), fscoord.TCPStore("localhost", 0))


class Plain:
    """A stand-in with the methods that `barrier` calls, whose values are text."""

    def set_timeout(self, timeout: timedelta) -> bool:
        return True

    def set(self, name: str, content: str) -> bool:
        return True

    def add(self, name: str, more: int) -> int:
        return more

    def wait(self, names: list[str], timeout: timedelta | None = None) -> bool:
        return True

    def multi_get(self, names: list[str]) -> list[str]:
        return names


class TextOnly:
    def get(self, name: str) -> str:
        return name

    def compare_set(self, name: str, old: str, new: str) -> str:
        return new


def stand_ins(plain: Plain, text: TextOnly) -> None:
    barrier(plain, 2, "prefix", 5, 0)
    with store_timeout(plain, 5):
        C10dRendezvousBackend(text, "id")
    store: BarrierStore = plain
    timeout: TimeoutStore = store
    print(timeout)
    get_all(plain, 0, "prefix", 2)  # type: ignore[call-overload]
    C10dRendezvousBackend(plain, "id")  # type: ignore[arg-type]
    barrier(text, 2, "prefix")  # type: ignore[call-overload]


def refused(tcp: TCPStore, tasks: aio.AsyncStore) -> None:
    broadcast(tcp, b"data", 0, 2, "key")  # type: ignore[arg-type]
    gather(tcp, b"data", 0, 2, "key")  # type: ignore[arg-type]
    recipes.Lock(tcp, "name")  # type: ignore[arg-type]
    fscoord.PrefixStore("prefix", tcp)  # type: ignore[arg-type]
    DynamicRendezvousHandler.from_backend("id", tcp, C10dRendezvousBackend(tcp, "id"), 1, 2)  # type: ignore[arg-type]
    barrier(tasks, 2, "prefix")  # type: ignore[call-overload]
    C10dRendezvousBackend(tasks, "id")  # type: ignore[arg-type]
