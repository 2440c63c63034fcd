"""`python -m benchmarks.torchrun`: the time in which torchrun starts a job, with each rendezvous backend.

The agents have one worker each. They run on this machine, and share a directory or a port. Two times end with the start
of the last worker. One begins with the start of the last agent, and so includes the import of torch. The other begins
with the last call of torchrun's `main`.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 5
NODES = (2, 4)
LIMIT_S = 120

AGENT = """
import sys, time
from pathlib import Path
from torch.distributed import run
directory, number = Path(sys.argv[1]), sys.argv[2]
(directory / f"called-{number}").write_text(repr(time.monotonic()))
run.main(sys.argv[3:])
"""
WORKER = """
import os, sys, time
from pathlib import Path
(Path(sys.argv[1]) / f"worker-{os.environ['RANK']}").write_text(repr(time.monotonic()))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def endpoint(backend: str, directory: Path) -> list[str]:
    if backend == "fscoord":
        return ["--rdzv-backend", "fscoord", "--rdzv-endpoint", str(directory / "job")]
    if backend == "c10d, file":
        return ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(directory / "job"), "--rdzv-conf", "store_type=file"]
    return ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]


def launch(backend: str, nodes: int) -> tuple[float, float]:
    """Return both times of one launch, in seconds."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "worker.py").write_text(WORKER)
        options = ["--nnodes", str(nodes), "--nproc-per-node", "1", "--rdzv-id", "job", *endpoint(backend, directory)]
        options += ["--local-addr", "127.0.0.1", str(directory / "worker.py"), name]
        agents = []
        try:
            for number in range(nodes):
                command = [sys.executable, "-W", "ignore", "-c", AGENT, name, str(number), *options]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                agents.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
                started = time.monotonic()
            for agent in agents:
                _, said = agent.communicate(timeout=LIMIT_S)
                if agent.returncode:
                    raise SystemExit(f"an agent failed:\n{said.decode()}")
        finally:
            for agent in agents:
                agent.kill()
                agent.communicate()
        worked = max(float(path.read_text()) for path in directory.glob("worker-*"))
        called = max(float(path.read_text()) for path in directory.glob("called-*"))
        return worked - started, worked - called


def main() -> None:
    """Launch with each backend in turn, and print the median times."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.torchrun", description=__doc__)
    parser.add_argument(
        "--repeat", type=int, default=ROUNDS, metavar="N", help="launches of each (default: %(default)s)"
    )
    repeat = parser.parse_args().repeat
    backends = ("fscoord", "c10d, file", "c10d, tcp")
    for nodes in NODES:
        times: dict[str, list[tuple[float, float]]] = {backend: [] for backend in backends}
        for number in range(repeat):
            for backend in backends:
                print(f"\r{nodes} agents, launch {number + 1} of {repeat}: {backend}   ", end="", file=sys.stderr)
                times[backend].append(launch(backend, nodes))
        print(file=sys.stderr)
        for backend, found in times.items():
            whole, rendezvous = (statistics.median(column) for column in zip(*found, strict=True))
            worst = max(column[1] for column in found)
            print(f"{nodes} agents, {backend}: {whole:.2f} s in all, {rendezvous:.2f} s from main (worst {worst:.2f})")
    print(f"load: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
