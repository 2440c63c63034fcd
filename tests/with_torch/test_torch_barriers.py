"""`TCPStoreBarrier` and `DistBarrier`, by the names that torch's own registry gives them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.places import HANG_S, start_thread
from support.ports import held_port

from fscoord.barriers import (
    BarrierConfig,
    DistBarrier,
    FileStoreBarrier,
    TCPStoreBarrier,
    create_barrier_from_config,
    register_in_torch,
)
from fscoord.errors import NoProcessGroupError, StoreTimeoutError, StoreUnavailableError
from fscoord.stores.tcp import TCPStore

pytestmark = pytest.mark.torch

EXPERIMENTAL = "torch.distributed.checkpoint._experimental"
torch_barriers: Any = import_module(f"{EXPERIMENTAL}.barriers") if find_spec(EXPERIMENTAL) else None
"""The module with torch's registry, or None in a torch without it."""

WORKER = Path(__file__).with_name("dist_barrier_worker.py")


@pytest.fixture(scope="session", autouse=True)
def _torch_has_opened_what_it_keeps() -> None:
    TCPStore("127.0.0.1", 0, is_master=True, timeout=HANG_S, wait_for_workers=False).close()


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.fixture
def pair(port: int) -> Iterator[list[TCPStoreBarrier]]:
    def make(rank: int) -> TCPStoreBarrier:
        return TCPStoreBarrier(rank, 2, "checkpoint", HANG_S, True, port, "127.0.0.1", HANG_S)

    second = start_thread(make, 1)
    first = make(0)
    barriers = [first, second.join()]
    yield barriers
    for barrier in reversed(barriers):
        barrier.close()


def test_barrier_on_a_tcp_store_is_passed_repeatedly(pair: list[TCPStoreBarrier]) -> None:
    for _ in range(3):
        threads = [start_thread(barrier.execute_barrier) for barrier in pair]
        for thread in threads:
            thread.join()
    assert [barrier.sequence for barrier in pair] == [3, 3]


@pytest.mark.usefixtures("patient")
def test_barrier_timeout_names_the_missing_rank(pair: list[TCPStoreBarrier]) -> None:
    with pytest.raises(StoreTimeoutError, match=r"missing_ranks=\[1\].*rank 1 is at sequence 0") as caught:
        pair[0].execute_barrier(timeout=0.05)
    assert caught.value.missing_ranks == ("1",)


def test_barrier_is_made_from_the_config_in_the_torch_documentation(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = BarrierConfig(
        barrier_type="tcp_store",
        barrier_args={
            "timeout_barrier_init_secs": 30,
            "barrier_prefix_list": ["checkpoint"],
            "use_checkpoint_barrier_tcpstore_libuv": False,
            "tcpstore_port": port,
            "master_address": "localhost",
        },
    )
    barrier = create_barrier_from_config(config)
    assert isinstance(barrier, TCPStoreBarrier)
    with barrier:
        barrier.execute_barrier()
        assert (barrier.rank, barrier.world_size, barrier.sequence) == (0, 1, 1)


def test_barrier_prefix_given_by_both_names_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match="one prefix, not 2"):
        TCPStoreBarrier(0, 1, "a", tcpstore_port=port, barrier_prefix_list=["b"])


def test_barrier_without_a_server_is_an_error_in_time(port: int) -> None:
    with pytest.raises(StoreUnavailableError, match=str(port)):
        TCPStoreBarrier(1, 2, "a", 0.2, True, port, "127.0.0.1", HANG_S)


def test_dist_barrier_without_a_process_group_is_refused() -> None:
    with pytest.raises(NoProcessGroupError, match="init_process_group") as caught:
        DistBarrier()
    assert isinstance(caught.value, AssertionError)


def test_dist_barrier_calls_the_function_that_torch_has_at_that_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, object]] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    barrier = DistBarrier()
    monkeypatch.setattr("torch.distributed.barrier", lambda **arguments: calls.append(arguments))
    barrier.execute_barrier()
    assert calls == [{"async_op": True}]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("end", "said"), [("timeout", "timed out"), ("interrupt", "interrupted")])
def test_dist_barrier_waits_for_all_ranks_and_ends_in_time(tmp_path: Path, end: str, said: str) -> None:
    command = [sys.executable, "-W", "ignore", str(WORKER), str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    ranks = [
        subprocess.Popen([*command, str(rank), end], **pipes, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=120) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    assert [process.returncode for process in ranks] == [0, 0], outputs
    assert outputs[0][0] == f"met\n{said}\n"
    assert outputs[1][0] == "met\n"


if torch_barriers is not None:

    def test_barriers_are_found_in_the_registry_of_torch_after_one_call(
        tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        register_in_torch()
        register_in_torch()
        assert torch_barriers.BARRIER_REGISTRY["tcp_store"] is torch_barriers.TCPStoreBarrier
        config = torch_barriers.BarrierConfig("file_store", {"path": tmp_path / "store", "rank": 0, "world_size": 1})
        made: Any = torch_barriers.create_barrier_from_config(config)
        assert isinstance(made, torch_barriers.Barrier)
        assert isinstance(made, FileStoreBarrier)
        with made, caplog.at_level("INFO", "fscoord.barriers"):
            made.execute_barrier()
        assert "Executing barrier barrier_prefix=barrier" in caplog.text


if torch_barriers is None:

    def test_torch_without_a_registry_of_barriers_is_named() -> None:
        with pytest.raises(ImportError, match=EXPERIMENTAL):
            register_in_torch()

else:

    def test_tcp_store_barrier_logs_what_that_of_torch_logs(port: int, caplog: pytest.LogCaptureFixture) -> None:
        values: dict[str, Any] = {
            "global_rank": 0,
            "global_world_size": 1,
            "barrier_prefix": "p",
            "timeout_barrier_init_secs": 30,
            "use_checkpoint_barrier_tcpstore_libuv": True,
            "tcpstore_port": port,
            "master_address": "localhost",
            "timeout_secs": 30,
        }
        with caplog.at_level("INFO"):
            TCPStoreBarrier(**values).close()
            torch_barriers.TCPStoreBarrier(**values)
        ours, theirs = (record.getMessage() for record in caplog.records if "Initializing" in record.getMessage())
        assert ours == theirs
