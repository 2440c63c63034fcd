"""Mutation testing, mechanically: ``python tests/mutants/mutate.py [MODULE...]`` (needs Python 3.12).

Each place of the modules that hold the log is changed, one after the other or so many at random, and a test that comes
to it must fail: the quick ones go first, and those that found its neighbours. What they let pass is printed: a test is
missing, or nobody could notice; then `explained.py` says why. The results are kept in a directory, and a run that was
ended goes on where it was.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import sys
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from mutants import forks
from mutants.explained import reason
from mutants.places import PACKAGE, Place, compile_with, module_names, places

TESTS = ("unit", "contract", "faults", "simulation", "fuzz", "histories", "cli")
SLOWEST_S = 20.0
"""A test that takes longer is not used."""
KEPT_AT_ONCE = 200
"""What is known of so many tests is kept as soon as they have run: on a busy machine it costs minutes."""


class Campaign:
    """A pytest plugin: when the tests are collected, instead of running them, try one change after the other."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.trees: dict[str, Any] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.finders: dict[tuple[str, str], deque[str]] = defaultdict(lambda: deque(maxlen=4))
        self.results: Path = given.results / f"results-{given.shard[0]}of{given.shard[1]}.jsonl"

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> None:
        """Behind the conftest, and before the tests are read: no failure is to be made smaller."""
        from hypothesis import Phase, settings  # pytest wants to be first

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mutants", deadline=None, database=None, derandomize=True, phases=phases)
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        forks.adopt_orphans()
        if session.testsfailed:
            raise session.Failed("not all tests could be collected")
        for module in module_names():
            importlib.import_module(f"fscoord.{module[:-3].replace('/', '.')}")
        self.functions = forks.functions_by_file()
        gc.freeze()  # what forks share stays shared
        self.items = {item.nodeid: item for item in session.items}
        self.known = self.learn(session.items)
        done = self.read()
        chosen = self.choose()
        self.at: dict[tuple[str, int], list[str]] = defaultdict(list)
        for name in sorted(self.known, key=self.cost):
            if name in self.items and self.known[name].seconds <= SLOWEST_S:
                for module, lines in self.known[name].lines.items():
                    for line in lines:
                        self.at[module, line].append(name)
        for count, (module, place) in enumerate(chosen):
            if f"{module}:{place.key}" not in done:
                self.try_place(module, place)
            if count % 50 == 49:
                print(f"{time.strftime('%H:%M:%S')} {count + 1} of {len(chosen)}: {self.score()}", flush=True)
        print(self.score())
        return True

    def learn(self, items: Sequence[pytest.Item]) -> dict[str, forks.Known]:
        """Run the tests without a change, but for those of which an earlier run with this package has shown all."""
        source = b"".join((PACKAGE / module).read_bytes() for module in module_names())
        kept = self.given.results / f"tests-{zlib.crc32(source):08x}.json"
        known = {}
        if kept.exists():
            known = {name: forks.Known(*found) for name, found in json.loads(kept.read_text()).items()}
        fresh = [item for item in items if item.nodeid not in known]
        paths = {str(PACKAGE / module): module for module in module_names()}
        for start in range(0, len(fresh), KEPT_AT_ONCE):
            try:
                known |= forks.learn_all(fresh[start : start + KEPT_AT_ONCE], paths)
            except KeyboardInterrupt:
                print(f"interrupted: {len(fresh) - start} of {len(items)} tests are not used", flush=True)
                break
            kept.write_text(json.dumps(known))
            print(f"{min(start + KEPT_AT_ONCE, len(fresh))} of {len(fresh)} tests are known", flush=True)
        return known

    def choose(self) -> list[tuple[str, Place]]:
        """Return the changes to try: all, or a sample, and of these the part that is this process's."""
        every = []
        for module in module_names():
            self.trees[module], found = places((PACKAGE / module).read_text(encoding="utf-8"))
            every += [(module, place) for place in found if any(word in module for word in self.given.modules or [""])]
        if self.given.again:
            every = [(module, place) for module, place in every if f"{module}:{place.key}" in self.found]
        elif self.given.sample:
            every = random.Random(self.given.seed).sample(every, min(self.given.sample, len(every)))
        part, parts = self.given.shard
        return every[part - 1 :: parts]

    def read(self) -> set[str]:
        """Read what was tried before; return what need not be tried again."""
        if self.results.exists():
            for line in self.results.read_text().splitlines():
                result = json.loads(line)
                self.found[result["key"]] = result
        if not self.given.again:
            return set(self.found)
        settled = {key for key, result in self.found.items() if result["how"] in {"killed", "hung"}}
        return settled | {key for key in self.found if reason(key.partition(":")[2])}

    def try_place(self, module: str, place: Place) -> None:
        tests, is_reached = self.tests_at(module, place.lines)
        tests.sort(key=self.cost)
        finders = self.finders[module, place.key.partition(":")[0]]
        tests = list(dict.fromkeys([*(name for name in reversed(finders) if name in tests), *tests]))
        budget, within = self.given.budget, []
        for name in tests:
            budget -= self.known[name].seconds
            if budget < 0 and within:
                break
            within.append(name)
        path = str(PACKAGE / module)
        result: dict[str, Any] = {"key": f"{module}:{place.key}", "line": place.lines.start, "tests": len(within)}
        if within:
            code = compile_with(self.trees[module], place, path)
            items = [self.items[name] for name in within]
            outcome = forks.try_change(items, self.known, code, self.functions[path])
            result |= outcome._asdict()
            missed = "survived" if is_reached else "unreached"
            result["how"] = "hung" if outcome.hung else "killed" if outcome.failed else missed
            if outcome.failed and not outcome.hung:
                finders.append(outcome.failed)
        else:
            result["how"] = "unreached"
        if result["how"] in {"survived", "unreached"}:
            result["left"] = len(tests) - len(within)
            why = reason(place.key)
            print(f"{result['how']}{' (explained)' * bool(why)}: {module}:{place.lines.start}: {place.key}", flush=True)
        self.found[result["key"]] = result
        with self.results.open("a") as file:
            file.write(json.dumps(result) + "\n")

    def tests_at(self, module: str, lines: range) -> tuple[list[str], bool]:
        """Return the tests that reach `lines`, and True; if none was seen there, the nearest ones, and False.

        The lines that a started program reaches are not seen.
        """
        tests = [name for line in lines for name in self.at[module, line]]
        if tests:
            return list(dict.fromkeys(tests)), True
        seen = sorted((abs(line - lines.start), line) for where, line in self.at if where == module)
        nearest = (self.at[module, line] for _, line in seen)
        return next((list(names) for names in nearest if names), []), False

    def cost(self, name: str) -> float:
        """Return what to sort tests by: one that is quick and comes to little else is about these very lines."""
        return self.known[name].seconds * sum(map(len, self.known[name].lines.values()))

    def score(self) -> str:
        """Return the figures so far, in words."""
        return score(self.found.values())


def score(results: Iterable[dict[str, Any]]) -> str:
    """Return how many changes were found, and how many of the others are explained, in words."""
    counts: Counter[str] = Counter()
    for result in results:
        is_explained = result["how"] in {"survived", "unreached"} and reason(result["key"].partition(":")[2])
        counts["explained" if is_explained else result["how"]] += 1
    total = max(1, counts.total())
    good = total - counts["survived"] - counts["unreached"]
    return f"{dict(counts)} of {counts.total()}: {100 * good / total:.1f} % found or explained"


def shard(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    return int(part), int(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "modules", nargs="*", help="parts of paths in the package, such as _log/format/record.py; all without"
    )
    parser.add_argument("--sample", type=int, default=0, help="try so many, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shard", type=shard, default=(1, 1), help="1/2 for the first half, beside another process")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of tests for one change")
    parser.add_argument(
        "--results", type=Path, default=Path(".mutants"), help="a directory; what it holds is not repeated"
    )
    parser.add_argument("--again", action="store_true", help="repeat what no test has found, and nobody explained")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders or files of `tests/`")
    parser.add_argument("-k", default="", help="as pytest's: only tests whose names fit")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    os.environ["FSCOORD_SEED"] = str(given.seed)
    options = [
        "-q",
        "-s",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        "-o",
        "tmp_path_retention_policy=none",
        "-n0",
        "-k",
        given.k,
    ]
    return int(pytest.main([*options, *(f"tests/{name}" for name in given.tests)], plugins=[Campaign(given)]))


if __name__ == "__main__":
    sys.exit(main())
