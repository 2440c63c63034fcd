"""Power failures at every call of whole workloads: each possible state of the disk is opened and checked.

A durable log keeps all that was acknowledged, and at most the one operation more that was begun; any other log keeps a
beginning of what was done, with nothing missing in between, or says that it is damaged.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from faults.persistence import Acknowledged, Crash, RecordingOs, State, crashes, put_state, recording, repeatable
from support.internals import log_of, state_of
from support.plain_reader import read_newest

from fscoord import CorruptLogError, FileStore, StoreUnavailableError

pytestmark = [pytest.mark.exhaustive, pytest.mark.once]

LIMIT_S = 60
Contents = tuple[dict[bytes, bytes], dict[bytes, list[bytes]]]


class Workload:
    """A store in use."""

    def __init__(self, directory: Path, durable: bool) -> None:
        self.path, self.durable, self.runs = directory / "store", durable, 0
        self.store = self.open()

    def open(self, **options: Any) -> FileStore:
        return FileStore(self.path, durable=self.durable, timeout=LIMIT_S, **options)

    def open_another(self) -> None:
        with self.open() as other:
            other.add("others", 1)

    def begin_another_run(self) -> None:
        self.store.close()
        self.runs += 1
        self.store = self.open(run_id=("job", self.runs))


OPERATIONS: dict[str, Callable[[Workload], Any]] = {
    "set": lambda use: use.store.set("k", "new"),
    "set sectors": lambda use: use.store.set("long", b"x" * 1300),
    "set pages": lambda use: use.store.set("long", b"y" * 9000),
    "add": lambda use: use.store.add("n", 1),
    "append": lambda use: use.store.append("k", "+"),
    "multi_set": lambda use: use.store.multi_set(["k", "l"], ["1", "2"]),
    "transact": lambda use: use.store.transact(set={"k": "1", "m": "2"}, add={"n": 1}, delete=["l", "q"]),
    "push": lambda use: use.store.queue_push("q", "more"),
    "pop": lambda use: use.store.check(["q"]) and use.store.queue_pop("q"),
    "delete": lambda use: use.store.delete_key("k"),
    "compact": lambda use: use.store.compact(),
    "another handle": lambda use: use.open_another(),
    "another run": lambda use: use.begin_another_run(),
}


def contents(store: FileStore) -> Contents:
    store.num_keys()
    state = state_of(store)
    return {key: bytes(value) for key, value in state.values.items()}, {k: list(q) for k, q in state.queues.items()}


def perform(directory: Path, names: tuple[str, ...], *, durable: bool) -> tuple[RecordingOs, list[Contents]]:
    """Do these operations; return what was recorded, and the contents after each, and before the first."""
    found: list[Contents] = [({}, {})]
    with recording(str(directory)) as recorder:
        recorder.steps.append(Acknowledged(0, begun=True))
        use = Workload(directory, durable)
        try:
            found[0] = contents(use.store)
            recorder.steps.append(Acknowledged(0, begun=False))
            for number, name in enumerate(names, 1):
                recorder.steps.append(Acknowledged(number, begun=True))
                OPERATIONS[name](use)
                recorder.steps.append(Acknowledged(number, begun=False))
                found.append(contents(use.store))
        finally:
            use.store.close()
    return recorder, found


def fill(directory: Path, *, durable: bool, compactions: int) -> State:
    """Make a log with something in it, all of which is on the disk; return its files."""
    with repeatable(2000), FileStore(directory / "store", durable=durable) as store:
        store.multi_set(["k", "n"], ["old", "41"])
        for _ in range(compactions):
            store.compact()
        store.queue_push("q", "first")
    return {file.name: file.read_bytes() for file in directory.iterdir()}


class Judge:
    """Opens crash states in a directory of its own, each once, and counts them."""

    def __init__(self, directory: Path, *, durable: bool) -> None:
        self.directory, self.durable = directory, durable
        self.seen: set[Any] = set()
        self.damaged = 0
        directory.mkdir()

    def judge_all(self, recorder: RecordingOs, after: list[Contents], what: object, *, deep: bool = False) -> None:
        states: dict[Any, tuple[Crash, list[Contents]]] = {}
        for crash in crashes(recorder, deep=deep):
            files = tuple(crash.state.items())
            allowed = after[crash.least if self.durable else 0 : crash.most + 1]
            _, also = states.get(files, (crash, allowed))
            states[files] = crash, [found for found in allowed if found in also]
        for files, (crash, allowed) in states.items():
            key = (files, repr(allowed))
            if key not in self.seen:
                self.seen.add(key)
                try:
                    self.judge(crash.state, allowed)
                except BaseException as error:
                    sizes = {name: len(data) for name, data in crash.state.items()}
                    raise AssertionError(f"{what}: operations {crash.least} to {crash.most}, files {sizes}") from error

    def judge(self, state: State, allowed: list[Contents]) -> None:
        put_state(str(self.directory), state)
        path = self.directory / "store"
        try:
            with FileStore(path, read_only=True, timeout=LIMIT_S) as reader:
                found = contents(reader)
        except StoreUnavailableError as error:
            assert error.errno == errno.ENOENT, "not there, or empty, is all that may be"
            found = {}, {}
        except CorruptLogError:
            assert not self.durable, "damaged"
            self.damaged += 1
            with pytest.raises(CorruptLogError), FileStore(path, timeout=LIMIT_S) as store:
                store.set("after", "1")
            return
        assert found in allowed
        if self.durable or len(self.seen) % 4 == 0:  # the same code as for a durable log, but for a sync
            self.go_on(path, found)

    def go_on(self, path: Path, found: Contents) -> None:
        """The next process can write to it and compact it."""
        values, queues = found
        with FileStore(path, timeout=LIMIT_S) as store:
            assert contents(store) == found
            store.set("after", "1")
            store.compact()
            store.set("behind", "2")
            assert log_of(store).liveness.file is not None, "nobody can tell whether this process lives"
        expected = values | {b"after": b"1", b"behind": b"2"}, queues
        with FileStore(path, read_only=True, timeout=LIMIT_S) as reader:
            assert contents(reader) == expected
        log = read_newest(path)
        assert log.ends == "whole" or not self.durable  # of a lost record that a later generation does without
        assert (log.values, log.queues) == expected or not self.durable


@pytest.fixture
def memory(memory: Path, mounts_stay: None) -> Path:
    (memory / "work").mkdir()
    return memory


def judge_workloads(
    directory: Path, workloads: Iterable[tuple[str, ...]], *, durable: bool, base: int | None, deep: bool = False
) -> Judge:
    """Do each of `workloads` on an empty directory, or on a log that was compacted `base` times; judge all states."""
    work, before = directory / "work", State()
    if base is not None:
        before = fill(work, durable=durable, compactions=base)
    judge = Judge(directory / "crashed", durable=durable)
    for names in workloads:
        with repeatable():
            put_state(str(work), before)
            judge.judge_all(*perform(work, names, durable=durable), names, deep=deep)
    return judge


SINGLE = [(name,) for name in OPERATIONS]
SHAPES = ["set", "set sectors", "pop", "compact", "another handle", "another run"]
"""Of those that write one short record two stand for all: files look alike after any of them."""

durable_or_not = pytest.mark.parametrize("durable", [True, False], ids=["durable", "not durable"])


@durable_or_not
@pytest.mark.parametrize("base", [None, 0, 1, 2], ids=["a new log", "a log", "compacted once", "compacted twice"])
def test_power_failure_at_any_call_of_an_operation_loses_nothing(base: int | None, durable: bool, memory: Path) -> None:
    judge = judge_workloads(memory, SINGLE, durable=durable, base=base)
    assert len(judge.seen) > 100
    assert judge.damaged == 0 or not durable


@durable_or_not
def test_power_failure_at_any_call_of_two_operations_loses_nothing(durable: bool, memory: Path) -> None:
    judge = judge_workloads(memory, product(OPERATIONS, repeat=2), durable=durable, base=0)
    assert len(judge.seen) > 1000


def test_power_failure_in_the_first_write_after_another_loses_nothing(memory: Path) -> None:
    """In the first write after each state that a power failure has left, which steps over what was torn."""
    work, judge = memory / "work", Judge(memory / "crashed", durable=True)
    before = fill(work, durable=True, compactions=1)
    for name in ("set sectors", "compact"):
        with repeatable():
            put_state(str(work), before)
            recorder, _ = perform(work, (name,), durable=True)
        first = {tuple(crash.state.items()): crash.state for crash in crashes(recorder)}
        assert len(first) > 10
        for state in first.values():
            with repeatable(1000):  # or a generation would get the name of one that failed
                put_state(str(work), state)
                judge.judge_all(*perform(work, ("set",), durable=True), (name, "power failure", "set"))


@pytest.mark.long
@pytest.mark.timeout(7200)
@durable_or_not
@pytest.mark.parametrize("base", [0, 2], ids=["a log", "compacted twice"])
def test_power_failure_in_two_operations_that_keeps_any_subset_loses_nothing(
    base: int, durable: bool, memory: Path, record_property: Callable[[str, object], None]
) -> None:
    judge = judge_workloads(memory, product(OPERATIONS, repeat=2), durable=durable, base=base, deep=True)
    record_property("crash states", len(judge.seen))
    assert len(judge.seen) > 1000


@pytest.mark.long
@pytest.mark.timeout(7200)
@durable_or_not
def test_power_failure_at_any_call_of_three_operations_loses_nothing(
    durable: bool, memory: Path, record_property: Callable[[str, object], None]
) -> None:
    judge = judge_workloads(memory, product([*SHAPES, "set pages"], repeat=3), durable=durable, base=0)
    record_property("crash states", len(judge.seen))
    assert len(judge.seen) > 1000
