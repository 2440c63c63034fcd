"""Every mutant can still be made, and names tests that are there. That they find it, `tox -e mutants` shows."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mutants.changes import MUTANTS, Mutant
from mutants.definitions import PACKAGE, Definition, definitions, locate
from mutants.run import mutated

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).parent.parent.parent


dump_of = functools.cache(lambda source: ast.dump(ast.parse(source)))
"""The tree of a module as a text: a mutant may change a comment, and so nothing."""


def faults_of(mutant: Mutant, known: dict[str, list[Definition]]) -> Iterator[str]:
    try:
        _, source, changed = mutated(PACKAGE, mutant, known)
        if ast.dump(ast.parse(changed)) == dump_of(source):
            yield "it changes nothing"
    except (AssertionError, LookupError, SyntaxError) as error:
        yield str(error)
    if not mutant.tests:
        yield "it names no test"
    for test in mutant.tests:
        file, _, name = test.partition("::")
        path = REPOSITORY / file
        if not path.is_file() or (name and f"def {name}(" not in path.read_text(encoding="utf-8")):
            yield f"{test} is gone"


def test_mutants_each_change_one_place_and_are_python() -> None:
    known = definitions()
    faults = [f"{mutant.name}: {fault}" for mutant in MUTANTS for fault in faults_of(mutant, known)]
    assert not faults, "\n".join(faults)


def test_mutants_have_distinct_names() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15


PACKAGE_OF_TWO = {
    "log.py": """\
LIMIT: int = 3

@final
class Log:
    kind = SIZE = 1
    if True:
        def append(self):
            local = 1
            def decide():
                return local

    @overload
    def get(self, key: str): ...
    @overload
    def get(self, key: int): ...
""",
    "io/__init__.py": "class Writer:\n    def append(self): ...\n",
    "io/log.py": "LIMIT, LEAST = 1, 2\n",
}


@pytest.fixture
def small(tmp_path: Path) -> dict[str, list[Definition]]:
    for name, source in PACKAGE_OF_TWO.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    return definitions(tmp_path)


@pytest.mark.parametrize(
    ("where", "module", "lines"),
    [
        ("Log", "log.py", [range(3, 16)]),
        ("Log.append", "log.py", [range(7, 11)]),
        ("append.decide", "log.py", [range(9, 11)]),
        ("Log.get", "log.py", [range(12, 14), range(14, 16)]),
        ("Log.SIZE", "log.py", [range(5, 6)]),
        ("Writer.append", "io/__init__.py", [range(2, 3)]),
        ("io.Writer", "io/__init__.py", [range(1, 3)]),
        ("LEAST", "io/log.py", [range(1, 2)]),
        ("io.log.LIMIT", "io/log.py", [range(1, 2)]),
        ("io", "io/__init__.py", [range(1, 3)]),
    ],
)
def test_definition_is_found_by_the_end_of_its_name(small: Any, where: str, module: str, lines: list[range]) -> None:
    assert locate(where, small) == [Definition(module, each) for each in lines]


@pytest.mark.parametrize(("where", "count"), [("append", 2), ("LIMIT", 2), ("local", 0), ("og.append", 0), ("", 0)])
def test_name_of_no_definition_or_of_several_is_refused(small: Any, where: str, count: int) -> None:
    with pytest.raises(LookupError, match=f"stands for {count} definitions"):
        locate(where, small)


def test_mutant_changes_its_definition_and_nothing_else(tmp_path: Path, small: Any) -> None:
    mutant = Mutant("another limit", "io.log.LIMIT", "1", "5", ())
    assert mutated(tmp_path, mutant, small)[2] == "LIMIT, LEAST = 5, 2\n"
    with pytest.raises(AssertionError, match=r"stands 0 times in Writer\.append"):
        mutated(tmp_path, Mutant("none", "Writer.append", "class", "", ()), small)
