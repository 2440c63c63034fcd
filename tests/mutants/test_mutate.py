"""The tool that changes one place after the other: the places, the changes, and the report on undetected ones."""

from __future__ import annotations

import ast
import gc
import os
import sys
from typing import Any

import pytest
from mutants.explained import EVERYWHERE, EXPLAINED, fits
from mutants.forks import Lines, functions_by_file, put
from mutants.places import PACKAGE, compile_with, module_names, places

pytestmark = pytest.mark.once

SOURCE = """\
LIMIT = 3

def wait(count: int = 1) -> int:
    \"\"\"Say how long.\"\"\"
    assert count > 0
    if count < LIMIT and not count == 2:
        count += 1
    logger.debug("%d", 1 + 1)
    while True:
        if count:
            break
        ring(f"{count + 1}")
    raise ValueError(str(count - 1))

class Bell:
    def __repr__(self) -> str:
        return str(1)

    def ring(self) -> bool:
        return self is None
"""


def test_code_with_an_effect_is_changed_and_messages_for_people_are_not() -> None:
    keys = [place.key for place in places(SOURCE)[1]]
    assert keys == [
        "wait: if count < LIMIT and not count == 2: | count < LIMIT and not count == 2 -> Or",
        "wait: if count < LIMIT and not count == 2: | count < LIMIT -> LtE",
        "wait: if count < LIMIT and not count == 2: | not count == 2 -> without not",
        "wait: if count < LIMIT and not count == 2: | count == 2 -> NotEq",
        "wait: if count < LIMIT and not count == 2: | 2 -> 3",
        "wait: count += 1 -> pass",
        "wait: count += 1 | 1 -> 2",
        "wait: while True: | True -> False",
        "wait: if count: -> Not",
        "wait: break -> pass",
        'wait: ring(f"{count + 1}") -> pass',
        "wait: raise ValueError(str(count - 1)) -> pass",
        "wait: raise ValueError(str(count - 1)) | count - 1 -> Add",
        "wait: raise ValueError(str(count - 1)) | 1 -> 2",
        "Bell.ring: return self is None | self is None -> IsNot",
    ]


def test_changes_are_made_one_at_a_time_to_the_original_source() -> None:
    tree, found = places(SOURCE)
    before = compile(SOURCE, "bell.py", "exec")
    codes = [compile_with(tree, place, "bell.py") for place in found]
    assert len({*codes, before}) == len(found) + 1
    assert ast.dump(tree) == ast.dump(ast.parse(SOURCE))


def test_functions_that_are_in_use_everywhere_get_the_changed_code() -> None:
    source = "def outer(x):\n    def inner():\n        return x + 1\n    return inner\nmade = outer(1)\nother = len\n"
    path = "/nowhere/of/a/test.py"
    module: dict[str, object] = {}
    exec(compile(source, path, "exec"), module)
    kept, made = module["outer"], module["made"]
    gc.freeze()  # as `conftest` does when the tests are collected
    tree, found = places(source)
    place = next(place for place in found if place.key == "outer.inner: return x + 1 | x + 1 -> Sub")
    put(compile_with(tree, place, path), functions_by_file()[path])
    assert made() == 0
    assert kept(5)() == 4


if sys.version_info >= (3, 12):  # sys.monitoring is new there, so that the tool needs it

    def test_lines_are_noted_once_for_each_test_and_those_of_its_forks_too() -> None:
        path = "/nowhere/of/another/test.py"
        module: dict[str, Any] = {}
        exec(compile("def here():\n    return 1\ndef there():\n    return 2\n", path, "exec"), module)
        tool = sys.monitoring.COVERAGE_ID
        if sys.monitoring.get_tool(tool) is not None:
            pytest.skip("another tool measures coverage")
        lines = Lines({"/nowhere/else.py": "else.py", path: "test.py"})
        try:
            assert lines.take() == {}
            for _ in range(2):
                module["here"]()
                pid = os.fork()
                if pid == 0:
                    module["there"]()
                    os._exit(0)
                os.waitpid(pid, 0)
                assert lines.take() == {"test.py": [2, 4]}
        finally:
            sys.monitoring.set_events(tool, 0)
            sys.monitoring.free_tool_id(tool)


def test_explanation_fits_places_of_one_module_only() -> None:
    keys = {
        module: [place.key for place in places((PACKAGE / module).read_text(encoding="utf-8"))[1]]
        for module in module_names()
    }
    for pattern, why in EXPLAINED.items():
        modules = [module for module in keys if any(fits(pattern, key) for key in keys[module])]
        assert modules, f"there is no such place any more: {pattern}"
        assert len(modules) == 1, f"{pattern} fits places of {', '.join(modules)}"
        assert len(why) > 10
    for pattern in EVERYWHERE:
        assert any(fits(pattern, key) for found in keys.values() for key in found), f"fits no place: {pattern}"
