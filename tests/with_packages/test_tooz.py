"""`FscoordDriver` against tooz's own tests, and the death of members, which those do not try."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pages
import pytest
import tooz
from support.internals import Liveness, log_of, system
from support.places import HANG_S, start_thread, until
from support.processes import let_go, wait_until_ready
from tooz import coordination
from tooz.coordination import Characteristics, CoordinationDriver

from fscoord import FileStore
from fscoord.recipes import Election, Lock, force_release

pytestmark = pytest.mark.packages

WORKER = Path(__file__).with_name("tooz_worker.py")
PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "tooz.md"

NO_BEATS = "Test not applicable (heartbeating not required)"
SKIPPED = {
    "test_heartbeat": NO_BEATS,
    "test_heartbeat_loop": NO_BEATS,
    "test_timeout": "This driver is not based on timeout",
    "test_watch_join_group_disappear": (
        "This test only works with coordinators that have the ability to destroy groups."
    ),
}
"""The tests of tooz that skip this driver, as they do some of its own drivers, and the reasons that they give."""

Start = Callable[..., CoordinationDriver]
Run = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"fscoord://{tmp_path}/store?timeout={HANG_S}"


@pytest.fixture
def start(url: str) -> Iterator[Start]:
    """Start a coordinator of this process."""
    started: list[CoordinationDriver] = []

    def start(member: str, address: str = url, **options: object) -> CoordinationDriver:
        coordinator = coordination.get_coordinator(address, member.encode(), **options)
        coordinator.start()
        started.append(coordinator)
        return coordinator

    yield start
    for coordinator in started:
        if coordinator.is_started:
            coordinator.stop()


@pytest.fixture
def run() -> Iterator[Run]:
    """Start a worker in a process of its own."""
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(WORKER), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


# -- tooz's own tests --------------------------------------------------------------------------------------------------


def test_suite_of_tooz_passes(tmp_path: Path, url: str) -> None:
    report = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command += [f"--junit-xml={report}", "--pyargs", "tooz.tests.test_coordination", "tooz.tests.test_partitioner"]
    command += ["-k", "not (ZakeTest or IPCTest or FileTest)"]  # they are of tooz's own drivers
    # Without the variables of the run that runs this test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment | {"TOOZ_TEST_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    cases = list(ET.parse(report).getroot().iter("testcase"))
    skipped = {
        case.attrib["name"]: re.sub(r"\s+", " ", skip.attrib["message"])
        for case in cases
        for skip in case.iter("skipped")
    }
    assert skipped == SKIPPED
    assert not [case.attrib["name"] for case in cases for _ in (*case.iter("failure"), *case.iter("error"))]
    assert len(cases) - len(skipped) >= 77  # that many in tooz 7.0.0; 84 in 9.1.0


def test_characteristics_can_be_asked_for(url: str) -> None:
    wanted = [Characteristics.DISTRIBUTED_ACROSS_HOSTS, Characteristics.NON_TIMEOUT_BASED, Characteristics.LINEARIZABLE]
    coordination.get_coordinator(url, b"m", wanted)
    with pytest.raises(coordination.ToozDriverChosenPoorly):
        coordination.get_coordinator(url, b"m", [Characteristics.SAME_VIEW_UNDER_PARTITIONS])


# -- deaths ------------------------------------------------------------------------------------------------------------


def test_killed_member_leaves_its_group_its_lock_and_its_lead(start: Start, run: Run, url: str) -> None:
    victim = run("member", url, "victim")
    wait_until_ready(victim)
    coordinator = start("survivor")
    left: list[object] = []
    elected: list[object] = []
    coordinator.join_group(b"group").get()
    coordinator.watch_leave_group(b"group", left.append)
    coordinator.watch_elected_as_leader(b"group", elected.append)
    coordinator.run_watchers()
    lock = coordinator.get_lock(b"lock")
    assert coordinator.get_members(b"group").get() == {b"victim", b"survivor"}
    assert coordinator.get_member_capabilities(b"group", b"victim").get() == {"role": "victim"}
    assert coordinator.get_leader(b"group").get() == b"victim"
    assert not lock.acquire(blocking=False)
    assert (left, elected) == ([], [])

    victim.kill()
    victim.wait(HANG_S)

    assert lock.acquire(timeout=HANG_S)
    coordinator.run_watchers()
    assert [(event.group_id, event.member_id) for event in left] == [(b"group", b"victim")]
    assert [(event.group_id, event.member_id) for event in elected] == [(b"group", b"survivor")]
    assert coordinator.get_members(b"group").get() == {b"survivor"}
    assert coordinator.get_leader(b"group").get() == b"survivor"


def test_death_of_the_holder_wakes_a_waiter(start: Start, run: Run, url: str, tmp_path: Path) -> None:
    victim = run("member", url, "victim")
    wait_until_ready(victim)
    lock = start("waiter").get_lock(b"lock")
    waiter = start_thread(lock.acquire)
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        until(lambda: len(Lock(store, "tooz/locks/lock").waiters()) == 1)
    victim.kill()
    assert waiter.join() is True
    assert lock.is_still_owner()


def test_member_may_come_back_under_its_id_after_its_death(start: Start, run: Run, url: str) -> None:
    victim = run("member", url, "victim")
    wait_until_ready(victim)
    second = start("victim")
    with pytest.raises(coordination.MemberAlreadyExist):
        second.join_group(b"group").get()
    victim.kill()
    victim.wait(HANG_S)
    second.join_group(b"group", {"role": "successor"}).get()
    assert second.get_members_with_capabilities(b"group").get() == {b"victim": {"role": "successor"}}


def test_lock_excludes_processes(run: Run, url: str, tmp_path: Path) -> None:
    number = tmp_path / "number"
    number.write_text("0")
    workers = [run("count", url, f"m{each}", number, 100) for each in range(2)]
    for worker in workers:
        wait_until_ready(worker)
    for worker in workers:
        let_go(worker)
    assert [worker.wait(HANG_S) for worker in workers] == [0, 0]
    assert number.read_text() == "200"


# -- groups and elections ----------------------------------------------------------------------------------------------


def test_groups_whose_ids_have_slashes_are_apart(start: Start) -> None:
    coordinator = start("m")
    for group in (b"a", b"a/member", b"\xff"):
        coordinator.create_group(group).get()
    coordinator.join_group(b"a/member").get()
    assert coordinator.get_groups().get() == [b"\xff", b"a", b"a/member"]
    assert coordinator.get_members(b"a").get() == set()
    assert coordinator.get_members(b"a/member").get() == {b"m"}


def come_at_once(calls: Sequence[Callable[[], Any]], error: type[Exception]) -> int:
    """Make the calls in threads, at one moment, and return how many succeeded; the others must raise the error."""
    gate = threading.Barrier(len(calls))

    def come(call: Callable[[], Any]) -> bool:
        gate.wait(HANG_S)
        try:
            call().get()
            return True
        except error:
            return False

    return sum(thread.join() for thread in [start_thread(come, call) for call in calls])


def test_group_is_created_and_joined_once_by_many_at_one_moment(start: Start) -> None:
    coordinators = [start("m") for _ in range(4)]
    for number in range(20):
        group = b"%d" % number
        creating = [partial(each.create_group, group) for each in coordinators]
        assert come_at_once(creating, coordination.GroupAlreadyExist) == 1
        joining = [partial(each.join_group, group) for each in coordinators]
        assert come_at_once(joining, coordination.MemberAlreadyExist) == 1
        assert coordinators[0].get_members(group).get() == {b"m"}


class BackwardClock:
    """The module `time`, with a wall clock that each reading sets back by a second."""

    def __init__(self) -> None:
        self._now = 2e9

    def time(self) -> float:
        self._now -= 1
        return self._now

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def test_member_info_has_the_times_of_the_clock(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = start("m")
    monkeypatch.setattr(system, "time", BackwardClock())
    coordinator.join_group_create(b"g", {"n": 1})
    first = coordinator.get_member_info(b"g", b"m").get()
    coordinator.update_capabilities(b"g", {"n": 2}).get()
    second = coordinator.get_member_info(b"g", b"m").get()
    assert (first["capabilities"], second["capabilities"]) == ({"n": 1}, {"n": 2})
    assert first["created_at"] == first["updated_at"]
    assert second["created_at"] == first["created_at"]
    assert second["updated_at"] < first["updated_at"]  # as the clock says


def test_member_that_was_removed_is_told_at_its_next_update(start: Start) -> None:
    first, second = start("m"), start("m")
    first.join_group_create(b"g")
    second.leave_group(b"g").get()
    with pytest.raises(coordination.MemberNotJoined):
        first.update_capabilities(b"g", {}).get()
    second.join_group(b"g").get()
    with pytest.raises(coordination.MemberNotJoined):
        first.update_capabilities(b"g", {}).get()
    assert second.get_member_capabilities(b"g", b"m").get() is None


def test_leader_whose_term_was_ended_is_elected_anew(start: Start, tmp_path: Path) -> None:
    coordinator = start("m")
    elected: list[object] = []
    coordinator.watch_elected_as_leader(b"g", elected.append)
    coordinator.run_watchers()
    coordinator.run_watchers()
    assert len(elected) == 1
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        election = Election(store, "tooz/leaders/g")
        leader = election.leader()
        assert leader is not None
        assert force_release(store, "tooz/leaders/g", leader.term)
    assert coordinator.get_leader(b"g").get() is None
    coordinator.run_watchers()
    assert len(elected) == 2
    assert coordinator.stand_down_group_leader(b"g")
    assert not coordinator.stand_down_group_leader(b"g")


# -- locks -------------------------------------------------------------------------------------------------------------


def test_shared_lock_is_acquired_again_past_a_waiting_writer(start: Start, tmp_path: Path) -> None:
    reader, writer = start("reader").get_lock(b"l"), start("writer").get_lock(b"l")
    assert reader.acquire(shared=True)
    waiting = start_thread(writer.acquire)
    with FileStore(tmp_path / "store", timeout=HANG_S) as store:
        until(lambda: len(Lock(store, "tooz/locks/l").waiters()) == 1)
    assert reader.acquire(shared=True)
    assert not writer.is_still_owner()
    assert reader.release()
    assert reader.acquired
    assert reader.release()
    assert waiting.join() is True
    assert not reader.release()
    assert not reader.acquired


def test_lock_ends_with_its_coordinator(start: Start) -> None:
    first, second = start("first"), start("second")
    lost, lock = first.get_lock(b"l"), second.get_lock(b"l")
    assert lost.acquire()
    assert not lock.acquire(0.01)
    assert not lock.acquire(timeout=0.01)
    first.stop()
    assert lock.acquire(timeout=HANG_S)
    with pytest.raises(coordination.ToozConnectionError, match="closed"):
        lost.is_still_owner()


def test_broken_shared_lock_is_lost_by_all_its_holders(start: Start) -> None:
    locks = [start(f"m{each}").get_lock(b"l") for each in range(3)]
    assert locks[0].acquire(shared=True)
    assert locks[1].acquire(shared=True)
    assert locks[1].acquire(shared=True)
    assert locks[2].break_()
    assert not locks[2].break_()
    assert [lock.is_still_owner() for lock in locks] == [False] * 3
    assert [lock.release() for lock in locks] == [False] * 3
    assert locks[2].acquire(blocking=False)


# -- the connection ----------------------------------------------------------------------------------------------------


def test_heartbeat_is_not_needed_but_tells_a_member_that_it_was_taken_for_dead(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = start("m")
    assert not coordinator.requires_beating
    assert coordinator.heartbeat() > 0
    coordinator.join_group_create(b"g")
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, monkeypatch.context() as patch:
        number = store.members()[0].number
        patch.setattr(Liveness, "is_alive", lambda *_: False)
        assert log_of(store).record_death(number, HANG_S)
    with pytest.raises(coordination.ToozConnectionError, match=f"{tmp_path}/store.*session {number} is dead"):
        coordinator.heartbeat()
    coordinator.stop()
    coordinator.start()
    assert coordinator.get_members(b"g").get() == set()
    coordinator.join_group(b"g").get()


def test_operation_ends_after_the_timeout_and_names_the_holder(start: Start, tmp_path: Path) -> None:
    with FileStore(tmp_path / "store", timeout=HANG_S) as store, Lock(store, "tooz/changes/g"):
        coordinator = start("m", f"fscoord://{tmp_path}/store?timeout=60", timeout=0.05)
        with pytest.raises(coordination.OperationTimedOut, match=rf"the group 'g'.*held by .*:{os.getpid()}"):
            coordinator.create_group(b"g").get()


def test_calls_may_go_through_a_thread(start: Start, url: str) -> None:
    coordinator = start("m", f"{url}&executor=thread")
    created = coordinator.create_group(b"g")
    created.get(timeout=HANG_S)
    assert created.done()
    with pytest.raises(coordination.GroupAlreadyExist):
        coordinator.create_group(b"g").get()


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("fscoord://host{path}", "names the host 'host'.*three slashes"),
        ("fscoord://", "has no path"),
        ("fscoord://{path}?colour=red", "unknown option 'colour'"),
        ("fscoord://{path}?timeout=soon", "timeout=soon"),
        ("fscoord://{path}/below", "below"),
        ("fscoord://{path}?read_only=1", "opened with read_only=True"),
    ],
)
def test_wrong_address_is_a_connection_error(start: Start, tmp_path: Path, address: str, complaint: str) -> None:
    FileStore(tmp_path / "store").close()
    with pytest.raises(coordination.ToozConnectionError, match=f"fscoord://.*{complaint}"):
        start("m", address.format(path=tmp_path / "store"))


def test_path_may_be_encoded(start: Start, tmp_path: Path) -> None:
    start("m", f"fscoord://{tmp_path}/a%3Fb%20c").create_group(b"g").get()
    assert (tmp_path / "a?b c").exists()


def test_use_before_the_start_is_refused(url: str) -> None:
    coordinator = coordination.get_coordinator(url, b"m")
    with pytest.raises(tooz.ToozError, match="not started"):
        coordinator.get_lock(b"l")
    with pytest.raises(tooz.ToozError, match="not started"):
        coordinator.heartbeat()


def test_error_says_which_extra_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tooz", None)
    monkeypatch.delitem(sys.modules, "fscoord.integrations.tooz", raising=False)
    with pytest.raises(ImportError, match=re.escape("pip install 'fscoord[tooz]'")):
        import fscoord.integrations.tooz  # noqa: F401


def test_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = [block for block in pages.blocks(PAGE) if block.language == "python"]
    for block in examples:
        pages.run_python(block, PAGE, {})
    address = f"fscoord://{tmp_path}/store"
    said = [
        subprocess.run(
            [sys.executable, "member.py", address, name], capture_output=True, text=True, timeout=60, check=True
        ).stdout
        for name in ("one", "two")
    ]
    assert said == ["one leads\nmembers: one\n", "two leads\nmembers: two\n"]
