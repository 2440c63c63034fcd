"""Reads of any length, and the recovery of a handle after an interruption."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faulty import faulty_os
from support.internals import CHUNK, log_of, record, torn_tail
from support.logs import LIMIT_S, Handle, make, opened, put, tear

from fscoord import CorruptLogError, FileStore, StoreUnavailableError
from fscoord.inspect import dump


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


# -- reading -----------------------------------------------------------------------------------------------------------


def test_short_read_without_the_lock_is_the_end_where_the_kernel_reads_to_the_end(path: str) -> None:
    """A writer, and a handle that has not joined a run, read again: a read may be short because of a disk error."""
    with opened(path) as reader, opened(path) as other, faulty_os() as faulty:
        for joined, locked in ((False, False), (True, False), (True, True)):
            if joined:
                reader.log.follower.settle()
            other.write(b"k", b"value")
            faulty.calls.clear()
            if locked:
                reader.write(b"k", b"own")
            else:
                reader.look()
            assert [name for name, _ in faulty.calls].count("read") == (1 if joined and not locked else 2)


def test_read_size_is_bounded_until_the_whole_record_is_in_the_file(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tear(path, CHUNK + 100, b"k", bytes(8 * CHUNK))
    asked: list[int] = []
    with faulty_os() as faulty, opened(path) as handle:
        monkeypatch.setattr(faulty, "read", lambda fd, size: (asked.append(size), os.read(fd, size))[1])
        assert [found[1] for found in handle.look()] == [b"before"]
        assert max(asked) == CHUNK


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("late", [(record.SET, b"k", b"late"), (record.LEAVE, b"", b"")])
def test_record_after_a_seal_is_ignored_by_all_handles(
    late: tuple[int, bytes, bytes], read_only: bool, path: str
) -> None:
    """It may be of a writer that had lost the lock. A handle that read the seal before would not see it."""
    with FileStore(path) as store, FileStore(path, read_only=read_only) as other:
        store.set("k", "v")
        assert other.get("k") == b"v"
        store.compact()
        with open(path, "r+b") as file:
            data = file.read()
            file.write(record.encode(*late, 9, 1, record.chain_at_end(data))[0])
        assert (other.get("k"), log_of(other).table.left) == (b"v", set())
        assert (store.get("k"), log_of(store).table.left) == (b"v", set())
        assert log_of(other).handle.header.generation == 1
    with FileStore(path, read_only=read_only) as fresh:
        assert (fresh.get("k"), log_of(fresh).table.left, log_of(fresh).handle.header.generation) == (b"v", set(), 1)


def test_durable_log_is_synced_before_a_reader_follows_to_the_next_generation(path: str) -> None:
    with FileStore(path, durable=True) as store, FileStore(path) as reader:
        assert not reader.check(["k"])
        store.set("k", "1")
        store.compact()
        with faulty_os() as faulty:
            assert reader.get("k") == b"1"
        names = [name for name, _ in faulty.calls]
        assert names.index("fdatasync") < names.index("open")


# -- mending -----------------------------------------------------------------------------------------------------------


does: dict[str, Callable[[Handle], object]] = {
    "write": lambda handle: handle.write(b"k", b"v"),
    "leave": lambda handle: handle.log.leave(1, LIMIT_S, lambda _: None),
}


@pytest.mark.parametrize("doing", does)
def test_tail_found_damaged_is_not_voided(doing: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tear(path, 20, b"k", b"v" * 50)
    before = Path(path).read_bytes()
    monkeypatch.setattr(torn_tail, "examine", lambda *_, **__: torn_tail.Damage(start, "as a test says"))
    with opened(path) as handle:
        with pytest.raises(CorruptLogError, match="as a test says"):
            does[doing](handle)
        assert Path(path).read_bytes() == before
        monkeypatch.undo()


# -- dump --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["another log", "no log"])
def test_dump_of_a_bad_generation_is_an_error_and_closes_the_file(what: str, path: str, tmp_path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        store.compact()
        later = log_of(store).handle.file
    make(str(tmp_path / "other"), lambda handle: handle.write(b"k", b"v"))
    put(later, (tmp_path / "other").read_bytes() if what == "another log" else b"text")
    before = len(os.listdir("/proc/self/fd"))
    entries = dump(path)
    assert next(entries).generation == 0
    with pytest.raises(CorruptLogError, match=r"not the next generation|not a log of fscoord"):
        list(entries)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EOPNOTSUPP, errno.EAGAIN])
def test_torn_tail_that_cannot_be_voided_leaves_the_lock_usable(error: int, path: str) -> None:
    tear(path, 20, b"k", b"v")
    with faulty_os() as faulty, opened(path) as handle:
        with (
            faulty.fail(0, error, names=("ftruncate",)) as failed,
            pytest.raises(StoreUnavailableError, match="using the log") as caught,
        ):
            handle.write(b"k", b"v")
        assert failed
        assert not caught.value.maybe_applied
        handle.write(b"k", b"w")
        assert [found[2] for found in handle.look()] == [b"the tear", b"w"]
