"""The environment of a worker under `fscoord run` beside that under the real torchrun, with one command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

LAUNCHERS = {"torchrun": ["-W", "ignore", "-m", "torch.distributed.run"], "fscoord": ["-m", "fscoord", "run"]}
WORKER = """
import json, os, pathlib, sys
seen = {name: os.environ[name] for name in os.environ.keys() - json.loads(sys.argv[2])}
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps(seen))
"""
OF_A_ROUND = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"}
"""What both launchers set to a value that each run has to itself."""
OF_TORCHRUN = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1"}
AGENTS = {"TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""What a newer torchrun sets for its own agent, and its workers inherit."""
OF_FSCOORD = {"FSCOORD_STORE", "FSCOORD_RUN_ID", "FSCOORD_RESTART_COUNT"}


def environments(launcher: str, directory: Path) -> list[dict[str, str]]:
    """Run two agents with two workers each; return what the launcher has added to the environment of each rank."""
    seen = directory / launcher
    seen.mkdir()
    script = directory / "worker.py"
    script.write_text(WORKER)
    outside = {name: value for name, value in os.environ.items() if name not in {*OF_TORCHRUN, *OF_FSCOORD}}
    command = [
        sys.executable, *LAUNCHERS[launcher], "--nnodes=2", "--nproc_per_node=2", "--rdzv_backend=fscoord",
        f"--rdzv_endpoint={directory}/{launcher}.job", "--rdzv_id=17", "--max-restarts=3", "--role=trainer",
        "--local-addr=127.0.0.1", str(script), str(seen), json.dumps(list(outside)),
    ]  # fmt: skip
    agents = [
        subprocess.Popen(command, env=outside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    try:
        said = [agent.communicate(timeout=120)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(said)
    return [json.loads((seen / str(rank)).read_text()) for rank in range(4)]


def test_worker_finds_the_variables_that_torchrun_gives_it(tmp_path: Path) -> None:
    theirs, ours = (environments(launcher, tmp_path) for launcher in ("torchrun", "fscoord"))
    for rank, (one, other) in enumerate(zip(theirs, ours, strict=True)):
        assert one.keys() & other.keys() >= OF_A_ROUND
        assert {name: one.get(name) for name in OF_TORCHRUN} == OF_TORCHRUN
        assert other.keys() >= OF_FSCOORD
        more = {*OF_A_ROUND, *OF_TORCHRUN, *AGENTS, *OF_FSCOORD}
        one, other = ({name: found[name] for name in found.keys() - more} for found in (one, other))
        assert one == other
        assert (other["RANK"], other["LOCAL_RANK"], other["ROLE_NAME"]) == (str(rank), str(rank % 2), "trainer")
        assert len([name for name in other if name.startswith("TORCHELASTIC_")]) == 4
