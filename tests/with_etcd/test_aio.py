"""`fscoord.aio` on etcd, whose store waits in its calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from aio.on_servers import in_a_loop, many_wait, one_at_a_time
from aio.through_a_loop import Loop, ThroughALoop
from contract.places import HANG_S

from fscoord.stores.etcd import EtcdStore
from fscoord.testing.contract.handles import Handles
from fscoord.testing.contract.members import Members
from fscoord.testing.contract.place import Place
from fscoord.testing.contract.waiting import Waiting

pytestmark = pytest.mark.etcd


@pytest.fixture
def place(open_store: Callable[..., EtcdStore]) -> Iterator[Any]:
    loop = Loop()
    first = ThroughALoop(open_store(HANG_S), loop)
    first.set_timeout(HANG_S)
    place = Place(first)
    yield place
    place.close()
    loop.stop()


class TestEtcd(Handles, Waiting, Members):
    """Ctrl-C is left out: none comes to the thread of the loop."""


@pytest.mark.parametrize("work", [many_wait, one_at_a_time])
def test_tasks_share_a_handle(store: EtcdStore, work: Any) -> None:
    in_a_loop(work, store)
