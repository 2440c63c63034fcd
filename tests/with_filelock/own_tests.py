"""Runs filelock's own tests on the locks of `fscoord.integrations.filelock`, and prints the numbers for each file.

    python tests/with_filelock/own_tests.py [FILE...]

The tests are those of the source distribution of the installed filelock. pip downloads it to a temporary directory. The
tests need pytest-asyncio, pytest-mock and pytest-timeout. A file is one of the distribution, such as
``tests/core/test_lock.py``; without files, all files that use a lock that fscoord replaces. `DIFFERENCES` has each test
that does not pass, with the reason. The exit code is 1 if another test fails, or if a test of `DIFFERENCES` passes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Final
from xml.etree import ElementTree as ET

FOLDERS: Final = ("tests/core", "tests/async_lock", "tests/sqlite")
"""The tests of `FileLock`, `AsyncFileLock`, `ReadWriteLock` and `AsyncReadWriteLock`. The tests of soft locks and of
filelock's private modules are in other folders."""

NAMES: Final = re.compile(r"\b(Async)?(FileLock|ReadWriteLock)\b")
LIMIT_S: Final = 60
"""The time limit of one test, in seconds. filelock's own limit is 20, too short for a busy machine."""

DIFFERENCES: Final[dict[str, str]] = {}
"""{the beginning of a test's id: why it does not pass}."""


def unpack(directory: Path) -> Path:
    """Download and unpack the source distribution of the installed filelock. Return its root."""
    release = f"filelock=={version('filelock')}"
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "filelock", release]
    subprocess.run([*pip, "--dest", str(directory)], check=True, timeout=600)
    (archive,) = directory.glob("filelock-*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


def run(root: Path, file: str, report: Path) -> dict[str, str]:
    """Run the tests of `file`. Return {test id: outcome}."""
    report.unlink(missing_ok=True)
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "with_filelock.under_their_names", "-p", "no:cacheprovider"]
    command += [
        "-p",
        "no:xdist",
        "-p",
        "no:randomly",
        f"--timeout={LIMIT_S}",
        f"--junitxml={report}",
        "--tb=short",
        file,
    ]
    path = os.pathsep.join([str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=3600
    )
    if not report.exists():
        return {f"{file}::(pytest ended with {done.returncode})": "failed"}
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        outcomes[f"{file}::{case.get('name')}"] = outcome
    return outcomes


def main(files: list[str]) -> int:
    unexpected: list[str] = []
    with tempfile.TemporaryDirectory(prefix="filelock-") as name:
        directory = Path(name)
        root = unpack(directory)
        found = sorted(each for folder in FOLDERS for each in (root / folder).glob("test_*.py"))
        files = files or [str(each.relative_to(root)) for each in found if NAMES.search(each.read_text())]
        total: Counter[str] = Counter()
        for file in files:
            outcomes = run(root, file, directory / "report.xml")
            counts = Counter(outcomes.values())
            total += counts
            print(
                f"{file}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True
            )
            for test, outcome in outcomes.items():
                reason = next((why for start, why in DIFFERENCES.items() if test.startswith(start)), "")
                if outcome == "failed":
                    print(f"    {test.partition('::')[2]}: {reason or 'not expected'}", flush=True)
                if outcome != "skipped" and (outcome == "failed") != bool(reason):
                    unexpected.append(test)
    numbers = ", ".join(f"{total[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    print(f"filelock {version('filelock')}: {numbers}")
    print("".join(f"not expected: {test}\n" for test in unexpected), end="")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
