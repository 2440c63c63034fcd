"""The end of a run, and the next run: the last of its participants closes it, others come at that moment, it dies."""

from __future__ import annotations

import errno
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from faults.test_compaction import die_at, generations, in_child, outcome
from support.faulty import faulty_os
from support.internals import follower, log_of
from support.plain_reader import read_log, read_newest

from fscoord import FileStore, StaleRunError, StoreGoneError, StoreUnavailableError
from fscoord.stores.file import lifecycle

LIMIT_S = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


def open_one(path: Path, **options: Any) -> FileStore:
    return FileStore(path, world_size=1, timeout=LIMIT_S, **options)


def used(path: Path, compactions: int = 0) -> FileStore:
    store = open_one(path)
    store.set("old", "1")
    for _ in range(compactions):
        store.compact()
    return store


def is_killed(store: FileStore) -> None:
    """Leave the log as one whose process was killed; what keeps participants until the process exits forgets it."""
    log_of(store).close()
    lifecycle.unregister(store, log_of(store))


def close_unremoved(store: FileStore) -> None:
    """Close the last participant where unlink(2) fails."""

    def does(name: str, _real: Any, _arguments: Any) -> None:
        if name == "unlink":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with faulty_os() as faulty, faulty.instead(does):
        store.close()


class Newcomer:
    """A child process that opens the log and writes to it; `come` returns when it has the file open."""

    def __init__(self, path: Path, **options: Any) -> None:
        self._path, self._options = path, options
        self.pid = 0

    def come(self) -> None:
        reading, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._open(writing)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        assert os.read(reading, 1) == b"o"
        os.close(reading)

    def _open(self, writing: int) -> None:
        real = follower.open_log

        def open_log(*arguments: Any) -> Any:
            opened = real(*arguments)
            os.write(writing, b"o")
            return opened

        with patch.object(follower, "open_log", open_log):
            store = FileStore(self._path, timeout=LIMIT_S, **self._options)
        assert store.list_keys() == []
        store.set("new", "1")

    def end(self) -> None:
        assert os.waitpid(self.pid, 0)[1] == 0


@pytest.mark.parametrize("options", [{}, {"rank": 0}, {"world_size": 1}, {"run_id": ("job", 1)}], ids=str)
@pytest.mark.parametrize("compactions", [0, 1])
def test_opener_between_the_end_of_a_log_and_its_removal_loses_nothing(
    options: dict[str, Any], compactions: int, path: Path
) -> None:
    """It has the old file open, and waits for the lock, when the name goes."""
    store, newcomer = used(path, compactions), Newcomer(path, **options)

    def does(name: str, _real: Any, arguments: tuple[Any, ...]) -> None:
        if name == "unlink" and arguments[0] == str(path) and not newcomer.pid:
            newcomer.come()

    with faulty_os() as faulty, faulty.instead(does):
        store.close()
    newcomer.end()
    assert read_newest(path).values == {b"new": b"1"}
    assert generations(path) == []


def test_session_registered_while_the_last_one_leaves_begins_a_new_run(path: Path) -> None:
    """It saw nothing of the end before it got the lock."""
    store, newcomer = used(path), Newcomer(path, rank=0)
    store.delete_key("old")

    def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "write" and arguments[1][22:23] == b"E":
            newcomer.come()

    with faulty_os() as faulty, faulty.instead(does):
        store.close()
    newcomer.end()
    assert read_newest(path).values == {b"new": b"1"}


@pytest.mark.parametrize("compactions", [0, 2])
@pytest.mark.parametrize("run_id", [None, ("job", 1), ("job", 2)])
def test_finished_log_that_could_not_be_removed_begins_a_new_run(run_id: Any, compactions: int, path: Path) -> None:
    FileStore(path, run_id=("job", 1)).close()
    bystander = FileStore(path, timeout=LIMIT_S)
    assert bystander.list_keys() == []
    close_unremoved(used(path, compactions))
    assert read_newest(path).finished
    with pytest.raises(StoreUnavailableError, match="is finished, and no writer has opened it since") as caught:
        FileStore(path, read_only=True)
    assert caught.value.errno == errno.ENOENT
    with open_one(path, run_id=run_id) as store:
        assert store.list_keys() == []
        store.set("new", "1")
        with FileStore(path, timeout=LIMIT_S) as other, FileStore(path, read_only=True, timeout=LIMIT_S) as reader:
            assert other.get("new") == reader.get("new") == b"1"
        with pytest.raises(StaleRunError if compactions else StoreGoneError):
            bystander.set("old", "2")
        log = read_newest(path)
        assert (log.header["run"], log.values, log.finished) == (1, {b"new": b"1"}, False)
        store.compact()
        assert read_newest(path).header["run"] == 1
    assert not path.exists()
    assert generations(path) == []


def test_handle_that_slept_through_the_end_of_its_log_stays_out_of_the_next(path: Path) -> None:
    """All that it knew may be gone: the newest generation says that it is another run."""
    with FileStore(path, timeout=LIMIT_S) as sleeper:
        close_unremoved(used(path, 1))
        with open_one(path) as store:
            store.set("new", "1")
            for _ in range(3):
                store.compact()
            for _ in range(2):
                with pytest.raises(StaleRunError, match="a new start of the job"):
                    sleeper.set("old", "2")
            assert store.list_keys() == ["new"]


def test_end_of_a_log_is_one_record_of_the_last_participant(path: Path) -> None:
    one, two = FileStore(path, 2), FileStore(path, 2)
    one.set("k", "v")
    two.set("k", "w")
    one.close()
    close_unremoved(two)
    log = read_log(path.read_bytes())
    assert "".join(kind for _, kind, *_ in log.records) == "ssSSlE"
    assert log.values == {b"k": b"w"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("compactions", [0, 1])
def test_participant_killed_while_it_ends_a_log_leaves_the_old_or_a_new_run(compactions: int, tmp_path: Path) -> None:
    for number in range(200):
        path = tmp_path / f"store{number}"
        is_killed(used(path, compactions))
        status = os.waitstatus_to_exitcode(in_child(die_at(number, lambda path=path: open_one(path).close())))  # type: ignore[misc]
        is_over = not path.exists() or read_newest(path).finished or read_newest(path).header["run"] == 1
        unnamed = set() if path.exists() else set(generations(path))
        assert len(unnamed) <= compactions + 1
        with FileStore(path, timeout=LIMIT_S) as store:
            assert store.list_keys() == ([] if is_over else ["old"])
            store.set("new", "1")
            store.compact()
            left = set(generations(path))
            assert unnamed < left, "they belong to the log that was removed, and this is another"
            assert len(left - unnamed) == 1, "something is left of the run before"
        if status == 0:
            assert is_over
            assert number > 15
            return
        assert status == -signal.SIGKILL
    raise AssertionError("it never came to an end")


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EACCES], ids=errno.errorcode.get)
def test_beginning_of_a_run_survives_the_failure_of_any_call(error: int, tmp_path: Path) -> None:
    for number in range(200):
        path = tmp_path / f"store{number}"
        close_unremoved(used(path))
        opened: list[FileStore] = []
        with faulty_os() as faulty, faulty.fail(number, error) as failed:
            outcome(lambda: opened.append(FileStore(path, timeout=LIMIT_S)))  # noqa: B023 - called at once
        for store in opened:
            assert store.list_keys() == []
        with FileStore(path, timeout=LIMIT_S) as store:
            assert store.list_keys() == []
            store.set("new", "1")
            for other in opened:
                assert other.get("new") == b"1"
                other.close()
        if not failed:
            assert number > 20
            return
    raise AssertionError("it never came to an end")
