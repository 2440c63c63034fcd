"""From generation to generation, step by step: what is held open, what is refused, and what a handle is called."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os
from support.internals import log_of, state_of
from support.logs import LIMIT_S, Collector

from fscoord import (
    CorruptLogError,
    FileStore,
    InsecurePathError,
    StaleRunError,
    StoreError,
    StoreGoneError,
    StoreUnavailableError,
)
from fscoord._log.files.opening import LogOptions
from fscoord._log.format import record
from fscoord._log.format.control_records import Session
from fscoord._log.format.generation_ref import GenerationRef
from fscoord._log.format.header import Header
from fscoord._log.generations import forwarding
from fscoord._log.handle import open_root
from fscoord._log.locking.log_lock import OFD, _nothing
from fscoord._log.log import Log
from fscoord._log.recovery import APPLYING, DESCRIPTORS, GENERATION
from fscoord._runtime import system
from fscoord.stores.file import lifecycle


@pytest.fixture
def path(memory: Path) -> str:
    return str(memory / "log")


def generation_file(path: str, number: int) -> Path:
    (found,) = Path(path).parent.glob(f"log.{number}.*")
    return found


def held(store: FileStore) -> list[str]:
    """The files to which the descriptors of its log lead, by name."""
    return sorted(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")) for fd in log_of(store).handle.owned_fds)


def resets(store: FileStore) -> list[bool]:
    """A list that grows whenever the handle begins to read all anew."""
    seen: list[bool] = []
    reset = state_of(store).reset
    state_of(store).reset = lambda: (seen.append(True), reset())[1]  # type: ignore[method-assign]
    return seen


# -- what a forked child does first


def be_forked(log: Any) -> None:
    """Do to `log` what a forked child does, in the order in which it does so."""
    system.close_all(os.close, log.handle.owned_fds)
    log.handle.shared.renew()
    log.after_fork()


@pytest.mark.parametrize("compactions", [0, 1, 2])
def test_forked_child_opens_its_own_descriptors_and_is_a_new_session(compactions: int, path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        for _ in range(compactions):
            store.compact()
        store.set("k", "2")
        log: Any = log_of(store)
        before, session, seen, old = held(store), log.session, resets(store), log.handle.lock
        be_forked(log)
        assert log.handle.mutex is log.handle.shared.mutex
        assert log.handle.recovery & DESCRIPTORS
        assert (held(store), log.liveness.file, log.liveness._fds, log.session) == ([], None, set(), 0)
        assert store.get("k") == b"2"
        assert (held(store), seen) == (before, []), "the same files, and nothing is read twice"
        assert (log.handle.root_fd >= 0) is (compactions > 0)
        assert old.is_closed
        assert old.unlock is _nothing, "the number of its descriptor is another's by now"
        store.set("k", "3")
        assert log.session > session
        with FileStore(path) as other:
            assert other.get("k") == b"3"


@pytest.mark.parametrize("trouble", [0, APPLYING, GENERATION])
def test_forked_child_that_missed_generations_finds_the_newest(trouble: int, path: str) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "1")
        other.compact()
        assert store.get("k") == b"1"
        be_forked(log_of(store))
        log_of(store).handle.recovery |= trouble
        other.compact()
        other.compact()
        other.set("k", "2")
        assert store.get("k") == b"2"
        assert held(store) == held(other)


def test_handle_that_lost_its_generation_begins_again_at_generation_0(path: str) -> None:
    """As who was interrupted on the way into one whose maker has died."""
    with FileStore(path) as store:
        store.set("k", "1")
        log: Any = log_of(store)
        log.handle.file, log.handle.file_identity = f"{path}.nothing", (0, 0)
        log.handle.recovery |= GENERATION
        assert store.get("k") == b"1"
        assert log.handle.file == path


# -- opening


def test_consumer_drops_the_records_it_held_before_the_log_was_opened(path: str) -> None:
    """What was there first may have been removed, and another log be opened in its place."""
    FileStore(path).close()
    collector = Collector()
    collector.records.append((record.SET, b"k", b"of another log", 1, 2))
    log = Log(path, collector, LogOptions(OFD, limit=LIMIT_S), lambda: Session("host", 1))
    try:
        log.refresh(LIMIT_S)
        assert collector.records == []
    finally:
        log.close()


def test_hint_to_a_missing_generation_is_ignored(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
    gone = GenerationRef(9, b"9" * 16, 0, 0, b"log.9." + b"0" * 12)
    monkeypatch.setattr(forwarding, "hint", lambda fd: gone)
    with FileStore(path) as store:
        assert store.get("k") == b"1"


def test_generation_0_is_reopened_only_if_it_still_has_the_name_of_the_log(path: str) -> None:
    for way, says in (("deleted", "was deleted"), ("replaced", "was replaced by another file")):
        with FileStore(path) as store:
            store.compact()
            count = len(held(store))
            os.rename(path, f"{path}.old")
            if way == "replaced":
                Path(path).touch()
            with pytest.raises(StoreGoneError, match=says):
                open_root(log_of(store).handle)
            assert len(held(store)) == count
            with pytest.raises(StoreGoneError, match=says):
                store.get("k")
        Path(path).unlink(missing_ok=True)
        generation_file(path, 1).unlink()


@pytest.mark.parametrize("compacted", [False, True])
@pytest.mark.parametrize("way", ["another file", "a link to it"])
def test_log_is_gone_when_its_name_leads_elsewhere_though_its_file_exists(way: str, compacted: bool, path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        if compacted:
            store.compact()
        elsewhere = f"{path}.elsewhere"
        os.rename(path, elsewhere)
        if way == "another file":
            Path(path).touch()
        else:
            os.symlink(elsewhere, path)
        log_of(store).handle.path_checked_at = 0.0
        with pytest.raises(StoreGoneError, match="was replaced by another file"):
            store.check(["k"])


# -- following


def test_generation_no_longer_in_use_is_not_held_open(path: str) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "1")
        other.compact()
        assert store.get("k") == b"1"
        assert len(held(store)) == 3, "generation 0, and two of the one in use"
        other.compact()
        other.compact()
        assert store.get("k") == b"1"
        assert held(store) == held(other)
        assert len(held(store)) == 3


def test_generation_removed_while_it_is_opened_is_skipped_and_not_kept_open(path: str) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "1")
        other.compact()
        with faulty_os() as faulty, faulty.fail(1, errno.ENOENT, names=("open",)) as failed:
            assert store.get("k") == b"1"
        assert failed
        assert held(store) == held(other)


def test_generation_that_fails_to_open_is_an_error_and_opens_at_the_next_try(path: str) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "1")
        other.compact()
        failing = pytest.raises(StoreUnavailableError)
        with faulty_os() as faulty, faulty.fail(0, errno.EMFILE, names=("open",)), failing as caught:
            store.get("k")
        assert caught.value.errno == errno.EMFILE
        assert store.get("k") == b"1"


def test_generation_that_others_can_write_is_refused(path: str) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "1")
        other.compact()
        file = generation_file(path, 1)
        file.chmod(0o666)
        with pytest.raises(InsecurePathError, match="others can write it"):
            store.get("k")
        assert file.name not in held(store)
        with pytest.raises(InsecurePathError):
            FileStore(path)
        file.chmod(0o600)
        assert store.get("k") == b"1"


@pytest.mark.parametrize("field", ["lock_kind", "durable"])
def test_generation_with_another_lock_kind_or_durability_is_refused(field: str, path: str) -> None:
    with FileStore(path) as store:
        store.compact()
    file = generation_file(path, 1)
    header, _ = Header.decode(file.read_bytes())
    file.write_bytes(header._replace(**{field: 1 - getattr(header, field)}).encode())
    with pytest.raises(StoreError, match="its kind of lock or its durability differs from that of") as caught:
        FileStore(path)
    assert caught.value.path == str(file)


def test_generation_with_a_bad_header_is_damaged_at_offset_0(path: str) -> None:
    with FileStore(path) as store:
        store.compact()
    file = generation_file(path, 1)
    file.write_bytes(b"?" + file.read_bytes()[1:])
    with pytest.raises(CorruptLogError) as caught:
        FileStore(path)
    assert caught.value.offset == 0


def test_compaction_is_due_again_at_twice_the_size_of_the_snapshot(path: str) -> None:
    with FileStore(path, compact_bytes=6000) as store, FileStore(path, compact_bytes=6000) as other:
        store.set("k", b"x" * 5000)
        assert other.check(["k"])
        store.compact()
        for handle in (store, other):
            assert handle.get("k") == b"x" * 5000
            assert log_of(handle).handle.compact_at == 2 * os.path.getsize(log_of(handle).handle.file)
    with FileStore(path, compact_bytes=1 << 20) as store:
        store.compact()
        assert store.check(["k"])
        assert log_of(store).handle.compact_at == 1 << 20


# -- runs


def test_session_keeps_its_number_through_compactions_of_its_run(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "ATTEMPTS", 1)  # who begins a run goes on in it
    with FileStore(path, run_id=("first", 0)) as first:
        first.set("k", "1")
    with FileStore(path, run_id=("second", 0)) as store:
        store.set("k", "2")
        assert len(log_of(store).handle.header.run_ids) == 2
        session = log_of(store).session
        assert session in log_of(store).sessions
        for _ in range(2):
            store.compact()
            store.set("k", "3")
            assert log_of(store).session == session, "the header names two runs, and the first one counts"


def test_handle_of_a_superseded_run_is_stale_and_that_of_the_new_run_goes_on(path: str) -> None:
    with FileStore(path, run_id=("job", 0)) as store:
        log = log_of(store)
        assert (log.handle.is_settled, log.follower.run) == (True, 0)
        with FileStore(path, run_id=("job", 1)) as later:
            assert log_of(later).follower.run == 1
            for _ in range(2):
                with pytest.raises(StaleRunError, match=r"run .job., restart 1, by now \(begun by .*\); end this"):
                    store.get("k")
            later.compact()
            later.set("k", "1")
            assert later.get("k") == b"1"


@pytest.mark.parametrize(
    ("by", "says"),
    [
        (None, "belongs to a new start of the job by now; end"),
        ((b"opaque", -1), "belongs to run 'opaque' by now"),
        ((b"job", 0), "belongs to run 'job', restart 0, by now"),
        ((b"job", 7), "belongs to run 'job', restart 7, by now"),
    ],
)
def test_superseding_run_is_named_in_the_stale_run_error(by: tuple[bytes, int] | None, says: str, path: str) -> None:
    with FileStore(path) as store:
        ids = () if by is None else (by,)
        assert says in str(log_of(store).follower.superseded(Header(b"", 1, run_ids=ids)))
        with pytest.raises(StaleRunError, match=says):
            store.check(["k"])


def test_path_check_is_due_at_once_after_the_follower_restarts(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        log_of(store).handle.path_checked_at = system.time.monotonic() + 1e6
        log_of(store).follower.restart()
        assert log_of(store).handle.path_checked_at == 0.0
        assert store.get("k") == b"1"
