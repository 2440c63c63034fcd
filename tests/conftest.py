"""The base of every test: a seed that a failure prints, a check for leaks, and the fixtures that need care.

`FSCOORD_SEED=n` repeats a run's random draws; `FSCOORD_SCALE=x` multiplies the sizes that tests ask `scale` for.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import itertools
import os
import pickle
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from support.internals import log_module as log_file, mount_module as mount, opened, resend_lost_signals

from fscoord.aio import _executor

SEED = int(os.environ.setdefault("FSCOORD_SEED", str(random.SystemRandom().randrange(2**32))))  # for workers as well
SCALE = float(os.environ.get("FSCOORD_SCALE", "1"))
NOBODY = 65534
GROUP = 65432
"""The group of those who are `as_member`; its users have groups of their own besides, and no name."""
PATIENCE_S = 60
"""How long a thread or a child may take to end before the test that left it is failed. Nothing waits that long."""
HUGE_PAGE = 2 << 20
MADV_COLLAPSE = 25
"""Of madvise(2), since Linux 6.1."""
PROGRAMS = frozenset({"cli", "doctor", "launch", "test_demo.py"})
"""Of `tests`, what has the mark `program`."""

hypothesis.settings.register_profile("fscoord", deadline=None, print_blob=True, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("fscoord")


# The session: its bytecode, its signals


def pytest_configure(config: pytest.Config) -> None:
    _keep_bytecode(config)
    _let_keys_end_programs()
    _executor.IDLE_S = 0.01  # type: ignore[misc]  # or the check for leaks would wait for threads of `fscoord.aio`


def _keep_bytecode(config: pytest.Config) -> None:
    """Keep bytecode in pytest's cache where the environment forbids to write it beside the source.

    Tests start thousands of interpreters. Each would compile the package again, which takes three times as long as the
    rest of its start. Each worker of pytest-xdist would also rewrite the assertions of all tests, which is more than
    half of the time that it needs to collect them. The workers start later, and inherit the directory.
    """
    if sys.dont_write_bytecode:
        if config.pluginmanager.has_plugin("cacheprovider"):
            directory = str(config.cache.mkdir("bytecode"))
            _forget_bytecode(directory)
        else:
            directory = tempfile.mkdtemp(prefix="fscoord-bytecode-")
            config.add_cleanup(lambda: shutil.rmtree(directory, ignore_errors=True))  # a lost child may write there
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = directory
        sys.dont_write_bytecode = False


def _forget_bytecode(directory: str) -> None:
    """Remove the bytecode of directories that are gone, such as those of earlier tests."""
    for folder, _, _ in os.walk(directory):
        if not os.path.isdir(folder.removeprefix(directory) or "/"):
            shutil.rmtree(folder, ignore_errors=True)  # another session may do the same


def _let_keys_end_programs() -> None:
    """Let the keys that end programs, and SIGHUP, end what they should, here and in what tests start: shells start what
    is to run in the background without the former, and nohup(1) without the latter.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", type=int, default=1, help="run one in so many tests marked `exhaustive`, by FSCOORD_SEED"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Say in the report which tests need not run on every Python, for .ci/count.py."""
    if item.path.relative_to(Path(__file__).parent).parts[0] in PROGRAMS:
        item.add_marker("program")
    marks = ("exhaustive", "program", "once")
    item.user_properties += [("marker", name) for name in marks if item.get_closest_marker(name)]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that `--sample` does not draw, and under coverage those that interrupt themselves.

    A draw depends on the seed and the name of the test alone, so that all workers and all versions of Python draw the
    same tests. An interrupt could leave coverage's own lock locked. Not even the time limit of a test ends that,
    because the code of the limit is measured, too.
    """
    sample = config.getoption("sample")
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
    out = {item for item in exhaustive if random.Random(f"{SEED} {item.nodeid}").randrange(sample)}
    coverage = sys.modules.get("coverage")
    if coverage is not None and coverage.Coverage.current() is not None:
        out |= {item for item in items if "no_ctrl_c_is_lost" in getattr(item, "fixturenames", ())}
    if out:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which need not be there
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: two workers for each core, because half of a test's time is spent in waits."""
    return 2 * (os.cpu_count() or 1)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Let one worker of pytest-xdist rewrite the assertions of all tests, if there is no bytecode of them yet.

    That takes more than half of the time that a worker needs to collect the tests. The others wait for it.
    """
    worker, module = getattr(session.config, "workerinput", None), Path(__file__).parent / "test_tidy.py"
    rewritten = f"{module.stem}.{sys.implementation.cache_tag}-pytest-*.pyc"
    if worker is None or any(Path(importlib.util.cache_from_source(str(module))).parent.glob(rewritten)):
        return (yield)
    is_first = worker["workerid"] == "gw0"
    collected, until = Path(session.config.option.basetemp).parent / "collected", time.monotonic() + PATIENCE_S
    while not is_first and not collected.exists() and time.monotonic() < until:
        time.sleep(0.02)
    try:
        return (yield)
    finally:
        collected.touch()


def pytest_collection_finish() -> None:
    """Take the collected tests out of the reach of the garbage collector, which they keep busy for 0.3 s each time.

    Many tests collect garbage, and so do the children that they fork. A child would also copy the pages of all objects.
    """
    gc.collect()
    gc.freeze()
    _join_pages()


def _join_pages() -> None:
    """Put the heap on huge pages, where the system has them: a fork copies one entry in place of 512.

    A worker that has collected all tests has 150 MB, and tests fork it thousands of times. Most of the time of a fork,
    and of the child's end, goes into the table of pages: it was three quarters of the processor time of those tests.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    heap = re.compile(r"(\w+)-(\w+) rw-p 00000000 00:00 0 *(\[heap\])?\n")
    for line in Path("/proc/self/maps").read_text().splitlines(keepends=True):
        place = heap.fullmatch(line)
        if place is not None:
            start, end = -(-int(place[1], 16) // HUGE_PAGE) * HUGE_PAGE, int(place[2], 16) // HUGE_PAGE * HUGE_PAGE
            if start < end:
                madvise(start, end - start, MADV_COLLAPSE)  # it may refuse: then all is as it was


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of the logs, one for each time that a handle has read its log. On NFS such a read is a request."""
    found: list[str] = []
    refresh = log_file.Log.refresh

    def counted(log: Any, *given: Any) -> Any:
        found.append(log.path)
        return refresh(log, *given)

    monkeypatch.setattr(log_file.Log, "refresh", counted)
    return found


@pytest.fixture
def no_ctrl_c_is_lost() -> Iterator[None]:
    """For tests that interrupt themselves: what Python loses, in a weak reference's callback for one, comes again."""
    with resend_lost_signals():
        yield


# Seeds


def pytest_report_header() -> str:
    return f"fscoord: FSCOORD_SEED={SEED} FSCOORD_SCALE={SCALE:g}"


def pytest_sessionstart(session: pytest.Session) -> None:
    """Record the version of Python in the report.

    The fixture `record_testsuite_property` calls the same method, but in a worker of pytest-xdist, which has no report.
    """
    for plugin in session.config.pluginmanager.get_plugins():
        if hasattr(plugin, "add_global_property"):
            plugin.add_global_property("python", f"{sys.version_info.major}.{sys.version_info.minor}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.append(("random draws", f"repeat them with FSCOORD_SEED={SEED} pytest {item.nodeid!r}"))
    return report


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's own seed: the same in every order and selection of tests."""
    return zlib.crc32(request.node.nodeid.encode(), SEED)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """A generator of this test's own, repeatable by FSCOORD_SEED."""
    return random.Random(seed)


@pytest.fixture
def scale() -> Callable[[int], int]:
    """Give `scale(n)`: n times FSCOORD_SCALE, at least 1."""
    return lambda count: max(1, round(count * SCALE))


# Thousands of tests, and of logs


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's own, without its search of all others for a free number, and its link to the last one: those take
    longer than most of these tests.
    """
    name = re.sub(r"\W", "_", request.node.name)[:30]
    directory = tmp_path_factory.getbasetemp() / f"{name}-{next(_directories)}"
    directory.mkdir(0o700)
    return directory


_directories = itertools.count()


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory, if there is one: for tests that make, sync and remove files by the thousand, and prove
    what does not depend on what they are on.
    """
    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    directory = Path(tempfile.mkdtemp(prefix="fscoord-test-", dir=parent))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def mounts_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open logs by the thousand on one mount: it is looked up once, which is a third of an open."""
    look_up = functools.cache(mount.find_mount)
    monkeypatch.setattr(log_file, "find_mount", look_up)
    monkeypatch.setattr(opened, "find_mount", look_up)


# Leaks: what a test opens, starts or forks is gone when it ends


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    random.seed(SEED)
    descriptors, threads, children = _descriptors(), set(threading.enumerate()), _children()
    yield
    lingering = [thread for thread in threading.enumerate() if thread not in threads]
    until = time.monotonic() + PATIENCE_S
    for thread in lingering:
        thread._started.wait(PATIENCE_S)  # type: ignore[attr-defined]  # a start may be under way; `join` would raise
        thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in lingering):  # a handle that waits to be collected may keep one
        gc.collect()
        for thread in lingering:
            thread.join(PATIENCE_S)
    leaks = [f"thread {thread.name}" for thread in lingering if thread.is_alive()]
    if _descriptors() - descriptors or _children() - children:
        gc.collect()
    leaks += [f"descriptor {number} -> {target}" for number, target in sorted(_descriptors() - descriptors)]
    leaks += [f"child process {pid}: {name}" for pid, name in sorted(_children() - children)]
    assert not leaks, f"left behind: {', '.join(leaks)}"


def _descriptors() -> set[tuple[int, str]]:
    """Every open descriptor and what it leads to, without those that multiprocessing keeps for the whole process."""
    kept = {resource_tracker._resource_tracker._fd, forkserver._forkserver._forkserver_alive_fd}
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if int(name) not in kept:
            found.add((int(name), target))
    return found


def _children() -> set[tuple[int, str]]:
    """Every child of this process, zombies too, without those that multiprocessing keeps for the whole process."""
    kept = {resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid}
    found = set()
    for task in os.listdir("/proc/self/task"):
        try:
            pids = Path(f"/proc/self/task/{task}/children").read_text().split()
        except (FileNotFoundError, ProcessLookupError):  # that thread has just ended
            continue
        for pid in map(int, pids):
            if pid not in kept:
                found.add((pid, _command(pid)))
    return found


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return os.fsdecode(b" ".join(words).strip()) or "a zombie"


# Another user


@pytest.fixture
def public_dir() -> Iterator[Path]:
    """A fresh directory that every user may enter and write to: pytest's own are for one user alone."""
    directory = Path(tempfile.mkdtemp(prefix="fscoord-test-", dir="/tmp"))  # TMPDIR may lead below a closed directory
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; `support.disks.fill` fills it."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    directory = tmp_path / "small"
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)], check=True)
    yield directory
    subprocess.run(["umount", str(directory)], check=True)


@pytest.fixture
def as_nobody() -> Callable[..., Any]:
    """Give `as_nobody(function, *args)`: call it in a forked child that is user nobody for good; return its result.

    Whatever it raises is raised here. Modules that it imports must be imported before: nobody may not be able to read
    them. The result travels pickled.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    _import_all()
    return functools.partial(_call_as, NOBODY, ())


@pytest.fixture
def as_member() -> Callable[..., Any]:
    """Give `as_member(uid, function, *args)`: as `as_nobody`, but a user of this number who is in the group `GROUP`."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    _import_all()
    return lambda uid, function, *args: _call_as(uid, (GROUP,), function, *args)


def _import_all() -> None:
    for module in ("portalocker.portalocker", "socket", "watchdog.observers.inotify_c", "fscoord"):
        importlib.import_module(module)


def _call_as(uid: int, groups: Sequence[int], function: Callable[..., Any], *args: Any) -> Any:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _report_as(uid, groups, writer, function, args)
    os.close(writer)
    try:
        packed = _read_all(reader, time.monotonic() + PATIENCE_S)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # a no-op if it has ended: nobody has waited for it yet
        _, status = os.waitpid(pid, 0)
    assert packed, f"the child died without a word (wait status {status})"
    failed, result = pickle.loads(packed)
    if failed:
        raise result
    return result


def _report_as(
    uid: int, groups: Sequence[int], writer: int, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        try:
            os.setgroups(groups)
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            assert os.getresuid() == (uid,) * 3, "did not drop root"
            with pytest.raises(PermissionError):
                os.setuid(0)
            outcome: tuple[bool, Any] = (False, function(*args))
        except BaseException as error:
            outcome = (True, _portable(error))
        packed = pickle.dumps(outcome)
        while packed:
            packed = packed[os.write(writer, packed) :]
    finally:
        os._exit(0)


def _portable(error: BaseException) -> BaseException:
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return AssertionError("".join(traceback.format_exception(error)))


def _read_all(descriptor: int, until: float) -> bytes:
    parts = []
    while True:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, until - time.monotonic()))
        assert ready, f"the child did not answer within {PATIENCE_S} s"
        part = os.read(descriptor, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
