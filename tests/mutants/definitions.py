"""The definitions of the package by name, so that what quotes one need not say in which module it stands.

A definition has the dotted name ``_log.replay.writer.LogWriter.append``. Any end of that name stands for it that no
other definition has: ``LogWriter.append``, or ``writer.LogWriter.append`` if there are two of them.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import fscoord

PACKAGE = Path(fscoord.__file__).parent
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Definition(NamedTuple):
    """One definition: the module that holds it, as ``_log/log.py``, and its lines.

    It is a module, a class, a function, or an assignment to a name of a module or of a class. The lines include its
    decorators.
    """

    module: str
    lines: range

    def text(self, source: str) -> str:
        """Return what `source`, that of the module, says in these lines."""
        return "".join(source.splitlines(keepends=True)[self.lines.start - 1 : self.lines.stop - 1])


def _assigned(statement: ast.stmt) -> list[str]:
    targets: Sequence[ast.expr] = ()
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _lines(node: ast.stmt) -> range:
    start = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
    return range(start, (node.end_lineno or node.lineno) + 1)


def _inside(node: ast.AST, name: str, is_function: bool = False) -> Iterator[tuple[str, range]]:
    """Yield the name and the lines of each definition in `node`, however deep it stands in blocks such as ``if``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            yield f"{name}.{child.name}", _lines(child)
            yield from _inside(child, f"{name}.{child.name}", not isinstance(child, ast.ClassDef))
        elif not isinstance(child, ast.expr):
            if isinstance(child, ast.stmt) and not is_function:
                yield from ((f"{name}.{each}", _lines(child)) for each in _assigned(child))
            yield from _inside(child, name, is_function)


def definitions(package: Path = PACKAGE) -> dict[str, list[Definition]]:
    """Return the definitions of the package below `package` by dotted name; overloads have one name."""
    found: dict[str, list[Definition]] = defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        source = path.read_text(encoding="utf-8")
        where = relative.as_posix()
        found[module].append(Definition(where, range(1, len(source.splitlines()) + 1)))
        for name, lines in _inside(ast.parse(source), module):
            found[name].append(Definition(where, lines))
    return found


def locate(where: str, known: dict[str, list[Definition]]) -> list[Definition]:
    """Return the definitions that `where` stands for: one, or its overloads.

    Raises:
        LookupError: there is none, or there are several.
    """
    names = [name for name in known if name.endswith(where) and f".{name}".endswith(f".{where}")]
    if len(names) != 1:
        raise LookupError(f"{where} stands for {len(names)} definitions of the package: {', '.join(sorted(names))}")
    return known[names[0]]
