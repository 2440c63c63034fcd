"""Every mutant can still be made, and names tests that are there. That they find it, `tox -e mutants` shows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants.changes import MUTANTS, Mutant

import fscoord

PACKAGE = Path(fscoord.__file__).parent
REPOSITORY = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_is_python(mutant: Mutant) -> None:
    source = (PACKAGE / mutant.module).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    changed = source.replace(mutant.old, mutant.new)
    assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert (REPOSITORY / file).is_file(), f"{file} is gone"
        assert not name or f"def {name}(" in (REPOSITORY / file).read_text(encoding="utf-8"), f"{test} is gone"


def test_no_two_mutants_have_one_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15
