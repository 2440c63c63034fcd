"""Count what ran: `count.py STAGES REPORTS VERSION...`; the closing line of `.ci/run`, and its exit code.

Fails if a stage failed, if a test failed, if one was skipped (everything that a test may need is installed there), if
one of the Python versions ran no tests, or if one left out a test without a mark that says so.

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


class Report(NamedTuple):
    """What one run of pytest has reported: its tests by name with the markers that each has, and what was wrong."""

    name: str
    version: str
    tests: dict[str, set[str]]
    bad: int
    skipped: list[str]
    red: list[str]


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
    report = Report(path.stem, version, {}, bad, [], [])
    for case in suite.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        report.tests.setdefault(name, set()).update(properties(case, "marker"))
        report.red.extend(f"FAILED in {path.stem}: {name}\n{said}" for said in failures(case))
        skipped = case.find("skipped")
        if skipped is not None:
            report.skipped.append(f"skipped on {version}: {name}: {skipped.get('message', '')}")
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


def main(stages: str, directory: str, *versions: str) -> int:
    lines = Path(stages).read_text(encoding="utf-8").splitlines()
    reports = [read(path) for path in sorted(Path(directory).glob("*.xml"))]
    complaints = [f"stage failed: {line}" for line in lines if line.endswith("failed")]
    complaints += [said for report in reports for said in report.skipped]
    complaints += left_out({report.name: report for report in reports}, versions)
    print(*map(summary, reports), sep="\n")
    print(*(said for report in reports for said in report.red), *complaints, sep="\n")
    failed = sum(report.bad for report in reports)
    passed = sum(len(report.tests) - len(report.skipped) - report.bad for report in reports)
    failed = max(failed, 1) if complaints else failed
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
