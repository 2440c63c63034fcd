"""Runs the tests of other packages on the recipes of fscoord, and prints the numbers for each file.

    python tests/with_peers/own_tests.py [PEER [FILE...]]

A peer is a key of `FILES`, and all peers run without one. Nothing of a peer is in this repository. The tests of CPython
are those of the Python that runs this script. pip downloads the source distribution of another peer to a temporary
directory, and installs the packages that build it; or FSCOORD_PEERS names a directory with the archives,
``PEER-VERSION.tar.gz``. `DIFFERENCES` has each test that does not pass, with the reason. The exit code is 1 if another
test fails.

A shim lets the tests use fscoord. For CPython these are `cpython.py` and `cpython_processes.py`, whose classes inherit
the tests. For another peer it is a plugin of pytest, ``as_PEER.py``, that puts classes in the place of the peer's own.

To add a class of CPython's tests, add it to one of the two, and the tests that differ to `DIFFERENCES`. To add a peer,
write its shim, and add it to `FILES`, to `USES` and to the dependency group `peers`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Final
from xml.etree import ElementTree as ET

FILES: Final[dict[str, tuple[str, ...]]] = {
    "cpython": ("cpython.py", "cpython_processes.py"),
    "fasteners": ("tests/test_lock.py", "tests/test_reader_writer_lock.py"),
    "huey": tuple(
        f"huey/tests/test_{each}.py"
        for each in ("api", "asyncio", "consumer", "immediate", "priority", "signals", "storage")
    ),
    "kazoo": ("kazoo/tests/test_lock.py", "kazoo/tests/test_partitioner.py", "kazoo/tests/test_queue.py"),
    "persist-queue": ("persistqueue/tests/test_queue.py", "persistqueue/tests/test_priorityqueue.py"),
    "filelock": ("tests/core/test_*.py", "tests/async_lock/test_*.py", "tests/sqlite/test_*.py"),
}
"""{peer: its files of tests, as patterns below the root of its source distribution}. filelock's tests of soft locks and
of private modules are in other folders."""

USES: Final = re.compile(
    r"lock_tests|_test_multiprocessing|\b(Async)?(FileLock|ReadWriteLock)\b|ReaderWriterLock|huey\.tests\.base"
    r"|KazooTestCase|persistqueue import"
)
"""Matches the text of a file whose tests use a class that a shim replaces. Other files do not run."""

LIMIT_S: Final = 240
"""The time limit of one test, in seconds. filelock's own limit is 20, too short for a busy machine."""

REPR = "the text of `repr` names the lock and its store"
FORK = "`_at_fork_reinit` is a private method; the package renews its locks in a forked child by itself"
LIMITLESS = "a time above `threading.TIMEOUT_MAX` is a long time, and not an error"
COUNT = "`_recursion_count` is a private method"
ACTION = "a `CyclicBarrier` has no action: the process that gets 0 can do it"
AGAIN_BY_THREAD = "the sides of a `ReadWriteLock` are re-entrant, and kazoo's are not"
NODES = "the test uses a node of ZooKeeper, or ends a session and begins another"
FAST = "the next contender acquires before the test sees that the one before has released, and the test hangs"
TWICE = "a second acquisition by one object waits, as in `threading`, and in kazoo it returns at once"
LEAVES = "on a busy machine, a thread leaves the barrier of the test before another has looked, and the test hangs"
MOCK = "the test slows down the locks of kazoo's partitioner, and fscoord's has none"
LEFT_OUT = (NODES, FAST, TWICE, LEAVES, MOCK)
"""The reasons of tests that do not run, because they do not end, or would test nothing."""

STAYS = "as many partitions for each member, but other ones: a member keeps those that it has"
PRIORITY = "a priority is any signed 32-bit integer"

NAME = "the test compares the name of the class, or uses it as a name in filelock in a child process"
MESSAGE = "fscoord refuses the deadlock or the acquisition first, with another message of the same RuntimeError"
CLOCK = "the test counts pauses or seconds of filelock's polls, and the wait for the lock in the store has none"
STORE = "the test lists, counts or moves files and descriptors, and the store has some of its own"
CREATED = "fscoord creates the lock file before filelock looks at the path or the file system"
AGAIN = "after a failed release, the lock in the store is held until the release is called again"
WAITS = "the test patches or blocks filelock's own wait, and contenders wait for the lock in the store instead"
EXCLUDES = "two objects of one process share a hold in filelock, and exclude each other in the store"
YIELDS = "on a busy machine, the lock in the store is acquired in a thread, and other callbacks run meanwhile"
PATCHES = "the test patches `ReadWriteLock`, which is fscoord's class, and the backend is an object of filelock's class"
ALONE = "the test fails with filelock alone, too (Python 3.11)"
SLOW = "the test has many contenders and a time limit, which a busy machine exceeds"


DIFFERENCES: Final[dict[str, str]] = {
    "cpython.py::LockTests::test_at_fork_reinit": FORK,
    "cpython.py::LockTests::test_locked_repr": REPR,
    "cpython.py::LockTests::test_repr": REPR,
    "cpython.py::LockTests::test_timeout": LIMITLESS,
    "cpython.py::RLockTests::test_locked_repr": REPR,
    "cpython.py::RLockTests::test_recursion_count": COUNT,
    "cpython.py::RLockTests::test_repr": REPR,
    "cpython.py::RLockTests::test_timeout": LIMITLESS,
    "cpython.py::BoundedSemaphoreTests::test_repr": REPR,
    "cpython.py::EventTests::test_at_fork_reinit": FORK,
    "cpython.py::EventTests::test_repr": REPR,
    "cpython.py::ConditionTests::test_acquire": "a lock of one process can't be the lock of a `Condition`",
    "cpython.py::BarrierTests::test_action": ACTION,
    "cpython.py::BarrierTests::test_repr": REPR,
    "cpython.py::SimpleQueueTests::test_references": "an item is a value of the store, and the test's can't be pickled",
    "cpython_processes.py::BarrierTests::test_action": ACTION,
    "cpython_processes.py::EventTests::test_repr": REPR,
    "cpython_processes.py::QueueTests::test_closed_queue_put_get_exceptions": (
        "a queue has no `close`: its store has, and a closed store raises another error"
    ),
    "cpython_processes.py::QueueTests::test_queue_feeder_donot_stop_onexc": (
        "the caller of `put` gets the error of an item that can't be pickled"
    ),
    "persistqueue/tests/test_queue.py::TestPersist::test_del": "the test names private files of persist-queue",
    "persistqueue/tests/test_queue.py::TestPersist::test_partial_write": (
        "bytes at the end of the log that are no beginning of a record are damage, which `fscoord verify` explains"
    ),
    "kazoo/tests/test_lock.py::KazooLockTests::test_lock": FAST,
    "kazoo/tests/test_lock.py::KazooLockTests::test_rw_lock": FAST,
    "kazoo/tests/test_lock.py::KazooLockTests::test_lock_many_threads": LEAVES,
    "kazoo/tests/test_lock.py::TestSemaphore::test_multiple_acquire_and_release": TWICE,
    "kazoo/tests/test_lock.py::KazooLockTests::test_lock_ephemeral": NODES,
    "kazoo/tests/test_lock.py::KazooLockTests::test_lock_reconnect": NODES,
    "kazoo/tests/test_lock.py::KazooLockTests::test_read_lock": AGAIN_BY_THREAD,
    "kazoo/tests/test_lock.py::KazooLockTests::test_write_lock": AGAIN_BY_THREAD,
    "kazoo/tests/test_lock.py::TestSemaphore::test_acquire_after_cancelled": "there is no attribute `cancelled`",
    "kazoo/tests/test_lock.py::TestSemaphore::test_handle_session_loss": NODES,
    "kazoo/tests/test_lock.py::TestSemaphore::test_inconsistent_max_leases_other_data": NODES,
    "kazoo/tests/test_partitioner.py::KazooPartitionerTests::test_connection_loss": STAYS,
    "kazoo/tests/test_partitioner.py::KazooPartitionerTests::test_party_expansion": STAYS,
    "kazoo/tests/test_partitioner.py::KazooPartitionerTests::test_race_condition_new_partitioner_during_the_lock": MOCK,
    "kazoo/tests/test_partitioner.py::KazooPartitionerTests::test_race_condition_new_partitioner_steals_the_lock": MOCK,
    "kazoo/tests/test_queue.py::KazooQueueTests::test_queue_validation": PRIORITY,
    "kazoo/tests/test_queue.py::KazooLockingQueueTests::test_queue_validation": PRIORITY,
    "core/test_acquire_signal.py::test_acquire_from_a_signal_handler_during_a_release_is_refused": MESSAGE,
    "core/test_fork_descriptors.py::test_unrelated_acquisitions_reach_filesystem_boundary_concurrently": STORE,
    "core/test_interruption.py::test_early_acquire_refuses_same_stack_reentry": MESSAGE,
    "core/test_on_acquired.py::test_on_acquired_fails_closed_on_enosys": NAME,
    "core/test_relative_paths.py::test_nested_acquire_without_working_directory_preserves_hold": STORE,
    "core/test_relative_paths.py::test_shared_singleton_refuses_moved_relative_path": CREATED,
    "core/test_relative_paths.py::test_waiter_after_directory_rename_does_not_lock_a_new_file": STORE,
    "core/test_release_interruption.py::test_errno_after_unix_unlock_refuses_reentrant_acquire": AGAIN,
    "core/test_shutdown.py::test_force_release_keeps_main_thread": NAME,
    "core/test_shutdown.py::test_lock_a_daemon_thread_holds_at_exit_stays_held": NAME,
    "core/test_shutdown.py::test_lock_held_at_exit_is_released_silently": NAME,
    "core/test_subclass_options.py::test_singleton_cache_hit_rejects_unknown_option": (
        "the constructor passes all options on, so that only filelock's constructor refuses an unknown one"
    ),
    "core/test_threading.py": SLOW,
    "core/test_timeout.py::test_cancel_check_log_message": CLOCK,
    "core/test_timeout.py::test_poll_interval_acquire_override": CLOCK,
    "core/test_timeout.py::test_poll_interval_used_by_context_manager": CLOCK,
    "core/test_timeout.py::test_poll_intervall_deprecated": "the warning names fscoord's line, which calls filelock",
    "core/test_timeout_validation.py::test_timeout_at_exact_deadline_with_virtual_clock": CLOCK,
    "async_lock/test_acquire.py::test_cancel_check_log_message": CLOCK,
    "async_lock/test_acquire.py::test_wait_message_logged": CLOCK,
    "async_lock/test_acquire_cancellation.py::test_acquire_cancellation_before_executor_start_rolls_back": YIELDS,
    "async_lock/test_acquire_cancellation.py::test_non_executor_immediate_acquire_precedes": YIELDS,
    "async_lock/test_admission.py::test_acquires_giving_up_behind_a_waiter_leave_the_lock_releasable": SLOW,
    "async_lock/test_backend_calls.py::test_fallback_to_soft_disabled_raises_enosys": NAME,
    "async_lock/test_backend_calls.py::test_fallback_to_soft_reprobes_after_chdir": CREATED,
    "async_lock/test_backend_calls.py::test_preserve_lock_file_async_release_keeps_pathname": NAME,
    "async_lock/test_paths.py::test_async_shared_singleton_refuses_moved_relative_path": CREATED,
    "async_lock/test_read_write.py::test_async_write_acquire_on_a_worker_holding_the_sync_write_lock": EXCLUDES,
    "async_lock/test_read_write.py::test_async_write_hold_refuses_a_sync_writer_on_the_entering_worker": EXCLUDES,
    "async_lock/test_release_cancellation.py::test_errno_after_async_unix_unlock_refuses_reentrant": AGAIN,
    "sqlite/test_async_cancellation.py::test_acquire_cancellation_before_executor_start_rolls_back": WAITS,
    "sqlite/test_async_cancellation.py::test_acquire_cancellation_while_sqlite_waits_rolls_back": WAITS,
    "sqlite/test_async_close.py::test_async_cancelled_acquire_after_failed_close_reconciles_hold": ALONE,
    "sqlite/test_async_close.py::test_async_close_that_fails_before_any_acquire_leaves_the_wrapper": PATCHES,
    "sqlite/test_async_close.py::test_async_failed_close_keeps_pending_acquire_waiting": PATCHES,
    "sqlite/test_async_settings.py::test_async_contended_acquire_rejects_invalid_timeout": (
        "a Boolean as timeout is a number of seconds for fscoord, and filelock refuses it after the wait in the store"
    ),
    "sqlite/test_async_settings.py::test_async_contended_instance_timeout_rejects_invalid_value": (
        "a Boolean as timeout is a number of seconds for fscoord, and filelock refuses it after the wait in the store"
    ),
    "sqlite/test_async_contention.py::test_many_waiting_writers_drain_after_reader_releases": SLOW,
    "sqlite/test_async_singletons.py::test_async_re": EXCLUDES,
    "sqlite/test_connection.py::test_closing_every_instance_closes_its_descriptors": STORE,
    "sqlite/test_connection_side_files.py::test_private_directory": STORE,
    "sqlite/test_lock.py::test_refused_database_open_preserves_deadline_after_a_slow_refusal": CLOCK,
    "sqlite/test_transactions_connection.py::test_busy_timeout_recomputed_after_journal_mode": CLOCK,
}
"""{the beginning of a test's id, below ``tests/``: why it does not pass, or passes on an idle machine only}."""

HERE: Final = Path(__file__).resolve().parent


class NoSourceError(Exception):
    """The source distribution of a peer could not be downloaded, or pip could not build it."""


def version_of(peer: str) -> str:
    """Return the version of the peer that is installed."""
    return python_version() if peer == "cpython" else version(peer)


def root_of(peer: str, directory: Path) -> Path:
    """Return the directory with the tests of `peer`. Unpack its source distribution in `directory`.

    Raises:
        NoSourceError: pip did not get the source distribution.
    """
    if peer == "cpython":
        return HERE
    name = f"{peer.replace('-', '_')}-{version(peer)}"
    archive = Path(os.environ.get("FSCOORD_PEERS", directory)) / f"{name}.tar.gz"
    if not archive.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", peer]
        done = subprocess.run([*pip, f"{peer}=={version(peer)}", "--dest", str(archive.parent)], timeout=600)
        if done.returncode:
            raise NoSourceError(
                f"pip did not get {archive.name}; put it in a directory, and name that by FSCOORD_PEERS"
            )
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory / name


def run(peer: str, root: Path, file: str, report: Path) -> dict[str, str]:
    """Run the tests of `file`. Return {test id: outcome}."""
    report.unlink(missing_ok=True)
    plugins = ["no:cacheprovider", "no:xdist", "no:randomly", "with_peers.own_tests"]
    shim = f"as_{peer.replace('-', '_')}"
    if (HERE / f"{shim}.py").exists():
        plugins.append(f"with_peers.{shim}")
    command = [sys.executable, "-m", "pytest", "-q", *(word for plugin in plugins for word in ("-p", plugin))]
    command += [f"--timeout={LIMIT_S}", f"--junitxml={report}", "--tb=short", file]
    if peer == "cpython":
        # These tests check for threads that they leak by themselves. The settings here make a warning of pytest-asyncio
        # an error, and give modules names by which a spawned child does not find them.
        command += ["--noconftest", "-p", "no:asyncio", "--import-mode=prepend"]
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=3600
    )
    if not report.exists():
        print(done.stdout[-2000:] + done.stderr[-2000:])
        return {f"{file}::(pytest ended with {done.returncode})": "failed"}
    outcomes = {}
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        owner = case.get("classname", "").rpartition(".")[2]
        names = [file.removeprefix("tests/"), *([] if owner == Path(file).stem else [owner]), case.get("name", "")]
        outcomes["::".join(names)] = outcome
    return outcomes


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Leave out the tests that do not run: this script is a plugin of the pytest that it starts."""
    items[:] = [each for each in items if DIFFERENCES.get(each.nodeid) not in LEFT_OUT]


def judge(peer: str, files: list[str]) -> list[str]:
    """Run the tests of `peer`, or of some `files` of it. Print the numbers. Return the ids of unexpected failures."""
    unexpected: list[str] = []
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix=f"{peer}-") as name:
        try:
            root = root_of(peer, Path(name))
        except NoSourceError as error:
            print(f"{peer}: {error}", flush=True)
            return [f"{peer}: {error}"]
        found = sorted(each for pattern in FILES[peer] for each in root.glob(pattern))
        for file in files or [str(each.relative_to(root)) for each in found if USES.search(each.read_text())]:
            outcomes = run(peer, root, file, Path(name) / "report.xml")
            counts = Counter(outcomes.values())
            total += counts
            print(
                f"{file}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped", flush=True
            )
            for test in [test for test, outcome in outcomes.items() if outcome == "failed"]:
                reason = next((why for start, why in DIFFERENCES.items() if test.startswith(start)), "")
                print(f"    {test.partition('::')[2]}: {reason or 'not expected'}", flush=True)
                unexpected += [] if reason else [test]
    numbers = ", ".join(f"{total[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
    print(f"{peer} {version_of(peer)}: {numbers}", flush=True)
    return unexpected


def main(words: list[str]) -> int:
    unexpected = [test for peer in words[:1] or FILES for test in judge(peer, words[1:])]
    print("".join(f"not expected: {test}\n" for test in unexpected), end="")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
