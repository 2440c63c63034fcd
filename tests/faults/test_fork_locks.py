"""A child does not meet a lock of the package that another thread of its parent had: not one of all there are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults.forking import HANG_S
from support.processes import Processes

LIMIT_S = 4 * HANG_S


@pytest.mark.parametrize("fork", ["Python", "C"])
def test_child_can_use_and_close_everything_while_another_thread_holds_locks(fork: str, tmp_path: Path) -> None:
    """Stores of all kinds, tasks, a rendezvous: each is used, and closed, and the child ends."""
    with Processes("fork_worker") as processes:
        out, complaint = processes.start(str(tmp_path / "store"), fork).communicate(timeout=LIMIT_S)
    assert out, complaint
    ends, counts = json.loads(out.splitlines()[-1])
    assert ends == [0, 0], complaint
    assert min(counts) > 20, "it was not seen what locks there are"
