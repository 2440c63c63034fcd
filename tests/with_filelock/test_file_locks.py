"""The locks for programs that use the package filelock."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import filelock
import pages
import pytest
from support.internals import system
from support.places import until
from support.processes import let_go, stop, wait_until_ready

import fscoord
from fscoord import FileStore, LockLostError, StoreGoneError, StoreTimeoutError, UnsupportedFilesystemError
from fscoord.integrations.filelock import AsyncFsFileLock, AsyncFsReadWriteLock, FsFileLock, FsReadWriteLock
from fscoord.integrations.filelock._store import Turn
from fscoord.recipes import Lock, ReadWriteLock, force_release

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "integrations" / "filelock.md"
NEVER_S = 3600.0
"""A pause after which no test would end: a waiter that has to poll fails by the test's time limit."""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "job.lock")


@contextmanager
def holder(kind: str, path: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of `kind` on `path`."""
    root = str(Path(fscoord.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, str(TESTS)])}
    command = [sys.executable, str(TESTS / "with_filelock" / "holder.py"), kind, path]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment) as process:
        try:
            wait_until_ready(process)
            yield process
        finally:
            process.kill()


def waiters(path: str) -> int:
    """How many contenders are in line."""
    with FileStore(path + ".fscoord") as store:
        return len(Lock(store, Path(path).name).waiters())


def await_waiters(path: str, number: int) -> None:
    with FileStore(path + ".fscoord") as store:
        line = Lock(store, Path(path).name)
        changed = threading.Event()
        while len(line.waiters()) != number:
            changed.wait(0.01)


def test_acquires_releases_and_nests_as_filelock_does(path: str) -> None:
    lock = FsFileLock(path)
    assert isinstance(lock, filelock.FileLock)
    with lock.acquire() as same:
        assert (same, lock.is_locked, lock.lock_counter, lock.token) == (lock, True, 1, 1)
        with lock:
            assert (lock.lock_counter, lock.token) == (2, 1)
        assert lock.is_locked
    assert not lock.is_locked
    with pytest.raises(RuntimeError, match="acquire it first"):
        _ = lock.token
    with FsFileLock(path, is_singleton=True) as one, FsFileLock(path, is_singleton=True) as other:
        assert (one is other, one.lock_counter, one.token) == (True, 2, 2)
    lock.acquire()
    lock.acquire()
    lock.release(force=True)
    assert not lock.is_locked


def test_decorates_functions(path: str) -> None:
    lock = FsFileLock(path)

    @lock
    def is_locked() -> bool:
        return lock.is_locked

    assert (is_locked(), lock.is_locked) == (True, False)


@pytest.mark.parametrize("options", [{"timeout": 0.01}, {"blocking": False}, {"timeout": 0}])
def test_timeout_is_filelocks_and_its_cause_names_the_holder(path: str, options: dict[str, Any]) -> None:
    with holder("file", path) as process:
        with pytest.raises(filelock.Timeout) as caught:
            FsFileLock(path).acquire(**options)
        assert caught.value.lock_file == path
        assert isinstance(caught.value.__cause__, StoreTimeoutError)
        assert (caught.value.__cause__.holder or "").endswith(f":{process.pid}")
        assert waiters(path) == 0


def test_wait_without_limit_for_oneself_is_refused(path: str) -> None:
    with FsFileLock(path):
        with pytest.raises(RuntimeError, match="is_singleton=True"):
            FsFileLock(path).acquire()
        with pytest.raises(filelock.Timeout):
            FsFileLock(path).acquire(timeout=0.01)
    assert waiters(path) == 0


@pytest.mark.parametrize("nan", [float("nan"), Decimal("NaN"), Decimal("sNaN")])
def test_wait_of_nan_seconds_is_refused_before_anything_is_created(nan: Any, path: str) -> None:
    both = AsyncFsFileLock(path), AsyncFsReadWriteLock(path)

    async def main() -> None:
        for acquire in (both[0].acquire, both[1].acquire_read, both[1].acquire_write):
            with pytest.raises(ValueError, match="not nan"):
                await acquire(nan)

    for lock in (FsFileLock(path).acquire, FsReadWriteLock(path).acquire_read, FsReadWriteLock(path).acquire_write):
        with pytest.raises(ValueError, match="not nan"):
            lock(nan)
        with pytest.raises(TypeError, match="blocking must be a bool"):
            lock(blocking="no")  # type: ignore[call-arg]
    asyncio.run(main())
    for lock in (FsReadWriteLock(path).acquire_read, FsReadWriteLock(path).acquire_write):
        with pytest.raises(ValueError, match="non-negative number or -1"):
            lock(-2)
    assert not Path(path + ".fscoord").exists()


def test_cancel_check_ends_a_wait(path: str) -> None:
    answers = iter([False, False, True])
    with holder("file", path):
        with pytest.raises(filelock.Timeout):
            FsFileLock(path).acquire(poll_interval=0.001, cancel_check=lambda: next(answers))
        assert next(answers, None) is None


def test_acquire_of_the_base_class_takes_both_locks_by_polls(path: str) -> None:
    lock = FsFileLock(path, poll_interval=0.001)
    with holder("file", path) as process:
        with pytest.raises(filelock.Timeout):
            filelock.BaseFileLock.acquire(lock, 0.01)
        assert waiters(path) == 0
        thread = threading.Thread(target=let_go, args=(process,))
        thread.start()
        with filelock.BaseFileLock.acquire(lock):
            assert lock.token > 1
            with pytest.raises(filelock.Timeout):
                FsFileLock(path).acquire(blocking=False)
        thread.join()
    with FsFileLock(path, timeout=0):
        pass


def test_waiter_is_woken_by_the_release_and_never_polls(path: str) -> None:
    with holder("file", path) as process:
        lock = FsFileLock(path, poll_interval=NEVER_S)
        thread = threading.Thread(target=lambda: (lock.acquire(), lock.release()))
        thread.start()
        await_waiters(path, 1)
        let_go(process)
        thread.join()


def test_waiters_acquire_in_the_order_of_their_requests(path: str) -> None:
    order: list[int] = []

    def work(number: int) -> None:
        with FsFileLock(path):
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with FsFileLock(path):
        for number, thread in enumerate(threads):
            thread.start()
            await_waiters(path, number + 1)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]


def test_lock_of_a_killed_process_is_free(path: str) -> None:
    with holder("file", path) as process:
        process.send_signal(signal.SIGKILL)
        with FsFileLock(path) as lock:
            assert lock.token == 2


def test_stopped_process_keeps_the_lock(path: str) -> None:
    with holder("file", path) as process:
        stop(process.pid)
        with pytest.raises(filelock.Timeout) as caught:
            FsFileLock(path).acquire(timeout=0.05)
        assert str(process.pid) in str(caught.value.__cause__)


def test_programs_that_use_filelock_alone_are_excluded(path: str) -> None:
    with FsFileLock(path), pytest.raises(filelock.Timeout):
        filelock.FileLock(path).acquire(timeout=0.01)
    with filelock.FileLock(path):
        with pytest.raises(filelock.Timeout):
            FsFileLock(path).acquire(timeout=0.01)
        assert waiters(path) == 0
    with FsFileLock(path):
        pass


def test_release_of_a_lost_lock_says_so(path: str) -> None:
    lock = FsFileLock(path)
    lock.acquire()
    with FileStore(path + ".fscoord") as store:
        assert force_release(store, Path(path).name, lock.token)
    with pytest.raises(LockLostError, match="stop the work"):
        lock.release()
    assert not lock.is_locked
    with lock:
        assert lock.token == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, MemoryError])
def test_failure_of_the_second_lock_releases_the_first(
    error: type[BaseException], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise error

    lock = FsFileLock(path)
    with monkeypatch.context() as patch:
        patch.setattr(filelock.UnixFileLock, "_acquire", fail)
        with pytest.raises(error):
            lock.acquire()
    assert not lock.is_locked
    with FsFileLock(path, timeout=0):
        pass


@pytest.mark.parametrize("where", [filelock.UnixFileLock, Turn], ids=["second", "first"])
def test_release_that_is_interrupted_releases_both_locks(
    where: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "release" if where is Turn else "_release"
    release = getattr(where, name)

    def interrupted(lock: Any) -> None:
        patch.undo()
        if where is not Turn:
            release(lock)
        raise KeyboardInterrupt

    lock = FsFileLock(path)
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            lock.release()
    assert not lock.is_locked
    with FsFileLock(path, timeout=0):
        pass


def test_threads_of_a_thread_local_lock_exclude_each_other(path: str) -> None:
    lock, inside, most = FsFileLock(path), [0], [0]

    def work() -> None:
        for _ in range(20):
            with lock:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, lock.is_locked) == ([1], False)


def test_lock_that_threads_share_is_released_by_another_thread(path: str) -> None:
    lock = FsFileLock(path, thread_local=False)
    lock.acquire()
    thread = threading.Thread(target=lock.release)
    thread.start()
    thread.join()
    with FsFileLock(path, timeout=0):
        pass


def test_forked_child_holds_nothing_and_waits_with_a_lock_of_its_own(path: str, tmp_path: Path) -> None:
    lock = FsFileLock(path)
    lock.acquire()
    child = os.fork()
    if not child:
        try:
            with pytest.raises(RuntimeError):
                lock.acquire()
            with FsFileLock(path) as own:
                (tmp_path / "token").write_text(str(own.token))
        finally:
            os._exit(0)
    await_waiters(path, 1)
    lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert (tmp_path / "token").read_text() == "2"


def test_store_has_the_permissions_of_the_lock_file(path: str) -> None:
    with FsFileLock(path, mode=0o664):
        pass
    assert [os.stat(path + end).st_mode & 0o777 for end in ("", ".fscoord")] == [0o664, 0o664]


def test_further_arguments_can_be_positional_as_in_filelock(path: str) -> None:
    class Subclass(FsFileLock):
        def __init__(self, lock_file: str, timeout: float, mode: int, thread_local: bool) -> None:
            super().__init__(lock_file, timeout, mode, thread_local)

    with Subclass(path, 5, 0o664, False) as lock:
        assert (lock.timeout, lock.mode, lock.is_thread_local()) == (5, 0o664, False)
    assert AsyncFsFileLock(path, 5, 0o664, False).mode == 0o664


def test_missing_directory_is_created(tmp_path: Path) -> None:
    with FsFileLock(tmp_path / "new" / "directory" / "job.lock") as lock:
        assert lock.token == 1


def test_store_of_the_caller_has_one_lock_for_each_path(path: str) -> None:
    with FileStore(path + ".store") as store:
        with FsFileLock(path, store=store), FsFileLock(path + "2", store=store, timeout=0) as second:
            assert second.token == 1
            assert [held.token for held in Lock(store, path).holders()] == [1]
        assert not Path(path + ".fscoord").exists()


def test_deleted_store_is_an_error_once(path: str) -> None:
    lock = FsFileLock(path)
    with lock:
        pass
    os.unlink(path + ".fscoord")

    def use_until_the_path_is_checked() -> None:
        while True:
            with lock:
                pass

    with pytest.raises(StoreGoneError):
        use_until_the_path_is_checked()
    with lock:
        assert lock.token == 1


@pytest.mark.parametrize("kind", ["nfs s:/ rw,vers=3,nolock,local_lock=all", "lustre s:/ rw,localflock"])
def test_mount_whose_locks_exclude_no_other_host_is_refused(
    kind: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with filelock.FileLock(path):  # locks without effect between hosts
        pass
    monkeypatch.setattr(system, "mount_table", lambda: [f"1 0 0:1 / {tmp_path} rw - {kind}"])
    with pytest.raises(UnsupportedFilesystemError, match=kind.split()[0]):
        FsFileLock(path).acquire()


def test_error_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if "filelock" in name]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'fscoord[filelock]'")):
        import fscoord.integrations.filelock  # noqa: F401


def test_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in pages.blocks(PAGE) if block.language == "python"]
    pages.run_python(block, PAGE, {})


# -- tasks -------------------------------------------------------------------------------------------------------------


def run(function: Callable[[], Any]) -> None:
    asyncio.run(function())


async def until_in_line(path: str, number: int) -> None:
    while waiters(path) != number:
        await asyncio.sleep(0.01)


def test_task_acquires_and_nests(path: str) -> None:
    async def main() -> None:
        lock = AsyncFsFileLock(path)
        assert isinstance(lock, filelock.AsyncFileLock)
        async with lock, lock:
            assert (lock.lock_counter, lock.token) == (2, 1)
            with pytest.raises(RuntimeError, match="is_singleton=True"):
                await AsyncFsFileLock(path).acquire()
            with pytest.raises(filelock.Timeout) as caught:
                await AsyncFsFileLock(path).acquire(timeout=0.01)
            assert isinstance(caught.value.__cause__, StoreTimeoutError)
            with pytest.raises(filelock.Timeout):
                await AsyncFsFileLock(path, blocking=False).acquire()
        assert not lock.is_locked

    run(main)


def test_tasks_wait_in_line_and_a_cancelled_one_leaves_it(path: str) -> None:
    order: list[str] = []

    async def work(name: str) -> None:
        async with AsyncFsFileLock(path, poll_interval=NEVER_S):
            order.append(name)

    async def main() -> None:
        async with AsyncFsFileLock(path):
            tasks = []
            for number, name in enumerate("abc"):
                tasks.append(asyncio.create_task(work(name)))
                await until_in_line(path, number + 1)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            await until_in_line(path, 2)
        await asyncio.gather(tasks[0], tasks[2])
        async with AsyncFsFileLock(path, timeout=0):
            assert order == ["a", "c"]

    run(main)


def test_cancel_check_ends_the_wait_of_a_task(path: str) -> None:
    async def main() -> None:
        with holder("file", path), pytest.raises(filelock.Timeout):
            await AsyncFsFileLock(path).acquire(poll_interval=0.001, cancel_check=lambda: True)

    run(main)


# -- readers and writers -----------------------------------------------------------------------------------------------


def test_readers_share_and_a_writer_excludes_them(path: str) -> None:
    lock, other = FsReadWriteLock(path), FsReadWriteLock(path, is_singleton=False)
    assert lock is FsReadWriteLock(path)
    with lock.read_lock(), lock.read_lock(), other.read_lock():
        with pytest.raises(filelock.Timeout) as caught:
            FsReadWriteLock(path, is_singleton=False).acquire_write(timeout=0.01)
        assert isinstance(caught.value.__cause__, StoreTimeoutError)
        with pytest.raises(RuntimeError, match="upgrade"):
            lock.acquire_write(timeout=0.01)
    with lock.write_lock(), lock.write_lock(), pytest.raises(filelock.Timeout):
        other.acquire_read(blocking=False)
    with other.write_lock(timeout=0):
        pass
    with pytest.raises(RuntimeError):
        lock.release()
    other.acquire_read()
    child = os.fork()
    if not child:  # it holds nothing, and neither call waits for a lock of the parent
        try:
            other.release()
        finally:
            other.close()
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    other.close()
    with lock.write_lock(timeout=0):
        pass


def test_side_in_the_store_is_held_from_the_first_level_to_the_last(path: str) -> None:
    lock = FsReadWriteLock(path)
    for acquire, side in ((lock.acquire_read, "reader"), (lock.acquire_write, "writer")):
        for force, releases in ((False, 2), (True, 1)):
            acquire()
            acquire()
            with FileStore(path + ".fscoord") as store:
                both = ReadWriteLock(store, Path(path).name)
                assert (both.held_side(), len(both.holders())) == (side, 1)
                for _ in range(releases):
                    assert both.held_side() == side
                    lock.release(force=force)
                assert both.held_side() is None


@pytest.mark.parametrize("kind", ["read", "write"])
def test_lock_of_a_killed_reader_or_writer_is_free(kind: str, path: str) -> None:
    with holder(kind, path) as process:
        with pytest.raises(filelock.Timeout):
            FsReadWriteLock(path).acquire_write(timeout=0.01)
        process.send_signal(signal.SIGKILL)
        with FsReadWriteLock(path).write_lock():
            pass


def test_readers_and_writers_that_use_filelock_alone_are_excluded(path: str) -> None:
    plain = filelock.ReadWriteLock(path, is_singleton=False)
    with FsReadWriteLock(path).write_lock(), pytest.raises(filelock.Timeout):
        plain.acquire_read(timeout=0.01)
    with plain.write_lock(), pytest.raises(filelock.Timeout):
        FsReadWriteLock(path).acquire_read(timeout=0.01)
    with FsReadWriteLock(path).write_lock(timeout=0):
        pass


@pytest.mark.parametrize("side", ["read", "write"])
def test_dropped_lock_is_free(side: str, path: str) -> None:
    lock = FsReadWriteLock(path, is_singleton=False)
    getattr(lock, f"acquire_{side}")()
    assert held_side(path)[1] == 1
    del lock
    gc.collect()
    assert held_side(path) == (None, 0)

    async def main() -> None:
        lock = AsyncFsReadWriteLock(path, is_singleton=False)
        await getattr(lock, f"acquire_{side}")()
        del lock
        gc.collect()

    asyncio.run(main())
    until(lambda: held_side(path) == (None, 0))  # the thread of filelock's executor may drop the lock a moment later
    with FsReadWriteLock(path).write_lock(timeout=0):
        pass


# -- tasks that read and write -----------------------------------------------------------------------------------------


def held_side(path: str) -> tuple[str | None, int]:
    """The side of the lock that is held, and the number of its holders."""
    with FileStore(path + ".fscoord") as store:
        both = ReadWriteLock(store, Path(path).name)
        return both.held_side(), len(both.holders())


def test_reading_tasks_share_and_a_writing_task_waits_in_line(path: str) -> None:
    order: list[str] = []

    async def main() -> None:
        lock = AsyncFsReadWriteLock(path)
        assert isinstance(lock, filelock.AsyncReadWriteLock)

        async def work(kind: str) -> None:
            async with lock.read_lock() if kind == "read" else lock.write_lock():
                order.append(kind)

        async with lock.read_lock(), lock.read_lock():
            await asyncio.create_task(work("read"))
            assert held_side(path) == ("reader", 1)
            with pytest.raises(RuntimeError, match="upgrade"):
                await lock.acquire_write(timeout=0.01)
            tasks = []
            for number, kind in enumerate(("write", "write", "read")):
                tasks.append(asyncio.create_task(work(kind)))
                await until_in_line(path, number + 1)
            tasks[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            await until_in_line(path, 2)
            assert order == ["read"]
        await asyncio.gather(*tasks[1:])
        assert order == ["read", "write", "read"]
        assert held_side(path) == (None, 0)
        await lock.close()

    run(main)


def test_task_nests_and_its_objects_for_one_path_count_together(path: str) -> None:
    async def main() -> None:
        one, two = AsyncFsReadWriteLock(path), AsyncFsReadWriteLock(path)
        await one.acquire_write()
        await two.acquire_write()
        await two.release()
        assert held_side(path) == ("writer", 1)
        await one.acquire_write()
        await one.release(force=True)
        assert held_side(path) == (None, 0)
        with pytest.raises(RuntimeError, match="not held by this task"):
            await one.release()
        await one.acquire_read()
        await two.acquire_read()
        await one.close()
        assert held_side(path) == ("reader", 1)
        await two.close()
        assert held_side(path) == (None, 0)

    run(main)


@pytest.mark.parametrize("options", [{"timeout": 0.01}, {"blocking": False}])
def test_task_is_excluded_by_another_process_until_that_is_killed(path: str, options: dict[str, Any]) -> None:
    async def main() -> None:
        lock = AsyncFsReadWriteLock(path, is_singleton=False)
        with holder("write", path) as process:
            with pytest.raises(filelock.Timeout) as caught:
                await lock.acquire_read(**options)
            assert str(process.pid) in str(caught.value.__cause__)
            process.send_signal(signal.SIGKILL)
            async with lock.write_lock():
                with pytest.raises(filelock.Timeout):
                    await asyncio.to_thread(FsReadWriteLock(path).acquire_read, 0.01)
        await lock.close()

    run(main)


def test_task_is_excluded_by_programs_that_use_filelock_alone(path: str) -> None:
    async def main() -> None:
        lock = AsyncFsReadWriteLock(path, is_singleton=False)
        plain = filelock.ReadWriteLock(path, is_singleton=False)
        with plain.write_lock(), pytest.raises(filelock.Timeout):
            await lock.acquire_read(timeout=0.01)
        assert held_side(path) == (None, 0)
        async with lock.write_lock():
            with pytest.raises(filelock.Timeout):
                plain.acquire_read(timeout=0.01)
        await lock.close()

    run(main)


def test_close_ends_the_wait_of_a_task(path: str) -> None:
    async def main() -> None:
        lock = AsyncFsReadWriteLock(path)
        with holder("write", path):
            task = asyncio.create_task(lock.acquire_read())
            await until_in_line(path, 1)
            await lock.close()
            with pytest.raises(sqlite3.ProgrammingError, match="closed"):
                await task
            await until_in_line(path, 0)

    run(main)


def test_task_that_is_cancelled_in_a_release_holds_nothing(path: str) -> None:
    async def main() -> None:
        lock = AsyncFsReadWriteLock(path)
        inside = asyncio.Event()

        async def work() -> None:
            await lock.acquire_write()
            inside.set()
            await lock.release()

        task = asyncio.create_task(work())
        await inside.wait()
        task.cancel()
        await asyncio.wait([task])
        assert held_side(path) == (None, 0)
        async with lock.write_lock(timeout=0):
            pass
        await lock.close()

    run(main)
