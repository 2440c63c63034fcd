"""Full and failing disks: the error says whether the write may have taken effect, and acknowledged writes stay."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from faults.persistence import same_files
from support.faulty import COUNTED, FaultyOs, faulty_os
from support.internals import Mount
from support.logs import opened, steps
from support.plain_reader import read_log

from fscoord import FileStore, FscoordError, StoreUnavailableError
from fscoord.store import Store

LIMIT_S = 60
BUT_FSTAT = tuple(name for name in COUNTED if name != "fstat")
ERRORS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.EINVAL]

Operation = Callable[[Store], Any]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def faulty() -> Iterator[FaultyOs]:
    with faulty_os() as faulty:
        yield faulty


def fill(path: str) -> None:
    with FileStore(path) as store:
        store.multi_set(["k", "n"], ["old", "1"])
        store.queue_push("q", "first")
        store.queue_push("q", "second")


def state(path: str) -> Any:
    """Everything in the store, as the plain reader finds it; the log must be whole or torn."""
    log = read_log(Path(path).read_bytes())
    assert log.ends in ("whole", "torn")
    return log.values, log.queues


# -- a call fails ------------------------------------------------------------------------------------------------------


def outcome(operation: Operation, store: Store) -> FscoordError | None:
    try:
        operation(store)
    except FscoordError as error:
        return error
    return None


@pytest.mark.exhaustive
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_log_survives_the_failure_of_any_call_while_it_is_made_or_opened(
    error: int, for_good: bool, path: str, faulty: FaultyOs
) -> None:
    for exists in (False, True):
        number, failed = 0, [""]
        while failed:
            if exists:
                fill(path)
            with faulty.fail(number, error, names=BUT_FSTAT, for_good=for_good) as failed:
                try:
                    with FileStore(path, timeout=LIMIT_S) as store:
                        store.set("k", "v")
                except FscoordError:
                    pass
            number += 1
            with FileStore(path) as store:
                assert store.check(["k"]) or not exists
                store.set("then", "1")
            left = {name for name in os.listdir(os.path.dirname(path)) if not name.endswith((".alive", ".bell"))}
            assert left == {"store"} or (failed == ["unlink"] or for_good)
            for name in os.listdir(os.path.dirname(path)):
                os.unlink(os.path.join(os.path.dirname(path), name))
        assert number > 5


# -- the disk is full --------------------------------------------------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Let the kernel write files up to `size` and no further, to the byte, as a full disk or a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.exhaustive
@pytest.mark.parametrize("introduced", [False, True])
def test_write_that_stops_at_any_byte_is_not_applied_and_can_be_repeated(introduced: bool, path: str) -> None:
    """The torn record is the record itself, or the session record of a handle that has not written before."""
    fill(path)
    content = b"new" + bytes(20)
    length = next_size(path, content, introduced) - os.path.getsize(path)
    for kept in range(length):
        with FileStore(path, timeout=LIMIT_S) as store:
            if introduced:
                store.set("introduced", "1")
            before = state(path)
            start = os.path.getsize(path)
            with file_size_limit(start + kept), pytest.raises(StoreUnavailableError, match="File too large") as caught:
                store.set("k", content)
            assert caught.value.errno == errno.EFBIG
            assert not caught.value.maybe_applied
            assert os.path.getsize(path) == start + kept
            assert state(path) == before
            assert store.get("k") == before[0][b"k"]
            with file_size_limit(start + (kept and kept + 300)), pytest.raises(StoreUnavailableError):
                store.set("k", content)  # there is no room for the void either
            store.set("k", b"%d" % kept)
            assert store.get("k") == b"%d" % kept
        assert state(path)[0] == before[0] | {b"k": b"%d" % kept}
    assert read_log(Path(path).read_bytes()).ends == "whole"


def next_size(path: str, content: bytes, introduced: bool) -> int:
    """The size of the log after the first record that the test writes."""
    copy = path + "-copy"
    Path(copy).write_bytes(Path(path).read_bytes())
    os.chmod(copy, 0o600)
    with same_files(), FileStore(copy) as store:
        store.set("k", content)
    starts = [record[0] for record in read_log(Path(copy).read_bytes()).records]
    return os.path.getsize(path) + (os.path.getsize(copy) - starts[-1] if introduced else starts[-1] - starts[-2])


def test_full_disk_is_reported_and_writes_go_on_when_there_is_room(small_disk: Path) -> None:
    path = str(small_disk / "store")
    with FileStore(path) as store, FileStore(path, read_only=True) as reader, FileStore(path) as other:
        number = 0
        while (raised := outcome(lambda store: store.set(f"key {number}", b"x" * 1500), store)) is None:  # noqa: B023
            number += 1
        assert isinstance(raised, StoreUnavailableError)
        assert "No space left on device; free some space" in str(raised)
        assert raised.errno == errno.ENOSPC
        assert not raised.maybe_applied
        assert number > 20
        keys = sorted(f"key {done}" for done in range(number))
        for handle in (store, reader, other):
            assert handle.list_keys() == keys
        for handle in (store, other):
            with pytest.raises(StoreUnavailableError):
                handle.set("more", b"x" * 1500)
        subprocess.run(["mount", "-o", "remount,size=256k", str(small_disk)], check=True)
        other.set("more", "now")
        store.set("still more", "too")
        assert reader.list_keys() == sorted([*keys, "more", "still more"])
    log = read_log(Path(path).read_bytes())
    assert log.ends == "whole"
    assert [kind for _, kind, *_ in log.records].count("V") >= 1


def test_disk_without_room_for_a_header_is_left_without_a_log(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(64 << 10))
    with pytest.raises(StoreUnavailableError, match="No space left"):
        FileStore(small_disk / "store")
    assert os.listdir(small_disk) == ["ballast"]


# -- the disk fails to sync --------------------------------------------------------------------------------------------


@pytest.fixture
def durable(path: str, faulty: FaultyOs) -> Iterator[FileStore]:
    with FileStore(path, durable=True, timeout=LIMIT_S) as store:
        store.set("k", "old")
        faulty.calls.clear()
        yield store


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC], ids=errno.errorcode.get)
def test_handle_that_failed_to_sync_refuses_all_further_calls(
    error: int, path: str, faulty: FaultyOs, durable: FileStore
) -> None:
    """The kernel may have dropped what it could not write, and says so only once."""
    with faulty.fail(0, error, names=("fdatasync",)), pytest.raises(StoreUnavailableError, match="syncing") as caught:
        durable.set("k", "new")
    assert caught.value.maybe_applied
    assert caught.value.errno == error
    for call in (lambda: durable.get("k"), lambda: durable.set("k", "newer"), lambda: durable.list_keys()):
        with pytest.raises(StoreUnavailableError, match="could not be synced"):
            call()
    with FileStore(path, timeout=LIMIT_S) as store:
        store.set("k", "after all")
        assert store.get("k") == b"after all"


def test_directory_that_cannot_be_synced_is_no_acknowledgement(path: str, faulty: FaultyOs) -> None:
    FileStore(path, durable=True).close()
    with FileStore(path, durable=True, timeout=LIMIT_S) as store:
        with faulty.fail(0, errno.EIO, names=("fsync",)), pytest.raises(StoreUnavailableError, match="syncing"):
            store.set("k", "v")
        with pytest.raises(StoreUnavailableError, match="could not be synced"):
            store.set("k", "v")


def test_reader_that_cannot_sync_its_records_refuses_all_further_reads(
    path: str, faulty: FaultyOs, durable: FileStore
) -> None:
    for read_only in (True, False):
        with FileStore(path, read_only=read_only, timeout=LIMIT_S) as reader:
            durable.set("k", "new")
            with faulty.fail(0, errno.EIO, names=("fdatasync",)), pytest.raises(StoreUnavailableError, match="syncing"):
                reader.get("k")
            with pytest.raises(StoreUnavailableError, match="could not be synced"):
                reader.get("k")
    assert durable.get("k") == b"new"


def test_durable_log_is_synced_before_a_record_can_be_acted_on(path: str, faulty: FaultyOs) -> None:
    """Write, sync, unlock, acknowledge; the directory before the first; a reader syncs what it has not seen before."""
    with FileStore(path, durable=True, timeout=LIMIT_S) as store:
        names = [name for name, _ in faulty.calls if name in ("write", "fsync", "link")]
        assert names == ["write", "fsync", "link", "fsync"], "the header, then its name"
        faulty.calls.clear()
        store.set("k", "v")
        names = [name for name, _ in faulty.calls if name in ("write", "fdatasync", "fsync")]
        assert names[0] == "write", "the liveness file"
        assert names[1:] == ["write", "fdatasync", "fsync", "write", "fdatasync"]
        with FileStore(path, timeout=LIMIT_S) as other:
            faulty.calls.clear()
            store.set("k", "w")
            assert [name for name, _ in faulty.calls if name in ("write", "fdatasync", "fsync")] == [
                "write",
                "fdatasync",
            ]
            faulty.calls.clear()
            assert other.get("k") == b"w"
            assert [name for name, _ in faulty.calls if name in ("write", "fdatasync")] == ["fdatasync"]
            faulty.calls.clear()
            assert other.get("k") == b"w"
            assert "fdatasync" not in [name for name, _ in faulty.calls]


def test_durable_log_whose_header_is_written_late_is_synced_too(path: str, faulty: FaultyOs) -> None:
    Path(path).touch(0o600)
    FileStore(path, durable=True).close()
    assert [name for name, _ in faulty.calls if name in ("write", "fsync")] == ["write", "fsync"]


def test_durable_log_is_locked_until_it_is_synced(path: str, faulty: FaultyOs, durable: FileStore) -> None:
    import fcntl
    import struct

    held = []

    def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "fdatasync":
            with open(path, "rb+") as file:
                request = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 1 << 62, 1, 0)
                try:
                    fcntl.fcntl(file, fcntl.F_OFD_SETLK, request)
                except BlockingIOError:
                    held.append(True)

    with faulty.instead(does):
        durable.set("k", "new")
    assert held == [True]


def test_log_that_is_not_durable_is_never_synced(path: str, faulty: FaultyOs) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        assert other.get("k") == b"v"
    assert not {"fsync", "fdatasync"} & {name for name, _ in faulty.calls}


# -- the disk fails to read --------------------------------------------------------------------------------------------


def test_read_that_fails_changes_nothing_and_can_be_repeated(path: str, faulty: FaultyOs) -> None:
    fill(path)
    with FileStore(path, timeout=LIMIT_S) as store, FileStore(path) as other:
        other.set("k", "new")
        with (
            faulty.fail(0, errno.EIO, names=("read",)),
            pytest.raises(StoreUnavailableError, match="reading") as caught,
        ):
            store.get("k")
        assert not caught.value.maybe_applied
        assert store.get("k") == b"new"


@pytest.mark.parametrize("fit", [0, 10, 10_000])
def test_error_of_a_failed_write_says_whether_the_record_may_be_there(fit: int, path: str, faulty: FaultyOs) -> None:
    """Once its last byte is written a record counts, even if its writer gets an error."""
    fill(path)

    def does(name: str, real: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if name == "write":
            real(arguments[0], arguments[1][:fit])
            raise OSError(errno.EIO, "so much was written")

    with FileStore(path, timeout=LIMIT_S) as store, FileStore(path, read_only=True) as reader:
        store.set("introduced", "1")
        with faulty.instead(does), pytest.raises(StoreUnavailableError) as caught:
            store.set("k", "new")
        assert caught.value.maybe_applied
        found = b"new" if fit == 10_000 else b"old"
        assert reader.get("k") == store.get("k") == found
        store.append("k", "+")
        assert reader.get("k") == store.get("k") == found + b"+"


def test_reads_and_writes_of_one_byte_at_a_time_give_the_same(
    path: str, faulty: FaultyOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short read is no end of the file where the kernel may return less, and a short write no failure."""
    monkeypatch.setattr(Mount, "reads_to_end", False)
    fill(path)
    real_read, real_write = faulty.read, faulty.write
    faulty.read = lambda fd, size: real_read(fd, min(size, 1))  # type: ignore[method-assign]
    faulty.write = lambda fd, data: real_write(fd, data[:1])  # type: ignore[method-assign]
    with FileStore(path, timeout=LIMIT_S) as store, FileStore(path, read_only=True) as reader:
        assert store.get("k") == b"old"
        store.set("k", b"longer")
        assert reader.get("k") == b"longer"
        assert [store.queue_pop("q") for _ in range(2)] == [b"first", b"second"]
    with opened(path) as handle:
        assert handle.look() == [step.record for step in steps(Path(path).read_bytes()) if step.record]
