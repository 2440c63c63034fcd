"""Whole examinations: real processes on a local directory, some of them playing two hosts."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.interrupts import At, interrupt

from fscoord import InsecurePathError, StoreUnavailableError
from fscoord.doctor import coordination, examination, probes
from fscoord.doctor.agents import FailedError
from fscoord.doctor.examination import examine
from fscoord.doctor.probes import Pair
from fscoord.doctor.verdict import HOSTS, OK, PROCESSES, UNKNOWN, Check

EFFORT_S = 0.05
PATIENCE_S = 150
HANG_S = 45.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine's slowness is no verdict on its file system: the limits only bound hangs."""
    for module, names in {
        "examination": ["FACTS_S", "LEAVE_S", "SILENT_S"],
        "coordination": ["ACT_S", "GRACE_S"],
        "probes": ["ACT_S"],
        "agents": ["START_S", "END_S"],
    }.items():
        for name in names:
            monkeypatch.setattr(f"fscoord.doctor.{module}.{name}", HANG_S)


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is between hosts, in few rounds: each question to another host takes its time."""

    def run(pair: Pair, *arguments: Any) -> Iterator[Check]:
        return probes.run(pair, *arguments) if pair.between == HOSTS else iter(())

    monkeypatch.setattr(examination, "probes", SimpleNamespace(run=run, KINDS=probes.KINDS))
    monkeypatch.setattr(probes, "ROUNDS", 2)
    monkeypatch.setattr(probes, "LOOKS", {"locked": "a look"})


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[str]:
    """The examined directory; empty again at the end of every test.

    The agent of an instance that was killed removes the mailbox, perhaps only after the other instances have ended.
    """
    made = tmp_path / "x"
    made.mkdir()
    yield str(made)
    deadline = time.monotonic() + PATIENCE_S
    while os.listdir(made) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.listdir(made) == []


class Instance(threading.Thread):
    """An examination in a thread, as of one host."""

    def __init__(self, directory: str, client: str, tell: Callable[[str], None] = lambda _: None, **options: Any):
        super().__init__()
        self.report: dict[str, Any] = {}
        self.error: BaseException | None = None
        self._options = {"expected": 2, "client": client, "effort": EFFORT_S, "tell": tell, **options}
        self._directory = directory
        self.start()

    def run(self) -> None:
        try:
            self.report = examine(self._directory, **self._options)
        except Exception as error:
            self.error = error

    def end(self) -> dict[str, Any]:
        self.join(PATIENCE_S)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.report


PROGRAM = """
import sys
from fscoord.doctor.examination import examine

directory, client, last = sys.argv[1:]

def tell(words):
    print(words, flush=True)
    if last and last in words:
        sys.stdin.read()

examine(directory, expected=2, client=client, effort=0.1, tell=tell)
"""


@pytest.fixture
def process(directory: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Give `process(client, last="")`: an instance in a process of its own, which tells on its standard output.

    It stops where it tells `last`, until it gets a signal.
    """
    started = []

    def start(client: str, last: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PROGRAM, directory, client, last]
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, env=environment, **pipes))
        return started[-1]

    yield start
    for child in started:
        child.kill()
        child.wait(PATIENCE_S)
        child.stdin.close()
        child.stdout.close()


def until(child: subprocess.Popen[str], words: str) -> None:
    for line in child.stdout:
        if words in line:
            return
    raise AssertionError(f"{words!r} never came")


def scopes(report: dict[str, Any], outcome: str) -> set[str]:
    return {check["between"] for check in report["checks"] if check["outcome"] == outcome}


def test_instance_alone_examines_a_local_directory(directory):
    report = examine(directory, effort=EFFORT_S)
    assert (report["verdict"], report["presided"], report["other_host"]) == ("safe", True, None)
    assert scopes(report, OK) == {PROCESSES}
    assert scopes(report, "bad") == scopes(report, UNKNOWN) == set()


def test_instances_of_two_hosts_meet_and_one_of_them_examines(directory, brief):
    instances = [Instance(directory, client) for client in "ab"]
    reports = [instance.end() for instance in instances]
    assert sorted(report["presided"] for report in reports) == [False, True]
    assert reports[0]["checks"] == reports[1]["checks"]
    assert scopes(reports[0], OK) == {HOSTS}
    assert scopes(reports[0], "bad") == scopes(reports[0], UNKNOWN) == set()
    assert reports[0]["other_host"] == os.uname().nodename


def test_instances_of_one_host_prove_nothing_between_hosts(directory, monkeypatch):
    monkeypatch.setattr(examination.probes, "run", lambda *_: iter(()))
    instances = [Instance(directory, "a") for _ in range(2)]
    assert {instance.end()["other_host"] for instance in instances} == {None}


@pytest.mark.parametrize(
    ("one", "other", "elsewhere"),
    [
        ({}, {}, False),
        ({}, {"boot_id": "2"}, True),
        ({}, {"network": "n2"}, False),  # a container that has the host's mount
        ({}, {"device": 2}, False),  # two mounts of one client, which the server takes for one
        ({}, {"network": "n2", "device": 2}, True),
        ({"client": "a"}, {"client": "b"}, True),
    ],
)
def test_instance_with_a_cache_of_its_own_is_another_host(one, other, elsewhere):
    usual = {"client": None, "boot_id": "1", "network": "n1", "device": 1}
    assert coordination.is_elsewhere(usual | one, usual | other) is elsewhere


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_partner_that_goes_away_leaves_the_remaining_checks_unknown(directory, process, number, brief, monkeypatch):
    monkeypatch.setattr(coordination, "GRACE_S", 1000.0)  # it is not the deadline that tells
    gone, run = threading.Event(), examination.probes.run

    def run_when_it_has_gone(*arguments: Any) -> Iterator[Check]:
        assert gone.wait(PATIENCE_S)
        return run(*arguments)

    monkeypatch.setattr(examination.probes, "run", run_when_it_has_gone)
    reached = threading.Event()
    one = Instance(directory, "a", lambda words: reached.set() if words.startswith("1 here") else None)
    assert reached.wait(PATIENCE_S)
    partner = process("b")
    until(partner, "working for")
    partner.send_signal(number)
    gone.set()
    report = one.end()
    assert HOSTS in scopes(report, UNKNOWN)
    assert any("does not answer any more" in check["says"] for check in report["checks"])
    assert "bad" not in {check["outcome"] for check in report["checks"]}
    assert partner.wait(PATIENCE_S) in (128 + number, -number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_partner_reports_that_the_presiding_instance_has_gone_and_cleans_up(directory, process, number):
    first = process("a", last="between processes: death")
    until(first, "1 here")
    began = threading.Event()
    partner = Instance(directory, "b", lambda words: began.set() if words.startswith("working for") else None)
    until(first, "between processes: death")
    assert began.wait(PATIENCE_S)  # a partner that has not begun would meet again, and examine alone
    first.send_signal(number)
    with pytest.raises(StoreUnavailableError, match="start all instances again"):
        partner.end()


def test_instance_meets_again_if_the_presiding_one_goes_before_the_beginning(directory, monkeypatch):
    monkeypatch.setattr(examination.probes, "run", lambda *_: iter(()))
    gather, gone = coordination.Coordinator.gather, ["a message"]

    def gather_with_the_second(self: coordination.Coordinator, *arguments: Any) -> None:
        if gone:
            raise coordination.BrokenOffError(gone.pop())
        gather(self, *arguments)

    monkeypatch.setattr(coordination.Coordinator, "gather", gather_with_the_second)
    told: list[str] = []
    assert examine(directory, tell=told.append)["presided"]
    assert "a message; trying again" in told


def test_interruption_at_any_point_of_the_end_leaves_no_agent(directory, monkeypatch):
    """Python may raise the exception of a handler when it enters the very function that ends the agents."""
    points, started = 0, []

    def run(self: examination._Instance, *_: Any) -> dict[str, Any]:
        lent = self._agent(coordination.Coordinator(self.mailbox_agent, directory, {}), "a process")
        for agent in (self.mailbox_agent, lent):
            agent.ask("facts", HANG_S, path=directory)
        started.append([agent._process for agent in (self.mailbox_agent, lent)])
        at.__enter__()
        return {}

    monkeypatch.setattr(examination._Instance, "run", run)
    while True:
        at = At(points + 1, interrupt, first_inside="doctor/")
        try:
            examine(directory)
        except KeyboardInterrupt:
            pass
        finally:
            at.__exit__()
        assert None not in [process.returncode for process in started[-1]], at.where
        if not at.reached:
            break
        points += 1
    assert points > 8


def test_files_of_an_instance_that_died_with_its_machine_are_put_aside(directory, monkeypatch):
    monkeypatch.setattr(coordination, "STALE_S", 0.1)
    monkeypatch.setattr(examination.probes, "run", lambda *_: iter(()))
    place = Path(directory, f".fscoord-doctor-{os.getuid()}")
    (place / "chair").mkdir(parents=True, mode=0o700)
    place.chmod(0o700)
    (place / "here.dead").write_text("{}")
    (place / "beat.7").write_text("")
    assert examine(directory)["presided"]


def test_instance_that_left_before_the_members_were_counted_is_not_missed(directory, monkeypatch):
    monkeypatch.setattr(examination.probes, "run", lambda *_: iter(()))
    monkeypatch.setattr("fscoord.doctor.coordination.Coordinator._await_members", lambda self, *_: [self.name, "gone"])
    assert examine(directory)["hosts"] == [os.uname().nodename]


def test_instance_that_comes_late_waits_for_the_end_and_then_examines(directory, process, monkeypatch):
    monkeypatch.setattr(examination.probes, "run", lambda *_: iter(()))
    started, told = threading.Event(), threading.Event()
    hold = threading.Event()

    def busy(*_: Any) -> Iterator[None]:
        started.set()
        assert hold.wait(PATIENCE_S)
        return iter(())

    monkeypatch.setattr(examination.probes, "run", busy)
    first = Instance(directory, "a", expected=1)
    assert started.wait(PATIENCE_S)
    late = Instance(directory, "b", lambda words: told.set() if "without this instance" in words else None, expected=1)
    assert told.wait(PATIENCE_S)
    hold.set()
    assert first.end()["presided"]
    assert late.end()["presided"]


def test_meeting_place_of_another_kind_or_owner_is_refused(directory):
    place = Path(directory, f".fscoord-doctor-{os.getuid()}")
    place.write_text("")
    try:
        with pytest.raises(InsecurePathError):
            examine(directory)
        assert place.read_text() == ""
    finally:
        place.unlink()


@pytest.mark.parametrize(("path", "error"), [("nothing", FileNotFoundError), ("file", NotADirectoryError)])
def test_path_that_is_no_directory_is_an_error_that_names_it(tmp_path, path, error):
    (tmp_path / "file").write_text("")
    with pytest.raises(error) as told:
        examine(str(tmp_path / path))
    assert told.value.filename == str(tmp_path / path)


def test_directory_that_cannot_be_written_is_an_error(as_nobody, public_dir):
    public_dir.chmod(0o755)
    with pytest.raises(PermissionError):
        as_nobody(examine, str(public_dir))


def test_directory_that_becomes_full_is_an_error_with_advice(directory, brief, monkeypatch):
    def full(*_: Any) -> None:
        raise FailedError(os.strerror(errno.ENOSPC), errno=errno.ENOSPC, kind="OSError")

    monkeypatch.setattr(coordination.Coordinator, "end", full)
    with pytest.raises(OSError, match="No space left on device; free some space") as told:
        examine(directory, effort=EFFORT_S)
    assert (told.value.errno, told.value.filename) == (errno.ENOSPC, directory)


def test_relative_path_is_resolved_from_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(examination.probes, "run", lambda *_: iter(()))
    (tmp_path / "x").mkdir()
    assert examine("x")["path"] == str(tmp_path / "x")


def test_lock_kind_that_is_unknown_is_refused(directory):
    with pytest.raises(ValueError, match="posix"):
        examine(directory, lock="posix")
