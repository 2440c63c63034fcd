"""The errors of NFS 3's lock manager for a file that another host has removed, and the reaction of a handle.

Measured on a kernel server and its clients: to lock such a file is ESTALE. To unlock it is ENOLCK if it was locked, and
if this host never locked it at all, for then the client asks the server.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.internals import log_of
from support.places import start_thread
from support.shared_os import SharedOs, shared_os

from fscoord import FileStore, StoreTimeoutError
from fscoord._log import log as file
from fscoord._log.locking import kernel_wait
from fscoord._log.log import MOVED
from fscoord._log.shared import network
from fscoord._runtime import system

LIMIT_S = 60
CALLS = 400
"""An operation makes fewer calls."""
COHERENCE = ["direct", "locked"]


class LockManager(ModuleType):
    """`fcntl` whose server has forgotten each file that has no name any more.

    Attributes:
        before: is called before each lock that is asked for, and before each that is given back.
    """

    def __init__(self) -> None:
        super().__init__("fcntl")
        self.before: Callable[[], object] = bool

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def fcntl(self, fd: int, command: int, argument: Any = 0) -> Any:
        if command not in (fcntl.F_OFD_SETLK, fcntl.F_OFD_SETLKW):
            return fcntl.fcntl(fd, command, argument)
        self.before()
        is_unlock = struct.unpack_from("h", argument)[0] == fcntl.F_UNLCK
        if is_unlock:
            fcntl.fcntl(fd, command, argument)
        if not os.fstat(fd).st_nlink:
            raise OSError(errno.ENOLCK if is_unlock else errno.ESTALE, "the server does not know this file")
        return None if is_unlock else fcntl.fcntl(fd, command, argument)


class OtherHost:
    """A process that compacts the log when it is told to, so that the file it leaves is gone."""

    def __init__(self, path: str) -> None:
        theirs, self._ours = os.pipe()
        self._answers, answer = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            status = 1
            try:
                os.close(self._ours)
                with FileStore(path, timeout=LIMIT_S) as store:
                    while word := os.read(theirs, 1):
                        self._obey(word, store, theirs, answer)
                        os.write(answer, b"d")
                status = 0
            finally:
                os._exit(status)
        os.close(theirs)
        os.close(answer)

    @staticmethod
    def _obey(word: bytes, store: FileStore, theirs: int, answer: int) -> None:
        if word == b"c":
            store.compact()
            return
        log, done = log_of(store), list[bool]()

        def decide(_: bytes, __: bytes) -> tuple[Any, int, bytes]:
            if done:
                return None, 0, b""
            os.write(answer, b"h")
            os.read(theirs, 1)
            log.compactor.compact()
            done.append(True)
            return MOVED, 0, b""

        log._change_generation(decide, done, LIMIT_S)

    def compact(self, times: int = 1) -> None:
        for _ in range(times):
            self.say(b"c")

    def say(self, word: bytes) -> None:
        """Say `word`, and return when it was answered."""
        os.write(self._ours, word)
        assert os.read(self._answers, 1), "the other host has died"

    def end(self) -> None:
        os.close(self._ours)
        os.close(self._answers)
        _, status = os.waitpid(self.pid, 0)
        assert status == 0


@pytest.fixture
def path(memory: Path) -> str:
    return str(memory / "log")


@pytest.fixture
def other(path: str) -> Iterator[OtherHost]:
    with FileStore(path) as store:
        store.add("n", 1)
        store.compact()  # generation 0 keeps its name for good
    host = OtherHost(path)
    try:
        yield host
    except BaseException:
        os.kill(host.pid, signal.SIGKILL)
        raise
    finally:
        host.end()


@pytest.fixture
def kernel() -> Iterator[SharedOs]:
    """A mount whose host keeps what it removes itself as long as it has it open, under a name beginning with .nfs."""
    numbers = itertools.count()

    def unlink(name: str) -> None:
        os.rename(name, os.path.join(os.path.dirname(name), f".nfs{next(numbers)}"))

    with shared_os() as shared:
        shared.unlink = unlink
        yield shared


@pytest.fixture
def locks(kernel: SharedOs, other: OtherHost, monkeypatch: pytest.MonkeyPatch) -> LockManager:
    manager = LockManager()
    monkeypatch.setattr(system, "fcntl", manager)
    return manager


OPERATIONS: dict[str, tuple[Callable[[FileStore], object], object]] = {
    "add": (lambda store: store.add("n", 1), 2),
    "get": (lambda store: store.get("n"), b"1"),
    "compact": (lambda store: store.compact(), None),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("kind", COHERENCE)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_survives_the_loss_of_its_file_before_any_call(
    name: str, kind: str, forgets: bool, path: str, other: OtherHost, kernel: SharedOs, locks: LockManager
) -> None:
    """It is lost once or twice, and only while the handle does not hold its lock: otherwise no process could compact.

    The client may remember what it knows of the file, or ask the server, which `forgets` it.
    """
    operation, expected = OPERATIONS[name]
    points = 0

    def calls_left(ahead: int, times: int, number: int) -> int:
        with FileStore(path, coherence=kind, timeout=LIMIT_S) as store:
            store.set("n", "1")
            fds, left = log_of(store).handle.owned_fds, number

            def does(call: str = "", _: object = None, given: tuple[Any, ...] = ()) -> None:
                nonlocal left, points
                left -= 1
                if left == -1 and not any(is_locked(fd) for fd in fds):
                    points += 1
                    other.compact(times)
                if forgets and call in ("fstat", "read", "pread") and not os.fstat(given[0]).st_nlink:
                    raise OSError(errno.ESTALE, "the server does not know this file")

            other.compact(ahead)
            locks.before = does
            with kernel.instead(does):
                assert operation(store) == expected
            locks.before = bool
            assert store.add("n", 5) == (7 if name == "add" else 6)
        return left

    for ahead, times in ((0, 1), (1, 2), (2, 1)):
        assert any(calls_left(ahead, times, number) >= 0 for number in range(CALLS))
    assert points > 6


def is_locked(fd: int) -> bool:
    """Return whether a process holds the log's lock on the file that is open on `fd`."""
    another = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    try:
        fcntl.fcntl(another, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1 << 62, 1, 0))
    except BlockingIOError:
        return True
    finally:
        os.close(another)
    return False


@pytest.mark.parametrize("kind", COHERENCE)
def test_lock_granted_on_a_removed_file_is_taken_again_on_the_newest(
    kind: str, path: str, other: OtherHost, locks: LockManager
) -> None:
    """A waiter in the kernel gets the lock of a file that the holder before it has compacted and removed."""
    with FileStore(path, coherence=kind, timeout=LIMIT_S) as store:
        store.set("n", "1")
        other.say(b"w")
        found: list[object] = []
        waiter = start_thread(lambda: found.append(store.add("n", 1)))
        until = time.monotonic() + LIMIT_S
        while not any(is_waiting(request.fd) for request in list(kernel_wait._requests.values())):
            assert time.monotonic() < until
            time.sleep(0.001)
        other.say(b"g")
        waiter.join()
        assert found == [2]


def is_waiting(fd: int) -> bool:
    """Return whether a request for the file that is open on `fd` waits in the kernel."""
    if fd < 0:
        return False
    number = os.fstat(fd).st_ino
    return any("->" in row and f":{number} " in row for row in Path("/proc/locks").read_text().splitlines())


@pytest.mark.parametrize("kind", COHERENCE)
def test_writer_is_not_starved_for_good_by_a_host_that_compacts_without_pause(
    kind: str, path: str, other: OtherHost, locks: LockManager
) -> None:
    """Each time that a handle has arrived in the newest generation, that one is gone: this is no failing server."""
    with FileStore(path, coherence=kind, timeout=LIMIT_S) as store:
        store.set("n", "1")
        fds, left = log_of(store).handle.owned_fds, [5 * network.TRIES]

        def compact() -> None:
            if left[0] and not any(is_locked(fd) for fd in fds):
                left[0] -= 1
                other.compact(2)

        locks.before = compact
        assert store.add("n", 1) == 2
        assert not left[0]


def test_wait_for_a_generation_that_stays_ends_with_the_timeout(
    path: str, other: OtherHost, locks: LockManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "LOCK_GRACE_S", 0.2)
    with FileStore(path, coherence="direct", timeout=0.1) as store:
        store.set("n", "1")
        fds = log_of(store).handle.owned_fds
        locks.before = lambda: any(is_locked(fd) for fd in fds) or other.compact(2)
        with pytest.raises(StoreTimeoutError):
            store.add("n", 1)
        locks.before = bool
        store.set_timeout(LIMIT_S)
        assert store.add("n", 1) == 2
