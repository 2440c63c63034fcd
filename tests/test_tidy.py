"""The source itself: imports, calls of the system, and documentation.

`ruff` sees to the rest (docstrings of functions, prints, leftover notes, formatting): see pyproject.toml.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TypeGuard

import pytest
from support.sources import MODULES, imported, module_of, tree

import fscoord

pytestmark = pytest.mark.once

REPOSITORY = Path(__file__).parent.parent
CONTRIBUTORS = REPOSITORY / "docs" / "contributors"

IMPORTS = "tests/imports.txt"
"""The table of which module may import which."""

# What touches files, locks, processes or clocks, and so is for _system alone.
SYSTEM = {
    "asyncio", "concurrent", "ctypes", "fcntl", "filelock", "glob", "io", "mmap", "multiprocessing", "os", "pathlib",
    "portalocker", "posix", "resource", "sched", "select", "selectors", "shutil", "signal", "socket", "stat",
    "subprocess", "tempfile", "time", "watchdog",
}  # fmt: skip
SYSTEM_ALLOWED = {
    "_runtime.forks": ({"mmap", "os"}, "finds out that the process was forked, for _system among others"),
    "_runtime.interrupts": ({"os"}, "is used by _system; finds out that an import was forked"),
    "_runtime.network": ({"socket"}, "is to the network what _system is to files, and is rarely needed"),
    "_runtime.file_events": ({"ctypes", "watchdog"}, "the one module that knows watchdog"),
    "aio._executor": ({"asyncio"}, "is about the event loop, as all of these"),
    "aio._asyncio_backend": ({"asyncio"}, "is about nothing else"),
    "aio._driver": ({"asyncio"}, "asks which loop and which task this is, and sleeps in the loop"),
    "stores.tcp.server": ({"ctypes"}, "keeps an object of C++ from being destroyed in a forked child"),
    "launch.warden": (
        {"ctypes", "open", "os", "select", "signal", "time"},
        "is a program by itself, outside of the package",
    ),
    "launch.held": ({"signal", "subprocess"}, "starts a process and stops it"),
    "launch.agent": ({"signal"}, "passes on to the workers the signal that ends it"),
    "launch.announcer": ({"signal"}, "names the signals that killed workers"),
    "launch.worker": ({"signal", "subprocess"}, "starts processes and stops them"),
    "aio.visibility": ({"asyncio"}, "sleeps in the loop"),
    "preemption": ({"subprocess"}, "starts scontrol"),
    "testing.contract.waiting": ({"signal"}, "interrupts itself"),
    "cli.groups": ({"signal"}, "tells Ctrl-C from the other signals that end it"),
    "cli.demo": ({"signal", "subprocess"}, "starts processes and stops them"),
    "demo": ({"os", "pathlib", "signal"}, "is an example for users, who have no `system`"),
    "_runtime.signals": ({"signal"}, "is about nothing else"),
    **{
        f"integrations.filelock.{name}": ({"filelock"}, "is about nothing else")
        for name in ("_async_file_lock", "_file_lock", "_read_write", "_store")
    },
    "integrations.filelock._async_read_write": ({"asyncio", "filelock"}, "asks which task this is"),
    "integrations.dask": ({"asyncio"}, "runs in the event loop of a scheduler of Dask"),
    "doctor.agents": ({"subprocess"}, "starts the processes that may get stuck in the kernel"),
}

# What follows a link or cuts a file, if another user has put one at a name, and the only modules that may use it.
BY_NAME = {"O_TRUNC", "chmod", "chown", "lchown", "open", "removexattr", "setxattr", "truncate"}
BY_NAME_ALLOWED = {
    "_runtime.system": ({"open"}, "is where files are opened safely"),
    "_log.files.safe_files": (
        {"removexattr", "setxattr"},
        "gives descriptors to them: no other call does that",
    ),
    "_log.wakeup.doorbell": ({"open"}, "opens and closes a FIFO in one chain, without following a link or waiting"),
    "visibility": ({"open"}, "reads the file that the user names, and cuts none"),
    "cli.trace": ({"open"}, "writes to the file or device that the user names, and cuts none"),
    "cli.work": ({"open"}, "appends to the file that the user names, and cuts none"),
    "cli.output": ({"open"}, "opens /dev/null"),
    "launch.warden": ({"open"}, "opens /dev/null"),
}

# Modules that make locks of `threading` themselves, and why.
BARE_LOCKS = {
    "_runtime.forks": "is below `system`, and makes a mutex by `atomic`",
    "_runtime.system": "makes the mutexes, and an event of a lock",
    "_runtime.tracing": "a lock for which no thread waits",
    "_log.locking.kernel_wait": "a lock that another thread releases",
    "_log.shared.node_poller": "a lock that is acquired once",
    "_log.wakeup.watcher": "a lock for which no thread waits",
    "stores.tcp.connections": "a lock that is acquired with a timeout",
}

# Extras, and the only modules that may ask for them.
EXTRAS = {
    "click": ["cli", "cli.*", "integrations.dask"],
    "pytest": ["testing.contract", "testing.contract.*"],
    "rich": ["cli", "cli.*"],
    "dask": ["integrations.dask"],
    "distributed": ["integrations.dask"],
    "jax": ["integrations.jax"],
    "lightning": ["integrations.lightning"],
    "opentelemetry": ["integrations.opentelemetry"],
    "optuna": ["integrations.optuna"],
    "filelock": ["integrations.filelock", "integrations.filelock.*"],
    "tooz": ["integrations.tooz"],
    "torch": [
        "barriers.torch",
        "integrations.lightning",
        "integrations.torch",
        "integrations.torchrun",
        "stores.tcp.server",
    ],
    "urllib3": ["stores.etcd.client"],
}


def faults_of_modules(check: Callable[[str], Iterable[str]]) -> Callable[[], None]:
    """Make one test of `check`, which yields the faults of a module: the test fails with those of all modules."""

    def test() -> None:
        faults = [f"fscoord.{name}: {fault}" for name in MODULES for fault in check(name)]
        assert not faults, "\n".join(faults)

    test.__doc__ = check.__doc__
    return test


def imports(name: str) -> Iterator[str]:
    """Every dotted name that the module imports, wherever in it."""
    return (dotted for node in ast.walk(tree(name)) for dotted in imported(node))


def packages_imported(name: str) -> set[str]:
    return {dotted.partition(".")[0] for dotted in imports(name)}


def own_imports(name: str) -> set[str]:
    """The modules of fscoord that the module imports."""
    return {target for target in map(module_of, imports(name)) if target is not None}


@functools.cache
def rows() -> list[tuple[list[str], list[str]]]:
    """Return the rows of the table: the modules of each, and what these may import."""
    text = (REPOSITORY / IMPORTS).read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\n    ", " ").split("\n")
    cells = [line.split(": ") for line in lines if line]
    return [(_names(modules), _names(may) if may != "nothing" else []) for modules, may in cells]


def _names(cell: str) -> list[str]:
    return ["" if name == "fscoord" else name for name in cell.split(", ")]


def row_of(name: str) -> int | None:
    """Return the number of the row of the module, the first that fits; None if there is none."""
    fits = (number for number, (patterns, _) in enumerate(rows()) if any(fnmatchcase(name, each) for each in patterns))
    return next(fits, None)


@faults_of_modules
def test_imports_point_downward(name: str) -> Iterator[str]:
    row, targets = row_of(name), sorted(own_imports(name))
    if row is None and targets:
        yield f"imports, and is in no row of {IMPORTS}"
    for target in targets if row is not None else ():
        if not any(fnmatchcase(target, pattern) for pattern in rows()[row][1]):
            yield f"imports {target}, but may import only {rows()[row][1]}"


def test_rows_of_the_log_are_in_order() -> None:
    """No part of the log imports one of a later row, so that there is no cycle of parts."""
    parts = {name: row for name in MODULES if name.startswith("_log.") and (row := row_of(name)) is not None}
    assert len(parts) > 30
    wrong = [
        f"{name} imports {target}"
        for name, row in parts.items()
        for target in own_imports(name) & parts.keys()
        if parts[target] > row
    ]
    assert wrong == []


def test_patterns_of_the_table_each_hold_a_module() -> None:
    for number, (patterns, _) in enumerate(rows()):
        held = [name for name in MODULES if row_of(name) == number]
        assert [each for each in patterns if not any(fnmatchcase(name, each) for name in held)] == []


@faults_of_modules
def test_system_is_touched_in_one_module_only(name: str) -> Iterator[str]:
    used = packages_imported(name) & SYSTEM
    used |= {"open"} & {
        node.func.id for node in ast.walk(tree(name)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    used |= {dotted for dotted in imports(name) if dotted.startswith("datetime") and dotted != "datetime.timedelta"}
    allowed, _reason = SYSTEM_ALLOWED.get(name, (set(), ""))
    if name != "_runtime.system" and used != allowed:
        yield f"uses {sorted(used)} itself, not {sorted(allowed)}: `from fscoord._runtime import system`"


@faults_of_modules
def test_times_of_files_are_not_read(name: str) -> Iterator[str]:
    """Lustre keeps whole seconds, and a file server has a clock of its own."""
    times = re.compile(r"st_[acm]time(_ns)?|st_birthtime(_ns)?|get[acm]time")
    yield from sorted(
        {node.attr for node in ast.walk(tree(name)) if isinstance(node, ast.Attribute) and times.fullmatch(node.attr)}
    )


@faults_of_modules
def test_mutexes_are_made_by_system(name: str) -> Iterator[str]:
    """A signal handler may run before the block of a ``with`` on a bare lock, and leave the lock locked."""
    calls = [ast.unparse(node.func) for node in ast.walk(tree(name)) if isinstance(node, ast.Call)]
    has_bare = any(re.fullmatch(r"(system\.)?threading\.R?Lock", call) for call in calls)
    if has_bare and name not in BARE_LOCKS:
        yield "makes a lock for a `with` itself: use system.mutex() or system.recursive_mutex()"
    if name in BARE_LOCKS and not has_bare:
        yield "makes no lock any more: remove it from the list"


@faults_of_modules
def test_files_are_opened_and_changed_by_the_functions_that_check_them(name: str) -> Iterator[str]:
    """Another user may have put another file at a name, so what is done by a name follows no link, and cuts no file."""
    used = {
        node.attr
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Attribute) and node.attr in BY_NAME and ast.unparse(node.value) in {"os", "system.os"}
    }
    allowed, _reason = BY_NAME_ALLOWED.get(name, (set(), ""))
    if used != allowed:
        yield f"calls {sorted(used)}, not {sorted(allowed)}: use system.open_file, and os.fchmod of its descriptor"


@faults_of_modules
def test_extras_are_asked_for_only_where_they_belong(name: str) -> Iterator[str]:
    for extra in sorted(packages_imported(name) & EXTRAS.keys()):
        if not any(fnmatchcase(name, pattern) for pattern in EXTRAS[extra]):
            yield f"imports {extra}"


@faults_of_modules
def test_imported_packages_are_all_declared(name: str) -> Iterator[str]:
    yield from packages_imported(name) - (sys.stdlib_module_names | SYSTEM | EXTRAS.keys() | {"fscoord"})


@faults_of_modules
def test_module_states_its_responsibility_in_its_first_line(name: str) -> Iterator[str]:
    first = (ast.get_docstring(tree(name)) or "").partition("\n")[0]
    if not first.endswith((".", ":")):
        yield f"the first line is no sentence: {first!r}"


@faults_of_modules
def test_function_body_does_not_stand_for_one_that_is_missing(name: str) -> Iterator[str]:
    """What others must give is abstract, or declared for the type checker only."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef) and node.body[-1:] and isinstance(node.body[-1], ast.Raise):
            rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
            raised = ast.unparse(node.body[-1])
            if len(rest) == 1 and re.match(r"raise (AssertionError|NotImplementedError)\b", raised):
                yield f"{node.name} only says: {raised}"


def lacks_an_extra(name: str) -> bool:
    """Return whether the module can't be imported here, for want of a package: `tox -e packages` looks at it."""
    needed = [package for package, users in EXTRAS.items() if name in users and name.startswith("integrations.")]
    return any(find_spec(package) is None for package in needed)


@faults_of_modules
def test_help_explains_every_public_name(name: str) -> Iterator[str]:
    if name == "__main__" or lacks_an_extra(name):
        return
    module = importlib.import_module(f"fscoord.{name}".rstrip("."))
    for public, thing in vars(module).items():
        if public.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isclass(thing) or inspect.isroutine(thing):
            members = public_members(thing) if inspect.isclass(thing) else ()
            for member, value in [("", thing), *members]:
                # In the contract, a test's name is its docstring.
                is_test = name.startswith("testing.contract") and member.startswith("test_")
                if not inspect.getdoc(value) and not is_test and member not in promised(thing):
                    yield f"{public}.{member} has no docstring, inherited or not"


def promised(thing: object) -> set[str]:
    """Return the methods of the protocols that the docstring of a class names: their texts explain its methods."""
    named = set(re.findall(r"`(\w+)`", getattr(thing, "__doc__", None) or ""))
    bodies = [node.body for name in MODULES for node in tree(name).body if is_protocol(node) and node.name in named]
    return {each.name for body in bodies for each in body if isinstance(each, ast.FunctionDef)}


def is_protocol(node: ast.stmt) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)


def public_members(thing: type) -> Iterator[tuple[str, object]]:
    for member in vars(thing):
        value = inspect.getattr_static(thing, member)
        if not member.startswith("_") and (callable(value) or isinstance(value, (property, classmethod, staticmethod))):
            yield member, getattr(thing, member)


def test_public_names_are_all_there_sorted_and_in_the_reference() -> None:
    groups = re.split(r"# .*\n", inspect.getsource(fscoord).partition("__all__ = [")[2])[1:]
    names = [re.findall(r'"(\w+)"', group) for group in groups]
    assert [name for group in names for name in group] == fscoord.__all__
    assert fscoord.errors.__all__ in names
    assert names == [sorted(group) for group in names]
    assert all(hasattr(fscoord, name) for name in fscoord.__all__)
    public = {name for name, thing in vars(fscoord).items() if name[0] != "_" and not inspect.ismodule(thing)}
    assert public == set(fscoord.__all__) - {"__version__"}
    documented = [name.removeprefix("fscoord.") for name in reference() if name.count(".") == 1]
    assert sorted(documented) == sorted(public)


def reference() -> list[str]:
    """Return every name of docs/api.md: those in its tables, each of which has a page, and those on the page itself."""
    names = []
    text = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```{eval-rst}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        module = re.search(r"^\.\. currentmodule:: ([\w.]+)$", block, re.MULTILINE)
        tabled = re.findall(r"^   ([A-Za-z][\w.]*)$", block, re.MULTILINE)
        assert module or not tabled, "a table of names has no module"
        names += [f"{module[1]}.{name}" for name in tabled if module]
        names += re.findall(r"^\.\. (?:auto|py:)\w+:: ([\w.]+)", block, re.MULTILINE)
    return names


PUBLIC_MODULES = [
    "aio",
    "barriers",
    "collectives",
    "environment",
    "events",
    "integrations.dask",
    "integrations.filelock",
    "integrations.jax",
    "integrations.lightning",
    "integrations.opentelemetry",
    "integrations.optuna",
    "integrations.tooz",
    "integrations.torch",
    "inspect",
    "launch",
    "preemption",
    "recipes",
    "rendezvous",
    "testing",
    "visibility",
]


def test_names_of_the_other_public_modules_are_in_the_reference_too() -> None:
    """From the sources, for torch may not be here. Names of `fscoord` itself stand there once, as those."""
    for name in PUBLIC_MODULES:
        prefix = f"fscoord.{name}."
        documented = [each.removeprefix(prefix) for each in reference() if each.startswith(prefix)]
        assigned = [node for node in tree(name).body if isinstance(node, ast.Assign)]
        named = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
        others = set() if name == "aio" else set(fscoord.__all__)  # whose names are those of what they stand for
        assert sorted(documented) == sorted(set(ast.literal_eval(named[0])) - others), name


def test_reference_has_no_name_twice() -> None:
    names = reference()
    # The names of `fscoord.aio` are those of what they stand for: each of these stands there once, and those once.
    things = [(name.startswith("fscoord.aio."), name.rpartition(".")[2]) for name in names]
    assert len(things) > 50
    assert sorted(set(things)) == sorted(things)


def test_names_of_the_reference_are_all_in_code_whose_types_are_checked() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in walk("tests/typing"))
    used = {name for name in reference() if re.search(rf"\b{usual_name(name)}\b", code)}
    assert len(used) > 150
    assert set(reference()) - used == set()


def usual_name(name: str) -> str:
    """Return how code writes the public name: the names of `fscoord.aio` are also those of what they stand for."""
    module, _, last = name.rpartition(".")
    return rf"aio\.{last}" if module == "fscoord.aio" else last


def test_first_paragraphs_of_the_reference_are_whole_sentences() -> None:
    """A table shows the first sentence of each. It cuts a paragraph that ends in a block of code."""
    here = [name for name in reference() if not name.startswith("fscoord.integrations.")]  # which need other packages
    things = [(name, resolve_name(name)) for name in here]
    first = {
        name: " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
        for name, thing in things
        if callable(thing)
    }
    assert len(first) > 100
    assert {name: text for name, text in first.items() if not text.endswith(".") or "::" in text} == {}


def test_page_on_the_tests_lists_every_folder_of_them() -> None:
    folders = {path.parent.name for path in REPOSITORY.glob("tests/*/*.py")}
    page = (CONTRIBUTORS / "testing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^  (\w+)/  ", page, re.MULTILINE)) == folders


def test_pages_on_the_tests_name_only_tests_that_are_there() -> None:
    pages = [(CONTRIBUTORS / name).read_text(encoding="utf-8") for name in ("testing.md", "campaigns.md")]
    sources = [path.read_text(encoding="utf-8") for folder in ("tests", "fscoord") for path in walk(folder)]
    there = set(re.findall(r"^ *def (test_\w+)", "\n".join(sources), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", "".join(pages)))
    assert len(named) > 40
    assert named <= there, f"no such tests: {sorted(named - there)}"


def test_claims_on_the_page_on_the_tests_each_have_a_command_that_is_there() -> None:
    page = (CONTRIBUTORS / "testing.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (.+) \|$", page.partition("## What is shown")[2].partition("\n\n**")[0], re.MULTILINE)
    claims = [row.split(" | ") for row in table if not row.startswith(("claim |", "---"))]
    environments = set(
        re.findall(r"^\[testenv:(\w+)(?:\{.+\})?\]", (REPOSITORY / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE)
    )
    environments |= {"py", "py310", "py311", "py312", "py313", "py314"}
    assert len(claims) > 30
    for claim, commands in claims:
        paths = re.findall(r"tests/[\w/.]+", commands)
        named = [name for names in re.findall(r"tox -e ([\w,]+)", commands) for name in names.split(",")]
        assert paths or named, f"{claim} has no command"
        assert [path for path in paths if not (REPOSITORY / path).exists()] == []
        assert set(named) <= environments


def test_tests_that_need_torch_are_where_its_environment_looks_for_them() -> None:
    places = re.findall(r"^every = (tests/.+)$", (REPOSITORY / "tox.ini").read_text(encoding="utf-8"), re.MULTILINE)
    needs = re.compile(
        r"^(?:@pytest\.|pytestmark = .*)mark\.torch\b|^from support\.places import .*\bKINDS\b", re.MULTILINE
    )
    found = [path for path in walk("tests") if needs.search(path.read_text(encoding="utf-8"))]
    assert len(found) > 10
    inside = [REPOSITORY / place for place in places[0].split()]
    assert [path for path in found if not any(path.is_relative_to(place) for place in inside)] == []


def walk(folder: str) -> Iterator[Path]:
    """Every Python file below this folder of the repository."""
    return (REPOSITORY / folder).rglob("*.py")
