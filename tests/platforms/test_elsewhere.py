"""The package where the names of Linux are hidden, as they are missing on Windows and macOS. No machine here has those.

`elsewhere` hides them in a fresh interpreter and runs a program, or the contract of stores.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from platforms.running import HERE, end, run, start
from support.internals import system

both = pytest.mark.parametrize("platform", ["win32", "darwin"])


@both
def test_module_of_the_package_imports_wherever_its_extra_is_there(platform: str) -> None:
    (line,) = run(platform, "every_module").splitlines()
    assert int(line.split()[0]) > 150, line


@both
def test_recipes_work_on_hash_store_and_tcp_store(platform: str) -> None:
    assert run(platform, "every_recipe") == "used\n"


@both
@pytest.mark.parametrize("store", ["hash", "tcp"])
@pytest.mark.exhaustive
def test_contract_is_kept_by_hash_store_and_tcp_store(platform: str, store: str) -> None:
    """On Windows nothing interrupts a wait for a lock, so Ctrl-C ends a wait of a `HashStore` within a second."""
    assert " passed in " in run(platform, f"contract_{store}")


@pytest.mark.parametrize(("watch", "source"), [("poll", "NoneType"), ("auto", "ObserverSource")])
def test_file_store_of_two_processes_works_with_flock_as_on_macos(watch: str, source: str, tmp_path: Path) -> None:
    ranks = [start("darwin", "file_store", str(tmp_path / "store"), watch, str(rank)) for rank in range(2)]
    assert [end(rank).splitlines()[-1] for rank in ranks] == [source] * 2


def test_file_store_names_the_way_out_where_a_lock_is_missing(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    for platform, wanted in (
        ("win32", ["'win32'", "HashStore", "TCPStore", "EtcdStore"]),
        ("darwin", ['lock="flock"']),
    ):
        said = run(platform, "refused", path)
        assert [word for word in wanted if word not in said] == [], said
    assert list(tmp_path.iterdir()) == []


def test_hidden_names_are_missed_by_a_program_that_needs_them(tmp_path: Path) -> None:
    """Otherwise the tests above would show nothing."""
    program = HERE / "elsewhere.py"
    needs = tmp_path / "needs.py"
    for platform, text in (
        ("win32", "import fcntl"),
        ("win32", "import os; os.uname()"),
        ("win32", "import select; select.poll"),
        ("win32", "import signal; signal.SIGKILL"),
        ("darwin", "import os; os.fdatasync"),
        ("darwin", "import select; select.epoll"),
        ("darwin", "import fcntl; fcntl.F_OFD_SETLK"),
        ("darwin", "open('/proc/self/stat')"),
    ):
        needs.write_text(text, encoding="utf-8")
        done = subprocess.run([sys.executable, program, platform, needs], capture_output=True, text=True, check=False)
        assert done.stderr.splitlines()[-1].startswith(
            ("AttributeError: module", "ModuleNotFoundError", "FileNotFoundError", "ImportError")
        ), (text, done.stderr)


# The parts of `system` that differ


def test_lock_constants_of_another_system_are_not_those_of_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers of macOS define F_OFD_SETLK as well, with a `struct flock` of another layout."""
    assert system.has_ofd_locks()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not system.has_ofd_locks()


class FullSync:
    """The module fcntl of macOS, as far as a sync needs it."""

    F_FULLFSYNC = 51

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def fcntl(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        return 0


def test_sync_reaches_the_disk_itself_on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    """There fsync(2) ends when the data are in the cache of the disk, which a power failure empties."""
    fcntl = FullSync()
    monkeypatch.setattr(system, "fcntl", fcntl)
    system.sync_data(3)
    system.sync_file(4)
    assert fcntl.calls == [(3, 51), (4, 51)]


def test_readiness_without_poll_is_that_of_select(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(select, "poll")
    reader, writer = os.pipe()
    is_readable, is_writable = system.readiness(reader), system.readiness(writer, writing=True)
    assert not is_readable(0)
    assert is_writable(0)
    os.write(writer, b"1")
    assert is_readable(0)
    os.close(reader)
    os.close(writer)
    assert is_readable(0), "closed: the read that follows raises the error"
