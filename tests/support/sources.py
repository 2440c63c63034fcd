"""The modules of the package, their trees, and which module imports which: what the checks of the source read."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import fscoord

PACKAGE = Path(fscoord.__file__).parent


def _modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()
"""Every module of the package by its name without ``fscoord.``; the package itself is the empty name."""


@functools.cache
def tree(name: str) -> ast.Module:
    """Return the tree of a module, which the caller must not change.

    It stays until the process ends. So it is taken out of the reach of the garbage collector: with all trees each later
    collection would take 0.2 s, and many tests collect garbage, some at each step.
    """
    parsed = ast.parse(MODULES[name].read_text(encoding="utf-8"))
    gc.freeze()
    return parsed


def imported(node: ast.AST) -> Iterator[str]:
    """Yield every dotted name that this one node imports; ``from a import b`` is ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"a relative import in line {node.lineno}"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in {
        "import_uninterrupted",
        "system.import_uninterrupted",
    }:
        yield ast.literal_eval(node.args[0])


def module_of(dotted: str) -> str | None:
    """Return the module of the package that holds what is imported as `dotted`; None if it is of another package."""
    if dotted != "fscoord" and not dotted.startswith("fscoord."):
        return None
    target = dotted.removeprefix("fscoord").removeprefix(".")
    while target not in MODULES:
        target = target.rpartition(".")[0]
    return target


def is_for_types(node: ast.AST) -> bool:
    """Return whether this statement is ``if TYPE_CHECKING``."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def run_when_imported(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what runs when a module is imported: all of it but the bodies of functions, and what is for types only."""
    for child in ast.iter_child_nodes(node):
        if is_for_types(child):
            for other in child.orelse:
                yield other
                yield from run_when_imported(other)
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from run_when_imported(child)
