"""Count what ran: `count.py STAGES REPORTS VERSION...`; the closing line of `.ci/run`, and its exit code.

Fails if a stage failed, if a test failed, if one was skipped (everything that a test may need is installed there), or
if one of the Python versions ran no tests. What failed is named last, with the end of what it said: of a long log, that
part is what is kept.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

SAID = 2000  # characters of each failure


def failures(case: ET.Element) -> Iterator[str]:
    """What made a test fail, each with its end."""
    for kind in ("failure", "error"):
        for found in case.findall(kind):
            yield f"{found.get('message', '')[:SAID]}\n...{(found.text or '')[-SAID:]}"


def main(stages: str, reports: str, *versions: str) -> int:
    lines = Path(stages).read_text(encoding="utf-8").splitlines()
    failed_stages = [line for line in lines if line.endswith("failed")]
    passed = failed = 0
    red: list[str] = []
    complaints = [f"stage failed: {line}" for line in failed_stages]
    ran: dict[str, int] = {}
    for path in sorted(Path(reports).glob("*.xml")):
        suite = ET.parse(path).getroot().find("testsuite")
        assert suite is not None, f"{path} holds no test suite"
        tests, skipped = int(suite.get("tests", 0)), int(suite.get("skipped", 0))
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        version = next((p.get("value", "") for p in suite.iter("property") if p.get("name") == "python"), "unknown")
        print(f"{path.stem}: Python {version}: {tests} tests, {bad} failed, {skipped} skipped")
        ran[version] = ran.get(version, 0) + tests - skipped
        passed += tests - bad - skipped
        failed += bad
        for case in suite.iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            red += [f"FAILED in {path.stem}: {name}\n{said}" for said in failures(case)]
            if case.find("skipped") is not None:
                reason = case.find("skipped").get("message", "")
                complaints.append(f"skipped on {version}: {name}: {reason}")
    complaints += [f"no tests ran on Python {version}" for version in versions if not ran.get(version)]
    print(*red, *complaints, sep="\n")
    failed = max(failed, 1) if complaints else failed
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
