"""Count what ran: `count.py STAGES REPORTS VERSION...`; the closing line of `.ci/run`, and its exit code.

Fails if a stage failed, if a test failed, if one was skipped (everything that a test may need is installed there), if
one of the Python versions ran no tests, or if one left out a test without a mark that says so. One kind of skip is
accepted, and named: the test needs what an older torch lacks, and the newest torch has run it. In the modules that an
older torch ran, its report must have each test that the newest torch ran.

The versions are in order. A test marked `exhaustive` or `program` runs on the first and the last, one marked `once` on
the last. Any other test that ran on the first and the last must have run on those between. The failures are named last,
with the end of what each said, because the end is what is kept of a long log.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

SAID = 2000  # characters of each failure
NEWEST_TORCH, LACKS = "torch", "this torch lacks "  # a report; how reasons begin, in tests/support/torch_lacks.py


class Report(NamedTuple):
    """What one run of pytest has reported: its tests with the markers of each, and why some were skipped or failed."""

    name: str
    version: str
    tests: dict[str, set[str]]
    bad: int
    skipped: dict[str, str]
    failed: dict[str, str]

    def has_run(self, name: str) -> bool:
        """Return whether the test `name` ran, and passed."""
        return name in self.tests and name not in self.skipped and name not in self.failed


def failures(case: ET.Element) -> Iterator[str]:
    """What made a test fail, each with its end."""
    for kind in ("failure", "error"):
        for found in case.findall(kind):
            yield f"{found.get('message', '')[:SAID]}\n...{(found.text or '')[-SAID:]}"


def properties(element: ET.Element, name: str) -> list[str]:
    found = element.findall("properties/property")
    return [each.get("value", "") for each in found if each.get("name") == name]


def read(path: Path) -> Report:
    suite = ET.parse(path).getroot().find("testsuite")
    assert suite is not None, f"{path} holds no test suite"
    version = next(iter(properties(suite, "python")), "unknown")
    bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
    report = Report(path.stem, version, {}, bad, {}, {})
    for case in suite.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        report.tests.setdefault(name, set()).update(properties(case, "marker"))
        for said in failures(case):
            report.failed[name] = report.failed.get(name, "") + said
        skipped = case.find("skipped")
        if skipped is not None:
            report.skipped[name] = skipped.get("message", "")
    return report


def summary(report: Report) -> str:
    count, skipped = len(report.tests), len(report.skipped)
    return f"{report.name}: Python {report.version}: {count} tests, {report.bad} failed, {skipped} skipped"


def functions(names: set[str]) -> set[str]:
    """Return the names without their parameters: a parameter may have another name on another version."""
    return {name.partition("[")[0] for name in names}


def plain(tests: dict[str, set[str]]) -> set[str]:
    """Return the tests without a mark, and their functions."""
    names = {name for name, markers in tests.items() if not markers}
    return names | functions(names)


def left_out(reports: dict[str, Report], versions: Sequence[str]) -> Iterator[str]:
    """Yield a complaint for each test of the suite that a version should have run, and has not."""
    suites = {version: reports.get(f"py{version.replace('.', '')}") for version in versions}
    for version, suite in suites.items():
        if suite is None or len(suite.tests) == len(suite.skipped):
            yield f"no tests ran on Python {version}"
        elif suite.version != version:
            yield f"the tests for Python {version} ran on Python {suite.version}"
    first, last = suites[versions[0]], suites[versions[-1]]
    if first is None or last is None:
        return
    there = first.tests.keys() | functions({name for name, markers in first.tests.items() if "program" in markers})
    twice = {name for name, markers in last.tests.items() if markers and "once" not in markers}
    missing = sorted(name for name in twice if not {name, *functions({name})} & there)
    yield from (f"not run on {versions[0]}, and not marked once: {name}" for name in missing)
    everywhere = plain(last.tests) & plain(first.tests)
    for version in versions[1:-1]:
        suite = suites[version]
        missing = everywhere - plain(suite.tests) if suite is not None else set()
        yield from (f"left out on {version}, and not marked: {name}" for name in sorted(missing))


def skips(reports: dict[str, Report]) -> Iterator[tuple[bool, str]]:
    """Yield for each skipped test whether that is accepted, and the line that names it."""
    newest = reports.get(NEWEST_TORCH)
    for report in reports.values():
        for name, reason in report.skipped.items():
            if reason.startswith(LACKS) and newest is not None and newest.has_run(name):
                yield True, f"lacked in {report.name}: {name}: {reason}"
            else:
                yield False, f"skipped in {report.name} on {report.version}: {name}: {reason}"


def left_out_of_older_torch(reports: dict[str, Report]) -> Iterator[str]:
    """Yield a complaint for each test that the newest torch ran, but not an older one that ran others of its module."""
    newest = reports.get(NEWEST_TORCH)
    for report in reports.values():
        if newest is not None and report is not newest and report.name.startswith(NEWEST_TORCH):
            modules = {name.partition("::")[0] for name in report.tests}
            missing = sorted(name for name in newest.tests.keys() - report.tests if name.partition("::")[0] in modules)
            yield from (f"left out in {report.name}: {name}" for name in missing)


def main(stages: str, directory: str, *versions: str) -> int:
    lines = Path(stages).read_text(encoding="utf-8").splitlines()
    reports = {path.stem: read(path) for path in sorted(Path(directory).glob("*.xml"))}
    skipped = list(skips(reports))
    complaints = [f"stage failed: {line}" for line in lines if line.endswith("failed")]
    complaints += [said for is_accepted, said in skipped if not is_accepted]
    complaints += left_out(reports, versions)
    complaints += left_out_of_older_torch(reports)
    red = [f"FAILED in {each.name}: {name}\n{said}" for each in reports.values() for name, said in each.failed.items()]
    print(*map(summary, reports.values()), sep="\n")
    print(*(said for is_accepted, said in skipped if is_accepted), *red, *complaints, sep="\n")
    failed = sum(report.bad for report in reports.values())
    passed = sum(len(report.tests) - len(report.skipped) - report.bad for report in reports.values())
    failed = max(failed, 1) if complaints else failed
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
