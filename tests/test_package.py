"""The installed package: the modules that an import loads, missing dependencies, and the metadata."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest

import fscoord

REPOSITORY = Path(__file__).parent.parent


def run(code: str, *arguments: str, status: int = 0) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == status, done.stdout
    return done.stdout


NEW_MODULES = """
import sys
before = set(sys.modules)  # under coverage there are some
{}
print(*{{name.partition(".")[0] for name in set(sys.modules) - before}})
"""


def test_import_of_fscoord_loads_no_dependency() -> None:
    heavy = {"asyncio", "click", "ctypes", "filelock", "multiprocessing", "portalocker", "rich", "torch", "watchdog"}
    loaded = set(run(NEW_MODULES.format("import fscoord")).split())
    assert "fscoord" in loaded
    assert not loaded & heavy


def test_store_on_a_local_mount_loads_nothing_of_combined_writes(tmp_path: Path) -> None:
    code = "import fscoord; fscoord.FileStore(sys.argv[1]).set('k', 'v'); print(*sys.modules)"
    loaded = run("import sys; " + code, str(tmp_path / "store")).split()
    assert "fscoord.stores.file" in loaded
    assert [name for name in loaded if name.startswith("fscoord._log.shared.combining")] == []


def test_functions_that_inspect_a_log_have_one_home_that_a_store_does_not_load(tmp_path: Path) -> None:
    from fscoord import inspect

    assert {"copy", "dump", "repair", "verify"} <= set(inspect.__all__)
    code = "import fscoord; fscoord.FileStore(sys.argv[1]).set('k', 'v'); print(*sys.modules)"
    loaded = run(NEW_MODULES.format(code), str(tmp_path / "store")).split()
    assert "fscoord.stores.file" in loaded
    assert not [name for name in loaded if name == "fscoord.inspect" or name.startswith("fscoord._log.inspect")]


def test_store_that_nobody_waits_on_loads_no_dependency_either(tmp_path: Path) -> None:
    code = "import fscoord; fscoord.FileStore(sys.argv[1]).set('k', 'v')"
    loaded = set(run(NEW_MODULES.format(code), str(tmp_path / "store")).split())
    assert "fscoord" in loaded
    assert not loaded & {"filelock", "portalocker", "watchdog"}


@pytest.mark.parametrize(("lock", "events"), [("ofd", "inotify"), ("flock", "observer"), ("soft", "inotify")])
def test_modules_first_imported_by_a_wait_are_imported_out_of_reach_of_ctrl_c(
    lock: str, events: str, tmp_path: Path
) -> None:
    """Ctrl-C within an import by the main thread left the lock of all imports taken: every other thread hung there."""
    code = """
    import logging, sys, threading, time
    from fscoord import FileStore
    from fscoord._runtime import system as _system
    # Closed while an event comes, watchdog's observer of Linux, which only tests use, logs an error (its inotify.py).
    logging.getLogger("watchdog").addHandler(logging.NullHandler())
    imported = {True: set(), False: set()}
    class Finder:
        def find_spec(self, name, path=None, target=None):
            imported[threading.current_thread() is threading.main_thread()].add(name.partition(".")[0])
    sys.meta_path.insert(0, Finder())
    _system.has_inotify = lambda: sys.argv[3] == "inotify"
    def end_the_wait():
        while "watchdog" not in imported[False]:
            time.sleep(0.001)
        store.set("awaited", "v")
    with FileStore(sys.argv[1], lock=sys.argv[2], timeout=60) as store:
        store.set("k", "v")
        threading.Thread(target=end_the_wait, daemon=True).start()
        store.get("awaited")
    print(sorted(imported[True]))
    """
    assert run(textwrap.dedent(code), str(tmp_path / "store"), lock, events) == "[]\n"


def test_package_imports_without_fcntl_and_file_store_names_the_platform(tmp_path: Path) -> None:
    """This is how Windows looks to fscoord."""
    said = run(
        """
import sys
sys.modules["fcntl"] = None  # from now on, importing it is an ImportError
import pytest

import fscoord
store = fscoord.HashStore()
store.set("k", "v")
assert store.get("k") == b"v"
assert fscoord.open_store("mem:").add("n", 1) == 1
for arguments in [(sys.argv[1],), ()]:
    try:
        fscoord.FileStore(*arguments)
    except fscoord.UnsupportedFilesystemError as error:
        print(error)
    else:
        raise SystemExit("FileStore opened without locks")
""",
        str(tmp_path / "store"),
    )
    assert said.count(sys.platform) == 2
    assert list(tmp_path.iterdir()) == []


def test_command_without_the_extra_names_the_one_to_install() -> None:
    said = run(
        "import sys, runpy; sys.modules['click'] = None; runpy.run_module('fscoord', run_name='__main__')", status=69
    )
    assert "fscoord[cli]" in said
    assert "Traceback" not in said


def test_version_comes_from_one_place() -> None:
    assert metadata.version("fscoord") == fscoord.__version__
    changelog = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\S+)", changelog, re.MULTILINE)[0] == fscoord.__version__


def test_type_checkers_see_that_the_package_is_typed() -> None:
    assert (Path(fscoord.__file__).parent / "py.typed").exists()


def test_lower_environment_pins_the_lowest_versions_that_the_metadata_allow() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    core = project.partition("\ndependencies = [")[2].partition("]")[0]
    cli = project.partition("\ncli = [")[2].partition("]")[0]
    allowed = dict(re.findall(r'"(\w+)>=([\d.]+),<', core + cli))
    assert len(allowed) == 4
    tox = (REPOSITORY / "tox.ini").read_text(encoding="utf-8")
    lower = tox.partition("[testenv:lower]")[2].partition("[testenv:")[0]
    assert dict(re.findall(r"(\w+)==([\d.]+)", lower)) == allowed
