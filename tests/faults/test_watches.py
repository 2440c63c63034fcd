"""Watches while writers are killed, while the log is compacted, in a forked child, and when Ctrl-C comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faults.test_compaction import die_at, in_child
from support.interrupts import At, interrupt

from fscoord import Change, CompactedError, FileStore, HashStore, Store, StoreTimeoutError, Watch
from fscoord.recipes import Ephemeral
from fscoord.stores.file import changes as file_changes

HANG_S = 60
WRITES: dict[str, Callable[[FileStore], Any]] = {
    "set": lambda store: store.set("k", "new"),
    "append": lambda store: store.append("k", "more"),
    "multi_set": lambda store: store.multi_set(["a", "k"], ["1", "2"]),
    "delete_key": lambda store: store.delete_key("k"),
    "compact": lambda store: store.compact(),
}


def rest_of(watch: Watch) -> list[Change]:
    """Return the changes that are there already."""
    watch._limit = 0.0
    found = []
    try:
        for change in watch:
            found.append(change)
    except StoreTimeoutError:
        return found
    raise AssertionError("a watch ended")


def apply(values: dict[str, bytes], changes: list[Change]) -> dict[str, bytes]:
    """Apply `changes` to `values`, and return it."""
    for change in changes:
        if change.value is None:
            del values[change.key]
        else:
            values[change.key] = change.value
    return values


def state(store: Store) -> dict[str, bytes]:
    keys = store.list_keys()
    return dict(zip(keys, store.multi_get(keys), strict=True))


@pytest.mark.parametrize("operation", WRITES)
def test_watch_yields_what_a_writer_that_is_killed_at_any_call_has_done(operation: str, tmp_path: Path) -> None:
    number = killed = 0
    while True:
        path = tmp_path / f"{number}"
        with FileStore(path, timeout=HANG_S) as store, store.watch() as watch:
            store.set("k", "old")
            values = apply({}, rest_of(watch))

            def body() -> None:
                other = FileStore(path, timeout=HANG_S)  # noqa: B023
                die_at(number, lambda: WRITES[operation](other))()  # noqa: B023

            status = in_child(body)
            store.set("after", "1")
            found = rest_of(watch)
            assert [change.key for change in found].count("after") == 1
            assert apply(values, found) == state(store), (operation, number)
        number += 1
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            break
        killed += 1
    assert killed >= 4


def test_writers_that_are_killed_at_any_time_leave_each_acknowledged_change_once(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    code = (
        "import sys, fscoord\n"
        "store = fscoord.FileStore(sys.argv[1], compact_bytes=None)\n"
        "for number in range(1_000_000):\n"
        "    store.set('w' + sys.argv[2], str(number)); print(number, flush=True)\n"
    )
    with FileStore(path, timeout=HANG_S, compact_bytes=None) as store, store.watch("w", timeout=HANG_S) as watch:
        for turn in range(3):
            writers = [
                subprocess.Popen([sys.executable, "-c", code, path, f"{turn}{name}"], stdout=subprocess.PIPE)
                for name in "ab"
            ]
            found = [next(watch) for _ in range(300)]
            told = {}
            for writer, name in zip(writers, "ab", strict=True):
                writer.kill()
                lines = writer.communicate(timeout=HANG_S)[0].split(b"\n")[:-1]
                told[f"w{turn}{name}"] = len(lines)
            found += rest_of(watch)
            for key, count in told.items():
                numbers = [int(change.value or b"") for change in found if change.key == key]
                assert numbers == list(range(len(numbers)))
                assert count <= len(numbers) <= count + 1
            watch._limit = HANG_S


def test_watch_that_sleeps_follows_compactions_of_a_busy_log(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with FileStore(path, timeout=HANG_S) as store, store.watch("n", timeout=HANG_S) as watch:
        turn = threading.Semaphore(8)  # a watch that lags behind by two compactions would lose changes

        def write() -> None:
            with FileStore(path, timeout=HANG_S, compact_bytes=4096) as other:
                for number in range(500):
                    turn.acquire()
                    other.set("n", str(number))

        writer = threading.Thread(target=write)
        writer.start()
        found = []
        for change in watch:
            found.append(int(change.value or b""))
            turn.release()
            if len(found) == 500:
                break
        writer.join()
        assert found == list(range(500))
        assert watch.position.generation > 3


def test_watch_that_does_not_read_during_compactions_says_that_it_lost_changes(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, store.watch(timeout=HANG_S) as watch:
        for number in range(3):
            store.set("k", str(number))
            store.compact()
        assert next(watch).value == b"0", "it came before the gap"
        for _ in range(2):
            with pytest.raises(CompactedError):
                next(watch)


def test_change_is_yielded_once_although_ctrl_c_comes_while_records_are_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = file_changes.change_of, [0]

    def change_of(*arguments: Any) -> Change:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(file_changes, "change_of", change_of)
    for number in range(1, 5):
        with FileStore(tmp_path / f"{number}", timeout=HANG_S) as store, store.watch(timeout=HANG_S) as watch:
            store.set("a", "1")
            store.multi_set(["b", "c"], ["2", "3"])
            store.delete_key("a")
            left[0] = number
            with pytest.raises(KeyboardInterrupt):
                next(watch)
            assert [change.key for change in rest_of(watch)] == ["a", "b", "c", "a"]


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_ctrl_c_at_any_point_of_a_watch_loses_no_change(kind: str, tmp_path: Path) -> None:
    with HashStore(timeout=HANG_S) if kind == "hash" else FileStore(tmp_path / "s", timeout=HANG_S) as store:
        number = 0
        while True:
            number += 1
            with store.watch("k", timeout=HANG_S) as watch:
                store.set("k1", "")
                store.set("k2", "")
                point, found = At(number, interrupt), []
                try:
                    with point:
                        found.append(next(watch).key)
                except KeyboardInterrupt:
                    pass
                found += [change.key for change in rest_of(watch)]
                assert found in (["k1", "k2"], ["k2"]), point.where
                if found == ["k2"]:  # the change was returned, and the interruption came before the caller kept it
                    assert "popleft" in point.where or "__next__" in point.where, point.where
            if not point.reached:
                break
        assert number > 20


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.set("k", "2"),
        lambda store: store.add("n", 1),
        lambda store: store.multi_set(["a", "k"], ["1", "2"]),
        lambda store: store.transact(set={"a": "1"}, add={"n": 1}, delete=["k"]),
        lambda store: store.delete_key("k"),
        lambda store: store.pop("k"),
    ],
)
def test_watch_in_memory_yields_a_change_only_if_an_interrupted_write_made_it(write: Callable[[Store], Any]) -> None:
    number, reached = 0, True
    while reached:
        number += 1
        with HashStore(timeout=HANG_S) as store:
            store.set("k", "1")
            before = state(store)
            with store.watch(timeout=HANG_S) as watch:
                point = At(number, interrupt)
                try:
                    with point:
                        write(store)
                except KeyboardInterrupt:
                    pass
                assert apply(before, rest_of(watch)) == state(store), point.where
        reached = point.reached
    assert number > 5


def test_forked_child_and_its_parent_both_go_on_with_a_watch(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, store.watch(timeout=HANG_S) as watch:
        store.set("a", "1")

        def body() -> None:
            assert next(watch).key == "a"
            store.set("b", "2")
            assert next(watch).key == "b"

        assert in_child(body) == 0
        assert [next(watch).key for _ in range(2)] == ["a", "b"]


def test_ephemeral_key_of_a_killed_process_is_deleted_once_and_never_returned(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    code = (
        "import sys, fscoord, fscoord.recipes\n"
        "store = fscoord.FileStore(sys.argv[1])\n"
        "assert fscoord.recipes.Ephemeral(store, 'e', 'v').create(); print('made', flush=True); sys.stdin.read()\n"
    )
    with FileStore(path, timeout=HANG_S) as store, store.watch("e", timeout=HANG_S) as watch:
        child = subprocess.Popen(
            [sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == "made\n"
        key = Ephemeral(store, "e")
        assert key.get() == b"v"
        os.kill(child.pid, signal.SIGSTOP)
        assert key.get() == b"v", "a stopped process is not dead"
        child.kill()
        child.communicate(timeout=HANG_S)
        assert key.get() is None
        assert Ephemeral(store, "e").get() is None
        assert [next(watch).kind, next(watch).kind] == ["set", "delete"]
        assert rest_of(watch) == []


def test_forked_child_does_not_delete_the_ephemeral_key_of_its_parent(tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, Ephemeral(store, "e", "v") as key:

        def body() -> None:
            assert not key.delete()
            assert key.get() == b"v"

        assert in_child(body) == 0
        assert key.get() == b"v"
