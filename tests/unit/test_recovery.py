"""Reads of any length, and the recovery of a handle after an interruption."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faulty import faulty_os
from support.internals import log_of, state_of
from support.logs import LIMIT_S, Handle, make, opened, put, steps, tear
from support.plain_reader import read_log

from fscoord import CorruptLogError, FileStore, StoreError, StoreTimeoutError, StoreUnavailableError
from fscoord._log.files import safe_files, torn_tail
from fscoord._log.format import record
from fscoord._log.generations.compaction import Compactor
from fscoord._log.mount import Mount
from fscoord._log.recovery import APPLYING, POSITION
from fscoord._log.replay.cursor import CHUNK
from fscoord.inspect import dump


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 13, 1000])
def test_short_read_is_not_taken_for_the_end_of_the_log(most: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that may return less than there is."""
    monkeypatch.setattr(Mount, "reads_to_end", False)
    with opened(path) as handle, opened(path) as reader, opened(path) as other:
        for number in range(5):
            other.write(b"k", b"%d" % number)
        with faulty_os() as faulty:
            monkeypatch.setattr(faulty, "read", lambda fd, size: os.read(fd, min(size, most)))
            assert len(reader.look()) == 5
            handle.write(b"k", b"own")
        assert [found[2] for found in other.look()] == [b"0", b"1", b"2", b"3", b"4", b"own"]
    assert read_log(Path(path).read_bytes()).ends == "whole"


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


def test_cursor_knows_to_the_byte_if_the_file_has_the_rest_of_a_record(path: str) -> None:
    with opened(path) as handle:
        handle.write(b"k", b"v" * 500)
        size = os.path.getsize(path)
        handle.log.handle.offset, handle.log.handle.pending = size - 300, b"x" * 100
        assert handle.log.cursor._file_has(200)
        assert not handle.log.cursor._file_has(201)
        handle.log.handle.recovery = APPLYING  # all is read again


def test_record_seen_with_a_hole_is_read_again_once_it_is_filled(path: str) -> None:
    data = make(path, lambda handle: handle.write(b"k", b"x" * 1000))
    put(path, data[:-600] + bytes(600))
    with opened(path) as handle:
        assert handle.look() == []
        put(path, data)
        assert [found[2] for found in handle.look()] == [b"x" * 1000]


@pytest.mark.parametrize("read_only", [False, True])
def test_look_follows_into_later_generations_without_the_lock(read_only: bool, path: str) -> None:
    with FileStore(path) as store, FileStore(path, read_only=read_only) as reader:
        store.set("k", "1")
        assert reader.get("k") == b"1"
        store.compact()
        store.set("k", "2")
        store.compact()
        store.set("k", "3")
        log_of(store).handle.lock.try_lock()
        log_of(reader).refresh(0)
        log_of(store).handle.lock.unlock()
        assert state_of(reader).values == {b"k": b"3"}
        assert log_of(reader).handle.header.generation == 2


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


def test_reader_of_a_log_that_is_not_durable_syncs_nothing(path: str) -> None:
    with FileStore(path) as store, FileStore(path) as reader:
        assert not reader.check(["k"])
        store.set("k", "1")
        store.compact()
        with faulty_os() as faulty:
            assert reader.get("k") == b"1"
        assert not [name for name, _ in faulty.calls if "sync" in name]


# -- mending -----------------------------------------------------------------------------------------------------------


def test_interrupted_handle_waits_for_the_lock_like_any_other(path: str) -> None:
    with opened(path) as handle, opened(path) as other:
        other.write(b"k", b"v")
        other.log.handle.lock.try_lock()
        handle.log.handle.recovery = POSITION
        with pytest.raises(StoreTimeoutError, match="host:1 holds it"):
            handle.log.update(record.SET, b"k", b"w", None, 0)
        other.log.handle.lock.unlock()
        handle.write(b"k", b"w")


def test_descriptor_left_open_by_an_interruption_is_closed(path: str) -> None:
    with opened(path) as handle:
        left = os.open(path, os.O_RDONLY)
        handle.log.handle.owned_fds.add(left)
        handle.look()
        os.fstat(left)
        handle.log.handle.recovery = POSITION
        handle.look()
        assert left not in handle.log.handle.owned_fds
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(left)


def test_recovery_keeps_the_lock_and_its_descriptor(path: str) -> None:
    with opened(path) as handle:
        handle.write(b"k", b"v")
        lock, descriptor = handle.log.handle.lock, handle.log.handle.lock.fd
        for trouble in (POSITION, APPLYING):
            handle.log.handle.recovery = trouble
            assert [found[2] for found in handle.look()] == [b"v"]
            assert handle.log.handle.lock is lock
            assert lock.fd == descriptor


@pytest.mark.parametrize("inner", ["look", "write"])
@pytest.mark.parametrize("outer", ["look", "write"])
def test_operation_nested_in_another_of_the_same_thread_is_refused(
    outer: str, inner: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Callable[[Handle], object]] = {
        "look": lambda handle: handle.log.refresh(LIMIT_S),
        "write": lambda handle: handle.write(b"k", b"own"),
    }
    with opened(path) as handle, opened(path) as other:
        handle.look()
        other.write(b"k", b"v")
        with monkeypatch.context() as patch:
            patch.setattr(handle._collector, "apply", lambda _: calls[inner](handle))
            with pytest.raises(StoreError, match="signal handler or finalizer"):
                calls[outer](handle)
        assert [found[2] for found in handle.look()] == [b"v"]
        handle.write(b"k", b"own")


@pytest.mark.parametrize("writes", [False, True])
def test_failed_unlock_is_marked_maybe_applied_only_for_a_write(writes: bool, path: str) -> None:
    with opened(path) as handle:
        handle.write(b"k", b"v")
        lock = handle.log.handle.lock
        real = lock.unlock

        def fails() -> None:
            real()
            raise OSError(errno.EIO, "broken")

        lock.unlock = fails
        with pytest.raises(StoreUnavailableError, match="broken") as caught:
            handle.log.update(record.SET if writes else 0, b"k", b"w", None, LIMIT_S)
        lock.unlock = real
        assert caught.value.maybe_applied == writes
        assert len(handle.look()) == 1 + writes


def test_descriptor_number_0_is_valid_and_negative_ones_are_not_closed(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    with opened(path) as handle, monkeypatch.context() as patch:
        patch.setattr(safe_files, "close_owned", lambda fd, _: closed.append(fd))
        for fd in (-1, 0, 1):
            handle.log.handle.close_fd(fd)
        assert closed == [0, 1]


def test_reopening_that_fails_is_repeated_by_the_next_operation(path: str) -> None:
    with faulty_os() as faulty, opened(path) as handle:
        handle.write(b"k", b"v")
        handle.log.handle.recovery = POSITION
        for _ in range(2):
            with (
                faulty.fail(0, errno.EMFILE, names=("open",)),
                pytest.raises(StoreUnavailableError, match="opening the log again"),
            ):
                handle.look()
        assert [found[2] for found in handle.look()] == [b"v"]


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


@pytest.mark.parametrize("doing", does)
def test_tail_that_cannot_be_voided_is_not_reported_as_a_lock_error(doing: str, path: str) -> None:
    tear(path, 20, b"k", b"v")
    with faulty_os() as faulty, opened(path) as handle:
        with (
            faulty.fail(0, errno.EOPNOTSUPP, names=("ftruncate",)) as failed,
            pytest.raises(StoreUnavailableError, match="using the log") as caught,
        ):
            does[doing](handle)
        assert failed
        assert not caught.value.maybe_applied


# -- when to compact ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "more", "live", "generation", "tried", "next_at"),
    [
        (1000, 100, 900, 0, True, 1801),  # twice what lives, which is sooner than as much again as the least
        (1000, 100, 5000, 0, True, 2101),
        (10_000, 0, 9_000, 0, True, 12_501),  # a quarter of what there is
        (1000, 100, 100, 0, True, 1351),  # though little lives, not before a quarter of the least is added
        (1600, 0, 1000, 1, False, 2001),  # of a later generation more than lives must be garbage
        (2001, 0, 1000, 1, True, 2252),
        (2000, 0, 1000, 1, False, 2251),
        (600, 0, 100, 1, False, 851),  # and more than half of the least
        (601, 0, 100, 1, True, 852),
        (601, 0, 101, 1, False, 852),
    ],
)
def test_compaction_is_tried_when_it_pays_off_and_not_again_too_soon(
    offset: int, more: int, live: int, generation: int, tried: bool, next_at: int, path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    done: list[str] = []
    with FileStore(path, compact_bytes=1000) as store:
        log = log_of(store)
        monkeypatch.setattr(Compactor, "_live_size", lambda _: live)
        monkeypatch.setattr(Compactor, "compact", lambda _: done.append("compacted"))
        with monkeypatch.context() as patch:
            patch.setattr(log.handle, "offset", offset)
            patch.setattr(log.handle, "header", log.handle.header._replace(generation=generation))
            assert log.compactor.compact_if_due(more) == tried
        assert done == ["compacted"] * tried
        assert log.handle.compact_at == next_at


def test_run_number_wraps_around_to_zero(path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        log = log_of(store)
        log.handle.header = log.handle.header._replace(run=(1 << 32) - 1)
        log.handle.lock.try_lock()
        log.handle.is_settled, log.table.is_ended = False, True  # as for who opens a finished log
        log.compactor.begin_run((), 0)
        log.handle.lock.unlock()
        with FileStore(path) as other:
            assert (log_of(other).handle.header.run, log_of(other).handle.header.generation) == (0, 1)


# -- dump --------------------------------------------------------------------------------------------------------------


def test_dump_shows_a_last_record_of_any_length(path: str) -> None:
    for size in (0, 1, 1 << 18, 1 << 19):
        make(path, lambda handle, size=size: handle.write(b"k", b"x" * size))  # type: ignore[misc]
        assert len(list(dump(path))[-1].value) == size


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


def test_dump_reads_on_after_a_void_to_the_end_of_the_log(path: str) -> None:
    start = tear(path, 30, b"k", b"v" * 50)
    with opened(path) as handle:
        handle.write(b"new", b"x" * 3000)
    entries = list(dump(path))
    assert [entry.kind for entry in entries[2:]] == ["void", "session", "set"]
    assert entries[2].value == b"%d" % start
    assert [entry.offset for entry in entries[3:]] == [step.start for step in steps(Path(path).read_bytes())[-2:]]
