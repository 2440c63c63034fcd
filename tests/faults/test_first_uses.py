"""Modules that are imported when they are first needed, at bad moments: beside a fork, without a descriptor, without
threads. The operation succeeds, or raises an error of fscoord.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.forking import HANG_S
from support.processes import Processes


def said(*arguments: str) -> list[str]:
    """Return the lines that the worker prints."""
    with Processes("first_worker") as processes:
        process = processes.start(*arguments)
        out, complaint = process.communicate(timeout=3 * HANG_S)
        assert process.returncode == 0, complaint
        return out.splitlines()


@pytest.mark.parametrize("importer", ["ours", "another"])
@pytest.mark.parametrize("fork", ["Python", "C"])
def test_fork_beside_the_first_wait_leaves_the_child_its_own(fork: str, importer: str, tmp_path: Path) -> None:
    """The thread that has importlib's lock is not there; it may be fscoord's own, or one of the program."""
    assert said("fork", str(tmp_path / "store"), fork, importer, "code") == ["StoreTimeoutError", "0 False True"]


@pytest.mark.parametrize("importer", ["ours", "another"])
def test_fork_in_c_beside_the_lock_of_all_imports_leaves_the_child_its_deadlines(importer: str, tmp_path: Path) -> None:
    """No import ends in such a child."""
    assert said("fork", str(tmp_path / "store"), "C", importer, "finder") == ["StoreTimeoutError", "0 False True"]


@pytest.mark.parametrize("fork", ["Python", "C"])
def test_handler_that_forks_in_an_import_of_the_first_wait_leaves_both_their_waits(fork: str, tmp_path: Path) -> None:
    """The child lacks the thread that imports, and imports again."""
    child, code, parent = said("handler", str(tmp_path / "store"), fork)
    assert (child, code, parent) == ("done True", "0", "done True")


def test_descriptors_exhausted_at_a_first_use_are_an_error_of_the_library(tmp_path: Path) -> None:
    is_logging_there, ends, afterwards = said("descriptors", str(tmp_path / "store"))
    assert is_logging_there == "False", "it was imported before, so this was no first use"
    assert (
        {"done", "StoreTimeoutError"}
        <= set(ends.split(" | "))
        <= {
            "done",
            "StoreTimeoutError",
            "StoreUnavailableError",
        }
    )
    assert afterwards == "StoreTimeoutError done True"


def test_subinterpreter_that_is_isolated_has_all_that_needs_no_thread(tmp_path: Path) -> None:
    """Such an interpreter allows no daemon threads: a wait for the lock polls, and a lock with a `ttl` can't be had."""
    (ends,) = said("subinterpreter", str(tmp_path / "store"))
    assert ends == (
        "set done, get done, wait StoreTimeoutError, compact done, lock done, lease StoreUnavailableError,"
        " late StoreTimeoutError, close done"
    )
