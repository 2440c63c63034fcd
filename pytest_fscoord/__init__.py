"""fscoord's plugin for pytest: stores as fixtures, and values that one worker of pytest-xdist makes for all workers.

The plugin is a package of its own, and only its fixtures import `fscoord`. So test runs that use no fixture of it do
not import `fscoord`. ``-p no:fscoord`` turns the plugin off.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fscoord import FileStore, Store
    from fscoord.integrations.pytest import Once, Run

__all__ = ["fscoord_each_store", "fscoord_once", "fscoord_run_store", "fscoord_store"]

RUN = pytest.StashKey["Run"]()
FAILURES = pytest.StashKey[list[str]]()
FAILED = "fscoord_once"
KINDS = ["file", "hash", "prefix"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the configuration option ``fscoord_timeout``."""
    parser.addini("fscoord_timeout", "seconds that operations of fscoord's fixtures wait by default", default="20")


def _timeout(config: pytest.Config) -> float:
    return float(config.getini("fscoord_timeout"))


def _path(request: pytest.FixtureRequest) -> Path:
    """Return the path of the test's store: in `tmp_path`, or in pyfakefs' fake file system if the test uses that."""
    for fake in ("fs", "fs_class", "fs_module", "fs_session"):
        if fake in request.fixturenames:
            request.getfixturevalue(fake)
            return Path("/fscoord.store")
    directory: Path = request.getfixturevalue("tmp_path")
    return directory / "fscoord.store"


@pytest.fixture
def fscoord_store(request: pytest.FixtureRequest) -> Iterator[FileStore]:
    """A `FileStore` in this test's `tmp_path`, or in pyfakefs' fake file system, closed at the end of the test."""
    from fscoord import FileStore

    with FileStore(_path(request), timeout=_timeout(request.config)) as store:
        yield store


@pytest.fixture(params=KINDS)
def fscoord_each_store(request: pytest.FixtureRequest) -> Iterator[Store]:
    """Run the test on each kind of store that needs no server: `FileStore`, `HashStore` and `PrefixStore`."""
    from fscoord import FileStore, HashStore, PrefixStore

    timeout = _timeout(request.config)
    with FileStore(_path(request), timeout=timeout) if request.param == "file" else HashStore(timeout=timeout) as store:
        yield PrefixStore("test", store) if request.param == "prefix" else store


@pytest.fixture(scope="session")
def fscoord_run_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FileStore:
    """One `FileStore` for the whole run, shared by all workers of pytest-xdist on this host."""
    return _run(request, tmp_path_factory).store


@pytest.fixture(scope="session")
def fscoord_once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Once]:
    """Return ``once(name, work, teardown=None)``: one worker does the work, all get the value, and one tears it down.

    `work` returns the value as `str` or `bytes`, and ``once`` returns it as `bytes`. `teardown` is called with the
    value when every worker has run its last test or has died.
    """
    run = _run(request, tmp_path_factory)
    yield run.once
    if not hasattr(request.config, "workerinput"):  # a worker waits for the others in `pytest_sessionfinish`
        run.end()


def _run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _opened(request.config, tmp_path_factory.getbasetemp)


def _opened(config: pytest.Config, directory: Callable[[], Path]) -> Run:
    if RUN not in config.stash:
        from fscoord.integrations.pytest import Run

        workers = getattr(config, "workerinput", {})
        if workers and not config.getoption("basetemp"):
            raise pytest.UsageError("workers of pytest-xdist on other hosts share no directory: run them on this host")
        place = directory().parent if workers else directory()
        config.stash[RUN] = Run(place / "fscoord-run.store", workers.get("workerid", "main"), _timeout(config))
    return config.stash[RUN]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Register this process if it is a worker. xdist starts the tests after all workers have registered."""
    workers = getattr(session.config, "workerinput", None)
    if workers and any("fscoord_once" in getattr(item, "fixturenames", ()) for item in session.items):
        _opened(session.config, lambda: Path(session.config.getoption("basetemp"))).register()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker: run the teardowns that are left. In the main process: fail the run if a teardown has failed.

    This is not a fixture, because other workers may still run tests for a long time.
    """
    config = session.config
    if RUN in config.stash:
        run = config.stash[RUN]
        del config.stash[RUN]
        try:
            run.end()
        except Exception:
            if not hasattr(config, "workeroutput"):
                raise
            config.workeroutput[FAILED] = traceback.format_exc()
        finally:
            run.store.close()
    if config.stash.get(FAILURES, None) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep the report of a failed teardown that a worker of pytest-xdist sends at its end."""
    text = getattr(node, "workeroutput", {}).get(FAILED)
    if text:
        node.config.stash.setdefault(FAILURES, []).append(f"{node.gateway.id}: {text}")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show the teardowns that failed."""
    for text in config.stash.get(FAILURES, []):
        terminalreporter.section("teardown of fscoord_once failed", red=True)
        terminalreporter.write_line(text)
