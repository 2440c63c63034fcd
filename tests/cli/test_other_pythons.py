"""The command in a Python that lacks `_ctypes`, and from an archive."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

PATIENCE_S = 200
IN_ARCHIVE = ("fscoord", "click", "portalocker", "pygments", "rich", "watchdog")


def call(python, *words, directory, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FSCOORD_"))}
    return subprocess.run(
        [*python, *words],
        cwd=directory,
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


NO_CTYPES = "import sys; sys.modules['_ctypes'] = None; from fscoord.cli import main; main()"


def without_ctypes(directory, *words):
    return call([sys.executable, "-c", NO_CTYPES], *words, directory=directory, FSCOORD_STORE="store")


@pytest.mark.parametrize(
    "words", [["--help"], ["set", "k", "v"], ["put-item", "q", "a"], ["push", "q", "a"], ["barrier", "b", "-n", "1"]]
)
def test_verb_that_runs_no_command_works_without_ctypes(tmp_path, words):
    done = without_ctypes(tmp_path, *words)
    assert done.returncode == 0, done.stderr


def test_wait_without_ctypes_polls_and_meets_its_deadline(tmp_path):
    done = without_ctypes(tmp_path, "wait", "--timeout", "0.1", "absent")
    assert done.returncode == 75, done.stderr


@pytest.mark.parametrize("words", [["lock", "l", "true"], ["run", "true"], ["once", "o", "true"]])
def test_verb_that_runs_a_command_says_that_ctypes_is_missing(tmp_path, words):
    done = without_ctypes(tmp_path, *words)
    assert done.returncode == 69
    assert done.stderr.startswith("fscoord: the verbs that run a command need the module _ctypes, and this Python was")
    assert len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """A directory with the archive ``app.pyz``: the command and what it imports, as zipapp makes it."""
    directory = tmp_path_factory.mktemp("archive")
    with zipfile.ZipFile(directory / "app.pyz", "w") as app:
        app.writestr("__main__.py", "from fscoord.cli import main\nmain()\n")
        for name in IN_ARCHIVE:
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert spec.origin is not None
            root = Path(spec.origin).parent
            for file in root.rglob("*.py"):
                app.write(file, Path(name) / file.relative_to(root))
    return directory


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lock", "--store", "store", "l", "--", "echo", "locked"], "locked\n"),
        (["run", "--nproc-per-node", "2", "--", "sh", "-c", "test $RANK = 0 || echo $WORLD_SIZE"], "[1] 2\n"),
        (["demo", "--processes", "2"], None),
    ],
)
def test_command_from_an_archive_starts_its_processes(archive, words, said):
    """The Python has no other fscoord to fall back to, and the archive has a relative path."""
    python = f"{sys.base_exec_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    done = call([python, "-S", "app.pyz"], *words, directory=archive)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in {None, done.stdout}
