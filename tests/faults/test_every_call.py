"""Every call of every public operation fails: the first, then the second, until the operation gets through.

After each the test checks that the error is true, that all handles go on, and that nothing is lost.
"""

from __future__ import annotations

import errno
import gc
import inspect
import itertools
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
from faults.persistence import State, put_state, same_files
from support.faulty import EVERY, LOCKS, FaultyOs, faulty_system
from support.internals import log_of
from support.plain_reader import read_newest

import fscoord
from fscoord import (
    CorruptLogError,
    FileStore,
    FscoordError,
    StoreClosedError,
    StoreError,
    StoreTimeoutError,
    barrier,
)
from fscoord._runtime import system
from fscoord.errors import StoreGoneError
from fscoord.inspect import dump, repair, verify

pytestmark = pytest.mark.exhaustive

LIMIT_S = 60
ERRORS = [
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.ENFILE,
    errno.ENOLCK, errno.EINTR,
]  # fmt: skip

Operation = Callable[[FileStore], Any]
OPERATIONS: dict[str, Operation] = {
    "set": lambda store: store.set("k", "new"),
    "add": lambda store: store.add("n", 1),
    "compare_set": lambda store: store.compare_set("k", "old", "new"),
    "append": lambda store: store.append("k", "more"),
    "multi_set": lambda store: store.multi_set(["k", "l"], ["new", "new"]),
    "delete_key": lambda store: store.delete_key("k"),
    "create": lambda store: store.create("fresh", "new"),
    "pop": lambda store: store.pop("k"),
    "delete_key expected": lambda store: store.delete_key("k", expected="old"),
    "look": lambda store: store.get("k", default=None),
    "queue_push": lambda store: store.queue_push("q", "new"),
    "queue_pop": lambda store: store.queue_pop("q"),
    "get": lambda store: store.get("k"),
    "check": lambda store: store.check(["k"]),
    "wait": lambda store: store.wait(["never"], 0.003),
    "num_keys": lambda store: store.num_keys(),
    "list_keys": lambda store: store.list_keys(),
    "multi_get": lambda store: store.multi_get(["k", "n"]),
    "queue_len": lambda store: store.queue_len("q"),
    "barrier": lambda store: store.barrier("b", 1),
    "barrier by rank": lambda store: barrier(store, 1, "b", rank=0),
    "barrier in vain": lambda store: store.barrier("b", 2, 0.003),
    "transact": lambda store: store.transact(compare={"k": "old"}, set={"k": "new", "l": "1"}, delete=["n"]),
    "transact without deletions": lambda store: store.transact(compare={"l": None}, set={"l": "1"}, add={"n": 1}),
    "watch": lambda store: store.watch("k").close(),
    "clone": lambda store: store.clone().close(),
    "compact": lambda store: store.compact(),
    "close": lambda store: store.close(),
    "register": lambda store: store.register() > 0,
    "announce_rank": lambda store: store.announce_rank(7),
    "members": lambda store: len(store.members()),
    "dead_ranks": lambda store: store.dead_ranks([5]),
    "dead_sessions": lambda store: store.dead_sessions([1]),
    "wait_alive": lambda store: store.wait_alive(["never"], [6], 0.003),
    "wait_sessions": lambda store: store.wait_sessions(["never"], [store.register()], 0.003),
    "capabilities": lambda store: store.capabilities,
    "timeout": lambda store: store.timeout,
    "set_timeout": lambda store: store.set_timeout(LIMIT_S),
    "has_extended_api": lambda store: store.has_extended_api(),
    "has_liveness": lambda store: store.has_liveness,
    "place_options": lambda store: store.place_options,
    "shared_options": lambda store: store.shared_options,
    "open": lambda store: FileStore(store.path, timeout=LIMIT_S).close(),
    "begin a run": lambda store: FileStore(store.path, timeout=LIMIT_S, run_id=("job", 2)).close(),
}
WITHOUT_CALLS = {
    "timeout",
    "set_timeout",
    "has_extended_api",
    "has_liveness",
    "place_options",
    "shared_options",
    "capabilities",
}
ALIKE = {
    "check", "wait", "num_keys", "list_keys", "multi_get", "queue_len", "barrier", "barrier by rank", "barrier in vain",
    "watch", "clone", "compact", "close", "open", "begin a run", "dead_sessions", "wait_alive", "wait_sessions",
    *WITHOUT_CALLS,
}  # fmt: skip
"""What needs no more than two conditions: it reads as `get` does, or begins with a handle of its own."""
UNSURE = {"dead_ranks", "dead_sessions", "members", "wait_alive", "wait_sessions"}
"""Where nobody can tell who lives, nobody is called dead."""
IN_STEPS = {"barrier", "barrier by rank", "barrier in vain"}
"""What writes several records, of which some may be there after an error, or waits when it has written."""


def test_operations_that_are_public_are_all_tried() -> None:
    public = {name for name in dir(FileStore) if not name.startswith("_")}
    assert public <= OPERATIONS.keys()


@pytest.fixture
def directory(memory: Path) -> Iterator[Path]:
    directory = memory / "work"
    directory.mkdir()
    with same_files():
        yield directory


def make_base(directory: Path, *, durable: bool, compactions: int, lock: str = "ofd") -> State:
    put_state(str(directory), {})
    with FileStore(directory / "store", durable=durable, rank=5, run_id=("job", 1), lock=lock) as store:
        store.multi_set(["k", "n"], ["old", "1"])
        for _ in range(compactions):
            store.compact()
        store.queue_push("q", "first")
        store.queue_push("q", "second")
    return {file.name: file.read_bytes() for file in directory.iterdir()}


# How the handle stands when the operation begins


def nothing(store: FileStore, other: FileStore) -> None:
    """It has read, and not written."""


def has_written(store: FileStore, other: FileStore) -> None:
    store.set("written", "1")


def must_read(store: FileStore, other: FileStore) -> None:
    store.set("written", "1")
    other.set("unread", "1")


def must_void(store: FileStore, other: FileStore) -> None:
    """Behind what it has read stands a record whose writer died."""
    store.set("written", "1")
    with FileStore(store.path, timeout=LIMIT_S) as third:
        third.set("torn", "x" * 100)
    os.truncate(log_of(store).handle.file, os.path.getsize(log_of(store).handle.file) - 50)


def must_follow(store: FileStore, other: FileStore) -> None:
    """The log goes on in another generation."""
    store.set("written", "1")
    other.compact()


def must_restart(store: FileStore, other: FileStore) -> None:
    """The generation in which it stands is gone, and the next too."""
    store.set("written", "1")
    for _ in range(3):
        other.compact()


CONDITIONS = [nothing, has_written, must_read, must_void, must_follow, must_restart]


class Case:
    """An operation under a condition, to be repeated with one fault after another."""

    def __init__(
        self, directory: Path, base: State, operation: str, condition: Any, faulty: FaultyOs, lock: str = "ofd"
    ) -> None:
        self.directory, self.base, self.faulty, self.lock = directory, base, faulty, lock
        self.path = directory / "store"
        self.operation, self.condition = operation, condition
        self.what = f"{operation}, {condition.__name__}"
        self.expected: Any = None

    def open(self, timeout: float) -> FileStore:
        return FileStore(self.path, timeout=timeout, lock=self.lock)

    def contents(self) -> Any:
        log = read_newest(self.path)
        assert log.ends in ("whole", "torn"), self.what
        return log.values, log.queues

    def run(self, number: int, error: int, *, for_good: bool) -> bool:
        """Let call `number` fail; return whether there were so many."""
        names = tuple(name for name in self.faulty.counted if name not in LOCKS or error != errno.EACCES)
        self.what = f"{self.operation}, {self.condition.__name__}, call {number}: {errno.errorcode.get(error)}"
        put_state(str(self.directory), self.base)
        opened = len(os.listdir("/proc/self/fd"))
        with self.open(LIMIT_S) as other, self.open(LIMIT_S) as store:
            self.condition(store, other)
            before = self.contents()
            log_of(store).handle.path_checked_at = 0.0  # so that it looks whether the file is still there, too
            with self.faulty.fail(number, error, names=names, for_good=for_good) as failed:
                said = outcome(OPERATIONS[self.operation], store)
            where = failed[0] if failed else ""
            self.what += f" ({where}) -> {said!r}"
            if number < 0:
                self.expected = said, self.contents()
            self.judge(said, before, bool(failed), error)
            self.go_on(store, other)
        if len(os.listdir("/proc/self/fd")) != opened:  # what waits share is closed when it is thrown away
            gc.collect()
        assert len(os.listdir("/proc/self/fd")) == opened, f"{self.what}: a descriptor was lost"
        return bool(failed)

    def judge(self, said: Any, before: Any, failed: bool, error: int) -> None:
        expected, after = self.expected
        found = self.contents()
        if said == expected or (failed and self.operation in UNSURE and not isinstance(said, FscoordError)):
            assert found == after, f"{self.what}: acknowledged, and not there"
            return
        assert failed, f"{self.what}: without a fault it was {expected!r}"
        assert isinstance(said, StoreError), self.what
        assert not isinstance(said, CorruptLogError), self.what
        assert not isinstance(said, StoreGoneError) or error == errno.ESTALE, self.what
        assert str(said.path).startswith(str(self.path)), self.what
        is_over = self.operation in IN_STEPS or (found == after and said.maybe_applied)
        assert found == before or is_over, f"{self.what}: maybe_applied={said.maybe_applied}, found {found}"

    def go_on(self, store: FileStore, other: FileStore) -> None:
        """The fault is over: other handles work, and so does this one unless it has reported that it is unusable."""
        try:
            store.set("again", "1")
        except StoreClosedError:
            assert self.operation == "close", self.what
        except StoreError as error:
            assert (log_of(store).handle.final_error[1] or "it is not over") in str(error), self.what
        if self.operation != "begin a run":
            other.set("others", "2")
        with self.open(0) as third:
            assert third.add("third", 1) == 1, self.what
            assert self.operation == "begin a run" or other.get("others") == b"2", self.what
        assert read_newest(self.path).ends == "whole", self.what


def outcome(operation: Operation, store: FileStore) -> Any:
    try:
        return operation(store)
    except StoreTimeoutError as error:
        return type(error).__name__, error.keys
    except FscoordError as error:
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)  # which would keep what the handle had open
    except Exception as error:
        raise AssertionError(f"outside of the tree: {error!r}") from error


def exhaust(case: Case, errors: list[int], modes: tuple[bool, ...]) -> int:
    """Let one call after another fail, with `errors` in turn and once or, as `modes` has it in turn, for good.

    Return how many calls there were.
    """
    assert not case.run(-1, 0, for_good=False)
    turns = zip(itertools.cycle(errors), itertools.cycle(modes), strict=False)
    for number, (error, for_good) in enumerate(turns):
        if not case.run(number, error, for_good=for_good):
            return number
    raise AssertionError("it never came to an end")


@pytest.mark.usefixtures("mounts_stay")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_survives_the_failure_of_every_call(operation: str, directory: Path) -> None:
    """Once and for good, with one error after another of those there are."""
    calls = 0
    with faulty_system() as faulty:
        base = make_base(directory, durable=False, compactions=1)
        for turn, condition in enumerate(CONDITIONS):
            if operation in ALIKE and condition not in (nothing, must_follow):
                continue
            case = Case(directory, base, operation, condition, faulty)
            start = (len(operation) + 3 * turn) % len(ERRORS)
            for modes in ((False,), (True,)) if condition is nothing else ((bool(turn % 2), not turn % 2),):
                calls += exhaust(case, ERRORS[start:] + ERRORS[:start], modes)
    assert calls > 0 or operation in WITHOUT_CALLS


@pytest.mark.usefixtures("mounts_stay")
@pytest.mark.parametrize("operation", ["set", "get", "compact", "open", "begin a run"])
def test_operation_on_a_durable_log_survives_the_failure_of_every_call(operation: str, directory: Path) -> None:
    with faulty_system() as faulty:
        base = make_base(directory, durable=True, compactions=0)
        for condition in (nothing, must_read):
            case = Case(directory, base, operation, condition, faulty)
            assert exhaust(case, [errno.EIO, errno.ENOSPC, errno.ESTALE], (False, True)) > 1


@pytest.mark.usefixtures("mounts_stay")
@pytest.mark.parametrize(
    ("lock", "operation"), [("flock", "set"), ("soft", "set"), ("soft", "compact"), ("soft", "list_keys")]
)
def test_operation_under_other_locks_survives_the_failure_of_every_call(
    lock: str, operation: str, directory: Path
) -> None:
    """Once and for good each: a lock that can't be given back twice in a row is another matter than once."""
    with faulty_system() as faulty:
        base = make_base(directory, durable=False, compactions=1, lock=lock)
        case = Case(directory, base, operation, must_follow, faulty, lock)
        for modes in ((False,), (True,)):
            assert exhaust(case, ERRORS, modes) > 1


@pytest.mark.usefixtures("mounts_stay")
@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("durable", [True, False], ids=["durable", "not durable"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operation_survives_the_failure_of_every_call_with_every_error(
    operation: str, durable: bool, directory: Path
) -> None:
    with faulty_system() as faulty:
        for compactions in (0, 1):
            base = make_base(directory, durable=durable, compactions=compactions)
            for condition in CONDITIONS:
                case = Case(directory, base, operation, condition, faulty)
                for error in ERRORS:
                    for for_good in (False, True):
                        exhaust(case, [error], (for_good,))


def stopping_after_a_byte(name: str, real: Callable[..., Any], cut: list[str]) -> Callable[..., Any]:
    def call(fd: int, what: Any, *place: int) -> Any:
        length = what if isinstance(what, int) else len(what)
        if length < 2 or not stat.S_ISREG(os.fstat(fd).st_mode):  # an event comes whole or not at all
            return real(fd, what, *place)
        cut.append(name)
        return real(fd, 1 if isinstance(what, int) else what[:1], *place)

    return call


@pytest.mark.usefixtures("mounts_stay")
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in WITHOUT_CALLS])
def test_reads_and_writes_that_stop_after_a_byte_change_nothing(
    operation: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_system() as faulty:
        base = make_base(directory, durable=len(operation) % 2 == 0, compactions=1)
        for condition in (must_restart,) if operation in ALIKE else (must_void, must_restart):
            case = Case(directory, base, operation, condition, faulty)
            assert not case.run(-1, 0, for_good=False)
            usual, cut = case.expected, list[str]()
            with monkeypatch.context() as patch:
                for name in ("read", "write", "pread", "pwrite"):
                    patch.setattr(faulty, name, stopping_after_a_byte(name, getattr(faulty, name), cut))
                assert not case.run(-1, 0, for_good=False)
            assert case.expected == usual, f"{case.what}: it was {usual}"
            assert {"read", "write"} <= set(cut)


def test_dump_verify_and_repair_read_on_when_a_read_stops_after_a_byte(directory: Path) -> None:
    base = make_base(directory, durable=False, compactions=1)
    put_state(str(directory), base)
    path = directory / "store"
    with FileStore(path, timeout=LIMIT_S) as store, FileStore(path, timeout=LIMIT_S) as other:
        must_void(store, other)
        other.set("behind", "1")
    looks: list[Callable[[], Any]] = [
        lambda: list(dump(path)),
        lambda: verify(path),
        lambda: repair(path, directory / "copy", write=True) and read_newest(directory / "copy").values,
    ]
    for look in looks:
        usual, cut = look(), list[str]()
        (directory / "copy").unlink(missing_ok=True)
        with faulty_system() as faulty:
            for name in ("read", "write", "pread"):
                setattr(faulty, name, stopping_after_a_byte(name, getattr(faulty, name), cut))
            assert look() == usual
        assert "read" in cut
        (directory / "copy").unlink(missing_ok=True)


# The seam itself

SYSTEM_MODULES = {"posix", "fcntl", "time", "select", "_io", "_thread", "_socket", "mmap", "_ctypes", "_signal"}


NEVER_FAIL_OF_A_DISK = {
    "environ", "eventfd", "eventfd_write", "fsdecode", "fsencode", "fspath", "getegid", "geteuid", "getpid", "kill",
    "path", "pidfd_open", "sched_yield", "set_blocking", "set_inheritable", "strerror",
}  # fmt: skip
"""What a log asks of `os` besides."""


def test_calls_that_may_reach_a_file_system_are_all_made_to_fail() -> None:
    package = Path(fscoord.__file__).parent
    sources = [*package.glob("_log/**/*.py"), *package.glob("stores/**/*.py"), package / "_runtime/file_events.py"]
    used = {name for source in sources for name in re.findall(r"system\.os\.([a-z_]+)", source.read_text("utf-8"))}
    assert used > {"open", "read", "write"}
    assert used <= {*EVERY, *NEVER_FAIL_OF_A_DISK}


def through(real: Any, name: str) -> ModuleType:
    """A module that calls `real`'s functions itself, so that the calls are not counted for the log."""
    module = ModuleType(name)

    def get(attribute: str) -> Any:
        thing = getattr(real, attribute)
        return (lambda *arguments, **named: thing(*arguments, **named)) if inspect.isbuiltin(thing) else thing

    module.__getattr__ = get  # type: ignore[method-assign]
    return module


def test_system_is_called_through_its_seam_alone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log touches files, locks and clocks only through the replaced functions of `_runtime.system`."""
    for name in ("os", "fcntl", "time", "select", "threading"):
        monkeypatch.setattr(system, name, through(getattr(system, name), name))
    seen: set[str] = set()

    def note(frame: FrameType, event: str, function: Any) -> None:
        module = frame.f_globals["__name__"]
        is_ours = module.startswith("fscoord.") and module not in (
            "fscoord._runtime.system",
            "fscoord._runtime.file_events",
        )
        if event == "c_call" and is_ours and function.__module__ in SYSTEM_MODULES:
            seen.add(f"{module} calls {function.__module__}.{function.__name__}")

    base = make_base(directory, durable=True, compactions=1)
    put_state(str(directory), base)
    with FileStore(directory / "store", timeout=LIMIT_S) as store:  # the first wait imports modules in a thread
        outcome(OPERATIONS["wait"], store)
    for operation in OPERATIONS.values():
        put_state(str(directory), base)
        with FileStore(directory / "store", timeout=LIMIT_S) as store:
            sys.setprofile(note)
            try:
                outcome(operation, store)
            finally:
                sys.setprofile(None)
    assert not seen
