"""Two hosts that share a directory, and agents on them: see README.md here.

Without `--shared-dirs` the tests run with both sides on one local directory, which proves the tests themselves; those
that need two mounts (`hosts`) or the lab's own commands (`lab`) are deselected then, and pytest says how many.
"""

from __future__ import annotations

import ast
import itertools
import os
import select
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mounts.agents import Agent, Host, hosts as start_hosts

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("mounts", "a directory that two hosts share (tests/mounts)")
    group.addoption("--shared-dirs", metavar="A,B", help="the shared directory, as host a and as host b call it")
    group.addoption("--on-a", default="", metavar="COMMAND", help="what runs a command on host a, e.g. 'ssh node1'")
    group.addoption("--on-b", default="", metavar="COMMAND", help="what runs a command on host b")
    group.addoption("--store-options", default="", metavar="K=V,...", help="given to every FileStore")
    group.addoption("--in-lab", action="store_true", help="link_host and nfs_server are there: run what needs them")


def option(config: pytest.Config, name: str) -> Any:
    return config.getoption(name, default=None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {"hosts": not option(config, "--shared-dirs"), "lab": not option(config, "--in-lab")}
    out = [item for item in items if any(gone and item.get_closest_marker(name) for name, gone in missing.items())]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if item not in set(out)]


def store_options(text: str) -> dict[str, Any]:
    found = {}
    for pair in filter(None, (text or "").split(",")):
        name, _, value = pair.partition("=")
        try:
            found[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            found[name] = value
    return found


class Sides:
    """Host `a`, host `b`, and a directory of this test's own that both see."""

    def __init__(self, a: Host, b: Host, name: str) -> None:
        self.a, self.b, self.name = a, b, name

    def path(self, name: str = "log") -> str:
        """Return where `name` is, relative to the shared directory."""
        return os.path.join(self.name, name)

    def full(self, host: Host, name: str = "log") -> str:
        """Return what `host` calls `name`."""
        return os.path.join(host.directory, self.name, name)

    def agents(self, count: int) -> list[Agent]:
        """Fork `count` agents, on a and b in turn."""
        return [host.fork() for host in itertools.islice(itertools.cycle([self.a, self.b]), count)]

    def opened(self, count: int, name: str = "log", **options: Any) -> list[Agent]:
        """Fork `count` agents that have opened the same store."""
        return [agent.open(self.path(name), **options) for agent in self.agents(count)]

    def look(self, left: float) -> bool:
        """Take in what agents on both hosts said, waiting up to `left` seconds; return whether there was something."""
        ready, _, _ = select.select([self.a, self.b], [], [], left)
        for host in ready:
            host.look(0)
        return bool(ready)


@pytest.fixture(scope="session")
def _hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    shared = option(request.config, "--shared-dirs")
    directories = shared.split(",") if shared else [str(tmp_path_factory.mktemp("shared"))] * 2
    assert len(directories) == 2, "--shared-dirs takes two directories: A,B"
    commands = [shlex.split(option(request.config, name) or "") for name in ("--on-a", "--on-b")]
    timeout = 300 if option(request.config, "--in-lab") else 120  # many processes share the lab's one CPU
    options = {"timeout": timeout} | store_options(option(request.config, "--store-options"))
    with start_hosts(list(zip("ab", commands, directories, strict=True)), options) as started:
        yield started


@pytest.fixture
def sides(_hosts: list[Host], request: pytest.FixtureRequest) -> Iterator[Sides]:
    a, b = _hosts
    directory = a.fork().do("tempfile.mkdtemp", dir=a.directory, prefix="fscoord-")
    yield Sides(a, b, os.path.basename(directory))
    a.end_agents()
    b.end_agents()
    a.fork().do("shutil.rmtree", directory)
    a.end_agents()


@pytest.fixture
def both(sides: Sides) -> tuple[Agent, Agent]:
    """An agent on either host, with the same store open."""
    a, b = sides.opened(2)
    return a, b


@pytest.fixture
def together() -> Callable[..., list[Any]]:
    """Give `together(agents, name, arguments)`: all begin `name`, each with its own; return their results."""

    def run(agents: list[Agent], name: str, arguments: list[list[Any]]) -> list[Any]:
        asked = [agent.begin(name, *given) for agent, given in zip(agents, arguments, strict=True)]
        return [pending.result() for pending in asked]

    return run
