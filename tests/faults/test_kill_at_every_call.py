"""A process is killed before each call of an operation, and within each write: no earlier write is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from faults.persistence import put_state, same_files
from faults.test_compaction import in_child
from faults.test_every_call import CONDITIONS, OPERATIONS, make_base, must_void, nothing
from support.faulty import faulty_system
from support.internals import log_of
from support.plain_reader import read_newest

from fscoord import FileStore, StoreTimeoutError

pytestmark = pytest.mark.exhaustive

LIMIT_S = 60
WRITES = [
    "set", "add", "compare_set", "append", "multi_set", "delete_key", "queue_push", "queue_pop", "announce_rank",
    "barrier", "barrier by rank", "barrier in vain", "transact", "transact without deletions", "create", "pop",
    "delete_key expected",
]  # fmt: skip
LAST_KEYS = {"barrier": b"b/last_member", "barrier by rank": b"b/complete"}
"""The key that an operation sets by a second record."""


@pytest.fixture
def directory(memory: Path, mounts_stay: None) -> Iterator[Path]:
    directory = memory / "work"
    directory.mkdir()
    with same_files():
        yield directory


def perform(path: Path, operation: str, condition: Any, number: int, part: float, names: Path) -> None:
    """In a child: do the operation, but die before call `number`, or when `part` of what it writes is written."""
    left = [number]

    def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        left[0] -= 1
        if left[0] == -1:
            if name == "write":
                real(arguments[0], arguments[1][: int(len(arguments[1]) * part)])
            os.kill(os.getpid(), signal.SIGKILL)

    with faulty_system() as faulty:
        store, other = FileStore(path, timeout=LIMIT_S), FileStore(path, timeout=LIMIT_S)
        condition(store, other)
        log_of(store).handle.path_checked_at = 0.0  # so that it looks whether the file is still there, too
        faulty.calls.clear()
        with faulty.instead(does), suppress(StoreTimeoutError):
            OPERATIONS[operation](store)
        names.write_text(" ".join(name for name, _ in faulty.calls))


def contents(path: Path) -> Any:
    log = read_newest(path)
    assert log.ends in ("whole", "torn")
    return log.values, log.queues


def judge(path: Path, witness: FileStore, known: list[Any], what: str) -> None:
    """The dead process has done all, nothing, or its first step. Open and new handles go on at once."""
    found = contents(path)
    assert found in known, what
    values, queues = witness.list_keys(), witness.queue_len("q")
    assert (values, queues) == (sorted(key.decode() for key in found[0]), len(found[1].get(b"q", []))), what
    with FileStore(path, timeout=0) as store:  # so that a lock that is held is told at once
        assert store.add("others", 1) == 1, what
        assert witness.get("others") == b"1", what
    log = read_newest(path)
    assert log.ends == "whole", what
    assert log.values == found[0] | {b"others": b"1"}, what


def kill_everywhere(directory: Path, operation: str, condition: Any) -> int:
    """Return how many times it was killed."""
    path, names = directory / "store", directory.with_suffix(".names")
    base = make_base(directory, durable=False, compactions=1)

    def run(number: int, part: float = 0.0) -> int:
        put_state(str(directory), base)
        with FileStore(path, timeout=LIMIT_S) as witness:
            witness.num_keys()
            status = in_child(lambda: perform(path, operation, condition, number, part, names))
            if known:
                judge(path, witness, known, f"{operation}, {condition.__name__}, call {number}, {part} of a write")
        return os.waitstatus_to_exitcode(status)

    known: list[Any] = []
    assert run(0) == -signal.SIGKILL
    before = contents(path)
    assert run(10_000) == 0
    known += [before, contents(path)]
    if operation in LAST_KEYS:
        values, queues = known[1]
        known.append(({key: value for key, value in values.items() if key != LAST_KEYS[operation]}, queues))
    calls = names.read_text().split()
    names.unlink()
    killed = 0
    for number, name in enumerate(calls):
        for part in (0.0, 0.5, 1.0) if name == "write" else (0.0,):
            killed += run(number, part) == -signal.SIGKILL
    return killed


@pytest.mark.parametrize("condition", [nothing, must_void])
@pytest.mark.parametrize("operation", ["multi_set", "queue_pop", "announce_rank", "barrier by rank", "transact"])
def test_process_killed_at_any_call_has_done_all_or_nothing(operation: str, condition: Any, directory: Path) -> None:
    assert kill_everywhere(directory, operation, condition) > 5


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operation", WRITES)
def test_process_killed_at_any_call_of_any_operation_has_done_all_or_nothing(operation: str, directory: Path) -> None:
    for condition in CONDITIONS:
        assert kill_everywhere(directory, operation, condition) > 5
