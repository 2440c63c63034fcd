"""Run a program of this folder in a fresh interpreter from which `elsewhere` has hidden names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fscoord

HERE = Path(__file__).parent
HANG_S = 600


def start(platform: str, program: str, *words: str, **variables: str) -> subprocess.Popen[str]:
    root = str(Path(fscoord.__file__).parent.parent)
    paths = {"PYTHONPATH": os.pathsep.join([root, str(HERE.parent)]), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("FSCOORD_", "PYTEST_"))}
    return subprocess.Popen(
        [sys.executable, str(HERE / "elsewhere.py"), platform, str(HERE / f"{program}.py"), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | paths | variables,
    )


def end(process: subprocess.Popen[str]) -> str:
    try:
        said = process.communicate(timeout=HANG_S)[0]
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0, said
    return said


def run(platform: str, program: str, *words: str, **variables: str) -> str:
    return end(start(platform, program, *words, **variables))
