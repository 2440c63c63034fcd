"""The steps of a compaction, and the state that each leaves behind if it fails."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.faulty import FaultyOs, faulty_os
from support.internals import log_of
from support.logs import tear
from support.plain_reader import read_log
from unit.test_generations import generation, names

from fscoord import FileStore, StoreUnavailableError
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.generations import compaction
from fscoord._log.generations.compaction import Compactor
from fscoord._log.locking.log_lock import KINDS, LogLock


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def kernel() -> Iterator[FaultyOs]:
    with faulty_os() as faulty:
        yield faulty


class Sealing(Exception):
    """The next record would be the seal."""


def before_the_seal(store: FileStore, monkeypatch: pytest.MonkeyPatch, does: Any) -> None:
    """Let `store` call ``does(path of the new generation)`` when all that is left to write is the seal."""
    append = log_of(store).writer.append

    def append_late(kind: int, *rest: Any) -> None:
        if kind == record.SEAL:
            (name,) = names(Path(log_of(store).path))
            does(os.path.join(os.path.dirname(log_of(store).path), name))
        append(kind, *rest)

    monkeypatch.setattr(log_of(store).writer, "append", append_late)


@pytest.mark.parametrize("lock", ["ofd", "flock"])
def test_generation_is_locked_in_the_name_of_its_maker_until_it_is_sealed(
    lock: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next compaction removes an orphan that no process locks."""
    seen = []

    def look(file: str) -> None:
        fd = os.open(file, os.O_RDWR)
        other = LogLock(file, fd, KINDS[lock], threading.RLock(), {fd})
        with pytest.raises(BlockingIOError):
            other.try_lock()
        seen.append(other.holder() if lock == "ofd" else 1)
        other.close()
        os.close(fd)

    with FileStore(path, lock=lock) as store:
        store.set("k", "1")
        before_the_seal(store, monkeypatch, look)
        store.compact()
        assert seen == [1]
        with FileStore(path, lock=lock) as other:
            assert other.add("n", 1) == 1  # and it is locked no more


def test_generation_under_a_soft_lock_is_born_without_a_marker_or_a_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    with FileStore(path, lock="soft") as store:
        store.set("k", "1")
        monkeypatch.setattr(LogLock, "bind", noted(seen, LogLock.bind))
        before_the_seal(store, monkeypatch, lambda file: seen.append(os.path.exists(file + ".lock")))
        store.compact()
    assert seen[:2] == [0, False]


def noted(seen: list[object], bind: Any) -> Any:
    def bind_noted(lock: LogLock, fd: int, session: int) -> None:
        seen.append(session)
        bind(lock, fd, session)

    return bind_noted


@pytest.mark.parametrize("durable", [False, True])
def test_generation_and_its_name_are_on_disk_before_the_seal_names_it(
    durable: bool, path: Path, kernel: FaultyOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(name: str, _: object, arguments: tuple[Any, ...]) -> None:
        if name in ("fsync", "fdatasync"):
            synced.append(os.readlink(f"/proc/self/fd/{arguments[0]}"))

    with FileStore(path, durable=durable) as store:
        store.set("k", "1")
        before_the_seal(store, monkeypatch, lambda file: synced.append(f"the seal of {file}"))
        with kernel.instead(note):
            store.compact()
        (name,) = names(path)
    file = str(path.parent / name)
    assert synced[:3] == [file, str(path.parent), f"the seal of {file}"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o444])
def test_generation_has_the_mode_of_the_one_before_and_is_changed_only_if_not(
    mode: int, path: Path, kernel: FaultyOs
) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        path.chmod(mode)
        kernel.calls.clear()
        store.compact()
        (name,) = names(path)
        assert stat.S_IMODE(path.with_name(name).stat().st_mode) == mode
        assert ("fchmod" in [call for call, _ in kernel.calls]) is (mode != 0o600)


def test_step_before_the_seal_that_fails_leaves_no_file_and_no_descriptor(
    path: Path, kernel: FaultyOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        with (
            kernel.fail(0, errno.ENOSPC, names=("fsync",)),
            pytest.raises(StoreUnavailableError, match="using the log failed: No space") as caught,
        ):
            store.compact()
        assert not caught.value.maybe_applied
        assert names(path) == []
        assert log_of(store).handle.owned_fds <= log_of(store).handle.fds_in_use()

        def refuse(file: str) -> None:
            raise Sealing

        before_the_seal(store, monkeypatch, refuse)
        with pytest.raises(Sealing):
            store.compact()
        assert len(names(path)) == 1, "from here on it may be there, as far as anybody knows"


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_generation_stays_if_its_seal_may_have_been_written(error: int, path: Path, kernel: FaultyOs) -> None:
    """No space means that it was not."""
    with FileStore(path) as store:
        store.set("k", "1")
        writes = 2  # the generation, and its seal
        with kernel.fail(writes - 1, error, names=("write",)), pytest.raises(StoreUnavailableError) as caught:
            store.compact()
        assert caught.value.maybe_applied is (error == errno.EIO)
        assert len(names(path)) == (error == errno.EIO)
        assert store.get("k") == b"1"
        store.compact()
        assert generation(store) == 1
        assert len(names(path)) == 1


def test_name_that_a_forked_child_has_taken_for_the_next_generation_is_replaced(path: Path, kernel: FaultyOs) -> None:
    """A signal handler forks before open(2), and the child is the first to create the file of that name."""
    taken: list[Path] = []

    def open_in_child(name: str, _: object, given: tuple[Any, ...]) -> None:
        if name == "open" and given[1] & os.O_EXCL and not taken:
            taken.append(Path(given[0]))
            taken[0].write_bytes(b"")

    with FileStore(path) as store:
        store.set("k", "1")
        with kernel.instead(open_in_child):
            store.compact()
        assert generation(store) == 1
        assert log_of(store).handle.file != str(taken[0])
        assert store.get("k") == b"1"


def test_compaction_keeps_no_descriptor_of_the_files_it_has_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[set[int]] = []
    compact = Compactor.compact

    def compact_and_look(compactor: Any) -> None:
        compact(compactor)
        handle = compactor._handle
        left.append(handle.owned_fds - handle.fds_in_use())

    monkeypatch.setattr(Compactor, "compact", compact_and_look)
    with FileStore(path) as store:
        store.set("k", "1")
        for _ in range(3):
            store.compact()
    assert left == [set()] * 3


def test_snapshot_that_is_long_is_written_piece_by_piece(
    path: Path, kernel: FaultyOs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_BUFFER", 1000)
    with FileStore(path) as store:
        for number in range(20):
            store.queue_push("q", bytes([number]) * 400)
        kernel.calls.clear()
        store.compact()
        assert [name for name, _ in kernel.calls].count("write") == 8  # three records each, the rest, and the seal
        assert [store.queue_pop("q") for _ in range(20)] == [bytes([number]) * 400 for number in range(20)]
        assert read_log(path.with_name(names(path)[0]).read_bytes()).ends == "whole"


def test_new_run_voids_the_torn_tail_of_the_one_before(path: Path) -> None:
    with FileStore(path, run_id=("job", 0)) as store:
        store.set("k", "1")
    tear(str(path), 20, b"torn", b"v" * 50)
    assert read_log(path.read_bytes()).ends == "torn"
    with FileStore(path, run_id=("job", 1)) as store:
        assert store.list_keys() == []
    log = read_log(path.read_bytes())
    assert log.ends == "whole"
    assert log.successor is not None


def test_log_removed_before_its_next_run_begins_is_left_and_another_made(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Compactor.begin_run

    def begin_late(compactor: Any, *arguments: Any) -> None:
        path.unlink()  # as the process that ended it does
        begin(compactor, *arguments)

    monkeypatch.setattr(Compactor, "begin_run", begin_late)
    with FileStore(path, run_id=("job", 0)) as store:
        store.set("k", "1")
        with FileStore(path, run_id=("job", 1)) as late:
            assert generation(late) == 0
            late.set("k", "2")
        with FileStore(path) as other:
            assert other.get("k") == b"2"
    assert names(path) == []


@pytest.mark.parametrize(
    ("dead", "others", "kept"),
    [
        ([], {2}, [(1, 5), (1, 6), (2, 5), (3, None)]),
        ([1], {2}, [(1, 6), (2, 5), (3, None)]),
        ([1], set[int](), [(1, 5), (1, 6), (3, None)]),
        ([1, 2], {2}, [(1, 6), (2, 5), (3, None)]),
    ],
)
def test_snapshot_keeps_the_ranks_that_a_session_lives_in_or_is_the_last_of(
    dead: list[int], others: set[int], kept: list[tuple[int, int | None]], path: Path
) -> None:
    """Session 1 was rank 5, and then 6; session 2, if there is one, was rank 5 after it."""
    with FileStore(path) as store:
        log = log_of(store)
        log.table.sessions = {1: Session("h", 1, rank=6), 3: Session("h", 3)}
        log.table.sessions |= {number: Session("h", number, rank=5) for number in others}
        log.table.ranks = {5: {1} | others, 6: {1}}
        log.table.deaths = dict.fromkeys(dead, 7)
        log.table.last = 3
        entries = list(log.compactor._snapshot(3))
    found = [(number, Session.decode(value).rank) for kind, _, value, number, _ in entries if kind == record.SESSION]
    assert found == kept
    assert [kind for kind, *_ in entries].count(record.DEATH) == len(dead)


def test_live_size_of_a_log_is_known_to_the_byte(path: Path) -> None:
    with FileStore(path, label="a name of some length", rank=3) as store, FileStore(path, rank=4) as other:
        store.set("k", "1")
        other.delete_key("k")
        store.compact()
        assert store.num_keys() == 0
        assert log_of(store).compactor._live_size() == os.path.getsize(log_of(store).handle.file)
