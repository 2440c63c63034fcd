"""`fscoord.aio` on torch's TCP store, at whose waits the threads of the loop take turns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from support.on_servers import in_a_loop, many_wait, one_at_a_time, place_in_a_loop
from support.places import open_tcp
from support.torch_lacks import needs

from fscoord.store import Store
from fscoord.testing.contract.handles import Handles, Members
from fscoord.testing.contract.waiting import Waiting

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("patient")]


@pytest.fixture(scope="session", autouse=True)
def _torch_has_opened_what_it_keeps() -> None:
    open_tcp().close()


@pytest.fixture
def tcp() -> Iterator[Store]:
    store = open_tcp()
    yield store
    store.close()


@pytest.fixture
def place(tcp: Store) -> Iterator[Any]:
    with place_in_a_loop(tcp) as place:
        yield place


@needs(dist.TCPStore, "list_keys")
@needs(dist.TCPStore, "queue_push")
class TestTCP(Handles, Waiting, Members):
    """The tests of Ctrl-C are left out, because the thread of the loop gets none."""


@pytest.mark.parametrize("work", [pytest.param(many_wait, marks=needs(dist.TCPStore, "queue_push")), one_at_a_time])
def test_tasks_share_a_handle(tcp: Store, work: Any, capfd: pytest.CaptureFixture[str]) -> None:
    in_a_loop(work, tcp)
    assert capfd.readouterr().err == ""
