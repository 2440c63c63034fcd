"""Mutation testing of a module, mechanically: ``python tests/mutants/mutate.py MODULE TEST...``.

One place after the other is changed: a comparison or an arithmetic operation into its neighbour, a condition into its
opposite, a number by one, a statement into none. The tests must fail each time; what they let pass is printed, to be
looked at: some changes change nothing that anybody could notice.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent.parent
LIMIT_S = 120

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
}  # fmt: skip


def changes(node: ast.AST) -> Iterator[ast.AST | None]:
    """Yield what may stand in the place of `node`; None for nothing."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        yield ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        yield ast.BinOp(node.left, OPERATIONS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int)):
        yield ast.Constant((not node.value) if isinstance(node.value, bool) else node.value + 1)
    elif isinstance(node, (ast.If, ast.While)) and not isinstance(node.test, (ast.Compare, ast.BoolOp, ast.UnaryOp)):
        test = ast.UnaryOp(ast.Not(), node.test)
        yield type(node)(test, node.body, node.orelse)
    elif isinstance(node, (ast.Assign, ast.AugAssign, ast.Raise, ast.Break, ast.Continue)) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    ):
        yield ast.Pass()


def mutants(source: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, what was changed, and the changed source, for every place inside a function."""
    tree = ast.parse(source)
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for statement in function.body
        for node in ast.walk(statement)
    }
    places = [node for node in ast.walk(tree) if id(node) in inside]
    for node in places:
        for change in changes(node):
            old = ast.unparse(node)
            changed = Swap(node, change).visit(copy_but(tree, node))
            new = ast.unparse(ast.fix_missing_locations(changed))
            yield node.lineno, f"{old.splitlines()[0]} -> {ast.unparse(change).splitlines()[0] if change else ''}", new


def copy_but(tree: ast.AST, node: ast.AST) -> ast.AST:
    """Copy `tree`, but for `node`, which stays the same object."""
    return copy.deepcopy(tree, {id(node): node})


class Swap(ast.NodeTransformer):
    """Put one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST | None) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST | None:
        return self.new if node is self.old else self.generic_visit(node)


def passes(root: Path, tests: list[str]) -> bool:
    """Return whether the tests pass with the package below `root`."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "--tb=no",
        f"--timeout={LIMIT_S // 2}",
    ]
    try:
        done = subprocess.run(
            [*command, *tests], cwd=root, env=environment, capture_output=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", help="its path in the package, as _log/record.py")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--sample", type=int, default=0, help="try so many, drawn at random; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fscoord-mutate-") as directory:
        root = Path(directory)
        shutil.copytree(REPOSITORY / "fscoord", root / "fscoord", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("tests", "pyproject.toml"):
            (root / name).symlink_to(REPOSITORY / name)
        path = root / "fscoord" / given.module
        source = path.read_text(encoding="utf-8")
        assert passes(root, given.tests), "the tests fail without a change"
        chosen = list(mutants(source))
        if given.sample:
            chosen = random.Random(given.seed).sample(chosen, min(given.sample, len(chosen)))
        survived = 0
        for line, what, changed in chosen:
            path.write_text(changed, encoding="utf-8")
            if passes(root, given.tests):
                survived += 1
                print(f"survived: {given.module}:{line}: {what}", flush=True)
        print(f"{given.module}: {len(chosen) - survived} of {len(chosen)} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
