"""Following a log whatever the kernel gives at once, and mending what an interruption has left of a handle."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faulty import faulty_os
from support.logs import LIMIT_S, Handle, make, opened, put, steps, tear
from support.plain_reader import read_log

from fscoord import CorruptLogError, FileStore, StoreError, StoreTimeoutError, StoreUnavailableError
from fscoord._log.format import record
from fscoord._log.generations.compaction import Compactor
from fscoord._log.io import safe_files, torn_tail
from fscoord._log.io.cursor import CHUNK
from fscoord._log.recovery import APPLYING, POSITION
from fscoord.inspect import dump


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 13, 1000])
def test_a_read_that_brings_less_than_was_asked_for_is_no_end(
    most: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as handle, opened(path) as reader, opened(path) as other:
        for number in range(5):
            other.write(b"k", b"%d" % number)
        with faulty_os() as faulty:
            monkeypatch.setattr(faulty, "read", lambda fd, size: os.read(fd, min(size, most)))
            assert len(reader.look()) == 5
            handle.write(b"k", b"own")
        assert [found[2] for found in other.look()] == [b"0", b"1", b"2", b"3", b"4", b"own"]
    assert read_log(Path(path).read_bytes()).ends == "whole"


def test_what_a_record_promises_is_not_asked_for_before_it_is_there(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tear(path, CHUNK + 100, b"k", bytes(8 * CHUNK))
    asked: list[int] = []
    with faulty_os() as faulty, opened(path) as handle:
        monkeypatch.setattr(faulty, "read", lambda fd, size: (asked.append(size), os.read(fd, size))[1])
        assert [found[1] for found in handle.look()] == [b"before"]
        assert max(asked) == CHUNK


def test_what_a_record_promises_is_there_or_not_to_the_byte(path: str) -> None:
    with opened(path) as handle:
        handle.write(b"k", b"v" * 500)
        size = os.path.getsize(path)
        handle.log.handle.offset, handle.log.handle.pending = size - 300, b"x" * 100
        assert handle.log.cursor._file_has(200)
        assert not handle.log.cursor._file_has(201)
        handle.log.handle.recovery = APPLYING  # all is read again


def test_what_was_seen_with_a_hole_is_read_again_once_it_may_be_filled(path: str) -> None:
    data = make(path, lambda handle: handle.write(b"k", b"x" * 1000))
    put(path, data[:-600] + bytes(600))
    with opened(path) as handle:
        assert handle.look() == []
        put(path, data)
        assert [found[2] for found in handle.look()] == [b"x" * 1000]


@pytest.mark.parametrize("read_only", [False, True])
def test_who_looks_goes_on_into_the_next_generation_without_a_lock_and_in_the_same_look(
    read_only: bool, path: str
) -> None:
    with FileStore(path) as store, FileStore(path, read_only=read_only) as reader:
        store.set("k", "1")
        assert reader.get("k") == b"1"
        store.compact()
        store.set("k", "2")
        store.compact()
        store.set("k", "3")
        store._log.handle.lock.try_lock()
        reader._log.refresh(0)
        store._log.handle.lock.unlock()
        assert reader._state.values == {b"k": b"3"}
        assert reader._log.handle.header.generation == 2


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("late", [(record.SET, b"k", b"late"), (record.LEAVE, b"", b"")])
def test_what_stands_after_a_seal_that_was_read_with_it_counts_for_nobody(
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
        assert (other.get("k"), other._log.table.left) == (b"v", 0)
        assert (store.get("k"), store._log.table.left) == (b"v", 0)
        assert other._log.handle.header.generation == 1
    with FileStore(path, read_only=read_only) as fresh:
        assert (fresh.get("k"), fresh._log.table.left, fresh._log.handle.header.generation) == (b"v", 0, 1)


def test_of_a_durable_log_what_was_read_is_synced_before_one_goes_on_elsewhere(path: str) -> None:
    with FileStore(path, durable=True) as store, FileStore(path) as reader:
        assert not reader.check(["k"])
        store.set("k", "1")
        store.compact()
        with faulty_os() as faulty:
            assert reader.get("k") == b"1"
        names = [name for name, _ in faulty.calls]
        assert names.index("fdatasync") < names.index("open")


def test_of_a_log_that_is_not_durable_nothing_is_synced_by_who_reads(path: str) -> None:
    with FileStore(path) as store, FileStore(path) as reader:
        assert not reader.check(["k"])
        store.set("k", "1")
        store.compact()
        with faulty_os() as faulty:
            assert reader.get("k") == b"1"
        assert not [name for name, _ in faulty.calls if "sync" in name]


# -- mending -----------------------------------------------------------------------------------------------------------


def test_who_had_been_interrupted_waits_for_the_lock_as_anybody_does(path: str) -> None:
    with opened(path) as handle, opened(path) as other:
        other.write(b"k", b"v")
        other.log.handle.lock.try_lock()
        handle.log.handle.recovery = POSITION
        with pytest.raises(StoreTimeoutError, match="host:1 holds it"):
            handle.log.update(record.SET, b"k", b"w", None, 0)
        other.log.handle.lock.unlock()
        handle.write(b"k", b"w")


def test_what_an_interruption_left_open_is_closed(path: str) -> None:
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


def test_who_was_interrupted_keeps_its_lock_and_opens_no_more_than_it_must(path: str) -> None:
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
def test_an_operation_in_the_middle_of_another_of_the_same_thread_is_refused(
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
def test_only_who_writes_may_have_written_when_the_lock_cannot_be_given_back(writes: bool, path: str) -> None:
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


def test_a_descriptor_may_have_any_number_that_is_none_below_zero(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    with opened(path) as handle, monkeypatch.context() as patch:
        patch.setattr(safe_files, "close_owned", lambda fd, _: closed.append(fd))
        for fd in (-1, 0, 1):
            handle.log.handle.close_fd(fd)
        assert closed == [0, 1]


def test_a_log_that_cannot_be_opened_again_is_tried_again_by_the_next_operation(path: str) -> None:
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
def test_a_tail_that_is_damaged_after_all_is_not_voided(doing: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tear(path, 20, b"k", b"v" * 50)
    before = Path(path).read_bytes()
    monkeypatch.setattr(torn_tail, "examine", lambda *_, **__: torn_tail.Damage(start, "as a test says"))
    with opened(path) as handle:
        with pytest.raises(CorruptLogError, match="as a test says"):
            does[doing](handle)
        assert Path(path).read_bytes() == before
        monkeypatch.undo()


@pytest.mark.parametrize("doing", does)
def test_a_tail_that_cannot_be_voided_is_no_trouble_with_the_lock(doing: str, path: str) -> None:
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
def test_a_log_is_compacted_when_that_is_worth_it_and_not_again_too_soon(
    offset: int, more: int, live: int, generation: int, tried: bool, next_at: int, path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    done: list[str] = []
    with FileStore(path, compact_bytes=1000) as store:
        log = store._log
        monkeypatch.setattr(Compactor, "_live_size", lambda _: live)
        monkeypatch.setattr(Compactor, "compact", lambda _: done.append("compacted"))
        with monkeypatch.context() as patch:
            patch.setattr(log.handle, "offset", offset)
            patch.setattr(log.handle, "header", log.handle.header._replace(generation=generation))
            assert log.compactor.compact_if_due(more) == tried
        assert done == ["compacted"] * tried
        assert log.handle.compact_at == next_at


def test_the_number_of_a_life_begins_again_when_it_is_used_up(path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        log = store._log
        log.handle.header = log.handle.header._replace(life=(1 << 32) - 1)
        log.handle.lock.try_lock()
        log.handle.is_settled, log.table.is_ended = False, True  # as for who opens a finished log
        log.compactor.begin_life(None)
        log.handle.lock.unlock()
        with FileStore(path) as other:
            assert (other._log.handle.header.life, other._log.handle.header.generation) == (0, 1)


# -- dump --------------------------------------------------------------------------------------------------------------


def test_a_record_at_the_end_is_told_however_long_it_is(path: str) -> None:
    for size in (0, 1, 1 << 18, 1 << 19):
        make(path, lambda handle, size=size: handle.write(b"k", b"x" * size))  # type: ignore[misc]
        assert len(list(dump(path))[-1].value) == size


@pytest.mark.parametrize("what", ["another log", "no log"])
def test_a_generation_that_cannot_be_dumped_is_said_and_closed(what: str, path: str, tmp_path: Path) -> None:
    with FileStore(path) as store:
        store.set("k", "v")
        store.compact()
        later = store._log.handle.file
    make(str(tmp_path / "other"), lambda handle: handle.write(b"k", b"v"))
    put(later, (tmp_path / "other").read_bytes() if what == "another log" else b"text")
    before = len(os.listdir("/proc/self/fd"))
    entries = dump(path)
    assert next(entries).generation == 0
    with pytest.raises(CorruptLogError, match=r"not the generation|not a log of fscoord"):
        list(entries)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_log_is_told_to_its_end_whichever_bytes_a_void_is_followed_by(path: str) -> None:
    start = tear(path, 30, b"k", b"v" * 50)
    with opened(path) as handle:
        handle.write(b"new", b"x" * 3000)
    entries = list(dump(path))
    assert [entry.kind for entry in entries[2:]] == ["void", "session", "set"]
    assert entries[2].value == b"%d" % start
    assert [entry.offset for entry in entries[3:]] == [step.start for step in steps(Path(path).read_bytes())[-2:]]
