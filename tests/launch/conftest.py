"""`fscoord run` in processes of its own, with workers that are small scripts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fscoord

PATIENCE_S = 60
OTHERS = ("SLURM_", "FSCOORD_", "PYTEST_XDIST_")
"""Variables of other launchers, which give a job a name."""


class Launch:
    """One `fscoord run`, with its output in pipes."""

    def __init__(self, words, directory, variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OTHERS)}
        environment["PYTHONPATH"] = str(Path(fscoord.__file__).parent.parent)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "fscoord", "run", *words],
            cwd=directory,
            env={**environment, "TMPDIR": str(directory / "tmp"), **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self):
        """Return the next line of output."""
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        return line.rstrip("\n")

    def end(self):
        """Return exit code, output and errors."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def launch(tmp_path):
    """Give `launch(*words, **variables)`: `fscoord run` in the test's directory."""
    (tmp_path / "tmp").mkdir()
    launches = []

    def start(*words, **variables):
        launches.append(Launch([str(word) for word in words], tmp_path, variables))
        return launches[-1]

    yield start
    for each in launches:
        each.close()


BEGINNING = """import os, signal, sys, time
rank = int(os.environ["RANK"])
def sleep():
    for _ in range(12_000):
        time.sleep(0.05)
"""


@pytest.fixture
def script(tmp_path):
    """Give `script(text)`: the path of a Python script, in which `sleep()` sleeps until a signal ends the process.

    It sleeps in short steps. A signal that comes just before a step begins does not end the step, so its handler in
    Python runs only after it.
    """

    def write(text):
        path = tmp_path / f"worker{len(list(tmp_path.iterdir()))}.py"
        path.write_text(BEGINNING + text)
        return path.name

    return write


def wait_until_gone(pids):
    """Return when none of the processes is there any more, as a zombie at most."""
    until = time.monotonic() + PATIENCE_S
    while left := [pid for pid in pids if is_there(pid)]:
        assert time.monotonic() < until, f"still there: {left}"
        time.sleep(0.01)


def is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # ESRCH: it went between open(2) and read(2)
        return False


@pytest.fixture
def fscoord_in_process(capsys):
    """Give `fscoord_in_process(*words)`: the command in this process; it returns an object with ``code``."""
    from types import SimpleNamespace

    from fscoord.cli import app

    return lambda *words: SimpleNamespace(code=app.run(list(words)))
