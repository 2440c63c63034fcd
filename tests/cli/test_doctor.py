"""doctor: verdicts as exit codes, reports for people and for programs, and Ctrl-C that leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fscoord import StoreUnavailableError
from fscoord.cli import doctor
from fscoord.doctor.prediction import Job, predict

REPORT = {
    "path": "/mnt/x",
    "verdict": "not proven",
    "reasons": ["it was tried on one host"],
    "recommendations": ["try two"],
    "file_system": {
        "kind": "nfs4",
        "point": "/mnt",
        "options": ["rw", "rw"],
        "is_local": False,
        "coherence": "direct",
        "reads_why": "it is current",
        "vanished_host": "its locks last for a lease",
    },
    "lock": "ofd",
    "hosts": ["a"],
    "other_host": "b\x1b",
    "checks": [
        {"name": "race", "between": "processes", "outcome": "ok", "says": "all", "lock": "ofd", "measured": {"n": 1}},
        {"name": "names", "between": "hosts", "outcome": "bad", "says": "two", "lock": "", "measured": {}},
    ],
    "presided": True,
    "seconds": 1.0,
}
LAUNCHERS = ("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "OMPI_", "PMI", "PALS_", "FLUX_", "PYTEST_XDIST", "TORCHELASTIC")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(LAUNCHERS):
            monkeypatch.delenv(name)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the examination was asked, its ``report`` to be given, and the ``error`` to be raised instead."""
    seen: dict[str, Any] = {"report": dict(REPORT), "error": None}

    def examine(path: str, **asked: Any) -> dict[str, Any]:
        seen.update(asked, path=path)
        asked["tell"]("tries the locks")
        if seen["error"]:
            raise seen["error"]
        return dict(seen["report"])

    monkeypatch.setattr(doctor, "examine", examine)
    return seen


@pytest.mark.parametrize(("verdict", "code"), [("safe", 0), ("not proven", 1), ("not safe", 69)])
def test_verdict_is_the_exit_code(fscoord, examined, verdict, code):
    examined["report"]["verdict"] = verdict
    done = fscoord("doctor", "/mnt/x")
    assert (done.code, done.err) == (code, "")
    assert done.out.decode().splitlines()[0] == f"/mnt/x: {verdict.upper()}"


def test_report_gives_the_reasons_the_advice_and_the_findings_by_scope(fscoord, examined):
    text = fscoord("doctor", "/mnt/x").out.decode()
    for line in (
        "  nfs4 at /mnt (rw)",
        "  reads: direct: it is current",
        "  when a host vanishes: its locks last for a lease",
        "  why: it was tried on one host",
        "  do:  try two",
        "between two processes",
        "  ok   race (ofd)           all",
        "between this host and b\\x1b",
        "  BAD  names                two",
    ):
        assert line in text.splitlines()


def test_json_report_is_one_line_that_holds_everything(fscoord, examined):
    out = fscoord("doctor", "--json", "/mnt/x").out
    assert out.count(b"\n") == 1
    report = json.loads(out)
    assert report["verdict"] == "not proven"
    assert report["checks"][1] == {"name": "names", "between": "hosts", "outcome": "bad", "says": "two"}
    assert report["checks"][0]["measured"] == {"n": 1}
    assert "presided" not in report


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_anonymous_report_has_no_name_of_a_user_a_host_or_a_directory(fscoord, examined, monkeypatch, form):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("USER", "alice")
    path = "/mnt/alice/secret"
    report = examined["report"]
    report |= {"path": path, "hosts": ["n1.lab.example", "n2.lab.example"], "other_host": "n2.lab.example"}
    report["reasons"] = [f"{path}: n2 and n1.lab.example disagree, and so does /home/alice/.ssh, of alice"]
    report["recommendations"] = [f"srun -N2 fscoord doctor {path}; the words malice and n10 stay"]
    report["file_system"] = report["file_system"] | {"options": ["rw", "addr=10.1.2.3", "clientaddr=10.1.2.4"]}
    assert b"alice/secret" in fscoord("doctor", *form, path).out
    text = fscoord("doctor", "--anonymous", *form, path).out.decode()
    assert not re.search(r"\balice|secret|example|\bn[12]\b|10\.1\.2|/mnt", text), text
    for kept in ("DIR: HOST2 and HOST1 disagree, and so does HOME/.ssh, of USER", "malice and n10", "addr=ADDRESS"):
        assert kept in text


def between_hosts(examined: dict[str, Any], seconds: float = 0.002, lock: str = "ofd") -> None:
    """Let the report say that a free lock took so long, with another host there."""
    check = {"name": "latency", "between": "hosts", "outcome": "info", "says": "2 ms", "lock": lock}
    examined["report"]["checks"] = [*REPORT["checks"], check | {"measured": {"seconds": seconds}}]
    examined["report"]["hosts"] = ["a", "b"]


def test_report_predicts_what_a_job_costs_from_the_round_trip(fscoord, examined):
    between_hosts(examined)
    found = json.loads(fscoord("doctor", "--json", "--nodes", "16", "--ranks-per-node", "8", "/mnt/x").out)
    assert found["prediction"] == predict(Job(16, 8), 0.001)
    text = fscoord("doctor", "--nodes", "16", "--ranks-per-node", "8", "/mnt/x").out.decode()
    (heading,) = (line for line in text.splitlines() if line.startswith("what 16 nodes with 8 ranks each will cost"))
    assert "at 1 ms for a round trip" in heading
    (barrier,) = (line for line in text.splitlines() if line.startswith("  a barrier"))
    assert f"{found['prediction']['barrier_requests']:,} requests" in barrier
    assert "fitted on NFS" not in text
    examined["report"]["file_system"] = REPORT["file_system"] | {"kind": "lustre"}
    assert "fitted on NFS" in fscoord("doctor", "/mnt/x").out.decode()


def test_predicted_job_is_the_one_that_the_launcher_started_unless_it_is_given(fscoord, examined, monkeypatch):
    between_hosts(examined)

    def job(*options: str) -> tuple[int, int]:
        found = json.loads(fscoord("doctor", "--json", *options, "/mnt/x").out)["prediction"]
        return found["nodes"], found["ranks_per_node"]

    assert job() == (2, 1)
    for name, value in {"RANK": "0", "WORLD_SIZE": "8", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert job() == (2, 4)
    assert job("--nodes", "128", "--ranks-per-node", "3") == (128, 3)


def test_report_predicts_nothing_without_a_second_host_or_for_other_locks(fscoord, examined):
    assert json.loads(fscoord("doctor", "--json", "/mnt/x").out)["prediction"] is None
    assert "will cost" not in fscoord("doctor", "/mnt/x").out.decode()
    between_hosts(examined, lock="soft")
    examined["report"]["lock"] = "soft"
    assert json.loads(fscoord("doctor", "--json", "/mnt/x").out)["prediction"] is None


def test_report_is_printed_by_one_instance_and_all_have_the_exit_code(fscoord, examined):
    examined["report"] |= {"presided": False, "verdict": "not safe"}
    done = fscoord("doctor", "--json", "/mnt/x")
    assert (done.code, done.out) == (69, b"")
    assert "not safe; another instance prints the report" in done.err


def test_number_of_instances_comes_from_the_launcher_unless_it_is_given(fscoord, examined, monkeypatch):
    fscoord("doctor", "/mnt/x")
    assert (examined["expected"], examined["wait"], examined["lock"], examined["group"]) == (None, None, "ofd", "")
    for name, value in {"PROCID": "0", "NTASKS": "2", "STEP_NUM_TASKS": "2", "STEP_ID": "3", "JOB_ID": "77"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    fscoord("doctor", "/mnt/x")
    assert examined["expected"] == 2
    assert "77" in examined["group"]
    fscoord("doctor", "-n", "3", "--wait", "5", "--lock", "flock", "/mnt/x")
    assert (examined["expected"], examined["wait"], examined["lock"]) == (3, 5.0, "flock")


def test_workers_of_pytest_xdist_are_not_counted_as_hosts(fscoord, examined, monkeypatch):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "4")
    fscoord("doctor", "/mnt/x")
    assert examined["expected"] is None


def test_progress_is_reported_with_v(fscoord, examined):
    assert "fscoord: tries the locks" in fscoord("doctor", "-v", "/mnt/x").err


def test_examination_that_could_not_be_finished_is_no_verdict(fscoord, examined):
    examined["error"] = StoreUnavailableError("it was broken off")
    assert fscoord("doctor", "/mnt/x").code == 74


def test_command_itself_never_looks_at_the_directory(fscoord, examined, monkeypatch):
    looked = []

    def note(name: str, real: Any) -> Any:
        return lambda path, *more, **named: looked.append(path) or real(path, *more, **named)

    for name in ("stat", "lstat", "open", "listdir", "scandir", "readlink", "access"):
        monkeypatch.setattr(os, name, note(name, getattr(os, name)))
    fscoord("doctor", "/mnt/x")
    assert [path for path in looked if "/mnt" in str(path)] == []
    assert examined["path"] == "/mnt/x"


def test_directory_that_is_not_there_is_an_error(fscoord, tmp_path):
    done = fscoord("doctor", str(tmp_path / "nothing"))
    assert (done.code, done.out) == (74, b"")
    assert "nothing" in done.err


def test_interruption_of_a_wait_for_other_instances_leaves_nothing(process, line_with, tmp_path):
    directory = Path(tmp_path, "x")
    directory.mkdir()
    child = process("doctor", "-v", "-n", "2", "--wait", "600", str(directory))
    line_with(child, "1 here, waiting for 2 instances")
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == 130
    assert os.listdir(directory) == []


def test_directory_that_does_not_exist_is_an_error_with_the_next_step(fscoord, tmp_path):
    done = fscoord("doctor", str(tmp_path / "none"))
    assert (done.code, done.out) == (74, b"")
    assert f"{tmp_path}/none: No such file or directory; check the path, or create the directory first" in done.err


def test_full_disk_is_an_error_that_leaves_nothing_in_the_directory(fscoord, full_disk):
    done = fscoord("doctor", str(full_disk))
    assert (done.code, done.out) == (74, b"")
    assert "No space left on device; free some space" in done.err
    assert os.listdir(full_disk) == ["ballast"]


FAST = """
import time
monotonic = time.monotonic
time.monotonic = lambda: 10 * monotonic()
"""


def test_disk_that_fills_up_during_the_examination_is_left_without_its_files(fscoord, full_disk, tmp_path, monkeypatch):
    """The clocks of the processes that probe are fast, so that they soon give up those that have failed."""
    Path(tmp_path, "sitecustomize.py").write_text(FAST)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    os.truncate(full_disk / "ballast", 48 << 10)
    done = fscoord("doctor", str(full_disk))
    assert "No space left on device" in done.out.decode() + done.err
    assert os.listdir(full_disk) == ["ballast"]


def test_help_has_a_table_of_the_verdicts(fscoord):
    text = fscoord("doctor", "--help").out.decode()
    for code, verdict in ((0, "safe"), (1, "not proven"), (69, "not safe")):
        assert re.search(rf"^ +{code} +{verdict}  ", text, re.MULTILINE)


def test_steps_are_numbered_and_their_time_is_told(process, line_with, tmp_path):
    child = process("doctor", "-v", str(tmp_path))
    assert re.search(r"examining .*: about 5 s for each pair of processes", line_with(child, "examining"))
    first = re.search(r"between processes: exclusion \(ofd\), step 1 of (\d+)$", line_with(child, "exclusion").strip())
    last = line_with(child, "speed")
    assert last.endswith(f", step {first[1]} of {first[1]}\n")


# Short sleeps: a signal that comes just before a sleep does not end it.
ENDLESS = """
import time
from fscoord.doctor import probes
def handover(*_):
    while True:
        time.sleep(0.01)
probes.handover = handover
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interruption_leaves_nothing_in_the_directory(process, line_with, tmp_path, number, code):
    """A probe does not end, so that the examination is not over before it is interrupted."""
    Path(tmp_path, "sitecustomize.py").write_text(ENDLESS)
    directory = Path(tmp_path, "x")
    directory.mkdir()
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    child = process("doctor", "-v", str(directory), env={"PYTHONPATH": path})
    line_with(child, "between processes: handover")
    assert [name for name in os.listdir(directory) if name.startswith(".fscoord-doctor")]
    child.send_signal(number)
    assert child.wait(60) == code
    assert os.listdir(directory) == []
    assert child.stdout.read() == b""


def test_directory_with_an_empty_name_is_a_usage_error_and_not_the_present_one(fscoord):
    done = fscoord("doctor", "")
    assert (done.code, done.out) == (64, b"")
    assert "Invalid value for 'DIR': the name is empty" in done.err
