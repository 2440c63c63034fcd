"""One process of a host polls for all waiters of the host. If it leaves, dies or stops, they are still woken."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of, notifier_of, watcher_of
from support.places import start_thread
from support.processes import Processes, stop, wait_until_ready

from fscoord import FileStore
from fscoord._log import mount, opened
from fscoord._log.format import record
from fscoord._log.shared import network, node_poller, node_waiter
from fscoord._log.shared.node_poller import node_path
from fscoord._log.wakeup import watcher
from fscoord._runtime import system

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


# Threads


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


def test_waiter_beside_a_stopped_poller_polls_itself(place: Path, workers: Callable[..., Any]) -> None:
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar:
        first = workers("one", slow=0.05)
        wait_until_ready(first)
        until(lambda: os.path.exists(bell_of(afar)) and _beats(bell_of(afar)))
        stop(first.pid)
        second = workers("one", slow=0.05)
        wait_until_ready(second)
        write_from_afar(afar, "one")
        assert second.stdout.readline() == "one\n"
        os.kill(first.pid, signal.SIGCONT)
        assert first.stdout.readline() == "one\n"


def bell_of(store: FileStore) -> str:
    return node_path(log_of(store).handle.root.key)


def _beats(path: str) -> int:
    return Path(path).read_bytes()[node_poller.HEARTBEAT_BYTE : node_poller.HEARTBEAT_BYTE + 1] not in (b"", b"\0")


# The directory


def test_runtime_directory_is_preferred_while_it_can_be_used(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = place / "runtime"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert node_path(KEY).startswith(str(place / "node"))
    runtime.mkdir()
    directory = runtime / f"fscoord-{os.geteuid()}"
    directory.touch(0o600)
    assert node_path(KEY).startswith(str(place / "node")), "a file is no directory, whosever it is"
    directory.unlink()
    assert node_path(KEY).startswith(str(runtime))


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
        node_path(KEY)
    assert caught.value.errno not in (None, errno.ENOENT), "it says what is wrong with the directory"
    path = str(place / "log")
    with FileStore(path, timeout=LIMIT_S) as afar, FileStore(path, timeout=LIMIT_S) as store:
        with start_thread(store.get, "k") as thread:
            until(lambda: notifier_of(store)._waiters)
            write_from_afar(afar, "k")
        assert thread.result == b"v"
    assert "can't be used" in caplog.text
