"""The source itself: how modules and classes depend on each other. Known exceptions are listed, and the lists shrink.

A list holds the exceptions of the time when its rule was made. A new exception fails the rule's test. So does an entry
that is not an exception any more: a change that mends one removes it from the list.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.sources import MODULES, PACKAGE, imported, is_for_types, module_of, run_when_imported, tree

pytestmark = pytest.mark.once

NOT_A_SUBJECT = frozenset(
    "a after all an another any as at both by each every for from if in it many more no nobody not nothing of on one"
    " only other that the those three to two what whatever when where who whoever with without".split()
)
"""Words with which the name of a test does not begin: its subject does."""

NAME_MAX = 79

INHERIT_FROM_HEIRS: set[str] = set()
STUBS_FOR_TYPES: set[str] = set()
PRIVATE_IN_PROGRAMS = {"benchmarks/barrier_floor.py", "benchmarks/leading.py"}
"""A prototype with constants of its own; and delays at each step of a leader, which have no public names."""
SILENT_FOLDERS: set[str] = set()
WORDS_MIN = 40
"""Fewer words don't say what a folder is for, what it must not do, and which locks its callers hold."""

TESTS = Path(__file__).parent
REPOSITORY = TESTS.parent
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def compare(found: Iterable[str], listed: set[str], rule: str) -> None:
    """Fail if `found`, which breaks a rule, is not what the list of those that may holds."""
    fresh, mended = set(found) - listed, listed - set(found)
    assert not fresh, f"{rule}: {sorted(fresh)}"
    assert not mended, f"take off the list what is mended: {sorted(mended)}"


def scoped(node: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield each node below `node` with the qualified name of the class or function that holds it."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        inner = f"{scope}.{child.name}".lstrip(".") if isinstance(child, SCOPES) else scope
        yield from scoped(child, inner)


# Inheritance


class Class(NamedTuple):
    """A class of the package: its tree, and its bases, as ``module.Name`` where they are of the package, too."""

    node: ast.ClassDef
    bases: list[str]

    @property
    def is_apart(self) -> bool:
        """Whether it is a contract for others to fulfil, an exception, or a tuple: their heirs may have heirs."""
        if any(base.endswith(("Protocol", "NamedTuple", "Error", "Exception")) for base in self.bases):
            return True
        methods = [each for each in self.node.body if isinstance(each, SCOPES)]
        return any("abstractmethod" in ast.unparse(each) for method in methods for each in method.decorator_list)


@functools.cache
def classes() -> dict[str, Class]:
    """Every class of the package by ``module.Name``; a class in a class or a function has no heirs elsewhere."""
    found = {}
    for module in MODULES:
        names = {}
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.ImportFrom):
                names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
        own = [node for node in tree(module).body if isinstance(node, ast.ClassDef)]
        names |= {node.name: f"fscoord.{module}.{node.name}" for node in own}
        for node in own:
            bases = []
            for base in node.bases:
                first, dot, rest = ast.unparse(base).partition("[")[0].partition(".")
                bases.append((names.get(first, first) + dot + rest).removeprefix("fscoord."))
            found[f"{module}.{node.name}"] = Class(node, bases)
    return found


def ancestors(name: str) -> list[str]:
    """The longest line of classes of the package that one inherits from, without those that are apart."""
    lines = []
    for base in classes()[name].bases:
        if base in classes():
            lines.append([*([] if classes()[base].is_apart else [base]), *ancestors(base)])
    return max(lines, key=len, default=[])


def test_classes_of_the_log_and_of_stores_do_not_inherit_from_heirs() -> None:
    """What a chain of classes does with ``self`` can be read in no one place; a part that is held can."""
    looked_at = [name for name in classes() if name.startswith(("_log.", "stores."))]
    assert len(looked_at) > 50
    compare(
        {name.rpartition(".")[2] for name in looked_at if len(ancestors(name)) > 1},
        INHERIT_FROM_HEIRS,
        "inherits from a class that inherits itself: hold a part instead",
    )


# What is there for the type checker alone


def test_methods_are_not_declared_for_the_type_checker_only() -> None:
    """Such a method says that another class of the chain has it: a dependency that no constructor shows."""
    stubs = {
        f"{scope}.{inner.name}".lstrip(".")
        for module in MODULES
        for scope, node in scoped(tree(module))
        if is_for_types(node)
        for statement in node.body
        for inner in ast.walk(statement)
        if isinstance(inner, SCOPES[:2])
    }
    compare(stubs, STUBS_FOR_TYPES, "declared under `if TYPE_CHECKING`: hold the object that has it")


# Private names


class Found(NamedTuple):
    """What the rules ask for in the tests, each with the file that has it: their trees together fill the memory.

    Attributes:
        imports: the names that are imported.
        insides: the expressions that read the inside of a store.
        tests: the names of tests, also of those that the package offers for other stores.
    """

    imports: list[tuple[str, str]]
    insides: list[tuple[str, str]]
    tests: list[tuple[str, str]]


@functools.cache
def found_in_tests() -> Found:
    found = Found([], [], [])
    for path in (*TESTS.rglob("*.py"), *PACKAGE.glob("testing/**/*.py")):
        is_test = path.is_relative_to(TESTS)
        name = path.relative_to(TESTS if is_test else PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found.tests.append((name, node.name))
            elif is_test and isinstance(node, ast.Import | ast.ImportFrom):
                found.imports.extend((name, dotted) for dotted in imported(node))
            elif is_test and isinstance(node, ast.Attribute) and node.attr in {"_log", "_notifier"}:
                found.insides.append((name, ast.unparse(node)))
    return found


def test_log_is_imported_by_tests_of_its_parts_and_by_support_only() -> None:
    """The other tests use `FileStore`, and `support.internals` for what no store shows."""
    allowed = ("unit/", "faults/", "support/")
    wrong = {
        f"{name}: {dotted}"
        for name, dotted in found_in_tests().imports
        if not name.startswith(allowed) and dotted.startswith("fscoord._log")
    }
    compare(wrong, set(), "import it from `support.internals`")


def test_tests_get_the_inside_of_a_store_from_one_module() -> None:
    """`support.internals` names the attributes. Programs in strings, which run without the tests' modules, may, too."""
    wrong = {
        f"{name}: {read}"
        for name, read in found_in_tests().insides
        if read != "fscoord._log" and not read.endswith("._driver._notifier") and not read.startswith("self._")
    }
    known = {f"support/internals.py: store.{name}" for name in ("_log", "_notifier")}
    compare(wrong, known, "`support.internals` reads the inside of a store")


def programs() -> Iterator[tuple[str, str]]:
    """Yield the name and the source of each program of the repository, and of each block of Python in its pages."""
    for folder in ("benchmarks", "docs", "examples", "packaging", "pytest_fscoord"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            yield path.relative_to(REPOSITORY).as_posix(), path.read_text(encoding="utf-8")
    for path in (*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")):
        for block in re.findall(
            r"^```(?:python|pycon)\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        ):
            code = "\n".join(re.findall(r"^(?:>>>|\.\.\.) ?(.*)", block, re.MULTILINE)) if ">>>" in block else block
            yield path.relative_to(REPOSITORY).as_posix(), code


def test_programs_and_pages_use_no_private_name() -> None:
    """An underscore is private to the package, whose modules share such names with each other."""
    found, imports = set(), 0
    for path, source in programs():
        for node in ast.walk(ast.parse(source)):
            names = {part for dotted in imported(node) if dotted.startswith("fscoord") for part in dotted.split(".")}
            imports += bool(names)
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in {"self", "os"}:
                names = {node.attr} - {"_asdict", "_replace"}
            found |= {path for name in names if re.match("_[^_]", name)}
    assert imports > 100
    compare(found, PRIVATE_IN_PROGRAMS, "uses a name with an underscore: give the package a public one")


# Imports


def cycles(edges: dict[str, set[str]]) -> list[frozenset[str]]:
    """Return the sets of modules of which each leads to each other."""
    reached = {}
    for start in edges:
        found, left = set(), [start]
        while left:
            fresh = edges.get(left.pop(), set()) - found
            found |= fresh
            left += fresh
        reached[start] = found
    rings = {start: frozenset(each for each in reached[start] if start in reached[each]) for start in edges}
    return sorted({ring for ring in rings.values() if ring}, key=sorted)


def test_imports_at_run_time_have_no_cycle() -> None:
    edges = {}
    for module in MODULES:
        names = [name for node in run_when_imported(tree(module)) for name in imported(node)]
        edges[module] = {target for target in map(module_of, names) if target is not None}
    assert sum(map(len, edges.values())) > 300
    assert not cycles(edges), f"these import each other: {list(map(sorted, cycles(edges)))}"


def test_import_cycles_are_found() -> None:
    edges = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"e"}, "f": {"a"}}
    assert cycles(edges) == [frozenset("abc"), frozenset("e")]


# Folders


def folders() -> list[str]:
    return sorted({path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} - {"."})


def test_private_packages_state_their_purpose() -> None:
    silent = set()
    for folder in folders():
        name = folder.replace("/", ".")
        assert name in MODULES, f"{folder} has no __init__.py"
        said = ast.get_docstring(tree(name)) or ""
        if "_" in {part[0] for part in name.split(".")} and len(said.split()) < WORDS_MIN:
            silent.add(name)
    compare(silent, SILENT_FOLDERS, "its __init__.py does not say what the folder is for")


# Tests


def test_names_of_tests_begin_with_their_subject_and_are_short() -> None:
    found = found_in_tests().tests
    assert len(found) > 2000
    wrong = [test for test in found if test[1].split("_")[1] in NOT_A_SUBJECT or len(test[1]) > NAME_MAX]
    assert wrong == []
