"""A handle's knowledge of sessions, its own among them: cases that real deaths cause only by luck."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from support.faulty import faulty_os
from support.internals import log_of, notifier_of

from fscoord import FileStore, SessionDeadError, barrier
from fscoord._log.format import record
from fscoord._log.format.control_records import encode_death
from fscoord._log.liveness.liveness_file import LivenessFile
from fscoord._log.liveness.own_session import CHECK_S
from fscoord._log.recovery import POSITION
from fscoord._waiting.wait import NOT_YET
from fscoord.stores.file import death_watch

LIMIT_S = 60


@pytest.fixture
def path(memory: Path) -> str:
    return str(memory / "log")


class Alive:
    """Stands for a liveness file, and counts the looks at it."""

    id = b"a" * 16

    def __init__(self, *, is_lost: bool = False, holds: bool = True, number: int = 1, fails: bool = False) -> None:
        self._is_lost, self._holds, self.number, self._fails = is_lost, holds, number, fails
        self.looks = 0

    def is_lost(self) -> bool:
        self.looks += 1
        if self._fails:
            raise OSError(errno.EIO, "Input/output error")
        return self._is_lost

    def hold(self, _: int) -> bool:
        return self._holds

    def release(self) -> None:
        pass


class Home:
    """Stands for a host that has seen processes die, or has not."""

    def __init__(self, *, sees_die: bool) -> None:
        self._sees_die = sees_die

    def is_provably_dead(self, _: object) -> bool:
        return self._sees_die


def test_session_number_is_available_unless_recovery_is_pending(path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        log = log_of(store)
        assert log.session_if_ready == log.handle.lock.session > 0
        log.handle.recovery = POSITION
        assert log.session_if_ready == 0


def test_session_that_cannot_hold_its_byte_registers_without_a_liveness_file(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else others would find the byte free, and take it for dead."""

    def fail(*_: object) -> bool:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(LivenessFile, "hold", fail)
    with FileStore(path) as store:
        store.set("k", "1")
        log = log_of(store)
        assert (log.liveness.file, log.liveness._fds) == (None, set())
        assert log.table.sessions[log.handle.lock.session].alive_id == bytes(16)


def test_liveness_byte_of_the_handle_is_checked_at_intervals(path: str) -> None:
    with FileStore(path) as store:
        log: Any = log_of(store)
        log.liveness.file = alive = Alive()
        log.liveness.checked_at = 100.0
        for now, looks in (
            (100.0, 0),
            (100.0 + 0.9 * CHECK_S, 0),
            (100.0 + 1.1 * CHECK_S, 1),
            (100.0 + 2 * CHECK_S, 1),
        ):
            log.liveness.check_byte(now)
            assert alive.looks == looks
        log.liveness.file = None


@pytest.mark.parametrize(
    ("alive", "keeps"),
    [
        (Alive(), True),
        (Alive(number=0, holds=False), True),
        (Alive(is_lost=True), False),
        (Alive(holds=False), False),
        (Alive(fails=True), False),
    ],
)
def test_handle_that_lost_its_byte_becomes_another_session(alive: Any, keeps: bool, path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        log: Any = log_of(store)
        session = log.handle.lock.session
        log.liveness.file, log.liveness.checked_at = alive, 0.0
        log.liveness.check_byte(2 * CHECK_S)
        assert (log.handle.lock.session, log.liveness.file is not None) == ((session, True) if keeps else (0, False))
        store.set("k", "2")
        assert (log.handle.lock.session == session) is keeps


def test_session_declared_dead_and_forgotten_is_an_error_for_its_handle(path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        log = log_of(store)
        del log.table.sessions[log.handle.lock.session]
        log.handle.path_checked_at = 0.0
        for _ in range(2):
            with pytest.raises(SessionDeadError, match="has a death record: this handle's session"):
                store.set("k", "2")


def test_session_that_reads_its_own_death_record_stays_dead(path: str) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        with pytest.raises(SessionDeadError, match="session 1 is dead"):
            raise log_of(store).handle.session_is_dead(1)
        with pytest.raises(SessionDeadError, match="session 1 is dead"):
            store.get("k")


def test_rank_that_is_announced_again_is_recorded_again_only_by_another_session(path: str) -> None:
    with FileStore(path) as store:
        for rank in (3, 4, 3):
            store.announce_rank(rank)
        log, size = log_of(store), os.path.getsize(path)
        assert [log.has_announced(rank) for rank in (3, 4, 5)] == [True, True, False]
        with faulty_os() as faulty:
            store.announce_rank(3)
            assert not faulty.calls
        assert os.path.getsize(path) == size
        log.handle.lock.session = 0  # as when its byte is lost
        store.set("k", "1")
        assert (log.table.ranks[3], log.table.ranks[4]) == ({1, 2}, {1}), "the next session has the rank announced last"
        assert not log.has_announced(4)
        store.announce_rank(4)
        assert log.table.ranks[4] == {1, 2}


def test_rank_of_a_session_that_is_dead_can_not_be_announced_again(path: str) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.announce_rank(3)
        other.set("k", "1")
        log_of(other).update(record.DEATH, b"", encode_death(1, bytes(16)), None, LIMIT_S)
        store.announce_rank(3)  # it does not know
        with pytest.raises(SessionDeadError):
            barrier(store, 4, "b", 1, rank=3)
        assert not other.check(["b/arrivals"])
        with pytest.raises(SessionDeadError):
            store.announce_rank(3)


@pytest.mark.parametrize(("home", "lives"), [(None, None), (Home(sees_die=False), None), (Home(sees_die=True), False)])
def test_session_with_another_liveness_file_is_known_dead_on_its_host_only(
    home: Any, lives: bool | None, path: str
) -> None:
    with FileStore(path) as store:
        store.set("k", "1")
        log = log_of(store)
        log.table.sessions[7] = log.table.sessions[log.handle.lock.session]._replace(alive_id=b"other" + bytes(11))
        assert log.liveness.is_alive(7, home) is lives


def test_session_that_is_forgotten_counts_as_dead_if_its_number_was_used(path: str) -> None:
    with FileStore(path) as store:
        log = log_of(store)
        log.table.last = 3
        assert log.table.dead_sessions([-1, 0, 1, 2, 3, 4]) == [1, 2, 3]


def test_death_is_recorded_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All watching handles find it at the same moment."""
    with FileStore(path) as store, FileStore(path) as other, FileStore(path) as dead:
        for handle in (store, other, dead):
            handle.set("k", "1")
        number = log_of(dead).handle.lock.session
        for log in (log_of(store), log_of(other)):
            monkeypatch.setattr(log.liveness, "is_alive", lambda number, home: False)
        assert log_of(store).record_death(number, LIMIT_S)
        size = os.path.getsize(path)
        monkeypatch.setattr(log_of(other), "refresh", lambda limit: None)  # so that it finds that only with the lock
        assert number not in log_of(other).table.deaths
        assert log_of(other).record_death(number, LIMIT_S) is True
        assert log_of(other).record_death(number, LIMIT_S) is True
        assert os.path.getsize(path) == size
        assert number in log_of(other).table.deaths


def test_death_forgotten_while_a_waiter_looks_for_it_is_no_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread, on the same handle, may follow a compaction between two steps of the look."""
    monkeypatch.setattr(death_watch, "BEGIN_S", -1.0)
    with FileStore(path, timeout=20) as store:
        store.set("k", "v")
        needs = death_watch.SessionNeeds(log_of(store), [77])
        monkeypatch.setattr(needs, "undead", lambda: [77])
        looks = death_watch.DeathWatch(log_of(store), notifier_of(store), needs)
        looks._watched.add(77)
        assert looks.find_dead(1.0) is NOT_YET
        looks._watched.clear()
        assert looks.find_dead(1.0) is NOT_YET
