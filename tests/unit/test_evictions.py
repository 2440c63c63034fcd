"""A host that vanishes on a mount that hosts share: old sizes, short reads, calls that block, and locks that come late.

Lustre's server evicts a client that does not answer, and drops its locks. The calls of the other clients block until
then. A read that comes back may be answered by the state before the eviction.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.internals import log_of
from support.places import until
from support.plain_reader import read_log
from support.shared_os import SharedOs, shared_os

from fscoord import FileStore, StoreGoneError, StoreTimeoutError
from fscoord._log.locking import kernel_wait
from fscoord._log.mount import find_mount
from fscoord._log.recovery import APPLYING, GENERATION
from fscoord._log.shared import network
from fscoord._runtime import system

LUSTRE = "lustre 10.0.0.1@tcp:/scratch rw,flock,lazystatfs"
NFS = "nfs4 server:/x rw,vers=4.2,local_lock=none"
MODES = ("direct", "locked")


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedOs]:
    monkeypatch.setattr(system, "nfs_recovers_lost_locks", lambda: False)
    with shared_os() as shared:
        yield shared


@pytest.fixture(params=[LUSTRE, NFS], ids=["lustre", "nfs"])
def mounted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return mount(request.param, tmp_path, monkeypatch)


@pytest.fixture
def on_lustre(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return mount(LUSTRE, tmp_path, monkeypatch)


def mount(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    line = f"1 0 0:1 / {tmp_path} rw - {kind}"
    monkeypatch.setattr(system, "mount_table", lambda: [line])
    return kind


class Lies:
    """Reads of the log that are answered from an earlier size of the file, for so many calls.

    Attributes:
        left: how many more calls lie.
        calls: the calls that lie: ``"read"``, ``"fstat"`` or both.
    """

    def __init__(self, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        self.left = self.size = 0
        self.calls: tuple[str, ...] = ("read",)
        self.before_call: Callable[[], object] = lambda: None
        read, fstat = kernel.read, kernel.fstat
        name = os.path.basename(path)

        def lies(call: str, fd: int) -> bool:
            if not self.left or call not in self.calls:
                return False
            return os.path.basename(os.readlink(f"/proc/self/fd/{fd}")).startswith(name)

        def read_old(fd: int, size: int) -> bytes:
            if not lies("read", fd):
                return bytes(read(fd, size))
            self.left -= 1
            self.before_call()
            room = max(self.size - os.lseek(fd, 0, 1), 0)
            return bytes(read(fd, min(room, size))) if room else b""

        def fstat_old(fd: int) -> Any:
            found = fstat(fd)
            if found.st_size > self.size and lies("fstat", fd):
                self.left -= 1
                self.before_call()
                fields = list(found)
                fields[6] = self.size
                return os.stat_result(fields)
            return found

        monkeypatch.setattr(kernel, "read", read_old)
        monkeypatch.setattr(kernel, "fstat", fstat_old)

    def tell(self, size: int, times: int = 1, calls: tuple[str, ...] = ("read",)) -> None:
        self.size, self.left, self.calls = size, times, calls


@pytest.fixture
def lies(kernel: SharedOs, monkeypatch: pytest.MonkeyPatch, path: str) -> Lies:
    return Lies(kernel, monkeypatch, path)


# An answer from a state that is not known to be current


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("flag", [APPLYING, GENERATION])
@pytest.mark.parametrize("how", MODES)
def test_replay_that_is_shorter_than_the_one_before_is_no_answer(
    how: str, flag: int, times: int, path: str, mounted: str, lies: Lies
) -> None:
    """After an error or an interruption a handle reads its log again. An old size then hides keys that it had seen."""
    with FileStore(path, coherence=how) as store, FileStore(path, coherence=how) as other:
        store.set("first", "1")
        size = os.path.getsize(path)
        store.set("k", "1")
        other.set("last", "1")
        assert store.check(["last"])
        log_of(store).handle.recovery = flag
        lies.tell(size, times)
        assert store.check(["k", "last"])
        assert lies.left == 0


@pytest.mark.parametrize("how", MODES)
def test_replay_after_the_own_write_is_no_shorter_than_that_write(
    how: str, path: str, mounted: str, lies: Lies
) -> None:
    with FileStore(path, coherence=how) as store:
        size = os.path.getsize(path)
        store.set("k", "1")
        log_of(store).handle.recovery = APPLYING
        lies.tell(size)
        assert store.check(["k"])
        assert lies.left == 0


@pytest.mark.parametrize("how", MODES)
def test_replay_that_stays_shorter_is_an_error(
    how: str, path: str, mounted: str, lies: Lies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SETTLE_S", 0.01)
    with FileStore(path, coherence=how) as store:
        store.set("first", "1")
        size = os.path.getsize(path)
        store.set("k", "1")
        log_of(store).handle.recovery = APPLYING
        lies.tell(size, 1000, ("read", "fstat"))
        with pytest.raises(StoreGoneError, match="had been read"):
            store.check(["k"])


@pytest.mark.parametrize("cut", [0, 10])
@pytest.mark.parametrize("how", MODES)
def test_read_that_returns_less_than_the_file_has_is_repeated_on_lustre(
    how: str, cut: int, path: str, on_lustre: str, lies: Lies
) -> None:
    with FileStore(path, coherence=how) as store, FileStore(path, coherence=how) as other:
        store.set("first", "1")
        assert other.check(["first"])
        size = os.path.getsize(path)
        other.set("k", "1")
        lies.tell(size + cut)
        assert store.check(["k"])
        assert lies.left == 0


@pytest.mark.parametrize("cut", [0, 10])
@pytest.mark.parametrize("how", MODES)
def test_short_read_under_the_lock_makes_no_record_torn_on_lustre(
    how: str, cut: int, path: str, on_lustre: str, lies: Lies
) -> None:
    with FileStore(path, coherence=how) as store, FileStore(path, coherence=how) as other:
        store.set("first", "1")
        assert other.check(["first"])
        size = os.path.getsize(path)
        other.set("k", "1")
        lies.tell(size + cut, 2)
        assert store.add("n", 1) == 1
        assert store.check(["first", "k", "n"])
    log = read_log(Path(path).read_bytes())
    assert (log.ends, log.values) == ("whole", {b"first": b"1", b"k": b"1", b"n": b"1"})


@pytest.mark.parametrize("where", ["read", "lock"])
@pytest.mark.parametrize("how", MODES)
def test_read_that_was_blocked_for_long_is_repeated(
    how: str, where: str, path: str, mounted: str, lies: Lies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the call blocked without the log's lock, or with it: the first answer after an eviction may be old."""

    class Clock:
        late = 0.0

        def __getattr__(self, name: str) -> Any:
            return getattr(time, name)

        def monotonic(self) -> float:
            return time.monotonic() + self.late

    clock = Clock()
    monkeypatch.setattr(system, "time", clock)
    with FileStore(path, coherence=how) as store, FileStore(path, coherence=how) as other:
        store.set("first", "1")
        assert other.check(["first"])
        size = os.path.getsize(path)
        other.set("k", "1")

        def block() -> None:
            clock.late += 148

        lies.before_call = block
        lies.tell(size, 2, ("read", "fstat"))
        if where == "read":
            assert store.check(["k"])
        else:
            assert store.compare_set("k", "1", "2") == b"2"
        assert lies.left == 0


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOTCONN, errno.ESHUTDOWN, errno.ESTALE])
@pytest.mark.parametrize("how", MODES)
def test_call_that_an_eviction_ends_with_an_error_is_tried_again(
    how: str, error: int, path: str, mounted: str, kernel: SharedOs
) -> None:
    with FileStore(path, coherence=how) as store, FileStore(path, coherence=how) as other:
        store.set("first", "1")
        other.set("k", "1")
        left = [1]

        def fail(name: str, *_: object) -> None:
            if name == "read" and left[0]:
                left[0] -= 1
                raise OSError(error, os.strerror(error))

        with kernel.instead(fail):
            assert store.check(["first", "k"])
        assert left == [0]


# A lock that comes late


def test_lock_that_the_kernel_grants_after_its_waiter_gave_up_belongs_to_nobody(
    path: str, mounted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread blocks in the kernel for the lock of a vanished host. The waiter's time is up, and then the lock comes.

    No thread keeps it, and a waiter that came later gets it.
    """
    monkeypatch.setattr(kernel_wait, "KEEP_S", 0.01)
    with FileStore(path) as early, FileStore(path, timeout=60) as late:
        early.set("k", "1")
        late.set("k", "2")
        holder = FileStore(path)
        log = log_of(holder)
        log.handle.lock.try_lock()
        for limit in (0.1, 1, 10):  # on a busy machine the time may be up before the thread asks the kernel
            early.set_timeout(limit)
            with pytest.raises(StoreTimeoutError):
                early.set("k", "3")
            if kernel_wait._requests:
                break
        assert kernel_wait._requests, "the thread still asks the kernel"
        log.handle.lock.unlock()
        late.set("k", "4")
        until(lambda: not kernel_wait._requests)
        assert log.handle.lock.holder() is None
        holder.close()
        assert early.get("k") == b"4"


# What was not synced is lost


@pytest.mark.parametrize("how", [*MODES, "local"])
def test_new_log_is_synced_before_it_gets_its_name(how: str, path: str, kernel: SharedOs) -> None:
    """Otherwise its name could last longer than its header, and every later process would find zeros there."""
    FileStore(path, coherence=how).close()
    names = [name for name, _ in kernel.calls]
    synced = "fsync" in names[: names.index("link")]
    assert synced == (how != "local")


def make_hole(path: str, start: int, hole: str) -> None:
    """Let the bytes from `start` on be what is left of writes that the server never got."""
    size = os.path.getsize(path)
    if hole != "zeros":
        os.truncate(path, start + {"short": 0, "torn": 20, "size": 0}[hole])
    if hole == "size":
        os.truncate(path, size)
    if hole == "zeros":
        with open(path, "r+b") as file:
            file.seek(start)
            file.write(bytes(size - start))


@pytest.mark.parametrize("hole", ["short", "torn", "zeros", "size"])
@pytest.mark.parametrize("how", MODES)
def test_writer_goes_on_after_the_writes_that_a_vanished_host_had_not_synced(
    how: str, hole: str, path: str, on_lustre: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is shorter, ends in the middle of a record, or ends in zeros. What came before is there, and the rest is
    lost: the next writer records that, and every later reader skips it.
    """
    monkeypatch.setattr(network, "SETTLE_S", 0.01)
    with FileStore(path, coherence=how) as vanished:
        vanished.set("kept", "1")
        start = os.path.getsize(path)
        vanished.set("lost", "x" * 700)
        vanished.set("lost too", "1")
    make_hole(path, start, hole)
    with FileStore(path, coherence=how) as reader, FileStore(path, coherence=how) as writer:
        assert reader.list_keys() == ["kept"]
        writer.set("k", "1")
        assert sorted(writer.list_keys()) == sorted(reader.list_keys()) == ["k", "kept"]
    log = read_log(Path(path).read_bytes())
    assert (log.ends, log.values) == ("whole", {b"kept": b"1", b"k": b"1"})


# What is said


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (LUSTRE, "until the server evicts that host.*The timeout is 40 s here.*a-job-hangs"),
        (NFS, "after its lease"),
        ("nfs server:/x rw,vers=3", "keeps its locks until that host is back"),
        ("tmpfs tmpfs rw", "no other host"),
        ("ceph mon:/ rw", "session_timeout, 60 s.*client evict"),
        ("fuse.ceph-fuse ceph-fuse rw", "session_timeout, 60 s.*client evict"),
        ("gpfs /dev/x rw", "not known"),
    ],
)
def test_mount_says_what_a_vanished_host_costs(
    kind: str, says: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount(kind, tmp_path, monkeypatch)
    monkeypatch.setattr(system, "lustre_timeout", lambda: 40)
    assert re.search(says, find_mount(path).vanished_host)
    assert find_mount(path).reads_why


def test_timeout_of_lustre_is_read_where_the_client_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {"/proc/fs/lustre/timeout": "100"}
    monkeypatch.setattr(system, "_proc_text", lambda name: shown.get(name, ""))
    assert system.lustre_timeout() == 100
    shown.clear()
    assert system.lustre_timeout() is None


def test_hang_on_lustre_is_logged_with_its_likely_cause(
    path: str, on_lustre: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FileStore(path) as store:
        call = log_of(store)._call  # type: ignore[attr-defined]
        call._since, call._warn_after = 1.0, 10.0
        call.warn_if_stuck(149.0)
        call.end()
    (record,) = caplog.records
    assert "stuck for 148 s" in record.getMessage()
    assert "evict_client=UUID" in record.getMessage()
