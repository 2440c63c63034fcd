"""The long campaign knows of every test that has a large size. That it passes, `tox -e long` shows."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from campaign import PARTS

pytestmark = pytest.mark.once

TESTS = Path(__file__).parent
ELSEWHERE = {"mounts", "with_etcd", "with_packages", "with_torch"}


def test_campaign_includes_every_test_with_a_large_size() -> None:
    large = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("test_*.py")
        if re.search(r"\bscale\(|mark\.long\b", path.read_text(encoding="utf-8")) and path.name != "test_campaign.py"
    }
    assert {name for name in large if name.split("/")[0] not in ELSEWHERE} == set(PARTS)


CAMPAIGN = """
import sys
from pathlib import Path
import campaign
campaign.TESTS, campaign.PARTS = Path(sys.argv.pop(1)), ("endless.py",)
campaign.main()
"""
ENDLESS = """
import os, signal

def test_nothing_ends_it():
    with open(os.environ["SAID"], "w") as file:
        print(os.getpid(), file=file, flush=True)
        signal.pause()
"""


def test_campaign_that_is_terminated_ends_the_tests_that_it_runs(tmp_path: Path) -> None:
    said = tmp_path / "said"
    os.mkfifo(said)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "endless.py").write_text(ENDLESS)
    command = [sys.executable, "-c", CAMPAIGN, str(tmp_path / "tests"), f"--results={tmp_path / 'results'}"]
    environment = os.environ | {"SAID": str(said), "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as campaign:
        with said.open() as file:
            test = int(file.readline())
            try:
                campaign.terminate()
                ended, _, _ = select.select([file], [], [], 60)  # nobody has it open any more
            finally:
                with suppress(ProcessLookupError):
                    os.kill(test, signal.SIGKILL)
        out, _ = campaign.communicate()
    assert ended
    assert b"tests/endless.py" in out
