"""The one hook after a fork: its steps, their order, and the page that describes each lock and thread."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.places import HANG_S

import fscoord
from fscoord._runtime import file_events, forks, system

PACKAGE = Path(fscoord.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "contributors" / "forks.md"
MODULES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))
MAKERS = {"Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Thread", "Timer"}
MAKERS |= {
    "AutoResetEvent",
    "mutex",
    "recursive_mutex",
    "start_thread",
    "try_thread",
    "try_kernel_thread",
    "start_bare_thread",
    "start_new_thread",
    "allocate_lock",
    "ThreadPoolExecutor",
}
FROM = {"threading", "_thread", "system", "futures"}
HOOKS = {"after_fork_in_child", "reset_in_child"}


def nodes_of(module: str) -> Iterator[ast.AST]:
    return ast.walk(ast.parse((PACKAGE / module).read_text()))


def last_part(name: ast.AST) -> str:
    return name.attr if isinstance(name, ast.Attribute) else getattr(name, "id", "")


def steps_of(module: str) -> list[str]:
    """Return the steps that a module of the package says what to do at."""
    calls = [node for node in nodes_of(module) if isinstance(node, ast.Call) and last_part(node.func) in HOOKS]
    return [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)]


def makes_a_lock_or_thread(module: str) -> bool:
    nodes = list(nodes_of(module))
    calls = [node for node in nodes if isinstance(node, ast.Call) and last_part(node.func) == "isinstance"]
    compared = {argument for call in calls for argument in call.args}
    made = [node for node in nodes if isinstance(node, ast.Attribute) and node not in compared]
    return any(node.attr in MAKERS and last_part(node.value) in FROM for node in made)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An empty table of steps, in a process that the hook takes for a child."""
    steps: dict[str, Any] = {}
    monkeypatch.setattr(forks, "_steps", steps)
    monkeypatch.setattr(forks, "fork_marker", [0])
    monkeypatch.setattr(forks, "_life", [1])
    return steps


def test_step_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'nobody' is not a step of fork recovery.*ORDER"):
        forks.after_fork_in_child("nobody", list)


def test_steps_each_have_one_place_and_one_module() -> None:
    found = [step for module in MODULES for step in steps_of(module)]
    assert sorted(found) == sorted(forks.ORDER)
    assert len(set(found)) == len(found)


def test_steps_are_taken_in_their_own_order_and_not_that_of_imports(steps: dict[str, Any]) -> None:
    taken: list[str] = []
    for name in reversed(forks.ORDER):
        forks.after_fork_in_child(name, lambda name=name: taken.append(name))  # type: ignore[misc]
    forks.recover_from_fork()
    assert taken == list(forks.ORDER)
    forks.recover_from_fork()
    assert taken == list(forks.ORDER), "a child takes them once"


def test_child_that_is_interrupted_takes_all_steps_again(steps: dict[str, Any]) -> None:
    taken: list[str] = []

    def interrupted() -> None:
        if len(taken) == 1:
            raise KeyboardInterrupt

    forks.after_fork_in_child(forks.ORDER[0], lambda: taken.append("first"))
    forks.after_fork_in_child(forks.ORDER[1], interrupted)
    with pytest.raises(KeyboardInterrupt):
        forks.recover_from_fork()
    forks.recover_from_fork()
    assert taken == ["first", "first"]


@pytest.mark.once
def test_page_on_forks_names_every_module_with_a_lock_a_thread_or_a_step() -> None:
    text = PAGE.read_text()
    needed = [module for module in MODULES if makes_a_lock_or_thread(module) or steps_of(module)]
    silent = [module for module in needed if f"`{module}`" not in text]
    assert silent == [], "contributors/forks.md must say what a forked child does to the locks and threads of these"


def test_page_on_forks_has_the_steps_in_their_order() -> None:
    rows = [line.split("|")[2].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert [row for row in rows if row in forks.ORDER] == list(forks.ORDER)


def test_page_on_forks_names_no_module_that_is_not_there() -> None:
    named = {part for part in PAGE.read_text().split("`") if part.endswith(".py") and " " not in part}
    assert named <= set(MODULES)
    for module in named:
        try:
            importlib.import_module("fscoord." + module.removesuffix(".py").replace("/", "."))
        except ImportError as error:
            assert str(error.name).startswith("fscoord["), error  # the extra that it needs


def test_threads_that_begin_to_watch_processes_at_once_each_watch_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All have opened a descriptor before any of them goes on."""
    (tmp_path / "file").touch()
    count = 4
    all_open = threading.Barrier(count, timeout=HANG_S)
    open_process = os.pidfd_open

    def open_together(pid: int) -> int:
        fd = open_process(pid)
        all_open.wait()
        return fd

    monkeypatch.setattr(os, "pidfd_open", open_together)
    processes = [subprocess.Popen(["sleep", "100"]) for _ in range(count)]
    events = file_events.Inotify(str(tmp_path / "file"), file_events.LOG_CHANGED)
    before = set(events._descriptors)
    try:
        threads = [threading.Thread(target=events.watch_process, args=(process.pid,)) for process in processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(events.processes.values())) == count
        for number, process in enumerate(processes):
            process.kill()
            process.wait()
            assert events.reap_exited() == 1, number
        assert not events.processes
        assert events._descriptors == before
    finally:
        for process in processes:
            process.kill()
            process.wait()
        events.close()
    assert not system.loose & before
