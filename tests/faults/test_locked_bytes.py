"""A process that locks bytes of the liveness file that are no session's: others go on without theirs."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.internals import liveness_file, own_session, system

from fscoord import FileStore
from fscoord.inspect import dump

HANG_S = 60
LOCKER = """
import fcntl, struct, sys
with open(sys.argv[1], "rb") as file:
    fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, int(sys.argv[2]), 0, 0))
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store"


@contextmanager
def all_bytes_locked(path: Path, start: int = 0) -> Iterator[int]:
    """Another process, which may only read the file, shares a lock on all of its bytes from `start` on."""
    command = [sys.executable, "-c", LOCKER, f"{path}.alive", str(start)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"locked\n"
        try:
            yield process.pid
        finally:
            process.stdin.close()
            process.wait(HANG_S)


def test_newcomer_goes_on_without_a_byte_and_names_the_locker(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness_file, "LOCKER_S", HANG_S)  # a busy machine has many descriptors to search
    with FileStore(path, timeout=HANG_S) as first:
        first.set("a", "1")
        # An exclusive lock on a byte in use keeps a shared one of all bytes out, so it begins after those.
        with all_bytes_locked(path, 2) as pid, FileStore(path, timeout=HANG_S) as newcomer:
            with caplog.at_level(logging.WARNING, "fscoord"):
                started = time.monotonic()
                newcomer.set("b", "1")
                newcomer.set("b", "2")
            assert time.monotonic() - started < HANG_S
            first.set("c", "1")
            assert newcomer.register() == 2, "no numbers are used up"
            (warning,) = caplog.records
            assert f"{system.hostname()}:{pid} locks 64 or more bytes of the file, from 2 on" in warning.getMessage()
            (member,) = [member for member in first.members() if member.number == 2]
            assert member.alive == "unknown"
    assert [entry.kind for entry in dump(path)].count("session") == 2


def test_bytes_of_others_are_passed_over(path: Path) -> None:
    """Those of processes of an earlier life, say, which hold on to the numbers that they had."""
    with FileStore(path, timeout=HANG_S) as first:
        first.set("a", "1")
        with open(f"{path}.alive", "r+b") as file:
            taken = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 2, own_session.BYTE_TRIES - 1, 0)
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, taken)
            with FileStore(path, timeout=HANG_S) as newcomer:
                newcomer.set("b", "1")
                assert newcomer.register() == 2 + own_session.BYTE_TRIES - 1
                assert {member.number: member.alive for member in first.members()} == {
                    1: "yes",
                    newcomer.register(): "yes",
                }


def test_locker_is_searched_for_a_moment_only(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be a hundred thousand files to look through, while the log is locked."""

    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            self.now += 0.02
            return self.now

    path.write_bytes(b"")
    opened: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(system, "time", Clock())
        patch.setattr(system, "_proc_text", lambda name: opened.append(name) or "")
        assert system.range_lock_holder(path.stat().st_ino, 0.05) is None
    assert len(opened) <= 3
    with path.open("r+b") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 5, 1, 0))
        assert system.range_lock_holder(os.fstat(file.fileno()).st_ino, HANG_S) is None, "a lock of our own"
