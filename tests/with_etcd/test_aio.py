"""`fscoord.aio` on etcd, whose store waits in its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.on_servers import in_a_loop, many_wait, one_at_a_time, place_in_a_loop
from support.places import HANG_S

from fscoord.stores.etcd import EtcdStore
from fscoord.testing.contract.handles import Handles, Members
from fscoord.testing.contract.waiting import Waiting

pytestmark = pytest.mark.etcd


@pytest.fixture
def place(open_store: Callable[..., EtcdStore]) -> Iterator[Any]:
    with place_in_a_loop(open_store(HANG_S)) as place:
        yield place


class TestEtcd(Handles, Waiting, Members):
    """Ctrl-C is left out: none comes to the thread of the loop."""


@pytest.mark.parametrize("work", [many_wait, one_at_a_time])
def test_tasks_share_a_handle(store: EtcdStore, work: Any) -> None:
    in_a_loop(work, store)
