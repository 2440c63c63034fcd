"""A file of another host becomes visible. The caches of a mount are played; `tests/mounts` has real ones."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fscoord import aio
from fscoord._runtime import system
from fscoord.errors import StoreTimeoutError
from fscoord.visibility import wait_visible

Wait = Callable[..., None]


def wait_in_a_task(*arguments: Any, **named: Any) -> None:
    asyncio.run(aio.wait_visible(*arguments, **named))


@pytest.fixture(params=[wait_visible, wait_in_a_task], ids=["thread", "task"])
def wait(request: pytest.FixtureRequest) -> Wait:
    found: Wait = request.param
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "directory").mkdir()
    return tmp_path / "directory" / "data"


def refusal(wait: Wait, path: Path, **expected: Any) -> str:
    with pytest.raises(StoreTimeoutError) as caught:
        wait(path, timeout=0, **expected)
    return str(caught.value)


def test_file_with_the_expected_size_and_digest_is_visible(wait: Wait, path: Path) -> None:
    path.write_bytes(b"data")
    digest = hashlib.sha256(b"data").hexdigest()
    wait(path, timeout=0)
    wait(str(path), size=4, sha256=digest.upper(), timeout=0)
    wait(path.parent, timeout=0)


def test_error_says_what_this_host_saw(wait: Wait, path: Path) -> None:
    digest, other = hashlib.sha256(b"data").hexdigest(), "0" * 64
    start = f"timeout: {path} is not visible on {os.uname().nodename} after "
    assert refusal(wait, path).startswith(start)
    assert "1 looks: No such file or directory; check" in refusal(wait, path)
    assert "No such file" in refusal(wait, path / "below")
    path.write_bytes(b"data")
    assert "1 looks: the file has 4 bytes, not 5; check" in refusal(wait, path, size=5, sha256=digest)
    assert f"4 bytes with the SHA-256 digest {digest}, not {other}" in refusal(wait, path, sha256=other)
    assert "Not a directory" in refusal(wait, path / "below")


def test_file_that_comes_later_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter([lambda: None, lambda: path.write_bytes(b"da"), lambda: path.write_bytes(b"data")])
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        next(steps)()

    monkeypatch.setattr(system.time, "sleep", sleep)
    wait_visible(path, size=4, timeout=60)
    assert pauses == [0.01, 0.02, 0.04]


def test_look_at_a_missing_name_opens_the_directories_and_looks_again(
    wait: Wait, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount answers that a name is missing until the directory has been opened."""
    path.write_bytes(b"data")
    known: set[str] = set()
    real = os.open

    def cached(name: Any, *arguments: Any, **named: Any) -> int:
        parent = os.path.dirname(str(name))
        if str(name) in (str(path), str(path.parent)) and parent not in known:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        known.add(str(name))
        return real(name, *arguments, **named)

    monkeypatch.setattr(os, "open", cached)
    wait(path, timeout=0)
    assert {str(path), str(path.parent), str(path.parent.parent)} <= known


def test_look_at_a_link_opens_the_directory_of_its_target(
    wait: Wait, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(b"data")
    link = path.parent.parent / "link"
    link.symlink_to(path)
    known: set[str] = set()
    real = os.open

    def cached(name: Any, *arguments: Any, **named: Any) -> int:
        if str(name) == str(link) and str(path.parent) not in known:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", name)
        known.add(str(name))
        return real(name, *arguments, **named)

    monkeypatch.setattr(os, "open", cached)
    wait(link, size=4, timeout=0)


def test_errors_of_other_kinds_are_raised_at_once(wait: Wait, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(IsADirectoryError):
        wait(path.parent, size=5)
    with pytest.raises(ValueError, match="timeout must be >= 0"):
        wait(path, timeout=-1)
    real = os.open

    def refused(name: Any, *arguments: Any, **named: Any) -> int:
        if str(name) == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(PermissionError):
        wait(path)


def test_descriptors_are_closed_after_each_look(path: Path) -> None:
    path.write_bytes(b"data")
    before = set(os.listdir("/proc/self/fd"))
    wait_visible(path, size=4)
    refusal(wait_visible, path, size=5)
    refusal(wait_visible, path.parent / "missing")
    assert set(os.listdir("/proc/self/fd")) == before
