"""torch's own rendezvous over fscoord's stores, and fscoord's over torch's."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from support.places import HANG_S, start_thread
from support.ports import held_port
from torch.distributed.elastic.rendezvous import RendezvousClosedError, dynamic_rendezvous as dynamic
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend as TorchsBackend

from fscoord import FileStore, Store, TCPStore
from fscoord.integrations.torch import TorchStore
from fscoord.rendezvous import C10dRendezvousBackend, RendezvousParameters, create_backend

pytestmark = pytest.mark.torch

LIMIT = timedelta(seconds=HANG_S)


@pytest.fixture(scope="session", autouse=True)
def _torch_has_opened_what_it_keeps() -> None:
    TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False).close()


@pytest.fixture
def backends(tmp_path: Path) -> Iterator[tuple[C10dRendezvousBackend, TorchsBackend]]:
    """fscoord's backend and torch's, each on a handle of its own on one file."""
    ours = FileStore(tmp_path / "job", timeout=HANG_S)
    theirs = TorchStore(FileStore(tmp_path / "job", timeout=HANG_S))
    yield C10dRendezvousBackend(ours, "id"), TorchsBackend(theirs, "id")
    theirs.close()
    ours.close()


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture
def opened() -> Iterator[list[Store]]:
    """Stores to close, the last one first: a server goes after its clients."""
    stores: list[Store] = []
    yield stores
    for store in reversed(stores):
        store.close()


# -- one state, two backends -------------------------------------------------------------------------------------------


def test_rendezvous_backends_do_not_take_each_others_initial_value_for_a_state(
    backends: tuple[C10dRendezvousBackend, TorchsBackend],
) -> None:
    ours, theirs = backends
    assert (ours.get_state(), theirs.get_state()) == (None, None)


@pytest.mark.parametrize("first", ["ours", "theirs"])
@pytest.mark.parametrize("state", [b"x", b"xy", b"xyz", bytes(range(256))])
def test_rendezvous_state_passes_between_the_backend_of_torch_and_ours(
    backends: tuple[C10dRendezvousBackend, TorchsBackend], first: str, state: bytes
) -> None:
    """The sizes are those that base64 pads in each of its ways."""
    writer, reader = backends if first == "ours" else backends[::-1]
    written = writer.set_state(state)
    assert written is not None
    assert (written[0], written[2]) == (state, True)
    found = reader.get_state()
    assert found is not None
    assert found[0] == state
    answer = reader.set_state(state + b"2", found[1])
    assert answer is not None
    assert (answer[0], answer[2]) == (state + b"2", True)
    again = writer.get_state()
    assert again is not None
    assert again[0] == state + b"2"


@pytest.mark.parametrize("first", ["ours", "theirs"])
def test_rendezvous_token_is_stale_once_the_other_backend_has_written(
    backends: tuple[C10dRendezvousBackend, TorchsBackend], first: str
) -> None:
    early, late = backends if first == "ours" else backends[::-1]
    mine = early.set_state(b"1")
    seen = late.get_state()
    assert mine is not None
    assert seen is not None
    late.set_state(b"2", seen[1])
    lost = early.set_state(b"3", mine[1])
    assert lost is not None
    assert (lost[0], lost[2]) == (b"2", False)
    assert late.get_state()[0] == b"2"  # type: ignore[index]


# -- torch's handler over a file ---------------------------------------------------------------------------------------


def make_handler(path: Path) -> tuple[TorchStore, dynamic.DynamicRendezvousHandler]:
    store = TorchStore(FileStore(path, timeout=HANG_S))
    handler = dynamic.DynamicRendezvousHandler.from_backend(
        "id", store, TorchsBackend(store, "id"), 2, 2, "127.0.0.1",
        dynamic.RendezvousTimeout(join=LIMIT, last_call=timedelta(seconds=1)),
    )  # fmt: skip
    return store, handler


def test_rendezvous_handler_of_torch_forms_a_round_over_a_file(tmp_path: Path) -> None:
    nodes = [make_handler(tmp_path / "job") for _ in range(2)]
    threads = [start_thread(handler.next_rendezvous) for _, handler in nodes]
    found = [thread.join() for thread in threads]
    assert sorted(info.rank for info in found) == [0, 1]
    assert [info.world_size for info in found] == [2, 2]
    found[0].store.set("from", "the first")
    assert found[1].store.get("from") == b"the first"
    assert len({(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in found}) == 1
    nodes[0][1].set_closed()
    nodes.append(make_handler(tmp_path / "job"))
    with pytest.raises(RendezvousClosedError):
        nodes[2][1].next_rendezvous()
    for store, handler in nodes:
        assert handler.shutdown()
        store.close()


# -- create_backend(store_type=tcp) ------------------------------------------------------------------------------------


def parameters(port: int, **options: object) -> RendezvousParameters:
    return RendezvousParameters(
        "c10d", f"localhost:{port}", "id", 1, 2, store_type="tcp", read_timeout=HANG_S, **options
    )


SECOND = """
import sys
from fscoord.errors import RendezvousConnectionError
from fscoord.rendezvous import RendezvousParameters, create_backend, creation

def open_and_note(address, **options):
    asked.append(options["is_master"])
    return open_store(address, **options)

asked, open_store, creation.open_store = [], creation.open_store, open_and_note
what = ("c10d", sys.argv[1], "id", 1, 2)
backend, store = create_backend(RendezvousParameters(*what, store_type="tcp"))
assert asked == [True, False], asked
state, token = backend.get_state()
assert state == b"of the first", state
assert backend.set_state(b"of the second", token)[2]
store.close()
try:
    create_backend(RendezvousParameters(*what, store_type="tcp", is_host=True))
except RendezvousConnectionError as error:
    assert "free and open" in str(error), error
else:
    sys.exit("two hosts")
assert asked == [True, False, True], asked
"""


def test_processes_on_the_named_host_share_one_server_that_the_first_opens(port: int, opened: list[Store]) -> None:
    """Each finds its own name in the endpoint and would host. The second is refused the port and joins, unless it was
    told to host: then that is an error."""
    backend, store = create_backend(parameters(port))
    opened.append(store)
    assert backend.set_state(b"of the first")
    command = [sys.executable, "-W", "ignore", "-c", SECOND, f"localhost:{port}"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert second.returncode == 0, second.stderr
    found = backend.get_state()
    assert found is not None
    assert found[0] == b"of the second"


def test_rendezvous_backend_of_torch_and_ours_meet_on_a_tcp_store(port: int, opened: list[Store]) -> None:
    backend, store = create_backend(parameters(port))
    opened.append(store)
    theirs = TorchsBackend(dist.TCPStore("localhost", port, timeout=LIMIT), "id")
    theirs.set_state(b"theirs")
    found = backend.get_state()
    assert found is not None
    assert found[0] == b"theirs"
    assert backend.set_state(b"ours", found[1])[2]  # type: ignore[index]
    assert theirs.get_state()[0] == b"ours"
