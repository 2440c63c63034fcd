"""A process forks while another thread of it is in the middle of an operation: at every call of the system that it
makes, and at every place where it may lose the interpreter.

The child has the handle, and not the thread. Whatever that thread held, the child's calls do what they should or raise
in time, and it keeps nobody from writing: not while it uses the handle, not while it does nothing, and not when its
parent is killed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.forking import Case, Operation, fork_at, fork_in_c
from faults.persistence import put_state
from faults.test_every_call import (
    OPERATIONS as EVERY_OPERATION,
    WITHOUT_CALLS,
    make_base,
    must_follow,
    must_read,
    nothing,
)

from fscoord import FileStore, barrier
from fscoord.recipes import Lock, Queue

pytestmark = pytest.mark.exhaustive

every_fork = pytest.mark.parametrize(
    "fork", [pytest.param(os.fork, id="os.fork"), pytest.param(fork_in_c, id="fork in C")]
)


@pytest.fixture
def directory(memory: Path, mounts_stay: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    (memory / "runtime").mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(memory / "runtime"))
    directory = memory / "work"
    directory.mkdir()
    return directory


OPERATIONS = EVERY_OPERATION | {"barrier in a slot": lambda store: barrier(store, 2, "b", 0.003, 0)}

ENDS_THE_HANDLE = {"begin a run"}
"""What leaves no usable handle, fork or not: the handles of the run before raise `StaleRunError`."""

SOME = 6
FAR = 10**9

Draw = Callable[[int], list[int]]


@pytest.fixture(params=["some", pytest.param("all", marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def draw(request: pytest.FixtureRequest, rng: random.Random) -> Draw:
    """Return a random part of the points; the campaign takes all of them."""
    if request.param == "all":
        return every
    return lambda count: rng.sample(range(1, count + 1), min(SOME, count))


def every(count: int) -> list[int]:
    """Give all points."""
    return list(range(1, count + 1))


def fork_everywhere(
    directory: Path, draw: Draw, operation: Operation, condition: Any = nothing, *, lock: str = "ofd", **how: Any
) -> int:
    """Fork when all is over, and at the points that `draw` gives; return how many there are.

    Every other child first closes its handle.
    """
    base = make_base(directory, durable=False, compactions=1, lock=lock)
    options = {"lock": lock} | how.pop("options", {})

    def fork(number: int, *, closes: bool) -> int:
        put_state(str(directory), base)
        return fork_at(Case(directory / "store", operation, condition, closes=closes, options=options, **how), number)

    count = fork(FAR, closes=False)
    for forks, number in enumerate(draw(count)):
        fork(number, closes=forks % 2 == 0)
    return count


@every_fork
@pytest.mark.parametrize(
    "operation", ["set", "get", "wait", "close", "announce_rank", "barrier in vain", "barrier in a slot"]
)
def test_fork_at_any_call_of_another_thread_leaves_both_usable(
    operation: str, fork: Any, directory: Path, draw: Draw
) -> None:
    assert fork_everywhere(directory, draw, OPERATIONS[operation], fork=fork) > 1


def test_fork_at_any_call_of_another_threads_compaction_leaves_both_usable(directory: Path, draw: Draw) -> None:
    assert fork_everywhere(directory, draw, OPERATIONS["compact"]) > 40


@pytest.mark.parametrize("operation", ["set", "get", "wait", "close", "barrier in vain", "barrier in a slot"])
def test_fork_between_the_calls_of_another_thread_leaves_both_usable(
    operation: str, directory: Path, draw: Draw
) -> None:
    """Points at which the thread holds a lock, or is between two halves of a change, and makes no call."""
    assert fork_everywhere(directory, draw, OPERATIONS[operation], at_calls=False) > 10


def test_fork_at_any_call_of_threads_that_wait_for_the_lock_leaves_both_usable(directory: Path, draw: Draw) -> None:
    """The thread that asks the kernel for the lock is one of them. A fork in C beside several is Python's affair."""
    assert fork_everywhere(directory, draw, OPERATIONS["set"], blocks=True) > 10


def test_fork_between_the_calls_of_a_thread_in_wait_of_the_lock_is_harmless(directory: Path, draw: Draw) -> None:
    assert fork_everywhere(directory, draw, OPERATIONS["set"], at_calls=False, blocks=True) > 10


@every_fork
@pytest.mark.parametrize("operation", ["set", "wait"])
def test_parent_that_is_killed_right_after_a_fork_leaves_no_lock_to_its_child(
    operation: str, fork: Any, directory: Path, draw: Draw
) -> None:
    assert fork_everywhere(directory, draw, OPERATIONS[operation], fork=fork, parent_dies=True) > 1


@pytest.mark.parametrize("coherence", ["locked", "direct"])
@pytest.mark.parametrize("operation", ["set", "wait"])
def test_fork_at_any_call_on_a_shared_mount_leaves_both_usable(
    operation: str, coherence: str, directory: Path, draw: Draw
) -> None:
    """On such a mount the handle polls for its whole host, or waits to become the poller."""
    assert fork_everywhere(directory, draw, OPERATIONS[operation], options={"coherence": coherence}) > 5


@pytest.mark.parametrize("lock", ["flock", "soft"])
def test_fork_at_any_call_under_other_locks_leaves_both_usable(lock: str, directory: Path, draw: Draw) -> None:
    assert fork_everywhere(directory, draw, OPERATIONS["set"], lock=lock) > 5


def take_turns(store: FileStore) -> None:
    with Lock(store, "lock"):
        store.add("turns", 1)


def work(store: FileStore) -> None:
    queue = Queue(store, "work")
    queue.put("item")
    with queue.take():
        pass


@pytest.mark.parametrize("operation", [take_turns, work], ids=["Lock", "Queue"])
def test_fork_at_any_call_of_a_recipe_leaves_both_usable(operation: Operation, directory: Path, draw: Draw) -> None:
    assert fork_everywhere(directory, draw, operation) > 10


def open_another(store: FileStore) -> None:
    """It is born, so that a file is made beside it and gets its name."""
    FileStore(f"{store.path}.new").close()


WITHIN = {name: OPERATIONS[name] for name in ("set", "get", "wait", "compact", "barrier in vain")} | {
    "open": open_another
}


@pytest.mark.parametrize("operation", WITHIN)
def test_signal_handler_that_forks_at_any_call_goes_on_in_both_processes(
    operation: str, directory: Path, draw: Draw
) -> None:
    """The child may fail, and the parent does not: a child removes no file that its parent is making."""
    assert fork_everywhere(directory, draw, WITHIN[operation], within=True) > 1


ALONE = {"barrier", "barrier by rank"}
"""Barriers of one, at which two processes arrive if the call goes on in both."""


@pytest.mark.long
@pytest.mark.timeout(3600)
@every_fork
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in WITHOUT_CALLS | ENDS_THE_HANDLE])
def test_fork_at_any_call_of_any_operation_leaves_both_usable(operation: str, fork: Any, directory: Path) -> None:
    for condition in (nothing, must_read, must_follow):
        for how in ({}, {"at_calls": False}, {"parent_dies": True}, {"blocks": True}, {"within": True}):
            if "within" in how and operation in ALONE:
                continue
            if fork is os.fork or not {"blocks", "within"} & how.keys():
                fork_everywhere(directory, every, OPERATIONS[operation], condition, fork=fork, **how)
