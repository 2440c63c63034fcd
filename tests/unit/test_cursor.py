"""Following a log: interruptions, half-written records, and what a handle remembers."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.faulty import faulty_os
from support.logs import LIMIT_S, Collector, Handle, look_at, make, opened, put, tear
from support.plain_reader import read_log

from fscoord import StoreUnavailableError
from fscoord._log.files import torn_tail
from fscoord._log.files.opening import LogOptions
from fscoord._log.files.torn_tail import examine
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.format.record import Record
from fscoord._log.locking.log_lock import OFD
from fscoord._log.log import Log
from fscoord._log.replay.cursor import CHUNK


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


class Interrupted(Exception):
    pass


class Nervous(Collector):
    """A state machine that is interrupted in the middle of taking in records, as often as it is told to be."""

    interruptions = 0

    def apply(self, records: Sequence[Record]) -> None:
        for found in records:
            if self.interruptions and len(self.records) % 7 == 3:
                self.interruptions -= 1
                raise Interrupted
            self.records.append(found)


@pytest.mark.parametrize("durable", [False, True])
def test_records_whose_application_was_interrupted_come_again_from_the_first(durable: bool, path: str) -> None:
    make(path, lambda handle: [handle.write(b"k", b"%d" % number) for number in range(40)], durable=durable)
    state_machine = Nervous()
    state_machine.interruptions = 3
    log = Log(path, state_machine, LogOptions(OFD), lambda: Session("host", 1))
    for _ in range(3):
        with pytest.raises(Interrupted):
            log.refresh(LIMIT_S)
    log.refresh(LIMIT_S)
    assert [found[2] for found in state_machine.records] == [b"%d" % number for number in range(40)]
    state_machine.interruptions = 1
    state_machine.records = state_machine.records[:3]
    with pytest.raises(Interrupted):
        log.update(record.SET, b"k", b"own", None, LIMIT_S)
    log.refresh(LIMIT_S)
    assert [found[2] for found in state_machine.records] == [b"%d" % number for number in range(40)] + [b"own"]
    log.close()


def test_record_that_was_seen_half_written_leaves_no_void_once_it_is_whole(path: str) -> None:
    """A long record takes its writer a while. A handle that looks meanwhile must not treat it as torn later."""
    data = make(path, lambda handle: handle.write(b"long", b"x" * 4 * CHUNK))
    put(path, data[: len(data) - CHUNK // 2])
    with opened(path) as early, opened(path) as late:
        assert early.look() == []
        put(path, data[: len(data) - 3 * CHUNK])
        assert late.look() == []
        put(path, data)
        early.write(b"behind", b"1")
        late.write(b"behind", b"2")
    log = read_log(Path(path).read_bytes())
    assert log.ends == "whole"
    assert "V" not in [kind for _, kind, *_ in log.records]


def test_bytes_that_look_damaged_without_the_lock_are_looked_at_again_with_it(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system shared by hosts may show bytes that are not there yet as zeros or not at all."""
    tear(path, 20, b"k", b"v")
    with opened(path) as handle:
        handle.write(b"new", b"value")
    verdicts: list[object] = [torn_tail.Damage(0, "seen too early")]
    monkeypatch.setattr(torn_tail, "examine", lambda *a, **k: verdicts.pop() if verdicts else examine(*a, **k))
    for read_only in (False, True):
        with opened(path, read_only=read_only) as handle:
            assert [found[1] for found in handle.look()] == [b"before", b"new"]
        assert not verdicts
        verdicts.append(torn_tail.Damage(0, "seen too early"))


def test_record_of_great_length_is_read_in_few_pieces(path: str) -> None:
    make(path, lambda handle: handle.write(b"long", b"x" * 100 * CHUNK))
    with faulty_os() as faulty:
        assert len(look_at(path)) == 1
        assert [name for name, _ in faulty.calls].count("read") < 12


def test_look_with_nothing_new_is_one_read(path: str) -> None:
    """And now and then a look at whether the file is still there."""
    make(path, lambda handle: handle.write(b"k", b"v"))
    with faulty_os() as faulty, opened(path) as handle:
        handle.look()
        faulty.calls.clear()
        handle.log.handle.path_checked_at = float("inf")
        for _ in range(10):
            handle.look()
        assert [name for name, _ in faulty.calls] == ["read"] * 10


def test_write_of_the_handle_itself_is_not_read_again(path: str) -> None:
    with faulty_os() as faulty, opened(path) as handle:
        handle.write(b"k", b"v")
        faulty.calls.clear()
        handle.log.handle.path_checked_at = float("inf")
        handle.write(b"k", b"w")
        assert [name for name, _ in faulty.calls] == ["read", "write"]
        handle.look()
        assert [name for name, _ in faulty.calls] == ["read", "write", "read"]


def test_tears_are_voided_on_files_that_are_not_real_too(fs) -> None:
    """pyfakefs: positional I/O, and what lseek returns, would belong to another file."""
    path = "/log"
    for kept in (1, 7, 8, 22, 23, 40, 700):
        tear(path, kept, b"torn", b"x" * 900)
        with opened(path, read_only=True) as reader:
            before = reader.look()
            with opened(path) as writer:
                writer.write(b"new", b"%d" % kept)
            assert reader.look()[:-1] == before
            assert reader.look()[-1][2] == b"%d" % kept
    data = Path(path).read_bytes()
    assert read_log(data).ends == "whole"
    assert [kind for _, kind, *_ in read_log(data).records].count("V") == 7


def test_handles_give_their_descriptors_back(path: str) -> None:
    tear(path, 20, b"k", b"v")
    handles = [Handle(path), Handle(path, read_only=True)]
    for handle in handles:
        handle.look()
    handles[0].write(b"k", b"v")
    before = len(os.listdir("/proc/self/fd"))
    for handle in handles:
        handle.look()
        handle.close()
    assert len(os.listdir("/proc/self/fd")) == before - 5


does: dict[str, Callable[[Handle], object]] = {
    "refresh": Handle.look,
    "update": lambda handle: handle.write(b"k", b"never written"),
    "look for who holds the lock": lambda handle: handle.log.read_ahead(),
}


@pytest.mark.parametrize("doing", does)
def test_records_read_just_before_an_interruption_are_read_again(
    doing: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path) as handle, opened(path) as other:
        handle.write(b"k", b"1")
        other.write(b"k", b"2")
        decode, calls = record.decode, []

        def interrupted(data: bytes, chain: int) -> object:
            calls.append(data)
            if len(calls) == 1:
                raise Interrupted
            return decode(data, chain)

        monkeypatch.setattr(record, "decode", interrupted)
        with pytest.raises(Interrupted):
            does[doing](handle)
        assert [found[2] for found in handle.look()] == [b"1", b"2"]
        assert len(calls) == 2


def test_bell_announcements_are_not_counted_twice(path: str) -> None:
    """Compaction writes that number of announcements into the next generation."""
    make(path, lambda handle: [handle.write(b"", b"", record.BELL), handle.write(b"k", b"v")])
    with opened(path, read_only=True) as handle:
        for _ in range(2):
            assert [found[2] for found in handle.look()] == [b"v"]
            assert handle.log.handle.bell == 1
            handle.log.cursor.reset()
            assert handle.log.handle.bell == 0


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


def test_durable_log_has_its_directory_synced_once_by_each_handle(path: str) -> None:
    make(path, lambda handle: handle.write(b"k", b"v"), durable=True)
    with faulty_os() as faulty, opened(path, durable=True) as handle:
        handle.look()
        synced = []
        for value in (b"1", b"2"):
            faulty.calls.clear()
            handle.write(b"k", value)
            synced.append([name for name, _ in faulty.calls if "sync" in name])
        assert synced == [["fdatasync", "fsync", "fdatasync"], ["fdatasync"]]  # who introduces itself writes twice
