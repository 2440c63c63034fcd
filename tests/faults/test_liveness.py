"""Liveness: sessions, their bytes, proofs and records of death, under forks, stops, kills and lost files."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from faults.spawned import be_second_member
from faults.test_fork import Child, every_fork, fork_in_c
from support.internals import log_of

from fscoord import FileStore, HashStore, PrefixStore, SessionDeadError, StoreError
from fscoord._log.format.control_records import Session
from fscoord._log.liveness import own_session
from fscoord._log.liveness.liveness_file import LivenessFile, ProcessIdentity
from fscoord._log.liveness.own_session import Liveness
from fscoord._runtime import system
from fscoord.inspect import dump

HANG_S = 60


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def watcher(path: str) -> Iterator[FileStore]:
    """A handle of this process, which is session 1."""
    with FileStore(path, rank=0, timeout=HANG_S) as store:
        assert store.register() == 1
        yield store


class Victim:
    """A forked child that opens a store as `rank`, and then does as `then` says until it is killed."""

    def __init__(self, path: str, rank: int | None = 1, then: Callable[[FileStore], object] | None = None) -> None:
        ready, done = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                store = FileStore(path, rank=rank, timeout=HANG_S)
                self.extra = then(store) if then else None
                os.write(done, b"%d" % store.register())
                signal.alarm(2 * HANG_S)
                signal.pause()
            finally:
                os._exit(1)
        os.close(done)
        try:
            self.session = int(os.read(ready, 20))
        finally:
            os.close(ready)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            os.waitpid(self.pid, 0)
            self.pid = 0

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            self.kill()


def lives(store: FileStore) -> dict[int, str]:
    return {member.number: member.alive for member in store.members()}


# Sessions


def test_members_show_their_process_rank_and_label(path: str) -> None:
    with FileStore(path, rank=3, label="first") as store, FileStore(path, label="second") as other:
        first, second = store.members()
        assert (first.number, first.pid, first.host, first.rank, first.label) == (
            store.register(),
            os.getpid(),
            os.uname().nodename,
            3,
            "first",
        )
        assert (second.number, second.rank, second.label) == (other.register(), None, "second")
        assert first.alive == second.alive == "yes"
        assert 0 <= second.since - first.since < HANG_S
        assert store.members() == other.members()


def test_handle_registers_at_its_first_write(path: str) -> None:
    with FileStore(path) as silent, FileStore(path, rank=0) as speaker:
        assert [member.number for member in speaker.members()] == [1]
        assert not silent.check(["k"])
        assert [member.number for member in speaker.members()] == [1]
        silent.set("k", "v")
        assert [member.number for member in speaker.members()] == [1, 2]
        assert (silent.register(), speaker.register()) == (2, 1)


def test_handle_is_registered_once_and_keeps_its_number(path: str) -> None:
    with FileStore(path) as store:
        assert store.register() == store.register() == 1
        assert [entry.kind for entry in dump(path)] == ["session"]


def test_handle_that_is_read_only_sees_members_and_is_none(path: str, watcher: FileStore) -> None:
    with FileStore(path, read_only=True) as reader:
        with Victim(path) as victim:
            assert lives(reader) == {1: "yes", victim.session: "yes"}
            victim.kill()
            assert lives(reader) == {1: "yes", victim.session: "no"}
        assert "death" not in [entry.kind for entry in dump(path)]
        assert reader.dead_ranks([1]) == []
        assert watcher.dead_ranks([1]) == reader.dead_ranks([1]) == [1]
        with pytest.raises(StoreError, match="read_only"):
            reader.register()


def test_handle_may_be_several_ranks(path: str) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        for rank in (4, 5, 4, 5):
            store.announce_rank(rank)
        assert [entry.kind for entry in dump(path)] == ["session"] * 2
        other.announce_rank(5)
        store.close()
        assert other.dead_ranks([3, 4, 5]) == [4]


def test_session_number_whose_byte_is_held_is_not_given(path: str, watcher: FileStore) -> None:
    alive = log_of(watcher).liveness.file
    assert alive is not None
    with open(path + ".alive", "r+b", buffering=0) as stranger:
        lock = system.fcntl.F_OFD_SETLK
        system.fcntl.fcntl(stranger, lock, alive_range(system.fcntl.F_WRLCK, 2, 2))
        with FileStore(path, rank=1) as other:
            assert other.register() == 4
            assert lives(watcher) == {1: "yes", 4: "yes"}


def alive_range(kind: int, start: int, length: int) -> bytes:
    return system.FLOCK_STRUCT.pack(kind, 0, start, length, 0)


def test_handle_that_probed_liveness_before_its_first_write_lives(path: str, watcher: FileStore) -> None:
    with FileStore(path, timeout=HANG_S) as silent:
        assert silent.dead_ranks([0]) == []
        silent.set("k", "v")
        assert lives(watcher) == {1: "yes", 2: "yes"}


# Deaths


def test_process_that_is_killed_is_dead_and_all_agree_on_it(path: str, watcher: FileStore) -> None:
    with Victim(path) as victim, FileStore(path, rank=2) as other:
        assert lives(watcher)[victim.session] == "yes"
        assert watcher.dead_ranks([1]) == []
        victim.kill()
        assert watcher.dead_ranks([0, 1, 2, 7]) == [1]
        assert [entry.writer for entry in dump(path) if entry.kind == "death"] == [1]
        found = {store.members()[1] for store in (watcher, other)}
        assert [(member.number, member.rank, member.alive) for member in found] == [(victim.session, 1, "no")]
        assert [entry.writer for entry in dump(path) if entry.kind == "death"] == [1]


def test_process_that_is_stopped_lives(path: str, watcher: FileStore) -> None:
    with Victim(path) as victim:
        victim.kill(signal.SIGSTOP)
        assert os.waitpid(victim.pid, os.WUNTRACED)[0] == victim.pid
        assert lives(watcher)[victim.session] == "yes"
        assert watcher.dead_ranks([1]) == []


def test_zombie_is_dead(path: str, watcher: FileStore) -> None:
    with Victim(path) as victim:
        os.kill(victim.pid, signal.SIGKILL)
        os.waitid(os.P_PID, victim.pid, os.WEXITED | os.WNOWAIT)
        assert watcher.dead_ranks([1]) == [1]


def test_handle_that_is_closed_is_a_dead_session_of_a_living_process(path: str, watcher: FileStore) -> None:
    with FileStore(path, rank=1):
        assert watcher.dead_ranks([1]) == []
    assert watcher.dead_ranks([1]) == [1]


def test_probe_after_the_handle_was_closed_opens_no_file(path: str, watcher: FileStore) -> None:
    """A thread may be about to probe while another thread closes the handle."""
    with FileStore(path, rank=1) as closed:
        log, number = log_of(closed), closed.register()
    assert log.is_alive(number, None) is None
    assert log.liveness.file is None


def test_process_that_executes_another_program_is_dead(path: str, watcher: FileStore) -> None:
    def become_another(store: FileStore) -> None:
        store.announce_rank(1)
        os.write(done, b"%d" % store.register())
        os.execv(sys.executable, [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"])

    ready, done = os.pipe()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(writer, 1)
            os.close(ready)
            become_another(FileStore(path))
        finally:
            os._exit(1)
    try:
        os.close(writer)
        os.close(done)
        session = int(os.read(ready, 20))
        assert os.read(reader, 1) == b"\n"  # the other program runs
        assert lives(watcher)[session] == "no"
    finally:
        os.close(ready)
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_rank_that_comes_again_lives(path: str, watcher: FileStore) -> None:
    with Victim(path) as first:
        first.kill()
        assert watcher.dead_ranks([1]) == [1]
        with Victim(path) as second:
            assert watcher.dead_ranks([1]) == []
            assert lives(watcher) == {1: "yes", first.session: "no", second.session: "yes"}


def test_session_that_reads_of_its_own_death_writes_no_more(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileStore(path, rank=0) as store, FileStore(path, rank=1) as other:
        other.set("k", "v")
        monkeypatch.setattr(Liveness, "is_alive", lambda *_: False)
        assert log_of(store).record_death(2, HANG_S)
        size = os.path.getsize(path)
        for call in (lambda: other.set("k", "w"), lambda: other.check(["k"]), lambda: other.members()):
            with pytest.raises(SessionDeadError, match=r"session 2 is dead.*open the store again"):
                call()
        assert os.path.getsize(path) == size
        assert store.get("k") == b"v"


def test_death_record_outweighs_the_byte_and_a_session_never_seen_is_unknown(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path) as store, FileStore(path) as other:
        store.set("k", "v")
        other.set("k", "w")
        assert store.get("k") == b"w"
        assert log_of(store).liveness.is_alive(2, None) is True
        assert log_of(store).liveness.is_alive(99, None) is None
        with monkeypatch.context() as patch:
            patch.setattr(Liveness, "is_alive", lambda *_: False)
            assert log_of(store).record_death(2, HANG_S)
        assert log_of(store).liveness.file is not None
        assert log_of(store).liveness.file.is_held(2)
        assert log_of(store).liveness.is_alive(2, None) is False


def test_handle_that_probed_liveness_and_wrote_nothing_keeps_no_byte(path: str, watcher: FileStore) -> None:
    watcher.set("k", "v")
    with FileStore(path, timeout=HANG_S) as other:
        assert other.get("k") == b"v"
        assert log_of(other).is_alive(1, None) is True
        log_of(other).handle.path_checked_at = 0.0
        assert other.get("k") == b"v"
        assert log_of(other).handle.lock.session == 0


def test_liveness_file_that_cannot_be_used_is_reported_once(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(own_session, "open_liveness_file", refuse)
    with FileStore(path) as store, caplog.at_level(logging.WARNING, logger="fscoord"):
        store.set("k", "v")
        log_of(store).liveness.take_byte()
    assert [text for text in caplog.messages if "can't be used" in text] == caplog.messages[:1]


def test_death_is_probed_again_before_it_is_recorded(path: str, watcher: FileStore) -> None:
    with FileStore(path, rank=1) as other:
        assert not log_of(watcher).record_death(other.register(), HANG_S)
        assert "death" not in [entry.kind for entry in dump(path)]


# Forks


@every_fork
def test_forked_child_is_another_session(path: str, watcher: FileStore, fork: Callable[[], int]) -> None:
    with Child(fork, watcher.register) as child:
        assert child.result() == 2
        assert lives(watcher)[1] == "yes"
    assert lives(watcher) == {1: "yes", 2: "no"}


def test_spawned_child_is_another_session(path: str, watcher: FileStore) -> None:
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=be_second_member, args=(path,))
    child.start()
    child.join(HANG_S)
    assert child.exitcode == 0
    child.close()
    assert lives(watcher) == {1: "yes", 2: "no"}


def test_parent_that_is_dead_stays_so_if_a_child_forked_in_c_keeps_its_byte(path: str, watcher: FileStore) -> None:
    ready, done = os.pipe()

    def leave_a_child(_: FileStore) -> None:
        if fork_in_c() == 0:
            try:
                os.write(orphan_done, b"%d" % os.getpid())
                signal.alarm(2 * HANG_S)
                signal.pause()
            finally:
                os._exit(0)

    orphan_ready, orphan_done = ready, done
    with Victim(path, then=leave_a_child) as victim:
        orphan = int(os.read(orphan_ready, 20))
        try:
            victim.kill()
            alive = log_of(watcher).liveness.file
            assert alive is not None
            assert alive.is_held(victim.session)
            assert watcher.dead_ranks([1]) == [1]
        finally:
            os.kill(orphan, signal.SIGKILL)
            os.close(ready)
            os.close(done)


# Proofs by process number


def session_of_mine(**changes: Any) -> Session:
    home = ProcessIdentity.find()
    mine = Session(
        host=home.host,
        pid=os.getpid(),
        start_time=system.start_time(),
        boot_id=home.boot_id,
        pid_space=home.pid_space,
        time_space=home.time_space,
    )
    return mine._replace(**changes)


def test_process_number_that_was_given_again_is_another_process() -> None:
    assert not ProcessIdentity.find().is_provably_dead(session_of_mine())
    assert ProcessIdentity.find().is_provably_dead(session_of_mine(start_time=system.start_time() - 1))


def test_process_number_not_in_use_is_a_dead_process() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert ProcessIdentity.find().is_provably_dead(session_of_mine(pid=pid))


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"host": "elsewhere"},
        {"boot_id": bytes(range(16))},
        {"pid_space": 1},
        {"time_space": 1},
        {"start_time": 0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_process_number_from_elsewhere_proves_nothing(elsewhere: dict[str, Any]) -> None:
    stranger = {"start_time": system.start_time() - 1} | elsewhere
    assert not ProcessIdentity.find().is_provably_dead(session_of_mine(**stranger))


@pytest.mark.parametrize(("began", "found", "same"), [(7, 7, True), (1, 1, True), (0, 0, False), (7, 8, False)])
def test_process_is_the_same_if_its_start_time_is_that_of_the_session(
    began: int, found: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "start_time", lambda pid=None: found)
    session = session_of_mine(start_time=began)
    assert ProcessIdentity.find().is_same_process(session) == same
    assert not ProcessIdentity.find().is_same_process(session._replace(time_space=1))
    assert not ProcessIdentity.find().is_same_process(session._replace(host="elsewhere"))


def test_process_number_proves_nothing_where_the_machine_is_unknown() -> None:
    unknown = ProcessIdentity("", bytes(16), 0, 0)
    assert not unknown.is_provably_dead(Session("", os.getpid(), start_time=1))


def test_reboot_makes_all_earlier_sessions_dead(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with Victim(path) as victim:
        victim.kill()
    monkeypatch.setattr(system, "boot_id", lambda: bytes(range(16)))
    with FileStore(path, rank=0) as store:
        assert store.dead_ranks([1]) == [1]


# The liveness file


def test_liveness_file_that_is_gone_makes_no_session_dead(
    path: str, watcher: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_session, "CHECK_S", HANG_S)  # a handle that looks at the name has the old file no more
    with FileStore(path, rank=1) as other:
        other.set("k", "v")
        os.unlink(path + ".alive")
        with FileStore(path, rank=2) as newcomer:
            assert lives(newcomer) == {1: "unknown", 2: "unknown", 3: "yes"}
            assert newcomer.dead_ranks([0, 1]) == []
            assert lives(watcher)[2] == "yes", "who has the old file open still knows"
            assert other.get("k") == b"v"


def test_probe_of_liveness_makes_no_file(path: str) -> None:
    with FileStore(path, rank=0) as store:
        store.set("k", "v")
        os.unlink(path + ".alive")
        with FileStore(path) as looker:
            assert looker.dead_ranks([0]) == []
        assert not os.path.exists(path + ".alive")


def test_handle_whose_liveness_file_is_gone_registers_anew_when_it_writes(path: str, watcher: FileStore) -> None:
    os.replace(path + ".alive", path + ".moved")
    with FileStore(path, rank=1) as other:
        now = system.time.monotonic()
        log_of(watcher).handle.path_checked_at = log_of(watcher).liveness.checked_at = now - 10
        watcher.set("k", "v")
        assert watcher.register() == 3
        assert lives(other) == {1: "unknown", 2: "yes", 3: "yes"}
        assert other.dead_ranks([0]) == []


def test_liveness_file_that_was_left_unfinished_is_finished(path: str) -> None:
    Path(path + ".alive").write_bytes(b"fsal")
    os.chmod(path + ".alive", 0o600)
    with FileStore(path, rank=0) as store, FileStore(path, rank=1) as other:
        assert lives(store) == lives(other) == {1: "yes", 2: "yes"}
    assert os.path.getsize(path + ".alive") == 24


@pytest.mark.parametrize("what", ["a link", "a directory", "another file"])
def test_store_works_without_its_liveness_file(
    what: str, path: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "a link":
        os.symlink("elsewhere", path + ".alive")
    elif what == "a directory":
        os.mkdir(path + ".alive")
    else:
        Path(path + ".alive").write_bytes(b"x" * 100)
        os.chmod(path + ".alive", 0o600)
    caplog.set_level(logging.WARNING, "fscoord")
    with FileStore(path, rank=0) as store, FileStore(path, rank=1) as other:
        store.set("k", "v")
        assert other.get("k") == b"v"
        other.close()
        assert lives(store) == {1: "unknown", 2: "unknown"}
        assert store.dead_ranks([1]) == []
    assert len(caplog.records) == 2, "each handle says so once"
    assert all(
        "other processes can't find out whether this one is alive" in record.getMessage() for record in caplog.records
    )


def test_sessions_are_all_unknown_where_the_kernel_has_no_locks(path: str) -> None:
    with FileStore(path, lock="soft", rank=0) as store, FileStore(path, lock="soft", rank=1) as other:
        other.close()
        assert not store.has_liveness
        assert lives(store) == {1: "unknown", 2: "unknown"}
        assert store.dead_ranks([0, 1]) == []
    assert not os.path.exists(path + ".alive")


def test_liveness_file_is_removed_by_the_last_participant(path: str) -> None:
    with FileStore(path, 2) as one, FileStore(path, 2) as two:
        one.set("k", "v")
        two.set("k", "v")
        assert os.path.exists(path + ".alive")
    assert os.listdir(os.path.dirname(path)) == []


# Compaction


def test_compaction_keeps_the_living_sessions_and_the_dead_ranks(path: str) -> None:
    with (
        FileStore(path, label="first", timeout=HANG_S) as store,
        FileStore(path, rank=7) as late,
        Victim(path, rank=1) as victim,
        Victim(path, rank=None) as other,
        Victim(path, rank=3),
    ):
        victim.kill()
        other.kill()
        for _ in range(3):
            store.compact()
        with FileStore(path, timeout=HANG_S) as fresh:
            assert lives(fresh) == {1: "yes", 2: "yes", victim.session: "no", 5: "yes", 6: "yes"}
            assert fresh.members()[0].label == "first"
            late.close()
            assert fresh.dead_ranks([1, 3, 7]) == [1, 7]
            assert fresh.dead_sessions(range(9)) == store.dead_sessions(range(9)) == [2, 3, other.session]


def test_compaction_keeps_the_last_of_the_dead_of_a_rank(path: str, watcher: FileStore) -> None:
    for _ in range(5):
        FileStore(path, rank=1).close()
    for _ in range(2):
        watcher.compact()
    with FileStore(path, rank=2, timeout=HANG_S) as fresh:
        assert lives(fresh) == {1: "yes", 6: "no", 7: "yes"}
        assert fresh.dead_ranks([1]) == [1]


@pytest.mark.parametrize("compactions", [0, 1, 2, 3])
def test_session_that_was_forgotten_as_dead_writes_no_more(
    compactions: int, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileStore(path, timeout=HANG_S) as store, FileStore(path) as other:
        store.set("k", "v")
        other.set("k", "w")
        with monkeypatch.context() as patch:
            patch.setattr(Liveness, "is_alive", lambda *_: False)
            assert log_of(store).record_death(2, HANG_S)
        FileStore(path, rank=1).close()  # a session behind it, or its number would be kept
        for _ in range(compactions):
            store.compact()
        with pytest.raises(SessionDeadError, match="session 2 is dead"):
            other.set("k", "x")
        assert store.get("k") == b"w"


@pytest.mark.parametrize(
    "call",
    [
        lambda store, numbers: store.members(),
        lambda store, numbers: store.members([0, 1, 2]),
        lambda store, numbers: store.dead_ranks([0, 1, 2]),
        lambda store, numbers: store.dead_sessions(numbers),
        lambda store, numbers: store._session_states(numbers),
    ],
    ids=["members", "members of ranks", "dead_ranks", "dead_sessions", "session_states"],
)
def test_call_probes_each_session_once(
    path: str, call: Callable[[FileStore, list[int]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network mount each probe is a request to the server."""
    probed: list[int] = []
    is_held = LivenessFile.is_held

    def spied(file: LivenessFile, number: int) -> bool:
        probed.append(number)
        return is_held(file, number)

    with ExitStack() as stack:
        stores = [stack.enter_context(FileStore(path, rank=rank)) for rank in range(3)]
        numbers = [store.register() for store in stores]
        reader = stack.enter_context(FileStore(path))
        reader.register()
        monkeypatch.setattr(LivenessFile, "is_held", spied)
        call(reader, numbers)
        assert [probed.count(number) for number in numbers] == [1, 1, 1]


def test_states_of_sessions_are_those_that_members_have(path: str) -> None:
    with FileStore(path, rank=0) as store, FileStore(path, rank=1) as other:
        alive, gone = store.register(), other.register()
        other.close()
        assert store._session_states([alive, gone, 77]) == {alive: "yes", gone: "no"}
        assert store.dead_sessions([gone]) == [gone]
        view = PrefixStore("p", store)
        assert view._session_states([gone]) == {gone: "no"}
        assert HashStore()._session_states([gone]) == {}
    with FileStore(path, read_only=True) as reader:
        assert reader._session_states([gone, alive]) == {gone: "no", alive: "no"}


def test_session_that_a_compaction_forgot_has_the_state_dead(path: str) -> None:
    with FileStore(path) as store:
        with FileStore(path) as other:
            gone = other.register()
        store.set("k", "v")
        last = store.register()
        assert gone < last
        assert store.dead_sessions([gone]) == [gone]
        store.compact()
        assert gone not in log_of(store).table.sessions
        assert store._session_states([gone, last]) == {gone: "no", last: "yes"}
