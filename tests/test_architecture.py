"""The pages on the architecture are a map: every path and name on them exists, and they have every part of the log."""

from __future__ import annotations

import ast
import errno
import fcntl
import functools
import keyword
import os
import re
from importlib import import_module
from pathlib import Path

import pytest
from support.internals import record
from support.sources import MODULES, PACKAGE, tree

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).parent.parent
DOCS = REPOSITORY / "docs"
CONTRIBUTORS = DOCS / "contributors"
PAGES = [CONTRIBUTORS / "architecture.md", *sorted((CONTRIBUTORS / "architecture").glob("*.md"))]
NOT_CODE = re.compile(r"^```.*?^```$|\{\w+\}`[^`]+`", re.MULTILINE | re.DOTALL)  # drawings, and roles of Sphinx
SPAN = re.compile(r"`([^`]+)`")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
OF_THE_SYSTEM = {"XDG_RUNTIME_DIR"}


class Names:
    """The names of the package: classes, functions, variables, attributes, arguments, and its string constants."""

    def __init__(self) -> None:
        self.defined: set[str] = set()
        self.members: dict[str, set[str]] = {}
        self.texts: set[str] = set()
        for name, path in MODULES.items():
            self.defined |= set(path.relative_to(PACKAGE).with_suffix("").parts) - {"__init__"}
            self.add(tree(name))
            for node in ast.walk(tree(name)):
                if isinstance(node, ast.ClassDef):
                    self.members.setdefault(node.name, set()).update(bound(node))

    def add(self, module: ast.Module) -> None:
        self.defined |= bound(module)
        for node in ast.walk(module):
            if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
                value = node.value
                self.texts.add(value.decode("latin-1") if isinstance(value, bytes) else value)

    def has(self, name: str) -> bool:
        if NAME.fullmatch(name) is None:
            return False
        owner, _, member = name.rpartition(".")
        if not owner:
            return name in self.defined
        return member in self.members.get(owner.rpartition(".")[2], ())


def bound(defining: ast.AST) -> set[str]:
    """Every name that is defined in `defining`; the variables of a function are its own affair."""
    found: set[str] = set()
    for node in ast.walk(defining):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        if isinstance(node, (ast.Module, ast.ClassDef)):
            statements = [each for each in node.body if isinstance(each, (ast.Assign, ast.AnnAssign))]
            stored = [each for statement in statements for each in ast.walk(statement) if isinstance(each, ast.Name)]
            found |= {each.id for each in stored if isinstance(each.ctx, ast.Store)}
    return found


@functools.cache
def names() -> Names:
    """Return the names of the package; each worker of pytest-xdist imports this module, and few need them."""
    return Names()


def is_there(span: str) -> bool:
    """Return whether what the page calls `span` is a path of the repository or package, or a name of the package.

    A suffix of a file, and the last part of a key, is a text in the sources. A single letter is a kind of record.
    Names of system calls and their flags are those of Python's modules.
    """
    if "/" in span and not span.startswith("/") and (span.endswith("/") or "." in span):
        return any((base / span).exists() for base in (REPOSITORY, PACKAGE))
    if span.startswith(("/", ".")) and len(span) > 1:
        return any(text.endswith(span) for text in names().texts) or span == "/tmp"
    if len(span) == 1:
        return ord(span) in record.NAMES or span == "."  # the point in the name of a generation
    if span.endswith(".py"):
        return (PACKAGE / span).exists()
    option = re.fullmatch(r'(\w+)="(\w+)"', span)
    if option is not None:
        return names().has(option[1]) and option[2] in names().texts
    known = (
        keyword.iskeyword(span) or span in OF_THE_SYSTEM or any(hasattr(module, span) for module in (os, fcntl, errno))
    )
    return known or names().has(span) or span in names().texts


def spans() -> list[str]:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    return sorted(set(SPAN.findall(NOT_CODE.sub("", text))))


def test_architecture_names_only_paths_and_names_that_are_there() -> None:
    assert [span for span in spans() if not is_there(span)] == [], "neither paths nor names of the package"


def test_times_are_those_of_the_code() -> None:
    page = (CONTRIBUTORS / "architecture" / "times.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` of `([\w/]+)\.py` \| ([\d.]+) \|", page, re.MULTILINE)
    assert len(rows) > 30
    named = [(getattr(import_module(f"fscoord.{path.replace('/', '.')}"), name), value) for name, path, value in rows]
    assert [each for each in named if each[0] != float(each[1])] == []


def test_architecture_check_finds_a_name_that_is_not_there() -> None:
    absent = ["_log/gone.py", "tests/test_gone.py", "gone.py", "NoSuchName", "FileStore.no_such_method", ".gone", "Q"]
    assert [span for span in absent if is_there(span)] == []


def test_architecture_knows_every_module_of_the_log() -> None:
    named = set(spans())
    modules = [path.relative_to(PACKAGE).as_posix() for path in sorted((PACKAGE / "_log").rglob("*.py"))]
    folders = {module.rpartition("/")[0] + "/" for module in modules} - {"_log/"}
    unknown = [
        module
        for module in modules
        if not module.endswith("__init__.py")
        and module not in named
        and not any(module.startswith(folder) for folder in folders & named)
    ]
    assert unknown == [], "docs/contributors/architecture.md says to which part of the log each module belongs"


def drawings_on(page: Path) -> list[Path]:
    names = re.findall(r"^```\{graphviz\} (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [(page.parent / name).resolve() for name in names]


def test_drawings_are_each_shown_on_one_page() -> None:
    shown = [drawing for page in DOCS.rglob("*.md") for drawing in drawings_on(page)]
    assert sum(len(drawings_on(page)) for page in PAGES) >= 5
    assert sorted(shown) == sorted(path.resolve() for path in (DOCS / "drawings").iterdir())


@pytest.mark.parametrize("path", sorted((DOCS / "drawings").glob("*.dot")), ids=lambda path: path.stem)
def test_drawings_are_readable_on_light_and_dark_ground(path: Path) -> None:
    """All text stands on a filled, light shape, in dark letters; what lies on the page's own ground is medium grey."""
    text = path.read_text(encoding="utf-8")
    assert 'bgcolor="transparent"' in text
    assert re.search(r'edge \[color="#7a7a7a"', text)
    assert not re.search(r"->.*label=", text), "the label of an edge lies on the page's own ground"
    assert set(re.findall(r'fontcolor="(#\w+)"', text)) == {"#10202f"}
    fills = re.findall(r'fillcolor="#(\w\w)(\w\w)(\w\w)"', text)
    assert all(int(part, 16) > 0xC0 for fill in fills for part in fill)
    clusters = text.count("subgraph cluster")
    assert len(re.findall(r'style="rounded,filled"; fillcolor=', text)) == clusters
