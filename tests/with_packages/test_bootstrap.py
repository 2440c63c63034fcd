"""The programs of the page "Bootstrap anything" that need torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pages
import pytest

pytestmark = pytest.mark.packages

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "rendezvous.md"


def test_ranks_of_gloo_add_up_as_the_page_says(tmp_path: Path) -> None:
    [text] = [block.text for block in pages.blocks(PAGE) if block.text.startswith("# torch_sum.py\n")]
    (tmp_path / "torch_sum.py").write_text(text, encoding="utf-8")
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST_")}
    common = {**usual, "WORLD_SIZE": "2", "FSCOORD_STORE": "file:torch.store", "OMP_NUM_THREADS": "1"}
    command = ["timeout", "--signal=KILL", "200", sys.executable, "torch_sum.py"]
    started = [
        subprocess.Popen(
            command,
            env={**common, "RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    assert ["rank 0: sum 3" in outputs[0], "rank 1: sum 3" in outputs[1]] == [True, True], outputs
