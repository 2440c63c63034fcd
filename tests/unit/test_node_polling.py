"""One process of a host polls for all waiters of the host. If it leaves, dies or stops, they are still woken."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of, notifier_of, watcher_of
from support.places import start_thread
from support.processes import Processes, wait_until_ready

from fscoord import FileStore, StoreTimeoutError
from fscoord._log import mount, opened
from fscoord._log.format import record
from fscoord._log.shared import network, node_poller, node_waiter
from fscoord._log.shared.node_poller import node_bell_path
from fscoord._log.shared.node_waiter import NodeWaiter
from fscoord._log.wakeup import watcher
from fscoord._log.wakeup.doorbell import CELL, Doorbell
from fscoord._runtime import system
from fscoord._waiting.wait import THREAD_BACKEND

KEY = (b"x" * 16, 3, 4)
"""What tells a log from others: its id, and device and inode number of its first file."""

LIMIT_S = 60
"""How long anything may take; what is to be shown takes milliseconds, and a follower that is not rung sleeps longer."""

SLEEPS_S = 1000.0
"""How long followers sleep when nobody rings."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that counts as NFS, with one inside for the bells of the node."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr(node_poller, "FALLBACK", str(tmp_path / "node"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(opened, "find_mount", lambda path: mount.Mount("nfs4", str(tmp_path), ("rw",)))
    monkeypatch.setattr(network, "PATH_CHECK_S", math.inf)
    monkeypatch.setattr(system, "O_DIRECT", 0)
    monkeypatch.setattr(system, "nfs_recovers_lost_locks", lambda: False)
    monkeypatch.setattr(watcher, "SLOW_LAST_S", SLEEPS_S)
    monkeypatch.setattr(node_waiter, "OWN_POLL_S", SLEEPS_S)
    return tmp_path


@pytest.fixture
def workers(place: Path) -> Iterator[Callable[..., Any]]:
    """Start processes of this node that wait for keys."""
    with Processes("node_worker") as processes:

        def start(*keys: str, slow: float = SLEEPS_S) -> subprocess.Popen[str]:
            return processes.start("waits", json.dumps([str(place), slow, *keys]))

        yield start


def write_from_afar(store: FileStore, key: str) -> None:
    """Write as another host does, without a ring for this host."""
    log_of(store).update(record.SET, key.encode(), b"v", None, LIMIT_S)


def post_of(store: FileStore) -> Any:
    watched = watcher_of(store)
    return None if watched is None else watched.election


def until(what: Callable[[], object]) -> None:
    """Return when `what` is true."""
    deadline = system.time.monotonic() + LIMIT_S
    while not what():
        assert system.time.monotonic() < deadline
        system.time.sleep(0.001)


def beat(store: FileStore, times: int) -> None:
    """Return when the processes have asked the server so often."""
    for _ in range(times):
        beats = post_of(store).heartbeat_count()
        until(lambda beats=beats: post_of(store).heartbeat_count() != beats)


# Threads


def test_poller_thread_rings_the_waiters_of_its_process(place: Path) -> None:
    path = str(place / "log")
    with ExitStack() as stack:
        afar = stack.enter_context(FileStore(path, timeout=LIMIT_S))
        stores = [stack.enter_context(FileStore(path, timeout=LIMIT_S)) for _ in range(4)]
        threads = [stack.enter_context(start_thread(store.get, f"k{i}")) for i, store in enumerate(stores)]
        until(lambda: all(notifier_of(store)._waiters for store in stores))
        posts = {id(post_of(store)) for store in stores}
        assert len(posts) == 1
        post = post_of(stores[0])
        until(lambda: post._poller is not None and len(post._waiting) == 4)
        beat(stores[0], 1)
        for number, thread in enumerate(threads):  # the one that asks is among them: then another takes over
            write_from_afar(afar, f"k{number}")
            thread.join()
            assert thread.result == b"v"
        assert not post._held


def test_waiter_beside_a_poller_does_not_poll(place: Path) -> None:
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar, FileStore(path) as one, FileStore(path) as two:
        with start_thread(one.get, "k") as asks:
            until(lambda: post_of(one) is not None and post_of(one)._poller is not None)
            looks: list[float] = []
            refresh = log_of(two).refresh
            log_of(two).refresh = lambda left: (looks.append(left), refresh(left))[1]  # type: ignore[method-assign]
            with start_thread(two.get, "k") as follows:
                until(lambda: len(post_of(one)._waiting) == 2)
                beat(one, 5)  # the asker has told of what is new since both began
                at_first = len(looks)
                beat(one, 5)
                assert len(looks) == at_first
                write_from_afar(afar, "k")
            assert follows.result == b"v"
        assert asks.result == b"v"


def test_waiter_sleeps_on_while_the_poller_beats_and_looks_when_it_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

    class Sleeps:
        """A watcher that wakes nobody; and an election that another process has won."""

        has_events, event_count, deaths, bell, poll_last, backend = True, 0, 0, None, 0.1, THREAD_BACKEND

        def __init__(self, beats: list[int]) -> None:
            self.beats_seen = beats
            self.election = self

        def begin_sleep(self, waiting: object) -> None: ...

        def end_sleep(self, waiting: object) -> None: ...

        def add(self, waiting: object) -> None: ...

        def heartbeat_count(self) -> int:
            return self.beats_seen.pop(0)

        def try_elect(self, waiting: object, *, may_queue: bool, state: object = None) -> bool:
            return False

        def is_vacant(self, state: object) -> bool:
            return False

    clock = Clock()
    monkeypatch.setattr(system, "time", clock)
    watched: Any = Sleeps([1, 2, 2])
    waiting = NodeWaiter(watched, watched)
    monkeypatch.setattr(node_waiter, "OWN_POLL_S", math.inf)
    for _ in range(4):  # during the first sleep it does not queue for the poller's role yet
        assert waiting.max_sleep(math.inf) > 0
        clock.now += SLEEPS_S + 1
    assert waiting.max_sleep(math.inf) == 0, "the heartbeat has stopped"
    assert not waiting.was_rung
    assert watched.beats_seen == []


def test_waiter_whose_ring_had_no_signal_looks_a_second_later(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is killed between the two calls of a ring has cleared the cell, and woken no process."""

    def clear(bell: Doorbell, *numbers: int) -> bool:
        for number in numbers:
            os.pwrite(bell.fd, bytes(CELL), number * CELL)
        return True

    monkeypatch.setattr(watcher, "SLOW_LAST_S", 0.5)
    afar, one, two = (FileStore(str(place / "log"), timeout=LIMIT_S) for _ in range(3))
    with afar, one, two, start_thread(one.get, "k0") as polls:
        until(lambda: post_of(one) is not None and post_of(one)._poller is not None)
        shared: Any = watcher_of(one)
        with monkeypatch.context() as patch, start_thread(two.get, "k") as asks:
            patch.setattr(Doorbell, "ring", clear)
            until(lambda: any(each._may_queue for each in list(shared._sleeping)))
            write_from_afar(afar, "k")
        one.set("k0", "1")
    assert (asks.result, polls.result) == (b"v", b"1")


def test_waiter_beside_a_poller_keeps_its_deadline_without_a_ring(place: Path) -> None:
    path = str(place / "log")
    with FileStore(path) as one, FileStore(path, timeout=0.2) as two, start_thread(one.get, "k") as asks:
        until(lambda: post_of(one) is not None and post_of(one)._poller is not None)
        with pytest.raises(StoreTimeoutError, match="'k'"):
            two.get("k")
        two.set("k", "1")
    assert asks.result == b"1"


def test_new_wait_makes_a_slow_poller_hurry(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "SHARED_POLL_LAST_S", SLEEPS_S)
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar, FileStore(path) as one, FileStore(path) as two:
        with start_thread(one.get, "k1") as asks:
            until(
                lambda: (
                    post_of(one) is not None
                    and post_of(one)._byte(node_poller.INTERVAL_BYTE) > node_poller.SLOW_INTERVAL_MS
                )
            )
            pauses: list[float] = []  # of each poll: the poller slows down again, perhaps before the next look here
            heartbeat = post_of(one).heartbeat
            monkeypatch.setattr(post_of(one), "heartbeat", lambda pause: (pauses.append(pause), heartbeat(pause))[1])
            with start_thread(two.get, "k2") as follows:
                until(lambda: len(post_of(one)._waiting) == 2)
                until(lambda: any(1000 * pause <= node_poller.SLOW_INTERVAL_MS for pause in list(pauses)))
                two.set("k2", "1")
            assert follows.result == b"1"
            assert asks.is_alive()
            one.set("k1", "1")
        assert asks.result == b"1"
    afar.close()


# Processes


def test_poller_that_dies_is_replaced_at_once(place: Path, workers: Callable[..., Any]) -> None:
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar:
        first = workers("one", "two")
        wait_until_ready(first)
        until(lambda: bell_of(afar) and os.path.exists(bell_of(afar)) and _beats(bell_of(afar)))
        second = workers("one", "two")
        wait_until_ready(second)
        write_from_afar(afar, "one")
        assert first.stdout.readline() == second.stdout.readline() == "one\n"
        first.kill()
        write_from_afar(afar, "two")
        assert second.stdout.readline() == "two\n"


def test_poller_that_leaves_is_replaced_by_a_wait_that_does_not_queue_yet(
    place: Path, workers: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_waiter, "QUEUE_AFTER_S", math.inf)
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar, FileStore(path, timeout=LIMIT_S) as store:
        first = workers("one")
        wait_until_ready(first)
        until(lambda: bell_of(afar) and os.path.exists(bell_of(afar)) and _beats(bell_of(afar)))
        with start_thread(store.get, "two") as thread:
            until(lambda: post_of(store) is not None and len(post_of(store)._waiting) == 1)
            write_from_afar(afar, "one")
            assert first.stdout.readline() == "one\n"
            until(lambda: post_of(store)._held)
            write_from_afar(afar, "two")
        assert thread.result == b"v"


def test_waiter_beside_a_stopped_poller_polls_itself(place: Path, workers: Callable[..., Any]) -> None:
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar:
        first = workers("one", slow=0.05)
        wait_until_ready(first)
        until(lambda: os.path.exists(bell_of(afar)) and _beats(bell_of(afar)))
        os.kill(first.pid, signal.SIGSTOP)
        second = workers("one", slow=0.05)
        wait_until_ready(second)
        write_from_afar(afar, "one")
        assert second.stdout.readline() == "one\n"
        os.kill(first.pid, signal.SIGCONT)
        assert first.stdout.readline() == "one\n"


def bell_of(store: FileStore) -> str:
    return node_bell_path(log_of(store).handle.root.key)


def _beats(path: str) -> int:
    return Path(path).read_bytes()[node_poller.HEARTBEAT_BYTE : node_poller.HEARTBEAT_BYTE + 1] not in (b"", b"\0")


def test_forked_child_holds_no_election_descriptor_of_its_parent(place: Path) -> None:
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as store, start_thread(store.get, "k") as thread:
        until(lambda: post_of(store) is not None and post_of(store)._held)
        (fd,) = post_of(store)._held
        child = os.fork()
        if not child:
            try:
                os.fstat(fd)
            except OSError:
                os._exit(0)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        store.set("k", "1")
    assert thread.result == b"1"


# The directory


def test_node_bell_directory_is_private_and_names_differ_by_log_and_host(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(node_bell_path(KEY))
    log_id, device, inode = KEY
    others = [(b"y" * 16, device, inode), (log_id, device + 1, inode), (log_id, device, inode + 1)]
    assert len({node_bell_path(key) for key in (KEY, *others)}) == 4, "a copy of a log is another"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    monkeypatch.setattr(system, "hostname", lambda: "another")
    assert Path(node_bell_path(KEY)) != path
    assert Path(node_bell_path(KEY)).parent == path.parent


def test_runtime_directory_is_preferred_while_it_can_be_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = place / "runtime"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert node_bell_path(KEY).startswith(str(place / "node"))
    runtime.mkdir()
    directory = runtime / f"fscoord-{os.geteuid()}"
    directory.touch(0o600)
    assert node_bell_path(KEY).startswith(str(place / "node")), "a file is no directory, whosever it is"
    directory.unlink()
    assert node_bell_path(KEY).startswith(str(runtime))


@pytest.mark.parametrize("trap", ["open to all", "link", "file", "shared"])
def test_node_bell_directory_open_to_others_is_unused_and_waits_still_end(
    trap: str, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = place / "node" / f"fscoord-{os.geteuid()}"
    if trap == "link":
        (place / "elsewhere").mkdir(mode=0o700)
        directory.symlink_to(place / "elsewhere")
    elif trap == "file":
        directory.write_bytes(b"")
    else:
        directory.mkdir(mode=0o700)
        if trap == "open to all":
            directory.chmod(0o777)
        else:
            monkeypatch.setattr(node_poller, "find_mount", lambda path: mount.Mount("nfs", "/", ()))
    with pytest.raises(OSError) as caught:
        node_bell_path(KEY)
    assert caught.value.errno not in (None, errno.ENOENT), "it says what is wrong with the directory"
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar, FileStore(path, timeout=LIMIT_S) as store:
        with start_thread(store.get, "k") as thread:
            until(lambda: notifier_of(store)._waiters)
            write_from_afar(afar, "k")
        assert thread.result == b"v"
    assert "can't be used" in caplog.text


@pytest.mark.parametrize("harm", ["truncate", "remove", "make a link"])
def test_damaged_node_bell_only_delays_a_waiter(harm: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "SLOW_LAST_S", 0.05)
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar, FileStore(path) as one, FileStore(path) as two:
        with start_thread(one.get, "k") as first, start_thread(two.get, "k") as second:
            until(lambda: post_of(one) is not None and len(post_of(one)._waiting) == 2)
            bell = bell_of(afar)
            if harm == "truncate":
                os.truncate(bell, 0)
            elif harm == "remove":
                os.unlink(bell)
            else:
                os.symlink("/nowhere", place / "link")
                os.replace(place / "link", bell)  # in one step, for a waiter makes another bell where there is none
            write_from_afar(afar, "k")
        assert first.result == second.result == b"v"
