"""Start a worker module of these tests in processes of its own, and reap them whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import fscoord

TESTS = Path(__file__).parent.parent


class Processes:
    """Processes of one worker module; killed and reaped at the end of the ``with``."""

    def __init__(self, module: str) -> None:
        self._module = str(TESTS / "faults" / f"{module}.py")
        root = str(Path(fscoord.__file__).parent.parent)
        self._environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(TESTS)])}
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, self._module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment | environment,
        )
        self._started.append(process)
        return process

    def start_role(self, role: str, *arguments: Any) -> subprocess.Popen[str]:
        return self.start(role, json.dumps(arguments))

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            with process:
                process.kill()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    """Return when the process has said so."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()[1]


def let_go(process: subprocess.Popen[str]) -> None:
    """Give the process the line that it waits for."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def stop(pid: int) -> None:
    """Stop a child, and return when none of its threads runs: some still do when `kill` returns."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def result(process: subprocess.Popen[str], limit: float) -> Any:
    """Wait for a process that ends by itself, and return what it printed last."""
    out, complaint = process.communicate(timeout=limit)
    assert process.returncode == 0, complaint
    return json.loads(out.splitlines()[-1])
