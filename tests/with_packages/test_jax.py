"""JAX over a store: processes on the CPU, which add a number of each by gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pages
import pytest
from jax._src.clusters import ClusterEnv
from support.interrupts import At, interrupt
from support.places import HANG_S, start_thread, until

from fscoord import FileStore, HashStore
from fscoord.integrations import jax as integration

pytestmark = pytest.mark.packages

WORKER = Path(__file__).with_name("jax_worker.py")
PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "jax-lightning.md"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_", "SLURM_", "OMPI_", "PMI", "FLUX_", "PALS_", "PYTEST_XDIST_", "FSCOORD_")
LIMIT_S = 200
"""When a process that hangs is killed; JAX itself would wait longer."""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith((*LAUNCHERS, "TORCHELASTIC_"))]:
        monkeypatch.delenv(name)


class Launched:
    """Processes of one test, which are killed at its end."""

    def __init__(self, directory: Path) -> None:
        self.url = f"file:{directory / 'store'}"
        self._directory = directory
        self._all: list[subprocess.Popen[str]] = []

    def start(self, *arguments: Any, **variables: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", **variables},
            cwd=self._directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._all.append(process)
        return process

    def start_rank(self, rank: int, world_size: int, *arguments: Any) -> subprocess.Popen[str]:
        return self.start(*arguments, RANK=str(rank), WORLD_SIZE=str(world_size), FSCOORD_STORE=self.url)

    def run(self, workers: int, *arguments: Any) -> str:
        """Run `fscoord run` to its end, which must be good; return its output."""
        launcher = self.start("-m", "fscoord", "run", "--nproc-per-node", workers, *arguments)
        output = end(launcher)
        assert launcher.returncode == 0, output
        return output

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.communicate()


@pytest.fixture(autouse=True)
def _close_stores() -> Iterator[None]:
    yield
    for store in integration._open:
        store.close()
    integration._open.clear()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    launched = Launched(tmp_path)
    yield launched
    launched.close()


def end(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it hangs:\n{process.communicate()[0]}")


def sums(output: str) -> list[str]:
    return sorted(line.partition("rank ")[2] for line in output.splitlines() if " of " in line and ": " in line)


def save_block(name: str, directory: Path) -> Path:
    """Save the block of the page that begins with this name; return its path."""
    [text] = [block.text for block in pages.blocks(PAGE) if block.text.startswith(f"# {name}\n")]
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


RESTARTS = ("--max-restarts", 1, "--grace", 1)
"""JAX catches SIGTERM, so the launcher kills what is left of a round, which it does after half a minute by default."""


# -- all come ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 4])
def test_processes_of_a_launcher_add_up_as_the_page_says(launched: Launched, tmp_path: Path, workers: int) -> None:
    output = launched.run(workers, save_block("jax_sum.py", tmp_path))
    assert f"{workers} processes, sum {workers * (workers + 1) / 2:g}" in output


def test_processes_without_a_launcher_meet_again_on_the_same_path(launched: Launched) -> None:
    """The second launch finds the address of the first, which has no run id either, and does not use it."""
    for _ in range(2):
        processes = [launched.start_rank(rank, 2, WORKER, "sum") for rank in (1, 0)]
        outputs = [end(process) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
        assert ["rank 1 of 2: 3" in outputs[0], "rank 0 of 2: 3" in outputs[1]] == [True, True]


def test_restarted_processes_initialize_anew(launched: Launched) -> None:
    output = launched.run(2, *RESTARTS, WORKER, "fail-once")
    assert re.search("rank [01] failed in round 0", output)  # rank 0 fails too, without the other one
    assert "rank 0 of 2: 3" in output
    assert "rank 1 of 2: 3" in output


def test_restarted_processes_on_a_store_that_is_kept_initialize_anew(launched: Launched) -> None:
    """Here the address and the dead rank 0 of the first round are still in the store."""
    output = launched.run(2, *RESTARTS, WORKER, "fail-once", launched.url)
    assert "rank 0 of 2: 3" in output
    assert "rank 1 of 2: 3" in output
    with FileStore(launched.url.removeprefix("file:")) as store:
        addresses = [key for key in store.list_keys("fscoord/jax/1/") if key.endswith("/address")]
        assert len(addresses) == 2, addresses


# -- some die ----------------------------------------------------------------------------------------------------------


def test_rank_0_killed_before_it_publishes_is_named(launched: Launched) -> None:
    first = launched.start_rank(0, 2, WORKER, "open", launched.url)
    assert first.stdout is not None
    assert first.stdout.readline() == "open\n"
    other = launched.start_rank(1, 2, WORKER, "lone")
    with FileStore(launched.url.removeprefix("file:")) as store:
        until(lambda: store.members([1]))
        first.kill()
        output = end(other)
    assert other.returncode == 1
    assert f"RendezvousError: rank 0 ({os.uname().nodename}:{first.pid}, found dead at" in output
    assert "no new rank 0 came within 0.5 s; rank 1 of 2 gives up" in output


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_killed_while_jax_connects_is_named_at_once(launched: Launched, rank: int) -> None:
    victim = launched.start_rank(rank, 2, WORKER, "publish", launched.url)
    other = launched.start_rank(1 - rank, 2, WORKER, "sum")
    assert victim.stdout is not None
    assert victim.stdout.readline() == "published\n"
    victim.kill()
    output = end(other)
    assert other.returncode == 1, output
    assert f"RendezvousError: rank {rank} ({os.uname().nodename}:{victim.pid}, found dead at" in output
    assert f"died in jax.distributed.initialize, while rank {1 - rank} of 2 waited there; the coordinator" in output


def test_missing_rank_is_named_at_the_deadline(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"in the rendezvous on rank 0.*missing_ranks=\[1\]"):
        integration.initialize(tmp_path / "store", rank=0, world_size=2, timeout=0.05)


def test_interruption_at_any_point_leaves_no_store_open(calls: list[Any], tmp_path: Path) -> None:
    """The other processes would wait for a rank whose session never ends."""
    points = 0
    while True:
        with At(points + 1, interrupt, first_inside="integrations/jax") as at:
            try:
                integration.initialize(tmp_path / f"store-{points}", rank=0, world_size=1)
            except KeyboardInterrupt:
                pass
        if not at.reached:
            break
        points += 1
        assert integration._open == [], at.where
    assert points > 8
    assert len(integration._open) == 1


def method_of_fscoord() -> type[ClusterEnv]:
    """Return the class that JAX has for the name. In JAX 0.9.0 and older, one of JAX's own has no name."""
    [found] = [each for each in ClusterEnv._cluster_types if getattr(each, "name", "") == integration.DETECTION_METHOD]
    return found


def test_rank_that_detects_nobody_leaves_no_store_open(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "FSCOORD_STORE": f"file:{tmp_path / 'store'}"}.items():
        monkeypatch.setenv(name, value)
    found = method_of_fscoord()
    with pytest.raises(TimeoutError):
        found.get_coordinator_address(timeout_secs=0.05)
    assert integration._open == []


# -- what JAX is asked -------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The calls of `jax.distributed.initialize`, which does nothing."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *given, **named: calls.append((given, named)))
    return calls


def test_arguments_of_jax_are_passed_on(calls: list[Any]) -> None:
    integration.initialize(
        HashStore(), rank=0, world_size=1, coordinator_host="::1", coordinator_port=7, heartbeat_timeout_seconds=9
    )
    [(given, named)] = calls
    assert given == ("[::1]:7", 1, 0)
    assert 300 - HANG_S < named.pop("initialization_timeout") <= 300  # what the rendezvous has left of the limit
    assert named == {"heartbeat_timeout_seconds": 9, "local_device_ids": None}


def test_several_processes_of_a_host_get_one_gpu_each(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    integration.initialize(HashStore())
    integration.initialize(HashStore(), local_device_ids=[4, 5])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    integration.initialize(HashStore())
    assert [named["local_device_ids"] for _, named in calls] == [[0], [4, 5], None]


def test_error_of_jax_is_raised_beside_other_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail_on_rank_1(address: str, world_size: int, rank: int, **_: Any) -> None:
        if rank == 1:
            raise RuntimeError("jax.distributed.initialize should only be called once")

    monkeypatch.setattr(jax.distributed, "initialize", fail_on_rank_1)
    monkeypatch.setattr(integration, "_uses", iter([1, 1]))  # as in two processes
    other = start_thread(lambda: integration.initialize(tmp_path / "store", rank=0, world_size=2))
    with pytest.raises(RuntimeError, match="only be called once"):
        integration.initialize(tmp_path / "store", rank=1, world_size=2)
    other.join()


def test_store_without_an_address_is_refused() -> None:
    with pytest.raises(ValueError, match="FSCOORD_STORE"):
        integration.initialize(rank=0, world_size=1)


# -- the detection of JAX ----------------------------------------------------------------------------------------------


def test_detection_by_name_initializes_as_the_page_says(launched: Launched, tmp_path: Path) -> None:
    output = launched.run(2, save_block("jax_detect.py", tmp_path))
    assert "process 0 of 2" in output
    assert "process 1 of 2" in output


def test_detection_is_used_only_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = method_of_fscoord()
    assert found.opt_in_only_method is True
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "FSCOORD_STORE": f"file:{tmp_path / 'store'}"}.items():
        assert not found.is_env_present()
        monkeypatch.setenv(name, value)
    assert found.is_env_present()
    automatic = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 1)
    assert automatic == (None, None, None, None)
    address, *rest = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, "fscoord", 1)
    assert address.rpartition(":")[2].isdigit()
    assert rest == [1, 0, None]


def test_jax_without_such_a_registry_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = list(ClusterEnv._cluster_types)
    monkeypatch.setitem(sys.modules, "jax._src.clusters", None)
    with caplog.at_level("INFO", "fscoord"):
        integration._add_detection()
    assert "this JAX has no cluster_detection_method='fscoord'" in caplog.text
    assert before == ClusterEnv._cluster_types
