"""Where a module can be changed mechanically, and its code with one such change.

A comparison or an arithmetic operation becomes its neighbour, a condition its opposite, a number the next one, a
statement nothing. What only tells people something stays: texts, what is logged, ``__repr__``, types, asserts. These
are the kinds of change of mutmut and Cosmic Ray, without those of texts.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import fscoord

PACKAGE = Path(fscoord.__file__).parent
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}  # fmt: skip
STATEMENTS = (ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Continue)
NAMED = (ast.FunctionDef, ast.ClassDef, ast.AnnAssign, ast.arg)
UNCHANGED = {"annotation", "returns", "decorator_list", "args"}
"""What of these is a type, or is read when the module is."""
DECIDED = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)
"""Conditions that are changed themselves."""
COMPOUND = (ast.FunctionDef, ast.ClassDef, ast.If, ast.While, ast.For, ast.With, ast.Try)


@dataclass(frozen=True)
class Place:
    """One change of one place.

    Attributes:
        key: names it however the lines move: ``function: first line of the statement | what stands there -> what
            becomes of it``, and which of several alike.
        lines: where the statement stands that holds it; a compound one without its body.
    """

    key: str
    lines: range
    holder: Any = field(repr=False, compare=False)
    name: str = field(repr=False, compare=False)
    index: int | None = field(repr=False, compare=False)
    new: ast.AST = field(repr=False, compare=False)


def change(node: ast.AST) -> tuple[str, ast.AST] | None:
    """Return what becomes of `node`, in a word and as what is to stand in its place; None if it stays."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        other = COMPARISONS[type(node.ops[0])]
        return other.__name__, ast.Compare(node.left, [other()], node.comparators)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        operation = OPERATIONS[type(node.op)]
        return operation.__name__, ast.BinOp(node.left, operation(), node.right)
    if isinstance(node, ast.BoolOp):
        junction = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        return type(junction).__name__, ast.BoolOp(junction, node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "without not", node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        value = (not node.value) if isinstance(node.value, bool) else node.value + 1
        return repr(value), ast.Constant(value)
    if isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, DECIDED):
        return "Not", type(node)(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    if isinstance(node, STATEMENTS) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return "pass", ast.Pass()
    return None


def _is_for_people(node: ast.AST) -> bool:
    """Return whether only a person or a type checker could see the difference."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        while isinstance(function, (ast.Attribute, ast.Call)):
            function = function.value if isinstance(function, ast.Attribute) else function.func
        return isinstance(function, ast.Name) and function.id == "logger"
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    if isinstance(node, ast.FunctionDef):
        return node.name == "__repr__"
    return isinstance(node, (ast.Assert, ast.JoinedStr))


def _lines(statement: ast.stmt) -> range:
    if isinstance(statement, COMPOUND):
        return range(statement.lineno, max(statement.body[0].lineno, statement.lineno + 1))
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)


def _text(node: ast.AST, rows: Sequence[str]) -> str:
    """As `ast.get_source_segment`, in one line, of a source that was split into `rows` once and not for each node."""
    place: Any = node
    held = [row.encode() for row in rows[place.lineno - 1 : place.end_lineno]]
    held[-1] = held[-1][: place.end_col_offset]
    held[0] = held[0][place.col_offset :]
    return " ".join(b"\n".join(held).decode().split())


def places(source: str) -> tuple[ast.Module, list[Place]]:
    """Return the tree of `source`, and each place inside its functions that can be changed, in the order of lines."""
    tree = ast.parse(source)
    rows = source.splitlines()
    found: list[Place] = []
    seen: Counter[str] = Counter()

    def add(node: ast.AST, function: str, statement: ast.stmt, where: tuple[ast.AST, str, int | None]) -> None:
        changed = change(node)
        if changed is None:
            return
        text = f"{function}: {rows[statement.lineno - 1].strip()}"
        if node is not statement:
            text += f" | {_text(node, rows)}"
        text += f" -> {changed[0]}"
        seen[text] += 1
        key = text if seen[text] == 1 else f"{text} ({seen[text]})"
        found.append(Place(key, _lines(statement), *where, changed[1]))

    def visit(node: ast.AST, function: str, statement: ast.stmt | None, is_inside: bool) -> None:
        for name, held in ast.iter_fields(node):
            if isinstance(node, NAMED) and name in UNCHANGED:
                continue
            for index, child in enumerate(held) if isinstance(held, list) else [(None, held)]:
                if not isinstance(child, ast.AST) or _is_for_people(child):
                    continue
                around = child if isinstance(child, ast.stmt) else statement
                if is_inside and around is not None:
                    add(child, function, around, (node, name, index))
                inner = f"{function}.{child.name}" if isinstance(child, NAMED[:2]) else function
                visit(child, inner.lstrip("."), around, is_inside or isinstance(child, ast.FunctionDef))

    visit(tree, "", None, False)
    return tree, found


def module_names() -> list[str]:
    """Return the modules that hold the log, as ``_log/log.py``."""
    modules = sorted(path.relative_to(PACKAGE).as_posix() for path in (PACKAGE / "_log").rglob("[a-z]*.py"))
    return [*modules, "stores/file/__init__.py"]


def compile_with(tree: ast.Module, place: Place, path: str) -> CodeType:
    """Return the code of `tree`, which is as before afterwards, with the change of `place`."""
    held = getattr(place.holder, place.name)
    old = held if place.index is None else held[place.index]
    new = ast.fix_missing_locations(ast.copy_location(place.new, old))
    try:
        _put(place, new)
        return compile(tree, path, "exec", dont_inherit=True)
    finally:
        _put(place, old)


def _put(place: Place, node: ast.AST) -> None:
    if place.index is None:
        setattr(place.holder, place.name, node)
    else:
        getattr(place.holder, place.name)[place.index] = node
