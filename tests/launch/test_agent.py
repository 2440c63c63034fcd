"""`Agent` by itself: its treatment of nodes that have joined and stay silent."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from support.internals import system
from support.places import start_thread, until

from fscoord import HashStore, InsecurePathError, RendezvousTimeoutError, StoreUnavailableError
from fscoord.launch import Agent, Announcer, Console, Job, agent, worker
from fscoord.launch.agent import Access
from fscoord.rendezvous import C10dRendezvousBackend, DynamicRendezvousHandler, RendezvousSettings


def crews_of(handler, store):
    info = SimpleNamespace(store=store, rank=0, world_size=3)
    with Console(io.BytesIO(), io.BytesIO()) as console:
        return Agent(Job(["true"], 2, ""), handler, store, console)._crews(info)


def test_node_that_joined_and_says_nothing_is_named_after_the_stores_timeout(monkeypatch):
    monkeypatch.setattr(agent, "ROUND_CHECK_S", 0.01)
    store = HashStore(timeout=0.05)
    store.set("workers/1", "4")

    def run():
        with pytest.raises(RendezvousTimeoutError, match=r"group rank 2 in round 5 did not come within 0\.05 s"):
            crews_of(SimpleNamespace(is_current=lambda: True, round=5), store)

    start_thread(run).join()


def test_wait_for_a_node_that_says_nothing_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(agent, "ROUND_CHECK_S", 0.01)
    monkeypatch.setattr("fscoord._waiting.timing.FIRST_S", 0.0)
    caplog.set_level(logging.WARNING, "fscoord")
    stands = iter([True, False])
    assert crews_of(SimpleNamespace(is_current=lambda: next(stands), round=5), HashStore()) is None
    assert "still waiting for the number of workers of group rank 1, 2 in round 5" in caplog.text


def test_node_that_says_nothing_because_the_round_is_over_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(agent, "ROUND_CHECK_S", 0.01)
    assert crews_of(SimpleNamespace(is_current=lambda: False, round=5), HashStore()) is None


def test_worker_that_the_kernel_keeps_is_left_to_it_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(worker, "KILL_S", 0.01)
    stuck = worker._Worker(3, 0, "", lambda _: None)
    stuck._process = process = subprocess.Popen(["sleep", "600"])
    stuck.close()
    process.kill()
    process.wait()
    assert (
        f"rank 3 was killed 0.01 s ago and is blocked in the kernel: inspect the children of process {process.pid}"
        in caplog.text
    )


def test_signal_that_comes_while_workers_start_is_passed_on_to_those_that_run(monkeypatch, tmp_path):
    """It interrupts the start of the second worker, and the first one has the grace to end."""
    out, err = io.BytesIO(), io.BytesIO()
    console = Console(out, err)
    start = worker._Worker.start

    def interrupt(self, command, environment, passed):
        if self._rank == 1:
            until(lambda: b"[0] ready" in out.getvalue())
            os.kill(os.getpid(), signal.SIGINT)
        start(self, command, environment, passed)

    monkeypatch.setattr(worker._Worker, "start", interrupt)
    text = "trap 'echo told; exit' INT; echo ready; while :; do sleep 0.02; done"
    store = HashStore()
    settings = RendezvousSettings("id", 1, 1, keep_alive_interval=timedelta(hours=1))
    with console, DynamicRendezvousHandler(settings, C10dRendezvousBackend(store, "id"), store, "127.0.0.1") as handler:
        job = Job(["sh", "-c", text], 2, str(tmp_path))
        with pytest.raises(KeyboardInterrupt):
            Agent(job, handler, store, console, Announcer(console)).run()
    assert b"[0] told\n" in out.getvalue()
    assert b"SIGINT: the workers of this node have 30 s to end" in err.getvalue()


@pytest.fixture
def directory(tmp_path):
    """A descriptor of the directory of a worker's files."""
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def test_worker_whose_start_fails_leaves_no_process(monkeypatch, tmp_path, directory):
    """Its end would never be reported, so the group does not wait for it either."""
    monkeypatch.setattr(worker, "_create", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    console = Console(io.BytesIO(), io.BytesIO())
    streams = worker.Streams({None: worker.STDERR})
    with console, worker.WorkerGroup(["sleep", "600"], console, streams) as group:
        with pytest.raises(OSError, match="no space"):
            group.start(0, 0, {}, str(tmp_path), directory)
        assert group.running == 0


@pytest.mark.parametrize("started", [0, 1, 2])
def test_worker_for_which_no_thread_is_left_leaves_no_process_or_pipe(monkeypatch, tmp_path, started, directory):
    def start_thread(thread: threading.Thread) -> None:
        if thread.name == "fscoord-run":
            begun.append(thread)
            if len(begun) > started:
                raise RuntimeError("can't start new thread")
        start(thread)

    begun: list[threading.Thread] = []
    pipes: list[object] = []
    start, follow = threading.Thread.start, worker._Worker.follow
    monkeypatch.setattr(threading.Thread, "start", start_thread)
    monkeypatch.setattr(worker._Worker, "follow", lambda *given: (pipes.append(given[0]), follow(*given)))
    console = Console(io.BytesIO(), io.BytesIO())
    streams = worker.Streams({None: worker.STDOUT | worker.STDERR})
    with console, worker.WorkerGroup(["sleep", "600"], console, streams) as group:
        with pytest.raises(StoreUnavailableError, match=r"can't start new thread.*ulimit -u"):
            group.start(0, 0, {}, str(tmp_path), directory)
        assert group.running == 0
    the_worker = pipes[0]
    assert the_worker._process.returncode is not None
    assert the_worker._report.closed
    assert the_worker._process.stdout.closed
    assert the_worker._process.stderr.closed


def test_file_of_a_worker_is_new_and_in_the_open_directory(tmp_path):
    """Another user of the group may have put a link at the name, or may have renamed the directory meanwhile."""
    precious, moved = tmp_path / "precious", tmp_path / "moved"
    precious.write_text("precious")
    logs = tmp_path / "logs"
    logs.mkdir()
    fd = os.open(logs, os.O_RDONLY)
    try:
        (logs / "stdout.log").symlink_to(precious)
        with pytest.raises(FileExistsError):
            worker._create(str(logs / "stdout.log"), fd, None)
        logs.rename(moved)
        logs.symlink_to(tmp_path)
        worker._create(str(logs / "stderr.log"), fd, 0o660).close()
    finally:
        os.close(fd)
    assert precious.read_text() == "precious"
    assert (moved / "stderr.log").stat().st_mode & 0o777 == 0o660


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_log_directory_that_others_can_write_is_refused(tmp_path, mode):
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(mode)
    with pytest.raises(InsecurePathError, match="name another directory"):
        Access(HashStore()).open_log_directory(str(logs))


def test_log_directory_is_for_one_user_alone_to_change(tmp_path):
    """Also with a umask that lets the group write."""
    before = os.umask(0o002)
    try:
        access = Access(HashStore())
        fds = [access.open_log_directory(str(tmp_path / "logs" / "job"))]
        fds.append(access.make_directory_in(fds[0], "round-0"))
    finally:
        os.umask(before)
    assert [os.fstat(fd).st_mode & 0o777 for fd in fds] == [0o755, 0o755]
    system.close_quietly(*fds)
