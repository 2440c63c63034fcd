"""The source itself: who may import whom, where the system is touched, how large things are, what is documented.

`ruff` sees to the rest (docstrings of functions, prints, leftover notes, formatting): see pyproject.toml.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

import pytest

import fscoord

PACKAGE = Path(fscoord.__file__).parent
REPOSITORY = Path(__file__).parent.parent

MODULE_LINES_MAX = 600

# Which module may import which: the first pattern that fits counts. A module that nothing fits has no place yet.
LAYERS = [
    ("errors", []),
    ("_words", []),
    ("_foreign", ["errors"]),
    ("_forks", []),
    ("_imports", ["_forks"]),
    ("_logger", ["_foreign", "_imports"]),
    ("_system", ["_foreign", "_forks", "_imports", "_words", "errors"]),
    ("_events", ["_foreign", "_system"]),
    ("_naps", ["_system"]),
    ("_interruptions", ["_system"]),
    ("_log.malformed", []),
    ("_log.session", ["_log.malformed", "_words"]),
    ("_log.record", ["_log.malformed", "errors"]),
    ("_log.header", ["_log.malformed", "_log.record"]),
    ("_log.identity", ["_log.header"]),
    ("_log.successor", ["_log.malformed"]),
    ("_log.meaning", ["_log.malformed", "_log.record", "_log.session", "_log.successor"]),
    ("_log.permissions", ["_foreign", "_system"]),
    ("_log.line", ["_system", "errors"]),
    ("_log.marker", ["_foreign", "_log.alive", "_log.malformed", "_log.session", "_network", "_system"]),
    ("_log.lock", ["_foreign", "_log.line", "_log.marker", "_system", "errors"]),
    ("_log.mount", ["_foreign", "_system", "errors"]),
    ("_log.path", ["_foreign", "_log.permissions", "_system", "errors"]),
    ("_log.tail", ["_foreign", "_log.record", "_system", "errors"]),
    ("_log.bell", ["_foreign", "_log.path", "_system", "errors"]),
    ("_log.news", ["_log.bell", "_log.consumer", "_log.record", "_log.spill"]),
    ("_log.node", ["_foreign", "_log.bell", "_log.mount", "_log.path", "_log.shared", "_system", "errors"]),
    (
        "_log.watch",
        [
            "_foreign",
            "_log.shared",
            "_logger",
            "_events",
            "_naps",
            "_log.bell",
            "_log.node",
            "_log.ticket",
            "_log.path",
            "_system",
            "errors",
        ],
    ),
    ("_log.stuck", ["_foreign", "_logger", "_system"]),
    (
        "_log.ticket",
        ["_foreign", "_naps", "_log.node", "_log.watch", "_system"],
    ),  # a part of watch, which knows its type
    ("_log.shared", ["_system"]),
    ("_log.successor", []),
    ("_log.runs", []),
    ("_log.spill", ["_log.record", "_log.successor", "_system"]),
    ("_log.consumer", ["_log.spill"]),
    ("_log.roster", ["_log.session"]),
    (
        "_log.reader",
        [
            "_foreign",
            "_log.header",
            "_log.malformed",
            "_log.meaning",
            "_log.consumer",
            "_log.path",
            "_log.record",
            "_log.roster",
            "_log.session",
            "_log.spill",
            "_log.successor",
            "_log.tail",
            "_system",
            "errors",
        ],
    ),
    (
        "_log.shelf",
        [
            "_foreign",
            "_log.contention",
            "_log.path",
            "_log.reader",
            "_log.record",
            "_log.spill",
            "_log.successor",
            "_log.tail",
            "_system",
            "errors",
        ],
    ),
    ("_log.contention", ["_foreign", "_log.lock", "_log.path", "_log.reader", "_system", "errors"]),
    (
        "_log.opening",
        [
            "_foreign",
            "_log.header",
            "_log.malformed",
            "_log.lock",
            "_log.mount",
            "_log.path",
            "_log.record",
            "_log.runs",
            "_system",
            "errors",
        ],
    ),
    ("_log.alive", ["_foreign", "_log.path", "_log.session", "_system", "errors"]),
    (
        "_log.signpost",
        [
            "_foreign",
            "_log.header",
            "_log.identity",
            "_log.malformed",
            "_log.shared",
            "_log.lock",
            "_log.opening",
            "_log.path",
            "_log.record",
            "_log.successor",
            "_log.tail",
            "_system",
            "errors",
        ],
    ),
    (
        "_log.succession",
        [
            "_foreign",
            "_log.header",
            "_log.identity",
            "_log.malformed",
            "_log.lock",
            "_log.opening",
            "_log.path",
            "_log.reader",
            "_log.record",
            "_log.runs",
            "_log.shared",
            "_log.shelf",
            "_log.signpost",
            "_log.successor",
            "_system",
            "errors",
        ],
    ),
    (
        "_log.presence",
        [
            "_foreign",
            "_logger",
            "_log.alive",
            "_log.consumer",
            "_log.succession",
            "_log.opening",
            "_log.path",
            "_log.reader",
            "_log.record",
            "_log.session",
            "_system",
            "errors",
        ],
    ),
    ("_log.coherence", ["_foreign", "_log.*", "_system", "errors"]),
    ("_log.marked", ["_logger", "_log.*", "_system", "errors"]),
    (
        "_log.appending",
        ["_foreign", "_log.path", "_log.presence", "_log.reader", "_log.record", "_log.tail", "_system", "errors"],
    ),
    (
        "_log.compaction",
        [
            "_foreign",
            "_log.header",
            "_log.identity",
            "_log.malformed",
            "_log.permissions",
            "_logger",
            "_log.alive",
            "_log.appending",
            "_log.lock",
            "_log.path",
            "_log.reader",
            "_log.record",
            "_log.runs",
            "_log.session",
            "_log.signpost",
            "_log.succession",
            "_log.successor",
            "_system",
            "errors",
        ],
    ),
    ("_log.file", ["_foreign", "_logger", "_log.*", "_system", "errors"]),
    ("_log.resync", ["_log.record", "_log.successor", "_log.tail", "_system"]),
    (
        "_log.scan",
        [
            "_foreign",
            "_log.header",
            "_log.lock",
            "_log.path",
            "_log.record",
            "_log.resync",
            "_log.session",
            "_log.successor",
            "_log.tail",
            "_system",
            "errors",
        ],
    ),
    ("_log.dump", ["_foreign", "_log.*", "_system", "errors"]),
    ("_log.verify", ["_foreign", "_log.*", "_system", "errors"]),
    ("_log.copying", ["_foreign", "_log.header", "_log.mount", "_log.path", "_log.record", "_system"]),
    ("_log.salvage", ["_foreign", "_log.*", "_system", "errors"]),
    ("_log.repair", ["_foreign", "_log.*", "_system", "errors"]),
    ("arguments", ["errors"]),
    ("capabilities", ["arguments"]),
    ("members", ["arguments", "_system", "errors"]),
    ("_sought", ["members"]),
    ("store", ["_naps", "_sought", "arguments", "capabilities", "members", "_system", "errors"]),
    ("environment", ["_system", "errors"]),
    (
        "stores.file",
        [
            "_logger",
            "_log.*",
            "stores.state",
            "stores.waiting",
            "stores.lifetime",
            "stores.options",
            "stores.sessions",
            "_sought",
            "arguments",
            "capabilities",
            "store",
            "_system",
            "errors",
        ],
    ),
    ("stores.state", ["_log.record", "_log.spill", "_system", "errors"]),  # a part of stores.file, as are the next two
    ("stores.vigil", ["_log.*", "stores.waiting", "_system"]),
    (
        "stores.sessions",
        [
            "_naps",
            "_patience",
            "_sought",
            "_log.*",
            "stores.state",
            "stores.vigil",
            "stores.waiting",
            "arguments",
            "members",
            "store",
            "_system",
            "errors",
        ],
    ),
    ("stores.lifetime", ["_log.*", "stores.waiting", "stores.file", "_system", "errors"]),  # the last for its type
    ("stores.waiting", ["_foreign", "_logger", "_naps", "_log.*", "stores.state", "store", "_system", "errors"]),
    ("stores.copying", ["_log.*", "arguments"]),
    ("stores.dump", ["_log.*"]),
    ("stores.verify", ["_log.*"]),
    ("stores.repair", ["_log.*"]),
    ("stores.options", ["_log.*", "arguments", "_system", "errors"]),
    ("stores.tcp", ["stores.tcp_*", "arguments", "capabilities", "store", "_system", "errors"]),
    ("stores.tcp_deadline", ["_patience", "_system"]),  # a part of stores.tcp, as are the next four
    ("stores.tcp_wire", ["stores.tcp_deadline", "_network", "_system"]),
    ("stores.tcp_connections", ["_foreign", "stores.tcp_deadline", "stores.tcp_wire", "_network", "_system", "errors"]),
    ("stores.tcp_waits", ["stores.tcp_*", "arguments", "_system", "errors"]),
    ("stores.tcp_server", ["stores.tcp_deadline", "_system", "errors"]),
    ("stores.etcd_address", []),  # a part of stores.etcd, as are the next five
    ("stores.etcd_requests", []),
    ("stores.etcd_cluster", ["stores.etcd_*", "_system", "errors"]),
    ("stores.etcd_stream", ["_system"]),
    ("stores.etcd_handle", ["_backoff", "_patience", "stores.etcd_*", "arguments", "store", "_system", "errors"]),
    ("stores.etcd_sessions", ["_backoff", "stores.etcd_*", "arguments", "members", "_system", "errors"]),
    ("stores.etcd", ["_backoff", "stores.etcd_*", "arguments", "capabilities", "_system", "errors"]),
    ("stores.url", ["stores.*", "arguments", "store", "_system", "errors"]),
    (
        "stores.*",
        ["_naps", "_patience", "_sought", "arguments", "capabilities", "members", "store", "_system", "errors"],
    ),
    ("_patience", ["_logger", "_system"]),
    ("_backoff", ["_system"]),
    ("_fates", ["_words", "members", "store", "_system", "errors"]),
    ("_store_timeout", ["arguments", "store", "_system", "errors"]),
    ("_roll", ["_backoff", "_fates", "_patience", "_sought", "arguments", "store", "_system", "errors"]),
    ("_meetings", ["_roll", "_sought", "arguments", "store", "_system", "errors"]),
    ("collectives", ["_meetings", "_roll", "_sought", "_store_timeout", "arguments", "store"]),
    ("_sequence", ["arguments", "store", "errors"]),
    ("barriers", ["barriers.*"]),
    ("barriers.base", ["arguments", "environment", "errors"]),
    (
        "barriers.*",
        [
            "_roll",
            "_sequence",
            "arguments",
            "barriers.*",
            "collectives",
            "environment",
            "store",
            "stores.url",
            "_system",
            "errors",
        ],
    ),
    ("recipes", ["recipes.*"]),
    ("recipes._entry", ["arguments"]),
    ("recipes._lease", ["recipes._entry", "_logger", "_system", "errors"]),
    (
        "recipes.*",
        [
            "recipes.*",
            "_backoff",
            "_foreign",
            "_meetings",
            "_patience",
            "_sought",
            "arguments",
            "store",
            "_system",
            "errors",
        ],
    ),
    ("aio", ["aio.*"]),
    ("aio._loop", ["_naps", "_system"]),
    ("aio._hands", ["_foreign", "aio._loop", "_system"]),
    ("aio._slices", ["aio._hands", "_patience", "_sought", "arguments", "store", "_system", "errors"]),
    (
        "aio.*",  # never a concrete store
        [
            "aio.*",
            "_meetings",
            "_naps",
            "_roll",
            "_sought",
            "arguments",
            "members",
            "recipes",
            "recipes.*",
            "store",
            "stores.url",
            "_system",
            "errors",
        ],
    ),
    ("_network", ["_foreign", "_system", "errors"]),
    ("rendezvous", ["rendezvous.*", "errors"]),
    (
        "rendezvous.creation",  # a temporary file has no address, so that stores.url can't open it
        ["rendezvous.*", "stores.file", "stores.url", "store", "arguments", "_logger", "_system", "errors"],
    ),
    (
        "rendezvous.*",
        [
            "rendezvous.*",
            "_backoff",
            "_patience",
            "_words",
            "collectives",
            "stores.prefix",
            "store",
            "arguments",
            "_logger",
            "_network",
            "_system",
            "errors",
        ],
    ),
    ("launch", ["launch.*"]),
    ("launch.warden", []),  # a program by itself
    ("launch.held", ["launch.warden", "_interruptions", "_logger", "_system", "errors"]),
    (
        "launch.*",
        [
            "launch.*",
            "rendezvous.*",
            "stores.prefix",
            "store",
            "arguments",
            "_logger",
            "_patience",
            "_system",
            "errors",
        ],
    ),
    (
        "demo.*",
        ["demo.*", "_interruptions", "arguments", "collectives", "members", "store", "stores.*", "_system", "errors"],
    ),
    ("testing", ["testing.*"]),
    ("testing.contract", ["testing.contract.*", "store"]),
    ("testing.contract.*", ["testing.contract.*", "arguments", "store", "_interruptions", "_system", "errors"]),
    ("testing.*", ["testing.*", "arguments", "members", "store", "_system", "errors"]),
    ("integrations.*", ["*"]),
    # What the doctor tries must be the very locks, mounts and paths that a log uses, so it may import those of `_log`.
    (
        "doctor.*",
        [
            "doctor.*",
            "_log.lock",
            "_log.mount",
            "_log.path",
            "_events",
            "_interruptions",
            "stores.file",
            "_system",
            "errors",
        ],
    ),
    ("cli", ["*"]),
    ("cli.*", ["*"]),
    ("__main__", ["cli"]),
    ("", ["*"]),
]
PACKAGES = {"_log", "demo", "doctor", "integrations", "stores"}  # mere folders: their __init__ imports nothing

# What touches files, locks, processes or clocks, and so is for _system alone.
SYSTEM = {
    "asyncio", "concurrent", "ctypes", "fcntl", "filelock", "glob", "io", "mmap", "multiprocessing", "os", "pathlib",
    "portalocker", "posix", "resource", "sched", "select", "selectors", "shutil", "signal", "socket", "stat",
    "subprocess", "tempfile", "time", "watchdog",
}  # fmt: skip
SYSTEM_ALLOWED = {
    "_forks": ({"mmap", "os"}, "finds out that the process was forked, for _system among others"),
    "_network": ({"socket"}, "is to the network what _system is to files, and is rarely needed"),
    "_events": ({"ctypes", "watchdog"}, "the one module that knows watchdog"),
    "aio._hands": ({"asyncio"}, "is about the event loop, as all of these"),
    "aio._loop": ({"asyncio"}, "is about nothing else"),
    "aio._slices": ({"asyncio"}, "sleeps in the loop"),
    "aio.holds": ({"asyncio"}, "asks which task this is"),
    "aio.store": ({"asyncio"}, "asks which loop this is"),
    "stores.tcp_server": ({"ctypes"}, "keeps an object of C++ from being destroyed in a forked child"),
    "launch.warden": (
        {"ctypes", "open", "os", "select", "signal", "time"},
        "is a program by itself, outside of the package",
    ),
    "launch.held": ({"signal", "subprocess"}, "starts a process and stops it"),
    "launch.worker": ({"signal", "subprocess"}, "starts processes and stops them"),
    "testing.contract.interrupts": ({"signal"}, "interrupts itself"),
    "cli.run": ({"signal"}, "names the signals that killed workers"),
    "cli.once": ({"signal"}, "tells Ctrl-C from the other signals that end it"),
    "demo.launcher": ({"selectors", "signal", "subprocess"}, "starts processes, listens to them, kills one"),
    "_interruptions": ({"signal"}, "is about nothing else"),
    "doctor.child": ({"subprocess"}, "starts the processes that may get stuck in the kernel"),
}

# Extras, and the only modules that may ask for them.
EXTRAS = {
    "click": ["cli", "cli.*"],
    "pytest": ["testing.contract", "testing.contract.*"],
    "rich": ["cli", "cli.*"],
    "torch": ["barriers.torch", "integrations.*", "stores.tcp_server"],
    "urllib3": ["stores.etcd_cluster"],
}


def modules() -> dict[str, Path]:
    """Every module of the package by its name without `fscoord.`; the package itself is the empty name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
every_module = pytest.mark.parametrize("name", MODULES, ids=lambda name: name or "fscoord")


def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """Every dotted name that the module imports, wherever in it; `from a import b` is `a.b`, as `load("a.b")` is."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively in line {node.lineno}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"load", "system.load"}:
            yield ast.literal_eval(node.args[0])


def own_imports(name: str) -> set[str]:
    """The modules of fscoord that the module imports."""
    found = set()
    for dotted in imports(name):
        if dotted == "fscoord" or dotted.startswith("fscoord."):
            target = dotted.removeprefix("fscoord").removeprefix(".")
            while target not in MODULES:
                target = target.rpartition(".")[0]
            found.add(target)
    return found


@every_module
def test_imports_point_downward(name: str) -> None:
    if name in PACKAGES:
        assert own_imports(name) == set()
        return
    allowed = next((targets for pattern, targets in LAYERS if fnmatchcase(name, pattern)), None)
    assert allowed is not None, f"{name} is in no layer: give it its place in LAYERS and in docs/contributing"
    wrong = {target for target in own_imports(name) if not any(fnmatchcase(target, pattern) for pattern in allowed)}
    assert not wrong, f"{name} may import {allowed}, not {sorted(wrong)}"


@every_module
def test_the_system_is_touched_in_one_module_only(name: str) -> None:
    used = {dotted.partition(".")[0] for dotted in imports(name)} & SYSTEM
    used |= {"open"} & {
        node.func.id for node in ast.walk(tree(name)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    used |= {dotted for dotted in imports(name) if dotted.startswith("datetime") and dotted != "datetime.timedelta"}
    if name != "_system":
        allowed, _reason = SYSTEM_ALLOWED.get(name, (set(), ""))
        assert used == allowed, f"{name} uses {sorted(used)} itself: `from fscoord import _system as system`"


@every_module
def test_extras_are_asked_for_only_where_they_belong(name: str) -> None:
    for extra in {dotted.partition(".")[0] for dotted in imports(name)} & EXTRAS.keys():
        assert any(fnmatchcase(name, pattern) for pattern in EXTRAS[extra]), f"{name} imports {extra}"


@every_module
def test_everything_imported_is_declared(name: str) -> None:
    known = sys.stdlib_module_names | SYSTEM | EXTRAS.keys() | {"fscoord"}
    assert {dotted.partition(".")[0] for dotted in imports(name)} <= known


@every_module
def test_a_module_says_its_responsibility_in_its_first_line(name: str) -> None:
    docstring = ast.get_docstring(tree(name))
    assert docstring, f"{MODULES[name]} has no docstring"
    first = docstring.splitlines()[0]
    assert first.endswith((".", ":")), f"the first line is no sentence: {first!r}"


@every_module
def test_long_modules_say_why_they_are_one_thing(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    if lines > MODULE_LINES_MAX:
        said = ast.get_docstring(tree(name)) or ""
        assert "one thing" in said, f"{name} has {lines} lines, and its docstring does not say why it is one thing"


@every_module
def test_no_body_stands_for_one_that_is_missing(name: str) -> None:
    """What others must give is abstract, or declared for the type checker only."""
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.FunctionDef) and node.body[-1:] and isinstance(node.body[-1], ast.Raise):
            rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
            raised = ast.unparse(node.body[-1])
            is_stub = len(rest) == 1 and re.match(r"raise (AssertionError|NotImplementedError)\b", raised)
            assert not is_stub, f"{name}.{node.name} only says: {raised}"


def lacks_an_extra(name: str) -> bool:
    """Return whether the module can't be imported here, for want of torch: `tox -e torch` looks at it."""
    return name.startswith("integrations.torch") and find_spec("torch") is None


@every_module
def test_help_explains_every_public_name(name: str) -> None:
    if name == "__main__" or lacks_an_extra(name):
        return
    module = importlib.import_module(f"fscoord.{name}".rstrip("."))
    for public, thing in vars(module).items():
        if public.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if not (inspect.isclass(thing) or inspect.isroutine(thing)):
            continue
        assert inspect.getdoc(thing), f"{name}.{public} has no docstring"
        if inspect.isclass(thing):
            silent = [member for member, value in public_members(thing) if not inspect.getdoc(value)]
            if name.startswith("testing.contract"):  # a test's name is its docstring
                silent = [member for member in silent if not member.startswith("test_")]
            assert not silent, f"{name}.{public}: no docstring for {silent}, inherited or not"


def public_members(thing: type) -> Iterator[tuple[str, object]]:
    for member in vars(thing):
        value = inspect.getattr_static(thing, member)
        if not member.startswith("_") and (callable(value) or isinstance(value, (property, classmethod, staticmethod))):
            yield member, getattr(thing, member)


def test_public_names_are_all_there_sorted_and_in_the_reference() -> None:
    groups = re.split(r"# .*\n", inspect.getsource(fscoord).partition("__all__ = [")[2])[1:]
    names = [re.findall(r'"(\w+)"', group) for group in groups]
    assert [name for group in names for name in group] == fscoord.__all__
    assert names == [sorted(group) for group in names]
    assert all(hasattr(fscoord, name) for name in fscoord.__all__)
    public = {name for name, thing in vars(fscoord).items() if name[0] != "_" and not inspect.ismodule(thing)}
    assert public == set(fscoord.__all__) - {"__version__"}
    reference = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\.\. auto\w+:: fscoord\.(\w+)$", reference, re.MULTILINE))
    assert documented == public


PUBLIC_MODULES = ["aio", "barriers", "environment", "integrations.torch", "launch", "recipes", "rendezvous", "testing"]


@pytest.mark.parametrize("name", PUBLIC_MODULES)
def test_the_names_of_the_other_public_modules_are_in_the_reference_too(name: str) -> None:
    """From the sources, for torch may not be here. Names of `fscoord` itself stand there once, as those."""
    reference = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    prefix = rf"^\.\. (?:auto\w+|py:\w+):: fscoord\.{re.escape(name)}\.(\w+)\b"
    documented = re.findall(prefix, reference, re.MULTILINE)
    named = [
        node for node in tree(name).body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    others = set() if name == "aio" else set(fscoord.__all__)  # whose names are those of what they stand for
    assert sorted(documented) == sorted(set(ast.literal_eval(named[0].value)) - others)


def test_nothing_stands_in_the_reference_twice() -> None:
    reference = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
    names = re.findall(r"^\.\. (?:auto\w+|py:\w+):: ([\w.]+)", reference, re.MULTILINE)
    # The names of `fscoord.aio` are those of what they stand for: each of these stands there once, and those once.
    things = [(name.startswith("fscoord.aio."), name.rpartition(".")[2]) for name in names]
    assert len(things) > 50
    assert sorted(set(things)) == sorted(things)


def test_the_page_on_the_tests_knows_every_folder_of_them() -> None:
    folders = {path.parent.name for path in REPOSITORY.glob("tests/*/*.py")}
    page = (REPOSITORY / "docs" / "testing.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^  (\w+)/  ", page, re.MULTILINE)) == folders


def test_the_tests_that_the_page_on_them_names_are_there() -> None:
    page = (REPOSITORY / "docs" / "testing.md").read_text(encoding="utf-8")
    sources = [path.read_text(encoding="utf-8") for folder in ("tests", "fscoord") for path in walk(folder)]
    there = set(re.findall(r"^ *def (test_\w+)", "\n".join(sources), re.MULTILINE))
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 70
    assert named <= there, f"no such tests: {sorted(named - there)}"


def walk(folder: str) -> Iterator[Path]:
    """Every Python file below this folder of the repository."""
    return (REPOSITORY / folder).rglob("*.py")
