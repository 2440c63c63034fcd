"""The marker of a soft lock: its maker has the lock, whatever becomes of the answers; only a dead one's is removed."""

from __future__ import annotations

import errno
import os
import socket
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_system

from fscoord import FileStore, UnsupportedFilesystemError
from fscoord._log.liveness.liveness_file import ProcessIdentity
from fscoord._log.locking.log_lock import SOFT, LogLock
from fscoord._log.shared import symlink_lock as log_marker
from fscoord._log.shared.symlink_lock import SymlinkLock, holder
from fscoord._runtime import system


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log.lock")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process outside of the test takes the name that it may need."""
    monkeypatch.setattr(log_marker, "REMOVER", f"fscoord-test-{os.getpid()}")


@pytest.fixture
def looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_marker, "CHECK_INTERVAL_S", 0)


class Lossy(types.ModuleType):
    """`os`, whose next call of a name is made, and then fails with an error."""

    def __init__(self) -> None:
        super().__init__("os")
        self.next: dict[str, list[OSError]] = {}

    def __getattr__(self, name: str) -> Any:
        call = getattr(os, name)
        errors = self.next.get(name)
        if not errors:
            return call

        def fail(*given: Any) -> None:
            call(*given)
            raise errors.pop(0)

        return fail


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
@pytest.mark.parametrize("is_empty", [False, True])
def test_store_reports_a_file_system_that_refuses_symbolic_links(number: int, is_empty: bool, path: str) -> None:
    """Measured: EOPNOTSUPP on a Lustre with one kind of back end. symlink(2) names EPERM."""
    log = Path(path).with_name("log")
    if is_empty:
        log.touch(mode=0o600)
    with (
        faulty_system() as faulty,
        faulty.fail(0, number, names=("symlink",), for_good=True),
        pytest.raises(UnsupportedFilesystemError, match="symbolic links") as caught,
        FileStore(log, lock="soft", timeout=60) as store,
    ):
        store.set("k", "1")
    assert str(log) in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert 'pass lock="ofd" or lock="flock" in every process' in str(caught.value)
    if is_empty:
        assert log.read_bytes() == b""


@pytest.fixture
def lossy(monkeypatch: pytest.MonkeyPatch) -> Lossy:
    found = Lossy()
    monkeypatch.setattr(system, "os", found)
    return found


def exists() -> FileExistsError:
    return FileExistsError(errno.EEXIST, "File exists")


def broken() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def is_taken(marker: SymlinkLock) -> bool:
    try:
        marker.acquire()
    except BlockingIOError:
        return True
    marker.release()
    return False


def left_by_another(path: str) -> None:
    """Have a process make the marker, and end."""
    pid = os.fork()
    if not pid:
        SymlinkLock(path).acquire()
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.path.lexists(path)


def test_holder_is_named_by_the_marker_and_by_no_other_file(path: str) -> None:
    assert holder(path) is None
    marker = SymlinkLock(path)
    marker.acquire()
    assert holder(path) == f"{system.hostname()}:{os.getpid()}"
    marker.release()
    Path(path).write_text("1\nsomebody\n")
    assert holder(path) is None
    os.unlink(path)
    os.symlink("nobody:of:this:kind:x:y:z:0.1", path)
    assert holder(path) is None
    os.unlink(path)
    os.symlink(f"fe80::1:17:1:{'ab' * 16}:1:1:1:x.1", path)
    assert holder(path) == "fe80::1:17", "a host's name may hold colons"


@pytest.mark.usefixtures("looks_each_time")
@pytest.mark.parametrize("text", ["", "nobody", "a:1:2:not hexadecimal:4:5:6:7.8"])
def test_file_that_is_no_marker_is_left_unchanged(path: str, text: str) -> None:
    if text:
        os.symlink(text, path)
    else:
        Path(path).touch()
    marker = SymlinkLock(path)
    assert is_taken(marker)
    assert is_taken(marker)
    assert os.path.lexists(path)


def test_marker_reported_as_existing_by_a_retried_call_is_held_by_its_maker(path: str, lossy: Lossy) -> None:
    """An NFS client that gets no answer asks again, and is told that the name is there already."""
    lossy.next["symlink"] = [exists()]
    one, other = SymlinkLock(path), SymlinkLock(path)
    one.acquire()
    assert is_taken(other)
    one.release()
    assert not os.path.lexists(path)


def test_marker_of_an_earlier_attempt_is_found_by_its_maker(path: str, lossy: Lossy) -> None:
    """A waiter that tries often looks rarely, so the last try has not made the marker."""
    one, other = SymlinkLock(path), SymlinkLock(path)
    other.acquire()
    assert is_taken(one)
    other.release()
    lossy.next["symlink"] = [exists()]
    one._checked_at = float("inf")
    assert is_taken(one)
    assert is_taken(one)
    one._checked_at = -float("inf")
    one.acquire()
    assert is_taken(other)
    one.release()
    assert not os.path.lexists(path)


def test_soft_lock_that_is_closed_removes_the_marker_of_a_failed_attempt(path: str, lossy: Lossy) -> None:
    lock = LogLock(path.removesuffix(".lock"), -1, SOFT, threading.RLock(), set())
    lock._symlink_lock._checked_at = float("inf")
    lossy.next["symlink"] = [exists()]
    with pytest.raises(BlockingIOError):
        lock.try_lock()
    assert os.path.lexists(path)
    lock.close()
    assert not os.path.lexists(path)


def test_removal_repeated_after_an_error_leaves_the_marker_of_another(path: str, lossy: Lossy) -> None:
    one, other = SymlinkLock(path), SymlinkLock(path)
    one.acquire()
    lossy.next["unlink"] = [broken()]
    with pytest.raises(OSError, match="Input/output error"):
        one.release()
    other.acquire()
    one.release()
    assert is_taken(one)
    lossy.next["unlink"] = [FileNotFoundError(errno.ENOENT, "No such file or directory")]
    other.release()
    assert not is_taken(one)


def test_marker_that_cannot_be_read_is_removed_by_the_next_release(path: str, lossy: Lossy) -> None:
    one, other = SymlinkLock(path), SymlinkLock(path)
    one.acquire()
    lossy.next["readlink"] = [broken()]
    with pytest.raises(OSError, match="Input/output error"):
        one.release()
    assert os.path.lexists(path)
    one.release()
    assert not is_taken(other)


def without_field(number: int) -> Callable[[str], str]:
    def change(text: str) -> str:
        fields = text.rsplit(":", 7)
        fields[number] = "ff" * 16 if number == 3 else "another" if number == 0 else f"{int(fields[number]) + 1}"
        return ":".join(fields)

    return change


@pytest.mark.usefixtures("looks_each_time")
@pytest.mark.parametrize("where", [0, 3, 4, 6], ids=["host", "boot", "process namespace", "network"])
def test_marker_of_a_process_unknown_to_this_host_stays(path: str, where: int) -> None:
    left_by_another(path)
    text = without_field(where)(os.readlink(path))
    os.unlink(path)
    os.symlink(text, path)
    marker = SymlinkLock(path)
    assert is_taken(marker)
    assert is_taken(marker)
    assert os.readlink(path) == text


@pytest.fixture
def remover() -> Iterator[socket.socket]:
    """A process whose turn it is to remove a marker."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        yield found


@pytest.mark.usefixtures("looks_each_time")
def test_marker_removal_is_done_by_one_process_of_a_host_at_a_time(path: str, remover: socket.socket) -> None:
    """Otherwise the second might remove a new marker, made after the first has removed the old one."""
    remover.bind(f"\0{log_marker.REMOVER}")
    left_by_another(path)
    marker = SymlinkLock(path)
    assert is_taken(marker)
    assert is_taken(marker)
    remover.close()
    assert is_taken(marker)
    assert not is_taken(marker)


@pytest.mark.usefixtures("looks_each_time")
def test_marker_made_during_the_removal_of_a_dead_one_is_left(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look that tells of a death and the turn to remove it another may have removed it."""
    left_by_another(path)
    one, other = SymlinkLock(path), SymlinkLock(path)
    is_provably_dead = ProcessIdentity.is_provably_dead

    def look(home: ProcessIdentity, session: Any) -> bool:
        found = is_provably_dead(home, session)
        monkeypatch.setattr(ProcessIdentity, "is_provably_dead", is_provably_dead)
        os.unlink(path)
        other.acquire()
        return found

    monkeypatch.setattr(ProcessIdentity, "is_provably_dead", look)
    assert is_taken(one)
    assert is_taken(one)
    other.release()


@pytest.mark.usefixtures("looks_each_time")
def test_marker_of_a_dead_process_stays_without_abstract_socket_names(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "platform", lambda: "somewhere else")
    left_by_another(path)
    marker = SymlinkLock(path)
    assert is_taken(marker)
    assert is_taken(marker)
