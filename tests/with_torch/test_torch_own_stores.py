"""The collectives and the backend on torch's own stores, alone and together with torch's functions."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.places import HANG_S, start_thread
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend as TorchBackend
from torch.distributed.elastic.utils import store as store_util

from fscoord import StoreTimeoutError, barrier, get_all, store_timeout, synchronize
from fscoord.rendezvous import C10dRendezvousBackend

pytestmark = pytest.mark.torch

DEFAULT = timedelta(seconds=300)


@pytest.fixture(scope="session", autouse=True)
def tcp_stores() -> Iterator[Any]:
    """Return connections to a server of torch, in a circle. torch closes them and the server when the process ends."""
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return cycle([first, *(dist.TCPStore("127.0.0.1", first.port, wait_for_workers=False) for _ in range(2))])


@pytest.fixture(params=["file", "hash", "prefix", "tcp"])
def handle(request: pytest.FixtureRequest, tmp_path: Path, tcp_stores: Iterator[Any]) -> Callable[[], Any]:
    """Return a function that returns a handle for one thread: a wait on torch's TCPStore blocks the whole handle."""
    if request.param == "tcp":
        return lambda: dist.PrefixStore(str(tmp_path), next(tcp_stores))
    if request.param == "file":
        store: Any = dist.FileStore(str(tmp_path / "store"))
    else:
        store = dist.HashStore() if request.param == "hash" else dist.PrefixStore("p", dist.HashStore())
    return lambda: store


def exchange(handle: Callable[[], Any], *calls: Callable[..., list[bytes]]) -> None:
    threads = [start_thread(call, handle(), f"d{rank}", rank, 3, "s", HANG_S) for rank, call in enumerate(calls)]
    assert [thread.join() for thread in threads] == [[b"d0", b"d1", b"d2"]] * 3


def test_ranks_of_both_libraries_exchange_data(handle: Callable[[], Any]) -> None:
    exchange(handle, synchronize, store_util.synchronize, synchronize)
    assert get_all(handle(), 0, "s", 1) == [b"d0"]


def test_timeout_of_a_store_that_ranks_share_is_restored(handle: Callable[[], Any]) -> None:
    """torch's function may restore the timeout that another thread has set meanwhile."""
    exchange(handle, synchronize, synchronize, synchronize)
    assert handle().timeout == DEFAULT


def test_ranks_of_both_libraries_meet_at_a_barrier(handle: Callable[[], Any]) -> None:
    for ranked in (False, True):
        calls = [barrier, store_util.barrier, barrier]
        key = f"b{ranked}"
        threads = [
            start_thread(call, handle(), 3, key, HANG_S, rank if ranked else None) for rank, call in enumerate(calls)
        ]
        for thread in threads:
            thread.join()


def test_rank_0_names_the_missing_ranks_on_every_store_of_torch(handle: Callable[[], Any]) -> None:
    with pytest.raises(StoreTimeoutError, match=r"for key prefix: b \(world_size=2, missing_ranks=\[host1\]") as caught:
        barrier(handle(), 2, "b", 0.05, 0, "host{}".format, 0.05)
    assert caught.value.missing_ranks == ("host1",)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_time_out_on_a_store_of_torch_is_an_error_of_both(handle: Callable[[], Any]) -> None:
    with pytest.raises(dist.DistStoreError) as caught:
        barrier(handle(), 2, "b", 0.05, 0, trace_timeout=0.05)
    error = caught.value
    assert isinstance(error, StoreTimeoutError)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.missing_ranks) == (StoreTimeoutError, str(error), error.missing_ranks)


@pytest.mark.parametrize("limit", [0, math.inf])
def test_limits_that_torch_takes_for_others_are_set_on_its_stores(handle: Callable[[], Any], limit: float) -> None:
    store = handle()
    with store_timeout(store, limit):
        assert timedelta(0) < store.timeout <= timedelta(days=36_500)
        assert (store.timeout > timedelta(days=30_000)) == (limit > 0)
    assert store.timeout == DEFAULT


def test_timeout_of_a_store_of_torch_is_set_and_restored(handle: Callable[[], Any]) -> None:
    store = handle()
    with store_timeout(store, 0.05), pytest.raises(RuntimeError, match=r"(?i)timeout"):
        store.get("missing")
    assert store.timeout == DEFAULT


def test_backends_of_both_libraries_share_a_state_in_a_store_of_torch(handle: Callable[[], Any]) -> None:
    ours, theirs = C10dRendezvousBackend(handle(), "id"), TorchBackend(handle(), "id")
    assert ours.get_state() is None
    first = ours.set_state(b"first")
    assert first is not None
    assert first[2]
    assert theirs.get_state() == first[:2]
    second = theirs.set_state(b"second", first[1])
    assert second is not None
    assert second[2]
    assert ours.set_state(b"third", first[1]) == (b"second", second[1], False)
    third = ours.set_state(b"third", second[1])
    assert third is not None
    assert third[2]
