"""The count that ends `.ci/run`: a test that failed, was skipped, or was left out without a mark makes the run fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
from support.torch_lacks import LACKS

pytestmark = pytest.mark.once

COUNT = Path(__file__).parent.parent / ".ci" / "count.py"
FLIPS = str(Path(__file__).parent / "faults" / "test_flips.py")
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PLAIN, TWICE, ONCE = {"plain": ""}, {"flips": "exhaustive", "run": "program"}, {"tidy": "once"}
SELECTED = {"3.10": PLAIN | TWICE, "3.11": PLAIN, "3.12": PLAIN, "3.13": PLAIN | TWICE | ONCE}


def report(version: str, tests: dict[str, str], inside: dict[str, str]) -> str:
    """A report of pytest: `tests` gives the marker of each test, and `inside` the content of some."""
    cases = []
    for name, marker in tests.items():
        held = f"<properties><property name='marker' value='{marker}'/></properties>" if marker else ""
        module, _, function = name.rpartition("::")
        where = f"classname={quoteattr(module or 'tests.t')} name={quoteattr(function)}"
        cases.append(f"<testcase {where}>{held}{inside.get(name, '')}</testcase>")
    failed = sum("<failure" in said for said in inside.values())
    head = f"<testsuite name='pytest' errors='0' failures='{failed}' tests='{len(cases)}'>"
    python = f"<properties><property name='python' value='{version}'/></properties>"
    return f"<testsuites>{head}{python}{''.join(cases)}</testsuite></testsuites>"


class Run:
    """The reports and the stages of one run, as `.ci/run` leaves them, and what the count says of them."""

    def __init__(self, directory: Path) -> None:
        self.reports = directory / "reports"
        self.reports.mkdir()
        self.stages = directory / "stages"
        self.stages.write_text("lint   3 s  passed\n")
        for version, tests in SELECTED.items():
            self.put(f"py{version.replace('.', '')}", version, tests)

    def put(self, name: str, version: str, tests: dict[str, str], **inside: str) -> None:
        (self.reports / f"{name}.xml").write_text(report(version, tests, inside))

    def count(self) -> tuple[bool, str]:
        command = [sys.executable, str(COUNT), str(self.stages), str(self.reports), *VERSIONS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not done.stderr
        return done.returncode == 0, done.stdout


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_count_is_good_when_each_version_ran_its_tests(run: Run) -> None:
    run.put("torch", "3.11", {"store": ""})
    good, said = run.count()
    assert good
    assert said.splitlines()[-1] == "10 passed, 0 failed"
    assert "py311: Python 3.11: 1 tests, 0 failed, 0 skipped" in said


@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_count_names_a_test_without_a_mark_that_a_version_left_out(run: Run, version: str) -> None:
    for each, tests in SELECTED.items():
        run.put(f"py{each.replace('.', '')}", each, tests | {"another": ""})
    run.put(f"py{version.replace('.', '')}", version, PLAIN)
    good, said = run.count()
    assert not good
    assert f"left out on {version}, and not marked: tests.t::another" in said
    assert "flips" not in said
    assert "tidy" not in said


def test_count_does_not_expect_tests_of_later_versions_on_earlier_ones(run: Run) -> None:
    for version in ("3.12", "3.13"):
        run.put(f"py{version.replace('.', '')}", version, SELECTED[version] | {"monitoring": ""})
    assert run.count()[0]


def test_count_misses_a_test_with_a_renamed_parameter_as_a_whole(run: Run) -> None:
    for version, name in zip(VERSIONS, ["kill[SIGKILL]", "kill[9]", "kill[9]", "kill[9]"], strict=True):
        run.put(f"py{version.replace('.', '')}", version, SELECTED[version] | {name: ""})
    assert run.count()[0]
    run.put("py312", "3.12", PLAIN)
    good, said = run.count()
    assert not good
    assert "left out on 3.12, and not marked: tests.t::kill\n" in said


def test_count_takes_a_program_for_the_same_whose_parameter_has_another_name(run: Run) -> None:
    for version, name in [("3.10", "stop[SIGINT]"), ("3.13", "stop[2]")]:
        run.put(f"py{version.replace('.', '')}", version, SELECTED[version] | {name: "program"})
    assert run.count()[0]
    run.put("py310", "3.10", SELECTED["3.10"])
    good, said = run.count()
    assert not good
    assert "not run on 3.10, and not marked once: tests.t::stop[2]" in said


def test_count_expects_tests_with_either_mark_on_the_oldest_version_too(run: Run) -> None:
    run.put("py310", "3.10", PLAIN)
    good, said = run.count()
    assert not good
    for name in TWICE:
        assert f"not run on 3.10, and not marked once: tests.t::{name}" in said


@pytest.mark.parametrize("version", VERSIONS)
def test_count_fails_for_a_version_without_a_report_or_with_skipped_tests_alone(run: Run, version: str) -> None:
    name = f"py{version.replace('.', '')}"
    run.put(name, version, {"plain": ""}, plain="<skipped message='no root'/>")
    good, said = run.count()
    assert not good
    assert f"no tests ran on Python {version}" in said
    (run.reports / f"{name}.xml").unlink()
    good, said = run.count()
    assert not good
    assert f"no tests ran on Python {version}" in said


def test_count_fails_for_tests_of_one_version_that_ran_on_another(run: Run) -> None:
    run.put("py312", "3.13", PLAIN)
    good, said = run.count()
    assert not good
    assert "the tests for Python 3.12 ran on Python 3.13" in said


def test_count_fails_for_a_skipped_test_and_names_its_reason(run: Run) -> None:
    run.put("etcd", "3.10", {"server": "", "client": ""}, server="<skipped message='no etcd'/>")
    good, said = run.count()
    assert not good
    assert "skipped in etcd on 3.10: tests.t::server: no etcd" in said
    assert said.splitlines()[-1] == "10 passed, 1 failed"


def test_count_names_a_failed_test_with_the_end_of_its_output(run: Run) -> None:
    run.put("py313", "3.13", SELECTED["3.13"], plain="<failure message='assert 1 == 2'>the trace</failure>")
    good, said = run.count()
    assert not good
    assert "FAILED in py313: tests.t::plain\nassert 1 == 2\n...the trace" in said
    assert said.splitlines()[-1] == "8 passed, 1 failed"


def test_count_fails_for_a_failed_stage_although_each_test_passed(run: Run) -> None:
    run.stages.write_text("lint   3 s  failed\n")
    good, said = run.count()
    assert not good
    assert "stage failed: lint   3 s  failed" in said


TORCH_LACKS = f"<skipped message='{LACKS}TCPStore.queue_push'/>"
QUEUES = {"store": "", "queues": ""}


def test_count_accepts_and_names_what_an_older_torch_lacks_and_the_newest_has_run(run: Run) -> None:
    run.put("torch", "3.11", QUEUES | {"tests.benchmarks::time": ""})
    run.put("torch2.6", "3.11", QUEUES, queues=TORCH_LACKS)
    good, said = run.count()
    assert good
    assert "lacked in torch2.6: tests.t::queues: this torch lacks TCPStore.queue_push\n" in said
    assert said.splitlines()[-1] == "13 passed, 0 failed"


@pytest.mark.parametrize("newest", ["", TORCH_LACKS, "<failure message='broken'/>", None])
def test_count_fails_for_what_no_torch_has_run(newest: str | None, run: Run) -> None:
    if newest is not None:
        run.put("torch", "3.11", QUEUES if newest else {"store": ""}, queues=newest)
    run.put("torch2.6", "3.11", QUEUES, queues=TORCH_LACKS)
    good, said = run.count()
    assert not good
    assert "skipped in torch2.6 on 3.11: tests.t::queues: this torch lacks TCPStore.queue_push" in said


def test_count_fails_for_another_reason_although_the_newest_torch_has_run_the_test(run: Run) -> None:
    run.put("torch", "3.11", QUEUES)
    run.put("torch2.6", "3.11", QUEUES, queues="<skipped message='no network'/>")
    good, said = run.count()
    assert not good
    assert "skipped in torch2.6 on 3.11: tests.t::queues: no network" in said


def test_count_names_a_test_that_an_older_torch_left_out_of_a_module_that_it_ran(run: Run) -> None:
    run.put("torch", "3.11", QUEUES)
    run.put("torch2.6", "3.11", {"store": ""})
    good, said = run.count()
    assert not good
    assert "left out in torch2.6: tests.t::queues" in said


@pytest.mark.parametrize("processes", ["0", "1"])
def test_report_of_a_run_names_its_python_and_the_markers(processes: str, tmp_path: Path) -> None:
    """With pytest-xdist the tests run in other processes than the one that writes the report."""
    test = f"{__file__}::test_count_is_good_when_each_version_ran_its_tests"
    command = [sys.executable, "-m", "pytest", "-q", "-n", processes, "-p", "no:cacheprovider", test]
    done = subprocess.run(
        [*command, f"--junit-xml={tmp_path / 'junit.xml'}", f"--basetemp={tmp_path / 'inside'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = (tmp_path / "junit.xml").read_text()
    assert f'<property name="python" value="{sys.version_info.major}.{sys.version_info.minor}" />' in written
    assert '<property name="marker" value="once" />' in written


def test_sample_depends_on_the_seed_alone() -> None:
    """Otherwise pytest-xdist would refuse what its workers have collected."""

    def collected(seed: int, *options: str) -> set[str]:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *options, FLIPS]
        environment = {**os.environ, "FSCOORD_SEED": str(seed)}
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return {line for line in done.stdout.splitlines() if "::" in line}

    drawn = collected(1, "--sample=4")
    assert drawn == collected(1, "--sample=4")
    assert drawn != collected(2, "--sample=4")
    assert drawn < collected(1)
