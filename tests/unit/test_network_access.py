"""Logs on mounts that hosts share, in one process: the calls of the kernel, and caches and servers that lie."""

from __future__ import annotations

import errno
import logging
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.internals import log_of
from support.places import start_thread
from support.plain_reader import read_log
from support.shared_os import SharedOs, shared_os

from fscoord import (
    CorruptLogError,
    FileStore,
    StoreError,
    StoreGoneError,
    StoreTimeoutError,
    StoreUnavailableError,
    UnsupportedFilesystemError,
    open_store,
)
from fscoord._log.liveness import own_session
from fscoord._log.liveness.liveness_file import LivenessFile
from fscoord._log.locking.log_lock import LogLock
from fscoord._log.shared import hang_watchdog, network
from fscoord._runtime import system
from fscoord.status import status

LIMIT_S = 30
NFS = "nfs4 server:/x rw,vers=4.2,wsize=4096,local_lock=none"
LUSTRE = "lustre 10.0.0.1@tcp:/fs rw,flock,checksum,nolock"


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[SharedOs]:
    """A kernel under the package that takes O_DIRECT. No look at a name or at a handle's own byte is ever due."""
    monkeypatch.setattr(network, "PATH_CHECK_S", math.inf)
    monkeypatch.setattr(own_session, "CHECK_S", 1000.0)
    monkeypatch.setattr(network, "SETTLE_S", LIMIT_S)  # as long as the lie lasts, and it ends
    monkeypatch.setattr(system, "nfs_recovers_lost_locks", lambda: False)
    with shared_os() as shared:
        yield shared


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Have a test say what its directory is mounted as."""

    def mount(kind: str) -> None:
        line = f"1 0 0:1 / {tmp_path} rw - {kind}"
        monkeypatch.setattr(system, "mount_table", lambda: [line])

    mount(NFS)
    return mount


def calls(kernel: SharedOs, operation: object, *arguments: object) -> list[str]:
    """The names of the calls that `operation` makes, without those on the files of this host alone."""
    kernel.calls.clear()
    operation(*arguments)  # type: ignore[operator]
    return [name for name, first in kernel.calls if not is_of_host(first)]


def is_of_host(first: object) -> bool:
    """Return whether a call with the argument `first` is on a file by which the writers of a host find a leader."""
    try:
        path = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else str(first)
    except FileNotFoundError:  # closed since; the files of the host stay open
        return False
    return f"/fscoord-{os.geteuid()}/" in path


# What is asked of the server


@pytest.mark.parametrize("kind", [NFS, LUSTRE])
@pytest.mark.parametrize("call", ["open", "read", "unaligned"])
def test_reads_take_a_lock_where_direct_reads_are_refused(
    call: str, kind: str, path: str, mounted: object, kernel: SharedOs
) -> None:
    mounted(kind)  # type: ignore[operator]
    with FileStore(path) as early, FileStore(path) as writer:
        early.set("k", "1")
        kernel.refuses_direct = call
        with FileStore(path) as late:
            assert late.get("k") == b"1"
            assert log_of(late).access.coherence == "locked"
            late.set("k", "2")
            if call != "open":
                assert early.get("k") == b"2"
                assert log_of(early).access.coherence == "locked"
                writer.set("k", "3")
                assert log_of(writer).access.coherence == "locked"
                assert writer.get("k") == b"3"
                assert early.get("k") == late.get("k") == b"3"


def test_soft_lock_on_lustre_appends_through_the_cache(path: str, mounted: object, kernel: SharedOs) -> None:
    mounted("lustre 10.0.0.1@tcp:/fs rw,nolock")  # type: ignore[operator]
    with FileStore(path, lock="soft") as store, store.clone() as other:
        store.set("k", "1")
        assert other.get("k") == b"1"
        assert log_of(store).access.coherence == "locked"
    assert not any(flags & os.O_DIRECT for _, flags in kernel.opened)


def test_ceph_fuse_is_refused_without_direct_reads(path: str, mounted: object) -> None:
    mounted("fuse.ceph-fuse ceph-fuse rw,user_id=0")  # type: ignore[operator]
    for options in ({}, {"coherence": "locked"}, {"coherence": "local"}, {"trust_locks": True}):
        with pytest.raises(UnsupportedFilesystemError, match=r'caches of ceph-fuse.*pass coherence="direct"'):
            FileStore(path, **options)  # type: ignore[arg-type]
    assert not os.path.exists(path)


@pytest.mark.parametrize("lock", ["ofd", "flock", "soft"])
@pytest.mark.parametrize("how", ["direct", "locked"])
@pytest.mark.parametrize("durable", [False, True])
def test_lock_kinds_work_with_every_coherence(lock: str, how: str, durable: bool, path: str) -> None:
    with (
        FileStore(path, lock=lock, coherence=how, durable=durable) as one,
        FileStore(path, lock=lock, coherence=how) as two,
        FileStore(path, read_only=True, coherence=how) as reader,
    ):
        for number in range(5):
            assert one.add("n", 1) == 2 * number + 1
            assert two.add("n", 1) == 2 * number + 2
            assert int(reader.get("n")) == 2 * number + 2
        two.set("long", b"x" * 300_000)
        assert one.get("long") == reader.get("long") == b"x" * 300_000
        with pytest.raises(StoreError, match="read_only"):
            reader.set("k", "v")


# Marker files, of which no kernel knows


def test_soft_lock_learns_the_size_by_opening_the_log_again(path: str, kernel: SharedOs) -> None:
    with FileStore(path, lock="soft", coherence="locked") as store:
        store.set("k", "1")
        kernel.opened.clear()
        store.set("k", "2")
        assert [flag & os.O_ACCMODE for name, flag in kernel.opened if name == path] == [os.O_RDWR]


def test_soft_lock_on_nfs_bypasses_the_cache_for_all_reads_and_writes(
    path: str, mounted: object, kernel: SharedOs
) -> None:
    """The kernel may write back the whole page that an append begins in, with old data where others have written."""
    with FileStore(path, lock="soft") as store, FileStore(path, lock="soft", coherence="locked") as other:
        assert (log_of(store).access.coherence, log_of(other).access.coherence) == ("direct", "direct")
        kernel.opened.clear()
        for number in range(3):
            store.set("k", str(number))
            assert other.add("n", 1) == number + 1
            store.compact()  # the second one posts where the log goes on
    flags = [flag for name, flag in kernel.opened if name == path or name.startswith(path + ".")]
    flags = [flag for flag in flags if not flag & os.O_CREAT]
    assert {flag & os.O_ACCMODE for flag in flags} == {os.O_RDONLY, os.O_WRONLY}
    for flag in flags:
        assert flag & os.O_DIRECT
        assert not flag & os.O_APPEND  # NFS takes no two of these


@pytest.mark.parametrize("torn", [1, 20, 40, 3000])
def test_soft_lock_on_nfs_voids_a_torn_tail(torn: int, path: str, mounted: object) -> None:
    with FileStore(path, lock="soft") as store, FileStore(path, lock="soft") as other:
        store.set("k", "1")
        size = os.path.getsize(path)
        store.set("long", b"x" * 5000)
        os.truncate(path, size + torn)  # as if it had been torn there
        with FileStore(path, lock="soft") as late:
            late.set("k", "2")
            assert late.list_keys() == ["k"]
            late.set("k", "3")
    log = read_log(Path(path).read_bytes())
    assert (log.ends, log.values) == ("whole", {b"k": b"3"})
    other.close()


@pytest.mark.parametrize("shift", [-1, 1])
def test_soft_lock_on_nfs_refuses_to_write_if_the_end_has_moved(
    shift: int, path: str, mounted: object, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that moves the end while the marker is there has lost its own marker, and works on."""
    with FileStore(path, lock="soft") as store:
        store.set("k", "1")
        before = Path(path).read_bytes()

        def lseek(fd: int, offset: int, whence: int) -> int:
            return os.lseek(fd, offset, whence) + (shift if whence == os.SEEK_END else 0)

        monkeypatch.setattr(kernel, "lseek", lseek, raising=False)
        with pytest.raises(StoreError, match=r"was truncated" if shift < 0 else r"End all processes.*\.lock") as caught:
            store.set("k", "2")
        assert not caught.value.maybe_applied
        assert Path(path).read_bytes() == before


@pytest.mark.parametrize("coherence", ["locked", "direct"])
def test_write_on_a_shared_mount_is_not_judged_by_a_cached_size(
    coherence: str, path: str, mounted: object, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client may report an old size of the file after its own write."""
    seeks: list[int] = []

    def lseek(fd: int, offset: int, whence: int) -> int:
        seeks.append(whence)
        return os.lseek(fd, offset, whence)

    with FileStore(path, coherence=coherence) as store:
        monkeypatch.setattr(kernel, "lseek", lseek, raising=False)
        store.set("k", "1")  # after the record of the session
    assert os.SEEK_CUR in seeks
    assert os.SEEK_END not in seeks


@pytest.mark.parametrize("call", ["open", "read"])
def test_soft_lock_on_nfs_is_refused_where_direct_reads_are_refused(
    call: str, path: str, mounted: object, kernel: SharedOs
) -> None:
    with FileStore(path, lock="soft") as store:
        store.set("k", "1")
        kernel.refuses_direct = call
        with pytest.raises(StoreUnavailableError, match="no direct reads"):
            FileStore(path, lock="soft")
        kernel.refuses_direct = ""
        assert store.get("k") == b"1"


def with_a_byte_changed(path: str, offset: int) -> None:
    data = bytearray(Path(path).read_bytes())
    data[offset] ^= 1
    Path(path).write_bytes(data)


@pytest.mark.parametrize("read_only", [False, True])
def test_soft_lock_on_nfs_distinguishes_damage_from_a_transient_bad_read(
    read_only: bool, path: str, mounted: object, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path, lock="soft") as store, FileStore(path, lock="soft", read_only=read_only) as other:
        store.set("k", "1")
        assert other.get("k") == b"1"
        size = os.path.getsize(path)
        store.set("k", "x" * 100)
        read, lies = kernel.read, [2]

        def read_badly(fd: int, count: int) -> bytes:
            data = bytes(read(fd, count))
            if lies[0] and len(data) > 100 and fd in kernel.direct:
                lies[0] -= 1
                return data[:60] + b"?" + data[61:]
            return data

        monkeypatch.setattr(kernel, "read", read_badly)
        assert other.get("k") == b"x" * 100
        assert lies == [0]
        with_a_byte_changed(path, size + 60)
        with pytest.raises(CorruptLogError) as caught:
            FileStore(path, lock="soft", read_only=read_only)
        assert caught.value.offset == size


@pytest.mark.parametrize("size", [10, 100_000])
def test_soft_lock_on_nfs_detects_another_log_in_the_same_inode(
    size: int, path: str, tmp_path: Path, mounted: object
) -> None:
    other = str(tmp_path / "other")
    with FileStore(other, lock="soft") as stranger:
        stranger.set("k", b"y" * size)
    with FileStore(path, lock="soft") as store:
        store.set("k", b"x" * 1000)
        Path(path).write_bytes(Path(other).read_bytes())
        with pytest.raises(StoreGoneError, match="another log"):
            store.set("k", "2")


def test_soft_lock_on_nfs_reports_a_deleted_log_as_gone(path: str, mounted: object) -> None:
    with FileStore(path, lock="soft") as store:
        store.set("k", "1")
        os.unlink(path)
        with pytest.raises(StoreGoneError, match="deleted"):
            store.set("k", "2")


def test_soft_lock_without_direct_reads_makes_the_calls_of_locked_coherence(path: str, kernel: SharedOs) -> None:
    kernel.refuses_direct = "read"
    asked: list[list[str]] = []
    for how in ("direct", "locked"):
        with FileStore(f"{path}.{how}", lock="soft", coherence=how) as store:
            store.set("k", "1")
            asked.append(calls(kernel, store.set, "k", "2"))
    assert asked[0] == asked[1]


# Caches that lie


@pytest.mark.parametrize("reads", [1, 2, 3, 5, 8])
def test_zeros_from_a_cache_are_neither_damage_nor_torn(reads: int, path: str, kernel: SharedOs) -> None:
    with FileStore(path, coherence="locked") as store, FileStore(path, coherence="locked") as other:
        store.set("k", "1")
        other.set("k", "2")
        kernel.zeros = reads
        assert store.add("n", 1) == 1
        kernel.zeros = 0
        assert (store.get("k"), other.get("n")) == (b"2", b"1")
    log = read_log(Path(path).read_bytes())
    assert (log.ends, log.values) == ("whole", {b"k": b"2", b"n": b"1"})


def cut(store: FileStore) -> int:
    """Let the log lose the last record that `store` has written; return its size."""
    path = log_of(store).path
    store.set("k", "1")
    size = os.path.getsize(path)
    store.set("k", "2")
    os.truncate(path, size)
    return size


@pytest.mark.parametrize("how", ["locked", "direct"])
def test_log_that_has_shrunk_is_gone_for_writes_and_later_reads(
    how: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SETTLE_S", 0.01)
    with FileStore(path, coherence=how) as store:
        size = cut(store)
        with pytest.raises(StoreGoneError, match=f"was truncated to {size} bytes"):
            store.set("k", "3")
        with pytest.raises(StoreGoneError, match="was truncated"):
            store.get("k")


@pytest.mark.parametrize("how", ["locked", "direct"])
@pytest.mark.parametrize("torn", [5, 20, 40])
def test_record_that_stays_torn_is_voided_under_every_coherence(
    how: str, torn: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SETTLE_S", 0.01)
    with FileStore(path, coherence=how) as store:
        store.set("k", "1")
        size = os.path.getsize(path)
        store.set("k", b"x" * 50)
        os.truncate(path, size + torn)
        with FileStore(path, coherence=how) as other:
            other.set("n", "2")
            assert other.multi_get(["k", "n"]) == [b"1", b"2"]
    log = read_log(Path(path).read_bytes())
    assert (log.ends, log.values) == ("whole", {b"k": b"1", b"n": b"2"})


@pytest.mark.parametrize("lock", ["ofd", "soft"])
@pytest.mark.parametrize("reads", [1, 2, 3])
def test_zeros_from_a_cache_are_read_again_by_a_reader(reads: int, lock: str, path: str, kernel: SharedOs) -> None:
    with (
        FileStore(path, lock=lock, coherence="locked") as store,
        FileStore(path, lock=lock, coherence="locked") as other,
    ):
        store.set("k", "1")
        assert other.get("k") == b"1"
        store.set("k", "2")
        kernel.zeros = reads
        assert other.get("k") == b"2"


@pytest.mark.parametrize("times", [1, 2, 3])
def test_old_size_from_a_cache_is_not_a_truncated_log(times: int, path: str, kernel: SharedOs) -> None:
    with FileStore(path, coherence="locked") as store:
        store.set("k", b"x" * 100)
        kernel.hidden, kernel.hides = 50, times
        store.set("k", "2")
        kernel.hides = 0
        assert store.get("k") == b"2"


def test_cache_that_stays_stale_is_an_error_that_says_so(
    path: str, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SETTLE_S", 0.05)
    with FileStore(path, coherence="locked") as store, FileStore(path, coherence="locked") as other:
        store.set("k", "1")
        other.set("k", "2")
        kernel.hidden, kernel.hides = -50, 10**6
        with pytest.raises(StoreUnavailableError, match="caches"):
            store.set("k", "3")
        kernel.hides = 0
        store.set("k", "4")
        assert other.get("k") == b"4"


def test_zeros_seen_at_the_place_of_a_later_void_are_read_again(path: str, mounted: object) -> None:
    """They are no more than what has not arrived yet, however often they were seen."""
    with FileStore(path) as writer:
        writer.set("k", "1")
        torn = os.path.getsize(path) + 50
        writer.set("torn", "x" * 100)
    os.truncate(path, torn)
    with FileStore(path) as writer:
        writer.set("k", "2")
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[:torn].ljust(len(whole), b"\0"))
    with FileStore(path) as reader, FileStore(path) as late:
        for _ in range(2):
            assert reader.get("k") == late.get("k") == b"1"
        Path(path).write_bytes(whole)
        assert late.add("n", 1) == 1
        assert reader.get("k") == late.get("k") == b"2"
    log = read_log(Path(path).read_bytes())
    assert (log.ends, log.values) == ("whole", {b"k": b"2", b"n": b"1"})


# A server that forgets


@pytest.mark.parametrize("read_only", [False, True])
def test_name_that_still_leads_to_a_removed_log_is_opened_again(
    read_only: bool, path: str, mounted: object, kernel: SharedOs
) -> None:
    """NFS: to open what a host remembers of a name succeeds, and the first look at it says ESTALE."""
    with FileStore(path) as store:
        store.set("k", "1")
    made = at = 0

    def does(*_: object) -> None:
        nonlocal made
        made += 1
        if made == at + 1:
            raise OSError(system.errno.ESTALE, "stale")

    while made >= at:
        made = 0
        with kernel.instead(does):
            log = FileStore(path, read_only=read_only)
        assert log.get("k") == b"1"
        assert log_of(log).handle.owned_fds <= log_of(log).handle.fds_in_use()
        log.close()
        at += 1
    assert at > 5


@pytest.mark.parametrize("error", [system.errno.ESTALE, system.errno.EIO])
@pytest.mark.parametrize("number", range(12))
def test_stale_descriptor_is_reopened_and_no_write_counts_twice(
    number: int, error: int, path: str, mounted: object, kernel: SharedOs
) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.add("n", 1)
        other.add("n", 1)
        done, perhaps = 2, 0
        with kernel.fail(number, error) as failed:
            for _ in range(3):
                try:
                    store.add("n", 1)
                    done += 1
                except StoreUnavailableError as caught:
                    assert failed
                    perhaps += caught.maybe_applied
        assert done + perhaps >= 4  # one failure, and the handle went on
        total = store.add("n", 1)
        assert done + 1 <= total <= done + perhaps + 1
        assert int(other.get("n")) == total
    assert read_log(Path(path).read_bytes()).ends == "whole"


@pytest.mark.parametrize("error", [system.errno.ESTALE, system.errno.EIO])
def test_lock_refused_after_a_write_does_not_make_that_write_doubtful(error: int, path: str, mounted: object) -> None:
    """NFS 3: the lock manager forgets a removed file when it likes, and then a lock on it is ESTALE."""

    def refuse() -> None:
        raise OSError(error, os.strerror(error))

    with FileStore(path) as store, FileStore(path) as other:
        store.add("n", 1)
        log_of(store).handle.lock.try_lock = refuse
        assert store.add("n", 1) == 2
        other.compact()
        log_of(store).handle.lock.try_lock = refuse
        assert store.add("n", 1) == 3


@pytest.mark.parametrize("number", [0, 1])  # later calls are those of the recovery itself
def test_generation_removed_by_another_host_may_be_stale_and_is_skipped(
    number: int, path: str, mounted: object, kernel: SharedOs
) -> None:
    """NFS remembers names: to open one that was removed elsewhere is ESTALE then, and not ENOENT."""
    known = kernel.open

    def open_(name: str, flags: int, *mode: int) -> int:
        if not flags & os.O_CREAT and not os.path.exists(name):
            raise OSError(system.errno.ESTALE, "stale", name)
        return int(known(name, flags, *mode))

    with FileStore(path) as store, FileStore(path) as other:
        store.add("n", 1)
        store.compact()
        other.compact()
        other.compact()
        kernel.open = open_
        with kernel.fail(number, system.errno.ESTALE):
            assert store.add("n", 1) == 2
        assert other.get("n") == b"2"


@pytest.mark.parametrize("error", [system.errno.ESTALE, system.errno.EIO])
def test_recovery_that_fails_for_good_ends_at_the_timeout_and_leaks_nothing(
    error: int, path: str, mounted: object, kernel: SharedOs
) -> None:
    """It neither spins without a pause nor keeps the descriptors of the attempts."""
    with FileStore(path, timeout=0.2) as store:
        store.add("n", 1)
        with kernel.fail(0, error), kernel.fail(0, error, names=("fstat",), for_good=True) as failed:
            with pytest.raises((StoreUnavailableError, StoreTimeoutError)):
                store.add("n", 1)
            assert 1 <= len(failed) < 100
            assert len(log_of(store).handle.owned_fds) < 6
        assert store.add("n", 1) in (2, 3)
        assert log_of(store).handle.owned_fds <= log_of(store).handle.fds_in_use()


def test_unlock_that_fails_keeps_the_write_marked_as_maybe_applied(
    path: str, mounted: object, kernel: SharedOs
) -> None:
    """After a lost lease both the write and the unlock fail; what counts is that the write may have been applied."""
    with FileStore(path) as store:
        store.add("n", 1)
        lock = log_of(store).handle.lock

        def unlock() -> None:
            raise OSError(system.errno.EIO, "lost")

        for fails in (("fdatasync",), ()):
            lock = log_of(store).handle.lock
            real, lock.unlock = lock.unlock, unlock
            failing = kernel.fail(0 if fails else 10**6, system.errno.EIO, names=fails)
            with failing, pytest.raises(StoreUnavailableError) as caught:
                store.add("n", 1)
            assert caught.value.maybe_applied
            real()
            assert int(store.get("n")) >= 1


def test_deleted_log_is_distinguished_from_a_stale_descriptor(
    path: str, mounted: object, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path) as store, FileStore(path) as reader:
        store.set("k", "1")
        assert reader.get("k") == b"1"
        os.unlink(path)
        with pytest.raises(StoreGoneError, match="deleted"):
            store.set("k", "2")
        monkeypatch.setattr(network, "PATH_CHECK_S", 0.0)
        with pytest.raises(StoreGoneError, match="deleted"):
            reader.get("k")


@pytest.mark.parametrize("size", [10, 100_000])
def test_log_that_replaced_ours_in_the_same_inode_is_detected(
    size: int, path: str, tmp_path: Path, mounted: object
) -> None:
    other = str(tmp_path / "other")
    with FileStore(other) as stranger:
        stranger.set("k", b"y" * size)
    with FileStore(path) as store, FileStore(path) as reader:
        store.set("k", b"x" * 1000)
        assert reader.get("k") == b"x" * 1000
        Path(path).write_bytes(Path(other).read_bytes())
        with pytest.raises(StoreGoneError, match="another log"):
            store.set("k", "2")
        if size > 1000:
            with pytest.raises(StoreGoneError, match="another log"):
                reader.get("k")


# Mounts that lie


@pytest.mark.parametrize(
    "kind",
    [
        "nfs s:/ rw,vers=3,nolock",
        "nfs s:/ rw,vers=3,nolock,local_lock=all",
        "nfs s:/ rw,vers=3,local_lock=posix",
        "lustre s:/ rw,localflock,nolock",
        "lustre s:/ rw,nolock",  # with noflock, or without an option
        "cifs s:/ rw,nobrl",
        "fuse.sshfs x rw",
    ],
)
def test_mount_whose_locks_do_not_work_is_refused_before_a_file_is_created(
    kind: str, path: str, tmp_path: Path, mounted: object
) -> None:
    mounted(kind)  # type: ignore[operator]
    for options in ({}, {"coherence": "direct"}, {"coherence": "locked"}, {"coherence": "local"}):
        with pytest.raises(UnsupportedFilesystemError, match=f"{kind.split()[0]}.*trust_locks=True"):
            FileStore(path, **options)
        with pytest.raises(UnsupportedFilesystemError):
            open_store(f"file://{path}", **options)
    assert list(tmp_path.iterdir()) == []


def test_mount_whose_locks_do_not_work_is_used_if_they_are_trusted(path: str, mounted: object) -> None:
    mounted("lustre s:/ rw,localflock")  # type: ignore[operator]
    with FileStore(path, trust_locks=True, timeout=60, rank=0) as store, store.clone() as other:
        store.set("k", "1")
        assert other.get("k") == b"1"
        assert store.place_options == store.shared_options == {"trust_locks": True}
        assert [each.rank for each in status(store).picture.participants] == [0]
        with open_store(f"file://{path}?trust_locks=1") as third:
            assert third.get("k") == b"1"
        assert status(f"file://{path}?trust_locks=1").picture.participants
        with pytest.raises(UnsupportedFilesystemError):
            open_store(f"file://{path}?trust_locks=0")
        with pytest.raises(UnsupportedFilesystemError):
            status(f"file://{path}?trust_locks=0")


def test_caution_of_a_mount_is_logged(path: str, mounted: object, caplog: pytest.LogCaptureFixture) -> None:
    mounted("beegfs x rw")  # type: ignore[operator]
    with FileStore(path):
        assert "tuneUseGlobalFileLocks" in caplog.text


# A server that does not answer


def test_call_stuck_in_the_kernel_is_logged(
    path: str, mounted: object, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hang_watchdog, "FIRST_S", 0.02)
    told, answers = threading.Event(), threading.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "stuck" in record.getMessage():
                told.set()

    handler = Told()
    logging.getLogger("fscoord").addHandler(handler)
    try:
        with FileStore(path, timeout=LIMIT_S) as store:
            store.set("k", "1")
            with kernel.instead(lambda name, real, arguments: answers.wait(LIMIT_S) if name == "fstat" else None):
                with start_thread(store.set, "k", "2") as thread:
                    assert told.wait(LIMIT_S)
                    answers.set()
                assert thread.result is None
            assert store.get("k") == b"2"
    finally:
        logging.getLogger("fscoord").removeHandler(handler)
    assert path in caplog.text


# Each step, by itself


def look_soon(store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next look of `store` at its name be due, and none after it."""
    monkeypatch.setattr(network, "PATH_CHECK_S", 1000.0)
    log_of(store).handle.path_checked_at = -math.inf


@pytest.mark.parametrize("how", ["direct", "locked"])
def test_look_opens_the_name_once_a_second_and_reads_between_do_not(
    how: str, path: str, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path, coherence=how) as store:
        store.set("k", "1")
        look_soon(store, monkeypatch)
        assert calls(kernel, store.get, "k") == ["open", "fstat", "fstat", "read"]
        assert calls(kernel, store.get, "k") == ["read"]
        store.compact()
        assert store.get("k") == b"1"
        look_soon(store, monkeypatch)
        assert calls(kernel, store.get, "k") == ["open", "fstat", "fstat", "open", "fstat", "read"]
        assert [os.path.basename(name) for what, name in kernel.calls if what == "open"][1] == "log"
        assert calls(kernel, store.get, "k") == ["read"]
        assert log_of(store).handle.owned_fds <= log_of(store).handle.fds_in_use()


def test_write_after_a_pause_checks_one_half_of_liveness_before_the_lock(
    path: str, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two is a request, and no other process can write during a request under the lock."""
    done: list[str] = []
    is_lost, hold = LivenessFile.is_lost, LivenessFile.hold
    monkeypatch.setattr(LivenessFile, "is_lost", lambda file: (done.append("name"), is_lost(file))[1])
    monkeypatch.setattr(LivenessFile, "hold", lambda file, number: (done.append("byte"), hold(file, number))[1])
    with FileStore(path, coherence="direct") as store:
        store.set("k", "1")
        lock = log_of(store).handle.lock
        try_lock = lock.try_lock
        lock.try_lock = lambda: (done.append("lock"), try_lock())[1]  # type: ignore[method-assign]
        for checked in ("name", "byte", "name"):
            look_soon(store, monkeypatch)
            log_of(store).liveness.checked_at = -math.inf
            done.clear()
            assert calls(kernel, store.set, "k", "2").count("open") == 1
            assert done == [checked, "lock"]
        done.clear()
        store.set("k", "3")
        assert done == ["lock"]


@pytest.mark.parametrize("how", ["direct", "locked"])
def test_reader_sees_at_the_next_path_check_that_the_log_has_shrunk(
    how: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "SETTLE_S", 0.01)
    with FileStore(path, coherence=how) as store:
        size = cut(store)
        look_soon(store, monkeypatch)
        with pytest.raises(StoreGoneError, match=f"was truncated to {size} bytes"):
            store.get("k")


@pytest.mark.parametrize("generations", [0, 1])
def test_file_deleted_during_a_look_is_gone_or_leads_to_a_later_generation(
    generations: int, path: str, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of generation 0 that is the end; of a later one generation 0 is asked where the log goes on."""
    with FileStore(path, coherence="direct") as store, FileStore(path, coherence="direct") as other:
        store.set("k", "1")
        for _ in range(generations):
            store.compact()
        assert store.get("k") == b"1"
        looked, known, file = [0], kernel.fstat, log_of(store).handle.file_identity

        def fstat(fd: int) -> os.stat_result:
            found = known(fd)
            if (found.st_dev, found.st_ino) == file:
                looked[0] += 1
                if looked[0] == 2:  # the first is by who opens it
                    return os.stat_result([*found[:3], 0, *found[4:]])
            return found  # type: ignore[no-any-return]

        look_soon(store, monkeypatch)
        kernel.fstat = fstat
        if generations:
            assert store.get("k") == b"1"
        else:
            with pytest.raises(StoreGoneError, match="was deleted"):
                store.get("k")
        kernel.fstat = known
        assert looked[0] >= 2
        assert other.get("k") == b"1"


def test_soft_lock_look_drops_the_cached_pages_of_the_log(path: str, kernel: SharedOs) -> None:
    dropped: list[tuple[int, ...]] = []
    kernel.posix_fadvise = lambda *arguments: dropped.append(arguments)
    with FileStore(path, lock="soft", coherence="locked") as store:
        store.set("k", "1")
        dropped.clear()
        assert calls(kernel, store.get, "k") == ["open", "fstat", "read"]
        assert dropped == [(log_of(store).handle.reader_fd, 0, 0, os.POSIX_FADV_DONTNEED)]
    dropped.clear()
    with FileStore(path, lock="soft", coherence="direct") as store:
        assert calls(kernel, store.get, "k") == ["read"]
        log_of(store).access._bypass_cache()
    assert not dropped


@pytest.mark.parametrize("times", [1, 2, 3])
def test_size_that_grows_before_the_data_arrives_is_no_error(times: int, path: str, kernel: SharedOs) -> None:
    with FileStore(path, coherence="locked") as store:
        store.set("k", "1")
        kernel.hidden, kernel.hides = -50, times
        store.set("k", "2")
        kernel.hides = 0
        assert store.get("k") == b"2"


@pytest.mark.parametrize("how", ["locked", "direct"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_sync_failure_is_an_error_of_the_write(error: int, how: str, path: str, kernel: SharedOs) -> None:
    with FileStore(path, coherence=how) as store:
        store.set("k", "1")
        with (
            kernel.fail(0, error, names=("fdatasync",)),
            pytest.raises(StoreUnavailableError, match=os.strerror(error)) as caught,
        ):
            store.set("k", "2")
        assert caught.value.maybe_applied
        store.set("k", "3")
        assert store.get("k") == b"3"
        assert log_of(store).access.coherence == how


def test_writer_without_direct_reads_goes_on_at_once(
    path: str, kernel: SharedOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogLock, "wait", lambda *_, **__: pytest.fail("it waits for the lock"))
    with FileStore(path, coherence="direct") as store, FileStore(path, coherence="direct") as other:
        other.set("k", "1")
        kernel.refuses_direct = "read"
        store.set("k", "2")
        assert log_of(store).access.coherence == "locked"
        assert store.get("k") == b"2"


def test_einval_of_a_read_that_was_not_direct_is_an_error(path: str, kernel: SharedOs) -> None:
    with FileStore(path, coherence="locked") as store:
        store.set("k", "1")
        failing = kernel.fail(0, system.errno.EINVAL, names=("read",), for_good=True)
        with failing, pytest.raises(StoreUnavailableError, match=os.strerror(errno.EINVAL)):
            store.get("k")
        assert store.get("k") == b"1"
