"""The workers of a DataLoader use a store: the program of the page on multiprocessing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pages
import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(200)]

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "multiprocessing.md"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_of_a_data_loader_count_in_the_store_of_their_dataset(tmp_path: Path, method: str) -> None:
    (program,) = [block.text for block in pages.blocks(PAGE) if block.text.startswith("# loader.py")]
    assert program.count("num_workers=2") == 1
    program = program.replace("num_workers=2", f"num_workers=2, multiprocessing_context={method!r}")
    (tmp_path / "loader.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "loader.py"], cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[0, 1, 2, 3]", "[4, 5, 6, 7]", "b'8'"]
