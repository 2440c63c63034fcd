"""Compaction and what may go wrong in it: failing calls, kills, Ctrl-C, forks, many at once; nothing is ever lost."""

from __future__ import annotations

import errno
import os
import random
import re
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.faulty import FaultyOs, faulty_os
from support.internals import log_of
from support.interrupts import At, interrupt
from support.plain_reader import read_newest

from fscoord import FileStore, FscoordError
from fscoord.store import Store

LIMIT_S = 60
SPILL = (None, 100)
"""From which length on values are left in the file, by the number of compactions before: of what `fill` writes, one."""
ERRORS = [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.ESTALE, errno.EACCES]


@pytest.fixture
def path(memory: Path) -> Path:
    return memory / "store"


def generations(path: Path) -> list[str]:
    pattern = re.compile(rf"{path.name}\.[0-9]+\.[0-9a-f]{{12}}")
    return sorted(name for name in os.listdir(path.parent) if pattern.fullmatch(name))


def fill(path: Path, compactions: int) -> None:
    with FileStore(path) as store:
        store.multi_set(["a", "b"], ["1", "x" * 300])
        for _ in range(compactions):
            store.compact()
        store.add("n", 41)
        store.append("list", "one ")
        store.append("list", "two")
        store.queue_push("q", "first")
        store.queue_push("q", "second")


EXPECTED = {b"a": b"1", b"b": b"x" * 300, b"n": b"41", b"list": b"one two"}


def check(path: Path, **more: str) -> None:
    """The log is sound, holds all that it should, nobody has its lock, and the next compaction clears everything up."""
    expected = EXPECTED | {key.encode(): value.encode() for key, value in more.items()}
    log = read_newest(path)
    assert log.ends in ("whole", "torn")
    assert (log.values, log.queues) == (expected, {b"q": [b"first", b"second"]})
    with FileStore(path, timeout=0) as store:  # so that a lock that is held is told at once
        assert store.add("n", 1) == int(expected[b"n"]) + 1
        store.set("n", expected[b"n"])
        store.compact()
        assert len(generations(path)) == 1
        log = read_newest(path)
        assert (log.ends, log.values, log.queues) == ("whole", expected, {b"q": [b"first", b"second"]})
        with FileStore(path, timeout=LIMIT_S) as late:
            assert late.get("list") == b"one two"


def outcome(call: Callable[[], Any]) -> FscoordError | None:
    try:
        call()
    except FscoordError as error:
        return error
    return None


@pytest.mark.exhaustive
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("compactions", [0, 1])
def test_compaction_loses_nothing_when_any_of_its_calls_fails(error: int, compactions: int, memory: Path) -> None:
    for number in range(200):
        path = memory / f"store{number}"
        fill(path, compactions)
        opened = partial(FileStore, path, timeout=LIMIT_S, spill_bytes=SPILL[compactions])
        with opened() as store, opened() as other:
            other.get("a")
            store.get("a")
            with faulty_os() as faulty, faulty.fail(number, error) as failed:
                raised = outcome(store.compact)
            assert raised is None or failed
            assert other.get("list") == b"one two"
            assert other.get("b") == b"x" * 300
            if raised is not None and failed != ["unlink"]:
                ended = type(raised).__name__ == "StoreGoneError"
                assert ended or outcome(lambda: store.set("a", "1")) is None
        if read_newest(path).header["generation"] == compactions and failed != ["unlink"] and error == errno.ENOSPC:
            assert len(generations(path)) == compactions, f"{failed}: something is left of a compaction that failed"
        check(path)
        if not failed:
            assert number > 20
            return
    raise AssertionError("it never came to an end")


@contextmanager
def failing_inside(faulty: FaultyOs, store: FileStore, number: int, error: int) -> Iterator[list[str]]:
    """Let call `number` inside the compaction fail, and none outside."""
    failed: list[str] = []
    inside, left = [False], [number]
    compact = log_of(store).compactor.compact

    def marked() -> None:
        inside[0] = True
        try:
            compact()
        finally:
            inside[0] = False

    def does(name: str, _real: Any, _arguments: Any) -> None:
        if inside[0]:
            left[0] -= 1
            if left[0] == -1:
                failed.append(name)
                raise OSError(error, os.strerror(error))

    log_of(store).compactor.compact = marked
    with faulty.instead(does):
        yield failed


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
def test_compaction_that_fails_does_not_fail_the_write_that_caused_it(error: int, memory: Path) -> None:
    for number in range(200):
        path = memory / f"store{number}"
        fill(path, 1)
        with FileStore(path, timeout=LIMIT_S, compact_bytes=1) as store:
            store.set("late", "y" * 2000)
            with faulty_os() as faulty, failing_inside(faulty, store, number, error) as failed:
                for _ in range(5):
                    store.set("late", "y" * 2000)
            assert store.get("late") == b"y" * 2000
        check(path, late="y" * 2000)
        if not failed:
            assert number > 20
            return
    raise AssertionError("it never came to an end")


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("slept", [1, 3])
def test_handle_that_fails_to_follow_never_writes_to_the_wrong_generation(error: int, slept: int, memory: Path) -> None:
    for number in range(100):
        path = memory / f"store{number}"
        fill(path, 0)
        opened = partial(FileStore, path, timeout=LIMIT_S, spill_bytes=SPILL[slept == 1])
        with opened() as store, opened() as other:
            other.get("a")
            for _ in range(slept):
                store.compact()
            log_of(other).handle.path_checked_at = 0.0
            with faulty_os() as faulty, faulty.fail(number, error) as failed:
                raised = outcome(lambda: other.set("late", "1"))
            if raised is not None:
                other.set("late", "1")
            assert store.get("late") == b"1"
            assert other.get("b") == store.get("b") == b"x" * 300
        check(path, late="1")
        if not failed:
            assert number > 5
            return
    raise AssertionError("it never came to an end")


# Kills


def in_child(body: Callable[[], None]) -> int:
    """Run `body` in a forked child; return how it ended, as waitpid(2) says."""
    pid = os.fork()
    if pid == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1]


def kills(number: int) -> Callable[[str, Callable[..., Any], tuple[Any, ...]], None]:
    """Return what `Faulty.instead` takes to kill the process at point `number`.

    Before each call there is a point. A write has two more: when half of it is done, and all of it.
    """
    left = number

    def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        nonlocal left
        points = (0.0, 0.5, 1.0) if name in ("write", "pwrite") else (0.0,)
        if 0 <= left < len(points):
            if points[left]:
                fd, data, *where = arguments
                real(fd, data[: int(len(data) * points[left])], *where)
            os.kill(os.getpid(), signal.SIGKILL)
        left -= len(points)

    return does


def die_at(number: int, body: Callable[[], None]) -> Callable[[], None]:
    """Return `body`, killed at its point `number`."""

    def run() -> None:
        with faulty_os() as faulty, faulty.instead(kills(number)):
            body()

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("compactions", [0, 1])
def test_compaction_killed_at_any_call_loses_nothing(compactions: int, memory: Path) -> None:
    for number in range(200):
        path = memory / f"store{number}"
        fill(path, compactions)

        opened = partial(FileStore, path, timeout=LIMIT_S, spill_bytes=SPILL[compactions])

        def compact(opened: Callable[[], FileStore] = opened) -> None:
            opened().compact()

        with opened() as witness, opened(read_only=True) as reader:
            assert witness.get("a") == reader.get("a") == b"1"
            status = in_child(die_at(number, compact))
            assert witness.get("list") == reader.get("list") == b"one two"
            assert witness.get("b") == reader.get("b") == b"x" * 300
            witness.set("b", "x" * 300)
            assert reader.get("b") == b"x" * 300
        check(path)
        if os.waitstatus_to_exitcode(status) == 0:
            assert number > 30
            return
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    raise AssertionError("it never came to an end")


# Ctrl-C


@pytest.mark.parametrize("triggered", [False, True])
def test_ctrl_c_at_any_point_of_a_compaction_leaves_no_lock(triggered: bool, memory: Path, rng: random.Random) -> None:
    number, descriptors = rng.randint(1, 24), set(os.listdir("/proc/self/fd"))
    while True:
        path = memory / str(number) / "store"  # alone in its directory: whatever lies beside it adds points
        path.parent.mkdir()
        fill(path, 1)
        with FileStore(path, timeout=LIMIT_S, compact_bytes=None, spill_bytes=SPILL[triggered]) as store:
            for _ in range(8):
                store.set("b", "x" * 300)
            if triggered:
                log_of(store).handle.options = log_of(store).handle.options._replace(compact_bytes=1)
                log_of(store).handle.compact_at = 0
            at = At(number, interrupt)
            try:
                with at:
                    if triggered:
                        store.set("a", "1")
                    else:
                        store.compact()
            except KeyboardInterrupt:
                pass
            with FileStore(path, timeout=0) as other:
                other.set("a", "1")
            assert store.get("list") == b"one two", at.where
            assert store.get("b") == b"x" * 300, at.where
        check(path)
        assert set(os.listdir("/proc/self/fd")) == descriptors, f"{at.where}: a descriptor was lost"
        if not at.reached:
            break
        number += rng.randint(1, 24)
    assert number > 300


# Forks


def test_child_that_could_not_open_a_later_generation_does_no_harm(memory: Path) -> None:
    for number in range(60):
        path = memory / f"store{number}"
        fill(path, 1)
        reached = 0
        with FileStore(path, timeout=LIMIT_S) as store, FileStore(path, timeout=LIMIT_S) as other:
            store.set("a", "1")
            other.compact()

            def child(store: Store = store, number: int = number) -> None:
                with faulty_os() as faulty, faulty.fail(number, errno.EMFILE, names=("open",)) as failed:
                    outcome(lambda: store.set("late", "1"))
                store.set("late", "1")
                os._exit(0 if failed else 3)

            reached = os.waitstatus_to_exitcode(in_child(child))
            assert reached in (0, 3)
            assert store.get("late") == other.get("late") == b"1"
            store.set("a", "1")
        check(path, late="1")
        if reached == 3:
            assert number > 3
            return
    raise AssertionError("it never came to an end")


# Many at once


def work(path: Path, writer: int, operations: int, least: int) -> None:
    """Count, and check that no count ever goes back."""
    with FileStore(path, timeout=LIMIT_S * 10, compact_bytes=least) as store:
        last = 0
        for number in range(1, operations + 1):
            store.set(f"writer {writer}", str(number))
            total = store.add("total", 1)
            assert total > last
            last = total


def watch(path: Path, writers: int, operations: int) -> None:
    with FileStore(path, read_only=True, timeout=LIMIT_S * 10) as reader:
        seen = dict.fromkeys(range(writers), 0)
        reader.wait([f"writer {writer}" for writer in seen])
        while min(seen.values()) < operations:
            for writer in seen:
                found = int(reader.get(f"writer {writer}"))
                assert found >= seen[writer], "a reader went back in time"
                seen[writer] = found


def many_at_once(path: Path, writers: int, operations: int, least: int, limit_s: float) -> int:
    """Return how many compactions there were."""
    FileStore(path).close()
    jobs: list[Callable[[], None]] = [lambda n=n: work(path, n, operations, least) for n in range(writers)]
    jobs += [lambda: watch(path, writers, operations)] * 2
    pids = []
    try:
        for job in jobs:
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    job()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            pids.append(pid)
        deadline = time.monotonic() + limit_s
        while pids:
            pid, status = os.waitpid(pids[0], os.WNOHANG)
            assert time.monotonic() < deadline, "they hang"
            if pid:
                pids.remove(pid)
                assert status == 0
            else:
                time.sleep(0.01)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    with FileStore(path) as store:
        assert int(store.get("total")) == writers * operations
        assert [int(store.get(f"writer {n}")) for n in range(writers)] == [operations] * writers
        assert len(generations(path)) == 1
        return log_of(store).handle.header.generation


def test_writers_that_compact_lose_nothing_and_readers_never_go_back(path: Path, scale: Callable[[int], int]) -> None:
    assert many_at_once(path, 4, scale(400), 4096, 3 * LIMIT_S) > 5


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_writers_of_a_hundred_thousand_operations_each_lose_nothing(path: Path, capsys: Any) -> None:
    compactions = many_at_once(path, 8, 50_000, 1 << 18, 1700)
    with capsys.disabled():
        print(f" {compactions} compactions")
    assert compactions >= 50
