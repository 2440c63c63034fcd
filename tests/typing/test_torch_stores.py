"""The types of the functions that also take stores of torch, and of `TorchStore`, as mypy sees them."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import fscoord

HERE = Path(__file__).parent
STUBS = HERE / "stubs"
# torch imports its stores without exporting them to type checkers.
CONFIGURATION = "[mypy]\nstrict = true\nwarn_unreachable = true\n[mypy-torch.*]\nimplicit_reexport = true\n"


@pytest.fixture
def known(pytestconfig: pytest.Config, tmp_path: Path) -> Path:
    """Where mypy notes the types of modules: it needs most of its time for those of the package."""
    has_cache = pytestconfig.pluginmanager.has_plugin("cacheprovider")
    return Path(pytestconfig.cache.mkdir("mypy")) if has_cache else tmp_path / "cache"


def complaints(program: str, directory: Path, known: Path, *more: Path) -> str:
    """Return what mypy prints about `program`, which may import from the directories `more`; empty if it is right."""
    configuration = directory / "mypy.ini"
    configuration.write_text(CONFIGURATION)
    package = Path(fscoord.__file__).parent.parent
    places = [*more, *([] if package.name == "site-packages" else [package])]  # mypy looks there by itself
    options = ["--no-error-summary", f"--config-file={configuration}", f"--cache-dir={known}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(HERE / program)],
        env={**os.environ, "MYPYPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    assert bool(done.returncode) == bool(done.stdout)
    return done.stdout


@pytest.mark.once
def test_stores_of_torch_fit_where_docs_say_so(tmp_path: Path, known: Path) -> None:
    assert complaints("torch_stores.py", tmp_path, known, STUBS) == ""


@pytest.mark.torch
@pytest.mark.timeout(900)  # mypy reads all of torch's sources: minutes, beside other tests
@pytest.mark.parametrize("program", ["torch_stores.py", "torch_adapter.py"])
def test_stores_of_the_real_torch_fit_too(program: str, tmp_path: Path) -> None:
    if not any("def multi_get" in method for method in methods_of_torch()["Store"]):
        pytest.skip("this torch lacks Store.multi_get in its types, which get_all and synchronize call")
    assert complaints(program, tmp_path, tmp_path / "cache") == ""


@pytest.mark.torch
def test_stubs_here_are_those_of_torch() -> None:
    ours, theirs = methods(STUBS / "torch" / "distributed.pyi"), methods_of_torch()
    if not any("def list_keys" in method for method in theirs["Store"]):
        pytest.skip("this torch lacks Store.list_keys in its types: they are older than the stubs")
    assert len(ours) == 5
    for name, signatures in ours.items():
        assert signatures - theirs[name] == set(), name  # a newer torch may have more


def methods_of_torch() -> dict[str, set[str]]:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return methods(Path(spec.origin).parent / "_C" / "_distributed_c10d.pyi")


def methods(stubs: Path) -> dict[str, set[str]]:
    """Return the source of each method of each class in `stubs`, without comments and with one layout."""
    nodes = ast.parse(stubs.read_text(encoding="utf-8")).body
    return {node.name: set(map(ast.unparse, node.body)) for node in nodes if isinstance(node, ast.ClassDef)}
