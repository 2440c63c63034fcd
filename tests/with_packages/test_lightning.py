"""Lightning over a store: processes on the CPU, which get rank 0's address from it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch.plugins.environments as lightning_environments
import pages
import pytest
from support.places import HANG_S, start_thread

from fscoord import FileStore, HashStore
from fscoord.errors import RendezvousError
from fscoord.integrations.lightning import FscoordEnvironment

pytestmark = pytest.mark.packages

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "jax-lightning.md"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "SLURM_", "OMPI_", "PMI", "FLUX_", "PALS_")
LIMIT_S = 200
"""When a process that hangs is killed."""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    others = ("PYTEST_XDIST_", "FSCOORD_", "TORCHELASTIC_")
    for name in [name for name in os.environ if name.startswith((*LAUNCHERS, *others))]:
        monkeypatch.delenv(name)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(tmp_path)
    yield programs
    programs.close()


class Programs:
    """The programs of the page, and processes that run them; these are killed at the end of the test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[subprocess.Popen[str]] = []
        for block in pages.blocks(PAGE):
            if block.language == "python":
                name = block.text.partition("\n")[0].removeprefix("# ")
                (directory / name).write_text(block.text, encoding="utf-8")

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables},
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.communicate()


def output_of(process: subprocess.Popen[str]) -> str:
    try:
        output = process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it hangs:\n{process.communicate()[0]}")
    assert process.returncode == 0, output
    return output


# -- whole programs ----------------------------------------------------------------------------------------------------


def test_processes_fit_without_an_address_in_the_environment(programs: Programs, tmp_path: Path) -> None:
    """Each sees half of the data, so without the other's gradients their means would be different."""
    store = f"file:{tmp_path / 'store'}"
    started = [programs.start("fit.py", RANK=str(rank), WORLD_SIZE="2", FSCOORD_STORE=store) for rank in range(2)]
    outputs = [output_of(process) for process in started]
    assert "rank 0 of 2: mean 1.26" in outputs[0]
    assert "rank 1 of 2: mean 1.26" in outputs[1]


def test_fabric_reduces_under_the_launcher(programs: Programs) -> None:
    output = output_of(programs.start("-m", "fscoord", "run", "--nproc-per-node", "2", "fabric_sum.py"))
    assert "rank 0 of 2: sum 3" in output
    assert "rank 1 of 2: sum 3" in output


# -- the plugin --------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileStore]:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        yield store


def test_plugin_is_a_cluster_environment_whose_processes_are_there(store: FileStore) -> None:
    found = FscoordEnvironment(store, rank=1, world_size=4)
    assert isinstance(found, lightning_environments.LightningEnvironment.__mro__[1])
    assert found.creates_processes_externally
    assert (found.global_rank(), found.world_size()) == (1, 4)
    found.set_global_rank(3)
    found.set_world_size(9)
    assert (found.global_rank(), found.world_size()) == (1, 4)


def test_address_is_that_of_rank_0_for_all(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.clone() as other:
        monkeypatch.setattr("fscoord.integrations.lightning._environments", iter([1, 1]))  # as in two processes
        first = FscoordEnvironment(store, rank=0, world_size=2, main_host="here")
        second = FscoordEnvironment(other, rank=1, world_size=2)
        with start_thread(lambda: first.main_address) as thread:
            assert second.main_address == "here"
            assert thread.join() == "here"
        assert second.main_port == first.main_port > 0
        assert [(each.node_rank(), each.local_rank()) for each in (first, second)] == [(0, 0), (0, 1)]


def test_local_rank_and_host_of_the_environment_count(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "GROUP_RANK": "2"}.items():
        monkeypatch.setenv(name, value)
    found = FscoordEnvironment(store)
    assert (found.global_rank(), found.world_size(), found.local_rank(), found.node_rank()) == (5, 8, 1, 2)


def test_store_that_does_not_tell_the_hosts_is_named() -> None:
    found = FscoordEnvironment(HashStore(), rank=0, world_size=1)
    with pytest.raises(ValueError, match=r"neither the environment nor .*HashStore.* set LOCAL_RANK and GROUP_RANK"):
        found.local_rank()


def test_dead_rank_0_is_named(store: FileStore) -> None:
    with store.clone() as first:
        first.announce_rank(0)
    found = FscoordEnvironment(store, rank=1, world_size=2, restart_timeout=0.05)
    with pytest.raises(RendezvousError, match=rf"rank 0 \({os.uname().nodename}:{os.getpid()}, found dead"):
        found.main_port  # noqa: B018 - it asks the store


def test_missing_ranks_are_named(store: FileStore) -> None:
    found = FscoordEnvironment(store, rank=0, world_size=3, timeout=0.05)
    with pytest.raises(TimeoutError, match=r"missing_ranks=\[1, 2\]"):
        found.main_address  # noqa: B018


def test_settings_must_make_as_many_processes_as_there_are(store: FileStore) -> None:
    found = FscoordEnvironment(store, rank=0, world_size=4)
    found.validate_settings(num_devices=2, num_nodes=2)
    with pytest.raises(ValueError, match="make 6 processes, but the launcher has started 4"):
        found.validate_settings(num_devices=3, num_nodes=2)


def test_detect_needs_a_store_and_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {"RANK": "0", "WORLD_SIZE": "1", "FSCOORD_STORE": "file:store"}
    for name, value in values.items():
        assert not FscoordEnvironment.detect()
        monkeypatch.setenv(name, value)
    assert FscoordEnvironment.detect()
