"""Show that the tests find every mutant: ``python tests/mutants/run.py [WORD...]`` (those whose names hold a word).

Each is applied to a copy of the package, and its tests run on that. One that they let pass fails the script. Without a
mutant they pass: that is tried first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from mutants.changes import MUTANTS, Mutant
from mutants.definitions import Definition, definitions, locate

REPOSITORY = Path(__file__).parent.parent.parent
LIMIT_S = 300


def mutated(package: Path, mutant: Mutant, known: dict[str, list[Definition]]) -> tuple[str, str, str]:
    """Return the module of the package that `mutant` changes, its source, and its source with the change."""
    places = locate(mutant.where, known)
    module = places[0].module
    source = (package / module).read_text(encoding="utf-8")
    counts = [place.text(source).count(mutant.old) for place in places]
    assert sum(counts) == 1, f"{mutant.name}: what it changes stands {sum(counts)} times in {mutant.where}"
    lines, place = source.splitlines(keepends=True), places[counts.index(1)]
    lines[place.lines.start - 1 : place.lines.stop - 1] = [place.text(source).replace(mutant.old, mutant.new)]
    return module, source, "".join(lines)


def mutate(package: Path, mutant: Mutant) -> None:
    """Apply `mutant` to a copy of the package."""
    module, _, changed = mutated(package, mutant, definitions(package))
    (package / module).write_text(changed, encoding="utf-8")


def run(root: Path, test: str) -> tuple[bool, str]:
    """Run `test` with the package below `root`; return whether it passed, and what it said last."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", "--tb=no", test]
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, "a test hung"
    assert done.returncode in (0, 1), done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, lines[0].partition("::")[2].partition(" - ")[0] if lines else ""


def find(mutant: Mutant | None, tests: tuple[str, ...]) -> str:
    """Return the first of `tests` that finds `mutant`, or ``""``."""
    with tempfile.TemporaryDirectory(prefix="fscoord-mutant-") as directory:
        root = Path(directory)
        shutil.copytree(REPOSITORY / "fscoord", root / "fscoord", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests", "pyproject.toml"):
            (root / name).symlink_to(REPOSITORY / name)
        where = subprocess.run(
            [sys.executable, "-c", "import fscoord; print(fscoord.__file__)"],
            cwd=root, env={**os.environ, "PYTHONPATH": directory}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert where.stdout.startswith(directory), f"another copy is tested: {where.stdout}"
        if mutant is not None:
            mutate(root / "fscoord", mutant)
        for test in tests:
            passed, found = run(root, test)
            if not passed:
                return f"{test.removeprefix('tests/')}: {found}"
    return ""


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant.name for word in words)]
    tests = tuple(sorted({test for mutant in chosen for test in mutant.tests}))
    found = find(None, tests)
    assert not found, f"without a mutant this fails: {found}"
    missed = 0
    for mutant in chosen:
        started = time.monotonic()
        found = find(mutant, mutant.tests)
        missed += not found
        print(
            f"{'found ' if found else 'MISSED'} {time.monotonic() - started:5.1f} s  {mutant.name}: {found}", flush=True
        )
    print(f"{len(chosen) - missed} of {len(chosen)} mutants found")
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
