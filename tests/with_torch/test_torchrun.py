"""torchrun with fscoord's rendezvous: real agents, on one machine, that have a directory in common."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic import rendezvous as elastic

from fscoord import errors
from fscoord.integrations import torchrun

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

WORKER = Path(__file__).with_name("torchrun_worker.py")


class Agents:
    """Agents of one job, and the directory in which their workers leave what they saw."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = directory / "job"
        self.seen = directory / "seen"
        self.seen.mkdir()
        self._started: list[subprocess.Popen[str]] = []

    def start(self, nodes: str, *arguments: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        command = [
            sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", "1",
            "--rdzv-backend", "fscoord", "--rdzv-endpoint", str(self.endpoint), "--rdzv-id", "job",
            "--rdzv-conf", "last_call_timeout=1", "--monitor-interval", "0.1", "--local-addr", "127.0.0.1", *options,
            str(WORKER), str(self.seen), *arguments,
        ]  # fmt: skip
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        agent = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )  # fmt: skip
        self._started.append(agent)
        return agent

    def end(self) -> list[str]:
        """Wait for all, which must end well; return what was seen."""
        agents, self._started = self._started, []
        outputs = []
        for agent in agents:
            try:
                outputs.append(agent.communicate(timeout=120)[0])
            except subprocess.TimeoutExpired:
                agent.kill()
                outputs.append("hangs:\n" + agent.communicate()[0])
        assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(outputs)
        return sorted(path.name for path in self.seen.iterdir())

    def close(self) -> None:
        for agent in self._started:
            agent.kill()
            agent.communicate()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    agents = Agents(tmp_path)
    yield agents
    agents.close()


def names(size: int, again: str = "") -> list[str]:
    return [f"rank{rank}-of-{size}{again}" for rank in range(size)]


def test_agents_of_two_launches_on_one_path_find_each_other(agents: Agents) -> None:
    """torch's own file store fails there: the first launch has closed the rendezvous."""
    for _ in range(2):
        for _ in range(2):
            agents.start("2")
        assert agents.end() == names(2)
        for path in agents.seen.iterdir():
            path.unlink()


def test_agents_of_four_nodes_find_each_other(agents: Agents) -> None:
    for _ in range(4):
        agents.start("4")
    assert agents.end() == names(4)


def test_worker_that_fails_is_restarted_with_all_others(agents: Agents) -> None:
    for _ in range(2):
        agents.start("2", "fail-once", options=("--max-restarts", "1"))
    assert agents.end() == sorted(["failed", *names(2), *names(2, "-again")])


def test_agent_that_comes_later_joins(agents: Agents) -> None:
    agents.start("1:2", "until-two", options=("--max-restarts", "1"))
    until = time.monotonic() + 120
    while not (agents.seen / "rank0-of-1").exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    agents.start("1:2", "until-two")
    assert agents.end() == sorted([*names(1), *names(2)])


def test_errors_are_those_of_elastic(tmp_path: Path) -> None:
    params = SimpleNamespace(
        endpoint=str(tmp_path / "missing" / "job"), run_id="job", min_nodes=1, max_nodes=1, local_addr=None, config={}
    )
    with pytest.raises(elastic.RendezvousConnectionError, match="missing") as caught:
        torchrun.create(params)
    assert isinstance(caught.value.__cause__, errors.RendezvousConnectionError)
    params.endpoint = str(tmp_path / "job")
    handler = torchrun.create(params)
    assert (handler.get_backend(), handler.get_run_id(), handler.use_agent_store) == ("fscoord", "job", False)
    assert not handler.is_closed()
    assert handler.num_nodes_waiting() == 0
    handler.set_closed()
    assert handler.is_closed()
    assert handler.shutdown()
    with pytest.raises(elastic.RendezvousClosedError):
        handler.next_rendezvous()
