"""The examples that need torch do what their descriptions say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]

TRAINING = Path(__file__).parent.parent.parent / "examples" / "torch_train.py"


def test_training_resumes_from_its_last_whole_checkpoint_after_a_worker_dies(tmp_path: Path) -> None:
    """Worker 3 dies behind its part of the checkpoint of epoch 2: that checkpoint must not count."""
    training = tmp_path / "training"
    command = [
        sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
        "--rdzv-backend", "fscoord", "--rdzv-endpoint", str(tmp_path / "job"), "--rdzv-id", "spirals",
        "--monitor-interval", "0.1", "--local-addr", "127.0.0.1", "--max-restarts", "3",
        str(TRAINING), str(training), "--epochs", "30", "--kill", "3:2",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    agents = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    try:
        outputs = [agent.communicate(timeout=200)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    seen = "\n".join(outputs)
    assert [agent.returncode for agent in agents] == [0, 0], seen
    assert "exitcode: -9" in seen, seen
    lives = sorted(re.findall(r"worker (\d) of 4 goes on after epoch (-?\d+)", seen))
    assert lives == sorted([(str(rank), epoch) for rank in range(4) for epoch in ("-1", "1")]), seen
    (right,) = re.findall(r"(\d\.\d+) of other points are right", seen)
    assert float(right) > 0.9
    assert sorted(path.name for path in training.glob("epoch-29/*")) == [
        *("common.pt", "worker-0.pt", "worker-1.pt", "worker-2.pt", "worker-3.pt")
    ]
