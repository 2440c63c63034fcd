"""Code that uses `TorchStore`, checked by mypy and never run; `tox -e torch` checks it with the real torch."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from typing_extensions import assert_type

from fscoord import Store, barrier, synchronize
from fscoord.integrations.torch import TorchStore, rendezvous
from fscoord.rendezvous import C10dRendezvousBackend


def adapter(store: Store) -> None:
    adapted = TorchStore(store)
    adapted.set("text", b"bytes")
    adapted.set(b"bytes", "text")
    assert_type(adapted.get("key"), bytes)
    assert_type(adapted.add("key", amount=1), int)
    assert_type(adapted.compare_set("key", "", "value"), bytes)
    assert_type(adapted.check(["key"]), bool)
    assert_type(adapted.multi_get(["key"]), list[bytes])
    assert_type(adapted.list_keys("prefix"), list[str])
    assert_type(adapted.queue_pop("queue", block=False), bytes)
    adapted.wait(["key"], timeout=timedelta(seconds=1))
    adapted.wait(["key"], 0.5)
    assert_type(adapted.timeout, timedelta)
    assert_type(adapted.clone(), TorchStore)
    assert_type(adapted.underlying_store, Store)
    assert_type(rendezvous("fscoord:///path"), Iterator[tuple[TorchStore, int, int]])
    barrier(adapted, 2, "prefix", 5, 0)
    assert_type(synchronize(adapted, b"data", 0, 2, "prefix"), list[bytes])
    C10dRendezvousBackend(adapted, "id")
    of_torch: dist.Store = adapted
    dist.PrefixStore("prefix", of_torch)
