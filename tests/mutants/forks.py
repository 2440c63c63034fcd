"""Tests run again and again, each time in a fork of a process that has collected them, on code with one change.

So a change costs a fork and the tests up to the first that fails. What tests fork has the change, too; programs that
they start have not.
"""

from __future__ import annotations

import ctypes
import gc
import json
import mmap
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import pytest

MEMORY, FILE_SIZE = 4 << 30, 1 << 30
"""Changed code may ask for any amount; the machine shall survive that."""
PATIENCE_S, PATIENCE = 10.0, 10.0
"""A test hangs that takes so many seconds longer than so many times what it takes without a change."""
LEARNING_S = 600
"""No test of those that are used takes so long, without a change."""
MOST_LINES = 1024
"""More than a module of the package has."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

Say = Callable[[str, object], None]
"""Tell the process that forked ``at`` which test one is, what is ``known`` of it, and what one found in the ``end``."""


class Known(NamedTuple):
    """One test in the run without a change: its time, and the lines of each module that it reaches."""

    seconds: float
    lines: dict[str, list[int]]


class Outcome(NamedTuple):
    """The result of one change: ``failed`` names the test that failed or hung, and is empty if all passed."""

    failed: str
    hung: bool
    seconds: float


# -- in a fork ---------------------------------------------------------------------------------------------------------


def put(code: CodeType, functions: Sequence[FunctionType]) -> None:
    """Replace the code of each of `functions` of one module by that in `code`, the code of the whole module."""
    fresh: dict[tuple[str, int], list[CodeType]] = defaultdict(list)
    waiting = [code]
    while waiting:
        for const in waiting.pop().co_consts:
            if isinstance(const, CodeType):
                fresh[const.co_name, const.co_firstlineno].append(const)
                waiting.append(const)
    for function in functions:
        codes = fresh[function.__code__.co_name, function.__code__.co_firstlineno]
        if len(codes) == 1 and codes[0] != function.__code__:
            function.__code__ = codes[0]


def functions_by_file() -> dict[str, list[FunctionType]]:
    """Return every function that there is, under the path of its source."""
    gc.unfreeze()  # `conftest` has frozen what it collected, and frozen objects are not among `gc.get_objects`
    found: dict[str, list[FunctionType]] = defaultdict(list)
    for each in gc.get_objects():
        if isinstance(each, FunctionType):
            found[each.__code__.co_filename].append(each)
    return found


def run_items(items: Sequence[pytest.Item], say: Say) -> str:
    """Run `items` in this order, each said before it begins; return the name of the first that fails, or ``""``."""
    session = items[0].session
    for item, following in zip(items, [*items[1:], None], strict=True):
        say("at", item.nodeid)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return item.nodeid
    return ""


def learn(items: Sequence[pytest.Item], paths: dict[str, str], say: Say) -> None:
    """Run all `items`, and say what is known of each; one that fails reaches nothing. `paths` gives files' modules."""
    lines, failed = Lines(paths), 0
    for item, following in zip(items, [*items[1:], None], strict=True):
        say("at", item.nodeid)
        lines.take()
        started = time.monotonic()
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        has_passed, failed = item.session.testsfailed == failed, item.session.testsfailed
        say("known", (item.nodeid, Known(time.monotonic() - started, lines.take() if has_passed else {})))


class Lines:
    """Which lines of some files are reached, by sys.monitoring (Python 3.12): told of each once, it costs little.

    The bytes that stand for them are shared with what tests fork.
    """

    def __init__(self, paths: dict[str, str]) -> None:
        self.paths = paths
        self._starts = {path: number * MOST_LINES for number, path in enumerate(paths)}
        self._reached = mmap.mmap(-1, len(paths) * MOST_LINES)
        tool = sys.monitoring.COVERAGE_ID
        sys.monitoring.use_tool_id(tool, "fscoord tests")
        sys.monitoring.register_callback(tool, sys.monitoring.events.LINE, self._note)
        sys.monitoring.set_events(tool, sys.monitoring.events.LINE)

    def _note(self, code: CodeType, line: int) -> Any:
        start = self._starts.get(code.co_filename)
        if start is not None:
            self._reached[start + line] = 1
        return sys.monitoring.DISABLE

    def take(self) -> dict[str, list[int]]:
        """Return what was reached since the last call."""
        reached = {}
        for path, start in self._starts.items():
            found = self._reached[start : start + MOST_LINES]
            if any(found):
                reached[self.paths[path]] = [line for line, seen in enumerate(found) if seen]
        self._reached[:] = bytes(len(self._reached))
        sys.monitoring.restart_events()
        return reached


# -- the process that forks --------------------------------------------------------------------------------------------


class Fork:
    """A process in which `work` runs, one at a time; it says what it is at, and what it returns is JSON."""

    def __init__(self, config: pytest.Config, work: Callable[[Say], object]) -> None:
        self.at, self.answer = "", None
        self.known: dict[str, Known] = {}
        self._directory = tempfile.mkdtemp(prefix="fscoord-mutant-")
        self._reader, writer = os.pipe()
        self._read = b""
        self._pid = os.fork()
        if self._pid == 0:
            _be_a_child(config, work, Path(self._directory), writer)
        os.close(writer)

    def hear(self, patience: float) -> bool:
        """Wait until it says something; False if it has ended, or says nothing for so long."""
        until = time.monotonic() + patience
        while b"\n" not in self._read:
            if not select.select([self._reader], [], [], max(0.0, until - time.monotonic()))[0]:
                return False
            part = os.read(self._reader, 1 << 20)
            if not part:
                return False
            self._read += part
        line, _, self._read = self._read.partition(b"\n")
        what, content = json.loads(line)
        if what == "at":
            self.at = content
        elif what == "known":
            self.known[content[0]] = Known(*content[1])
        else:
            self.answer = content
        return bool(what != "end")

    def end(self) -> None:
        """End the process, and what it or its tests have left behind."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        while orphans := Path("/proc/self/task", str(os.getpid()), "children").read_text().split():
            for orphan in map(int, orphans):
                os.kill(orphan, signal.SIGKILL)
                os.waitpid(orphan, 0)
        os.close(self._reader)
        shutil.rmtree(self._directory, ignore_errors=True)


def adopt_orphans() -> None:
    """Become the parent of what tests leave behind, so that `Fork.end` can end it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def _be_a_child(config: pytest.Config, work: Callable[[Say], object], directory: Path, writer: int) -> None:
    def say(what: str, content: object) -> None:
        line = json.dumps([what, content]).encode() + b"\n"
        while line:
            line = line[os.write(writer, line) :]

    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.close(null)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, resource.RLIM_INFINITY))
        factory: Any = config._tmp_path_factory  # type: ignore[attr-defined]
        factory._given_basetemp, factory._basetemp = directory / "tests", None
        say("end", work(say))
    finally:
        os._exit(0)


def try_change(
    items: Sequence[pytest.Item], known: dict[str, Known], code: CodeType, functions: Sequence[FunctionType]
) -> Outcome:
    """Run `items` with `code` in the place of the module that has made `functions`, up to the first that fails."""

    def work(say: Say) -> str:
        say("at", items[0].nodeid)
        put(code, functions)
        return run_items(items, say)

    started = time.monotonic()
    fork = Fork(items[0].config, work)
    try:
        patience = PATIENCE_S
        while fork.hear(patience):
            patience = PATIENCE_S + PATIENCE * known[fork.at].seconds
    finally:
        fork.end()
    seconds = time.monotonic() - started
    if fork.answer is None:
        return Outcome(fork.at, seconds >= PATIENCE_S, seconds)  # or the process was killed, or ended itself
    return Outcome(fork.answer, hung=False, seconds=seconds)


def learn_all(items: Sequence[pytest.Item], paths: dict[str, str]) -> dict[str, Known]:
    """As `learn`, in a fork, so that nothing of it stays in this process; an end before the end gives what is known."""
    fork = Fork(items[0].config, lambda say: learn(items, paths, say))
    try:
        while fork.hear(LEARNING_S):
            pass
    finally:
        fork.end()
    return fork.known
