"""Runs of a job on one store: processes that join a run, begin a new one, or come too late."""

from __future__ import annotations

import errno
import os
import signal
import traceback
from pathlib import Path
from typing import Any

import pytest
from faults.test_compaction import die_at, generations, in_child, outcome
from support.faulty import faulty_os
from support.internals import classify_run, log_of, parse_run_id, supersede
from support.plain_reader import read_log, read_newest

from fscoord import FileStore, StaleRunError, StoreError, open_store

LIMIT_S = 60


@pytest.fixture
def path(memory: Path) -> Path:
    return memory / "store"


def open_run(path: Path, run_id: Any, **options: Any) -> FileStore:
    return FileStore(path, run_id=run_id, timeout=LIMIT_S, **options)


def test_run_that_exists_is_joined(path: Path) -> None:
    with open_run(path, ("job", 0)) as store, open_run(path, ("job", 0)) as other, FileStore(path) as any_run:
        store.set("k", "v")
        assert other.get("k") == any_run.get("k") == b"v"
        with store.clone() as clone, open_run(path, ("job", 0), read_only=True) as reader:
            assert clone.get("k") == reader.get("k") == b"v"
    assert read_log(path.read_bytes()).header["run ids"] == [(b"job", 0)]
    assert generations(path) == []


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("before", [None, "first", ("job", 0)])
def test_run_begins_with_an_empty_store_and_ends_the_one_before(before: Any, read_only: bool, path: Path) -> None:
    with open_run(path, before) as old, open_run(path, before, read_only=True) as watching:
        old.set("k", "old")
        old.queue_push("q", "old")
        assert watching.get("k") == b"old"
        with open_run(path, ("job", 1)) as new, open_run(path, ("job", 1), read_only=read_only) as second:
            assert new.list_keys() == second.list_keys() == []
            assert new.queue_len("q") == 0
            new.set("k", "new")
            assert second.get("k") == b"new"
            for call in (lambda: old.get("k"), lambda: old.set("k", "late"), lambda: watching.get("k"), old.clone):
                for _ in range(2):
                    with pytest.raises(StaleRunError, match="restart 1"):
                        call()
            with pytest.raises(StaleRunError):
                open_run(path, ("job", 0), read_only=read_only)
            with FileStore(path) as joins:
                assert joins.get("k") == b"new"
            assert new.get("k") == b"new"
            new.compact()
            assert second.get("k") == b"new"
    assert read_newest(path).header["run ids"][0] == (b"job", 1)


def test_restart_count_below_the_newest_is_stale_even_if_never_seen(path: Path) -> None:
    with open_run(path, ("job", 5)) as store:
        store.set("k", "v")
        for count in range(5):
            with pytest.raises(StaleRunError, match="restart 5"):
                open_run(path, ("job", count))
        assert store.get("k") == b"v"


def test_run_ids_without_restart_counts_are_served_in_order_of_arrival(path: Path) -> None:
    for name in ("a", "b", "c"):
        with open_run(path, name) as store:
            assert store.list_keys() == []
            store.set("k", name)
            store.compact()
    for name in ("a", "b"):
        with pytest.raises(StaleRunError, match="'c'"):
            open_run(path, name)
    with open_run(path, "c") as store:
        assert store.get("k") == b"c"


def test_handle_of_a_stale_run_never_sees_the_data_of_a_later_one(path: Path) -> None:
    """A handle that slept through a run and compactions, and one whose generation is gone."""
    with open_run(path, ("job", 1)) as old, open_run(path, ("job", 1), read_only=True) as reader:
        old.set("k", "old")
        assert reader.get("k") == b"old"
        with open_run(path, ("job", 2)) as new:
            new.set("k", "new")
            for _ in range(3):
                new.compact()
            for call in (lambda: old.add("n", 1), lambda: reader.get("k")):
                with pytest.raises(StaleRunError):
                    call()
            assert new.list_keys() == ["k"]


def test_handle_that_begins_a_run_is_a_session_of_it(path: Path) -> None:
    with open_run(path, ("job", 0), rank=0, label="old") as old:
        old.set("k", "old")
        with open_run(path, ("job", 1), rank=0, label="new") as new, open_run(path, ("job", 1), rank=1) as second:
            assert [member.label for member in second.members()] == ["new", ""]
            new.set("k", "new")
            assert new.register() in {member.number for member in second.members()}
    sessions = read_newest(path).sessions
    assert sorted(session["rank"] for session in sessions.values()) == [0, 1]


def test_reader_of_a_run_that_has_not_begun_is_refused(path: Path) -> None:
    with open_run(path, ("job", 0)) as store:
        store.set("k", "v")
        with pytest.raises(StoreError, match="not begun"):
            open_run(path, ("job", 1), read_only=True)
        assert store.get("k") == b"v"


def test_forked_child_belongs_to_the_run_of_its_parent(path: Path) -> None:
    with open_run(path, ("job", 0)) as old:
        old.set("k", "old")
        with open_run(path, ("job", 1)) as new:
            new.set("k", "new")

            def child() -> None:
                with pytest.raises(StaleRunError):
                    old.set("k", "child")
                new.set("child", "1")

            assert in_child(child) == 0
            assert new.get("child") == b"1"
            assert new.get("k") == b"new"


@pytest.mark.exhaustive
def test_process_killed_while_it_begins_a_run_leaves_one_run_or_the_other(memory: Path) -> None:
    for number in range(200):
        path = memory / f"store{number}"
        with open_run(path, ("job", 0)) as old:
            old.set("k", "old")

            def begin(path: Path = path) -> None:
                open_run(path, ("job", 1)).set("k", "new")

            status = os.waitstatus_to_exitcode(in_child(die_at(number, begin)))
            error = outcome(lambda: old.set("l", "old"))
            log = read_newest(path)
            if error is None:
                assert (log.header["run ids"][0], log.values[b"k"]) == ((b"job", 0), b"old")
            else:
                assert isinstance(error, StaleRunError)
                assert log.header["run ids"][0] == (b"job", 1)
                assert log.values in ({}, {b"k": b"new"})
        with open_run(path, ("job", 1)) as new:
            new.set("k", "new")
            assert new.list_keys() == ["k"]
            new.compact()
            assert len(generations(path)) == 1
        if status == 0:
            assert number > 30
            return
        assert status == -signal.SIGKILL
    raise AssertionError("it never came to an end")


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EMFILE], ids=errno.errorcode.get)
def test_run_that_fails_to_begin_is_an_error_and_can_be_begun_again(error: int, memory: Path) -> None:
    for number in range(200):
        path = memory / f"store{number}"
        with open_run(path, ("job", 0)) as old:
            old.set("k", "old")
        opened: list[FileStore] = []
        with faulty_os() as faulty, faulty.fail(number, error) as failed:
            raised = outcome(lambda: opened.append(open_run(path, ("job", 1))))  # noqa: B023 - called at once
        assert raised is None or isinstance(raised, StoreError)
        for store in opened:
            assert store.list_keys() == []
            store.close()
        with open_run(path, ("job", 1)) as new:
            assert new.list_keys() == []
            new.set("k", "new")
        with pytest.raises(StaleRunError):
            open_run(path, ("job", 0))
        if not failed:
            assert number > 20
            return
    raise AssertionError("it never came to an end")


def test_run_begun_by_several_processes_at_once_is_begun_once_and_joined(path: Path) -> None:
    with open_run(path, ("job", 0)) as old:
        old.set("n", "100")
    pids = []
    for _ in range(6):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                open_run(path, ("job", 1)).add("n", 1)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * 6
    with open_run(path, ("job", 1)) as store:
        assert store.get("n") == b"6"
        assert log_of(store).handle.header.generation == 1


def test_run_id_can_be_given_in_a_url(path: Path) -> None:
    with open_store(f"file:{path}?run_id=4711") as store:
        store.set("k", "v")
    assert read_log(path.read_bytes()).header["run ids"] == [(b"4711", -1)]


def test_job_and_restart_count_can_be_given_in_a_url(path: Path) -> None:
    with open_store(f"file:{path}?run_id=12:30:05&restart=0") as old:  # what looks like a count is none
        old.set("k", "v")
        assert read_log(path.read_bytes()).header["run ids"] == [(b"12:30:05", 0)]
        with open_store(f"file:{path}?restart=2", run_id="12:30:05") as new:
            assert new.list_keys() == []
            with pytest.raises(StaleRunError):
                old.get("k")
        with pytest.raises(StaleRunError):
            open_store(f"file:{path}?run_id=12:30:05&restart=1")
        with open_run(path, ("12:30:05", 2)) as joined:
            assert joined.list_keys() == []


@pytest.mark.parametrize("query", ["restart=1", "restart=-1&run_id=job", "restart=x&run_id=job", "restart=1&run_id="])
def test_restart_count_that_is_invalid_in_a_url_is_refused(query: str, path: Path) -> None:
    with pytest.raises(ValueError, match="restart"):
        open_store(f"file:{path}?{query}")
    assert not path.exists()


def test_restart_in_a_url_conflicts_with_a_run_id_that_has_a_count(path: Path) -> None:
    with pytest.raises(ValueError, match="restart=1 is the restart count of a job"):
        open_store(f"file:{path}?restart=1", run_id=("job", 1))


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ("", ValueError),
        ("x" * 256, ValueError),
        (("job", -1), ValueError),
        (("job", 1 << 63), ValueError),
        (("job", True), TypeError),
        (("job", "1"), TypeError),
        (("job",), TypeError),
        (7, TypeError),
        (b"job", TypeError),
    ],
)
def test_run_id_that_is_invalid_is_refused(wrong: Any, error: type[Exception], path: Path) -> None:
    with pytest.raises(error):
        FileStore(path, run_id=wrong)
    assert not path.exists()


def test_runs_are_classified_by_job_and_restart_count() -> None:
    a1, a2, b0, x, y = (b"a", 1), (b"a", 2), (b"b", 0), (b"x", -1), (b"y", -1)
    verdicts: list[tuple[tuple[Any, ...], Any, str]] = [
        ((), a1, "new"), ((a1,), a1, "join"), ((a1,), a2, "new"), ((a2,), a1, "stale"), ((b0, a2), a1, "stale"),
        ((b0, a2), a2, "stale"), ((b0, a1), a2, "new"), ((x,), y, "new"), ((y, x), x, "stale"), ((y, x), y, "join"),
        (((b"a", -1),), a1, "new"), ((a1,), (b"a", -1), "new"),
    ]  # fmt: skip
    for runs, wanted, verdict in verdicts:
        assert classify_run(runs, wanted) == verdict, (runs, wanted)
    assert supersede((b0, a1), a2) == (a2, b0)
    assert supersede((x,), y) == (y, x)
    assert supersede((b0,), (b"b", -1)) == ((b"b", -1), b0)  # an id without order is another than that job's
    assert supersede(((b"b", -1),), b0) == (b0, (b"b", -1))
    assert len(supersede(tuple((b"%d" % number, -1) for number in range(500)), x)) < 200
    assert parse_run_id("job") == (b"job", -1)
    assert parse_run_id(("job", 3)) == (b"job", 3)
    assert parse_run_id(None) is None
