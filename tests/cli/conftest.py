"""The command, run in this process or in one of its own."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.disks import fill

from fscoord.cli import app

PATIENCE_S = 60


class Result(NamedTuple):
    code: int
    out: bytes
    err: str


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def fscoord(monkeypatch: pytest.MonkeyPatch, path: str) -> Callable[..., Result]:
    """Give `fscoord(*words, stdin=b"", terminal=False)`: the command, on the store at `path`, in this process.

    With `terminal` standard output is one, and with `person` standard error is one.
    """

    def call(*words: str | bytes, stdin: bytes = b"", terminal: bool = False, person: bool = False) -> Result:
        out, err = io.BytesIO(), io.BytesIO()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        monkeypatch.setattr(sys, "stdout", (Terminal if terminal else io.TextIOWrapper)(out, encoding="utf-8"))
        stderr = (Terminal if person else io.TextIOWrapper)(err, encoding="utf-8", errors="backslashreplace")
        monkeypatch.setattr(sys, "stderr", stderr)
        try:
            code = app.run([os.fsdecode(word) for word in words])
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        return Result(code, out.getvalue(), err.getvalue().decode())

    monkeypatch.setenv("FSCOORD_STORE", path)
    return call


@pytest.fixture
def process(path: str, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Give `process(*words)`: the command in a process of its own, with pipes; at the end of the test it is reaped."""
    started = []

    def start(*words: str | bytes, **settings: object) -> subprocess.Popen[bytes]:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        environment = {**os.environ, "FSCOORD_STORE": path, "TMPDIR": str(tmp_path), **settings.pop("env", {})}
        child = subprocess.Popen([sys.executable, "-m", "fscoord", *words], env=environment, **{**pipes, **settings})
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
        child.wait(PATIENCE_S)
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def full_disk(small_disk: Path) -> Path:
    """A file system of 64 KiB without a free byte."""
    fill(small_disk)
    return small_disk


@pytest.fixture
def line_with() -> Callable[[subprocess.Popen[bytes], str], str]:
    """Give `line_with(child, words)`: read the child's standard error up to the line that holds these words."""

    def read(child: subprocess.Popen[bytes], words: str) -> str:
        assert child.stderr is not None
        before = []
        for line in child.stderr:
            before.append(line.decode())
            if words in before[-1]:
                return before[-1]
        raise AssertionError(f"{words!r} never came: {''.join(before)}")

    return read


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    log = logging.getLogger("fscoord")
    handlers, level = list(log.handlers), log.level
    yield
    log.handlers[:] = handlers
    log.setLevel(level)
